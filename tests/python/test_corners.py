"""Corners of the built-in types that CPython's own tests ask about: what is asked again while it changes, classes with operators of other classes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import itertools
import operator
import sys
import types
import typing
import weakref
from typing import Any

import pytest
import torch

import magneto
from tests.python.programs import Program, Programs, check

programs = Programs()


@programs.add()
def bytearray_changes_while_iterated(x: Any) -> Any:
    data = bytearray(b"ab")
    running, late, empty = iter(data), iter(data), iter(data)
    found = [*running]
    next(late)
    data.append(9)
    found.extend([list(running), list(late), list(empty)])
    hinted = iter(data)
    next(hinted)
    data.clear()
    return x + 1, found, list(hinted), type(running).__name__


@programs.add()
def reversed_asks_again(x: Any) -> Any:
    data = bytearray(b"abc")
    backwards = reversed(data)
    first = next(backwards)
    data.clear()
    return x + 1, first, list(backwards), type(backwards), type(reversed("ab"))


class LosesItsLength:
    called = False

    def __len__(self) -> int:
        if not self.called:
            self.called = True
            return 10
        raise ZeroDivisionError

    def __getitem__(self, index: int) -> int:
        return index


@programs.add(graphs=None)
def hint_asks_for_the_length(x: Any) -> Any:
    try:
        return operator.length_hint(reversed(LosesItsLength()))
    except ZeroDivisionError as error:
        return x + 1, repr(error)


class Derived(bytes):
    pass


class GivesBytes:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __bytes__(self) -> Any:
        return self.value


@programs.add()
def bytes_of_an_object(x: Any) -> Any:
    found: list[Any] = [type(bytes(GivesBytes(Derived(b"abc")))), Derived(GivesBytes(b"abc"))]  # type: ignore[arg-type]
    for wrong in ("text", None, 3):
        try:
            bytes(GivesBytes(wrong))
        except TypeError as error:
            found.append(str(error))
    return x + 1, found


@programs.add()
def percent_of_a_bytearray(x: Any) -> Any:
    try:
        b"no format" % bytearray(b"1")  # type: ignore[str-bytes-safe]
    except TypeError as error:
        return x + 1, str(error), b"%s" % bytearray(b"1")


@programs.add()
def tee_of_a_tee(x: Any) -> Any:
    first, second = itertools.tee("abc")
    third, fourth = itertools.tee(first)
    return x + 1, third is first, [next(first), next(third), next(fourth), next(second)]


@programs.add(graphs=None)
def proxy_has_the_class_of_its_object(x: Any) -> Any:
    first, second = itertools.tee("abc")
    proxy = weakref.proxy(first)
    known = proxy.__class__ is type(second)
    del first
    try:
        return proxy.__class__
    except ReferenceError:
        return x + 1, known


def _dies_after(walk: Any, kind: type) -> bool:
    done = False

    class Mortal(kind):  # type: ignore[misc]
        def __del__(self) -> None:
            nonlocal done
            done = True

    it = walk(Mortal())
    try:
        next(it)
    except StopIteration:
        pass
    return done


@programs.add(graphs=None, again=False)
def iterator_lets_go_at_its_end(x: Any) -> Any:
    return x + 1, [_dies_after(walk, kind) for walk, kind in ((iter, bytes), (reversed, str), (iter, list))]


@programs.add(graphs=None, again=False)
def operators_of_another_class(x: Any) -> Any:
    class Odd(int):
        __eq__ = str.__eq__  # type: ignore[assignment]
        __add__ = str.__add__  # type: ignore[assignment]
        __hash__ = object.__hash__  # type: ignore[assignment]

    class Table(dict):  # type: ignore[type-arg]
        __neg__ = dict.copy

    found: list[Any] = []
    for operation in (operator.eq, operator.add):
        try:
            operation(Odd(3), Odd(3))
        except TypeError as error:
            found.append(str(error))
    return x + 1, found, hash(Odd(3)) == 3, -Table(a=1)


@programs.add(graphs=None, again=False)
def constructor_given_back(x: Any) -> Any:
    class A:
        def __new__(cls, *args: Any) -> Any:
            raise AssertionError

    class B(A):
        __new__ = object.__new__  # type: ignore[assignment]

        def __init__(self, foo: int) -> None:
            self.foo = foo

    found: list[Any] = [B(3).foo]
    del B.__new__
    try:
        B(3)
    except AssertionError as error:
        found.append(repr(error))
    del A.__new__
    try:
        found.append(B(3).foo)
    except TypeError as error:
        found.append(str(error))
    return x + 1, found


@programs.add(graphs=None)
def methods_of_dict_on_an_ordered_one(x: Any) -> Any:
    found = []
    for method in (lambda d: dict.pop(d, "spam"), dict.popitem):
        table: Any = collections.OrderedDict(spam=1, ham=2)
        method(table)
        try:
            repr(table)
        except KeyError as error:
            found.append(str(error))
    return x + 1, found


class Slotted(collections.OrderedDict):  # type: ignore[type-arg]
    __slots__ = ("x", "y")


@programs.add(graphs=None)
def slots_are_copied(x: Any) -> Any:
    table: Any = Slotted(c=1)
    table.x, table.z = ["x"], ["z"]
    one, two = copy.copy(table), copy.deepcopy(table)
    return x + 1, one.x is table.x, one.z is table.z, two.x, two.x is table.x, hasattr(one, "y"), type(two)


class Broken:
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError


@programs.add(graphs=None)
def closing_a_generator_asks_its_delegate(x: Any) -> Any:
    def gives() -> Any:
        yield from Broken()

    found: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda told: found.append(told.exc_type)
    try:
        generator = gives()
        next(generator)
        generator.close()
    finally:
        sys.unraisablehook = before
    return x + 1, found


class Shown:
    value: Any = None

    def __repr__(self) -> str:
        return repr(self.value)


class DerivedSet(frozenset):  # type: ignore[type-arg]
    pass


@programs.add(graphs=None)
def frozen_set_that_contains_itself(x: Any) -> Any:
    shown = Shown()
    elements = DerivedSet([shown])
    shown.value = elements
    return x + 1, repr(elements)


class Text(str):
    pass


@programs.add(Text("a{b}c"), graphs=None)
def text_of_a_derived_class(text: Any) -> Any:
    return text + "!", text.upper(), list(text), type(text).__name__


class Meta(type):
    @property
    def __dict__(cls) -> Any:  # type: ignore[override]
        raise AssertionError("the program did not ask for it")


class OfMeta(metaclass=Meta):
    def __init__(self) -> None:
        self.spam = 42


class Shadowed(dict):  # type: ignore[type-arg]
    a = 3

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("the program did not ask for it")


@programs.add(graphs=None)
def dictionaries_behind_properties(x: Any) -> Any:
    shadowed = Shadowed()
    shadowed.a = 4
    return x + 1, OfMeta().spam, inspect.getattr_static(OfMeta(), "spam"), inspect.getattr_static(shadowed, "a"), shadowed.a


class Answering(type):
    def __getattr__(cls, name: str) -> Any:
        if name == "eggs":
            return "scrambled"
        raise AttributeError(name)


class Virtual(metaclass=Answering):
    @types.DynamicClassAttribute
    def eggs(self) -> str:
        return "spam"


@programs.add(graphs=None)
def virtual_attributes(x: Any) -> Any:
    return x + 1, Virtual.eggs, Virtual().eggs, hasattr(Virtual, "ham"), ("eggs", "scrambled") in inspect.getmembers(Virtual)


@programs.add(graphs=None, again=False)
def signatures_of_their_own(x: Any) -> Any:
    def stated(*args: Any, **kwargs: Any) -> None:
        pass

    def partly(a: int, b: int, /, c: int = 3) -> None:
        pass

    stated.__text_signature__ = "($self, a, b=1, *args, c, d=2, **kwargs)"  # type: ignore[attr-defined]
    found = [str(inspect.signature(stated))]
    stated.__text_signature__ = "(self, a=1,\nb=2)"  # type: ignore[attr-defined]
    found.append(str(inspect.signature(stated)))

    class Partial:
        method = functools.partialmethod(partly, 1)

    return x + 1, found, str(inspect.signature(Partial.method)), str(inspect.signature(partly))


@programs.add()
def sum_of_floats(x: Any) -> Any:
    """From Python 3.12 on it keeps what rounding loses."""
    return (
        x + 1,
        sum([0.1] * 10),
        sum([1.0, 1e101, 1.0, -1e101]),
        sum([0.1] * 10, 5),
        sum([1, 0.1, 0.2, 0.3, True]),
        sum([0.1, 0.2, 0.3, x, 1]),
    )


@programs.add(torch.full((10,), 0.1, dtype=torch.float64))
def sum_of_numbers_of_the_run(x: Any) -> Any:
    return sum([part.item() for part in x]), sum([part.item() for part in x], 1)


@programs.add(graphs=None, again=False)
def attributes_of_an_existing_function(x: Any) -> Any:
    def stated(a: int) -> int:
        return a

    magneto.graph_break()
    stated.attr = "text"  # type: ignore[attr-defined]

    def wrapper(b: int) -> int:
        return b

    functools.update_wrapper(wrapper, stated)
    return x + 1, wrapper.attr, list(stated.__dict__), list(wrapper.__dict__), wrapper.__name__  # type: ignore[attr-defined]


class Bound:
    def method(self) -> Any:
        return self


@programs.add()
def method_bound_again(x: Any) -> Any:
    one, two = Bound(), Bound()
    return x + 1, one.method.__get__(two, Bound)() is one


@programs.add(graphs=None, again=False)
def module_of_a_made_dataclass(x: Any) -> Any:
    return x + 1, dataclasses.make_dataclass("data", []).__module__


NAMES = typing.TypeVarTuple("NAMES")


@programs.add(graphs=None, again=False)
def generic_types_of_changed_lists(x: Any) -> Any:
    """The list that a break hands on has got another item when a generic type is made of it."""
    kinds = [int]
    magneto.graph_break()
    kinds.append(str)  # type: ignore[arg-type]
    return x + 1, typing.Callable[kinds, float].__args__, typing.Callable[[int, *NAMES, str], float].__args__  # type: ignore


@programs.add(graphs=None, again=False)
def modules_of_functional_classes(x: Any) -> Any:
    """They look at their caller."""
    made = [collections.namedtuple("made", "a"), typing.NamedTuple("typed", [("a", int)]), dataclasses.make_dataclass("data", [])]  # noqa
    return x + 1, [cls.__module__ for cls in made]


@typing.final
@typing.runtime_checkable
class NothingAsked(typing.Protocol):
    pass


@typing.runtime_checkable
class NumberAsked(typing.Protocol):
    number = 1


T = typing.TypeVar("T")


@typing.runtime_checkable
class Parametrised(typing.Protocol[T]):
    number = 1


class Registered:
    pass


class Numbered:
    number = None


class Answers:
    def __init__(self, number: int | None) -> None:
        self.number = number


NumberAsked.register(Registered)  # type: ignore[attr-defined]


@programs.add()
def instances_of_protocols(x: Any) -> Any:
    asked = [Registered(), Numbered(), Answers(1), Bound()]
    return x + 1, [isinstance(value, NumberAsked) for value in asked], isinstance(Bound(), NothingAsked)


@programs.add(graphs=None, again=False)
def instances_of_subscripted_protocols(x: Any) -> Any:
    try:
        return x + 1, isinstance(Numbered(), Parametrised[int])  # type: ignore[misc]
    except TypeError as error:
        return x + 2, str(error)


class Asked(type):
    def __contains__(cls, item: object) -> bool:
        LOG.append(item)
        return item in cls.items  # type: ignore[attr-defined]

    def __iter__(cls) -> Any:
        return iter([])


class Holds(metaclass=Asked):
    items: typing.ClassVar[list[Any]] = [{}, 3]


LOG: list[Any] = []


class GivesText:
    def __index__(self) -> Any:
        return "a"

    def __hash__(self) -> Any:
        return "a"


WRONG: tuple[Any, ...] = (
    lambda: [1, 2][::0],
    lambda: (1, 2)[::0],
    lambda: operator.setitem([1, 2], slice(None, None, 0), [3]),
    lambda: operator.delitem([1, 2], slice(None, None, 0)),
    lambda: operator.setitem([1, 2], slice(0, 1), 5),
    lambda: operator.delitem(collections.deque([1, 2]), slice(0, 1)),
    lambda: operator.setitem(collections.deque([1, 2]), slice(0, 1), [3]),
    lambda: object.__new__(int),
    lambda: object.__new__(DerivedSet),
    lambda: object.__new__(ValueError),
    lambda: dict.__new__(Holds),
    lambda: [1][GivesText()],  # type: ignore[call-overload]
    lambda: {GivesText(): 1},
    lambda: functools.partial(3),  # type: ignore[arg-type]
    lambda: collections.OrderedDict().popitem(),
    lambda: collections.deque([1]).remove(2),
    lambda: NothingAsked(),
    lambda: sorted([1], by=None),  # type: ignore[call-overload]
    lambda: torch.Size([1, 2.5]),  # type: ignore[list-item]
    lambda: {1: 2}.pop(1, 2, 3),  # type: ignore[call-overload]
    lambda: {1: 2}.pop(1, default=3),  # type: ignore[call-overload]
    lambda: max(1, 2, default=3),  # type: ignore[call-overload]
    lambda: dict([1]),  # type: ignore[list-item]
)


@programs.add()
def classes_that_contain(x: Any) -> Any:
    LOG.clear()
    return x + 1, {} in Holds, 3 in Holds, 4 in Holds, list(LOG)


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_same(program: Program) -> None:
    check(program)


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_arguments_that_are_refused(number: int) -> None:
    def program(x: Any) -> Any:
        try:
            WRONG[number]()
        except (TypeError, ValueError, KeyError) as error:
            return x + 1, type(error), str(error)
        return x

    check(Program(program, (torch.ones(2),), None))
