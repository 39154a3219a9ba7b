"""10^5 calls of every kind keep neither memory nor references. (torchfree)"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, line, slots

CALLS = 100_000


class Witness:
    pass


def returns(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        return w

    frames.region(f)(lambda w: w)
    return frames.optimized(f)


def continues(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        a = w
        for _ in range(2):
            a = (a, w)[0]
        return a

    head = at(f.__code__, "FOR_ITER")
    frames.region(f)(lambda w, *_: C.Resume(head, (w, [w], C.UNBOUND), (iter((w, w)),)))
    return frames.optimized(f)


def chains(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        a = [w]
        b = [a, w]
        return b

    second, third = line(f.__code__, 2), line(f.__code__, 3)
    frames.region(f)(lambda w, *_: C.Resume(second, (w, [w], C.UNBOUND)))
    frames.region(f, second)(lambda w, a, b: C.Resume(third, (C.KEEP, C.UNBOUND, [a, w])))
    frames.region(f, third)(lambda w, a, b: b)
    return frames.optimized(f)


def closes_over(frames: Frames) -> Callable[[Any], Any]:
    free = Witness()

    def f(w: Any) -> Any:
        x = 1
        return (lambda: (w, free, x))()

    offset, kept = line(f.__code__, 2), (C.KEEP,) * len(slots(f.__code__))
    frames.region(f)(lambda *_: C.Resume(offset, kept))
    g = frames.optimized(f)

    def call(w: Any) -> Any:
        try:
            g(w)
        except NameError:
            return w

    return call


def throws(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        try:
            w.nothing()
        except ValueError as error:
            return error

    offset = at(f.__code__, "LOAD_METHOD" if sys.version_info < (3, 12) else "LOAD_ATTR")
    frames.region(f)(lambda w, *_: C.Resume(offset, (w, C.UNBOUND), (w,), ValueError(w)))
    return frames.optimized(f)


def raises(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        return w.nothing()

    offset = line(f.__code__, 1)

    def region(w: Any) -> Any:
        try:
            return C.call_active(getattr, w, "nothing")
        except AttributeError as error:
            return C.Resume(offset, (w,), (), error)

    frames.region(f)(region)
    g = frames.optimized(f)

    def call(w: Any) -> Any:
        try:
            g(w)
        except AttributeError:
            return w

    return call


def reruns(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        return [w]

    def region(w: Any) -> Any:
        raise ValueError(w)

    frames.region(f)(region)
    return frames.optimized(f)


def materialises(frames: Frames) -> Callable[[Any], Any]:
    def callee(w: Any) -> Any:
        a = [w]
        return a, w

    def f(w: Any) -> Any:
        return callee(w)

    clone = FunctionType(C.clone_code(callee.__code__), globals())
    offset = line(callee.__code__, 2)
    frames.region(f)(lambda w, *_: C.materialise(clone, C.Resume(offset, (w, [w, w]))))
    return frames.optimized(f)


def handles(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        try:
            raise KeyError(w)
        except KeyError:
            w = [w]
            return w

    offset = line(f.__code__, 4)
    frames.region(f)(lambda w: C.Resume(offset, (w,), (None,), handling=KeyError(w)))
    frames.region(f, offset)(lambda w, previous: w)
    return frames.optimized(f)


def misses(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        return w

    return frames.optimized(f)


def refused(frames: Frames) -> Callable[[Any], Any]:
    def f(w: Any) -> Any:
        a = w
        return a

    offset = line(f.__code__, 2)
    frames.region(f)(lambda w, a: C.Resume(offset, (w,)))
    g = frames.optimized(f)

    def call(w: Any) -> Any:
        try:
            g(w)
        except SystemError:
            return w

    return call


KINDS = [returns, continues, chains, closes_over, throws, raises, reruns, materialises, handles, misses, refused]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_calls_keep_nothing(kind: Any, frames: Frames) -> None:
    call = kind(frames)
    calls = CALLS // 4 if kind is misses else CALLS
    witness = Witness()
    for _ in range(200):
        call(witness)
    if kind is misses:
        C.set_compiler(lambda policy, state, missed: None)
    else:
        frames.policy.compile = False
    frames.states.clear()
    frames.seen.clear()
    gc.collect()
    gc.disable()
    try:
        references = sys.getrefcount(witness)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        blocks = sys.getallocatedblocks()
        for _ in range(calls):
            call(witness)
        after, _ = tracemalloc.get_traced_memory()
        blocks = sys.getallocatedblocks() - blocks
        tracemalloc.stop()
    finally:
        gc.enable()
    cycles = gc.collect()
    assert sys.getrefcount(witness) <= references + (2 if kind is throws else 0)
    assert after - before < 20_000, (after - before, cycles)
    assert blocks < 300, blocks


def test_compiling_keeps_nothing() -> None:
    """Policies, regions and code objects that come and go."""

    def once() -> None:
        scope: dict[str, Any] = {}
        exec("def f(x):\n    y = x\n    return y", scope)
        f = scope["f"]
        C.set_compiler(
            lambda policy, state, missed: None if state.offset else C.Region(lambda x: C.Resume(line(f.__code__, 2), (x, 5)), (0,))
        )
        policies = [C.Policy() for _ in range(5)]
        for policy in policies:
            assert C.Optimized(f, policy)(1) == 5
        C.clone_code(f.__code__)

    for _ in range(20):
        once()
    C.set_compiler(None)
    gc.collect()
    blocks = sys.getallocatedblocks()
    for _ in range(400):
        once()
    C.set_compiler(None)
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 300
    assert C.regions() == []
