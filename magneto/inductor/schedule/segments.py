"""The blocks that a recording's pool had best begin with: `first_blocks(plan, memory)` plays the plan's allocations by the rules of torch's allocator (`runtime/segments.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from magneto.inductor.runtime.segments import MIB, blocks, rounded
from magneto.inductor.schedule.memory import Memory, lives
from magneto.inductor.schedule.schedule import Schedule


def first_blocks(plan: Schedule, memory: Memory) -> tuple[int, ...]:
    """Their bytes. (What a backward is given takes no other's place while it is recorded: the forward's recording holds it.)"""
    inputs = {buffer.name for buffer in plan.program.inputs if buffer is not None}
    memory = replace(memory, in_place={name: source for name, source in memory.in_place.items() if source not in inputs})
    return blocks(list(_changes(plan, memory)))


def _changes(plan: Schedule, memory: Memory) -> Iterator[tuple[str, int]]:
    """What is recorded takes and gives back, of more than 1 MiB. Views of library calls are counted as memory."""
    end = plan.tail if plan.tail > 0 else len(plan.steps)
    dying: dict[int, list[tuple[str, int]]] = {}
    at = 0
    for buffer, position, until in lives(plan, memory):
        for step in range(at, min(position, end)):
            yield from dying.pop(step, ())
        at = position
        size = rounded(buffer.nbytes, 512)  # type: ignore[arg-type]
        if position < end and size > MIB:
            yield buffer.name, size
            dying.setdefault(until, []).append((buffer.name, -size))
