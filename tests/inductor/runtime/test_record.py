"""Recorded once more with the blocks that serve best: what the allocator notes, what had better been taken first, and when that is worth a second recording."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magneto.inductor.runtime import record
from magneto.inductor.runtime.segments import MIB, blocks, changes_of, segments

Changes = list[tuple[int, int]]
Notes = list[dict[str, Any]]


def of(text: str) -> Changes:
    """`12 5 -12`: sizes in MiB taken, and given back."""
    living: dict[int, list[int]] = {}
    found: Changes = []
    for number, word in enumerate(text.split()):
        size = int(word)
        if size > 0:
            living.setdefault(size, []).append(number)
        found.append((number if size > 0 else living[-size].pop(0), size * MIB))
    return found


WORKSPACES = of("60 40 -40 30 -60 60 40 -40 -30 30 -60 70 -30 -70")
"""As a network of convolutions: a result is taken while the one before is there, and a workspace for a while."""


WORTH = 12 * MIB


def most(changes: Changes) -> int:
    return max(itertools.accumulate(size for _, size in changes))


def test_better_blocks() -> None:
    assert segments(WORKSPACES, ()) == 210 * MIB and most(WORKSPACES) == 130 * MIB
    best = blocks(WORKSPACES, (), WORTH)
    assert best and segments(WORKSPACES, best) <= 140 * MIB and all(n % (2 * MIB) == 0 for n in best)
    assert blocks(WORKSPACES, best, WORTH) == ()  # nothing is better by enough
    assert blocks(of("12 12 12 -12 12")) == () and blocks([], (132 * MIB,)) == ()
    assert blocks(of("3 2 -3 -2")) == (10 * MIB,) and blocks(of("3 2 -3 -2"), (), WORTH) == ()
    assert blocks([(k // 2, (30 if k % 4 < 2 else 50) * MIB * (-1) ** k) for k in range(4000)]) == ()  # too long to be tried


def notes_of(changes: Changes, first: Sequence[int], stream: int) -> tuple[Notes, int]:
    """What torch's allocator would note, among what others do, and what it would hold."""
    notes: Notes = []
    free: list[tuple[int, int, int]] = []  # bytes, address, segment
    where: dict[Any, tuple[int, int, int]] = {}
    held = 0

    def note(action: str, address: int, size: int) -> None:
        notes.append({"action": action, "addr": address, "size": size, "stream": stream})
        notes.append({"action": action, "addr": address, "size": 5 * MIB, "stream": stream + 1})

    def take(name: Any, size: int) -> None:
        nonlocal held
        wide = -(-size // 512) * 512
        fits = sorted(b for b in free if b[0] >= wide)
        if not fits:
            length = 20 * MIB if wide < 10 * MIB else -(-wide // (2 * MIB)) * 2 * MIB
            fits, held = [(length, (held + 1) << 8, held)], held + length
            note("segment_alloc", fits[0][1], length)
            free.append(fits[0])
        length, address, segment = fits[0]
        free.remove(fits[0])
        if length - wide > MIB:
            free.append((length - wide, address + wide, segment))
            length = wide
        where[name] = length, address, segment
        note("alloc", address, size)

    def give(name: Any) -> None:
        length, address, segment = where.pop(name)
        note("free_requested", address, length)
        note("free_completed", address, length)
        for other in [b for b in free if b[2] == segment and (b[1] + b[0] == address or address + length == b[1])]:
            free.remove(other)
            length, address = length + other[0], min(address, other[1])
        free.append((length, address, segment))

    for k, size in enumerate(first):
        take(("first", k), size)
    for k in range(len(first)):
        give(("first", k))
    for name, size in changes:
        note("alloc", -1, 1000)  # small ones lie elsewhere
        (take if size > 0 else give)(*((name, size) if size > 0 else (name,)))
    return notes, held


@pytest.mark.parametrize("first", [(), (40 * MIB,), (60 * MIB, 20 * MIB)])
def test_notes_are_read_as_the_allocator_goes(first: tuple[int, ...]) -> None:
    random.seed(1)
    for _ in range(20):
        living: list[tuple[int, int]] = []
        changes: Changes = []
        for n in range(120):
            if living and random.random() < 0.5:
                name, size = living.pop(random.randrange(len(living)))
                changes.append((name, -size))
            else:
                living.append((n, random.randrange(MIB + 1, 30 * MIB)))
                changes.append(living[-1])
        notes, held = notes_of(changes, first, 7)
        found, made = changes_of(notes, 7, len(first))
        sizes = {name: -(-size // 512) * 512 for name, size in changes if size > 0}
        names = dict(zip([name for name, size in changes if size > 0], [name for name, size in found if size > 0], strict=True))
        assert found == [(names[name], sizes[name] if size > 0 else -sizes[name]) for name, size in changes]
        assert made == held == segments(found, first)


class Graph:
    pass


@pytest.mark.parametrize("known", [True, False])
def test_a_recording_is_made_once_more_where_that_spares_enough(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    alive: list[weakref.ref[Graph]] = []
    log: list[str] = []

    def recorded(run: Any, given: Any, index: int, first: tuple[int, ...]) -> tuple[Graph, list[torch.Tensor], Changes]:
        assert all(ref() is None for ref in alive), "the pool of the first is free when the second is made"
        graph = Graph()
        alive.append(weakref.ref(graph))
        made.append(first)
        log.append("recorded")
        return graph, [run(*given)], WORKSPACES if known else []

    class Run:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        def release_workspace(self) -> None:
            log.append("released")

    monkeypatch.setattr(record, "_recorded", recorded)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("room"))
    gc.disable()
    try:
        graph, (out,) = record.recorded(Run(), [torch.ones(2)], 0, (132 * MIB,) if not known else ())
    finally:
        gc.enable()
    assert alive[-1]() is graph and out.tolist() == [2, 2]
    if known:
        assert made == [(), blocks(WORKSPACES, (), WORTH)] and log == ["recorded", "released", "room", "recorded"]
    else:
        assert made == [(132 * MIB,)] and log == ["recorded"]


class History:
    """In the place of torch's."""

    def __init__(self, on: bool, notes: Notes) -> None:
        self.on, self.notes, self.switched = on, notes, list[Any]()

    def switch(self, enabled: str | None, **how: Any) -> None:
        self.on = enabled is not None
        self.switched.append(enabled)

    def snapshot(self) -> dict[str, Any]:
        assert self.on
        return {"device_traces": [[], self.notes]}


def noted(history: History, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> Changes:
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: history.on, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history.switch)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", history.snapshot)
    with record._noted(1, 7, ()) as found:
        if fails:
            raise RuntimeError("no capture")
    return found


def test_what_is_noted_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, _ = notes_of(WORKSPACES, (), 7)
    history = History(False, notes)
    assert [size for _, size in noted(history, monkeypatch)] == [size for _, size in WORKSPACES]
    assert history.switched == ["all", None]
    other = [{**note, "size": note["size"] + 2 * MIB * (note["action"] == "segment_alloc")} for note in notes]
    assert noted(History(False, other), monkeypatch) == []  # segments are made by other rules
    assert noted(History(False, [{"action": "alloc"}]), monkeypatch) == []
    with pytest.raises(RuntimeError, match="no capture"):
        noted(history := History(False, notes), monkeypatch, fails=True)
    assert history.switched == ["all", None]


def test_the_programs_own_history_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, _ = notes_of(WORKSPACES, (), 7)
    history = History(True, notes)
    assert noted(history, monkeypatch) == [] and history.on and history.switched == []

    def refused(*args: Any, **how: Any) -> None:
        raise RuntimeError("this allocator takes no notes")

    history = History(False, notes)
    monkeypatch.setattr(history, "switch", refused)
    assert noted(history, monkeypatch) == []


def test_a_recording_that_fails_leaves_generators_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts them back when a capture ends well, not when it fails."""
    state = {"capturing": False, "broken": False}

    class Capture:
        def capture_begin(self, **_: Any) -> None:
            state.update(capturing=True, broken=False)

        def capture_end(self) -> None:
            if state["broken"]:
                raise RuntimeError("a previous error during capture")
            state["capturing"] = False

    def waits(x: torch.Tensor) -> None:
        state["broken"] = True
        raise RuntimeError("not permitted while capturing")

    stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    for name, found in (("_side", stream), ("stream", 0), ("_handle", [torch.ones(2), torch.ones(2)]), ("_lay_out_workspace", None)):
        monkeypatch.setattr(record, name, lambda *_, found=found: found)
    monkeypatch.setattr(record, "_forget_workspaces", lambda: None)
    with pytest.raises(RuntimeError, match="previous error"):
        record._recorded(waits, [torch.ones(2)], 0, ())
    assert not state["capturing"]
