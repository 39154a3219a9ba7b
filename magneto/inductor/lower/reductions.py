"""Lowering of reductions. The operand's body is inlined; the result is always a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product
from math import prod
from typing import Any

import torch

from magneto.base.flags import config
from magneto.inductor.loops.ir import Const, IndexValue, Op, Reduction, Size, Value, index_symbols, loads, reach, reduce_symbols
from magneto.inductor.loops.span import symbols_of
from magneto.inductor.lower.box import Box, Computed, Index, Stored, cost_of
from magneto.inductor.lower.context import CannotLower, Lowering, compact_strides, dense_strides, merge_origins
from magneto.inductor.lower.values import convert, make_op
from magneto.symbolic import ONE, coefficient
from magneto.symbolic import Const as IntConst

FEW = 4  # elements that are folded where the result is read, on a GPU, with as few operations and functions such as exp
FEW_OPS, FEW_HEAVY = 40, 4
ALONG = 16  # elements, at least, that lie one behind the other where memory as large as all that is reduced is read
FOLDS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bitwise_or", "all": "bitwise_and"}

KINDS = {"sum": "sum", "prod": "prod", "amax": "max", "amin": "min", "any": "any", "all": "all", "argmax": "argmax", "argmin": "argmin"}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of half types are kept in float32 and rounded once; integers and bools count in int64."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype if dtype.is_floating_point else torch.int64


def _kept(rank: int, dims: frozenset[int]) -> list[int]:
    return [d for d in range(rank) if d not in dims]


def _reduced_body(x: Box, dims: frozenset[int]) -> tuple[tuple[Size, ...], tuple[Size, ...], Value]:
    """(ranges, reduce_ranges without sizes of 1, body over i and r symbols)."""
    kept = _kept(len(x.shape), dims)
    ranges = tuple(x.shape[d] for d in kept)
    reduced = [d for d in sorted(dims) if x.shape[d] != 1]
    reduce_ranges = tuple(x.shape[d] for d in reduced)
    index: list[Any] = [None] * len(x.shape)
    for d, s in zip(kept, index_symbols(ranges), strict=True):
        index[d] = s
    for d, s in zip(reduced, reduce_symbols(reduce_ranges), strict=True):
        index[d] = s
    zero = index_symbols((1,))[0]
    return ranges, reduce_ranges, x.load(tuple(zero if i is None else i for i in index))


def _emit(
    low: Lowering, kind: str, x: Box, dims: frozenset[int], acc: torch.dtype, dtypes: Sequence[torch.dtype], strides: Sequence[Size]
) -> list[Stored]:
    ranges, reduce_ranges, body = _reduced_body(x, dims)
    if kind == "sum" and low.on_gpu and acc is torch.int64 and (narrow := _narrow(body, reduce_ranges)) is not None:
        body, acc = narrow, torch.int32
    elif kind in ("any", "all"):
        body = body if body.dtype is torch.bool else make_op("ne", (body, Const(0, body.dtype)), torch.bool)
    else:
        body = convert(body, acc)
    _, _, origins = cost_of(x)
    layout = compact_strides(ranges, strides) if len(strides) == len(ranges) else dense_strides(ranges)
    stored = [Stored(low.new_buffer(ranges, layout, t, x.device)) for t in dtypes]
    low.nodes.append(Reduction(kind, tuple(s.buffer for s in stored), reduce_ranges, body, acc, merge_origins(origins, low.origins)))
    return stored


def _narrow(body: Value, reduced: Sequence[Size]) -> Value | None:
    """Small integers whose sum fits 32 bits."""
    while isinstance(body, Op) and body.name == "convert_element_type" and body.dtype is torch.int64:
        (body,) = body.args
    bits = {torch.bool: 1, torch.uint8: 8, torch.int8: 8, torch.int16: 16}.get(body.dtype)
    fits = bits is not None and all(isinstance(s, int) for s in reduced) and prod(reduced) << bits < 1 << 31  # type: ignore[arg-type,operator]
    return convert(body, torch.int32) if fits else None


def _dims(x: Box, dims: int | Sequence[int] | None) -> frozenset[int]:
    rank = len(x.shape)
    if dims is None:
        return frozenset(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return frozenset(d % rank for d in dims) if rank else frozenset()


def lower_reduction(name: str, low: Lowering, val: Any, x: Box, dims: int | Sequence[int] | None = None) -> Box:
    """One-output reductions, without keepdim."""
    kind = KINDS[name]
    over = _dims(x, dims)
    dtype: torch.dtype = val.dtype
    if kind in ("argmax", "argmin"):
        if x.dtype is torch.bool or (len(over) > 1 and sum(x.shape[d] != 1 for d in over) != len(over)):
            raise CannotLower(f"{name} of {x.dtype} over {sorted(over)}")
        acc = x.dtype
    elif kind in ("any", "all"):
        acc = torch.bool
    elif kind in ("sum", "prod"):
        acc = accumulate_dtype(dtype if not x.dtype.is_floating_point else x.dtype if dtype.itemsize <= x.dtype.itemsize else dtype)
    else:
        acc = x.dtype
    if kind in ("max", "min", "argmax", "argmin") and any(x.shape[d] == 0 for d in over):
        raise CannotLower(f"{name} over an empty dimension")
    if all(x.shape[d] == 1 for d in over):
        return _of_one(low, kind, x, over, acc, val)
    if kind == "sum" and (met := _of_met(low, x, over, acc, val)) is not None:
        return met
    if low.goes_on and (few := _written_out(low, kind, x, over, acc, val)) is not None:
        return few
    inner = dtype if kind not in ("any", "all") or dtype in (torch.bool, torch.uint8) else torch.bool
    (stored,) = _emit(low, kind, x, over, acc, (inner,), val.strides)
    if inner is not dtype:
        raise CannotLower(f"{name} with a result of {dtype}")
    return stored


def _of_one(low: Lowering, kind: str, x: Box, over: frozenset[int], acc: torch.dtype, val: Any) -> Box:
    """A reduction over dimensions of size 1 is no reduction."""
    kept = _kept(len(x.shape), over)
    zero = index_symbols((1,))[0]

    def fn(index: Index) -> Value:
        if kind in ("argmax", "argmin"):
            return Const(0, val.dtype)
        full = [zero] * len(x.shape)
        for d, i in zip(kept, index, strict=True):
            full[d] = i
        value = x.load(tuple(full))
        if kind in ("any", "all") and value.dtype is not torch.bool:
            value = make_op("ne", (value, Const(0, value.dtype)), torch.bool)
        return convert(value, val.dtype)

    ops, heavy, origins = cost_of(x)
    reads = frozenset[str]() if kind in ("argmax", "argmin") else x.reads
    return low.computed(Computed(fn, val.shape, val.strides, val.dtype, x.device, reads, merge_origins(origins, low.origins), ops, heavy))


def _written_out(low: Lowering, kind: str, x: Box, over: frozenset[int], acc: torch.dtype, val: Any) -> Box | None:
    """Few elements, folded wherever the result is read: the last dimension of points, so that all pairs of these need no memory; None: too many."""
    sizes = {d: s for d in over if (s := x.shape[d]) != 1}
    (ops, heavy, origins), count = cost_of(x), prod(s if isinstance(s, int) else FEW + 1 for s in sizes.values())
    if (
        kind not in (*FOLDS, "argmax", "argmin")
        or count > FEW
        or (ops + 1) * count > FEW_OPS
        or heavy * count > FEW_HEAVY
        or config.numerics != "fast"
    ):
        return None
    if (x.dtype is torch.bool and kind in ("max", "min")) or not _across(x, over):
        return None
    kept, zero, dtype = _kept(len(x.shape), over), index_symbols((1,))[0], torch.bool if kind in ("any", "all") else acc

    def element(index: Index, places: tuple[int, ...]) -> Value:
        full: list[Any] = [zero] * len(x.shape)
        for d, i in zip((*kept, *sizes), (*index, *map(IntConst, places)), strict=True):
            full[d] = i
        value = x.load(tuple(full))
        logical = kind in ("any", "all") and value.dtype is not torch.bool
        return make_op("ne", (value, Const(0, value.dtype)), torch.bool) if logical else convert(value, dtype)

    def fn(index: Index) -> Value:
        values = [element(index, places) for places in product(*(range(s) for s in sizes.values() if isinstance(s, int)))]
        if kind not in FOLDS:
            return convert(_first(kind, values), val.dtype)
        return convert(reduce(lambda a, b: make_op(FOLDS[kind], (a, b), dtype), values), val.dtype)

    origins = merge_origins(origins, low.origins)
    made = Computed(fn, val.shape, val.strides, val.dtype, x.device, x.reads, origins, (ops + 1) * count, heavy * count)
    return low.computed(made)


def _across(x: Box, over: frozenset[int]) -> bool:
    """Is what is read at every point contiguous along what stays? Few elements side by side are better read as vectors."""
    at = index_symbols(x.shape)
    every = {s for s, size in zip(at, x.shape, strict=True) if size != 1}
    rows = [s for d, (s, size) in enumerate(zip(at, x.shape, strict=True)) if d not in over and isinstance(size, int) and size >= ALONG]
    whole = [load.index for load in loads(x.load(at)) if every <= reach(load.index)]
    return all(any(coefficient(index, row) is ONE for row in rows) for index in whole)


def _first(kind: str, values: Sequence[Value]) -> Value:
    """Where the first of the largest or least values stands; NaN is one, whichever comes first."""
    best, place = values[0], Const(0, torch.int64)
    for k, value in enumerate(values[1:], 1):
        better = Op("gt" if kind == "argmax" else "lt", (value, best), torch.bool)
        if value.dtype.is_floating_point:
            nan, before = Op("ne", (value, value), torch.bool), Op("eq", (best, best), torch.bool)
            better = Op("bitwise_and", (Op("bitwise_or", (better, nan), torch.bool), before), torch.bool)
        best = Op("where", (better, value, best), value.dtype)
        place = Op("where", (better, Const(k, torch.int64), place), torch.int64)  # type: ignore[assignment]
    return place


def _of_met(low: Lowering, x: Box, over: frozenset[int], acc: torch.dtype, val: Any) -> Box | None:
    """The sum of where(i == place, value, 0) along i meets `value` once, or nothing: the gradient of what a loss looks up, of which softmax's gradient needs the sum of each row."""
    (walked, size), *others = [(d, s) for d in over if (s := x.shape[d]) != 1]
    if others or not isinstance(size, int) or _met(x.load(at := index_symbols(x.shape)), at[walked]) is None:
        return None
    kept, zero = _kept(len(x.shape), over), index_symbols((1,))[0]

    def fn(index: Index) -> Value:
        full = [zero] * len(x.shape)
        for d, i in zip((*kept, walked), (*index, reduce_symbols((size,))[0]), strict=True):
            full[d] = i
        place, value = _met(x.load(tuple(full)), full[walked])  # type: ignore[misc]
        limits = (Op(name, (place, Const(n, place.dtype)), torch.bool) for name, n in (("ge", 0), ("lt", size)))
        inside = Op("bitwise_and", tuple(limits), torch.bool)
        met = make_op("add", (convert(value, acc), Const(0, acc)), acc)  # a sum begins at 0: -0 is none
        return convert(Op("where", (inside, met, Const(0, acc)), acc), val.dtype)

    ops, heavy, origins = cost_of(x)
    origins = merge_origins(origins, low.origins)
    return low.computed(Computed(fn, val.shape, val.strides, val.dtype, x.device, x.reads, origins, ops + 4, heavy))


def _met(value: Value, i: Any) -> tuple[Value, Value] | None:
    """(place, value) of where(i == place, value, 0), neither of which depends on i."""
    if isinstance(value, Op) and value.name == "convert_element_type":
        found = _met(value.args[0], i)
        return found and (found[0], convert(found[1], value.dtype))
    if not isinstance(value, Op) or value.name != "where" or not isinstance(same := value.args[0], Op) or same.name != "eq":
        return None
    places = [a for a in same.args if not isinstance(a, IndexValue) or a.expr is not i]
    if len(places) != 1 or not isinstance(zero := value.args[2], Const) or zero.value != 0 or i in symbols_of(places[0], value.args[1]):
        return None
    return (places[0], value.args[1]) if places[0].dtype in (torch.int32, torch.int64) else None


def lower_var(low: Lowering, val: Any, x: Box, dims: int | Sequence[int] | None, correction: float = 1) -> tuple[Box, Box]:
    """(var, mean) by Welford's algorithm, in float32 at least."""
    var_val, mean_val = val
    over = _dims(x, dims)
    acc = accumulate_dtype(var_val.dtype)
    count: Size = prod(x.shape[d] for d in over)  # type: ignore[misc]
    if not isinstance(count, int) or count == 0:
        raise CannotLower(f"var over {count} elements")
    if count == 1:
        mean: Box = _of_one(low, "sum", x, over, acc, mean_val)
        m2: Box = _zero_times(low, mean, acc)
    else:
        mean, m2 = _emit(low, "welford", x, over, acc, (acc, acc), mean_val.strides)
    divisor = Const(max(0.0, count - correction), acc)

    def variance(index: Index) -> Value:
        return convert(Op("div", (m2.load(index), divisor), acc), var_val.dtype)

    def average(index: Index) -> Value:
        return convert(mean.load(index), mean_val.dtype)

    def box(fn: Any, source: Box, v: Any, ops: int) -> Box:
        return low.computed(Computed(fn, v.shape, v.strides, v.dtype, x.device, source.reads, low.origins, ops, 0))

    return box(variance, m2, var_val, 1), mean if mean.dtype is mean_val.dtype else box(average, mean, mean_val, 1)


def _zero_times(low: Lowering, mean: Box, acc: torch.dtype) -> Box:
    """The squared deviation of a single element: 0, but nan for nan and inf, as subtracting it from itself gives."""

    def fn(index: Index) -> Value:
        value = convert(mean.load(index), acc)
        return Op("sub", (value, value), acc)

    ops, heavy, origins = cost_of(mean)
    return low.computed(Computed(fn, mean.shape, mean.strides, acc, mean.device, mean.reads, origins, ops + 1, heavy))


ROWS: dict[str, Callable[..., Any]] = {name: partial(lower_reduction, name) for name in KINDS} | {"var": lower_var}
