"""Lowering of lookups. An index that is a loop expression of known bounds (iota and what is computed from it) becomes part of the
address. An index read from memory is an `Indirect`, whose bounds the kernel checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.base.dataclass import dataclass
from magneto.inductor.loops.ir import Const, IndexValue, Indirect, Load, Op, Size, Value, index_symbols, reach, walk_values
from magneto.inductor.lower.box import Box, Computed, Index, View, cost_of
from magneto.inductor.lower.context import Lowering, is_place, merge_origins, point_count
from magneto.inductor.lower.library import emit_call
from magneto.inductor.lower.values import make_op
from magneto.symbolic import ZERO, Expr, to_expr, within
from magneto.symbolic import Const as IntConst

aten = torch.ops.aten

SEEN_AGAIN = 4  # times, at most, that each element is read where it is looked up again rather than copied
GATHERED = 4  # operations that an element costs whose neighbours lie elsewhere
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
    return _position(index.load(at), size)


def _position(value: Value, size: Size) -> Expr:
    known = known_index(value, size)
    return Indirect(value, size) if known is None else known


def _in_loop(low: Lowering, index: Box, size: Size) -> bool:
    """Is the lookup worth a place in a loop? Where its index is computed alone, and is no place that is known, only if loops read the result.
    Nothing can be read of an empty dimension: the library says so."""
    if size == 0:
        return False
    if not index.reads:
        return low.only_loops or known_index(index.load(index_symbols(index.shape)), size) is not None
    return index.dtype in (torch.int64, torch.int32)


def lower_index_select(low: Lowering, val: Any, x: Box, dim: int, index: Box) -> Any:
    """x with dimension `dim` replaced by the dimensions of `index` (a vector, or for embeddings of any rank)."""
    if not x.shape:
        return emit_call(low, aten.index_select.default, (x, dim, index), {}, val)
    dim = dim % len(x.shape)
    rank = len(index.shape)
    size = x.shape[dim]

    def index_map(i: Index) -> Index:
        return (*i[:dim], position_of(index, i[dim : dim + rank], size), *i[dim + rank :])

    if not _in_loop(low, index, size) or _unseen(low, val, x, index_map):
        if rank == 1:
            return emit_call(low, aten.index_select.default, (x, dim, index), {}, val)
        if dim == 0 and len(x.shape) == 2:
            return emit_call(low, aten.embedding.default, (x, index), {}, val)
        return None
    return _looked_up(low, val, x, (index,), index_map)


def lower_gather(low: Lowering, val: Any, x: Box, dim: int, index: Box) -> Any:
    """result[i] = x[i with i[dim] replaced by index[i]]"""
    dim = dim % len(x.shape) if x.shape else 0
    if not x.shape or not _in_loop(low, index, x.shape[dim]):
        return emit_call(low, aten.gather.default, (x, dim, index), {}, val)
    size = x.shape[dim]

    def index_map(i: Index) -> Index:
        return (*i[:dim], position_of(index, i, size), *i[dim + 1 :])

    if _unseen(low, val, x, index_map):
        return emit_call(low, aten.gather.default, (x, dim, index), {}, val)
    return _looked_up(low, val, x, (index,), index_map)


def _unseen(low: Lowering, val: Any, x: Box, index_map: Callable[[Index], Index]) -> bool:
    """Are all elements along a dimension that is looked up the same one, so that nothing would depend on the index, nor check it?"""
    if low.on_gpu:
        return False
    places = index_map(index_symbols(val.shape))
    wanted = {s for place in places for s in place.free if isinstance(s, Indirect)}
    seen = {
        s
        for v in walk_values(x.load(places))
        for s in (v.index if isinstance(v, Load) else v.expr if isinstance(v, IndexValue) else ZERO).free
    }
    return not wanted <= seen


def _looked_up(low: Lowering, val: Any, x: Box, indices: Sequence[Box], index_map: Callable[[Index], Index]) -> Box:
    for index in indices:
        root, reused = index.root, 2 * point_count(index.root.shape) <= point_count(val.shape)
        if isinstance(root, Computed) and root.heavy and not root.reads and reused and not low.on_gpu and not is_place(index):
            low.realise(root)  # a table made with logarithms (relative positions): once, not for each row and in each walk
    if not any(index.reads for index in indices):
        if isinstance(x.root, Computed) and x.root.heavy and x.reads and 2 * point_count(x.shape) <= point_count(val.shape):
            low.realise(x.root)  # its work would be repeated in each window
        return View(x, index_map, tuple(val.shape), tuple(val.strides))
    made_of_indices = isinstance(x.root, Computed) and not x.reads and not x.root.heavy
    if FEW * point_count(val.shape) > point_count(x.root.shape) and not made_of_indices and not _is_a_lookup(low, val, x):
        low.realise(x.root)  # looked up elements are read, not computed anew
    (ops, heavy, origins), reads = cost_of(x), x.reads
    for index in indices:
        more_ops, more_heavy, more = cost_of(index)
        ops, heavy, origins, reads = ops + more_ops, heavy + more_heavy, merge_origins(origins, more), reads | index.reads

    def fn(i: Index) -> Value:
        return x.load(index_map(i))

    origins, ops = merge_origins(origins, low.origins), ops + (GATHERED if _one_by_one(low, val, index_map) else 1)
    return low.computed(Computed(fn, val.shape, val.strides, x.dtype, x.device, reads, origins, ops, heavy))


def _one_by_one(low: Lowering, val: Any, index_map: Callable[[Index], Index]) -> bool:
    """On a CPU, are neighbours in memory looked up at places of their own? In a second walk that is more work than reading them where the first one has kept them."""
    at = index_symbols(val.shape)
    beside = {symbol for symbol, step in zip(at, val.strides, strict=True) if step == 1}
    places = (s for place in index_map(at) for s in place.free if isinstance(s, Indirect))
    return not low.on_gpu and any(not beside.isdisjoint(reach(s)) for s in places)


def _is_a_lookup(low: Lowering, val: Any, x: Box) -> bool:
    """Is what is looked up itself (at most) looked up, in rows whose elements lie side by side? Reading these rows where they are spares their copies in memory (a CPU's images with channels last)."""
    root = x.root
    if low.on_gpu or not isinstance(root, Computed) or root.ops > 1 or root.heavy or not x.shape or len(root.reads) > 2:
        return False
    side_by_side = val.strides[-1] == 1 == x.strides[-1] and val.shape[-1] == x.shape[-1]
    return side_by_side and point_count(val.shape) <= SEEN_AGAIN * point_count(x.shape)


# ---- several index tensors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """What `x[..., a, b, ...]` means: of each dimension that has one its index tensor, the shape they share, and where in the result that stands."""

    sizes: tuple[Size, ...]
    indices: dict[int, Box]
    shared: tuple[Size, ...]
    first: int

    @property
    def shape(self) -> tuple[Size, ...]:
        """Of the result."""
        rest = [s for d, s in enumerate(self.sizes) if d not in self.indices]
        return (*rest[: self.first], *self.shared, *rest[self.first :])

    def __call__(self, i: Index) -> Index:
        """The place in x of a place in the result. Negative indices count from the end."""
        last = self.first + len(self.shared)
        at, rest = i[self.first : last], iter((*i[: self.first], *i[last:]))
        return tuple(self._at(d, at) if d in self.indices else next(rest) for d in range(len(self.sizes)))

    def _at(self, d: int, at: Index) -> Expr:
        index, size = self.indices[d], self.sizes[d]
        value = index.load(spread_index(at, index.shape))
        if (known := known_index(value, size)) is not None:
            return known
        assert isinstance(size, int)
        below = make_op("lt", (value, Const(0, value.dtype)), torch.bool)
        return _position(make_op("where", (below, Op("add", (value, Const(size, value.dtype)), value.dtype), value), value.dtype), size)


def spread_index(at: Index, shape: Sequence[Size]) -> Index:
    """The place, in a tensor of this shape that is broadcast, of a place in the result."""
    return tuple(ZERO if s == 1 else e for s, e in zip(shape, at[len(at) - len(shape) :], strict=True))


def places_of(x: Box, indices: Sequence[Box | None]) -> Places | None:
    """None for masks, for sizes that are unknown, and for shapes that do not fit."""
    found = {d: index for d, index in enumerate(indices) if index is not None}
    sizes = (*x.shape, *(s for index in found.values() for s in index.shape))
    if not found or not all(isinstance(s, int) for s in sizes) or any(b.dtype not in (torch.int64, torch.int32) for b in found.values()):
        return None
    try:
        shared = torch.broadcast_shapes(*(b.shape for b in found.values()))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    used = list(found)
    return Places(tuple(x.shape), found, tuple(shared), used[0] if used[-1] - used[0] == len(used) - 1 else 0)


def lower_index(low: Lowering, val: Any, x: Box, indices: Sequence[Box | None]) -> Any:
    """A kernel of ours computes what is looked up, and what follows."""
    places = places_of(x, indices)
    if places is None or places.shape != tuple(val.shape) or 0 in x.shape:
        return None
    if _unseen(low, val, x, places):
        return None
    return _looked_up(low, val, x, tuple(places.indices.values()), places)


def lower_embedding(
    low: Lowering, val: Any, weight: Box, index: Box, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Forward, an embedding is a lookup; the other arguments concern gradients."""
    return lower_index_select(low, val, weight, 0, index)


ROWS: dict[str, Callable[..., Any]] = {"index_select": lower_index_select, "gather": lower_gather}

OP_ROWS: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: lower_embedding,
    aten.index_select.default: lower_index_select,
    aten.index.Tensor: lower_index,
    aten._unsafe_index.Tensor: lower_index,
}
