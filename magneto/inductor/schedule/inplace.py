"""Which kernels write a graph input's memory themselves, instead of leaving fresh memory that the caller copies into it.

A region that raises runs again in eager from its start, so inputs must not have changed by then: kernels that write inputs run at the end, behind
everything that can raise. And no kernel may read an input's old numbers after they are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from magneto.inductor.loops.ir import Buffer, IndexValue, Indirect, LibraryCall, Load, Op, ViewOf, walk_values
from magneto.inductor.lower.context import is_dense, same_layout
from magneto.inductor.lower.library import REPEATABLE
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.kernel import SCATTER, FusedKernel, OrderedKernel, Step, TableKernel, member_loads
from magneto.inductor.schedule.narrowed import narrowed, reads_its_place
from magneto.inductor.schedule.schedule import Schedule

DIVIDING = frozenset(("div", "floordiv", "remainder", "fmod"))


def write_inputs(plan: Schedule, wanted: Mapping[int, int]) -> Schedule:
    """The schedule in which outputs go into inputs' memory where that is sound. `wanted`: output -> the input that is to receive it, and nobody else needs
    the output. What is done stands in `into` (buffer -> input) of the result, `last` says where the kernels begin that write inputs."""
    pairs = {}
    leaving = Counter(view.buffer for view in plan.program.outputs if isinstance(view, ViewOf))
    added = {m.name for step in plan.steps if isinstance(step, FusedKernel) for m in step.members if m.kind == SCATTER}  # while others read
    plan, updated = _updated(plan, wanted, leaving)
    for output, place in wanted.items():
        view, target = plan.program.outputs[output], plan.program.inputs[place]
        if isinstance(view, ViewOf) and target is not None and view.buffer not in added and _fits(plan, view, target, leaving):
            pairs[view.buffer] = target.name
    if not pairs:
        return replace(plan, into=updated) if updated else plan
    writers = {name: step for step in plan.steps if isinstance(step, FusedKernel) for name in step.stored if name in pairs}
    pairs = {name: target for name, target in pairs.items() if name in writers and _reads_in_step(writers[name], name, target)}
    steps, first = _writers_last(plan.steps, pairs)
    pairs = _unread(steps, first, pairs)
    steps = tuple(narrowed(step, pairs) if isinstance(step, FusedKernel) else step for step in steps)
    return replace(plan, steps=steps, into=updated | pairs, last=first) if pairs else replace(plan, into=updated) if updated else plan


def _updated(plan: Schedule, wanted: Mapping[int, int], leaving: Mapping[str, int]) -> tuple[Schedule, dict[str, str]]:
    """Copies of inputs that library calls or kernels write some elements of (a cache that takes a token) are the inputs themselves, where nothing else reads their old numbers and writing twice is writing once:
    a region that raises behind may run again."""
    pairs: dict[str, str] = {}
    steps = list(plan.steps)
    for output, place in wanted.items():
        view, target = plan.program.outputs[output], plan.program.inputs[place]
        if not isinstance(view, ViewOf) or target is None or target.name in pairs.values() or not _fits(plan, view, target, leaving):
            continue
        name = view.buffer
        uses = [n for n, step in enumerate(steps) if name in (*touched(step)[0], *touched(step)[1])]
        readers = [n for n, step in enumerate(steps) if target.name in touched(step)[0]]
        if len(readers) != 1 or not uses or uses[0] != readers[0] or not any(_writes_again(steps[n], name) for n in uses):
            continue
        others = [step for n in uses[1:] if isinstance(step := steps[n], LibraryCall) and name in step.mutates]
        kernel = steps[uses[0]]
        if (
            isinstance(kernel, FusedKernel)
            and all(_writes_again(step, name) for step in others)
            and (rest := _without(kernel, name, target.name)) is not None
        ):
            steps[uses[0]] = rest  # type: ignore[assignment]
            pairs[name] = target.name
    steps = [step for step in steps if not isinstance(step, FusedKernel) or step.members]
    return (replace(plan, steps=tuple(steps)), pairs) if pairs else (plan, pairs)


def _writes_again(step: Step, name: str) -> bool:
    """Does the call or kernel write some of this buffer, of which it reads nothing?"""
    if isinstance(step, FusedKernel):
        puts = any(m.name == name and m.body.name == "put" for m in step.members if m.kind == SCATTER and isinstance(m.body, Op))
        return puts and name not in step.stored and not any(load.buffer == name for m in step.members for load in member_loads(m.body))
    adds = (
        isinstance(step, LibraryCall)
        and step.op is torch.ops.aten.index_put_.default
        and (len(step.args) > 3 and step.args[3] or dict(step.kwargs).get("accumulate"))
    )
    return isinstance(step, LibraryCall) and step.op in REPEATABLE and not adds and [v.buffer for v in step.views].count(name) == 1


def _without(kernel: FusedKernel, name: str, target: str) -> FusedKernel | None:
    """The kernel without a member that copies the input as it lies; None if there is none, or another member reads either."""
    found = next((m for m in kernel.members if m.name == name), None)
    if found is None or not isinstance(found.body, Load) or found.body.buffer != target or found.body.index is not found.store:
        return None
    rest = tuple(m for m in kernel.members if m is not found)
    if any(load.buffer in (name, target) for m in rest for load in member_loads(m.body)):
        return None
    return replace(kernel, members=rest, stored=tuple(one for one in kernel.stored if one != name))


def _fits(plan: Schedule, view: ViewOf, target: Buffer, leaving: Mapping[str, int]) -> bool:
    """Is the output a buffer of its own, laid out as the input, each element at a place of its own?"""
    buffer = plan.buffers[view.buffer]
    shape, strides = buffer.shape, buffer.strides
    if view.offset != 0 or view.shape != shape or not same_layout(shape, view.strides, strides) or view.dtype is not buffer.dtype:
        return False
    if (target.shape, target.dtype, target.device) != (shape, buffer.dtype, buffer.device) or 0 in shape:
        return False
    if not same_layout(shape, strides, target.strides) or not is_dense(shape, strides):
        return False
    return leaving[buffer.name] == 1 and target.name not in leaving


def _reads_in_step(kernel: FusedKernel, name: str, target: str) -> bool:
    """Does the kernel read every element of the input at the moment when it overwrites it, if at all?"""
    loads = [load for m in kernel.members for load in member_loads(m.body) if load.buffer == target]
    if not loads:
        return True
    member = next(m for m in kernel.members if m.name == name)
    stages = member_stages(kernel.members)
    walked = max(stages[m.name] for m in kernel.members if m.full)
    behind = stages[name] >= walked if member.full else stages[name] > walked and stages[name] == max(stages.values())
    others = [load for m in kernel.members if m is not member for load in member_loads(m.body) if load.buffer == target]
    return behind and not member.is_reduction and all(load.index is member.store for load in others) and reads_its_place(member, target)


def may_raise(step: Step) -> bool:
    """Can the step fail? Library calls, computed indices (they are checked), and integer divisions."""
    if isinstance(step, LibraryCall):
        return True
    kernel = step.body if isinstance(step, TableKernel) else step
    for body in kernel.node.values if isinstance(kernel, OrderedKernel) else [m.body for m in kernel.members]:
        for value in walk_values(body):
            if isinstance(value, Op) and value.name in DIVIDING and not value.args[-1].dtype.is_floating_point:
                return True
            index = value.index if isinstance(value, Load) else value.expr if isinstance(value, IndexValue) else None
            if index is not None and any(isinstance(s, Indirect) for s in index.free):
                return True
    return False


def touched(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(buffers that a step reads, buffers that it writes)"""
    if isinstance(step, LibraryCall):
        return tuple(v.buffer for v in step.views), (*step.mutates, *(b.name for b in step.buffers))
    return step.reads(), step.writes


def _writers_last(steps: tuple[Step, ...], pairs: Mapping[str, str]) -> tuple[tuple[Step, ...], int]:
    """The steps with those that write inputs, and what depends on them, at the end; and where these begin. Writers on which something
    depends that may raise stay where they are."""
    readers: dict[str, list[int]] = {}
    for position, step in enumerate(steps):
        for name in touched(step)[0]:
            readers.setdefault(name, []).append(position)
    followers = [{r for name in touched(step)[1] for r in readers.get(name, ()) if r > position} for position, step in enumerate(steps)]
    safe: set[int] = set()
    for position in reversed(range(len(steps))):
        if followers[position] <= safe and not may_raise(steps[position]):
            safe.add(position)
    last: set[int] = set()
    for position in sorted(safe):
        if position in last or not pairs.keys().isdisjoint(touched(steps[position])[1]):
            last.add(position)
            last.update(followers[position])
    early = [step for position, step in enumerate(steps) if position not in last]
    return (*early, *(steps[position] for position in sorted(last))), len(early)


def _unread(steps: tuple[Step, ...], first: int, pairs: Mapping[str, str]) -> dict[str, str]:
    """The pairs whose writer is among the last steps and whose input nobody reads after it. Views that library calls return count as reads forever."""
    last_read: dict[str, int] = {}
    writer: dict[str, int] = {}
    for position, step in enumerate(steps):
        reads, writes = touched(step)
        forever = isinstance(step, LibraryCall) and (step.may_alias or bool(step.mutates))
        last_read.update({name: len(steps) if forever else max(position, last_read.get(name, 0)) for name in reads})
        writer.update(dict.fromkeys(writes, position))
    return {name: target for name, target in pairs.items() if first <= writer[name] >= last_read.get(target, -1)}
