"""Steps that depend on a model's weights only run when the weights have changed: `keep_results(plan, state)`.

Folded and repacked weights, casts of weights under autocast, tables of relative positions, masks: what they compute is kept between calls, and the memory they
were computed from is digested in each call (csrc/digest.h), which costs a fraction of computing them. The digest is of the numbers themselves, so that no way of
writing a weight is missed: versions do not see `p.data.mul_(2)` or numpy. Where Linux tells which pages have been written (csrc/pages.c), large weights are not
read at all once they have stayed the same for two calls.

Such steps move to the front of the schedule. Not kept: what leaves the graph, what is written in place, random numbers, views, results for which
much more memory would be digested than the step reads, and what exceeds a quarter of the machine's memory (float32 copies of a large model's narrow weights).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod

import torch

from magneto.inductor.loops.ir import LibraryCall, Load, ViewOf, walk_values
from magneto.inductor.lower.context import is_dense
from magneto.inductor.schedule.inplace import touched
from magneto.inductor.schedule.kernel import FusedKernel, Step
from magneto.inductor.schedule.schedule import Schedule

WORTH = 2  # bytes digested per byte that a step moves, at most


@cache
def most() -> int:
    """Bytes that one schedule may keep."""
    if not hasattr(os, "sysconf"):
        return 1 << 32
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def keep_results(plan: Schedule, state: frozenset[str]) -> Schedule:
    """The schedule with `prepared` steps at its front whose results are `kept`. `state`: inputs that are weights, which seldom change."""
    state -= frozenset(plan.into.values())
    if not state:
        return plan
    dense = {name for name in state if is_dense(plan.buffers[name].shape, plan.buffers[name].strides)}
    sources: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in dense}
    forbidden = _leaving(plan)
    chosen: set[int] = set()
    left = most()
    for position, step in enumerate(plan.steps):
        reads, writes = touched(step)
        if not all(name in sources for name in reads) or not forbidden.isdisjoint((*reads, *writes)) or not _repeatable(step):
            continue
        read = frozenset(source for name in reads for source in sources[name])
        if (not read and not isinstance(step, FusedKernel)) or sum(map(_bytes(plan), read)) > WORTH * _moved(plan, step):
            continue
        if (size := sum(map(_bytes(plan), writes))) > left:
            continue
        left -= size
        chosen.add(position)
        sources.update(dict.fromkeys(writes, read))
    if not chosen:
        return plan
    first = [plan.steps[i] for i in sorted(chosen)]
    rest = [step for i, step in enumerate(plan.steps) if i not in chosen]
    made = {name for step in first for name in touched(step)[1]}
    kept = frozenset(name for step in rest for name in touched(step)[0] if name in made)
    watched = frozenset(source for step in first for name in touched(step)[0] for source in sources[name])
    last = plan.last if plan.last < 0 else plan.last + sum(i >= plan.last for i in chosen)
    return replace(plan, steps=(*first, *rest), last=last, prepared=len(first), kept=kept, watched=tuple(sorted(watched)))


def _bytes(plan: Schedule) -> Callable[[str], int]:
    return lambda name: int(plan.buffers[name].nbytes)  # type: ignore[arg-type]


def _leaving(plan: Schedule) -> set[str]:
    """Buffers that outlive the call or that somebody writes, and what may be a view of them."""
    names = {view.buffer for view in plan.program.outputs if isinstance(view, ViewOf)}
    for step in plan.steps:
        if isinstance(step, LibraryCall):
            names.update(step.mutates)
    for step in reversed(plan.steps):
        if isinstance(step, LibraryCall) and step.may_alias:
            names.update(step.shown)
            names.update(b.name for b in step.buffers)
    return names


def _repeatable(step: Step) -> bool:
    """The same numbers whenever it runs on the same numbers, in memory of its own?"""
    if isinstance(step, FusedKernel):
        return True
    if not isinstance(step, LibraryCall) or step.mutates or step.may_alias or len(step.buffers) != 1 or not step.single:
        return False
    return not isinstance(step.op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in step.op.tags


def _moved(plan: Schedule, step: Step) -> int:
    """Bytes that the step reads and writes, indirect reads counted by what they select."""
    written = sum(map(_bytes(plan), touched(step)[1]))
    if isinstance(step, LibraryCall):
        return int(written + sum(prod(view.shape) * view.dtype.itemsize for view in step.views))  # type: ignore[arg-type]
    assert isinstance(step, FusedKernel)
    points = prod(dim.size for dim in (*step.rows, *step.cols))
    widths = {load.buffer: load.dtype.itemsize for m in step.members for load in walk_values(m.body) if isinstance(load, Load)}
    return int(written + points * sum(widths.values()))
