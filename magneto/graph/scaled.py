"""In-place updates scaled by a number that lies in a tensor: `p.addcdiv_(m, v, value=-step_size)` in a graph that computes the step size.

Called for real, PyTorch's own operation runs with the number. Under a dispatch mode the formula is traced: nobody knows the number then.
"""

from __future__ import annotations

import torch


def _traced() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def add_(target: torch.Tensor, other: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """target += number * other"""
    return target.add_(other * number) if _traced() else target.add_(other, alpha=number.item())


def addcmul_(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """target += number * one * two"""
    return target.add_(one * number * two) if _traced() else target.addcmul_(one, two, value=number.item())


def addcdiv_(target: torch.Tensor, one: torch.Tensor, two: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """target += number * one / two"""
    return target.add_(one * number / two) if _traced() else target.addcdiv_(one, two, value=number.item())
