"""A frame goes on in the middle of every kind of statement, in the state that a Resume describes. (torchfree)"""

from __future__ import annotations

import dis
import sys
from types import CellType
from typing import Any

from tests.frame.harness import C, Frames, at, fresh, line, slots


def test_value_of_the_region_is_the_frame_s_value(frames: Frames) -> None:
    def f(a: int, b: int) -> int:
        return a + b

    frames.region(f)(lambda a, b: a * 100 + b)
    g = frames.optimized(f)
    assert [g(3, 4), g(3, b=5), g(*(1, 2))] == [304, 305, 102]
    assert frames.seen == [("f", 0)]


def test_for_loop(frames: Frames) -> None:
    def f(n: int, d: list[int]) -> int:
        total = 0
        for i in range(n):
            total += d[i]
        return total

    frames.resume_at(f, at(f.__code__, "FOR_ITER"), (fresh(lambda: iter(range(1, 3))),), total=100)
    assert frames.optimized(f)(3, [1, 2, 4]) == 106
    assert frames.seen == [("f", 0), ("f", at(f.__code__, "FOR_ITER"))]


def test_nested_for_loops(frames: Frames) -> None:
    def f(n: int) -> list[tuple[int, int]]:
        out = []
        for i in range(n):
            for k in range(i):
                out.append((i, k))
        return out

    inner = at(f.__code__, "FOR_ITER", 1)
    stack = (fresh(lambda: iter([7])), fresh(lambda: iter([5, 6])))
    frames.resume_at(f, inner, stack, out=[], i=3)
    assert frames.optimized(f)(0)[:3] == [(3, 5), (3, 6), (7, 0)]


def test_while_loop_in_the_middle_of_an_expression(frames: Frames) -> None:
    def f(n: int) -> int:
        total = 0
        while n > 0:
            total = total + (n * 2)
            n -= 1
        return total

    offset = at(f.__code__, "BINARY_OP", 1)  # total + (..)
    frames.resume_at(f, offset, (1000, 1), n=2)
    assert frames.optimized(f)(50) == 1001 + 2


def test_while_else_and_break(frames: Frames) -> None:
    def f(n: int) -> str:
        while n:
            n -= 1
            if n == 10:
                break
        else:
            return "exhausted"
        return "broken"

    frames.resume_at(f, line(f.__code__, 2))
    g = frames.optimized(f)
    assert g(5) == "exhausted"
    assert g(20) == "broken"


def test_try_body(frames: Frames) -> None:
    def f(x: int) -> list[Any]:
        log = []
        try:
            log.append("body")
            log.append(10 // x)
        except ZeroDivisionError as error:
            log.append(type(error).__name__)
        else:
            log.append("else")
        finally:
            log.append("finally")
        return log

    frames.region(f)(lambda x, *_: C.Resume(line(f.__code__, 4), (x, ["resumed"], C.UNBOUND)))
    g = frames.optimized(f)
    assert g(0) == ["resumed", "ZeroDivisionError", "finally"]
    assert g(5) == ["resumed", 2, "else", "finally"]


class Manager:
    def __init__(self, swallow: bool = False) -> None:
        self.log: list[Any] = []
        self.swallow = swallow

    def __enter__(self) -> Manager:
        self.log.append("enter")
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        self.log.append(kind and kind.__name__)
        return self.swallow


def test_with_block(frames: Frames) -> None:
    def f(m: Manager, x: int) -> int:
        with m as n:
            y = 10 // x
        return y + 1

    def start(m: Manager, x: int, *_: Any) -> Any:
        return C.Resume(line(f.__code__, 2), (m, x, m, C.UNBOUND), (m.__exit__,))

    frames.region(f)(start)
    g = frames.optimized(f)
    m = Manager()
    assert g(m, 5) == 3
    assert m.log == [None]
    try:
        g(m, 0)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError
    assert m.log == [None, "ZeroDivisionError"]
    try:
        g(Manager(swallow=True), 0)
    except UnboundLocalError as error:
        assert "y" in str(error)
    else:
        raise AssertionError


def test_match(frames: Frames) -> None:
    def f(x: Any) -> Any:
        match x:
            case {"a": [first, *rest]} if first > 0:
                return first, rest
            case (1 | 2) as number:
                return number
            case str():
                return "string"
            case _:
                return None

    frames.resume_at(f, line(f.__code__, 9))
    assert frames.optimized(f)("abc") is None  # entered at the last arm
    plain = C.Optimized(f, C.Policy())
    assert [plain({"a": [1, 2]}), plain(2), plain("s")] == [(1, [2]), 2, "string"]


def test_match_with_the_subject_on_the_stack(frames: Frames) -> None:
    def f(x: Any) -> Any:
        match x:
            case [a, b]:
                return a * 10 + b
        return 0

    frames.resume_at(f, at(f.__code__, "MATCH_SEQUENCE"), ([4, 2],))
    assert frames.optimized(f)("not a sequence") == 42


def test_comprehension(frames: Frames) -> None:
    def f(xs: list[int], k: int) -> Any:
        ys = [x * k for x in xs if x]
        return {y: [z for z in range(y)] for y in ys}

    g = frames.optimized(f)
    names = slots(f.__code__)
    offset = line(f.__code__, 2)
    expected = {2: [0, 1], 3: [0, 1, 2]}

    def start(*args: Any) -> Any:
        state = dict(zip(names, args, strict=True))
        state["ys"] = [2, 3]
        return C.Resume(offset, tuple(state[name] for name in names))

    if "k" in f.__code__.co_cellvars:  # 3.11: the comprehension is a function of its own

        def start(*args: Any) -> Any:
            state = {name: C.KEEP for name in names}
            state["ys"] = [2, 3]
            return C.Resume(offset, tuple(state[name] for name in names))

    frames.region(f)(start)
    assert g([], 1) == expected


def test_inside_an_inlined_comprehension(frames: Frames) -> None:
    def f(xs: list[int]) -> list[int]:
        return [x * 2 for x in xs]

    if sys.version_info < (3, 12):
        comprehension = next(c for c in f.__code__.co_consts if hasattr(c, "co_code"))

        @frames.region(comprehension)
        def start(it: Any, *_: Any) -> Any:
            return C.Resume(at(comprehension, "FOR_ITER"), (it, C.UNBOUND), ([99], it))
    else:

        @frames.region(f)
        def start(xs: Any, *_: Any) -> Any:
            return C.Resume(at(f.__code__, "FOR_ITER"), (xs, C.UNBOUND), (C.NULL_, [99], iter(xs)))

    assert frames.optimized(f)([1, 2]) == [99, 2, 4]


def test_null_on_the_stack_of_a_call(frames: Frames) -> None:
    def f(a: int) -> Any:
        return max(a, 7)

    code = f.__code__
    null_first = sys.version_info < (3, 13)
    function = (C.NULL_, min) if null_first else (min, C.NULL_)
    offset = at(code, "PRECALL") if sys.version_info < (3, 12) else at(code, "CALL")
    frames.resume_at(f, offset, (*function, 3, 4))
    assert frames.optimized(f)(1) == 3


def test_cells_that_are_kept(frames: Frames) -> None:
    """Arguments that are cells and cells without a value are made by the prologue, which the frame skips."""

    def f(a: int, b: int) -> Any:
        total = 0

        def add(k: int) -> int:
            nonlocal total
            total += k + a
            return total

        add(b)
        return add(100), total

    frames.resume_at(f, line(f.__code__, 3))
    assert [slot for slot in slots(f.__code__)][:2] == ["a", "b"]
    g = frames.optimized(f)
    try:
        g(1, 2)  # total = 0 was skipped: its cell is empty
    except NameError as error:
        assert "total" in str(error)
    else:
        raise AssertionError
    frames2 = Frames()
    frames2.resume_at(f, line(f.__code__, 3), total=CellType(50))
    assert frames2.optimized(f)(1, 2) == (154, 154)


def test_cells_that_the_region_made(frames: Frames) -> None:
    def f(a: int) -> Any:
        b = a + 1

        def inner() -> tuple[int, int]:
            return a, b

        return inner

    names = slots(f.__code__)

    @frames.region(f)
    def start(a: int, *_: Any) -> Any:
        values = {"a": CellType(a * 10), "b": CellType(7)}
        return C.Resume(line(f.__code__, 3), tuple(values.get(name, C.UNBOUND) for name in names))

    g = frames.optimized(f)
    assert g(3)() == (30, 7)
    assert frames.states[0].locals == (3, C.UNBOUND, C.UNBOUND)


def test_free_variables(frames: Frames) -> None:
    factor = 3

    def f(a: int) -> int:
        a += 1
        return a * factor

    frames.resume_at(f, line(f.__code__, 2), a=5)
    g = frames.optimized(f)
    assert g(1) == 15
    factor = 4
    assert g(1) == 20
    state = frames.states[0]
    assert state.locals[-1] is f.__closure__[0] and state.closure is f.__closure__  # type: ignore[index]
    assert state.func is f and state.globals is globals() and state.code is f.__code__
    frames.region(f)(lambda a, cell: (a, cell.cell_contents))
    C.clear()
    assert g(9) == (9, 4)


def test_class_cell_of_super(frames: Frames) -> None:
    class Base:
        def value(self) -> int:
            return 1

    class Derived(Base):
        def value(self) -> int:
            x = 10
            return super().value() + x

    frames.resume_at(Derived.value, line(Derived.value.__code__, 2), x=20)
    assert frames.optimized(Derived().value)() == 21


def test_deleted_variable_stays_unbound(frames: Frames) -> None:
    """(Only where CPython expects it: from 3.12 on it reads variables that it knows to be bound without a check.)"""

    def f(a: int, b: int) -> Any:
        if a:
            del b
        return a, b

    frames.resume_at(f, line(f.__code__, 3), b=C.UNBOUND)
    try:
        frames.optimized(f)(1, 2)
    except UnboundLocalError as error:
        assert "'b'" in str(error)
    else:
        raise AssertionError


def test_varargs_and_defaults(frames: Frames) -> None:
    def f(a: int, *args: int, k: int = 5, **kwargs: int) -> Any:
        x = 1
        return a, args, k, kwargs, x

    frames.resume_at(f, line(f.__code__, 2), x=9)
    assert frames.optimized(f)(1, 2, 3, z=4) == (1, (2, 3), 5, {"z": 4}, 9)


def test_locals_and_frame_objects_after_continuing(frames: Frames) -> None:
    def f(a: int) -> Any:
        b = 2
        frame = sys._getframe()
        return dict(locals()), frame

    frames.resume_at(f, line(f.__code__, 2), b=7)
    seen, frame = frames.optimized(f)(1)
    assert seen["a"] == 1 and seen["b"] == 7
    assert frame.f_code is f.__code__ and frame.f_locals["b"] == 7
    assert frame.f_lineno == f.__code__.co_firstlineno + 3


def test_continue_inside_a_handler(frames: Frames) -> None:
    def f(x: int) -> Any:
        try:
            raise KeyError(x)
        except KeyError as error:
            x += 1
            first = sys.exc_info()[1]
            try:
                raise
            except KeyError as again:
                return x, first is again, sys.exc_info()[1] is error

    offset = line(f.__code__, 4)
    names = slots(f.__code__)

    @frames.region(f)
    def start(x: int, *_: Any) -> Any:
        exc = KeyError("made")
        values = {"x": x + 100, "error": exc}
        return C.Resume(offset, tuple(values.get(n, C.UNBOUND) for n in names), (sys.exc_info()[1],), handling=exc)

    g = frames.optimized(f)
    assert g(1) == (102, True, True)
    assert sys.exc_info()[1] is None
    try:
        raise IndexError
    except IndexError as outer:
        assert g(1) == (102, True, True)
        assert sys.exc_info()[1] is outer


def test_return_out_of_a_handler(frames: Frames) -> None:
    def f(x: int) -> Any:
        try:
            raise KeyError(x)
        except KeyError:
            x += 1
            return x

    offset = line(f.__code__, 4)
    frames.region(f)(lambda x: C.Resume(offset, (x,), (None,), handling=KeyError("made")))
    frames.region(f, offset)(lambda x, previous: (x, type(sys.exc_info()[1])))
    assert frames.optimized(f)(1) == (1, KeyError)
    assert sys.exc_info()[1] is None


def test_every_statement_start_of_a_function(frames: Frames) -> None:
    """Going on at the start of each line with eager's own locals gives eager's result."""

    def f(a: int, b: int) -> Any:
        c = a + b
        d = [c, a]
        e = {"c": c, "d": d}
        g = f"{c}-{d}"
        h = (lambda q: q + a)(b)
        return c, d, e, g, h

    states: dict[int, dict[str, Any]] = {}

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is f.__code__ and event == "line":
            states[frame.f_lineno] = dict(frame.f_locals)
        return tracer

    sys.settrace(tracer)
    expected = f(3, 4)
    sys.settrace(None)
    names = slots(f.__code__)
    for number, values in states.items():
        offset = line(f.__code__, number - f.__code__.co_firstlineno)
        cells = set(f.__code__.co_cellvars)
        locals_ = tuple(CellType(values[n]) if n in cells else values.get(n, C.UNBOUND) for n in names)
        frames = Frames()
        frames.region(f)(lambda *_, offset=offset, locals_=locals_: C.Resume(offset, locals_))
        assert frames.optimized(f)(0, 0) == expected, number


def test_wide_instructions(frames: Frames) -> None:
    """An instruction with EXTENDED_ARG is entered at its prefix."""
    body = "\n".join(f"    v{i} = {i}" for i in range(300))
    scope: dict[str, Any] = {}
    exec(f"def f(a):\n{body}\n    return v0 + v299 + a", scope)
    f = scope["f"]
    code = f.__code__
    start = line(code, 300)  # v299 = 299: the constant's prefix comes first
    assert code.co_code[start] == dis.opmap["EXTENDED_ARG"]
    names = slots(code)
    frames.region(f)(lambda a, *_: C.Resume(start, (a,) + tuple(1000 for _ in names[1:])))
    assert frames.optimized(f)(5) == 1000 + 299 + 5
