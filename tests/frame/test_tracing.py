"""Debuggers, profilers and sys.monitoring beside regions: nothing crashes, what is interpreted is reported. (torchfree)"""

from __future__ import annotations

import cProfile
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, line, slots


def looped(n: int) -> int:
    total = 0
    for i in range(n):
        total += i
    extra = total * 2
    return extra


HEAD = at(looped.__code__, "FOR_ITER")


def raising(n: int) -> Any:
    raise KeyError(n)


def run_all(frames: Frames) -> None:
    """Every kind of continuing, once."""
    first = looped.__code__.co_firstlineno

    def continues(n: int, *_: Any) -> Any:
        return C.Resume(HEAD, (n, 100, C.UNBOUND, C.UNBOUND), (iter(range(n)),))

    frames.region(looped)(continues)
    g = frames.optimized(looped)
    assert g(3) == 206
    C.clear()
    frames.region(looped)(lambda n, *_: n * 1000)
    assert g(3) == 3000
    C.clear()

    def throws(n: int, *_: Any) -> Any:
        return C.Resume(line(looped.__code__, 4), (n, 0, 0, 0), (), KeyError("thrown"))

    frames.region(looped)(throws)
    with pytest.raises(KeyError) as caught:
        g(3)
    assert caught.value.__traceback__ is not None and caught.value.__traceback__.tb_next is not None
    assert caught.value.__traceback__.tb_next.tb_lineno == first + 4
    C.clear()

    def reruns(*_: Any) -> Any:
        raise ValueError

    frames.region(looped)(reruns)
    assert g(3) == 6
    C.clear()
    del frames.table[looped.__code__, 0]


def test_settrace(frames: Frames) -> None:
    events: list[Any] = []

    def tracer(frame: Any, event: str, arg: Any) -> Callable[..., Any]:
        if frame.f_code is looped.__code__:
            events.append((event, frame.f_lineno - looped.__code__.co_firstlineno))
            dict(frame.f_locals)
        return tracer

    frames.region(looped)(lambda n, *_: C.Resume(HEAD, (n, 100, C.UNBOUND, C.UNBOUND), (iter(range(n)),)))
    g = frames.optimized(looped)
    sys.settrace(tracer)
    try:
        assert g(3) == 6  # whoever traces lines sees the program's own
    finally:
        sys.settrace(None)
    assert ("line", 3) in events
    assert g(3) == 206
    run_all(frames)
    assert looped(3) == 6


def test_trace_switched_on_and_off_by_regions(frames: Frames) -> None:
    def tracer(frame: Any, event: str, arg: Any) -> Callable[..., Any]:
        return tracer

    def region(n: int, *_: Any) -> Any:
        sys.settrace(tracer if n % 2 else None)
        return C.Resume(HEAD, (n, 0, C.UNBOUND, C.UNBOUND), (iter(range(n)),))

    frames.region(looped)(region)
    g = frames.optimized(looped)
    try:
        for n in range(50):
            assert g(n) == sum(range(n)) * 2
    finally:
        sys.settrace(None)


def test_setprofile_and_cprofile(frames: Frames) -> None:
    """A profile function of the program sees the program's own frames, as they are; a profiler written in C counts what runs."""
    events: list[Any] = []
    frames.region(looped)(lambda n, *_: n * 1000)
    g = frames.optimized(looped)
    sys.setprofile(lambda frame, event, arg: events.append((event, frame.f_code.co_name)))
    try:
        assert g(3) == 6
    finally:
        sys.setprofile(None)
    assert ("return", "looped") in events
    assert g(3) == 3000
    C.clear()
    profile = cProfile.Profile()
    profile.enable()
    run_all(frames)
    profile.disable()
    profile.create_stats()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
def test_monitoring(frames: Frames) -> None:
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    tool, events = monitoring.PROFILER_ID, monitoring.events
    seen: set[int] = set()
    monitoring.use_tool_id(tool, "test")
    names = [n for n in dir(events) if n.isupper() and n not in ("NO_EVENTS", "C_RAISE", "C_RETURN")]
    wanted = 0
    for name in names:
        event = getattr(events, name)
        monitoring.register_callback(tool, event, lambda *args, event=event: seen.add(event))
        wanted |= event
    frames.region(looped)(lambda n, *_: n * 1000)
    frames.region(raising)(lambda n, *_: n)
    try:
        monitoring.set_events(tool, wanted)
        assert frames.optimized(looped)(3) == 6  # a function of the program is told of the program's own frames, as they are
        with pytest.raises(KeyError):
            frames.optimized(raising)(3)
        monitoring.set_events(tool, 0)
        assert frames.optimized(looped)(3) == 3000 and frames.optimized(raising)(3) == 3
        C.clear()
        run_all(frames)
        for name in names:  # a profiler written in C counts what runs
            monitoring.register_callback(tool, getattr(events, name), "".format)
        monitoring.set_events(tool, wanted)
        run_all(frames)
        monitoring.set_events(tool, 0)
        for name in names:
            monitoring.register_callback(tool, getattr(events, name), lambda *args, event=getattr(events, name): seen.add(event))

        def region(n: int, *_: Any) -> Any:  # instrumented in between: the code is entered behind its RESUME
            monitoring.set_events(tool, wanted if n % 2 else 0)
            return C.Resume(HEAD, (n, 0, C.UNBOUND, C.UNBOUND), (iter(range(n)),))

        frames.region(looped)(region)
        g = frames.optimized(looped)
        for n in range(30):
            assert g(n) == sum(range(n)) * 2
    finally:
        monitoring.set_events(tool, 0)
        for name in names:
            monitoring.register_callback(tool, getattr(events, name), None)
        monitoring.free_tool_id(tool)
    assert events.LINE in seen and events.RAISE in seen


def test_specialised_code(frames: Frames) -> None:
    """Entering code that CPython has specialised (and code that it specialises afterwards)."""
    for _ in range(200):
        looped(20)
    for _ in range(200):
        run_all(frames)


def test_collector_runs_in_regions(frames: Frames) -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(3):
            run_all(frames)
    finally:
        gc.set_threshold(*threshold)


def test_frames_seen_from_inside(frames: Frames) -> None:
    """A region's frame is not on the stack while it runs; the interpreted rest is, with its real lines."""

    def f(a: int) -> Any:
        b = names()
        return b, names(), sys._getframe().f_lineno

    def names() -> list[str]:
        out, frame = [], sys._getframe(1)
        while frame is not None and len(out) < 3:
            out.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        return out

    def region(a: int, b: Any, *free: Any) -> Any:
        return C.Resume(line(f.__code__, 2), (a, C.call_active(names), *(C.KEEP for _ in free)))

    frames.region(f)(region)
    inside, rest, number = frames.optimized(f)(1)
    here = "test_frames_seen_from_inside"
    assert inside[:2] == ["region", here] and rest[:2] == ["f", here]
    assert number == f.__code__.co_firstlineno + 2
    assert len(slots(f.__code__)) == 3
