"""A region that raises is forgotten for this call: the interpreter runs the frame from the region's start. (torchfree)"""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, line, slots


def test_from_the_start_of_the_frame(frames: Frames) -> None:
    def f(a: int, d: list[int]) -> int:
        return d[a]

    @frames.region(f)
    def region(a: int, d: list[int]) -> int:
        raise RuntimeError("not eager's error")

    g = frames.optimized(f)
    before = C.counters()["reruns"]
    assert g(1, [5, 6]) == 6
    with pytest.raises(IndexError, match="list index out of range") as caught:
        g(7, [])
    assert [e.name for e in traceback.extract_tb(caught.value.__traceback__)] == ["test_from_the_start_of_the_frame", "f"]
    assert caught.value.__context__ is None
    assert C.counters()["reruns"] == before + 2


def test_from_the_middle_with_the_state_untouched(frames: Frames) -> None:
    def f(n: int) -> list[int]:
        out = []
        for i in range(n):
            out.append(i)
        return out

    head = at(f.__code__, "FOR_ITER")
    iterators: list[Any] = []

    @frames.region(f)
    def start(n: int, *_: Any) -> Any:
        iterators.append(iter(range(n)))
        return C.Resume(head, (n, ["start"], C.UNBOUND), (iterators[-1],))

    @frames.region(f, head)
    def raises(n: int, out: Any, i: Any, iterator: Any) -> Any:
        assert i is C.UNBOUND and iterator is iterators[-1]
        raise ZeroDivisionError

    assert frames.optimized(f)(3) == ["start", 0, 1, 2]


def test_closures_and_cells_start_over(frames: Frames) -> None:
    y = 10

    def f(a: int) -> Any:
        def inner() -> Any:
            return a, y

        return inner

    @frames.region(f)
    def region(*_: Any) -> Any:
        raise ValueError

    g = frames.optimized(f)
    for _ in range(3):
        assert g(5)() == (5, 10)


def test_observer(frames: Frames) -> None:
    def f(a: int) -> int:
        return a

    @frames.region(f)
    def region(a: int) -> int:
        raise ValueError("why")

    seen: list[Any] = []

    def observer(region: Any, exc: BaseException) -> None:
        seen.append((region.code, str(exc), C.active_policy()))
        assert exc.__traceback__ is not None

    assert C.set_on_rerun(observer) is None
    assert frames.optimized(f)(3) == 3
    assert seen == [(f.__code__, "why", None)]

    def refuses(region: Any, exc: BaseException) -> None:
        raise LookupError("seen") from exc

    assert C.set_on_rerun(refuses) is observer
    with pytest.raises(LookupError, match="seen"):
        frames.optimized(f)(3)


def test_invalidated_by_the_observer(frames: Frames) -> None:
    def f(a: int) -> Any:
        return "interpreted"

    @frames.region(f)
    def region(a: int) -> Any:
        raise ValueError

    C.set_on_rerun(lambda region, exc: region.invalidate())
    g = frames.optimized(f)
    assert g(1) == "interpreted" and C.regions(f.__code__) == []
    del frames.table[f.__code__, 0]
    assert g(1) == "interpreted"


def test_interpreted_part_has_the_hook_active(frames: Frames) -> None:
    def f(a: int) -> Any:
        return inner(a), C.active_policy()

    def inner(a: int) -> int:
        return a

    frames.region(f)(lambda *_: 1 // 0)
    frames.region(inner)(lambda a: a + 100)
    assert frames.optimized(f)(1) == (101, frames.policy)


def test_too_deep_a_stack_slot_is_a_miss(frames: Frames) -> None:
    def f(a: int) -> Any:
        return "interpreted"

    C.set_compiler(lambda policy, state, missed: C.Region(lambda *args: args, (0, 7)))
    assert C.Optimized(f, C.Policy())(1) == "interpreted"


def test_exception_inside_handlers_of_the_caller(frames: Frames) -> None:
    """The rerun does not disturb what the caller handles."""

    def f(a: int) -> Any:
        x = a
        return 1 // x

    frames.region(f)(lambda *_: [][0])
    offset = line(f.__code__, 2)
    frames.region(f, offset)(lambda *_: [][0])
    g = frames.optimized(f)
    try:
        raise KeyError("outer")
    except KeyError as outer:
        with pytest.raises(ZeroDivisionError) as caught:
            g(0)
        assert caught.value.__context__ is outer
    frames.region(f)(lambda a, x: C.Resume(offset, (a, 0)))
    C.clear()
    with pytest.raises(ZeroDivisionError):
        g(5)
    assert slots(f.__code__) == ("a", "x")
