"""torch's allocator as numbers: what it holds for a sequence of changes, and with which blocks a recording's pool had best begin (`segments`, `blocks`).

It makes segments as they are asked for and never joins two of them, so that buffers whose lives are apart lie apart as well. A block that is taken first, and given back, is one segment for all of
them. (Up to 1 MiB they lie elsewhere, in segments of 2 MiB.)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

MIB = 1 << 20
LONGEST = 2048  # changes
PAIRED = 640  # of which pairs of blocks are tried

Changes = Sequence[tuple[Any, int]]  # whose memory is taken (its bytes), or given back (less than none)


def segments(changes: Changes, first: Sequence[int], limit: int = 1 << 60) -> int:
    """Bytes of all segments, the first of which are given; beyond `limit` it is not asked how many."""
    free: list[tuple[int, int]] = []
    taken, total = dict[Any, tuple[int, int]](), 0
    for length in first:
        free.append((length, 2 * total + 1))  # a gap before each, and free ones end below its size
        total += length
    free.sort()
    for name, size in changes:
        if size > 0:
            if (at := bisect_left(free, (size, 0))) == len(free):
                length = 20 * MIB if size < 10 * MIB else rounded(size, 2 * MIB)
                free.append((length, 2 * total + 1))
                total += length
                if total > limit:
                    break
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


def rounded(size: float, unit: int) -> int:
    return -(-int(size) // unit) * unit


def blocks(changes: Changes, first: Sequence[int] = (), worth: int = 2 * MIB) -> tuple[int, ...]:
    """The one or two blocks that had better been taken than `first`; none where that would spare less than `worth` bytes. Two where one leaves much."""
    live, bound = max(accumulate(size for _, size in changes), default=0), segments(changes, first) - worth
    if not 0 < live <= bound or len(changes) > LONGEST:
        return ()
    sizes = list(dict.fromkeys(max(10 * MIB, rounded(live * k / 40, 2 * MIB)) for k in (*range(40, 57), *range(6, 40))))
    best: tuple[int, ...] = ()
    for some in (*((x,) for x in sizes), *((x, y) for x in sizes[::2] for y in sizes[::2] if y <= x and len(changes) <= PAIRED)):
        if best and bound < live * (1.02 if len(best) > 1 else 1.08 if len(some) > 1 else 1):
            break
        if sum(some) <= bound and (found := segments(changes, some, bound)) <= bound:
            best, bound = some, found - 1
    return best


def changes_of(notes: Sequence[Mapping[str, Any]], stream: int, skipped: int) -> tuple[list[tuple[int, int]], int]:
    """Of the allocator's notes what a stream takes and gives back of more than 1 MiB, without the first `skipped`, and bytes of the segments that were made for it."""
    changes: list[tuple[int, int]] = []
    living: dict[int, tuple[int, int]] = {}
    held = count = 0
    for note in notes:
        action, size = note["action"], rounded(note["size"], 512)
        if note["stream"] == stream and action == "segment_alloc" and size > 2 * MIB:
            held += size
        elif note["stream"] == stream and action == "alloc" and size > MIB:
            count += 1
            if count > skipped:
                living[note["addr"]] = count, size
                changes.append((count, size))
        elif action == "free_completed" and note["addr"] in living:
            name, size = living.pop(note["addr"])
            changes.append((name, -size))
    return changes, held
