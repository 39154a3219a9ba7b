"""Functions that take another way under a dispatch mode than in eager: with the result of eager's way, and its layout.

`max_pool1d` without a gradient has a kernel of its own, which answers contiguously; under a mode it is `max_pool2d_with_indices` of one row more.
`one_hot` on the CPU looks at the classes to raise: that is an operation without a result, which stays (`opinfo.stays`); the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magneto.graph.layout import contiguous_strides

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("check_classes(Tensor classes, int count) -> ()")  # type: ignore[no-untyped-call]


def _check_classes(classes: torch.Tensor, count: int) -> None:
    if classes.numel():
        low, high = torch.aminmax(classes)
        if low >= 0 and high < count:
            return
    torch.nn.functional.one_hot(classes, count)


_LIBRARY.impl("check_classes", _check_classes, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("check_classes", lambda classes, count: None, "Meta")  # type: ignore[no-untyped-call]


def _one_hot(*args: Any, **kwargs: Any) -> Any:
    count = args[1] if len(args) == 2 else kwargs.get("num_classes", -1)
    x = args[0] if args and len(args) + len(kwargs) == 2 else None
    if (
        not isinstance(x, torch.Tensor)
        or type(count) is not int
        or count == -1
        or x.dtype is not torch.int64
        or x.device.type != "cpu"
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
    ):
        return torch.nn.functional.one_hot(*args, **kwargs)
    if x.numel() == 0:
        if count <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return torch.zeros((*x.shape, count), dtype=torch.int64)
    torch.ops.magneto.check_classes(x, count)
    if x.stride() != contiguous_strides(x.shape):
        x = x.clone(memory_format=torch.contiguous_format)
    return (x.unsqueeze(-1) == torch.arange(max(count, 0), device=x.device)).long()


def _contiguous_unless_recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not isinstance(result, torch.Tensor) or not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return result
        if (x.requires_grad and torch.is_grad_enabled()) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return result
        return result.contiguous()

    return called


WAYS: dict[Callable[..., Any], Callable[..., Any]] = {
    call: _contiguous_unless_recorded(call)
    for call in (torch.max_pool1d, torch.nn.functional.max_pool1d, torch.ops.aten.max_pool1d.default)
}
WAYS.update(dict.fromkeys((torch.nn.functional.one_hot, torch.ops.aten.one_hot.default), _one_hot))
BY_ID = {id(call): way for call, way in WAYS.items()}

__all__ = ["BY_ID", "WAYS"]
