"""Which method of a class is asked, and how often: hooks of metaclasses, methods hidden by a subclass, named tuples with operators, C objects as keys."""

# ruff: noqa

from __future__ import annotations

import collections.abc
import re
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import pytest
import torch

import magneto

from tests.python.programs import Program, Programs, X, check

programs = Programs()
T = TypeVar("T")


class Pair(NamedTuple):
    first: int
    second: int = 1

    def __add__(self, other):
        return self.first * 100 + other.second

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return f"item {index}"


PAIR = Pair(3, 4)


@programs.add()
def operators_of_a_named_tuple_are_its_own(x):
    made = Pair(1, 2)
    return x + made.first, made + Pair(3), len(made), made[0], PAIR + made, len(PAIR), PAIR[1], list(made), made


ALIASES = {list[int]: "ints", re.compile("a+"): "pattern", collections.abc.Callable[[int], int]: "callable"}
ALIAS = list[int]


@programs.add()
def c_objects_that_compare_by_value_are_keys(x):
    table = {ALIAS: 1, PAIR.__class__: 2}
    return x + 1, ALIASES[ALIAS], list[str] in ALIASES, table[ALIAS], len({ALIAS, list[int], list[str]})


@programs.add(graphs=None)
def equal_aliases_are_one_key(x):
    callable_ = collections.abc.Callable[[int], int]
    return x + 1, len({callable_, collections.abc.Callable[[int], int]}), ALIASES[callable_], len({callable_: 1, ALIAS: 2})


@programs.add(graphs=None, again=False)  # a class of its own at each call
def a_hook_for_subclasses_calls_its_parents_behind_others(x):
    called = []

    class Last:
        def __init_subclass__(cls, **kwargs):
            called.append(cls.__name__)
            super().__init_subclass__(**kwargs)

    class First(Generic[T], Last):
        pass

    class Second(First[int]):
        pass

    return x + 1, called, First.__mro__[1] is Generic


class Listing(list):
    def append(self, item):
        super().append(item * 2)


@programs.add(graphs=None)
def a_method_hidden_by_an_attribute_of_the_instance(x):
    items = Listing()
    items.extend = None
    parent = super(Listing, items).extend
    parent([1, 2])
    items.append(3)
    return x + 1, list(items)


@runtime_checkable
class HasWidth(Protocol):
    width: int

    def area(self): ...


class Shape:
    def area(self):
        return 1


class Wide(Shape):
    def __init__(self):
        self.width = 2


@programs.add()
def a_protocol_asks_for_what_the_instance_has_now(x):
    shape, found = Shape(), []
    found.append(isinstance(shape, HasWidth))
    shape.width = 3
    found.append(isinstance(shape, HasWidth))
    del shape.width
    found.append(isinstance(shape, HasWidth))
    return x + 1, found, isinstance(Wide(), HasWidth), isinstance(3, HasWidth)


def test_a_protocol_is_asked_again_for_another_instance() -> None:
    compiled = magneto.optimize("eager")(lambda x, shape: (x + 1, isinstance(shape, HasWidth)))
    shape = Shape()
    assert compiled(X, shape)[1] is False
    shape.width = 1
    assert compiled(X, shape)[1] is True
    assert compiled(X, Shape())[1] is False


class Counted:
    def __init__(self, error=None):
        self.asked = []
        self.error = error

    def __iter__(self):
        self.asked.append("iter")
        return iter((2, 1))

    def __length_hint__(self):
        self.asked.append("hint")
        if self.error is not None:
            raise self.error
        return 3


@programs.add()
def lists_and_tuples_ask_how_many_items_to_expect(x):
    found = []
    for take in (list, tuple, sorted, lambda c: [*c], lambda c: (*c, 3), lambda c: [].extend(c), lambda c: max(*c), set, sum, max):
        counted = Counted()
        found.append((take(counted), counted.asked))
    counted = Counted(TypeError("says nothing"))
    found.append((list(counted), counted.asked))
    try:
        list(Counted(ValueError("is told")))
    except ValueError as error:
        found.append(str(error))
    return x + 1, found


@programs.add(graphs=None, again=False)
def old_pickling_protocols_and_bases_that_cannot_be(x):
    class A:
        pass

    class B:
        pass

    class C(A, B):
        pass

    class D(A, B):
        pass

    class E(C, D):
        pass

    try:
        C.__bases__ = (B, A)
        text = ""
    except TypeError as error:
        text = str(error)
    return x + 1, [Shape().__reduce_ex__(protocol)[0].__name__ for protocol in (0, 1, 2, 4)], text, E.__mro__[1:2] == (C,)


def test_names_and_bases_of_a_class_are_guarded() -> None:
    class Base:
        pass

    class Other:
        pass

    class Named(Base):
        pass

    def read(x):
        return x + 1, Named.__name__, Named.__qualname__, Named.__module__, Named.__doc__, Named.__bases__, Named.__mro__

    compiled = magneto.optimize("eager", nopython=True)(read)
    for name, value in (
        ("__doc__", "text"),
        ("__name__", "Renamed"),
        ("__qualname__", "x.Renamed"),
        ("__module__", "y"),
        ("__bases__", (Other, Base)),
    ):
        assert compiled(X)[1:] == read(X)[1:]
        setattr(Named, name, value)
        assert compiled(X)[1:] == read(X)[1:], name


class Meta(type):
    asked: list[str] = []

    def __getattribute__(cls, name):
        Meta.asked.append(name)
        return super().__getattribute__(name)


class Watched(metaclass=Meta):
    number = 2


class Instance:
    def __init__(self):
        self.asked = []
        self.number = 3

    def __getattribute__(self, name):
        if name != "asked":
            self.asked.append(name)
        return super().__getattribute__(name)


def _reads_a_watched_class(x):
    Meta.asked.clear()
    found = Watched.number, hasattr(Watched, "missing")
    return x * 2, found, list(Meta.asked)


def _reads_a_watched_instance(x):
    instance = Instance()
    return x * instance.number, {instance: 1}[instance], instance.asked


@pytest.mark.parametrize("fn", [_reads_a_watched_class, _reads_a_watched_instance])
def test_attribute_hooks_are_asked_as_often_as_by_the_program(fn) -> None:
    expected = fn(X)[1:]
    compiled = magneto.optimize("eager")(fn)
    for _ in range(2):
        assert compiled(X)[1:] == expected


def test_looking_at_an_object_does_not_ask_it() -> None:
    instance = Instance()
    magneto.optimize("eager")(lambda x, thing: (x + 1, thing is None))(X, instance)
    assert instance.asked == []


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)
