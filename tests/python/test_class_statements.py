"""Class statements inside what is captured: the class is made anew in each call, its methods are followed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest
import torch

import magneto
from tests.python.programs import Program, Programs, X, check

programs = Programs()


@programs.add()
def methods_properties_and_class_attributes(x):
    class A:
        """A class."""

        scale = 2

        def __init__(self, v):
            self.v = v

        def get(self):
            return self.v * self.scale

        @property
        def twice(self):
            return 2 * self.v

        @twice.setter
        def twice(self, value):
            self.v = value / 2

        @classmethod
        def make(cls, v):
            return cls(v)

        @staticmethod
        def plus(v):
            return v + 1

    a = A(x)
    a.twice = a.get()
    return a.get() + A.make(x).twice, A.plus(3), a.plus(4), A.scale, A.__name__, A.__doc__, type(a).__qualname__, isinstance(a, A)


@programs.add()
def documentation_of_properties(x):
    def told(self):
        """Told."""
        return x

    def silent(self):
        return x

    first = property(told, None, None, None)
    changed = first.setter(None).deleter(None).getter(None)
    texts = [
        first.__doc__,
        property(told, doc="Own.").__doc__,
        property(silent, doc=None).__doc__,
        property().__doc__,
        property(None).__doc__,
    ]
    return x + 1, texts, changed.__doc__, changed.fget is told, changed.fset, first.getter(silent).__doc__, property(fget=told).__doc__


@programs.add()
def super_and_the_class_itself(x):
    class B:
        def m(self):
            return x

    class C(B):
        def m(self):
            return super().m() + 1

        def other(self, n):
            return C() if n else self

        def own(self):
            return __class__

    c = C()
    return c.other(1).m() + c.other(0).m(), c.own() is C, issubclass(C, B), type(c.other(1)) is C


@programs.add()
def mutable_class_attributes(x):
    class C:
        seen = []
        by_name: dict = {"x": 1}

        def add(self, value):
            self.seen.append(value)
            return self

    C().add(x + 1).add(2)
    return C.seen, C.by_name, sorted(C.__annotations__)


@programs.add()
def special_methods(x):
    class C:
        __slots__ = ("n",)

        def __init__(self, n=2):
            self.n = n

        def __eq__(self, other):
            return self.n == other

        def __len__(self):
            return self.n

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.n))

        def __enter__(self):
            return self.n

        def __exit__(self, *exc):
            return True

        def __getattr__(self, name):
            return name * 2

    with C(3) as n:
        raise ValueError(str(n))
    return x * len(C()), C() == 2, list(C()), n, C().foo, "m" in dir(C)


@programs.add()
def own_exceptions(x):
    class Stop(Exception):
        def __init__(self, value):
            self.value = value

    try:
        raise Stop(x + 1)
    except Stop as stop:
        return stop.value, type(stop).__name__


@programs.add()
def subclasses_of_containers(x):
    class Names(list):
        def first(self):
            return self[0]

    class Missing(dict):
        def __missing__(self, key):
            return key

    return Names([x + 1, 2]).first(), Missing(a=1)["b"], len(Names("ab"))


@programs.add()
def attributes_set_behind_the_statement(x):
    class C:
        pass

    C.m = lambda self: x + self.n
    C.n = 3
    return C().m(), {C: 1}[C], hash(C) == hash(C)


@programs.add()
def refused_by_cpython(x):
    class C:
        pass

    class D(C):
        pass

    said = []
    try:

        class E(bool):
            pass

    except TypeError as error:
        said.append(str(error))
    try:

        class F(C, D):
            pass

    except TypeError as error:
        said.append(str(error))
    return x + 1, said


@programs.add()
def cleared_frames(x):
    try:
        raise ValueError(x.shape)
    except ValueError as error:
        traceback.clear_frames(error.__traceback__)
        return x + 1, str(error)


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def test_the_class_leaves_the_region() -> None:
    def make(n):
        class C:
            limit = [n]

            def __init__(self):
                self.n = n

            def me(self):
                return C, __class__, self.n

        return C, C(), C.me

    traced = magneto.optimize("eager", nopython=True)(make)
    cls, made, method = traced(3)
    again, _, _ = traced(3)
    assert cls is not again and type(made) is cls and cls.me is method and cls.limit is not again.limit
    assert made.me() == (cls, cls, 3) and cls().me() == (cls, cls, 3)
    assert (cls.__module__, cls.__qualname__, method.__qualname__) == (__name__, make(3)[0].__qualname__, make(3)[2].__qualname__)


class Base:
    pass


def test_bases_do_not_see_what_capture_makes() -> None:
    def derive(x):
        class C(Base):
            pass

        return isinstance(C(), Base), x + 1

    magneto.optimize("eager", nopython=True)(derive)(X)
    assert Base.__subclasses__() == []


class Hooked:
    seen: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs):
        Hooked.seen.append(cls.__name__)


def test_hooks_of_bases_run_once() -> None:
    def derive(x):
        class C(Hooked):
            pass

        return C.__name__, x + 1

    traced = magneto.optimize("eager")(derive)
    for n in (1, 2):
        name, y = traced(X)
        assert name == "C" and torch.equal(y, X + 1) and Hooked.seen == ["C"] * n


def test_what_cpython_refuses_or_counts() -> None:
    def say(x):
        class Counted:
            def __init__(self):
                self.hashed = 0

            def __hash__(self):
                self.hashed += 1
                return 42

        class Named(tuple):
            pass

        class C:
            unnamed = property()

            @property
            def p(self):
                """Its text."""

            about = p.__doc__

        class Odd:
            __class__ = 413

        one, two = Counted(), Counted()
        table = {one: 1}
        table.setdefault(two, 2)
        said = [one.hashed, two.hashed, C.about, Odd().__class__]
        for action in (
            lambda: set([], 2),
            lambda: Named(sequence=()),
            lambda: C().unnamed,
            lambda: setattr(C(), "p", 1),
            lambda: delattr(C(), "p"),
        ):
            try:
                action()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said, x + 1

    assert magneto.optimize("eager")(say)(X)[0] == say(X)[0]
