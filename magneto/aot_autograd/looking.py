"""Operations whose gradient PyTorch computes after a look at the data: while it is traced there is none, and it would take another formula, with other bits.

`prod`: the gradient depends on how many zeros there are. In a traced graph it is one library call, of PyTorch's own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from magneto.aot_autograd.refusal import Refusal
from magneto.graph.ways import WAYS

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("prod_backward(Tensor gradient, Tensor x, Tensor result, int? dim, bool keepdim, ScalarType? dtype) -> Tensor")  # type: ignore[no-untyped-call]


def _prod(x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)


def _gradient(gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None, keepdim: bool, dtype: Any) -> torch.Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_prod(leaf, dim, keepdim, dtype=dtype), leaf, gradient)[0]


_LIBRARY.impl("prod_backward", _gradient, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("prod_backward", lambda gradient, x, *_: torch.empty_like(x), "Meta")  # type: ignore[no-untyped-call]


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        result = _prod(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.options = dim, keepdim, dtype
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.magneto.prod_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None


def prod(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.prod` with one operation as its backward."""
    try:
        dim, keepdim, dtype = _options(*args, **kwargs)
    except TypeError:  # another form, or none: PyTorch says which
        return torch.prod(x, *args, **kwargs)
    recorded = torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad
    integers = dtype is not None and not dtype.is_floating_point and not dtype.is_complex  # PyTorch refuses
    if not recorded or integers or torch.is_autocast_enabled(x.device.type) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return torch.prod(x, *args, **kwargs)
    return _Prod.apply(x, dim, keepdim, dtype)  # type: ignore[no-untyped-call]


def _options(dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> tuple[int | None, bool, Any]:
    if (dim is not None and type(dim) is not int) or type(keepdim) is not bool:
        raise TypeError
    return dim, keepdim, dtype


def _from_its_own_place(call: Callable[..., Any]) -> Callable[..., Any]:
    """`as_strided` with a place in the storage: where an input begins in its own differs from call to call, and nobody asks."""

    def called(*args: Any, **kwargs: Any) -> Any:
        place = args[3] if len(args) > 3 else kwargs.get("storage_offset")
        if place is not None and args and isinstance(args[0], torch.Tensor):
            mode: Any = _get_current_dispatch_mode()
            storage = mode.storages.find(args[0])
            if storage is not None and storage.root is not None and storage.root.input_index >= 0:
                raise Refusal("as_strided from a place in the storage of an input")
        return call(*args, **kwargs)

    return called


LOOKING: dict[Any, Callable[..., Any]] = {
    torch.prod: prod,
    "prod": prod,
    torch.ops.aten.prod.default: prod,
    torch.ops.aten.prod.dim_int: prod,
    **{call: _from_its_own_place(call) for call in (torch.as_strided, torch.as_strided_, torch.ops.aten.as_strided.default)},
    "as_strided": _from_its_own_place(torch.Tensor.as_strided),
    "as_strided_": _from_its_own_place(torch.Tensor.as_strided_),
    **WAYS,
}
"""By what a node of a captured graph calls: functions, and names of methods."""
