"""In-place updates scaled by a number that lies in a tensor: `p.addcdiv_(m, v, value=-step_size)` in a graph that computes the step size.

Called for real, PyTorch's own operation runs with the number. Under a dispatch mode one operation of ours is seen that does the same (`magneto.scaled_*`): a
backend calls it, or decomposes it. Where autograd records, the formula is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]


def _scaled(name: str, operands: int, keyword: str, formula: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The in-place update `name` of torch with `keyword` in a tensor behind the operands."""
    own = f"scaled_{name}"
    compute = getattr(torch, name)
    update = getattr(torch.Tensor, f"{name}_")
    named = ", ".join(f"Tensor t{k}" for k in range(operands))
    _LIBRARY.define(f"{own}(Tensor self, {named}, Tensor number) -> Tensor")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(own, lambda *args: compute(*args[:-1], **{keyword: args[-1].item()}), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    op = getattr(torch.ops.magneto, own).default

    def call(target: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack() == 0:
            return update(target, *args[:-1], **{keyword: args[-1].item()})  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (target, *args)):
            return target.add_(formula(*args))
        return target.copy_(op(target, *args))

    call.__name__ = call.__qualname__ = f"{name}_"
    call.__module__ = __name__
    return call


add_: Any = _scaled("add", 1, "alpha", lambda other, number: other * number)
addcmul_: Any = _scaled("addcmul", 2, "value", lambda one, two, number: one * number * two)
addcdiv_: Any = _scaled("addcdiv", 2, "value", lambda one, two, number: one * number / two)


def larger(one: Any, other: Any) -> Any:
    """Python's `max` of two numbers, of which one is a tensor: the first, where nan is among them."""
    return torch.where(other > one, other, one)


def smaller(one: Any, other: Any) -> Any:
    """Python's `min`, likewise."""
    return torch.where(other < one, other, one)
