"""Exceptions and generators thrown into each other: throw, close, return values, groups, chains, notes."""

# ruff: noqa

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

import magneto
from tests.compare import same
from tests.python.programs import Program, Programs, X, check

programs = Programs()


@programs.add()
def send_throw_close(x):
    log = []

    def gen(t):
        got = []
        try:
            while True:
                r = yield t
                got.append(r)
                t = t + (r or 0)
        except KeyError:
            yield t * 100
        finally:
            log.append(("fin", got))

    g = gen(x)
    out = [next(g), g.send(2), g.send(3), g.throw(KeyError("k"))]
    g.close()
    g.close()
    try:
        next(g)
    except StopIteration as s:
        log.append(s.value)
    return out, log


@programs.add()
def throw_into_a_delegate(x):
    log = []

    def inner(t):
        try:
            yield t + 1
        except ValueError as e:
            log.append(str(e))
            yield t + 2
        return t + 3

    def outer(t):
        r = yield from inner(t)
        yield r * 2
        return 7

    g = outer(x)
    out = [next(g), g.throw(ValueError("into")), next(g)]
    try:
        next(g)
    except StopIteration as s:
        log.append((s.value, s.args))
    return out, log


@programs.add()
def delegate_that_does_not_catch(x):
    log = []

    def inner(t):
        try:
            yield t + 1
        finally:
            log.append("inner")

    def outer(t):
        try:
            yield from inner(t)
        except LookupError as e:
            log.append(repr(e))
            yield t * 2

    g = outer(x)
    return [next(g), g.throw(KeyError("k"))], log


@programs.add()
def close_a_delegate(x):
    log = []

    def inner():
        try:
            yield x
        except GeneratorExit:
            log.append("closed")
            raise

    def outer():
        yield from inner()

    g = outer()
    y = next(g)
    g.close()
    return y, log


@programs.add()
def stop_iteration_inside_a_generator(x):
    log, out = [], []

    def gen():
        yield x
        raise StopIteration("bad")

    try:
        for y in gen():
            out.append(y + 1)
    except RuntimeError as e:
        log.append((str(e), repr(e.__cause__), repr(e.__context__)))
        out.append(x * 2)
    return out, log


@programs.add()
def contextmanager_that_handles(x):
    log = []

    @contextlib.contextmanager
    def cm():
        log.append("in")
        try:
            yield x + 1
        except ValueError as e:
            log.append(str(e))
        finally:
            log.append("out")

    with cm() as y:
        z = y * 2
        raise ValueError("in body")
    return z + y, log


@programs.add()
def contextmanager_that_lets_through(x):
    log = []

    @contextlib.contextmanager
    def cm():
        try:
            yield x + 1
        finally:
            log.append("out")

    try:
        with cm() as y:
            z = y * 2
            raise ValueError("in body")
    except ValueError as e:
        log.append((str(e), repr(e.__context__)))
        z = z + 1
    return z + y, log


@programs.add()
def generator_that_ignores_exit(x):
    log = []

    def gen():
        try:
            yield 1
        except GeneratorExit:
            yield 2

    g = gen()
    next(g)
    try:
        g.close()
    except RuntimeError as e:
        log.append(str(e))

    def echo():
        v = yield
        return v

    h = echo()
    try:
        h.send(3)
    except TypeError as e:
        log.append(str(e))
    next(h)
    try:
        h.send(5)
    except StopIteration as e:
        log.append((e.value, e.args))
    return x + 1, log


@programs.add()
def generator_running_already(x):
    log = []

    def gen():
        try:
            next(g)
        except ValueError as e:
            log.append(str(e))
        yield x + 1

    g = gen()
    return next(g), log


@programs.add()
def recursive_generator(x):
    def walk(t, n):
        if n:
            yield from walk(t * 2, n - 1)
            yield t + n
            yield from walk(t * 3, n - 1)

    total = 0
    for y in walk(x, 3):
        total = total + y
    return total


@programs.add()
def chains(x):
    log = []
    try:
        try:
            raise KeyError("first")
        except KeyError as a:
            raise ValueError("second")
    except ValueError as b:
        log.append((repr(b.__context__), b.__cause__, b.__suppress_context__))
    try:
        try:
            raise KeyError("first")
        except KeyError as a:
            raise ValueError("second") from None
    except ValueError as b:
        log.append((repr(b.__context__), b.__cause__, b.__suppress_context__))
    return x + 1, log


@programs.add()
def what_is_handled(x):
    log = [sys.exc_info(), sys.exception()]
    try:
        raise KeyError("k")
    except KeyError as e:
        log.append((sys.exception() is e, sys.exc_info()[0].__name__, sys.exc_info()[2] is None))
        try:
            raise ValueError("v")
        except ValueError as f:
            log.append((sys.exception() is f, sys.exc_info()[1] is f))
        log.append(sys.exception() is e)

        def gen():
            yield sys.exception() is e
            try:
                raise TypeError
            except TypeError as t:
                yield sys.exception() is t
            yield sys.exception() is e

        log.append(list(gen()))
    log.append(sys.exc_info())
    return x + 1, log


@programs.add()
def notes(x):
    e = ValueError("n")
    e.add_note("one")
    try:
        e.add_note("two")
        raise e
    except ValueError as caught:
        return x + 1, caught.__notes__


@programs.add()
def groups(x):
    log = []
    try:
        raise ExceptionGroup("eg", [ValueError(1), TypeError(2), ExceptionGroup("n", [KeyError("k"), ValueError(3)])])
    except* ValueError as e:
        log.append((e.message, len(e.exceptions), e.exceptions[1].message))
        x = x + 1
    except* (TypeError, KeyError) as e:
        log.append([type(part).__name__ for part in e.exceptions])
        x = x * 2
    try:
        raise KeyError("a")
    except* KeyError as e:
        log.append((type(e).__name__, e.exceptions[0].args))
        x = x + 3
    return x, log


@programs.add(graphs=None)
def group_with_something_left(x):
    log = []
    try:
        try:
            raise ExceptionGroup("eg", [ValueError(1), TypeError(2)])
        except* ValueError as e:
            x = x + 1
    except ExceptionGroup as e:
        log.append((repr(e), repr(e.__context__)))
        x = x * 3
    return x, log


@programs.add(graphs=None)
def stored_exception_keeps_its_traceback(x):
    saved = []
    try:
        raise ValueError("s")
    except ValueError as e:
        saved.append(e)
    x = x + 1
    return x, [e.__traceback__.tb_lineno - e.__traceback__.tb_frame.f_code.co_firstlineno for e in saved]


@programs.add(graphs=None)
def exceptions_whose_contexts_run_in_a_circle(x):
    def circle():
        try:
            raise ValueError(1)
        except ValueError as error:
            error.__context__ = error
            raise TypeError(2)

    try:
        circle()
    except TypeError as error:
        first = error.__context__
        return x + 1, type(first), first.__context__ is first


class NoManager:
    pass


class HalfManager:
    def __enter__(self):
        return self


@programs.add(graphs=None, again=False)
def with_blocks_of_no_context_manager(x):
    found = []
    for manager in (NoManager(), HalfManager()):
        try:
            with manager:
                x = x + 1
        except TypeError as error:
            found.append((str(error), error.__context__, error.__cause__, error.__suppress_context__))
    return x, found


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def test_a_generator_that_has_not_begun_leaves_the_graph() -> None:
    import magneto

    def f(x):
        def gen(n):
            for i in range(n):
                yield x + i

        return gen(3), (y * 2 for y in [x, x + 1])

    a, b = magneto.optimize("eager", nopython=True)(f)(torch.ones(2))
    assert [float(v[0]) for v in a] == [1, 2, 3] and [float(v[0]) for v in b] == [2, 4]


def test_the_recursion_limit_leaves_nothing_handled() -> None:
    """The region of a handler that finds no stack any more is left as if its exception had never been handled."""
    import magneto

    def f(x):
        def g():
            try:
                return g()
            except ValueError:
                return -1

        try:
            g()
        except RecursionError:
            x = x + 1
        return x, sys.exc_info()

    assert magneto.optimize("eager")(f)(torch.ones(2))[1] == (None, None, None)
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize("held", [False, True])
def test_a_generator_with_too_many_values_is_closed_before_the_handler(held: bool) -> None:
    def three(x, log):
        try:
            yield x
            yield x + 1
            yield x + 2
        finally:
            log.append("closed")

    def program(x):
        log, kept = [], None
        values = three(x, log)
        if held:
            kept = values
        try:
            first, second = three(x, log) if not held else values
        except ValueError as error:
            log.append(str(error))
        said = list(log)
        rest = next(kept, None) if kept is not None else None
        return said, rest, x * 2

    compiled = magneto.optimize("eager")(program)
    for _ in range(2):
        same(program, compiled, torch.ones(3))
