"""When objects die, which objects are one and the same, and who is told of calls: as in plain Python, whatever the region holds."""

from __future__ import annotations

import collections
import contextlib
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


def _dies_in_a_callee(step):
    class Failure(Exception):
        def __init__(self, thing):
            self.thing = thing

    def failing():
        try:
            raise Failure(thing)
        except Failure:
            yield

    thing = Thing()
    kept = weakref.ref(thing)
    stepped = failing()
    next(stepped)
    step(stepped)
    stepped = thing = None
    _collect()
    return kept()


@program
def what_a_callee_made_and_let_go_of():
    def last(stepped):
        try:
            next(stepped)
        except StopIteration:
            pass

    return _dies_in_a_callee(last)


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


@program
def finalisers_of_nested_objects_run_from_outside_to_inside():
    deleted = []

    class Nested(collections.OrderedDict):
        def __del__(self):
            deleted.append(self.i)

    obj = None
    for i in range(6):
        obj = Nested([(None, obj)])
        obj.i = i
    del obj
    return list(deleted)


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


def _lines(fn: Callable[[], Any]) -> list[Any]:
    try:
        fn()
    except Exception as error:
        traceback = error.__traceback__
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame.f_code.co_name, traceback.tb_lineno, traceback.tb_frame.f_lineno))
        traceback = traceback.tb_next
    return found[1:]


def test_lines_of_frames_that_raised() -> None:
    def in_a_named_handler():
        try:
            1 / 0  # noqa: B018
        except Exception as error:  # noqa: F841
            1 / 0  # noqa: B018

    def behind_a_with_block():
        class Nothing:
            def __enter__(self):
                return self

            def __exit__(self, *exc):
                pass

        with Nothing():
            1 / 0  # noqa: B018

    for fn in (in_a_named_handler, behind_a_with_block):
        assert magneto.optimize("eager")(_lines)(fn) == _lines(fn)


def test_an_exception_raised_again_leaves_the_chain() -> None:
    def chain():
        try:
            try:
                raise KeyError
            except KeyError as first:
                try:
                    raise ValueError
                except ValueError as second:
                    assert second.__context__ is first
                    raise first
        except KeyError as error:
            return type(error.__context__), error.__context__.__context__

    assert magneto.optimize("eager")(chain)() == chain() == (ValueError, None)


def test_texts_of_exceptions_whose_members_change() -> None:
    def text():
        error = UnicodeEncodeError("baz", "xxxxx", 1, 5, "foo")
        said = str(error)
        error.end = 2
        return said, str(error), repr(SyntaxError("wrong")), str(OSError(2, "missing", "f"))

    assert magneto.optimize("eager")(text)() == text()


def test_answers_of_special_methods_are_checked() -> None:
    def say(x):
        class C:
            y = 1
            __slots__ = ()

            def __bool__(self):
                return None

        said = []
        for action in (
            lambda: bool(C()),
            lambda: setattr(C(), "y", 2),
            lambda: C().__init__(1),
            lambda: setattr(Exception(), "__cause__", 1),
        ):
            try:
                action()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said, x + 1

    traced = magneto.optimize("eager")(say)(torch.ones(2))
    assert traced[0] == say(torch.ones(2))[0]


def test_locals_of_a_class_body() -> None:
    def names(x):
        class C:
            y = x
            locals()["z"] = 3
            found = sorted(name for name in locals() if not name.startswith("_"))

            def read(self):
                return x

        return C.found, C.z, x + 1

    traced = magneto.optimize("eager")(names)(torch.ones(2))
    assert traced[:2] == names(torch.ones(2))[:2]


def test_an_object_made_inside_dies_before_a_nested_break() -> None:
    """The region that begins at a call, and goes on in the callee, holds nothing that the callee has let go of."""

    class Thing:
        pass

    def collect():
        gc.collect()

    class Case:
        def look(self, act):
            thing = Thing()
            watch = weakref.ref(thing)
            act()
            thing = None
            collect()
            return watch() is None

        def main(self):
            def act():
                return self

            return self.look(act)

    assert magneto.optimize("eager")(Case().main)()


def test_what_a_list_held_dies_with_it() -> None:
    dead = []

    class Thing:
        def __del__(self):
            dead.append(1)

    def drop(x):
        things = [Thing(), Thing()]
        try:
            a, b, c = iter(things)
        except ValueError:
            pass
        del things
        return len(dead), x + 1

    assert magneto.optimize("eager")(drop)(torch.ones(2))[0] == 2


def _twice(x):
    y = x + 1
    return y * 2


def _monitored(x, tool, local):
    events = sys.monitoring.events.PY_START | sys.monitoring.events.LINE | sys.monitoring.events.PY_RETURN
    if local:
        sys.monitoring.set_local_events(tool, _twice.__code__, events)
    else:
        sys.monitoring.set_events(tool, events)
    x = _twice(_twice(x))
    if local:
        sys.monitoring.set_local_events(tool, _twice.__code__, 0)
    else:
        sys.monitoring.set_events(tool, 0)
    return x


def _calls_monitored(x, tool, local):
    return _monitored(x, tool, local) * 2


def _calls_twice(x):
    return _twice(_twice(x)) + 1


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in Python 3.12")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("fn", [_monitored, _calls_monitored])
def test_a_monitoring_tool_is_told_of_the_program_alone(fn: Callable[..., Any], local: bool) -> None:
    tool = 3
    told: list[Any] = []
    sys.monitoring.use_tool_id(tool, "test")
    try:
        for event in (sys.monitoring.events.PY_START, sys.monitoring.events.LINE, sys.monitoring.events.PY_RETURN):
            sys.monitoring.register_callback(tool, event, lambda code, *where: told.append((code.co_name, *where[:1])))
        x = torch.ones(2)
        expected = fn(x, tool, local), list(told)
        compiled = magneto.optimize("eager")(fn)
        for _ in range(2):
            told.clear()
            found = compiled(x, tool, local)
            assert torch.equal(found, expected[0])
            assert told == expected[1]
        region = magneto.optimize("eager")(_twice)
        region(x)
        told.clear()
        sys.monitoring.set_local_events(tool, _twice.__code__, sys.monitoring.events.PY_START)
        region(x)
        assert told == [("_twice", 0)]
        caller = magneto.optimize("eager")(_calls_twice)
        for events, expected_events in ((0, []), (sys.monitoring.events.PY_START, [("_twice", 0)] * 2), (0, [])):
            sys.monitoring.set_local_events(tool, _twice.__code__, events)
            told.clear()
            assert torch.equal(caller(x), torch.full((2,), 11.0))
            assert told == expected_events
    finally:
        sys.monitoring.set_local_events(tool, _twice.__code__, 0)
        sys.monitoring.set_events(tool, 0)
        sys.monitoring.free_tool_id(tool)


class Held:
    """What capture is given to hold."""

    value = 1


class Mortal(Held):
    def __del__(self) -> None:
        pass


def _in_a_cycle(obj):
    items = [obj]
    items.append(items)
    return items[1][0].value


def _in_an_object_that_knows_itself(obj):
    made = Held()
    made.obj = obj
    made.me = made
    return made.me.obj.value


def _in_a_generator_of_a_closure(obj):
    @contextlib.contextmanager
    def manager():
        yield obj

    with manager() as found:
        return found.value


def _in_a_recursive_function(obj):
    def down(n):
        return down(n - 1) if n else obj.value

    return down(3)


def _on_the_stack_at_a_break(obj):
    return [obj, magneto.graph_break()][0].value


@pytest.mark.parametrize("kind", [Held, Mortal])
@pytest.mark.parametrize(
    "fn", [_in_a_cycle, _in_an_object_that_knows_itself, _in_a_generator_of_a_closure, _in_a_recursive_function, _on_the_stack_at_a_break]
)
def test_a_capture_lets_go_of_the_objects_of_its_call(fn: Callable[..., Any], kind: type) -> None:
    """At once, not at the next collection of garbage."""
    obj = kind()
    gc.collect()
    gc.disable()
    try:
        compiled = magneto.optimize("eager")(fn)
        reference = weakref.ref(obj)
        assert compiled(obj) == 1
        del obj
        assert reference() is None
    finally:
        gc.enable()


class Noted:
    """Notes its death."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __del__(self) -> None:
        self.log.append(self.name)


def _variables_of_a_return(log):
    first = Noted("first", log)
    second = Noted("second", log)
    return log.append(f"return {first.name} {second.name}")


def _raising(log, x):
    noted = Noted("noted", log)
    y = x + 1
    raise LookupError(noted.name, y)


def _handling(log, x):
    try:
        _raising(log, x)
    except LookupError as error:
        return x + len(error.args)


def _letting_go(log, x):
    noted = [Noted("noted", log)]
    magneto.graph_break()
    log.append(noted[0].name)
    noted = None
    magneto.graph_break()
    log.append("behind")
    return x


def _calling(log, x):
    y = _letting_go(log, x + 1)
    log.append("returned")
    return y


@pytest.mark.parametrize("fn", [lambda log, x: _variables_of_a_return(log), _handling, _calling], ids=["return", "exception", "nested"])
def test_what_a_callee_holds_dies_without_a_collection(fn: Callable[..., Any]) -> None:
    compiled = magneto.optimize("eager")(fn)
    gc.collect()
    gc.disable()
    try:
        plain: list[str] = []
        fn(plain, torch.ones(2))
        for _ in range(3):
            log: list[str] = []
            compiled(log, torch.ones(2))
            assert log == plain
    finally:
        gc.enable()
