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
from magneto.symbolic import Expr, Sym

LONGEST = 8192  # elements of a row of which a program holds operands and sums
SHORTEST = 256
SHARED = 1 << 20  # bytes that are read once less


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
    steps = list(plan.steps)
    for sums in plan.steps:
        if isinstance(sums, FusedKernel) and _sums_only(sums):
            steps = _with_columns(steps, sums, plan.buffers)
    return replace(plan, steps=tuple(steps)) if len(steps) != len(plan.steps) else plan


def _with_columns(steps: list[Step], sums: FusedKernel, buffers: Mapping[str, Buffer]) -> list[Step]:
    """The steps, `sums` being part of the first kernel that walks the same rows."""
    for walks in steps:
        if not isinstance(walks, FusedKernel) or walks is sums or (place := _place(steps, walks, sums)) is None:
            continue
        made = _joined(walks, sums, buffers)
        if made is not None:
            return [made if n == place else step for n, step in enumerate(steps) if n == place or (step is not walks and step is not sums)]
    return steps


def _sums_only(kernel: FusedKernel) -> bool:
    made = [m for m in kernel.members if m.is_reduction or not m.full]
    return bool(made) and all(m.kind == "sum" and m.name in kernel.stored and m.name.endswith(".parts") for m in made)


def _place(steps: Sequence[Step], walks: FusedKernel, sums: FusedKernel) -> int | None:
    """Where both may run as one; None: what lies between them depends on one, or one on it."""
    a, b = (next(n for n, step in enumerate(steps) if step is kernel) for kernel in (walks, sums))
    early, late = (walks, sums) if a < b else (sums, walks)
    first, last = min(a, b), max(a, b)
    if late is walks and not set(sums.stored).isdisjoint(walks.reads()):
        return None
    between = steps[first + 1 : last]
    written = {name for step in between for name in _touched(step)[1]}
    if written.isdisjoint(late.reads()):
        return first  # nothing between makes what the later one reads
    read = {name for step in between for name in _touched(step)[0]}
    return last if read.isdisjoint(early.stored) and written.isdisjoint(early.reads()) else None


def _touched(step: Step) -> tuple[Sequence[str], Sequence[str]]:
    if isinstance(step, LibraryCall):
        names = tuple(v.buffer for v in step.views)
        aliased = names if step.may_alias else ()
        return names, (*step.mutates, *aliased, *(b.name for b in step.buffers))
    return step.reads(), step.stored


def _joined(walks: FusedKernel, sums: FusedKernel, buffers: Mapping[str, Buffer]) -> FusedKernel | None:
    if not any(m.is_reduction for m in walks.members) or any(m.kind == COLUMN for m in walks.members):
        return None
    shared = [n for n in walks.reads() if n in sums.reads() and buffers[n].nbytes >= SHARED]  # type: ignore[operator]
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


__all__ = ["join_columns", "rows_beside"]
