"""Frames of inlined callees are made by calling a clone of their code whose state the hook fills in. (torchfree)"""

from __future__ import annotations

import sys
import traceback
from types import CellType, CodeType, FunctionType
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, line, slots


def clone(fn: Any, closure: tuple[Any, ...] | None = None) -> FunctionType:
    return FunctionType(C.clone_code(fn.__code__), fn.__globals__, fn.__name__, None, fn.__closure__ if closure is None else closure)


def state(fn: Any, offset: int, stack: tuple[Any, ...] = (), exc: BaseException | None = None, **values: Any) -> Any:
    return C.Resume(offset, tuple(values.get(n, C.UNBOUND) for n in slots(fn.__code__)), stack, exc)


def test_clone() -> None:
    def f(a: int, /, b: int = 1, *args: int, c: int, **kwargs: int) -> Any:
        return a, b, args, c, kwargs

    code = C.clone_code(f.__code__)
    assert code is C.clone_code(f.__code__)
    assert (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount) == (0, 0, 0)
    assert code.co_code == f.__code__.co_code and code.co_varnames == f.__code__.co_varnames
    assert list(code.co_lines()) == list(f.__code__.co_lines()) and code.co_qualname == f.__code__.co_qualname

    def plain() -> None: ...

    assert C.clone_code(plain.__code__) is plain.__code__
    with pytest.raises(ValueError):
        C.clone_code((lambda: (yield)).__code__)
    with pytest.raises(TypeError):
        C.clone_code(f)


def test_loop() -> None:
    def callee(n: int, step: int) -> list[int]:
        out = []
        for i in range(n):
            out.append(i * step)
        return out

    resume = state(callee, at(callee.__code__, "FOR_ITER"), (iter([5, 6]),), n=9, step=10, out=["before"])
    assert C.materialise(clone(callee), resume) == ["before", 50, 60]
    assert callee(2, 3) == [0, 3]


def test_cells_and_closures() -> None:
    factor = 7

    def callee(a: int, b: int) -> Any:
        total = a

        def add(k: int) -> int:
            nonlocal total
            total += k * factor
            return total

        return add(b), total

    offset = line(callee.__code__, 8)
    made = CellType(100)
    inner = next(c for c in callee.__code__.co_consts if isinstance(c, CodeType))
    assert inner.co_freevars == ("factor", "total")
    cell_of_factor = callee.__closure__[callee.__code__.co_freevars.index("factor")]  # type: ignore[index]
    add = FunctionType(inner, globals(), "add", None, (cell_of_factor, made))
    resume = state(callee, offset, a=1, b=2, total=made, add=add, factor=C.KEEP)
    assert C.materialise(clone(callee), resume) == (114, 114)
    resume = state(callee, offset, a=1, b=2, total=C.KEEP, add=add, factor=C.KEEP)
    with pytest.raises(NameError):  # KEEP: a new cell, which is empty; `add` has the other one
        C.materialise(clone(callee), resume)


def test_exception_reaches_the_callee_s_handler_then_the_caller_s(frames: Frames) -> None:
    log: list[Any] = []

    def callee(x: Any) -> Any:
        try:
            y = x.missing
        except KeyError:
            log.append("wrong")
        finally:
            log.append("callee finally")
        return y

    def caller(x: Any) -> Any:
        try:
            z = callee(x)
        except AttributeError as error:
            return "handled", error
        return z

    offset = at(callee.__code__, "LOAD_ATTR")
    call = at(caller.__code__, "CALL")
    names = slots(caller.__code__)

    @frames.region(caller)
    def region(x: Any, *_: Any) -> Any:
        resume = C.Resume(offset, tuple(x if n == "x" else C.KEEP for n in slots(callee.__code__)), (x,))
        try:
            C.materialise(clone(callee), resume)
        except BaseException as exc:
            return C.Resume(call, tuple(C.KEEP for _ in names), (), exc)
        raise AssertionError

    kind, error = frames.optimized(caller)(5)
    assert kind == "handled" and log == ["callee finally"]
    entries = traceback.extract_tb(error.__traceback__)
    assert [(e.name, e.lineno) for e in entries] == [
        ("caller", caller.__code__.co_firstlineno + 2),
        ("callee", callee.__code__.co_firstlineno + 2),
    ]


def test_throwing_into_the_callee() -> None:
    def callee(x: Any) -> Any:
        try:
            x.run()
        except ValueError as error:
            return "handled", error
        return "none"

    exc = ValueError("thrown")
    resume = state(callee, at(callee.__code__, "LOAD_METHOD" if sys.version_info < (3, 12) else "LOAD_ATTR"), (), exc, x=1)
    assert C.materialise(clone(callee), resume) == ("handled", exc)
    with pytest.raises(KeyError):
        C.materialise(clone(callee), state(callee, line(callee.__code__, 2), (), KeyError("other"), x=1))


def test_result_goes_on_the_caller_s_stack(frames: Frames) -> None:
    def callee(a: int) -> int:
        b = a + 1
        return b * 2

    def caller(a: int) -> Any:
        return [callee(a), callee(a + 10)]

    after_first_call = next(i for i in offsets(caller.__code__) if i > at(caller.__code__, "CALL"))

    @frames.region(caller)
    def region(a: int, *_: Any) -> Any:
        value = C.materialise(clone(callee), C.Resume(line(callee.__code__, 2), (a, 1000)))
        return C.Resume(after_first_call, (a,) + (C.KEEP,) * (len(slots(caller.__code__)) - 1), (value,))

    assert frames.optimized(caller)(1) == [2000, 24]


def offsets(code: CodeType) -> list[int]:
    import dis

    return [i.offset for i in dis.get_instructions(code)]


def test_hook_is_active_in_the_materialised_frame(frames: Frames) -> None:
    def helper(x: int) -> int:
        return x + 1

    def callee(a: int) -> Any:
        b = helper(a)
        return b, policy()

    policy = C.active_policy

    def caller(a: int) -> Any:
        return callee(a)

    start = line(callee.__code__, 1)
    end = line(callee.__code__, 2)
    seen: list[Any] = []

    @frames.region(caller)
    def region(a: int, *_: Any) -> Any:
        seen.append(C.active_policy())
        result = C.materialise(clone(callee), state(callee, start, a=a, helper=C.KEEP, policy=C.KEEP))
        seen.append(C.active_policy())
        return result

    frames.region(helper)(lambda x: x + 100)
    g = frames.optimized(caller)
    assert g(1) == (101, frames.policy)
    assert seen == [None, None]
    assert frames.seen == [("caller", 0), ("callee", start), ("helper", 0)]
    code = C.clone_code(callee.__code__)
    C.clear()
    frames.region(code, start)(lambda a, b, *free: C.Resume(end, (a, "region", *(C.KEEP for _ in free))))
    assert g(1) == ("region", frames.policy)
    assert [r.code for r in C.regions(code)] == [code]


def test_nested_callees(frames: Frames) -> None:
    def inner(x: int) -> Any:
        y = x
        return y * 2

    def middle(x: int) -> Any:
        y = inner(x)
        return y + 1

    def outer(x: int) -> Any:
        return middle(x)

    @frames.region(outer)
    def region(x: int, *_: Any) -> Any:
        first = C.materialise(clone(inner), state(inner, line(inner.__code__, 2), y=50))
        return C.materialise(clone(middle), state(middle, line(middle.__code__, 2), y=first, inner=C.KEEP))

    assert frames.optimized(outer)(1) == 101


def test_outside_of_any_policy() -> None:
    def callee(x: int) -> Any:
        y = x
        return y, C.active_policy(), sys._getframe().f_code.co_name

    assert C.materialise(clone(callee), state(callee, line(callee.__code__, 2), y=5)) == (5, None, "callee")


def test_refusals() -> None:
    def callee(x: int) -> Any:
        y = x
        return y

    resume = state(callee, line(callee.__code__, 2), y=5)
    with pytest.raises(ValueError, match="no clone"):
        C.materialise(callee, resume)
    with pytest.raises(TypeError):
        C.materialise(clone(callee), None)
    with pytest.raises(TypeError):
        C.materialise(len, resume)
    with pytest.raises(SystemError, match="locals do not match"):
        C.materialise(clone(callee), C.Resume(line(callee.__code__, 2), ()))
    assert C.materialise(clone(callee), resume) == 5


def test_recursion_limit_is_an_exception_of_the_call() -> None:
    def callee(x: int) -> Any:
        y = x
        return dive(y)

    def dive(n: int) -> Any:
        return C.materialise(clone(callee), state(callee, line(callee.__code__, 2), y=n + 1, dive=C.KEEP))

    with pytest.raises(RecursionError):
        dive(0)
    assert C.active_policy() is None
    assert C.materialise(clone(callee, callee.__closure__), C.Resume(line(callee.__code__, 1), (3, C.UNBOUND, CellType(str)))) == "3"
