"""Memory of an input that nobody but the plan holds: `claim` hands it to the output that a kernel writes where it reads that input for the last time.

A backward takes what was kept for it out of a list (`Plan.consume`), and mostly holds it alone then. Whether it does is asked in each call: gradients may be asked for a second time,
the tensor may be a recording's, hooks may have kept it.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from magneto import _C

WORTH = 1 << 20  # bytes of an input, at least


def claim(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or one like it in memory of its own."""
    if sys.getrefcount(t) <= _references() and _owns(t):
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _owns(t: torch.Tensor) -> bool:
    """Is it no tensor of autograd's, and has neither its implementation nor its storage another user?"""
    if t.requires_grad or t._is_view() or t._use_count() != 1:  # type: ignore[attr-defined]
        return False
    storage = t.untyped_storage()
    return storage.nbytes() == t.nbytes and torch._C._storage_Use_Count(storage._cdata) <= _users()  # type: ignore[attr-defined]


def available() -> bool:
    """Can this torch tell?"""
    return hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")


@cache
def _references() -> int:
    """References to an input that only a plan holds, as `claim` counts them."""
    seen: list[int] = []

    def count(t: Any) -> None:
        seen.append(sys.getrefcount(t))

    _C.Plan((("CALL", -1, count, (0,), ()),), 1, 1, ()).consume([torch.empty(1)])
    return seen[0]


@cache
def _users() -> int:
    """Users of the storage of a tensor of its own, the object that is asked included."""
    return int(torch._C._storage_Use_Count(torch.empty(1).untyped_storage()._cdata))  # type: ignore[attr-defined]
