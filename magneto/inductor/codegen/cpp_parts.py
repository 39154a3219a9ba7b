"""Loops cut where conditions change: each part of what is concatenated, padded, mirrored or rotated is a loop of its own, without conditions and without the other parts' work.

Under a condition memory is read element by element where elements have 8 or 16 bits, and what stands in the branches is computed everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch

from magneto.base.dataclass import replace
from magneto.base.varying import any_size, sizes_vary
from magneto.inductor.codegen.cpp_nest import cut_dims, main_terms, stride_along
from magneto.inductor.codegen.cpp_ops import DIVIDING, HEAVY
from magneto.inductor.loops.ir import Const, IndexValue, Indirect, Load, Masked, Op, Value, walk_values
from magneto.inductor.schedule.domain import fresh_symbol
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member, member_loads
from magneto.symbolic import Cmp, Expr, Max, Min, add, coefficient, evaluate, substitute, walk
from magneto.symbolic import Const as IntConst

MOST = 8  # parts
LONG = 16  # elements of the largest that lie side by side, at least: of fewer no vectors are made
SMALL = 512  # elements of the largest, at least
BEGUN = 16  # operations of an element on its own, and of beginning a loop
SPARED = 0.75  # of the work that is left, at most


def parts(kernel: FusedKernel, most: int = MOST) -> tuple[FusedKernel, ...]:
    """The kernels whose loops, one after the other, do the kernel's work: itself alone where nothing is spared, and where sizes vary (their texts would be of many forms)."""
    whole = (kernel,)
    if any_size() or sizes_vary() or kernel.cols or any(m.kind != POINT for m in kernel.members) or not any(map(_guarded, kernel.members)):
        return whole
    apart = cut_dims(kernel)
    cost, found = _best(apart, most)
    return found if len(found) > 1 and cost <= SPARED * _cost(apart) else whole


def _best(kernel: FusedKernel, most: int) -> tuple[float, tuple[FusedKernel, ...]]:
    """The least work, and the parts that do it."""
    best: tuple[float, tuple[FusedKernel, ...]] = _cost(kernel), (kernel,)
    steps, points = main_terms(kernel), prod(d.size for d in kernel.rows)
    for dim in kernel.rows if most > 1 else ():
        ends = sorted({end for m in kernel.members for end in _ends(m.body, dim) if 0 < end < dim.size})
        sizes = [b - a for a, b in zip((0, *ends), (*ends, dim.size), strict=True)]
        largest = max(sizes)
        if not 1 < len(sizes) <= most or steps.get(dim.sym, 0) * largest < LONG or largest * points // dim.size < SMALL:
            continue
        made = [
            _best(_part(kernel, dim, a, n), most - len(sizes) + 1 if n == largest else 1) for a, n in zip((0, *ends), sizes, strict=True)
        ]
        parts = tuple(part for _, found in made for part in found)
        best = min(best, (sum(cost for cost, _ in made), parts), key=lambda found: found[0])
    return best


def _cost(kernel: FusedKernel) -> float:
    """Of all elements, and of beginning with each run of them that lie side by side."""
    run, steps = 1, main_terms(kernel)
    for dim in sorted(kernel.rows, key=lambda d: steps.get(d.sym, 0)):
        run *= dim.size if steps.get(dim.sym, 0) == run else 1
    points = prod(d.size for d in kernel.rows)
    return points * _work(kernel) + points / run * BEGUN


def _guarded(member: Member) -> bool:
    return any(isinstance(value, Masked) or bool(_bends(value)) for value in walk_values(member.body))


def _bends(value: Value) -> list[Max | Min]:
    """Where the index of a load goes another way, at edges that are repeated or mirrored: narrow elements are read one by one then, wider ones gathered."""
    return [part for part in walk(value.index) if isinstance(part, Max | Min)] if isinstance(value, Load) else []


def _ends(body: Value, dim: Dim) -> Iterator[int]:
    """Where along a dimension conditions of it alone may change."""
    for value in walk_values(body):
        for part in walk(value.expr) if isinstance(value, IndexValue) and value.dtype is torch.bool else ():
            if isinstance(part, Cmp) and part.free == {dim.sym}:
                step = coefficient(add(part.a, -part.b), dim.sym)
                if isinstance(step, IntConst):
                    first = evaluate(add(part.a, -part.b), {dim.sym: 0})
                    if part.op == "lt":
                        yield -(first // step.value) if step.value > 0 else first // -step.value + 1
                    elif first % step.value == 0:
                        yield from (-first // step.value, -first // step.value + 1)
        for bend in _bends(value):
            if bend.free == {dim.sym} and len(bend.args) == 2:
                apart = add(bend.args[0], -bend.args[1])
                if isinstance(step := coefficient(apart, dim.sym), IntConst):
                    first = evaluate(apart, {dim.sym: 0})
                    yield -(first // step.value) if step.value > 0 else first // -step.value + 1


def _work(kernel: FusedKernel) -> float:
    """Of one element, an operation being 1. A guarded load is no vector where it is narrow, and where it jumps: without a condition it is read through squares."""
    found, along = 0.0, [symbol for symbol, step in main_terms(kernel).items() if step == 1]
    for member in kernel.members:
        guarded = {v for value in walk_values(member.body) if isinstance(value, Masked) for v in walk_values(value.value)}
        for value in walk_values(member.body):
            if isinstance(value, Load):
                jumps, narrow = any((stride_along(value.index, symbol) or 0) > 1 for symbol in along), value.dtype.itemsize < 4
                bent = any(not bend.free.isdisjoint(along) for bend in _bends(value))
                found += (
                    10 if (bent and narrow) or (value in guarded and (jumps or narrow)) else 4 if bent else 2 if value in guarded else 1
                )
            elif isinstance(value, Op | Masked):
                found += 10 if isinstance(value, Op) and value.name in HEAVY else 1
    return found


def _part(kernel: FusedKernel, dim: Dim, first: int, size: int) -> FusedKernel:
    """The kernel over the elements from `first` on of a dimension."""
    own = Dim(fresh_symbol(size), size)
    mapping: dict[Expr, Expr] = {dim.sym: add(own.sym if size > 1 else 0, first)}
    rows = tuple(own if d is dim else d for d in kernel.rows if d is not dim or size > 1)
    memo: dict[Value, Value] = {}
    members = [replace(m.mapped(mapping, {}), body=_decided(m.body, mapping, memo)) for m in kernel.members]
    needed, live = set(kernel.stored), []
    for member in reversed(members):
        if member.name in needed:
            live.append(member)
            needed.update(load.buffer for load in member_loads(member.body))
    return replace(kernel, rows=rows, members=tuple(reversed(live)))


def _decided(value: Value, mapping: Mapping[Expr, Expr], memo: dict[Value, Value]) -> Value:
    """The value over other symbols, without the branches that are not taken."""
    found = memo.get(value)
    if found is None:
        found = memo[value] = _chosen(value, mapping, memo)
    return found


def _chosen(value: Value, mapping: Mapping[Expr, Expr], memo: dict[Value, Value]) -> Value:
    if isinstance(value, Load):
        return Load(value.buffer, _index(value.index, mapping, memo), value.dtype)
    if isinstance(value, IndexValue):
        expr = _index(value.expr, mapping, memo)
        return Const(expr.value, value.dtype) if isinstance(expr, IntConst) else IndexValue(expr, value.dtype)
    if isinstance(value, Masked) or (isinstance(value, Op) and value.name == "where"):
        condition = _decided(value.children()[0], mapping, memo)
        if isinstance(condition, Const):
            taken, dropped = value.children()[1:] if condition.value else value.children()[:0:-1]
            if isinstance(value, Masked) or not any(map(_may_raise, walk_values(dropped))):
                return _decided(taken, mapping, memo)
    args = tuple(_decided(child, mapping, memo) for child in value.children())
    if isinstance(value, Masked):
        return Masked(*args)
    if isinstance(value, Op):
        for a, b in (args, args[::-1]) if value.name in ("bitwise_and", "bitwise_or") and value.dtype is torch.bool else ():
            if isinstance(a, Const):
                return (b if a.value else a) if value.name == "bitwise_and" else (a if a.value else b)
        return Op(value.name, args, value.dtype)
    return value


def _may_raise(value: Value) -> bool:
    index = value.index if isinstance(value, Load) else value.expr if isinstance(value, IndexValue) else None
    return (isinstance(value, Op) and value.name in DIVIDING) or (index is not None and any(isinstance(s, Indirect) for s in index.free))


def _index(index: Expr, mapping: Mapping[Expr, Expr], memo: dict[Value, Value]) -> Expr:
    indirect: dict[Expr, Expr] = {s: Indirect(_decided(s.value, mapping, memo), s.extent) for s in index.free if isinstance(s, Indirect)}
    return substitute(index, {**mapping, **indirect})
