"""Classes and functions that a call makes die when the program lets go of them: guards and generated functions hold them weakly."""

from __future__ import annotations

import collections
import dataclasses
import enum
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto

MADE: list[weakref.ref[Any]] = []
PROGRAMS: list[Callable[..., Any]] = []
X = torch.ones(2)


def program(fn: Callable[..., Any]) -> Callable[..., Any]:
    PROGRAMS.append(fn)
    return fn


def _note(obj: Any) -> None:
    MADE.append(weakref.ref(obj))


def _use(obj, x):
    magneto.graph_break()
    return obj.go(x)


def _call(fn, x):
    magneto.graph_break()
    return fn(x)


@program
def an_instance_lives_over_breaks(x):
    class Made:
        k = 2

        def __init__(self, v):
            self.v = v

        def go(self):
            return self.v * self.k

    _note(Made)
    made = Made(x)
    magneto.graph_break()
    y = made.go()
    magneto.graph_break()
    return y + made.go() if isinstance(made, Made) else x


@program
def an_instance_is_an_argument(x):
    class Base:
        def go(self, x):
            return x * 2

    class Made(Base):
        def go(self, x):
            return super().go(x) + 1

    _note(Base)
    _note(Made)
    return _use(Made(), x)


@program
def slots(x):
    class Made:
        __slots__ = ("a",)

        def __init__(self, a):
            self.a = a

    _note(Made)
    made = Made(x)
    magneto.graph_break()
    return made.a + 1


@program
def a_list_that_the_program_derives(x):
    died = []

    class Made(list):
        def __del__(self):
            died.append(1)

    _note(Made)
    items = iter(Made([x]))
    found = next(items) + next(items, 0)
    return found, died


@program
def a_metaclass(x):
    class Meta(type):
        def __call__(cls, *args):
            return super().__call__(*args)

    class Made(metaclass=Meta):
        pass

    _note(Meta)
    _note(Made)
    made = Made()
    return x + isinstance(made, Made)


@program
def records(x):
    @dataclasses.dataclass
    class Record:
        a: Any
        b: Any = 3

    class Colour(enum.Enum):
        RED = 1

    point = collections.namedtuple("point", "a b")
    for made in (Record, Colour, point):
        _note(made)
    return point(Record(x).a, Colour.RED.value).a + Record(x).b


@program
def a_module(x):
    class Made(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.w

    _note(Made)
    made = Made()
    magneto.graph_break()
    return made(x).sum()


@program
def functions(x):
    for k in range(2):

        def made(y, k=k):
            return y + x * k

        _note(made)
        x = _call(made, x)
    return x


@program
def an_exception(x):
    class Made(Exception):
        pass

    _note(Made)
    try:
        magneto.graph_break()
        raise Made("text")
    except Made as error:
        return x + len(error.args)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_what_a_call_makes_dies_with_it(fn: Callable[..., Any], request: pytest.FixtureRequest) -> None:
    if fn.__name__ == "a_module" and sys.version_info >= (3, 13) and "ALONE" not in os.environ:
        # From 3.13 on a class has a thousand versions; torch's own tracing of eager's `cond` uses up nn.Module's, and what derives from it has none then.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.node.nodeid]
        found = subprocess.run(
            command, cwd=request.config.rootpath, env=os.environ | {"ALONE": "1"}, capture_output=True, text=True, check=False
        )
        assert not found.returncode, found.stdout
        return
    compiled = magneto.optimize("eager")(fn)
    for run in (fn, *[compiled] * 4):
        MADE.clear()
        run(X)
        gc.collect()
        assert MADE and not any(reference() for reference in MADE), run


def test_another_class_of_that_name_is_another_class() -> None:
    """Where the old one was, or elsewhere: what is gone is nothing's class."""

    def make(k):
        class Made:
            factor = k

        return Made

    def fn(made, x):
        return x * made.factor + isinstance(made, kept[0])

    kept = [int]
    compiled = magneto.optimize("eager")(fn)
    with magneto.config.patch(recompile_limit=20):
        for k in range(6):
            made = make(k)()
            assert compiled(made, torch.ones(())).item() == k
            del made
            gc.collect()


def test_a_class_that_is_modified_is_seen() -> None:
    class Made:
        factor = 1

    def fn(x):
        return x * Made.factor

    compiled = magneto.optimize("eager", nopython=True)(fn)
    found = []
    for factor in (1, 2, 2, 1):
        Made.factor = factor
        found.append(compiled(torch.ones(())).item())
    assert found == [1.0, 2.0, 2.0, 1.0]
