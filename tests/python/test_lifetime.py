"""When objects die, which objects are one and the same, and who is told of calls: as in plain Python, whatever the region holds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto

FOUND: list[Callable[[], Any]] = []


def program(fn: Callable[[], Any]) -> Callable[[], Any]:
    FOUND.append(fn)
    return fn


class Thing:
    pass


def _reference(obj: object) -> Any:
    return weakref.ref(obj)


@program
def a_callback_runs_when_the_variable_is_deleted():
    log = []
    thing = Thing()
    kept = weakref.ref(thing, lambda _: log.append("dead"))
    log.append("before")
    del thing
    log.append("after")
    return log, kept()


@program
def a_callback_runs_when_the_list_is_cleared():
    log: list[str] = []
    thing = Thing()
    things = [thing]
    kept = weakref.ref(thing, lambda _: log.append("dead"))
    thing = None
    log.append(str(len(things)))
    things.clear()
    log.append("after")
    return log, kept()


class Finalised:
    def __del__(self):
        FINALISED.append("dead")


FINALISED: list[str] = []


@program
def a_finaliser_runs_in_a_handler():
    FINALISED.clear()
    thing = Finalised()
    try:
        try:
            Finalised.missing  # noqa: B018
        except AttributeError:
            FINALISED.append("handled")
            del thing
            FINALISED.append("behind")
            raise TypeError from None
    except TypeError as error:
        return list(FINALISED), type(error.__context__)


def _raised_here():
    try:
        raise TypeError
    except TypeError as error:
        return type(error.__context__)


@program
def the_context_is_what_a_caller_handles():
    try:
        raise KeyError
    except KeyError:
        magneto.graph_break()
        try:
            raise ValueError
        except ValueError as error:
            return type(error.__context__), _raised_here()


@program
def a_reference_made_in_a_callee_dies_with_the_variable():
    thing = Thing()
    kept = _reference(thing)
    alive = kept() is thing
    thing = None
    return alive, kept()


@program
def an_existing_reference_dies_with_the_variable():
    thing = Thing()
    magneto.graph_break()
    kept = _reference(thing)
    magneto.graph_break()
    alive = kept() is thing
    thing = None
    return alive, kept()


@program
def a_reference_dies_with_a_cell():
    thing = Thing()
    read = lambda: thing  # noqa: E731
    kept = _reference(thing)
    magneto.graph_break()
    alive = kept() is read()
    thing = None
    magneto.graph_break()
    return alive, kept()


def _collect() -> None:
    gc.collect()


@program
def a_collection_finds_what_the_program_has_let_go_of():
    class Tester:
        def dig(self):
            if 0:
                lambda: self
            try:
                1 / 0
            except Exception as error:
                self.error = error
            self = None

    tester = Tester()
    tester.dig()
    kept = weakref.ref(tester)
    del tester
    _collect()
    return kept()


@program
def a_list_is_empty_while_it_is_sorted():
    values, seen = [3, 1, 2], []

    def key(value):
        seen.append(len(values))
        return value

    values.sort(key=key)
    return values, seen


@program
def a_list_changed_by_its_own_sort():
    values = [3, 1, 2]

    def key(value):
        values.append(1)
        return value

    try:
        values.sort(key=key)
    except ValueError as error:
        return str(error), values


def _text(end: str) -> str:
    return "key " + end


@program
def computed_texts_are_objects_of_their_own():
    a = b = "xyzpdq"
    c = a[:3] + b[3:]
    e = c
    magneto.graph_break()
    return a is b, a is c, c is e, _text("a") is _text("a")


@program
def a_profile_function_sees_the_programs_calls():
    events = []

    def note(frame, event, arg):
        events.append((event, frame.f_code.co_name))

    def called(n):
        return [i for i in range(n)]

    def generates(n):
        yield from range(n)

    def run(f):
        sys.setprofile(note)
        try:
            f(3)
            list(generates(2))
        finally:
            sys.setprofile(None)

    run(called)
    return events


@pytest.mark.parametrize("fn", FOUND, ids=lambda fn: fn.__name__)
def test_as_in_plain_python(fn: Callable[[], Any]) -> None:
    traced = magneto.optimize("eager")(fn)
    assert repr(traced()) == repr(fn()) == repr(traced())


def test_each_call_computes_a_new_text() -> None:
    traced = magneto.optimize("eager", nopython=True)(lambda x: (x + 1, _text("of several words")))
    assert traced(torch.ones(2))[1] is not traced(torch.ones(2))[1]


def test_cprofile_does_not_keep_capture_away() -> None:
    import cProfile

    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    profiler = cProfile.Profile()
    profiler.enable()
    try:
        magneto.optimize(backend)(lambda x: x + 1)(torch.ones(2))
    finally:
        profiler.disable()
    assert len(graphs) == 1
