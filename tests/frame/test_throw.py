"""A Resume that throws: the frame's own handlers see the exception, at the line of the instruction. (torchfree)"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, slots


def call_at(fn: Any, nth: int = 0) -> int:
    return at(fn.__code__, "CALL" if sys.version_info >= (3, 12) else "PRECALL", nth)


def throwing(frames: Frames, fn: Any, offset: int, exc: BaseException, stack: tuple[Any, ...] = (), **values: Any) -> Any:
    names = slots(fn.__code__)
    frames.region(fn)(lambda *_: C.Resume(offset, tuple(values.get(n, C.KEEP) for n in names), stack, exc))
    return frames.optimized(fn)


def never() -> None:
    raise AssertionError("not to be called")


def test_into_except_else_finally(frames: Frames) -> None:
    def f(log: list[Any]) -> Any:
        try:
            never()
        except ValueError as error:
            log.append(error)
        else:
            log.append("else")
        finally:
            log.append("finally")
        return log

    exc = ValueError("thrown")
    assert throwing(frames, f, call_at(f), exc)([]) == [exc, "finally"]


def test_no_handler_matches(frames: Frames) -> None:
    def f(log: list[Any]) -> Any:
        try:
            never()
        except ValueError:
            log.append("wrong")
        finally:
            log.append("finally")

    log: list[Any] = []
    with pytest.raises(KeyError, match="thrown") as caught:
        throwing(frames, f, call_at(f), KeyError("thrown"))(log)
    assert log == ["finally"]
    entries = traceback.extract_tb(caught.value.__traceback__)
    assert [e.name for e in entries] == ["test_no_handler_matches", "f"]
    assert entries[1].lineno == f.__code__.co_firstlineno + 2


def test_line_of_the_traceback(frames: Frames) -> None:
    def f(a: Any) -> Any:
        x = 1
        never()
        y = [
            a,
            never(),
        ]
        return x, y

    with pytest.raises(KeyError) as caught:
        throwing(frames, f, call_at(f, 1), KeyError("x"), ([1],))(1)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == f.__code__.co_firstlineno + 5


def test_last_instruction_of_a_line_without_inline_cache(frames: Frames) -> None:
    def f(d: Any) -> Any:
        x = 1
        del d[x]
        return x

    offset = at(f.__code__, "DELETE_SUBSCR")
    with pytest.raises(KeyError) as caught:
        throwing(frames, f, offset, KeyError("x"))({})
    assert traceback.extract_tb(caught.value.__traceback__)[-1].lineno == f.__code__.co_firstlineno + 2


def test_first_instruction_of_a_try_block_and_first_after_it(frames: Frames) -> None:
    def f(d: Any) -> Any:
        try:
            d.a
        except AttributeError:
            return "handled"
        d.b
        return "end"

    assert throwing(frames, f, at(f.__code__, "LOAD_ATTR"), AttributeError("a"))(1) == "handled"
    other = Frames()
    with pytest.raises(AttributeError):
        throwing(other, f, at(f.__code__, "LOAD_FAST", 1), AttributeError("b"))(1)
    third = Frames()
    assert throwing(third, f, at(f.__code__, "LOAD_FAST"), AttributeError("a"))(1) == "handled"


def test_with_block(frames: Frames) -> None:
    class Manager:
        seen: Any = None

        def __enter__(self) -> Any:
            return self

        def __exit__(self, kind: Any, value: Any, tb: Any) -> bool:
            self.seen = value
            return True

    def f(m: Any) -> str:
        with m:
            never()
        return "after"

    m, exc = Manager(), ValueError("x")
    frames.region(f)(lambda m: C.Resume(call_at(f), (m,), (m.__exit__,), exc))
    assert frames.optimized(f)(m) == "after"
    assert m.seen is exc


def test_loop_goes_on_after_a_handler(frames: Frames) -> None:
    def f(n: int) -> list[Any]:
        out: list[Any] = []
        for i in range(n):
            try:
                out.append(10 // i)
            except ZeroDivisionError:
                out.append("zero")
        return out

    offset = at(f.__code__, "BINARY_OP")
    names = slots(f.__code__)
    frames.region(f)(
        lambda n, *_: C.Resume(offset, tuple({"n": n, "out": [], "i": 0}[x] for x in names), (iter(range(0, n)),), ZeroDivisionError())
    )
    assert frames.optimized(f)(3) == ["zero", "zero", 10, 5]


def test_context_and_cause_are_kept(frames: Frames) -> None:
    def f() -> None:
        never()

    exc = KeyError("x")
    exc.__cause__ = ValueError("cause")
    with pytest.raises(KeyError) as caught:
        throwing(frames, f, call_at(f), exc)()
    assert caught.value is exc and isinstance(exc.__cause__, ValueError)


def test_entries_of_the_region_are_removed(frames: Frames) -> None:
    def callee() -> None:
        raise KeyError("deep")

    def f() -> Any:
        x = 1
        return callee(), x

    names = slots(f.__code__)

    def region(*args: Any) -> Any:
        try:
            C.call_active(callee)
        except BaseException as exc:
            return C.Resume(call_at(f), tuple(1 if n == "x" else C.KEEP for n in names), (), exc)

    frames.region(f)(region)
    with pytest.raises(KeyError) as caught:
        frames.optimized(f)()
    entries = traceback.extract_tb(caught.value.__traceback__)
    assert [e.name for e in entries] == ["test_entries_of_the_region_are_removed", "f", "callee"]
    assert entries[1].lineno == f.__code__.co_firstlineno + 2


def test_keyboard_interrupt_passes_through_finally(frames: Frames) -> None:
    def f(log: list[Any]) -> Any:
        try:
            never()
        finally:
            log.append("finally")

    offset = at(f.__code__, "LOAD_GLOBAL")
    frames.region(f)(lambda log: C.Resume(offset, (log,)))

    @frames.region(f, offset)
    def interrupted(log: Any) -> Any:
        raise KeyboardInterrupt

    log: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        frames.optimized(f)(log)
    assert log == ["finally"]


def test_base_exception_at_the_start(frames: Frames) -> None:
    def outer() -> Any:
        y = 2

        def f(x: int) -> Any:
            return lambda: (x, y)

        return f

    f = outer()

    @frames.region(f)
    def region(*_: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        frames.optimized(f)(1)
    names = [e.name for e in traceback.extract_tb(caught.value.__traceback__)]
    assert names[:2] == ["test_base_exception_at_the_start", "f"]


def test_exception_of_the_compiler_reaches_the_frame() -> None:
    def f(x: int) -> int:
        return x + 1

    def compiler(policy: Any, state: Any, missed: Any) -> Any:
        raise LookupError("cannot")

    C.set_compiler(compiler)
    with pytest.raises(LookupError, match="cannot") as caught:
        C.Optimized(f, C.Policy())(1)
    entries = traceback.extract_tb(caught.value.__traceback__)
    assert [e.name for e in entries] == ["test_exception_of_the_compiler_reaches_the_frame", "f", "compiler"]
    assert entries[1].lineno == f.__code__.co_firstlineno
