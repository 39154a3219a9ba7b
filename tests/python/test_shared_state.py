"""State that outlives a call and is kept in classes, functions and namespaces: counters, caches, registries, settings, written inside and changed outside.

Each scenario makes its own program and runs it several times, plain and traced, with a change of the environment after each call.
"""

# ruff: noqa

from __future__ import annotations

import abc
import enum
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import magneto
from tests.compare import assert_equal
from tests.python.programs import X

Scenario = Callable[[], tuple[Any, ...]]
SCENARIOS: list[Scenario] = []


def scenario(fn: Scenario) -> Scenario:
    """`fn()` gives (program, arguments of the i-th call, what is seen and changed after it)."""
    SCENARIOS.append(fn)
    return fn


@scenario
def counter_of_a_class():
    class C:
        n = 0

    def program(x):
        C.n += 1
        return x * C.n

    return program, lambda i: (X,), lambda i: C.n


@scenario
def counted_instances():
    class C:
        count = 0
        registry: dict[str, int] = {}

        def __init__(self, v):
            type(self).count = type(self).count + 1
            self.v = v
            self.id = C.count
            C.registry[f"k{len(C.registry)}"] = 1

        def go(self):
            return self.v * self.id + self.count

    def program(x):
        c, d = C(x), C(x + 1)
        return c.go() + d.go(), len(C.registry)

    return program, lambda i: (X,), lambda i: (C.count, len(C.registry))


@scenario
def written_along_the_bases():
    class A:
        mode = "a"
        hits = 0

    class B(A):
        pass

    def program(x, k):
        b = B()
        before = b.mode, b.hits
        A.hits += 1
        if k % 2:
            B.mode = "b" + str(k)
        else:
            A.mode = "x"
            if "mode" in vars(B):
                del B.mode
        return x + A.hits + B.hits, before, b.mode, B.mode, A.mode, hasattr(B, "other")

    def after(i):
        if i == 1:
            A.mode = "outside"
        return A.mode, B.mode, A.hits, "mode" in vars(B)

    return program, lambda i: (X, i), after


@scenario
def settings_of_a_class():
    class Settings:
        use = True
        scale = 2.0

        def apply(self, x):
            return x * self.scale if self.use else x

    def program(x):
        y = Settings().apply(x)
        Settings.last = y.sum()
        return y, Settings.last

    def after(i):
        Settings.use = i % 2 == 0
        if i == 2:
            Settings.apply = lambda self, x: x - 1
        return Settings.last

    return program, lambda i: (X,), after


@scenario
def singleton():
    class S:
        made = None

        def __new__(cls):
            if cls.made is None:
                cls.made = super().__new__(cls)
                cls.made.n = 0
            return cls.made

    def program(x):
        s = S()
        s.n += 1
        return x + s.n, S() is s

    return program, lambda i: (X,), lambda i: S.made.n


@scenario
def class_methods_that_count():
    class R:
        items: list[int] = []
        total = 0

        @classmethod
        def add(cls, v):
            cls.items.append(v)
            cls.total += v
            return cls.total

    class R2(R):
        pass

    return lambda x: (x * R.add(2) + R2.add(3), R.total, R2.total), lambda i: (X,), lambda i: (list(R.items), R.total, R2.total)


@scenario
def abstract_classes_and_modules():
    class A(abc.ABC):
        n = 0

        @abc.abstractmethod
        def go(self, x): ...

    class B(A):
        def go(self, x):
            A.n += 1
            return x + self.n

    class M(torch.nn.Module):
        calls = 0

        def forward(self, x):
            M.calls += 1
            type(self).last = x.shape
            return x * M.calls

    m = M()
    return lambda x: (B().go(x), m(x), M.calls), lambda i: (X,), lambda i: (A.n, M.calls, M.last)


@scenario
def attributes_of_functions():
    def counting(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            wrapper.calls += 1
            wrapper.last = args[0].shape
            return fn(*args)

        wrapper.calls = 0
        return wrapper

    @counting
    def double(x):
        return x * 2

    def program(x):
        y = double(double(x))
        return y + double.calls, double.last

    def after(i):
        if i == 2:
            double.calls = 100
        return double.calls, double.last

    return program, lambda i: (X,), after


@scenario
def namespaces():
    settings = SimpleNamespace(lr=0.1, inner=SimpleNamespace(n=0))

    class Named(SimpleNamespace):
        pass

    def program(x):
        settings.inner.n += 1
        settings.new = x.sum()
        t = SimpleNamespace(a=x, b=2)
        t.b += 1
        s = SimpleNamespace(**vars(t))
        asked = t == s, t != SimpleNamespace(q=1), repr(settings.inner), hasattr(t, "a"), Named(z=1) == Named(z=1), str(Named(z="q"))
        return x * settings.lr + settings.inner.n, s.b, asked, t

    def after(i):
        settings.lr = i
        return settings.inner.n, settings.new

    return program, lambda i: (X,), after


class K:
    pass


@scenario
def cache_by_weak_reference():
    cache: Any = weakref.WeakKeyDictionary()
    keys = [K(), K()]

    def program(x, i):
        k = keys[i]
        if k not in cache:
            cache[k] = x.sum()
        return x + cache[k], len(cache)

    return program, lambda i: (X + i, i % 2), lambda i: len(cache)


@scenario
def weak_references_as_keys():
    k = K()
    table = {weakref.ref(k): 5}

    def program(x):
        r = weakref.ref(k)
        y = table.get(r)
        table[r] = y + 1
        return x + y, r in table, len(table)

    return program, lambda i: (X,), lambda i: list(table.values())


@scenario
def objects_and_tuples_as_keys():
    a, b = K(), K()
    table: dict[Any, Any] = {(a, 1): 1.0, int: 2.0}

    def program(x, k):
        if (k, 1) not in table:
            table[(k, 1)] = x.sum()
        table[(a, 1)] = table[(a, 1)] + 1
        return x * table[(a, 1)] + table[(k, 1)] * table[int], (a, 2) in table, len(table)

    return program, lambda i: (X, [a, b, a, K()][i]), lambda i: len(table)


def run(make: Scenario, optimise: Callable[[Any], Any]) -> list[Any]:
    program, args, after = make()
    fn = optimise(program)
    found = []
    for i in range(4):
        result = fn(*args(i))
        found.append((result, after(i)))
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", SCENARIOS, ids=[make.__name__ for make in SCENARIOS])
def test_state_is_eagers(make: Scenario, backend: str) -> None:
    torch.manual_seed(0)
    assert_equal(run(make, magneto.optimize(backend, nopython=True)), run(make, lambda fn: fn), None if backend == "eager" else 1e-6)


def test_counters_do_not_compile_again() -> None:
    class C:
        n = 0

    def program(x: torch.Tensor) -> torch.Tensor:
        C.n += 1
        return x * C.n

    compiled = magneto.optimize("eager", nopython=True)(program)
    for _ in range(10):
        compiled(X)
    assert C.n == 10
    assert magneto.stats()["graphs"] <= 2


def test_a_method_set_on_a_class_breaks() -> None:
    class C:
        def go(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def program(x: torch.Tensor) -> torch.Tensor:
        C.go = lambda self, x: x + 1  # type: ignore[method-assign]
        return C().go(x)

    compiled = magneto.optimize("eager")(program)
    for _ in range(2):
        assert_equal(compiled(X), X + 1)
    assert magneto.stats()["breaks"] >= 1


def test_a_written_attribute_that_becomes_a_function() -> None:
    class C:
        value: Any = 1

    def write(x: torch.Tensor) -> torch.Tensor:
        C.value = 2
        return x

    magneto.optimize("eager")(write)(X)
    compiled = magneto.optimize("eager")(lambda x: x * (C().value if isinstance(C().value, int) else C().value()))
    assert_equal(compiled(X), X * 2)
    C.value = lambda self: 5
    assert_equal(compiled(X), X * 5)
