"""Results behind everything else: `results_last(plan, results)` moves the steps that make nothing but what the user gets to the end of a schedule.

A recording's memory is overwritten by its next replay, so results are copied out of it: one launch each, and the memory twice. Where as few launches compute them, those run behind the replay, into
memory of the call's own (`runtime/parted.py`). Products of the library do only where the result is large: they need a workspace (cuBLAS's has 32 MiB) on the stream of the replays, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from magneto.inductor.loops.ir import LibraryCall, ViewOf
from magneto.inductor.schedule.kernel import SCATTER, FusedKernel, Step
from magneto.inductor.schedule.schedule import Schedule

BETWEEN = 1 << 23  # bytes of an intermediate whose kernel goes along with that of the result
COPIED = 1 << 23  # bytes of results that are worth one launch more than their copies


def results_last(plan: Schedule, results: Collection[str], at_least: int) -> Schedule:
    """`tail`: where the steps begin that make `results`; the schedule itself where copies are cheaper, or fewer than `at_least` steps would be left."""
    if plan.into or plan.prepared or any(isinstance(s, LibraryCall) and s.mutates for s in plan.steps):
        return plan
    others = {view.buffer for view in plan.program.outputs if isinstance(view, ViewOf)} - set(results)
    chosen: list[int] = []
    read: set[str] = set()  # by steps that stay
    written: set[str] = set()
    for position in reversed(range(len(plan.steps))):
        step = plan.steps[position]
        made = _made(step)
        size = sum(int(plan.buffers[name].nbytes) for name in made)  # type: ignore[arg-type,misc]
        if made.isdisjoint(results):
            wanted = size >= BETWEEN and any(not made.isdisjoint(_read(plan.steps[p])) for p in chosen)
        else:
            wanted = size >= COPIED or not isinstance(step, LibraryCall)
        if made and wanted and _moves(step) and made.isdisjoint(others | read | written) and written.isdisjoint(_read(step)):
            chosen.append(position)
        else:
            read |= _read(step)
            written |= made
    tail = [plan.steps[p] for p in reversed(chosen)]
    copies = [name for step in tail for name in _made(step) if name in results]
    worth = len(copies) + sum(int(plan.buffers[name].nbytes) for name in copies) // COPIED  # type: ignore[arg-type,misc]
    head = [step for p, step in enumerate(plan.steps) if p not in set(chosen)]
    if not copies or len(tail) > worth or len(head) < at_least:
        return plan
    return replace(plan, steps=(*head, *tail), tail=len(head))


def _made(step: Step) -> set[str]:
    return {b.name for b in step.buffers} if isinstance(step, LibraryCall) else set(step.writes)


def _read(step: Step) -> set[str]:
    return {view.buffer for view in step.views} if isinstance(step, LibraryCall) else set(step.reads())


def _moves(step: Step) -> bool:
    """A kernel of loops, or a product into memory of ours."""
    if isinstance(step, FusedKernel):
        return not any(member.kind == SCATTER for member in step.members)
    return isinstance(step, LibraryCall) and step.out_op is not None and torch.Tag.nondeterministic_seeded not in step.op.tags
