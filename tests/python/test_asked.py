"""What the interpreter asks of the program's objects, how often, and in which words it refuses. Found by CPython's own tests."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import gc
import sys
import types
import typing
import weakref
from typing import Any

import pytest

from tests.python.programs import Programs, check

programs = Programs()
T = typing.TypeVar("T")


class Counted:
    """Notes what it is asked."""

    def __init__(self, log: list[str], hint: Any = 2) -> None:
        self.log, self.hint = log, hint

    def __iter__(self) -> Any:
        self.log.append("iter")
        return iter([1, 2])

    def __length_hint__(self) -> Any:
        self.log.append("hint")
        if isinstance(self.hint, type):
            raise self.hint
        return self.hint


class Sized(Counted):
    def __len__(self) -> int:
        self.log.append("len")
        return 5


@programs.add()
def lists_ask_how_many_items_come(x):
    log: list[str] = []
    made = [list(Sized(log)), [*Counted(log)], tuple(Sized(log)), sorted(Counted(log)), (0, *Sized(log)), set(Sized(log))]
    grown = [0]
    grown.extend(Sized(log))
    grown += Counted(log)
    return x + len(log), log, made, grown


@programs.add()
def bad_length_hints(x):
    log: list[str] = []
    found = []
    for hint in (0, NotImplemented, TypeError, "a", -1, KeyError):
        try:
            found.append(list(Counted(log, hint)))
        except Exception as error:
            found.append(repr(error))
    return x * 2, found, log


@programs.add()
def spread_arguments_are_asked_too(x):
    log: list[str] = []

    def take(*args):
        return args

    return x * 2, take(*Sized(log)), take(0, *Counted(log)), log


@programs.add()
def words_of_operators_in_place(x):
    nothing, words = None, []
    for run in (lambda: nothing**2, lambda: nothing + 2):
        try:
            run()
        except TypeError as error:
            words.append(str(error))
    try:
        nothing **= 2
    except TypeError as error:
        words.append(str(error))
    try:
        nothing += "a"
    except TypeError as error:
        words.append(str(error))
    try:
        nothing @= 2
    except TypeError as error:
        words.append(str(error))
    return x + 1, words


class Adds:
    def __add__(self, other: Any) -> Any:
        return 1 + other


@programs.add()
def an_inner_operator_keeps_its_name(x):
    value = Adds()
    try:
        value += "a"
    except TypeError as error:
        return x + 1, str(error)


class Pair(typing.NamedTuple):
    one: int
    two: int = 1

    def __add__(self, other: Any) -> Any:
        return "added"

    def __len__(self) -> int:
        return 7


@programs.add()
def operators_of_named_tuples(x):
    return x + 1, Pair(1, 2) + Pair(3), Pair(1) == (1, 1), len(Pair(1))


class Strange(typing.NamedTuple):
    a: int
    b: int = 1

    def __getitem__(self, index: Any) -> Any:
        return f"item {index}"

    def __iter__(self) -> Any:
        return iter("xyz")

    def __contains__(self, value: object) -> bool:
        return value == "in"

    def __eq__(self, other: object) -> Any:
        return "equal"

    def __lt__(self, other: Any) -> Any:
        return "less"

    def __hash__(self) -> int:
        return 5

    def __reversed__(self) -> Any:
        return iter("zyx")


STRANGE = Strange(1, 2)


@programs.add()
def named_tuples_that_are_no_tuples(x):
    found = []
    for value in (STRANGE, Strange(3)):
        one, two, three = value
        found += [value[0], value.a, list(value), [*value], "in" in value, value == (1, 2), (1, 2) == value, value < 2, hash(value)]
        found += [list(reversed(value)), max(value), tuple(value), value[0:1], one + two + three]
    return x + 1, found


@programs.add(graphs=None, again=False)
def next_class_in_line(x):
    class First:
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.first = True

    class Second(First):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.second = True

    class Third(Second):
        pass

    return x + 1, Third.first, Third.second, hasattr(First, "first")


@programs.add(graphs=None, again=False)
def enumerations_with_class_hooks(x):
    class Base(enum.Flag):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.one = "Base"

    class Middle(Base):
        def __init_subclass__(cls, **kwargs):
            super(Middle, cls).__init_subclass__(**kwargs)
            cls.two = "Middle"

    class Last(Middle):
        pass

    return x + 1, vars(Middle)["one"], vars(Last)["one"], vars(Last)["two"]


@programs.add()
def class_methods_bound_by_hand(x):
    def whose(cls, value):
        "its text"
        return cls, value

    method, plain = classmethod(whose), staticmethod(whose)
    named = method.__name__, method.__doc__, plain.__doc__, hasattr(method, "__code__")
    return x + 1, method.__get__(0, int)(4), method.__get__(0)(4), plain.__get__(0)(1, 2), named


@programs.add(graphs=None, again=False)
def notes_of_wrapped_methods(x):
    def wrapped(method):
        inner = method.__func__

        @classmethod
        @functools.wraps(inner)
        def outer(*args):
            return inner(*args)

        return outer

    class Shown:
        @functools.singledispatchmethod
        @wrapped
        @classmethod
        def show(cls, value: int) -> str:
            """Its text."""
            return str(value)

    return x + 1, sorted(Shown.show.__annotations__), sorted(Shown().show.__annotations__), Shown.show.__doc__, Shown.show(5)


@programs.add(graphs=None, again=False)
def fields_of_a_made_named_tuple(x):
    made = collections.namedtuple("made", "a b", module=collections)
    made.a.__doc__ = "the first"
    made.__new__.__defaults__ = (3,)
    return x + 1, made.a.__doc__, made.b.__doc__, tuple(made(1)), made.__module__ is collections


class Kept:
    def __getnewargs__(self):
        return (1, "a")


class KeptByName:
    def __getnewargs_ex__(self):
        return (1,), {"a": 2}


class KeptBadly:
    def __getnewargs_ex__(self):
        return (1, 2, 3)


@programs.add(graphs=None, again=False)
def protocols_of_pickling(x):
    found: list[Any] = []
    for kind in (Kept, KeptByName, KeptBadly):
        for protocol in (0, 1, 2, 4):
            try:
                made = kind().__reduce_ex__(protocol)
                found.append((made[0].__name__, made[1][1:], made[2:]))
            except ValueError as error:
                found.append(str(error))
    return x + 1, found


@programs.add(graphs=None, again=False)
def classes_know_what_is_derived(x):
    class Base:
        pass

    class Derived(Base):
        pass

    return x + 1, [cls.__name__ for cls in Base.__subclasses__()]


class Hook:
    count = 0

    def __get__(self, obj, owner=None):
        def getter(name):
            Hook.count += 1
            raise AttributeError(name)

        return getter


class HookedByDescriptor:
    __getattr__ = Hook()


@programs.add(graphs=None)
def descriptors_as_hooks(x):
    Hook.count = 0
    try:
        HookedByDescriptor().nothing
    except AttributeError as error:
        return x + 1, str(error), Hook.count


ASKED: list[str] = []


class Asked:
    def __getattribute__(self, name):
        ASKED.append(name)
        return object.__getattribute__(self, name)


class AskedModule(types.ModuleType):
    def __getattribute__(self, name):
        ASKED.append(name)
        return types.ModuleType.__getattribute__(self, name)


class AskedClass(type):
    def __getattribute__(cls, name):
        ASKED.append(name)
        return super().__getattribute__(name)


class OfAskedClass(metaclass=AskedClass):
    value = 3


AN_ASKED, AN_ASKED_MODULE = Asked(), AskedModule("asked")


@programs.add(graphs=None)
def nobody_else_asks(x):
    ASKED.clear()
    AN_ASKED.value = 1
    AN_ASKED_MODULE.value = 2
    found = AN_ASKED.value, AN_ASKED_MODULE.value, OfAskedClass.value
    return x + 1, found, list(ASKED)


@typing.runtime_checkable
class HasValue(typing.Protocol):
    value: int


class Bare:
    pass


@programs.add(graphs=None)
def protocols_look_at_the_instance(x):
    def fits(obj):
        return isinstance(obj, HasValue)

    obj = Bare()
    before = fits(obj)
    obj.value = 4
    between = fits(obj)
    del obj.value
    return x + 1, before, between, fits(obj)


class Text(str):
    pass


class Owner:
    def method(self):
        return 1


OWNER = Owner()
BY_TEXT, BY_METHOD = {Text("a"): 1}, {OWNER.method: 2}
ALIAS = collections.abc.Callable[[int], int]


@programs.add(graphs=None)
def keys_that_hash_in_c(x):
    return x + 1, BY_TEXT["a"], BY_TEXT[Text("a")], BY_METHOD[OWNER.method], len({ALIAS, collections.abc.Callable[[int], int]})


@programs.add(graphs=None)
def addresses_kept_from_before(x):
    counts, found = collections.Counter("ab"), []
    for step in range(3):
        one = counts.copy()
        address = id(one)
        print(end="")
        one += collections.Counter("a" * step)
        found.append(id(one) == address)
    return x + 1, found


@programs.add(graphs=None, again=False)
def metaclasses_that_see_a_class_half_made(x):
    class Meta(type):
        def mro(cls):
            if cls.__name__ == "Middle" and state["ready"]:
                state["ready"] = state["Middle"].__bases__ != (Second,)
                if state["ready"]:
                    state["Middle"].__bases__ = (Second,)
                    raise KeyError
            return type.mro(cls)

    state: dict[str, Any] = {"ready": False}

    class Base(metaclass=Meta):
        pass

    class First(Base):
        pass

    class Second(Base):
        pass

    class Middle(Base):
        pass

    state.update(ready=True, Middle=Middle)
    with contextlib.suppress(KeyError):
        Middle.__bases__ = (First,)
    return x + 1, [cls.__name__ for cls in Middle.__mro__]


@programs.add(graphs=None, again=False)
def classes_die_with_their_call(x):
    class Local:
        @functools.lru_cache
        def method(self):
            return 1

    watched = [weakref.ref(Local), weakref.ref(Local.method)]
    alive = [ref() is not None for ref in watched]
    del Local
    gc.collect()
    return x + 1, alive, [ref() is None for ref in watched]


@programs.add(graphs=None, again=False)
def cached_functions_die_with_their_call(x):
    @functools.lru_cache
    def local(value):
        return value

    watched = weakref.ref(local)
    alive = watched() is not None
    del local
    gc.collect()
    return x + 1, alive, watched() is None


@programs.add(graphs=None, again=False)
def sizes_of_objects(x):
    class Empty:
        pass

    made = [Empty() for _ in range(30)]
    return x + 1, sys.getsizeof([1, 2, 3]), sys.getsizeof(vars(made[0])) == sys.getsizeof(vars(made[1]))


class Ordered(collections.OrderedDict):
    pass


@programs.add()
def unions_of_derived_ordered_dictionaries(x):
    one, two = Ordered({0: 0, 1: 1}), Ordered({1: 2, 3: 3})
    return x + 1, [type(made).__name__ for made in (one | two, dict(one) | two, one | dict(two))], list((one | two).items())


@programs.add(graphs=None)
def addresses_of_what_nobody_holds(x):
    return x + 1, len(set(map(id, zip("abc", "def", strict=True))))


@programs.add(graphs=None)
def iterators_of_deques_by_their_class(x):
    kind = type(reversed(collections.deque()))
    return x + 1, list(kind(collections.deque("ab"))), kind.__name__, type(iter(collections.deque("a"))).__name__


class Bound:
    __slots__ = ("__weakref__", "a")


@programs.add(graphs=None)
def the_weak_reference_of_an_object(x):
    value = Bound()
    before = value.__weakref__
    ref = weakref.ref(value)
    return x + 1, before, value.__weakref__ is ref


@programs.add()
def words_of_unpacking(x):
    words = []
    try:
        _one, _two = Bare()
    except TypeError as error:
        words.append(str(error))
    try:
        _one, *_two = 5
    except TypeError as error:
        words.append(str(error))
    return x + 1, words


@pytest.mark.filterwarnings("ignore:.*recompile limit")
@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program) -> None:
    check(program)
