"""Reductions of few elements written out. `unrolled(schedule)`.

On a GPU a block of a reduction holds rows and what is reduced side by side, so that of four elements a row most threads would wait for the folding. Where memory is contiguous along the rows (sums of a few
looked up vectors, of the copies of a head) each thread adds up one row: the kernel is pointwise, and its loads are as wide as any.

On a CPU rows of few elements are no vectors, and what is computed behind them (an exponential of each distance) is none either. Written out, the vector runs over rows, whose elements the
compiler reads together where there are as many as it can sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from itertools import product
from math import prod

import torch

from magneto.inductor.loops.ir import Const as Number
from magneto.inductor.loops.ir import IndexValue, Indirect, Load, Masked, Op, Value, walk_values
from magneto.inductor.loops.span import symbols_of
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member, member_loads
from magneto.inductor.schedule.schedule import Schedule
from magneto.symbolic import ONE, ZERO, Const, Expr, Sym, coefficient, evaluate, substitute

FEW = 8  # elements that are reduced
RECORD, MANY = 4, 1 << 18  # elements of a row wherever they lie (coordinates), where there are so many rows
ALONG = 16  # rows, at least, that lie one behind the other
MOST = 256  # operations, all written out
SORTED = (2, 3, 4, 8, 16)  # elements side by side that gcc reads as vectors and sorts
SIDE_BY_SIDE = 7  # elements of a row of results, at most, that are written out as well (cpp_nest.SHORT)
FOLDS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "bitwise_or", "all": "bitwise_and"}


def unrolled(plan: Schedule, on_gpu: bool = True) -> Schedule:
    """The schedule with such kernels as pointwise ones."""
    steps = tuple([_written_out(step, on_gpu) if isinstance(step, FusedKernel) else step for step in plan.steps])
    return replace(plan, steps=steps) if steps != plan.steps else plan


def _written_out(kernel: FusedKernel, on_gpu: bool) -> FusedKernel:
    if worthwhile(kernel, on_gpu):
        return _unrolled(kernel)
    return kernel if on_gpu else _side_by_side(kernel) or kernel


def worthwhile(kernel: FusedKernel, on_gpu: bool = True) -> bool:
    """Few elements, nothing stored but numbers of rows, folds that are operations, and rows that lie one behind the other."""
    count = prod(d.size for d in kernel.cols)
    if not kernel.cols or not kernel.rows or count > (FEW if on_gpu else SORTED[-1]):
        return False
    if not _folds(kernel) or any(m.full and not m.is_reduction and m.name in kernel.stored for m in kernel.members):
        return False
    operations = sum(len(walk_values(m.body)) for m in kernel.members if m.full)
    return operations * count <= MOST and (
        _contiguous(kernel, count <= FEW, not on_gpu and count in SORTED) or (on_gpu and _coordinates(kernel, count))
    )


def _folds(kernel: FusedKernel) -> bool:
    """Are all reductions operations, with nothing else that walks?"""
    for member in kernel.members:
        if member.is_reduction:
            logical = member.acc_dtype is torch.bool or member.body.dtype is torch.bool
            if member.kind not in FOLDS or member.down or logical != (member.kind in ("any", "all")):
                return False
        elif member.kind != POINT:
            return False
    return True


def _coordinates(kernel: FusedKernel, count: int) -> bool:
    wide = all(load.dtype.itemsize >= 4 for m in kernel.members for load in member_loads(m.body))
    return count <= RECORD and wide and prod(d.size for d in kernel.rows) >= MANY


def _contiguous(kernel: FusedKernel, few: bool, apart: bool) -> bool:
    """Do results lie one behind the other, and what is read (where there are `few`) too, or `apart`, but nowhere along other rows?"""
    stores = [m.store for m in kernel.members if m.name in kernel.stored]
    loads = [load.index for m in kernel.members for load in member_loads(m.body)]
    if apart and any(_records(kernel, stores, loads, short) for short in kernel.rows):
        return True
    along = next((d for d in kernel.rows if d.size >= ALONG and all(coefficient(s, d.sym) is ONE for s in stores)), None)
    if along is None:
        return False
    if few and all(coefficient(index, along.sym) in (ZERO, ONE) for index in loads):
        return True
    return apart and not any(
        coefficient(index, d.sym) is ONE for index in loads if coefficient(index, along.sym) not in (ZERO, ONE) for d in kernel.rows
    )


def _records(kernel: FusedKernel, stores: list[Expr], loads: list[Expr], short: Dim) -> bool:
    """Does each row of few elements give one of as few, row behind row (products of all but one)? The vector runs over the rows, both of whose dimensions are written out."""
    record = Const(short.size)
    if not 2 <= short.size <= SIDE_BY_SIDE or any(coefficient(s, short.sym) is not ONE for s in stores):
        return False
    along = next((d for d in kernel.rows if d.size >= ALONG and all(coefficient(s, d.sym) == record for s in stores)), None)
    return along is not None and all(coefficient(index, along.sym) in (ZERO, ONE, record) for index in loads)


def _side_by_side(kernel: FusedKernel) -> FusedKernel | None:
    """The same for rows of a few elements that give as many (vectors of length one, softmax over three classes): what is reduced is a dimension of the results then, which the vector loop over the rows writes out."""
    if len(kernel.cols) != 1 or not _folds(kernel) or not any(m.is_reduction for m in kernel.members):
        return None
    (col,) = kernel.cols
    record, results = Const(col.size), [m for m in kernel.members if m.name in kernel.stored]
    whole, single = ([m.store for m in results if (m.full and not m.is_reduction) == full] for full in (True, False))
    if not whole or col.size not in SORTED or col.size > SIDE_BY_SIDE or any(coefficient(s, col.sym) is not ONE for s in whole):
        return None
    along = next((d for d in kernel.rows if d.size >= ALONG and all(coefficient(s, d.sym) == record for s in whole)), None)
    if along is None or any(coefficient(s, along.sym) is not ONE for s in single):
        return None
    made = _unrolled(kernel)
    made = replace(made, rows=(*kernel.rows, col))
    values = [v for m in made.members for v in walk_values(m.body)]
    loads = [v.index for v in values if isinstance(v, Load)]
    steps = (ZERO, ONE, record) if any(isinstance(v, Op) and v.name in ("maximum", "minimum") for v in values) else None
    for index in loads:
        step = coefficient(index, along.sym)
        if any(isinstance(s, Indirect) for s in index.free) or step is None or (steps and step not in steps):
            return None
    masked = (v for v in values if isinstance(v, Masked) and symbols_of(v.cond) != {col.sym})
    if len(values) * col.size > MOST or any(isinstance(x, Load) for v in masked for x in walk_values(v.value)):
        return None
    return made


def _unrolled(kernel: FusedKernel) -> FusedKernel:
    full = {m.name: m for m in kernel.members if m.full and not m.is_reduction}
    turns = [_Turn(full, places) for places in product(*([(d.sym, Const(n)) for n in range(d.size)] for d in kernel.cols))]
    members = []
    for member in kernel.members:
        if member.is_reduction:
            members.append(_folded(member, turns))
        elif member.name not in full or member.name in kernel.stored:
            members.append(member if member.name not in full else replace(member, body=_inlined(member.body, full)))
    why = "; ".join(filter(None, (kernel.why, f"reductions of {len(turns)} elements are written out")))
    return FusedKernel(kernel.rows, (), tuple(replace(m, full=True) for m in members), kernel.stored, kernel.origins, why)


def _folded(member: Member, turns: list[_Turn]) -> Member:
    acc, fold = member.acc_dtype, FOLDS[member.kind]
    value = reduce(lambda a, b: Op(fold, (a, b), acc), [turn.value(member.body) for turn in turns])
    goal = member.buffer.dtype
    return replace(member, kind=POINT, body=value if acc is goal else Op("convert_element_type", (value,), goal))


def _inlined(value: Value, full: Mapping[str, Member]) -> Value:
    """With what other members compute at the same place in place of loads of them."""
    return _Turn(full, ()).value(value)


class _Turn:
    """Values at one place of what is reduced. `full`: members that are computed there, written out in place of loads of them."""

    def __init__(self, full: Mapping[str, Member], places: tuple[tuple[Sym, Const], ...]) -> None:
        self.full = full
        self.mapping: dict[Expr, Expr] = dict(places)
        self.memo: dict[Value, Value] = {}

    def value(self, value: Value) -> Value:
        found = self.memo.get(value)
        if found is None:
            found = self.memo[value] = self._value(value)
        return found

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load):
            if (member := self.full.get(value.buffer)) is not None:
                return self.value(member.body)
            return Load(value.buffer, self._index(value.index), value.dtype)
        if isinstance(value, IndexValue):
            place = self._index(value.expr)
            return IndexValue(place, value.dtype) if place.free else Number(evaluate(place, {}), value.dtype)
        if isinstance(value, Op):
            return Op(value.name, tuple(self.value(a) for a in value.args), value.dtype)
        if isinstance(value, Masked):
            cond = self.value(value.cond)
            if isinstance(cond, Number):
                return self.value(value.value if cond.value else value.other)
            return Masked(cond, self.value(value.value), self.value(value.other))
        return value

    def _index(self, index: Expr) -> Expr:
        computed: dict[Expr, Expr] = {s: Indirect(self.value(s.value), s.extent) for s in index.free if isinstance(s, Indirect)}
        return substitute(index, {**self.mapping, **computed})
