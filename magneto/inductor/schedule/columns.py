"""On a GPU: sums of columns computed by the kernel that walks the rows. `join_columns(schedule)`.

A norm's backward reduces each row, and sums up the same memory over all rows for its weight and bias. The second is cut into partial sums (split.py), one for each program of the
first kernel, which then walks a chunk of rows and holds a partial sum of every column meanwhile: memory is read once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from magneto.inductor.loops.ir import Buffer, LibraryCall, Load, Program, Reduction, loads
from magneto.inductor.schedule.domain import align, replaced, strided_terms
from magneto.inductor.schedule.kernel import COLUMN, Dim, FusedKernel, Member, Step, member_loads
from magneto.inductor.schedule.schedule import Schedule
from magneto.symbolic import ONE, Expr, Sym, coefficient

LONGEST = 8192  # elements of a row of which a program holds operands and sums
SHORTEST = 64
SHARED = 1 << 20  # bytes that are read once less
COLUMNS = ".columns"
"""How the name of a partial sum for each program that walks rows ends."""


def rows_beside(program: Program, across: Callable[[Reduction], bool]) -> dict[str, int]:
    """The reductions over the rows of what another one walks row by row, with the length of these rows: sums that may become columns of its kernel. `across`: whether memory is contiguous along a reduction's rows."""
    rows: dict[str, set[tuple[int, int]]] = {}
    for node in program.nodes:
        if isinstance(node, Reduction) and (sizes := _sizes(node)) is not None and SHORTEST <= sizes[1] <= LONGEST and not across(node):
            for name in _walked(node):
                rows.setdefault(name, set()).add(sizes)
    found = {}
    for node in program.nodes:
        if isinstance(node, Reduction) and node.kind == "sum" and (sizes := _sizes(node)) is not None and across(node):
            if any(sizes[::-1] in rows.get(name, ()) for name in _walked(node)):
                found[node.buffers[0].name] = sizes[0]
    return found


def _sizes(node: Reduction) -> tuple[int, int] | None:
    rows, length = ([s for s in sizes if isinstance(s, int)] for sizes in (node.ranges, node.reduce_ranges))
    return (prod(rows), prod(length)) if len(rows) + len(length) == len(node.ranges) + len(node.reduce_ranges) else None


def _walked(node: Reduction) -> Iterable[str]:
    """Buffers that are read at every point."""
    rank = sum(1 for s in (*node.ranges, *node.reduce_ranges) if s != 1)
    return (load.buffer for load in loads(node.body) if len(load.index.free) == rank)


def join_columns(plan: Schedule) -> Schedule:
    """The schedule with such pairs of kernels joined."""
    steps = _Steps(plan.steps)
    joined = False
    for place, sums in enumerate(plan.steps):
        if isinstance(sums, FusedKernel) and _sums_only(sums):
            joined |= _with_columns(steps, place, sums, plan.buffers)
    return replace(plan, steps=tuple(step for step in steps.steps if step is not None)) if joined else plan


class _Steps:
    """The steps by place, None where one has been joined to another, and which places read and write each buffer."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: list[Step | None] = list(steps)
        self.reads: list[frozenset[str]] = []
        self.writes: list[frozenset[str]] = []
        self.readers: dict[str, set[int]] = {}
        self.writers: dict[str, set[int]] = {}
        for place, step in enumerate(steps):
            reads, writes = map(frozenset, _touched(step))
            self.reads.append(reads)
            self.writes.append(writes)
            self._enter(place)

    def _enter(self, place: int) -> None:
        for users, names in ((self.readers, self.reads[place]), (self.writers, self.writes[place])):
            for name in names:
                users.setdefault(name, set()).add(place)

    def replace(self, a: int, b: int, place: int, step: Step) -> None:
        """One step instead of those at `a` and `b`, at one of these places."""
        for old in (a, b):
            for users, names in ((self.readers, self.reads[old]), (self.writers, self.writes[old])):
                for name in names:
                    users[name].discard(old)
            self.steps[old], self.reads[old], self.writes[old] = None, frozenset(), frozenset()
        self.steps[place] = step
        self.reads[place], self.writes[place] = map(frozenset, _touched(step))
        self._enter(place)

    def place(self, walks: int, sums: int) -> int | None:
        """Where both may run as one; None: what lies between them depends on one, or one on it."""
        first, last = min(walks, sums), max(walks, sums)
        if last == walks and not self.writes[sums].isdisjoint(self.reads[walks]):
            return None

        def between(users: Mapping[str, set[int]], names: Iterable[str]) -> bool:
            return any(first < p < last for name in names for p in users.get(name, ()))

        if not between(self.writers, self.reads[last]):
            return first  # nothing between makes what the later one reads
        apart = between(self.readers, self.writes[first]) or between(self.writers, self.reads[first])
        return None if apart else last


def _with_columns(steps: _Steps, place: int, sums: FusedKernel, buffers: Mapping[str, Buffer]) -> bool:
    """Makes the kernel at `place` a part of the first one that walks the same rows. Whether there is one."""
    shared = {name for name in steps.reads[place] if buffers[name].nbytes >= SHARED}  # type: ignore[operator]
    for other in sorted({p for name in shared for p in steps.readers[name]} - {place}):
        walks = steps.steps[other]
        if not isinstance(walks, FusedKernel) or not _walks_rows(walks) or (goal := steps.place(other, place)) is None:
            continue
        made = _joined(walks, sums, [name for name in walks.reads() if name in shared])
        if made is not None:
            steps.replace(other, place, goal, made)
            return True
    return False


def _walks_rows(kernel: FusedKernel) -> bool:
    if not any(m.is_reduction for m in kernel.members) or any(m.kind == COLUMN for m in kernel.members):
        return False
    cols = frozenset(d.sym for d in kernel.cols)
    along = [load.index for m in kernel.members for load in member_loads(m.body) if load.index.free & cols]
    return not any(
        coefficient(index, d.sym) is ONE for index in along for d in kernel.rows if d.size > 1
    )  # a few rows are less than a sector


def _sums_only(kernel: FusedKernel) -> bool:
    """Sums that were cut for as many programs as may walk rows."""
    made = [m for m in kernel.members if m.is_reduction or not m.full]
    return bool(made) and all(m.kind == "sum" and m.name in kernel.stored and m.name.endswith(COLUMNS) for m in made)


def _touched(step: Step) -> tuple[Sequence[str], Sequence[str]]:
    if isinstance(step, LibraryCall):
        names = tuple(v.buffer for v in step.views)
        aliased = names if step.may_alias else ()
        return names, (*step.mutates, *aliased, *(b.name for b in step.buffers))
    return step.reads(), step.writes


def _joined(walks: FusedKernel, sums: FusedKernel, shared: Iterable[str]) -> FusedKernel | None:
    for name in shared:
        made = _aligned(walks, sums, _loads(walks, name)[0], _loads(sums, name)[0])
        if made is not None:
            return made
    return None


def _loads(kernel: FusedKernel, name: str) -> list[Load]:
    return [load for m in kernel.members for load in member_loads(m.body) if load.buffer == name]


def _aligned(walks: FusedKernel, sums: FusedKernel, a: Load, b: Load) -> FusedKernel | None:
    """Both over the symbols in which they read a buffer at the same places; None where they do not, or the rows are not those that are summed up."""
    forms = strided_terms(a.index, _sizes_of(walks)), strided_terms(b.index, _sizes_of(sums))
    if forms[0] is None or forms[1] is None or forms[0][1] != forms[1][1]:
        return None
    if any(len(form[0]) != len(_dims(kernel)) for form, kernel in zip(forms, (walks, sums), strict=True)):  # type: ignore[index]
        return None
    alignment = align(forms[0][0], forms[1][0])
    if alignment is None:
        return None
    rows, cols = replaced(walks.rows, alignment, 1), replaced(walks.cols, alignment, 1)
    guest_rows, guest_cols = replaced(sums.rows, alignment, 2), replaced(sums.cols, alignment, 2)
    kept, summed, along = {d.sym for d in guest_rows}, {d.sym for d in guest_cols}, {d.sym for d in cols}
    if not (summed <= {d.sym for d in rows} and along <= kept) or not SHORTEST <= prod(d.size for d in cols) <= LONGEST:
        return None
    own = [m.mapped(alignment.host, {}) for m in walks.members]
    added = [replace(m, kind=COLUMN) if m.is_reduction else m for m in (m.mapped(alignment.guest, {}) for m in sums.members)]
    if not _sound(own, added):
        return None
    why = "; ".join(filter(None, (walks.why, sums.why, "sums of columns join the kernel that walks the rows")))
    return FusedKernel(rows, cols, (*own, *added), (*walks.stored, *sums.stored), (*walks.origins, *sums.origins), why)


def _dims(kernel: FusedKernel) -> tuple[Dim, ...]:
    return tuple(d for d in (*kernel.rows, *kernel.cols) if d.size != 1)


def _sizes_of(kernel: FusedKernel) -> dict[Sym, int]:
    return {d.sym: d.size for d in (*kernel.rows, *kernel.cols)}


def _sound(own: Sequence[Member], added: Sequence[Member]) -> bool:
    """What the sums read of the other kernel's results, they read where these are computed."""
    places: dict[str, Expr] = {m.name: m.store for m in own}
    return all(load.index is places.get(load.buffer, load.index) for m in added for load in member_loads(m.body))
