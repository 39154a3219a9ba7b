"""Lowering of lookups. An index that is a loop expression of known bounds (iota and what is computed from it) becomes part of the
address. An index read from memory is an `Indirect`, whose bounds the kernel checks; where the values are not put to use in a loop, the
library does the lookup (and checks the bounds too)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magneto.inductor.loops.ir import Const, IndexValue, Indirect, Size, Value, index_symbols
from magneto.inductor.lower.box import Box, Computed, Index, View, cost_of
from magneto.inductor.lower.context import Lowering, merge_origins, point_count
from magneto.inductor.lower.library import emit_call
from magneto.symbolic import Const as IntConst
from magneto.symbolic import Expr, to_expr, within

aten = torch.ops.aten

FEW = 8  # a lookup of so few of a tensor's elements computes them, rather than putting the tensor into memory (the loss: one logarithm of softmax a row)


def known_index(value: Value, size: Size) -> Expr | None:
    """The index as an expression that is proved to lie in [0, size)."""
    if isinstance(value, Const) and isinstance(value.value, int):
        expr: Expr = IntConst(int(value.value))
    elif isinstance(value, IndexValue) and value.dtype in (torch.int64, torch.int32):
        expr = value.expr
    else:
        return None
    return expr if within(expr, to_expr(size)) else None


def position_of(index: Box, at: Index, size: Size) -> Expr:
    """The index computed by the box `index`, as a place in a dimension of that size."""
    value = index.load(at)
    known = known_index(value, size)
    return Indirect(value, size) if known is None else known


def _in_loop(low: Lowering, index: Box, size: Size) -> bool:
    """Is the lookup worth a place in a loop? Always where its index is computed there; otherwise where loops read the result."""
    if not index.reads:
        return low.only_loops or known_index(index.load(index_symbols(index.shape)), size) is not None
    return low.only_loops and index.dtype in (torch.int64, torch.int32)


def lower_index_select(low: Lowering, val: Any, x: Box, dim: int, index: Box) -> Any:
    """x with dimension `dim` replaced by the dimensions of `index` (a vector, or for embeddings of any rank)."""
    dim = dim % len(x.shape)
    rank = len(index.shape)
    size = x.shape[dim]
    if not _in_loop(low, index, size):
        if rank == 1:
            return emit_call(low, aten.index_select.default, (x, dim, index), {}, val)
        if dim == 0 and len(x.shape) == 2:
            return emit_call(low, aten.embedding.default, (x, index), {}, val)
        return None

    def index_map(i: Index) -> Index:
        return (*i[:dim], position_of(index, i[dim : dim + rank], size), *i[dim + rank :])

    return _looked_up(low, val, x, index, index_map)


def lower_gather(low: Lowering, val: Any, x: Box, dim: int, index: Box) -> Any:
    """result[i] = x[i with i[dim] replaced by index[i]]"""
    dim = dim % len(x.shape) if x.shape else 0
    if not x.shape or not _in_loop(low, index, x.shape[dim]):
        return emit_call(low, aten.gather.default, (x, dim, index), {}, val)
    size = x.shape[dim]

    def index_map(i: Index) -> Index:
        return (*i[:dim], position_of(index, i, size), *i[dim + 1 :])

    return _looked_up(low, val, x, index, index_map)


def _looked_up(low: Lowering, val: Any, x: Box, index: Box, index_map: Any) -> Box:
    if not index.reads:
        return View(x, index_map, tuple(val.shape), tuple(val.strides))
    if FEW * point_count(val.shape) > point_count(x.root.shape):
        low.realise(x.root)  # looked up elements are read, not computed anew
    (ops, heavy, origins), (more_ops, more_heavy, more) = cost_of(index), cost_of(x)
    ops, heavy = ops + more_ops, heavy + more_heavy
    reads = x.reads | index.reads
    origins = merge_origins(merge_origins(more, origins), low.origins)

    def fn(i: Index) -> Value:
        return x.load(index_map(i))

    return low.computed(Computed(fn, val.shape, val.strides, x.dtype, x.device, reads, origins, ops + 1, heavy))


def lower_embedding(
    low: Lowering, val: Any, weight: Box, index: Box, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Forward, an embedding is a lookup; the other arguments concern gradients."""
    return lower_index_select(low, val, weight, 0, index)


ROWS: dict[str, Callable[..., Any]] = {"index_select": lower_index_select, "gather": lower_gather}

OP_ROWS: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: lower_embedding,
    aten.index_select.default: lower_index_select,
}
