"""On a GPU: one launch for many small kernels that are equal but for the memory they read and write. `repeated(schedule)`.

Twenty-six lookups in as many tables take a launch each, and none of them fills the device. Unlike the rows of a table (table.py) these kernels may walk memory in any way; what tells them apart are addresses, and
where in a memory they begin (a column of an index list).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from magneto.base.dataclass import dataclass, replace
from magneto.inductor.loops.ir import Buffer
from magneto.inductor.schedule.alike import Renaming
from magneto.inductor.schedule.kernel import COLUMN, SCATTER, Dim, FusedKernel, Step, TableKernel, member_loads
from magneto.inductor.schedule.schedule import Schedule
from magneto.inductor.schedule.table import heights_of, last_uses, merged, order_of, worthwhile
from magneto.symbolic import Add, Const, Expr, Sym

SMALL = 1 << 20  # elements of a kernel: larger ones fill a device
NEAR = 1 << 20  # bytes of memory that is added to: of that of many kernels the cache holds no more
WIDE = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """`kernel`: over generic buffers. `names`: the buffers of its parameters; `offsets`: the elements at which they begin."""

    kernel: FusedKernel
    wide: bool
    names: tuple[str, ...]
    offsets: tuple[int, ...]


def repeated(plan: Schedule, few: int) -> Schedule:
    """The schedule with `few` and more such kernels as one step."""
    small = [(p, step) for p, step in enumerate(plan.steps) if isinstance(step, FusedKernel) and _small(step, plan.buffers)]
    if len(small) < few:
        return plan
    before = order_of(plan)
    heights = heights_of(before)
    apart: dict[tuple[object, ...], list[tuple[int, FusedKernel]]] = {}  # what tells most kernels apart at once
    for p, step in small:
        sizes = tuple(d.size for d in step.rows), tuple(d.size for d in step.cols)
        apart.setdefault((sizes, len(step.members), heights[p], 0 <= plan.last <= p), []).append((p, step))
    rows: dict[int, _Row] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for key, kernels in apart.items():
        for p, step in kernels if len(kernels) >= few else ():
            row = rows[p] = _row_of(step, plan.buffers)
            groups.setdefault((row.kernel, row.wide, key), []).append(p)
    uses = last_uses(plan)
    joined = [group for group in groups.values() if len(group) >= few and worthwhile(plan, group, uses, few)]
    if not joined:
        return plan

    def one(positions: Sequence[int]) -> Step:
        return _step([plan.steps[p] for p in positions], [rows[p] for p in positions])  # type: ignore[misc]

    return merged(plan, joined, before, one)


def _small(kernel: FusedKernel, buffers: Mapping[str, Buffer]) -> bool:
    """Few elements, and what is added to large memory follows at once on what has written that: it is in the cache still."""
    far = (m for m in kernel.members if m.kind == SCATTER and buffers[m.name].nbytes > NEAR)  # type: ignore[operator]
    few = prod(d.size for d in (*kernel.rows, *kernel.cols)) <= SMALL
    return few and not any(m.kind == COLUMN for m in kernel.members) and not any(far)


def _row_of(kernel: FusedKernel, buffers: Mapping[str, Buffer]) -> _Row:
    begins = _begins(kernel)
    symbols: dict[Expr, Expr] = {d.sym: Sym(f"q{i}", 0, d.size - 1) for i, d in enumerate((*kernel.rows, *kernel.cols))}
    to = Renaming(symbols, begins)
    members = tuple(
        replace(
            m,
            buffer=Buffer(to.name(m.name), (), (), m.buffer.dtype, m.buffer.device),
            body=to.value(m.body),
            store=to.index(m.store),
            flat=None if m.flat is None else to.index(m.flat),
            position=0,
        )
        for m in kernel.members
    )
    rows, cols = (tuple(Dim(symbols[d.sym], d.size) for d in dims) for dims in (kernel.rows, kernel.cols))  # type: ignore[arg-type]
    generic = FusedKernel(rows, cols, members, tuple(map(to.name, kernel.stored)), kernel.origins)
    own = {short: name for name, short in to.names.items()}
    names = tuple(own[short] for short in (*generic.reads(), *generic.stored))
    wide = any(int(buffers[name].storage_numel) >= WIDE for name in names)  # type: ignore[arg-type]
    return _Row(generic, wide, names, tuple(begins.get(name, 0) for name in names))


def _begins(kernel: FusedKernel) -> dict[str, int]:
    """The first element that each buffer is read at, whatever the symbols are."""
    found: dict[str, int] = {}
    changed = set(kernel.writes)
    for load in (load for m in kernel.members for load in member_loads(m.body) if load.buffer not in changed):
        index = load.index
        first = index.const if isinstance(index, Add) else index.value if isinstance(index, Const) else 0
        found[load.buffer] = min(first, found.get(load.buffer, first))
    return {name: first for name, first in found.items() if first > 0 and name not in kernel.computed}


def _step(kernels: Sequence[FusedKernel], rows: Sequence[_Row]) -> TableKernel:
    stored = tuple(name for kernel in kernels for name in kernel.stored)
    origins = tuple(dict.fromkeys(o for kernel in kernels for o in kernel.origins))
    why = f"{len(rows)} kernels that are equal but for their memory"
    names, offsets = tuple(row.names for row in rows), tuple(row.offsets for row in rows)
    return TableKernel(rows[0].kernel, names, (1,) * len(rows), stored, origins, why, offsets, rows[0].wide)
