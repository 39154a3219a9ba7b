"""functools.lru_cache and cache of the program: hits, misses and `cache_info()` are eager's; what is in the cache is captured whole."""

# ruff: noqa

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto
from magneto.dynamo.trackers.rules_cache import peek
from magneto.dynamo.trackers.base import MISSING
from tests.compare import assert_equal
from tests.python.programs import X


def masks():
    @functools.lru_cache(maxsize=None)
    def mask(n):
        return torch.ones(n, n).tril()

    return lambda x: x @ mask(4), lambda i: (X,), lambda i: mask.cache_info()


def scalars_and_keywords():
    calls = []

    @functools.lru_cache
    def factor(n, k=2):
        calls.append((n, k))
        return n * k

    return lambda x, n: x * factor(n) + factor(n, k=3), lambda i: (X, i // 3), lambda i: (factor.cache_info(), list(calls))


def methods_with_a_small_cache():
    class A:
        @functools.lru_cache(maxsize=2)
        def get(self, n):
            return [n + 1]

    a = A()

    def program(x, n):
        found = a.get(n)
        found.append(n)
        return x + len(found)

    return program, lambda i: (X, (0, 0, 1, 0, 2, 1, 0, 1)[i]), lambda i: (A.get.cache_info(), list(a.get(0)) if i == 3 else None)


def cleared():
    @functools.cache
    def g(n):
        return n + 1

    def program(x):
        y = x + g(1) + g(1)
        g.cache_clear()
        return y + g(1)

    return program, lambda i: (X,), lambda i: g.cache_info()


def cleared_outside():
    @functools.cache
    def table(n):
        return {"scale": torch.full((), float(n))}

    def after(i):
        if i == 2:
            table(3)["scale"] = torch.tensor(7.0)
        if i == 4:
            table.cache_clear()
        return table.cache_info()

    return lambda x: x * table(3)["scale"], lambda i: (X,), after


def typed_keys():
    @functools.lru_cache(maxsize=8, typed=True)
    def kind(v):
        return type(v).__name__

    return lambda x, v: (x + len(kind(v)), kind(v)), lambda i: (X, (1, 1.0, True, 1, 1.0, True, 1, 1)[i]), lambda i: kind.cache_info()


SCENARIOS = (masks, scalars_and_keywords, methods_with_a_small_cache, cleared, cleared_outside, typed_keys)


def run(make: Callable[[], tuple[Any, ...]], optimise: Callable[[Any], Any]) -> list[Any]:
    program, args, after = make()
    fn = optimise(program)
    return [(fn(*args(i)), after(i)) for i in range(8)]


@pytest.mark.filterwarnings("ignore:.*recompile limit")
@pytest.mark.parametrize("make", SCENARIOS)
def test_caches_are_eagers(make: Any) -> None:
    assert_equal(run(make, magneto.optimize("eager")), run(make, lambda fn: fn))


def test_what_is_cached_is_captured_whole() -> None:
    program, args, after = masks()
    program(*args(0))
    compiled = magneto.optimize("eager", nopython=True)(program)
    for i in range(4):
        compiled(*args(i))
    assert after(0).hits == 4
    assert magneto.stats()["graphs"] == 1


def test_looking_is_no_hit() -> None:
    for size in (None, 2):
        cached: Any = functools.lru_cache(size)(lambda *args, **kwargs: [args])
        assert peek(cached, (1,), {}) is MISSING
        value = cached(1)
        other = cached("a", k=2)
        assert peek(cached, (1,), {}) is value and peek(cached, ("a",), {"k": 2}) is other and peek(cached, ("a",), {}) is MISSING
        assert cached.cache_info()[:2] == (0, 2)
