"""Products with a weight that seldom changes: the library's own layout of it is made once, not in each product.

    mm(a, w)      becomes      linear(a, packed)      with packed = reorder(w), a step that runs when the weight has changed (schedule/prepared.py)

Float32 goes to MKL's packed product, bfloat16 to oneDNN's linear layer. Done where it was measured to pay: a weight that is worth packing, and rows few enough
for packing to be a part of the time. It pays only where changes are noticed without reading the weight (csrc/pages.c): reading it costs as much as packing it.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch

from magneto import _C
from magneto.base.varying import any_size
from magneto.graph.meta import TensorMeta
from magneto.inductor.lower.box import Box, Stored, View
from magneto.inductor.lower.context import Lowering
from magneto.inductor.lower.library import emit_call

ROWS = {torch.float32: (4, 256), torch.bfloat16: (2, 2048)}
"""Fewest and most rows of the other factor. One thread: float32 1.4 to 1.6 times as fast at 16 rows, 1.09 to 1.15 at 256, 1.02 to 1.07 at 512 and 1.00 to 1.07 at
800, where the copy of the weight costs more than it gains; a single row is a matter of memory."""
BUDGET = 64 << 20  # bytes of weights that one graph has packed copies of
SMALLEST = 64  # of the weight's sizes
WORTH = 1 << 17  # bytes of the weight, at least: smaller ones are not watched by their pages (csrc/pages.h)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Does this torch offer packed products of that type, and this system a cheap look at the weight?"""
    if _C.pages_watched() < 0 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.float32:
        return hasattr(torch.ops.mkl, "_mkl_linear") and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    built = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return built and dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_product(
    low: Lowering, val: Any, a: Box, b: Box, bias: Box | None = None, activation: tuple[Any, ...] = ("none", (), "")
) -> Stored | None:
    """a @ b (+ bias) with `b` packed, and then the activation (of bfloat16 only); None where that is not worth while."""
    dtype = val.dtype
    if (
        dtype not in ROWS
        or any(box.dtype is not dtype for box in (a, b))
        or not b.reads
        or not b.reads <= low.steady
        or a.reads <= low.steady
    ):
        return None
    (rows, inner), columns = a.shape, b.shape[1]
    if not all(isinstance(n, int) for n in (rows, inner, columns)) or val.device.type != "cpu" or not packs(dtype):
        return None
    fewest, most = ROWS[dtype]
    if any_size():  # packed for so many rows
        return None
    if not fewest <= rows <= most or min(inner, columns) < SMALLEST or inner * columns * dtype.itemsize < WORTH:  # type: ignore[operator,type-var]
        return None
    weight = View(b, lambda i: (i[1], i[0]), (columns, inner), b.strides[::-1])
    packed = _packed(low, weight, rows)
    if packed is None:
        return None
    if dtype is torch.float32:
        made = emit_call(low, torch.ops.mkl._mkl_linear.default, (a, packed, weight, bias, rows), {}, val)
    else:
        made = emit_call(low, torch.ops.mkldnn._linear_pointwise.default, (a, packed, bias, *activation), {}, val)
    assert isinstance(made, Stored)
    return made


def _packed(low: Lowering, weight: View, rows: Any) -> Any:
    """The weight in the library's layout; once for all products of so many rows. None where the graph has packed as many as it may."""
    key = (low.strided(weight), rows)
    if key[0] is None or key not in low.packed:
        size = int(prod(weight.shape)) * weight.dtype.itemsize  # type: ignore[arg-type]
        if low.packed_bytes + size > BUDGET:
            return None
        low.packed_bytes += size
        op: Any = torch.ops.mkl._mkl_reorder_linear_weight if weight.dtype is torch.float32 else torch.ops.mkldnn._reorder_linear_weight
        like = TensorMeta.contiguous(weight.shape, weight.dtype)  # type: ignore[arg-type]
        low.packed[key] = emit_call(low, op.default, (weight, rows), {}, like)
    return low.packed[key]


def as_vector(bias: Box, val: Any) -> bool:
    """Is it a bias as linear layers have it: one number per column, of the result's type?"""
    return len(bias.shape) == 1 and bias.shape[0] == val.shape[1] and bias.dtype is val.dtype and bias.strides == (1,)


OPAQUE = frozenset(
    op.default
    for namespace, name in ((torch.ops.mkl, "_mkl_reorder_linear_weight"), (torch.ops.mkldnn, "_reorder_linear_weight"))
    if (op := getattr(namespace, name, None)) is not None
)
"""Operations whose result has a layout that only the library knows."""
