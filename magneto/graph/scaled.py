"""Operations with a number that lies in a tensor: `p.addcdiv_(m, v, value=-step_size)` in a graph that computes the step size, `x.add(y, alpha=a)` with one that changes.

Called for real, PyTorch's own operation runs with the number. Under a dispatch mode one operation of ours is seen that does the same (`magneto.scaled_*`): a
backend calls it, or decomposes it. Where autograd records, the formula is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]


Operation = Callable[..., torch.Tensor]


def _scaled(name: str, operands: int, run: Callable[..., Any], formula: Operation) -> tuple[Operation, Operation]:
    """`name` of torch with a number behind `operands` tensors, and the in-place one. `run(operation, *tensors, number)` calls one of torch's."""
    own = f"scaled_{name}"
    plain, update = getattr(torch, name), getattr(torch.Tensor, f"{name}_")
    named = ", ".join(f"Tensor t{k}" for k in range(operands))
    _LIBRARY.define(f"{own}({named}, Tensor number) -> Tensor")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(own, lambda *args: run(plain, *args[:-1], args[-1].item()), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    op = getattr(torch.ops.magneto, own).default

    def traced(*args: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in args):
            *tensors, number = args
            like = tensors[0].dtype
            return formula(*tensors, number.to(like) if like in (torch.float32, torch.float64) else number)
        return op(*args)  # type: ignore[no-any-return]

    def call(*args: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack() == 0:
            return run(plain, *args[:-1], args[-1].item())  # type: ignore[no-any-return]
        return traced(*args)

    def call_(target: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack() == 0:
            return run(update, target, *args[:-1], args[-1].item())  # type: ignore[no-any-return]
        return target.copy_(traced(target, *args))

    for fn, label in ((call, name), (call_, f"{name}_")):
        fn.__name__ = fn.__qualname__ = label
        fn.__module__ = __name__
    return call, call_


def _with(keyword: str) -> Callable[..., Any]:
    return lambda operation, *args: operation(*args[:-1], **{keyword: args[-1]})


add, add_ = _scaled("add", 2, _with("alpha"), lambda x, other, number: x + other * number)
addcmul, addcmul_ = _scaled("addcmul", 3, _with("value"), lambda x, one, two, number: x + one * number * two)
addcdiv, addcdiv_ = _scaled("addcdiv", 3, _with("value"), lambda x, one, two, number: x + one * number / two)
power, power_ = _scaled("pow", 1, lambda operation, *args: operation(*args), torch.pow)
power.__name__ = power.__qualname__ = "power"
power_.__name__ = power_.__qualname__ = "power_"


def larger(one: Any, other: Any) -> Any:
    """Python's `max` of two numbers, of which one is a tensor: the first, where nan is among them."""
    return torch.where(other > one, other, one)


def smaller(one: Any, other: Any) -> Any:
    """Python's `min`, likewise."""
    return torch.where(other < one, other, one)
