"""Lowering of `_embedding_bag_forward_only` on a GPU: the sums of bags by offsets, a reduction over all indices of which each bag has a span (loops/span.py)."""

from __future__ import annotations

from typing import Any

import torch

from magneto.base.flags import config
from magneto.inductor.loops.ir import Const, IndexValue, Masked, Op, Reduction, Value, index_symbols, reduce_symbols
from magneto.inductor.loops.span import within_span
from magneto.inductor.lower.box import Box, Stored
from magneto.inductor.lower.context import Lowering, point_count
from magneto.inductor.lower.indexing import FEW, position_of
from magneto.inductor.lower.reductions import accumulate_dtype
from magneto.inductor.lower.values import convert
from magneto.symbolic import Expr, add, compare

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def lower_bags(
    low: Lowering, val: Any, weight: Box, indices: Box, offsets: Box, scale: bool = False, mode: int = 0, sparse: bool = False,
    samples: Box | None = None, last: bool = False, padding: int = -1,
) -> Any:  # fmt: skip
    """Sums alone, where nobody asks for anything else; None: the library's."""
    sizes = (*val[0].shape, *weight.shape, *indices.shape)
    known = all(isinstance(s, int) and s > 0 for s in sizes) and len(indices.shape) == len(offsets.shape) == 1
    if not low.on_gpu or low.wanted != {0} or mode != 0 or not known or val[0].dtype not in FLOATS or config.numerics != "fast":
        return None
    (bags, width), (count,), acc = val[0].shape, indices.shape, accumulate_dtype(val[0].dtype)
    if FEW * count * width > point_count(weight.root.shape):
        low.realise(weight.root)  # looked up elements are read, not computed anew
    (bag, along), (walked,) = index_symbols((bags, width)), reduce_symbols((count,))
    which = indices.load((walked,))
    value = convert(weight.load((position_of(indices, (walked,), weight.shape[0]), along)), acc)
    if samples is not None:
        value = Op("mul", (value, convert(samples.load((walked,)), acc)), acc)
    zero = Const(0.0, acc)
    if padding >= 0:
        value = Masked(Op("ne", (which, Const(padding, which.dtype)), torch.bool), value, zero)
    if bags > 1:
        value = Masked(within_span(walked, *_span(offsets, bag, bags, count)), value, zero)
    buffer = low.new_buffer(val[0].shape, val[0].strides, val[0].dtype, val[0].device)
    low.nodes.append(Reduction("sum", (buffer,), (count,), value, acc, low.origins))
    return Stored(buffer), None, None, None


def _span(offsets: Box, bag: Expr, bags: int, count: Any) -> tuple[Value, Value]:
    """As the library's kernels have it: the first bag begins at 0 and the last one ends behind the last index, whatever their offsets say."""
    first, end = Const(0, offsets.dtype), Const(count, offsets.dtype)
    begins = Masked(IndexValue(compare("ne", bag, 0), torch.bool), offsets.load((bag,)), first)
    return begins, Masked(IndexValue(compare("lt", bag, bags - 1), torch.bool), offsets.load((add(1, 0, bag),)), end)


OP_ROWS: dict[Any, Any] = {aten._embedding_bag_forward_only.default: lower_bags}
