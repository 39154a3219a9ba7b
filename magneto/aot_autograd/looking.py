"""Operations whose gradient PyTorch computes after a look at the data: while it is traced there is none, and it would take another formula, with other bits.

`prod` and `cumprod`: the gradient depends on how many zeros there are. In a traced graph it is one library call, of PyTorch's own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from magneto.aot_autograd.refusal import Refusal
from magneto.graph.ways import WAYS, first_derivative

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("looking_backward(Tensor gradient, str name, Tensor x, Tensor result, int? dim, bool keepdim, ScalarType? dtype) -> Tensor")  # type: ignore[no-untyped-call]


def _product(name: str, x: torch.Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    if name == "cumprod":
        return torch.cumprod(x, dim, dtype=dtype)  # type: ignore[arg-type]
    return torch.prod(x, dtype=dtype) if dim is None else torch.prod(x, dim, keepdim, dtype=dtype)


def _gradient(gradient: torch.Tensor, name: str, x: torch.Tensor, result: torch.Tensor, *options: Any) -> torch.Tensor:
    if name == "cumprod":
        return torch.ops.aten.cumprod_backward.default(gradient.to(x.dtype), x, options[0], result)
    if (
        result.dtype is x.dtype and x.is_floating_point() and x.ndim and x.numel() and x.abs().min() > 0
    ):  # as PyTorch, but the product is there
        shape = result.shape if options[0] is None or options[1] else result.unsqueeze(options[0]).shape
        return result.reshape(shape).div(x).mul_(gradient.reshape(shape))
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_product(name, leaf, *options), leaf, gradient)[0]


_LIBRARY.impl("looking_backward", _gradient, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("looking_backward", lambda gradient, name, x, *_: x.new_empty(x.shape) if name == "cumprod" else torch.empty_like(x), "Meta")  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, *options: Any) -> torch.Tensor:
        result = _product(name, x, *options)
        ctx.save_for_backward(x, result)
        ctx.options = options
        ctx.name = name
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        first_derivative(ctx.name)
        return torch.ops.magneto.looking_backward(gradient, ctx.name, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _looking(name: str) -> Callable[..., Any]:
    """The function of torch with one operation as its backward."""
    plain, options_of = getattr(torch, name), _OPTIONS[name]

    def called(x: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            options = dim, keepdim, dtype = options_of(*args, **kwargs)
        except TypeError:  # another form, or none: PyTorch says which
            return plain(x, *args, **kwargs)
        recorded = torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad
        integers = dtype is not None and not dtype.is_floating_point and not dtype.is_complex  # PyTorch refuses
        other = integers or type(dim) not in (int, NoneType) or type(keepdim) is not bool
        if not recorded or other or torch.is_autocast_enabled(x.device.type) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return plain(x, *args, **kwargs)
        return _Product.apply(x, name, *options)  # type: ignore[no-untyped-call]

    return called


_OPTIONS: dict[str, Callable[..., tuple[Any, Any, Any]]] = {
    "prod": lambda dim=None, keepdim=False, *, dtype=None: (dim, keepdim, dtype),
    "cumprod": lambda dim, *, dtype=None: (dim, False, dtype),
}
_prod, _cumprod = map(_looking, _OPTIONS)


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
    **dict.fromkeys((torch.prod, "prod", torch.ops.aten.prod.default, torch.ops.aten.prod.dim_int), _prod),
    **dict.fromkeys((torch.cumprod, "cumprod", torch.ops.aten.cumprod.default), _cumprod),
    **{call: _from_its_own_place(call) for call in (torch.as_strided, torch.as_strided_, torch.ops.aten.as_strided.default)},
    "as_strided": _from_its_own_place(torch.Tensor.as_strided),
    "as_strided_": _from_its_own_place(torch.Tensor.as_strided_),
    **WAYS,
    **{call.__name__: way for call, way in WAYS.items() if getattr(torch.Tensor, getattr(call, "__name__", ""), None) is call},
}
"""By what a node of a captured graph calls: functions, and names of methods."""
