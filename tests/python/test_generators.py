"""Generators that have started leave the region at a break, and generators from outside are looked into."""

# ruff: noqa

from __future__ import annotations

import inspect
import contextlib
import gc
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto
from tests.compare import Capturing

XS = [torch.tensor([float(v), 1.0]) for v in (1, -2, 3, -4, 5, -6)]
FUNCTIONS: list[Callable[..., Any]] = []


@pytest.fixture(autouse=True)
def fresh() -> Any:
    magneto.reset()
    with magneto.config.patch(suppress_errors=False):
        yield
    magneto.reset()


def leaving(fn: Callable[..., Any]) -> Callable[..., Any]:
    FUNCTIONS.append(fn)
    return fn


@leaving
def a_loop(xs):
    def g(ys, k):
        n = 0
        for y in ys:
            n += 1
            got = yield y * k
        yield n

    t = torch.zeros(2)
    for x in g(xs, 2):
        t = t + x
        magneto.graph_break()
        t = t * 2
    return t


@leaving
def a_generator_expression(xs):
    t = torch.zeros(2)
    for x in (x * i for i, x in enumerate(xs) if i != 2):
        t = t + x
        magneto.graph_break()
        t = t * 2
    return t


@leaving
def values_are_sent(xs):
    def g():
        total = 0
        while True:
            got = yield total
            if got is None:
                return "end"
            total = total + got

    it = g()
    next(it)
    t = it.send(xs[0])
    magneto.graph_break()
    t = t + it.send(xs[1])
    try:
        it.send(None)
    except StopIteration as e:
        return t, e.value


@leaving
def yield_from(xs):
    def inner(ys):
        r = 0
        for y in ys:
            got = yield y
            r += 1
        return r

    def outer():
        a = yield from inner(xs)
        yield a
        b = yield from [1, 2]
        yield from inner(xs[:1])

    t = torch.zeros(2)
    for x in outer():
        t = t + x
        magneto.graph_break()
        t = t * 2
    return t


@leaving
def it_is_closed_when_nobody_needs_it(xs):
    log = []

    def g():
        try:
            for x in xs:
                yield x
        finally:
            log.append("closed")

    t = torch.zeros(2)
    for x in g():
        t = t + x
        magneto.graph_break()
        t = t * 2
        if len(log) == 0 and t.sum() > 5:
            break
    magneto.graph_break()
    return t, log


@leaving
def exceptions_are_thrown_in(xs):
    log = []

    def g():
        for x in xs:
            try:
                yield x
            except ValueError as e:
                log.append(str(e))
                yield x * 2

    it = g()
    t = next(it)
    magneto.graph_break()
    t = t + it.throw(ValueError("a"))
    magneto.graph_break()
    t = t + next(it)
    t = t + it.throw(ValueError("b"))
    it.close()
    return t, log, list(it)


@contextlib.contextmanager
def cm(log):
    log.append("in")
    try:
        yield 3
    finally:
        log.append("out")


@leaving
def context_managers(xs):
    log = []
    t = xs[0]
    with cm(log) as n:
        t = t * n
        magneto.graph_break()
        t = t + 1
    with cm(log):
        try:
            with cm(log):
                magneto.graph_break()
                raise ValueError(1)
        except ValueError as e:
            magneto.graph_break()
            log.append(str(e))
    return t, log


@leaving
def finished_ones(xs):
    def g():
        yield xs[0]

    it = g()
    t = next(it) + 1
    rest = list(it)
    magneto.graph_break()
    return t * 2, rest, list(it), it.gi_frame is None


@leaving
def one_that_has_not_started(xs):
    def g():
        yield from xs

    it = g()
    magneto.graph_break()
    return list(it)


@leaving
def its_variables_are_cells(xs):
    def g(scale):
        def mul(v):
            return v * scale

        for x in xs:
            scale = scale + 1
            yield mul(x)

    t = torch.zeros(2)
    for x in g(1):
        t = t + x
        magneto.graph_break()
        t = t * 2
    return t


@leaving
def two_in_a_zip(xs):
    def g(n):
        for i in range(n):
            yield i

    t = torch.zeros(2)
    for a, b in zip(g(5), g(3)):
        t = t + xs[a] * b
        magneto.graph_break()
        t = t * 2
    return t


@leaving
def one_inside_another(xs):
    def g(n):
        for i in range(n):
            for j in h(i):
                yield i + j

    def h(n):
        for i in range(n):
            yield i
            magneto.graph_break()

    t = torch.zeros(2)
    for a in g(4):
        t = t + xs[a]
        magneto.graph_break()
        t = t * 2
    return t


@leaving
def it_handles_an_exception(xs):
    def g():
        for x in xs:
            try:
                raise KeyError(1)
            except KeyError:
                yield x

    t = torch.zeros(2)
    for a in g():
        t = t + a
        magneto.graph_break()
        t = t * 2
    return t


@leaving
def returned_half_run(xs):
    def g():
        for x in xs:
            yield x + 1

    it = g()
    return next(it), it


@leaving
def dropped_by_an_exception(xs):
    log = []

    def g():
        try:
            yield from xs
        finally:
            log.append("closed")

    t = torch.zeros(2)
    try:
        for x in g():
            t = t + x
            magneto.graph_break()
            raise ValueError(len(log))
    except ValueError as error:
        log.append(str(error))
        t = t * (len(log) + 1)
    return t, log


@leaving
def stepped_by_hand(xs):
    def g(n):
        while n:
            n = n - 1
            yield xs[n]

    it, other = g(3), g(2)
    t = next(it) + next(other)
    magneto.graph_break()
    t = t * next(it) + next(other, 0)
    magneto.graph_break()
    t = t * next(it) + next(other, 0)
    magneto.graph_break()
    return t, next(it, "end"), list(other), it.gi_frame is None


@leaving
def given_and_taken(xs):
    def g(scale):
        try:
            for x in xs:
                scale = (yield x * scale) or scale
        except GeneratorExit:
            return

    it = g(2)
    magneto.graph_break()
    t = it.send(None)
    magneto.graph_break()
    t = t + it.send(5)
    it.close()
    magneto.graph_break()
    return t, list(it)


@leaving
def closed_before_it_starts(xs):
    def g():
        yield from xs

    it, other = g(), g()
    magneto.graph_break()
    it.close()
    t = xs[0] + 1
    try:
        other.throw(KeyError(1))
    except KeyError:
        t = t + 1
    magneto.graph_break()
    return t, list(it), list(other), it.gi_frame is None


@leaving
def what_it_hands_over_to_runs(xs):
    log = []

    class Steps:
        def __init__(self):
            self.n = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.n += 1
            if self.n > 2:
                raise StopIteration("done")
            return self.n

        def send(self, value):
            log.append(value)
            return value

    def outer():
        log.append((yield from Steps()))
        try:
            yield from inner()
        except KeyError:
            log.append("caught")
        yield 5

    def inner():
        try:
            yield 1
        except ValueError:
            pass
        try:
            yield from it
        except ValueError as error:
            log.append(str(error))
        try:
            yield 2
        finally:
            log.append("inner ends")

    it = outer()
    magneto.graph_break()
    t = xs[0] * next(it)
    t = t + it.send(3) + next(it)
    t = t + next(it)
    magneto.graph_break()
    t = t + it.throw(ValueError(1))
    t = t + it.throw(KeyError(2))
    return t, log, list(it)


@leaving
def the_receiver_of_a_running_generator(xs):
    seen = []

    def inner():
        seen.append(outer_one.gi_yieldfrom)
        yield xs[0] + 1
        seen.append(outer_one.gi_yieldfrom)

    def outer():
        seen.append(outer_one.gi_yieldfrom)
        yield from inner()
        seen.append(outer_one.gi_yieldfrom)
        yield xs[1] + 1
        seen.append(outer_one.gi_yieldfrom)

    outer_one = outer()
    given = [outer_one.send(None)]
    seen.append(outer_one.gi_yieldfrom.gi_code.co_name)
    given.append(outer_one.send(None))
    seen.append(outer_one.gi_yieldfrom)
    given += outer_one
    return seen, given


@leaving
def three_arguments_of_throw(xs):
    def g():
        yield xs[0] + 1

    def thrown(*args):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                g().throw(*args)
            except TypeError as error:
                return str(error), [(str(w.message), w.lineno, w.filename) for w in said]

    return xs[0] * 2, thrown(TypeError, TypeError(24), None), thrown(TypeError), thrown(TypeError, 3), thrown(TypeError(4))


class Told:
    def __del__(self):
        LOG.append("gone")


@leaving
def what_an_exhausted_generator_held(xs):
    def g(told):
        yield xs[0] + 1

    it = g(Told())
    given = list(it)

    def holds():
        return it

    gc.collect()
    log, LOG[:] = list(LOG), []
    return log, given, list(holds())


def shown(value: Any) -> Any:
    """Comparable text; generators are run to their end."""
    if isinstance(value, (tuple, list, types.GeneratorType)):
        return [shown(item) for item in value]
    return str(value)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=[fn.__name__ for fn in FUNCTIONS])
def test_generator(fn: Callable[..., Any]) -> None:
    compiled = magneto.optimize("eager")(fn)
    expected = shown(fn(list(XS)))
    for _ in range(3):
        assert shown(compiled(list(XS))) == expected


def test_a_loop_over_a_generator_breaks_once_a_decision() -> None:
    def items(xs, scale):
        for i, x in enumerate(xs):
            if i != 1:
                yield i, x * scale

    def f(xs, scale):
        total = torch.zeros(2)
        for i, x in items(xs, scale):
            if x.sum() > 0:
                total = total + x
            else:
                total = total - 2 * x
        return total

    backend = Capturing()
    compiled = magneto.optimize(backend)(f)
    for xs in (XS, [x * 3 for x in XS]):
        assert torch.equal(compiled(xs, 2.0), f(xs, 2.0))
    assert magneto.stats()["breaks"] <= 4
    first = len(backend.graphs)
    assert torch.equal(compiled(XS, 2.0), f(XS, 2.0))
    assert len(backend.graphs) == first


def test_a_generator_given_as_an_argument_is_stepped() -> None:
    def f(it, x):
        return x * next(it) + next(it, 0)

    def numbers(n):
        try:
            for i in range(n):
                yield i
        finally:
            LOG.append(n)

    compiled = magneto.optimize("eager", nopython=True)(f)
    ours, plain = numbers(7), numbers(7)
    for _ in range(4):
        assert torch.equal(compiled(ours, XS[0]), f(plain, XS[0]))
    assert LOG == [7, 7]
    with pytest.raises(StopIteration):
        magneto.optimize("eager")(f)(ours, XS[0])
    LOG.clear()


LOG: list[Any] = []


def test_a_generator_that_is_over() -> None:
    """It has no frame left; the caller's is not its own."""

    def count(n):
        yield from range(n)

    def read(x, generator):
        try:
            return x + 1, next(generator, 5), list(generator), next(generator)
        except (ValueError, StopIteration) as error:
            return repr(error)

    over = count(0)
    assert list(over) == []
    assert magneto.optimize("eager")(read)(torch.ones(1), over) == read(torch.ones(1), over) == "StopIteration()"


def _keeps_what_it_has_read(x: Any) -> Any:
    first = x + 1
    dropped = [first]
    total = first.sum()
    del dropped
    yield total
    later = x * 2
    yield later


def test_a_suspended_generator_has_all_its_variables() -> None:
    """Those too that its code does not read again."""

    def begin(x: Any) -> Any:
        generator = _keeps_what_it_has_read(x)
        next(generator)
        return generator

    x = torch.ones(2)
    step = magneto.optimize("eager", nopython=True)(next)
    generators = [begin(x), magneto.optimize("eager", nopython=True)(begin)(x)]
    for advance in (lambda _: None, lambda generator: next(generator) if generator is generators[0] else step(generator)):
        for generator in generators:
            advance(generator)
        plain, traced = (inspect.getgeneratorlocals(generator) for generator in generators)
        assert list(plain) == list(traced)
        assert all(torch.equal(plain[name], traced[name]) for name in plain)


def _owing(log, n):
    try:
        yield from range(n)
    finally:
        log.append("closed")


def _handing_on(log, n):
    yield from _owing(log, n)


def dropped_behind_yield_from(x, log):
    for i in _handing_on(log, 5):
        x = x + i
        if i == 2:
            break
    log.append("behind")
    return x


def dropped_inside_others(x, log):
    for wrap in (enumerate, lambda it: zip(it, it), lambda it: map(abs, it), lambda it: filter(None, it), lambda it: (i for i in it)):
        for _ in wrap(_owing(log, 5)):
            x = x * 2
            break
        log.append("behind")
    return x


def dropped_by_a_call(x, log):
    x = x + next(_owing(log, 3)) + any(i == 1 for i in _owing(log, 3)) + (1 in _owing(log, 3))
    log.append("behind")
    return x + len(list(zip(_owing(log, 3), [1]))) + len(log)


def dropped_by_a_variable(x, log):
    it = enumerate(_owing(log, 3))
    next(it)
    magneto.graph_break()
    it = None
    log.append("behind")
    return x + 1


@pytest.mark.parametrize("fn", [dropped_behind_yield_from, dropped_inside_others, dropped_by_a_call, dropped_by_a_variable])
def test_the_last_holder_of_a_generator_closes_it(fn: Callable[..., Any]) -> None:
    """Where the program lets go of it, not where the region ends."""
    compiled = magneto.optimize("eager")(fn)
    for _ in range(3):
        ours: list[str] = []
        plain: list[str] = []
        assert torch.equal(compiled(torch.ones(2), ours), fn(torch.ones(2), plain))
        assert ours == plain
