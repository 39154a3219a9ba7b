"""On a GPU: long rows that several programs share and read once. `share_rows(schedule)`.

A reduction of rows that no block holds is cut into parts (online.py, split.py): one kernel reduces parts, a small one joins them, and what is computed of the row's numbers walks the row a second time.
Where that walk reads what the first has read at the same places, all three become one kernel: a program keeps its part of the row in registers, publishes the part's numbers, and goes on when those of
all parts are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from magneto.inductor.loops.ir import Buffer, Const, Pointwise, Value, ViewOf
from magneto.inductor.schedule.group import group_of
from magneto.inductor.schedule.inplace import touched
from magneto.inductor.schedule.kernel import POINT, SCATTER, Dim, FusedKernel, Member, SharedRows, Step, member_loads
from magneto.inductor.schedule.schedule import Schedule
from magneto.symbolic import Expr, add, mul

LONGEST = 16384  # elements of a part
MOST = 64  # parts of a row
WORTH = 1 << 24  # bytes that are read once less
NUMBERS = (torch.float32, torch.float64)  # dtypes of what a row's numbers are exchanged in: nothing is rounded on the way


def share_rows(plan: Schedule) -> Schedule:
    """The schedule with such triples of kernels joined."""
    steps: list[Step | None] = list(plan.steps)
    buffers = dict(plan.buffers)
    outputs = Counter(view.buffer for view in plan.program.outputs if isinstance(view, ViewOf))
    touching = [touched(step) for step in plan.steps]
    readers: dict[str, list[int]] = {}
    for place, (names, _) in enumerate(touching):
        for name in names:
            readers.setdefault(name, []).append(place)
    for first, parts in enumerate(plan.steps):
        second = _only_reader(parts, readers, outputs)
        if second is None:
            continue
        whole = plan.steps[second]
        for last in sorted({r for name in whole.stored for r in readers.get(name, ())}):  # type: ignore[union-attr]
            result = plan.steps[last]
            outside = {name for name in whole.stored if outputs[name] or readers.get(name, []) != [last]}  # type: ignore[union-attr]
            made = _joined(parts, whole, result, outside)
            if (
                made is not None
                and all(s is not None for s in (steps[first], steps[second], steps[last]))
                and _apart(touching, first, second, last)
            ):
                rows = prod(d.size for d in made.whole.rows)
                counters = Buffer(made.counters, (rows,), (1,), torch.int32, buffers[made.stored[0]].device, True)
                buffers[counters.name] = counters
                steps[first], steps[second], steps[last] = None, _zeros(counters), made
                break
    if len(buffers) == len(plan.buffers):
        return plan
    return replace(plan, steps=tuple(step for step in steps if step is not None), buffers=buffers)


def _only_reader(parts: Step, readers: dict[str, list[int]], outputs: Counter[str]) -> int | None:
    """The one step that reads what a kernel computes of parts of rows."""
    if not isinstance(parts, FusedKernel) or not parts.cols or not parts.rows or any(outputs[name] for name in parts.stored):
        return None
    if prod(d.size for d in parts.cols) > LONGEST or not 1 < parts.rows[-1].size <= MOST:
        return None
    if any(m.down or (m.name in parts.stored) != m.is_reduction or not (m.is_reduction or m.kind == POINT) for m in parts.members):
        return None
    found = {place for name in parts.stored for place in readers.get(name, ())}
    return found.pop() if len(found) == 1 else None


def _apart(touching: Sequence[tuple[Sequence[str], Sequence[str]]], first: int, second: int, last: int) -> bool:
    """May the first two run where the last does?"""
    reads = {name for place in (first, second) for name in touching[place][0]}
    writes = {name for place in (first, second) for name in touching[place][1]}
    between = [touching[place] for place in range(first + 1, last) if place != second]
    return first < second < last and not any(writes.intersection(r) or reads.intersection(w) for r, w in between)


def _joined(parts: Step, whole: Step, result: Step, outside: set[str]) -> SharedRows | None:
    if not all(isinstance(step, FusedKernel) for step in (parts, whole, result)):
        return None
    assert isinstance(parts, FusedKernel) and isinstance(whole, FusedKernel) and isinstance(result, FusedKernel)
    *rows, part = parts.rows
    sizes = [d.size for d in rows]
    length = prod(d.size for d in parts.cols)
    if [d.size for d in (*whole.rows, *whole.cols)] != [*sizes, part.size] or len(whole.cols) != 1 or len(parts.cols) != 1:
        return None
    if any(m.down or m.kind == SCATTER or m.full and not m.is_reduction for m in whole.members) or set(whole.reads()) != set(parts.stored):
        return None
    if result.cols or [d.size for d in result.rows] != [*sizes, part.size * length] or any(m.kind != POINT for m in result.members):
        return None
    if any(m.buffer.dtype not in NUMBERS for m in (*parts.members, *whole.members) if m.name in (*parts.stored, *whole.stored)):
        return None
    symbols = {d.sym for d in (*parts.rows, *parts.cols)}
    if whole.cols[0].sym in symbols or {m.name for m in parts.members}.intersection(m.name for m in result.members):
        return None
    whole = _over(whole, (*rows, *whole.cols), {old.sym: new.sym for old, new in zip(whole.rows, rows, strict=True)})
    column = add(0, 0, mul(part.sym, length), parts.cols[0].sym)
    places = (*(d.sym for d in rows), column)
    result = _over(result, (*parts.rows, *parts.cols), {old.sym: new for old, new in zip(result.rows, places, strict=True)})
    if not _reads_again(parts.members, result.members, prod(sizes) * part.size * length):
        return None
    stored = (*parts.stored, *(name for name in whole.stored if name in outside), *result.stored)
    origins = tuple(dict.fromkeys((*parts.origins, *whole.origins, *result.origins)))
    why = "; ".join(
        filter(None, (result.why, f"{part.size} programs share a row, each holds its part until the others' numbers are there"))
    )
    return SharedRows(parts, whole, result, f"{parts.stored[0]}.counters", stored, origins, why)


def _over(kernel: FusedKernel, dims: tuple[Dim, ...], mapping: dict[Expr, Expr]) -> FusedKernel:
    """The kernel over other symbols, the last of which it walks."""
    memo: dict[Value, Value] = {}
    return replace(kernel, rows=dims[:-1], cols=dims[-1:], members=tuple(m.mapped(mapping, memo) for m in kernel.members))


def _reads_again(parts: Sequence[Member], result: Sequence[Member], elements: int) -> bool:
    """Is much memory read at the same places by both, and none read by the first that the second has written?"""
    first = {load for m in parts for load in member_loads(m.body)}
    again = first.intersection(load for m in result for load in member_loads(m.body))
    return elements * sum(load.dtype.itemsize for load in again) >= WORTH


def _zeros(counters: Buffer) -> FusedKernel:
    group = group_of(Pointwise(counters, Const(0, counters.dtype), ()), 0)
    return FusedKernel(group.rows, group.cols, tuple(group.members), (counters.name,), (), "how many parts of each row are done")


__all__ = ["share_rows"]
