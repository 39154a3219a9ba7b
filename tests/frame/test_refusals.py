"""A Resume that the code cannot be in is refused with SystemError instead of crashing the interpreter. (torchfree)"""

from __future__ import annotations

import dis
import sys
from types import CellType
from typing import Any

import pytest

from tests.frame.harness import C, Frames, at, line


def f(a: int, b: int) -> Any:
    c = a + b
    try:
        with open(str(c)) as file:
            return file
    except OSError:
        return c


LINE = line(f.__code__, 3)
SLOTS = f.__code__.co_nlocals


def refused(frames: Frames, resume: Any, why: str, fn: Any = f) -> None:
    C.clear()
    frames.region(fn)(lambda *_: resume)
    with pytest.raises(SystemError, match=why):
        frames.optimized(fn)(1, 2)


@pytest.mark.parametrize(
    ("offset", "locals_", "stack", "why"),
    [
        (LINE, (1,), (), "locals do not match"),
        (LINE, (1,) * (SLOTS + 1), (), "locals do not match"),
        (LINE, (C.NULL_,) * SLOTS, (), "NULL_ in locals"),
        (LINE, (1,) * SLOTS, (1,) * 50, "stack does not fit"),
        (LINE, (1,) * SLOTS, (C.UNBOUND,), "UNBOUND or KEEP in the stack"),
        (LINE, (1,) * SLOTS, (C.KEEP,), "UNBOUND or KEEP in the stack"),
        (100000, (1,) * SLOTS, (), "outside the body"),
        (len(f.__code__.co_code), (1,) * SLOTS, (), "outside the body"),
        (at(f.__code__, "BINARY_OP") + 2, (1,) * SLOTS, (1, 2), "no instruction"),
    ],
)
def test_states_that_cannot_be(frames: Frames, offset: int, locals_: Any, stack: Any, why: str) -> None:
    refused(frames, C.Resume(offset, locals_, stack), why)


def test_handler_that_keeps_more_than_the_stack_holds(frames: Frames) -> None:
    inside = line(f.__code__, 4)  # `return file`: the with statement keeps __exit__
    refused(frames, C.Resume(inside, (1,) * SLOTS, ()), "stack does not fit")
    refused(frames, C.Resume(inside, (1,) * SLOTS, (), ValueError()), "stack does not fit")


def test_cells(frames: Frames) -> None:
    outer = 1

    def g(a: int, b: int) -> Any:
        c = 3
        return lambda: (a, c, outer)

    offset = line(g.__code__, 2)
    cell = CellType(1)
    refused(frames, C.Resume(offset, (1, 2, cell, cell)), "needs a cell", g)
    refused(frames, C.Resume(offset, (cell, 2, C.UNBOUND, cell)), "needs a cell", g)
    refused(frames, C.Resume(offset, (cell, 2, cell, C.UNBOUND)), "needs its cell", g)
    refused(frames, C.Resume(offset, (cell, 2, cell, 1)), "needs its cell", g)
    names = (*g.__code__.co_varnames, *(n for n in g.__code__.co_cellvars if n not in g.__code__.co_varnames), "outer")
    values = {"a": CellType(10), "c": CellType(30)}
    frames.region(g)(lambda *_: C.Resume(offset, tuple(values.get(n, C.KEEP) for n in names)))
    C.clear()
    assert frames.optimized(g)(1, 2)() == (10, 30, 1)


def test_behind_a_prefix(frames: Frames) -> None:
    body = "\n".join(f"    v{i} = {i}" for i in range(300))
    scope: dict[str, Any] = {}
    exec(f"def h(a, b):\n{body}\n", scope)
    h = scope["h"]
    code = h.__code__
    prefix = line(code, 300)
    assert code.co_code[prefix] == dis.opmap["EXTENDED_ARG"]
    refused(frames, C.Resume(prefix + 2, (1,) * code.co_nlocals), "no instruction", h)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="3.13 has CALL_KW")
def test_between_keyword_names_and_the_call(frames: Frames) -> None:
    def h(a: Any, b: int) -> Any:
        return dict(x=a, y=b)

    names = at(h.__code__, "KW_NAMES")
    call = at(h.__code__, "CALL")
    stack = (C.NULL_, dict, 1, 2)
    refused(frames, C.Resume(call, (1, 2), stack), "no instruction", h)
    if sys.version_info < (3, 12):
        refused(frames, C.Resume(at(h.__code__, "PRECALL"), (1, 2), stack), "no instruction", h)
    C.clear()
    frames.region(h)(lambda *_: C.Resume(names, (1, 2), stack))
    assert frames.optimized(h)(5, 6) == {"x": 1, "y": 2}


def test_state_is_untouched_by_a_refusal(frames: Frames) -> None:
    def h(a: Any, b: Any) -> Any:
        c = 1
        return c

    class Witness:
        pass

    witness = Witness()
    before = sys.getrefcount(witness)
    frames.region(h)(lambda a, b, c: C.Resume(line(h.__code__, 2), (b, a), ()))
    for _ in range(10):
        with pytest.raises(SystemError):
            frames.optimized(h)(witness, witness)
    frames.states.clear()
    assert sys.getrefcount(witness) == before


def test_resume_arguments() -> None:
    for bad in [(-2, ()), (3, ()), ("x", ()), (2, []), (2, (), []), (2, (), (), 5)]:
        with pytest.raises((TypeError, ValueError)):
            C.Resume(*bad)
    with pytest.raises(TypeError):
        C.Resume(2, (), handling=5)
    with pytest.raises(TypeError):
        C.Resume(2)
    with pytest.raises(TypeError):
        C.Resume(offset=2, locals=(), nonsense=1)
    resume = C.Resume(offset=2, locals=(1,), stack=(2,), exc=None, interpret=True)
    assert (resume.offset, resume.locals, resume.stack, resume.exc, resume.interpret) == (2, (1,), (2,), None, True)
    with pytest.raises((AttributeError, TypeError)):
        resume.offset = 4
    assert repr(resume) == "Resume(2, locals=(1,), stack=(2,), interpret=True)"
    assert [repr(s) for s in (C.UNBOUND, C.NULL_, C.KEEP, C.SKIP_CODE)] == ["UNBOUND", "NULL_", "KEEP", "SKIP_CODE"]
