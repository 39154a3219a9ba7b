"""Lowering of `bucketize` and `searchsorted`: a binary search written out, one lookup a step, so that it is a vector of searches that fuses with what is around it."""

from __future__ import annotations

from typing import Any

import torch

from magneto.inductor.loops.ir import Const, Indirect, Value
from magneto.inductor.lower.box import Box, Computed, Index, cost_of
from magneto.inductor.lower.context import UNSUPPORTED_DTYPES, Lowering, dense_strides, merge_origins
from magneto.inductor.lower.elementwise import pointwise
from magneto.inductor.lower.values import convert, make_op
from magneto.symbolic import Const as IntConst
from magneto.symbolic import Expr

aten = torch.ops.aten

MOST = 1 << 16  # boundaries
STEP = 3  # operations that a step counts for, where it is decided whether what is searched is put into memory


def lower_bucketize(low: Lowering, val: Any, x: Box, boundaries: Box, *, out_int32: bool = False, right: bool = False) -> Any:
    return _search(low, val, boundaries, x, right)


def lower_searchsorted(
    low: Lowering,
    val: Any,
    boundaries: Box,
    x: Box,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    return None if sorter is not None else _search(low, val, boundaries, x, right or side == "right")


def _search(low: Lowering, val: Any, boundaries: Box, x: Box, right: bool) -> Any:
    """None: the library's; so for numbers of the loop (whose bag does each index belong to?), which are sorted.

    The library's steps one by one, so that boundaries that are not sorted (NaN among them) give its answer too. Which half is left differs by one element at most: all but the last step have something to look at."""
    sizes = (*x.shape, *boundaries.shape)
    rows = len(boundaries.shape) > 1
    if not all(isinstance(s, int) for s in sizes) or not boundaries.shape or boundaries.dtype is not x.dtype or not x.reads:
        return None
    count = boundaries.shape[-1]
    if not isinstance(count, int) or count > MOST or x.dtype is torch.bool or x.dtype in UNSUPPORTED_DTYPES:
        return None
    wide = boundaries.dtype
    if wide.itemsize < 4 and not low.on_gpu:  # no vector unit gathers these
        wide = torch.float32 if wide.is_floating_point else torch.int32
        boundaries = pointwise(low, "convert_element_type", (boundaries,), wide, boundaries.shape, dense_strides(boundaries.shape))
    low.realise(boundaries.root)

    def fn(at: Index) -> Value:
        wanted = convert(x.load(at), wide)

        def beyond(place: Expr) -> Value:
            """Does the search go on behind this boundary? So it does behind and for NaN."""
            found = boundaries.load((*at[:-1], place) if rows else (place,))
            return make_op("logical_not", (make_op("gt" if right else "ge", (found, wanted), torch.bool),), torch.bool)

        first: Value = _number(0)
        end: Value = _number(count)
        for left in _halves(count):
            middle: Value = _number(count // 2)
            place: Expr = IntConst(count // 2)
            if not isinstance(end, Const):
                middle = make_op("shift_right", (make_op("add", (first, end), torch.int32), _number(1)), torch.int32)
                place = Indirect(make_op("minimum", (middle, _number(count - 1)), torch.int32), count)
            behind = beyond(place)
            if not left:
                behind = make_op("bitwise_and", (behind, make_op("lt", (first, end), torch.bool)), torch.bool)
            first = make_op("where", (behind, make_op("add", (middle, _number(1)), torch.int32), first), torch.int32)
            end = make_op("where", (behind, end, middle), torch.int32)
        return convert(first, val.dtype)

    ops, heavy, origins, reads = STEP * count.bit_length(), 1, low.origins, x.reads | boundaries.reads
    more, costly, others = cost_of(x)
    origins = merge_origins(others, origins)
    return low.computed(Computed(fn, val.shape, val.strides, val.dtype, val.device, reads, origins, ops + more, heavy + costly))


def _number(n: int) -> Const:
    return Const(n, torch.int32)


def _halves(count: int) -> list[int]:
    """Of each step, how many boundaries are left at least."""
    found, least = [], count
    for _ in range(count.bit_length()):
        found.append(least)
        least = (least - 1) // 2
    return found


OP_ROWS: dict[Any, Any] = {aten.bucketize.Tensor: lower_bucketize, aten.searchsorted.Tensor: lower_searchsorted}
