"""Results whose backward has run already: they require grad, and another backward raises what PyTorch raises."""

from __future__ import annotations

from typing import Any

import torch

_MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed). Saved intermediate values of the graph "
    "are freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or if you need to access "
    "saved tensors after calling backward."
)


class _Freed(torch.autograd.Function):
    """History of a result of which nothing is kept."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise RuntimeError(_MESSAGE)


_ANCHOR = torch.zeros((), requires_grad=True)


def spent(result: torch.Tensor) -> torch.Tensor:
    """`result` as a tensor that autograd computed and whose graph is freed. A view that autograd refuses to write (made without gradients, or as one of several) loses its base."""
    autograd: Any = torch._C._autograd
    if result._is_view() and autograd._get_creation_meta(result) != autograd.CreationMeta.DEFAULT:
        result = result.detach()
    with torch.enable_grad():
        return _Freed.apply(result, _ANCHOR)  # type: ignore[no-any-return, no-untyped-call]
