"""One kernel for many tensors: kernels that compute the same of different tensors become rows of a table that one loop body runs over.

The updates of all parameters differ in nothing but the tensors and their sizes. What takes part is a kernel that walks dense memory from the first
element to the last, so that the size is a number and no part of the text; single numbers (a step size) may be read besides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from math import prod

from magneto.base.dataclass import dataclass, replace
from magneto.base.varying import any_size
from magneto.inductor.loops.ir import Buffer, LibraryCall, Load, Masked, Op, Value, ViewOf
from magneto.inductor.loops.ir import Const as ConstValue
from magneto.inductor.schedule.domain import strided_terms
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.inplace import may_raise, touched
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member, Step, TableKernel, member_loads
from magneto.inductor.schedule.schedule import Schedule
from magneto.symbolic import ZERO, Const, Expr, Sym

FEW = 4  # kernels in the middle of a graph: fewer are not worth another order
FILL = 1 << 18  # elements of memory that is written without reading any: more of them are no row
SMALL = 1 << 16  # bytes that may live longer for the sake of a table
FLAT = Dim(Sym("x0", 0, (1 << 40) - 1), 1 << 40)
"""The dimension of every table: its size is that of the row."""


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A kernel in the form of a table: equal keys have equal bodies."""

    key: tuple[object, ...]
    members: tuple[Member, ...]
    stored: tuple[str, ...]
    names: Mapping[str, str]  # generic buffer -> the kernel's
    size: int
    rows: bool
    cols: bool


def row_of(kernel: FusedKernel) -> _Row | None:
    """The kernel as a row; None where it walks memory in another way."""
    dims = kernel.rows or kernel.cols
    if not kernel.reads() and prod(d.size for d in dims) > FILL:
        return None
    if (kernel.rows and kernel.cols) or (kernel.cols and not _folds_once(kernel)) or may_raise(kernel):
        return None
    walk = _walk(kernel) if dims else ZERO
    if walk is None or not _dense(walk, dims):
        return None
    generic = _Generic(walk, FLAT.sym if dims else ZERO)
    members = []
    for member in kernel.members:
        body = generic.value(member.body)
        whole = member.full and not member.is_reduction
        if body is None or (member.store is not walk if whole else not isinstance(member.store, Const)):
            return None
        buffer = Buffer(generic.name(member.name), (), (), member.buffer.dtype, member.buffer.device)
        members.append(Member(member.kind, buffer, body, generic.symbol if whole else member.store, member.full, member.acc_dtype))
    stored = tuple(generic.name(name) for name in kernel.stored)
    shape = (bool(kernel.rows), bool(kernel.cols))
    key = (shape, stored, *((m.name, m.kind, m.body, m.store, m.full, m.acc_dtype, m.buffer.dtype) for m in members))
    names = {short: name for name, short in generic.names.items()}
    return _Row(key, tuple(members), stored, names, prod(d.size for d in dims), *shape)


def _folds_once(kernel: FusedKernel) -> bool:
    """Is it one walk over all elements, with reductions that can be joined from parts, and then at most single numbers?"""
    stages = member_stages(kernel.members)
    kinds = {m.kind for m in kernel.members}
    return kinds <= {POINT, "sum", "prod", "max", "min", "any", "all"} and not any(stages[m.name] for m in kernel.members if m.full)


def _walk(kernel: FusedKernel) -> Expr | None:
    """The index by which elements are walked; None where nothing depends on the place."""
    indices = [m.store for m in kernel.members] + [load.index for m in kernel.members for load in member_loads(m.body)]
    return next((index for index in indices if not isinstance(index, Const)), None)


def _dense(index: Expr, dims: Sequence[Dim]) -> bool:
    """Does the index go through all of a dense block of memory, each element once?"""
    found = strided_terms(index, {d.sym: d.size for d in dims})
    if found is None or found[1] != 0 or len(found[0]) != len(dims):
        return False
    step = 1
    for stride, size, _ in found[0]:
        if stride != step:
            return False
        step *= size
    return True


class _Generic:
    """Values over generic buffers and one flat symbol in place of the index `walk`."""

    def __init__(self, walk: Expr, symbol: Expr) -> None:
        self.walk, self.symbol = walk, symbol
        self.names: dict[str, str] = {}
        self.memo: dict[Value, Value | None] = {}

    def name(self, buffer: str) -> str:
        return self.names.setdefault(buffer, f"b{len(self.names)}")

    def value(self, value: Value) -> Value | None:
        """None for what depends on the place in another way."""
        if value not in self.memo:
            self.memo[value] = self._value(value)
        return self.memo[value]

    def _value(self, value: Value) -> Value | None:
        if isinstance(value, ConstValue):
            return value
        if isinstance(value, Load):
            if value.index is self.walk:
                return Load(self.name(value.buffer), self.symbol, value.dtype)
            return Load(self.name(value.buffer), value.index, value.dtype) if isinstance(value.index, Const) else None
        if not isinstance(value, (Op, Masked)):
            return None
        parts = [self.value(child) for child in value.children()]
        if any(part is None for part in parts):
            return None
        return Op(value.name, tuple(parts), value.dtype) if isinstance(value, Op) else Masked(*parts)  # type: ignore[arg-type]


# ---- the pass ------------------------------------------------------------------------------------------------------------


def gather(plan: Schedule, few: int = FEW, folds: bool = True) -> Schedule:
    """The schedule with equal kernels that do not wait for each other as tables. `few`: how many there must be in the middle of a graph. `folds`: also reductions."""
    if any_size():  # a table's rows are data
        return plan
    found = ((p, row_of(step)) for p, step in enumerate(plan.steps) if isinstance(step, FusedKernel) and (folds or not step.cols))
    rows = {p: row for p, row in found if row is not None}
    if len(rows) < 2:
        return plan
    before = order_of(plan)
    heights = heights_of(before)
    groups: dict[tuple[object, ...], list[int]] = {}
    for position, row in rows.items():
        late = 0 <= plan.last <= position
        groups.setdefault((row.key, heights[position], late), []).append(position)
    uses = last_uses(plan)
    tables = [g for (_, _, late), g in groups.items() if len(g) > 1 and (late or worthwhile(plan, g, uses, few))]
    if not tables:
        return plan
    return merged(plan, tables, before, lambda group: _table([plan.steps[p] for p in group], [rows[p] for p in group]))  # type: ignore[misc]


def last_uses(plan: Schedule) -> dict[str, int]:
    """The last step that reads each buffer."""
    return {name: p for p, step in enumerate(plan.steps) for name in touched(step)[0]}


def worthwhile(plan: Schedule, group: Sequence[int], last_use: Mapping[str, int], few: int) -> bool:
    """In the middle of a graph: nothing that is read may have to live longer."""
    if len(group) < few:
        return False
    outside = {b.name for b in (*plan.program.inputs, *(c.buffer for c in plan.program.constants)) if b is not None}
    outside.update(view.buffer for view in plan.program.outputs if isinstance(view, ViewOf))
    for position in group:
        for name in touched(plan.steps[position])[0]:
            if name not in outside and last_use[name] < group[-1] and int(plan.buffers[name].nbytes) > SMALL:  # type: ignore[arg-type]
                return False
    return True


def order_of(plan: Schedule) -> list[set[int]]:
    """Per step those that must run before it: who wrote what it reads, who reads or wrote what it writes; library calls keep their order."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    call = -1
    result: list[set[int]] = []
    for position, step in enumerate(plan.steps):
        reads, writes = touched(step)
        before = {writer[name] for name in reads if name in writer}
        for name in writes:
            for memory in (name, plan.into.get(name, name)):
                before.update(readers.get(memory, ()))
                if memory in writer:
                    before.add(writer[memory])
        if isinstance(step, LibraryCall):
            before.update({call} - {-1})
            call = position
        before.discard(position)
        for name in reads:
            readers.setdefault(name, []).append(position)
        for name in writes:
            writer[name] = writer[plan.into.get(name, name)] = position
        result.append(before)
    return result


def heights_of(before: Sequence[set[int]]) -> list[int]:
    """Steps of one height do not wait for each other, nor does anything between them: the longest way to the end shrinks along every way."""
    heights = [0] * len(before)
    for position in reversed(range(len(before))):
        for earlier in before[position]:
            heights[earlier] = max(heights[earlier], heights[position] + 1)
    return heights


def merged(plan: Schedule, groups: Sequence[Sequence[int]], before: Sequence[set[int]], one: Callable[[Sequence[int]], Step]) -> Schedule:
    """One step in place of the kernels of each group, in an order that respects `before`: by the place of their last kernel."""
    home = list(range(len(plan.steps)))
    made: dict[int, Step] = dict(enumerate(plan.steps))
    for group in groups:
        for position in group:
            home[position] = group[-1]
            del made[position]
        made[group[-1]] = one(group)
    waits: dict[int, set[int]] = {place: set() for place in made}
    followers: dict[int, list[int]] = {place: [] for place in made}
    for position, earlier in enumerate(before):
        waits[home[position]].update(home[p] for p in earlier)
    for place, needed in waits.items():
        needed.discard(place)
        for other in needed:
            followers[other].append(place)
    left = {place: len(needed) for place, needed in waits.items()}
    ready = [place for place, count in left.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for follower in followers[place]:
            left[follower] -= 1
            if not left[follower]:
                heapq.heappush(ready, follower)
    assert len(order) == len(made), "a table waits for itself"
    last = plan.last if plan.last < 0 else sum(place < plan.last for place in order)
    return replace(plan, steps=tuple(made[place] for place in order), last=last)


def _table(kernels: Sequence[FusedKernel], rows: Sequence[_Row]) -> TableKernel:
    first = rows[0]
    body = FusedKernel((FLAT,) if first.rows else (), (FLAT,) if first.cols else (), first.members, first.stored, kernels[0].origins)
    columns = (*body.reads(), *body.stored)
    table = tuple(tuple(row.names[name] for name in columns) for row in rows)
    stored = tuple(name for kernel in kernels for name in kernel.stored)
    origins = tuple(dict.fromkeys(o for kernel in kernels for o in kernel.origins))
    return TableKernel(
        body, table, tuple(row.size for row in rows), stored, origins, f"{len(rows)} kernels that compute the same of different tensors"
    )
