"""The block that a recording's pool had best begin with: `first_block(plan, memory)`.

torch's allocator makes segments as they are asked for and never joins two of them, so that buffers whose lives are apart lie apart as well. A block that is taken first, and given back, is one
segment for all of them. Which size serves best is found by playing the plan's allocations by the allocator's rules. (Up to 1 MiB they lie elsewhere, in segments of 2 MiB.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import replace

from magneto.inductor.schedule.memory import Memory, lives
from magneto.inductor.schedule.schedule import Schedule

MIB = 1 << 20
SHARES = tuple(1 + n / 40 for n in range(17))  # of the most that lives at a time
LONGEST = 2048  # changes


def first_block(plan: Schedule, memory: Memory) -> int:
    """Bytes; 0: none. (What a backward is given takes no other's place while it is recorded: the forward's recording holds it.)"""
    inputs = {buffer.name for buffer in plan.program.inputs if buffer is not None}
    memory = replace(memory, in_place={name: source for name, source in memory.in_place.items() if source not in inputs})
    changes = list(_changes(plan, memory))
    if not 1 < len(changes) <= LONGEST:
        return 0
    most = live = 0
    for _, size in changes:
        live += size
        most = max(most, live)
    least, best = segments(changes, 0), 0
    for share in SHARES:
        first = max(10, -(-int(most * share) // (2 * MIB)) * 2) * MIB
        if (held := segments(changes, first)) < least:
            least, best = held, first
        if held == first:  # nothing lies elsewhere
            break
    return best


def segments(changes: Sequence[tuple[str, int]], first: int) -> int:
    """Bytes of all segments, the first of which is given. `changes`: whose memory is taken (its bytes), or given back (less than none)."""
    free, taken, total = [(first, 0)] * bool(first), dict[str, tuple[int, int]](), first
    for name, size in changes:
        if size > 0:
            if (at := bisect_left(free, (size, 0))) == len(free):
                length = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
                free.append((length, 2 * total + 1))  # a gap before each, and free ones end below its size
                total += length
            length, start = free.pop(at)
            if length - size > MIB:
                insort(free, (length - size, start + size))
                length = size
            taken[name] = length, start
            continue
        length, start = taken.pop(name)
        for other in [block for block in free if block[1] + block[0] == start or start + length == block[1]]:
            free.remove(other)
            length, start = length + other[0], min(start, other[1])
        insort(free, (length, start))
    return total


def _changes(plan: Schedule, memory: Memory) -> Iterator[tuple[str, int]]:
    """What is recorded takes and gives back, of more than 1 MiB. Views of library calls are counted as memory."""
    end = plan.tail if plan.tail > 0 else len(plan.steps)
    dying: dict[int, list[tuple[str, int]]] = {}
    at = 0
    for buffer, position, until in lives(plan, memory):
        for step in range(at, min(position, end)):
            yield from dying.pop(step, ())
        at = position
        size = -(-int(buffer.nbytes) // 512) * 512  # type: ignore[arg-type]
        if position < end and size > MIB:
            yield buffer.name, size
            dying.setdefault(until, []).append((buffer.name, -size))


__all__ = ["first_block", "segments"]
