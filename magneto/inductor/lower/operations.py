"""ATen operations with a row of their own.

- addmm whose result only loops read: the bias is added by those loops, not written into the product's memory beforehand.
- clone: the same values in another layout; whether that needs a copy depends on who reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magneto.inductor.lower.box import Box, Stored, View
from magneto.inductor.lower.context import Lowering
from magneto.inductor.lower.elementwise import pointwise
from magneto.inductor.lower.library import emit_call
from magneto.symbolic import ZERO

aten = torch.ops.aten


def lower_addmm(low: Lowering, val: Any, bias: Box, a: Box, b: Box, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """bias + a @ b -> mm and a fused addition, in float32 and float64 (half types round once in the library, twice here)."""
    if not low.only_loops or beta != 1 or alpha != 1 or val.dtype not in (torch.float32, torch.float64):
        return None
    if len(bias.shape) > 2:
        return None
    product = emit_call(low, aten.mm.default, (a, b), {}, val)
    assert isinstance(product, Stored)
    rank = len(bias.shape)
    keep = tuple(bias.shape[d] != 1 for d in range(rank))
    wide = View(bias, lambda i: tuple([x if k else ZERO for x, k in zip(i[2 - rank :], keep, strict=True)]), val.shape, val.strides)
    result = pointwise(low, "add", (product, wide), val.dtype, tuple(val.shape), tuple(val.strides))
    return result


def lower_clone(low: Lowering, val: Any, x: Box, *, memory_format: Any = None) -> Any:
    return View(x, lambda i: i, tuple(val.shape), tuple(val.strides))


ROWS: dict[Any, Callable[..., Any]] = {aten.clone.default: lower_clone, aten.addmm.default: lower_addmm}
