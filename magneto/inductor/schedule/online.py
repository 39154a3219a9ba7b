"""Sums of exponentials under a row's maximum, of long rows, in one pass over memory. `online_sums(program)`.

Softmax, log-softmax, cross-entropy and logsumexp ask for `M = max(v)` and `sum(exp(v - M))`. A row that one block cannot hold is cut into chunks; each gives the maximum `m` of its own and
`s = sum(exp(v - m))`, and the row's sum is `sum(s * exp(m - M))`. Both results of a chunk are one kernel that reads it once, however many blocks a row then has.
Infinities and NaN come out as in two passes: a chunk of nothing but -inf counts from 0, and the last step subtracts what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

import torch

from magneto.base.dataclass import dataclass, replace
from magneto.inductor.loops.ir import (
    Buffer,
    Const,
    IndexValue,
    Load,
    Masked,
    Node,
    Op,
    Pointwise,
    Program,
    Reduction,
    Value,
    index_symbols,
    reduce_symbols,
)
from magneto.inductor.schedule.kernel import map_value
from magneto.inductor.schedule.split import Cut, across, chunks, halves, pieces
from magneto.symbolic import Expr, Sym, substitute

HELD = 16384  # elements of a row that one block reads once anyway
CHUNK = 8192


@dataclass(frozen=True, slots=True)
class _Pair:
    """`total` sums exp(v - shift), where `shift` is the result of `most`, the maximum of v, or 0 where that is infinite (`guarded`)."""

    most: Reduction
    total: Reduction
    guarded: bool


def online_sums(program: Program) -> Program:
    """The program with such pairs of long reductions over chunks."""
    points = {n.name: n for n in program.nodes if isinstance(n, Pointwise)}
    most: dict[str, Reduction] = {}
    pairs: dict[str, _Pair] = {}
    for node in program.nodes:
        if isinstance(node, Reduction) and node.kind == "max" and _long(node):
            most[node.name] = node
        elif isinstance(node, Reduction) and node.kind == "sum" and most and (pair := _pair(node, most, points)) is not None:
            pairs[node.name] = pair
    cuts = {p.most.name: chunks(p.most, max(-(-_length(p.most) // CHUNK), pieces(p.most))) for p in pairs.values()}
    nodes: list[Node] = []
    for node in program.nodes:
        if node.buffers and node.buffers[0].name in cuts and isinstance(node, Reduction):
            nodes += halves(node, cuts[node.name])
        elif isinstance(node, Reduction) and (found := pairs.get(node.name)) is not None:
            nodes += _sums(found, cuts[found.most.name])
        else:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes))


def _length(node: Reduction) -> int:
    (size,) = node.reduce_ranges
    assert isinstance(size, int)
    return size


def _long(node: Reduction) -> bool:
    """Does no block hold a row, or should several share it?"""
    if len(node.reduce_ranges) != 1 or not all(isinstance(s, int) for s in (*node.ranges, *node.reduce_ranges)):
        return False
    return node.acc_dtype.is_floating_point and not across(node) and (_length(node) > HELD or pieces(node) > 1)


def _pair(node: Reduction, most: Mapping[str, Reduction], points: Mapping[str, Pointwise]) -> _Pair | None:
    body = _inlined(node, points)
    if not (isinstance(body, Op) and body.name == "exp" and isinstance(body.args[0], Op) and body.args[0].name == "sub"):
        return None
    value, shift = body.args[0].args
    guarded = isinstance(shift, Op) and shift.name == "where"
    found = shift.args[2] if guarded else shift  # type: ignore[attr-defined]
    maximum = most.get(found.buffer) if isinstance(found, Load) else None
    if maximum is None or (maximum.ranges, maximum.reduce_ranges) != (node.ranges, node.reduce_ranges):
        return None
    dtype = maximum.acc_dtype
    here = Load(maximum.name, maximum.buffer.offset(index_symbols(maximum.ranges)), dtype)
    if found is not here or shift is not (_guarded(here) if guarded else here) or value is not maximum.body:
        return None
    return _Pair(maximum, node, guarded) if {maximum.buffer.dtype, node.acc_dtype, value.dtype} == {dtype} else None


def _inlined(node: Reduction, points: Mapping[str, Pointwise]) -> Value:
    """The body, with that of the loop that computed it where it only loads a result at the same point."""
    load = node.body
    source = points.get(load.buffer) if isinstance(load, Load) else None
    if source is None or len(node.reduce_ranges) != 1 or source.body.dtype is not load.dtype:
        return load
    assert isinstance(load, Load)
    ((walked,), kept) = reduce_symbols(node.reduce_ranges), index_symbols(node.ranges)
    for d in range(len(source.ranges)):
        symbols, sizes = (*kept[:d], walked, *kept[d:]), (*node.ranges[:d], *node.reduce_ranges, *node.ranges[d:])
        if sizes == source.ranges:
            own = index_symbols(source.ranges)
            mapping: dict[Expr, Expr] = {s: e for s, e in zip(own, symbols, strict=True) if isinstance(s, Sym)}
            if substitute(source.store_index, mapping) is load.index:
                return map_value(source.body, mapping, {})
    return load


def _guarded(value: Value) -> Value:
    """0 where the maximum is infinite, as logsumexp writes it."""
    return Op("where", (Op("isinf", (value,), torch.bool), Const(0.0, value.dtype), value), value.dtype)


def _finite(value: Value) -> Value:
    """0 for -inf."""
    return Op("where", (Op("eq", (value, Const(-inf, value.dtype)), torch.bool), Const(0.0, value.dtype), value), value.dtype)


def _sums(pair: _Pair, cut: Cut) -> Iterator[Node]:
    most, total, dtype = pair.most, pair.total, pair.most.acc_dtype
    rows = tuple(int(s) for s in total.ranges)  # type: ignore[arg-type]
    maxima = cut.buffer(most, rows)
    sums = replace(cut.buffer(total, rows), dtype=dtype)

    def of(name: str, op: str, *args: Value) -> Value:
        return Op(name, (Op(op, args, dtype),), dtype)

    at = (*index_symbols((*rows, *cut.parts)),)
    own: Value = Load(maxima.name, maxima.offset(at), dtype)
    body = of("exp", "sub", map_value(most.body, cut.mapping, {}), _guarded(own) if pair.guarded else _finite(own))
    if cut.inside is not None:
        body = Masked(IndexValue(cut.inside, torch.bool), body, Const(0.0, dtype))
    yield Reduction("sum", (sums,), cut.rest, body, dtype, total.origins)

    def part(buffer: Buffer) -> Value:
        return Load(buffer.name, buffer.offset((*index_symbols(rows), *reduce_symbols(cut.parts))), dtype)

    whole: Value = Load(most.name, most.buffer.offset(index_symbols(rows)), dtype)
    shifts = (_guarded(part(maxima)), _guarded(whole)) if pair.guarded else (part(maxima), whole)
    yield replace(total, reduce_ranges=cut.parts, body=Op("mul", (part(sums), of("exp", "sub", *shifts)), dtype))
