"""The block that a recording's pool begins with: the allocator's rules, and what they make of a plan."""

from __future__ import annotations

import random

import torch

from magneto.inductor import cuda
from magneto.inductor.runtime.segments import MIB, segments
from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten

Changes = list[tuple[str, int]]


def change(text: str) -> Changes:
    """`a+12 b+5 a-`: sizes in MiB."""
    sizes: dict[str, int] = {}
    found: Changes = []
    for word in text.split():
        name, _, size = word.partition("+")
        if size:
            sizes[name] = int(size) * MIB
        found.append((name.rstrip("-"), sizes[name] if size else -sizes[name.rstrip("-")]))
    return found


def mib(text: str, *first: int) -> int:
    return segments(change(text), [n * MIB for n in first]) // MIB


def test_segments():
    assert mib("a+3") == 20 and mib("a+12") == 12 and mib("a+13") == 14
    assert mib("a+3 b+3 c+3") == 20 and mib("a+8 b+8 c+8") == 40
    assert mib("a+12 a- b+3 c+3") == 12
    assert mib("a+12 b+14 a- b- c+20") == 46  # two segments are never one
    assert mib("a+9 b+9 a- b- c+18") == 20  # blocks of one are
    assert mib("a+14 b+12 a- b- c+12") == 26
    assert mib("a+12 b+14 a- b- c+20", 26) == 26 and mib("a+12 b+14 a- b- c+20", 24) == 38


def test_the_smallest_that_fits_is_taken():
    assert mib("a+12 b+20 a- b- c+11 d+20") == 32 and mib("a+20 b+12 a- b- c+11 d+20") == 32


def test_nothing_is_lost():
    random.seed(0)
    for _ in range(50):
        changes: Changes = []
        living: list[tuple[str, int]] = []
        live = most = 0
        for n in range(200):
            if living and random.random() < 0.5:
                name, size = living.pop(random.randrange(len(living)))
                changes.append((name, -size))
                live -= size
            else:
                size = random.randrange(MIB + 512, 40 * MIB, 512)
                living.append((str(n), size))
                changes.append(living[-1])
                live += size
            most = max(most, live)
        changes += [(name, -size) for name, size in living]
        held = segments(changes, ())
        assert most <= held and segments([*changes, *changes], ()) <= 2 * held
        assert segments([*changes, ("all", 1)], (3 * most,)) == 3 * most  # everything joins again
        assert segments([*changes, ("all", 3 * most)], (3 * most,)) == 3 * most


def chain(*mib: int, results: int = 0) -> cuda.DevicePlan:
    """Products one behind the other, of these sizes; the last leaves."""
    g = Graph()
    h = g.input(torch.empty(2048, 64))
    width = 64
    for size in mib:
        h, width = g.call(aten.mm.default, h, g.input(torch.empty(width, 128 * size))), 128 * size
    g.output(h)
    return cuda._planned(g.fx, "case", {}, torch.device("cpu"), results)


def test_a_pool_begins_with_what_lives_at_a_time() -> None:
    assert chain(11, 13, 11, 13, 11).first == (24 * MIB,)  # 11 and 13; without it segments of 12 and 14
    assert chain(3, 4, 2, 4, 3, 500, results=1).first == (10 * MIB,)  # the result is made behind the replay
    assert chain(3, 4, 2, 3).first == (10 * MIB,)  # the allocator's own would be 20
    assert chain(12, 12, 12, 12).first == ()  # nothing to gain
