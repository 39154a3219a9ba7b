"""Long rows that are read twice, once for their numbers and once for the results: on a GPU in one launch, in which the second reading trails behind the first and finds in the cache what that has read.
`trailing(plan)`.

A softmax of rows that no block holds is three kernels: numbers of chunks (schedule/online.py), numbers of rows, results. Joined, a program computes the numbers of one chunk, and then the results of the
chunk `BEHIND` bytes before, for which it waits until all chunks of that row have theirs. Programs take chunks in order, by an atomic counter, and give before they wait, so that nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from magneto.inductor.loops.ir import Buffer, Const, LibraryCall, Load, ViewOf, index_symbols
from magneto.inductor.schedule.group import dims_of
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member, Step, member_loads
from magneto.inductor.schedule.schedule import Schedule
from magneto.symbolic import Expr, add, mul, substitute

BEHIND = 1 << 23  # bytes
WORTH = 1 << 26  # bytes of a result: less stays in the cache anyway
APART = 32  # elements between counters


@dataclass(frozen=True, slots=True)
class TrailingKernel(FusedKernel):
    """A pointwise kernel over rows, the last dimension of which is long; `first` gives numbers of chunks, `second` numbers of rows, which are nowhere in memory. `scratch` begins as zeros and holds a
    counter of the chunks that are taken, one per row of those that have given, and the numbers of chunks."""

    first: FusedKernel = field(kw_only=True)
    second: FusedKernel = field(kw_only=True)
    scratch: Buffer = field(kw_only=True)

    def reads(self) -> tuple[str, ...]:
        inside = {*self.first.stored, *self.second.stored}
        names = (*self.first.reads(), *FusedKernel.reads(self), self.scratch.name)
        return tuple(dict.fromkeys(name for name in names if name not in inside))

    @property
    def writes(self) -> tuple[str, ...]:
        return (*self.stored, self.scratch.name)

    @property
    def count(self) -> int:
        """Rows."""
        return prod(d.size for d in self.rows[:-1])

    @property
    def block(self) -> int:
        """Results that a program computes: as many blocks make a row as chunks do."""
        return _block(self.first)

    @property
    def places(self) -> dict[str, int]:
        """Where in `scratch` numbers of chunks begin."""
        size = self.count * self.first.rows[-1].size
        return {name: APART * (self.count + 1) + n * size for n, name in enumerate(self.first.stored)}


def trailing(plan: Schedule) -> Schedule:
    """The schedule with such triples joined, each behind a kernel that writes the zeros."""
    steps, buffers = list(plan.steps), dict(plan.buffers)
    for position in reversed(range(len(steps) - 2)):
        found = _joined(plan, position)
        if found is not None:
            buffers[found.scratch.name] = found.scratch
            steps[position : position + 3] = [*_zeros(found), found]
    if len(steps) == len(plan.steps):
        return plan
    return replace(plan, steps=tuple(steps), buffers=buffers)


def _zeros(kernel: TrailingKernel) -> Iterator[FusedKernel]:
    scratch = kernel.scratch
    (at,) = index_symbols(scratch.shape)
    member = Member(POINT, scratch, Const(0.0, scratch.dtype), at, True, scratch.dtype)
    yield FusedKernel(dims_of((at,), scratch.shape), (), (member,), (scratch.name,), kernel.origins, "counters")  # type: ignore[arg-type]


def _joined(plan: Schedule, position: int) -> TrailingKernel | None:
    first, second, last = plan.steps[position : position + 3]
    if not all(type(step) is FusedKernel for step in (first, second, last)) or plan.into or plan.prepared:
        return None
    assert isinstance(first, FusedKernel) and isinstance(second, FusedKernel) and isinstance(last, FusedKernel)
    rows, wide = len(second.rows), len(last.rows) == len(second.rows) + 1
    if last.cols or not wide or len(first.rows) != rows + 1 or len(first.cols) != 1 or len(second.cols) != 1 or not rows:
        return None
    sizes = [d.size for d in second.rows]
    if [d.size for d in first.rows] != [*sizes, second.cols[0].size] or [d.size for d in last.rows[:-1]] != sizes:
        return None
    inside = {*first.stored, *second.stored}
    outside = [name for n, step in enumerate(plan.steps) if not position <= n <= position + 2 for name in _read(step)]
    leaving = [view.buffer for view in plan.program.outputs if isinstance(view, ViewOf)]
    if (
        not inside.isdisjoint((*outside, *leaving))
        or set(second.reads()) != set(first.stored)
        or not set(first.stored).isdisjoint(last.reads())
    ):
        return None
    given = {m.name: substitute(m.store, _to(first, (*second.rows, *second.cols))) for m in first.members}
    made = {m.name: substitute(m.store, _to(second, last.rows[:-1])) for m in second.members}
    same = all(load.index is given[load.buffer] for load in _loads(second) if load.buffer in first.stored)
    if not same or not all(load.index is made[load.buffer] for load in _loads(last) if load.buffer in second.stored):
        return None
    (chunk, within), length = (first.rows[-1].sym, first.cols[0].sym), first.cols[0].size
    there = {**_to(last, first.rows), last.rows[-1].sym: add(mul(chunk, length), within)}  # the places of results in the domain of chunks
    whole = {load.buffer: load.index for load in _loads(last) if last.rows[-1].sym in load.index.free}
    again = [load for load in _loads(first) if load.buffer in whole]
    if not again or not all(load.index is substitute(whole[load.buffer], there) for load in again):
        return None
    large = all(plan.buffers[name].nbytes >= WORTH for name in last.stored)  # type: ignore[operator]
    alike = {m.buffer.dtype for m in first.members} == {first.members[0].acc_dtype}
    if not large or not alike or -(-last.rows[-1].size // _block(first)) != first.rows[-1].size:
        return None
    dtype, size = first.members[0].acc_dtype, prod(sizes)
    scratch = Buffer(
        f"{last.stored[0]}.counters",
        (APART * (size + 1) + len(first.stored) * size * first.rows[-1].size,),
        (1,),
        dtype,
        first.members[0].buffer.device,
    )
    return TrailingKernel(
        last.rows, (), last.members, last.stored, (*first.origins, *last.origins), last.why, first=first, second=second, scratch=scratch
    )


def _block(first: FusedKernel) -> int:
    """Elements of a block that holds a chunk."""
    return 1 << (first.cols[0].size - 1).bit_length()


def _to(kernel: FusedKernel, dims: tuple[Dim, ...]) -> dict[Expr, Expr]:
    return {d.sym: to.sym for d, to in zip(kernel.rows, dims, strict=False)}


def _loads(kernel: FusedKernel) -> list[Load]:
    return [load for m in kernel.members for load in member_loads(m.body)]


def _read(step: Step) -> tuple[str, ...]:
    return tuple(view.buffer for view in step.views) if isinstance(step, LibraryCall) else step.reads()


__all__ = ["APART", "BEHIND", "TrailingKernel", "trailing"]
