"""Functions that take another way under a dispatch mode than in eager: with the result of eager's way, and its layout.

`max_pool1d` without a gradient has a kernel of its own, which answers contiguously; under a mode it is `max_pool2d_with_indices` of one row more.
`one_hot` on the CPU looks at the classes to raise: that is an operation without a result, which stays (`opinfo.stays`); the rest is arithmetic.
`embedding_bag` of bags of one size on a GPU is a lookup and a sum: loops, which compute sums and gradients in one walk each (its own kernels reach 40% of what memory gives).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magneto.base.flags import config
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


BAGS_ON = "cuda"  # where bags are taken apart


def _embedding_bag(*args: Any, **kwargs: Any) -> Any:
    names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights")
    given: dict[str, Any] = {"mode": "mean", **dict(zip(names, args, strict=False)), **kwargs}
    found: list[Any] = [given.get(name) for name in ("input", "weight", "mode", "per_sample_weights")]
    indices, weight, mode, samples = found
    others = ("offsets", "max_norm", "scale_grad_by_freq", "sparse", "include_last_offset", "padding_idx")
    if (
        len(args) > len(names)
        or any(given.get(name) is not None and given[name] is not False for name in others)
        or (samples is not None and (mode != "sum" or not isinstance(samples, torch.Tensor)))
        or not _takes_apart(indices, weight, samples)
        or mode not in ("sum", "mean")
    ):
        return torch.nn.functional.embedding_bag(*args, **kwargs)
    rows = torch.nn.functional.embedding(indices, weight)
    if samples is not None:
        rows = rows * samples.unsqueeze(-1)
    return rows.sum(1) if mode == "sum" else rows.mean(1)


def _takes_apart(indices: Any, weight: Any, samples: Any) -> bool:
    """Bags of one size in float32 or float64: sums of halves would round products, and the gradient's rows would be written out."""
    if not isinstance(indices, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return False
    if weight.device.type != BAGS_ON or indices.device != weight.device or torch.are_deterministic_algorithms_enabled():
        return False
    if samples is not None and (samples.shape != indices.shape or samples.dtype is not weight.dtype or samples.device != weight.device):
        return False
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (indices, weight, samples) if t is not None):
        return False
    whole = indices.dtype in (torch.int32, torch.int64) and weight.dtype in (torch.float32, torch.float64)
    return whole and indices.ndim == 2 and weight.ndim == 2 and indices.numel() > 0 and config.numerics == "fast"


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
WAYS[torch.nn.functional.embedding_bag] = _embedding_bag
BY_ID = {id(call): way for call, way in WAYS.items()}

__all__ = ["BY_ID", "WAYS"]
