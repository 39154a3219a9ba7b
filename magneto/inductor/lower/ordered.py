"""Lowering of what must go in order: cumulative sums, and additions at places that indices say (gradients of lookups). What is added is computed in the same loop.

On the CPU only where a vector of independent elements lies one behind the other in memory, and cumulative sums along memory; elsewhere the library does it. Sums come in eager's type and
order, so that they are eager's; those along memory in the order of a vector's lanes. Where the gradient of a lookup is added to another one of the table (a tied output layer's), few of its rows change:
`added_to` makes one node of both.
On a GPU what is added or written at places comes in no order (schedule/scatter.py): the library does it where the program asks for the same digits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeGuard

import torch

from magneto.base.flags import config
from magneto.base.varying import any_size
from magneto.inductor.loops.ir import (
    Const,
    IndexValue,
    Indirect,
    LibraryCall,
    Load,
    Masked,
    Node,
    Op,
    Ordered,
    Pointwise,
    Reduction,
    Size,
    Value,
    ViewOf,
    index_symbols,
    reach,
    reads,
    reduce_symbols,
)
from magneto.inductor.loops.scans import neutral_of
from magneto.inductor.lower.box import Box, Computed, Index, Stored, cost_of
from magneto.inductor.lower.context import UNSUPPORTED_DTYPES, Lowering, dense_strides, is_dense, merge_origins, point_count
from magneto.inductor.lower.elementwise import lower_convert
from magneto.inductor.lower.indexing import places_of, position_of, spread_index
from magneto.inductor.lower.values import HALF, convert, make_op
from magneto.inductor.lower.views import lower_flip
from magneto.symbolic import ZERO, compare, floordiv, mod

aten = torch.ops.aten

SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
ADDED = (torch.float32, torch.float64, torch.int32, torch.int64)
PUT = (*SUMMED, torch.int16, torch.int8, torch.uint8, torch.bool)
WIDE = 8  # elements of the vector, at least
HELD, HELD_ACROSS = 16384, 1024  # elements of a row that one block of a GPU adds up in order; where memory is contiguous across it
NARROW, COLUMNS = 4, 32  # neighbours, from which on memory is walked across; of such a block
ENOUGH, WANTED = 132, 264  # blocks with which a large GPU is busy; where rows are cut
LEAST, LEAST_ACROSS = 1024, 64  # elements of a part of a row
PARTS = {"scan_sum": "sum", "scan_prod": "prod", "scan_max": "max", "scan_min": "min"}  # what joins a part
TURNED = ("scan_sum", "scan_logaddexp")  # which gradients join backwards
CROWD = 1 << 13  # additions to one element, from which on a GPU's library, which sorts them, takes less time


def _emit(
    low: Lowering, kind: str, val: Any, ranges: tuple[Size, ...], serial: tuple[int, ...], body: Value, sources: tuple[Box, ...],
    place: Index | None = None, init: Value | None = None,
) -> Stored:  # fmt: skip
    buffer = low.new_buffer(val.shape, val.strides, val.dtype, val.device)
    origins = low.origins
    for source in sources:
        origins = merge_origins(cost_of(source)[2], origins)
    at = None if place is None else IndexValue(buffer.offset(place), torch.int64)
    low.nodes.append(Ordered(kind, buffer, ranges, serial, body, at, init, origins))
    return Stored(buffer)


def _fits(low: Lowering, val: Any, dtypes: tuple[torch.dtype, ...], *shapes: Any) -> bool:
    """Sizes that are known and not 0, a type that loops can add up, and numerics that need not be those of eager's own kernels?"""
    sizes = [s for shape in (val.shape, *shapes) for s in shape]
    known = all(isinstance(s, int) and s > 0 for s in sizes)
    return (
        known
        and config.numerics == "fast"
        and (low.on_gpu or val.device.type == "cpu")
        and val.dtype in dtypes
        and is_dense(val.shape, val.strides)
    )


def _wide(ranges: Any, strides: Any, serial: tuple[int, ...]) -> bool:
    """Do independent elements lie one behind the other?"""
    return any(d not in serial and strides[d] == 1 and size >= WIDE for d, size in enumerate(ranges))


def _worthwhile(low: Lowering, val: Any, ranges: Any, strides: Any, serial: tuple[int, ...]) -> bool:
    """Are loops of ours faster than the library?"""
    if not low.on_gpu:
        return _wide(ranges, strides, serial)
    return not torch.are_deterministic_algorithms_enabled() and point_count(ranges) <= CROWD * point_count(val.shape)


def lower_cumsum(low: Lowering, val: Any, x: Box, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    if low.on_gpu:
        return _scan(low, "scan_sum", val, x, dim)
    if not x.shape or not _fits(low, val, SUMMED):
        return None
    shape, serial = tuple(val.shape), (dim % len(x.shape),)
    if shape[serial[0]] == 1 or not (val.strides[serial[0]] == 1 or _wide(shape, val.strides, serial)):
        return None
    body = convert(x.load(index_symbols(shape)), val.dtype)
    return _emit(low, "cumsum", val, shape, serial, body, (x,))


def lower_logcumsumexp(low: Lowering, val: Any, x: Box, dim: int) -> Any:
    return _scan(low, "scan_logaddexp", val, x, dim) if low.on_gpu and val.dtype.is_floating_point else None


def lower_cummax(low: Lowering, val: Any, x: Box, dim: int, kind: str = "scan_max") -> Any:
    """On a GPU. The place of the extremum is the last one of a NaN, or of an element that equals the extremum up to it."""
    values, _ = val
    if not low.on_gpu or not x.shape or not all(is_dense(v.shape, v.strides) for v in val):
        return None
    d, shape = dim % len(x.shape), tuple(values.shape)
    if (extrema := _scan(low, kind, values, x, dim)) is None:
        return None

    def met(at: Index) -> Value:
        here, best = x.load(at), extrema.load(at)
        new = Op("eq", (here, best), torch.bool)
        if values.dtype.is_floating_point:
            new = Op("bitwise_or", (new, Op("ne", (here, here), torch.bool)), torch.bool)
        return Op("where", (new, IndexValue(at[d], torch.int32), Const(0, torch.int32)), torch.int32)

    reads = x.reads | extrema.reads
    narrow = values.with_(dtype=torch.int32)
    places = _scan(low, "scan_max", narrow, Computed(met, shape, values.strides, torch.int32, values.device, reads, low.origins), dim)
    return None if places is None else (extrema, lower_convert(low, val[1], places, torch.int64))


def lower_cummin(low: Lowering, val: Any, x: Box, dim: int) -> Any:
    return lower_cummax(low, val, x, dim, "scan_min")


def lower_cumprod(low: Lowering, val: Any, x: Box, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return _scan(low, "scan_prod", val, x, dim) if low.on_gpu else None


def _scan(low: Lowering, kind: str, val: Any, x: Box, dim: int) -> Any:
    """On a GPU. Where there are few rows for the device, they are cut: the parts are added up, their sums are added up in order, and each part begins with the sum of those before it.
    Sums of what is turned, which are turned again (gradients of sums in order), go backwards instead."""
    if not x.shape or not _fits(low, val, SUMMED) or torch.are_deterministic_algorithms_enabled():
        return None
    shape, d = tuple(val.shape), dim % len(x.shape)
    length, inner = shape[d], prod(shape[d + 1 :])
    blocks = prod(shape[:d]) * (inner if inner < NARROW else -(-inner // COLUMNS))
    few = kind in PARTS and blocks < ENOUGH and length > (HELD if inner < NARROW else HELD_ACROSS)
    if length == 1 or (few and prod(shape) == length):
        return None  # the library has a kernel for one row
    sizes = [n for n in range(LEAST if inner < NARROW else LEAST_ACROSS, min(HELD, length // 2) + 1) if length % n == 0] if few else []
    if turned := kind in TURNED and low.flips == {(d,)}:
        kind, x = f"{kind}_back", lower_flip(low, val, x, (d,))
    if sizes:
        part = next((n for n in reversed(sizes) if blocks * length // n >= WANTED), sizes[0])
        made = _in_parts(low, kind, val, x, d, part)
    else:
        made = _emit(low, kind, val, shape, (d,), convert(x.load(index_symbols(shape)), val.dtype), (x,))
    return lower_flip(low, val, made, (d,)) if turned else made


def _in_parts(low: Lowering, kind: str, val: Any, x: Box, d: int, part: int) -> Stored:
    shape = tuple(val.shape)
    acc = torch.float32 if val.dtype.itemsize == 2 else val.dtype
    sums = (*shape[:d], shape[d] // part, *shape[d + 1 :])
    ranges = (*sums[: d + 1], part, *shape[d + 1 :])

    def read(at: Index) -> Value:
        return convert(x.load((*at[:d], at[d] * part + at[d + 1], *at[d + 2 :])), val.dtype)

    at = index_symbols(sums)
    body = convert(read((*at[: d + 1], *reduce_symbols((part,)), *at[d + 1 :])), acc)
    first, before = (low.new_buffer(sums, dense_strides(sums), acc, val.device) for _ in range(2))
    over = PARTS[kind.removesuffix("_back")]
    low.nodes.append(Reduction(over, (first,), (part,), body, acc, merge_origins(cost_of(x)[2], low.origins)))
    low.nodes.append(Ordered(kind, before, sums, (d,), Stored(first).load(at), origins=low.origins))
    at = index_symbols(ranges)
    back = kind.endswith("back")
    inside = compare("lt", at[d], sums[d] - 1) if back else compare("lt", ZERO, at[d])
    start = Stored(before).load((*at[:d], at[d] + (1 if back else -1), *at[d + 2 :]))
    init = Masked(IndexValue(inside, torch.bool), start, Const(neutral_of(kind, acc), acc))
    return _emit(low, kind, val, ranges, (d + 1,), read(at), (x,), (*at[:d], at[d] * part + at[d + 1], *at[d + 2 :]), init)


def lower_embedding_backward(low: Lowering, val: Any, grad: Box, index: Box, rows: int, padding: int, by_frequency: bool) -> Any:
    """Rows of gradients added up by index; the padding's row stays 0."""
    ranges = (*index.shape, val.shape[1])
    if by_frequency or not _fits(low, val, ADDED, index.shape) or index.dtype not in (torch.int32, torch.int64) or grad.shape != ranges:
        return None
    serial = tuple(range(len(index.shape)))
    if not _worthwhile(low, val, ranges, (*(0 for _ in index.shape), val.strides[1]), serial):
        return None
    at = index_symbols(ranges)
    body = convert(grad.load(at), val.dtype)
    if padding >= 0:
        which = index.load(at[:-1])
        body = Op("where", (Op("ne", (which, Const(padding, which.dtype)), torch.bool), body, Const(0.0, body.dtype)), body.dtype)
    place = (position_of(index, at[:-1], rows), at[-1])
    return _emit(low, "scatter_add", val, ranges, serial, body, (grad, index), place, Const(0.0, val.dtype))


def lower_scatter_add(low: Lowering, val: Any, x: Box, dim: int, index: Box, source: Box) -> Any:
    rank = len(x.shape)
    if (chosen := _one_of_each_row(low, val, x, dim, index, source)) is not None:
        return chosen
    if not rank or len(index.shape) != rank or not _fits(low, val, ADDED, index.shape) or index.dtype is not torch.int64:
        return None
    serial = (dim % rank,)
    if source.dtype is not val.dtype or not _worthwhile(low, val, index.shape, val.strides, serial):
        return None
    at = index_symbols(tuple(index.shape))
    place = _moved(at, serial[0], position_of(index, at, x.shape[serial[0]]))
    init = x.load(index_symbols(tuple(val.shape)))
    return _emit(low, "scatter_add", val, tuple(index.shape), serial, source.load(at), (x, index, source), place, init)


def lower_scatter(low: Lowering, val: Any, x: Box, dim: int, index: Box, source: Any) -> Any:
    """On a CPU the library writes few elements into what lies in memory."""
    scalar = not isinstance(source, Box)
    if not scalar and not isinstance(x.root, Stored) and (chosen := _one_of_each_row(low, val, x, dim, index, source, False)) is not None:
        return chosen
    rank = len(x.shape)
    if not rank or len(index.shape) != rank or index.dtype is not torch.int64:
        return None
    d = dim % rank
    body = _constant(source, val.dtype) if scalar else source.load
    return _put(low, val, x, tuple(index.shape), lambda at: _moved(at, d, position_of(index, at, x.shape[d])), body, index, source)


def _put(
    low: Lowering, val: Any, x: Box, ranges: tuple[Size, ...], place: Callable[[Index], Index], body: Callable[[Index], Value] | None, *sources: Any
) -> Stored | None:  # fmt: skip
    """On a GPU: `x` with elements written at computed places, in no order. Not where the program asks for the same result in every run (of two for one place), nor
    into memory of the program's own intermediate that the library writes without a copy."""
    boxes = tuple(box for box in sources if isinstance(box, Box))
    own = isinstance(x.root, Stored) and low.own.get(x.root.buffer.name) == 1
    if not low.on_gpu or own or body is None or torch.are_deterministic_algorithms_enabled() or not _fits(low, val, PUT, ranges):
        return None
    if any(box.dtype is not val.dtype for box in (x, *boxes[1:])):
        return None
    at = index_symbols(ranges)
    init = x.load(index_symbols(tuple(val.shape)))
    return _emit(low, "scatter_put", val, ranges, (), body(at), (x, *boxes), place(at), init)


def _constant(number: Any, dtype: torch.dtype) -> Callable[[Index], Value] | None:
    """A number of the program's as an element of this type; None where it has none of exactly that value there."""
    fits = isinstance(number, int | float) and (dtype.is_floating_point or isinstance(number, int) and dtype in (torch.int32, torch.int64))
    return (lambda at: Const(float(number) if dtype.is_floating_point else int(number), dtype)) if fits else None


def _one_of_each_row(low: Lowering, val: Any, x: Box, dim: int, index: Box, source: Box, adds: bool = True) -> Box | None:
    """Where one element of each row is written or added to (the gradient of one that was looked up): every element asks whether it is that one, in loops that fuse with what follows."""
    rank, shape = len(x.shape), tuple(val.shape)
    d = dim % max(rank, 1)
    fits = rank and shape[d] and len(index.shape) == len(source.shape) == rank and index.dtype is torch.int64
    fits = fits and source.dtype is val.dtype is not torch.bool
    if not fits or index.shape[d] != 1 or any(a != b for k, (a, b) in enumerate(zip(index.shape, shape, strict=True)) if k != d):
        return None
    if any(box.dtype in UNSUPPORTED_DTYPES for box in (x, source)) or not index.reads:
        return None

    acc = torch.float32 if val.dtype in HALF else val.dtype

    def fn(at: Index) -> Value:
        row = _moved(at, d, ZERO)
        chosen = IndexValue(compare("eq", at[d], Indirect(index.load(row), shape[d])), torch.bool)
        before, given = x.load(at), source.load(row)
        if adds:
            given = convert(make_op("add", (convert(before, acc), convert(given, acc)), acc), val.dtype)
        return make_op("where", (chosen, given, before), val.dtype)

    ops, heavy, origins, reads = 3, 0, low.origins, x.reads | index.reads | source.reads
    for box in (x, source, index):
        more, costly, others = cost_of(box)
        ops, heavy, origins = ops + more, heavy + costly, merge_origins(others, origins)
    return low.computed(Computed(fn, val.shape, val.strides, val.dtype, val.device, reads, origins, ops, heavy))


def lower_scatter_reduce(
    low: Lowering, val: Any, x: Box, dim: int, index: Box, source: Box, reduce: str, *, include_self: bool = True
) -> Any:
    return lower_scatter_add(low, val, x, dim, index, source) if low.on_gpu and reduce == "sum" and include_self else None


def lower_index_add(low: Lowering, val: Any, x: Box, dim: int, index: Box, source: Box, *, alpha: Any = 1) -> Any:
    rank = len(x.shape)
    if not rank or alpha != 1 or len(index.shape) != 1 or len(source.shape) != rank or not _fits(low, val, ADDED, source.shape):
        return None
    serial = (dim % rank,)
    same = all(d == serial[0] or s == x.shape[d] for d, s in enumerate(source.shape)) and source.shape[serial[0]] == index.shape[0]
    if not same or source.dtype is not val.dtype or index.dtype not in (torch.int32, torch.int64):
        return None
    if not _worthwhile(low, val, source.shape, val.strides, serial):
        return None
    at = index_symbols(tuple(source.shape))
    place = _moved(at, serial[0], position_of(index, (at[serial[0]],), x.shape[serial[0]]))
    init = x.load(index_symbols(tuple(val.shape)))
    return _emit(low, "scatter_add", val, tuple(source.shape), serial, source.load(at), (x, index, source), place, init)


def lower_index_copy(low: Lowering, val: Any, x: Box, dim: int, index: Box, source: Box) -> Any:
    rank = len(x.shape)
    if not rank or len(index.shape) != 1 or len(source.shape) != rank or index.dtype is not torch.int64:
        return None
    d = dim % rank

    def place(at: Index) -> Index:
        return _moved(at, d, position_of(index, (at[d],), x.shape[d]))

    return _put(low, val, x, tuple(source.shape), place, source.load, index, source)


def lower_max_unpool2d(low: Lowering, val: Any, x: Box, index: Box, size: Sequence[int]) -> Any:
    """Into zeros."""
    width = val.shape[-1]

    def place(at: Index) -> Index:
        flat = position_of(index, at, val.shape[-2] * width)
        return (*at[:-2], floordiv(flat, width), mod(flat, width))

    zeros = Computed(lambda at: Const(0.0, val.dtype), val.shape, val.strides, val.dtype, val.device, frozenset())
    fits = index.dtype is torch.int64 and val.dtype.is_floating_point
    return _put(low, val, zeros, tuple(x.shape), place, x.load, index, x) if fits else None


def lower_index_put(low: Lowering, val: Any, x: Box, indices: Sequence[Box | None], values: Box, accumulate: bool = False) -> Any:
    """On a GPU, what is written or added at places that several index tensors name."""
    if not low.on_gpu or values.dtype is not val.dtype or (places := places_of(x, indices)) is None:
        return None
    ranges, extra = places.shape, len(places.shape) - len(values.shape)
    if extra < 0 or any(s not in (1, t) for s, t in zip(values.shape, ranges[extra:], strict=True)):
        return None
    if not accumulate:
        first = next(iter(places.indices.values()))
        return _put(low, val, x, ranges, places, lambda at: values.load(spread_index(at, values.shape)), first, values)
    if not _fits(low, val, ADDED, ranges) or not _worthwhile(low, val, ranges, val.strides, ()):
        return None
    at = index_symbols(ranges)
    body, init = values.load(spread_index(at, values.shape)), x.load(index_symbols(tuple(val.shape)))
    return _emit(low, "scatter_add", val, ranges, (), body, (x, values, *places.indices.values()), places(at), init)


def added_to(nodes: Sequence[Node], outputs: Sequence[Any]) -> list[Node]:
    """The nodes with one `row_sums` in place of sums of rows by index, if nobody else reads them, and their addition to numbers of the same shape."""
    made = list(nodes)
    if any_size() or not any(_sums_of_rows(node) for node in nodes):
        return made
    leaving = {view.buffer for view in outputs if isinstance(view, ViewOf)}
    for n, node in enumerate(nodes):
        if not _sums_of_rows(node) or node.name in leaving:
            continue
        readers = [k for k, other in enumerate(nodes) if node.name in reads(other)]
        add, unchanged = nodes[readers[0]], not any(isinstance(m, LibraryCall) and m.mutates for m in nodes[n : readers[0]])
        if len(readers) == 1 and isinstance(add, Pointwise) and unchanged and (other := _other_term(add, node)) is not None:
            origins = merge_origins(add.origins, node.origins)
            made[made.index(add)] = replace(node, kind="row_sums", buffer=add.buffer, init=other, origins=origins)
            made.remove(node)
    return made


def _sums_of_rows(node: Node) -> TypeGuard[Ordered]:
    """Additions of whole rows, by one index for each, to a matrix of zeros that has at least as many rows?"""
    if not (
        isinstance(node, Ordered) and node.kind == "scatter_add" and isinstance(node.place, IndexValue) and len(node.buffer.shape) == 2
    ):
        return False
    rows = [s for s in node.place.expr.free if isinstance(s, Indirect)]
    last = len(node.ranges) - 1
    return (
        node.init is Const(0.0, node.buffer.dtype)
        and node.buffer.device.type == "cpu"
        and node.serial == tuple(range(last))
        and point_count(node.ranges[:-1]) <= point_count(node.buffer.shape[:1])
        and len(rows) == 1
        and index_symbols(node.ranges)[last] not in reach(rows[0])
    )


def _other_term(add: Pointwise, sums: Ordered) -> Value | None:
    """What the node adds to the sums, element by element, in memory that lies as theirs."""
    body, place = add.body, add.store_index
    if not (isinstance(body, Op) and body.name == "add" and add.buffer.dtype is sums.buffer.dtype and add.ranges == sums.buffer.shape):
        return None
    first, second = body.args
    if isinstance(first, Load) and first.buffer == sums.name:
        first, second = second, first
    both = isinstance(first, Load) and isinstance(second, Load) and first.buffer != sums.name == second.buffer
    return first if both and first.index is second.index is place is sums.buffer.offset(index_symbols(add.ranges)) else None  # type: ignore[attr-defined]


def _moved(at: Index, dim: int, to: Any) -> Index:
    return (*at[:dim], to, *at[dim + 1 :])


OP_ROWS: dict[Any, Callable[..., Any]] = {
    aten.cumsum.default: lower_cumsum,
    aten.cumprod.default: lower_cumprod,
    aten.logcumsumexp.default: lower_logcumsumexp,
    aten.cummax.default: lower_cummax,
    aten.cummin.default: lower_cummin,
    aten.embedding_dense_backward.default: lower_embedding_backward,
    aten.scatter_add.default: lower_scatter_add,
    aten.scatter.src: lower_scatter,
    aten.scatter.value: lower_scatter,
    aten.index_copy.default: lower_index_copy,
    aten.max_unpool2d.default: lower_max_unpool2d,
    aten.scatter_reduce.two: lower_scatter_reduce,
    aten.index_add.default: lower_index_add,
    aten.index_put.default: lower_index_put,
    aten._unsafe_index_put.default: lower_index_put,
}
