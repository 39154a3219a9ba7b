"""Where every buffer lives: fresh memory (what leaves the graph), a slot of the plan's arena, or whatever a library call returns.

The arena is one block of memory that a plan keeps between calls; buffers whose lives do not overlap share its bytes. A kernel may write an output
over an input that dies there, if every element is read before, at the same place. Memory of graph inputs is never written.

A kernel may also write over what a library call has returned and nobody reads later: memory that the processor's caches still hold. In training (`apart`) large
buffers stay out of the arena: what a plan holds between its steps, and while other plans run, counts there. Each is allocated when it is first written and freed after its last use.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping

import torch

from magneto.base.dataclass import dataclass
from magneto.base.flags import config
from magneto.base.varying import chosen
from magneto.graph.attention import ATTENTION
from magneto.inductor.convolve import POINTWISE, POINTWISE_ADD, TRANSPOSED
from magneto.inductor.loops.ir import Buffer, LibraryCall, Program, ViewOf, index_symbols
from magneto.inductor.lower.context import is_dense, same_layout
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.kernel import FusedKernel, OrderedKernel, Step, member_loads
from magneto.inductor.schedule.product import ProductKernel
from magneto.inductor.schedule.schedule import LARGE, Schedule

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
aten = torch.ops.aten
OWN_RESULTS = frozenset({
    aten.convolution.default, aten.convolution_backward.default, aten.max_pool2d_with_indices_backward.default, aten.embedding_dense_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    *(op for op in (POINTWISE, POINTWISE_ADD, TRANSPOSED) if op is not None),
    aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default, ATTENTION,
})  # fmt: skip
"""Operations whose results nobody else holds, and that share no memory. (Others may return an argument where there is nothing to do, whatever their schema says.)"""


@dataclass(frozen=True, slots=True)
class Memory:
    """`arena`: buffer -> byte offset; `arena_bytes`: size of the arena; `fresh`: buffers allocated anew in each call; `last_use`: buffer ->
    position of the last step that touches it or a view of it (len(steps) for what leaves); `in_place`: buffer -> the one whose memory it takes over."""

    arena: Mapping[str, int]
    arena_bytes: int
    fresh: frozenset[str]
    last_use: Mapping[str, int]
    in_place: Mapping[str, str]


def plan_memory(
    plan: Schedule, apart: bool = False, large: int = LARGE, given: Collection[str] = (), lent: frozenset[str] = frozenset()
) -> Memory:
    """Memory of a schedule. `large`: bytes from which on buffers stay out of the arena, when they are to. `given`: inputs that an output of the same shape may take the memory of. `lent`: outputs
    that may lie in the arena all the same, to be overwritten by the next call."""
    steps = plan.steps
    last = _last_uses(plan)
    made_here = {name for step in steps for name in _allocated(step)}
    leaving = _leaving(plan)
    arena: dict[str, int] = {}
    in_place: dict[str, str] = {}
    free = _FreeList()
    owner: dict[int, int] = {}  # offset -> bytes
    dying: dict[int, list[str]] = {}
    alone: set[str] = set(given)  # buffers with memory of their own, and that may be written over
    for position, step in enumerate(steps):
        if position == plan.tail:
            alone.clear()
        for name in _allocated(step):
            size = int(plan.buffers[name].nbytes)  # type: ignore[arg-type]
            single = (name in leaving and name not in lent) or (apart and chosen(functools.partial(operator.ge, size, large)))
            if name in plan.kept or (single and (not apart or name in plan.into)):
                continue
            source = _taken_over(plan, step, name, position, last, alone, in_place, leaving, True) if config.buffer_reuse else None
            if single or source is not None:
                alone.add(name)
                if source is not None:
                    in_place[name] = source
                continue
            source = _taken_over(plan, step, name, position, last, arena.keys(), in_place, leaving, False) if config.buffer_reuse else None
            if source is not None:
                in_place[name] = source
                arena[name] = arena[source]
                dying[last[source]].remove(source)
            else:
                arena[name] = free.take(size)
                owner[arena[name]] = size
            dying.setdefault(last[name], []).append(name)
        if isinstance(step, LibraryCall) and step.op in OWN_RESULTS and not plan.kept.intersection(names := [b.name for b in step.buffers]):
            alone.update(names)
        if config.buffer_reuse:
            for name in dying.pop(position, ()):
                free.give(arena[name], owner.pop(arena[name]))
    fresh = frozenset(name for name in made_here if name not in arena and name not in in_place)
    return Memory(arena, free.top, fresh, last, in_place)


def peak_bytes(plan: Schedule, memory: Memory) -> int:
    """The most that a call holds at any step besides its inputs: the arena, fresh memory, and what library calls return."""
    changes = [0] * (len(plan.steps) + 2)
    for buffer, position, until in lives(plan, memory):
        changes[position] += int(buffer.nbytes)  # type: ignore[arg-type]
        changes[until + 1] -= int(buffer.nbytes)  # type: ignore[arg-type]
    return memory.arena_bytes + max(itertools.accumulate(changes), default=0)


def lives(plan: Schedule, memory: Memory) -> Iterator[tuple[Buffer, int, int]]:
    """What has memory outside the arena, in order, with the first and the last step that touch that memory."""
    takers = {source: name for name, source in memory.in_place.items()}
    for position, step in enumerate(plan.steps):
        if isinstance(step, LibraryCall) and step.mutates and step.shown == step.mutates:
            continue  # its result is in memory that was there
        for buffer in step.buffers if isinstance(step, LibraryCall) else tuple(plan.buffers[name] for name in step.stored):
            if buffer.name in memory.arena or buffer.name in memory.in_place or buffer.name in plan.into:
                continue
            name, until = buffer.name, memory.last_use.get(buffer.name, position)
            while (taker := takers.get(name)) is not None:
                name, until = taker, memory.last_use[taker]
            yield buffer, position, until


def _allocated(step: Step) -> tuple[str, ...]:
    """Buffers of a step whose memory the plan provides."""
    if not isinstance(step, LibraryCall):
        return step.stored
    return tuple(b.name for b in step.buffers) if step.out_op is not None else ()


def _touched(step: Step) -> tuple[str, ...]:
    if not isinstance(step, LibraryCall):
        return (*step.reads(), *step.stored)
    return (*(v.buffer for v in step.views), *step.mutates, *(b.name for b in step.buffers))


def _last_uses(plan: Schedule) -> dict[str, int]:
    """Last step that touches each buffer, views made by library calls counted as their arguments."""
    last: dict[str, int] = {}
    for position, step in enumerate(plan.steps):
        for name in _touched(step):
            last[name] = position
    for name in _outputs(plan.program):
        last[name] = len(plan.steps)
    for step in reversed(plan.steps):
        if isinstance(step, LibraryCall) and step.may_alias:
            until = max((last[b.name] for b in step.buffers), default=0)
            for name in step.shown:
                last[name] = max(last[name], until)
    return last


def _outputs(program: Program) -> set[str]:
    return {view.buffer for view in program.outputs if isinstance(view, ViewOf)}


def _leaving(plan: Schedule) -> set[str]:
    """Buffers that outlive the call: outputs, and what outputs may be views of."""
    names = _outputs(plan.program)
    for step in reversed(plan.steps):
        if isinstance(step, LibraryCall) and step.may_alias and any(b.name in names for b in step.buffers):
            names.update(step.shown)
    return names


def _taken_over(
    plan: Schedule, step: Step, name: str, position: int, last: Mapping[str, int], candidates: Collection[str], in_place: Mapping[str, str],
    leaving: set[str], alone: bool,
) -> str | None:  # fmt: skip
    """One of the `candidates`, read by this kernel for the last time, whose memory output `name` may take."""
    if isinstance(step, FusedKernel):
        member = next(m for m in step.members if m.name == name)
        if not member.full or member.is_reduction:
            return None
        stages = member_stages(step.members)
        if stages[name] < max(stages[m.name] for m in step.members if m.full):
            return None  # a later pass may read the input again
        store, bodies = member.store, [m.body for m in step.members]
    elif isinstance(step, OrderedKernel) and step.node.kind == "row_sums":
        store, bodies = step.node.buffer.offset(index_symbols(step.node.buffer.shape)), list(step.node.values)
    else:
        return None
    taken = {in_place[n] for n in step.stored if n in in_place}
    if isinstance(step, ProductKernel):  # other blocks read whole rows and columns of these
        taken.update(step.factors)
    buffer = plan.buffers[name]
    for source in step.reads():
        if source not in candidates or source in leaving or last[source] != position or source in taken:
            continue
        other = plan.buffers[source]
        if other.dtype.itemsize != buffer.dtype.itemsize or other.nbytes != buffer.nbytes:
            continue
        if alone and not _same_tensor(other, buffer, name in leaving):
            continue
        places = [load.index for body in bodies for load in member_loads(body) if load.buffer == source]
        if places and all(place is store for place in places):
            return source
    return None


def _same_tensor(source: Buffer, buffer: Buffer, leaving: bool) -> bool:
    """May the tensor of one buffer, or a view of it, serve for the other? What leaves is no view."""
    if source.dtype is not buffer.dtype or not is_dense(source.shape, source.strides):
        return False
    return not leaving or (source.shape == buffer.shape and same_layout(source.shape, source.strides, buffer.strides))


class _FreeList:
    """Offsets below `top` that nobody uses. Best fit, neighbours joined."""

    def __init__(self) -> None:
        self.top = 0
        self.holes: list[tuple[int, int]] = []  # (offset, size), by offset

    def take(self, size: int) -> int:
        """An offset with room for `size` bytes."""
        size = _rounded(size)
        fitting = [(hole[1], i) for i, hole in enumerate(self.holes) if hole[1] >= size]
        if fitting:
            _, i = min(fitting)
            offset, room = self.holes[i]
            self.holes[i : i + 1] = [(offset + size, room - size)] if room > size else []
            return offset
        if self.holes and sum(self.holes[-1]) == self.top:  # grow the hole at the end
            offset, room = self.holes.pop()
            self.top = offset + size
            return offset
        offset, self.top = self.top, self.top + size
        return offset

    def give(self, offset: int, size: int) -> None:
        """The bytes are free again."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted((*self.holes, (offset, _rounded(size)))):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.holes = merged


def _rounded(size: int) -> int:
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
