"""Each kind of row: what hits and what misses, natively and in Python."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import math
import struct
import sys
import types
import weakref

import pytest

from magneto.dynamo.guards.rows import GuardSet, Kind, Row
from magneto.dynamo.guards.source import Attr, Cell, Global, Held, InstanceDict, Item, KeyAt, Local, Part, Peek, Stack
from magneto.dynamo.guards.text import show_guards
from tests.dynamo.guards.oracle import UNBOUND, Both, holds

pytestmark = pytest.mark.torchfree

X, Y, Z = Local(0, "x"), Local(1, "y"), Local(2, "z")
NAN = struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0]


class Point(collections.namedtuple("Point", "x y")):
    def __getitem__(self, key):
        raise AssertionError("user code")


class Shouting(dict):
    def __getitem__(self, key):
        raise AssertionError("user code")

    def __len__(self):
        raise AssertionError("user code")

    def __iter__(self):
        raise AssertionError("user code")


class Slotted:
    __slots__ = ("a", "b")


class Plain:
    shared = 7

    @property
    def computed(self):
        raise AssertionError("user code")

    def __getattr__(self, name):
        raise AssertionError("user code")


class Colour(enum.Enum):
    RED = 1


def test_type_is():
    assert holds((Kind.TYPE_IS, X, int), 3)
    assert not holds((Kind.TYPE_IS, X, int), True)
    assert not holds((Kind.TYPE_IS, X, int), UNBOUND)
    assert not holds((Kind.TYPE_IS, Local(5, "far"), int), 3)


def test_id_is():
    obj, other = Plain(), Plain()
    assert holds((Kind.ID_IS, X, obj), obj)
    assert not holds((Kind.ID_IS, X, obj), other)
    assert holds((Kind.ID_IS, X, None), None)
    assert holds((Kind.ID_IS, X, test_id_is), test_id_is)
    assert not holds((Kind.ID_IS, X, test_id_is), test_type_is)


def test_id_is_does_not_keep_the_object():
    obj = Plain()
    ref = weakref.ref(obj)
    both = Both((Kind.ID_IS, X, obj))
    program = both.program
    both.guards.weaken()
    both.text = None
    assert program.check((obj,), ())
    del obj
    gc.collect()  # the text's function and its globals are a cycle
    assert ref() is None
    assert not program.check((Plain(),), ())
    assert not program.check((None,), ())


EQUAL = [
    1,
    0,
    -5,
    2**80,
    1.5,
    -0.0,
    math.inf,
    NAN,
    True,
    None,
    ...,
    "a",
    b"a",
    (),
    (1, (2.0, "x")),
    frozenset({1, "a"}),
    {1, 2},
    slice(1, None, 2),
    range(3),
    1j,
    Colour.RED,
]


@pytest.mark.parametrize("i", range(len(EQUAL)))
def test_equals(i):
    import copy

    value = EQUAL[i]
    both = Both((Kind.EQUALS, X, value))
    assert both.holds(value)
    assert both.holds(copy.deepcopy(value))
    for j, other in enumerate(EQUAL):
        if i != j:
            assert not both.holds(other), other


@pytest.mark.parametrize(
    ("a", "b"),
    [(0.0, -0.0), (1, True), (1, 1.0), ((1,), (True,)), ((0.0,), (-0.0,)), (frozenset({1}), frozenset({1.0})), ("a", "b"), ([1], [1.0])],
)
def test_equals_is_strict(a, b):
    assert holds((Kind.EQUALS, X, a), a)
    assert not holds((Kind.EQUALS, X, a), b)


def test_equals_runs_no_user_code():
    class Loud:
        def __eq__(self, other):
            raise AssertionError("user code")

        __hash__ = object.__hash__

    a, b = Loud(), Loud()
    assert holds((Kind.EQUALS, X, (1, a)), (1, a))
    assert not holds((Kind.EQUALS, X, (1, a)), (1, b))


def test_length():
    for value in (
        [1, 2],
        (1, 2),
        {1: 1, 2: 2},
        {1, 2},
        frozenset({1, 2}),
        collections.deque([1, 2]),
        collections.OrderedDict(a=1, b=2),
        Point(1, 2),
    ):
        assert holds((Kind.LENGTH, X, 2), value)
        assert not holds((Kind.LENGTH, X, 3), value)
    assert holds((Kind.LENGTH, X, 1), Shouting(a=1))
    assert not holds((Kind.LENGTH, X, 2), "ab")
    assert not holds((Kind.LENGTH, X, 2), Plain())


def test_keys():
    assert holds((Kind.KEYS, X, ("a", "b")), {"a": 1, "b": 2})
    assert not holds((Kind.KEYS, X, ("a", "b")), {"b": 1, "a": 2})
    assert not holds((Kind.KEYS, X, ("a", "b")), {"a": 1})
    assert not holds((Kind.KEYS, X, (1,)), {True: 1})
    assert not holds((Kind.KEYS, X, ("a",)), ["a"])
    assert holds((Kind.KEYS, X, ("a",)), Shouting(a=1))
    ordered = collections.OrderedDict(a=1, b=2)
    both = Both((Kind.KEYS, X, ("a", "b")))
    assert both.holds(ordered)
    ordered.move_to_end("a")
    assert not both.holds(ordered)


def test_key_absent():
    assert holds((Kind.KEY_ABSENT, X, "a"), {})
    assert not holds((Kind.KEY_ABSENT, X, "a"), {"a": None})
    assert not holds((Kind.KEY_ABSENT, X, "a"), [])
    assert not holds((Kind.KEY_ABSENT, X, []), {})


def test_absent_slots_and_cells():
    assert holds((Kind.ABSENT, X, None), UNBOUND)
    assert not holds((Kind.ABSENT, X, None), None)
    assert holds((Kind.ABSENT, Cell(X), None), types.CellType())
    assert not holds((Kind.ABSENT, Cell(X), None), types.CellType(1))
    assert not holds((Kind.ABSENT, Cell(X), None), UNBOUND)
    assert not holds((Kind.ABSENT, Cell(X), None), 3)
    assert holds((Kind.ABSENT, Item(X, "a"), None), {})
    assert not holds((Kind.ABSENT, Local(4, "far"), None), 1)


def test_absent_attributes():
    obj, slotted = Plain(), Slotted()
    slotted.a = 1
    assert holds((Kind.ABSENT, X, "a"), obj)
    obj.a = 1
    assert not holds((Kind.ABSENT, X, "a"), obj)
    assert not holds((Kind.ABSENT, X, "shared"), obj)
    assert not holds((Kind.ABSENT, X, "computed"), obj)  # not to be told without user code
    assert holds((Kind.ABSENT, X, "b"), slotted)
    assert not holds((Kind.ABSENT, X, "a"), slotted)


def test_same_and_distinct():
    a, b, c = [], [], []
    assert holds((Kind.SAME, X, Y), a, a)
    assert not holds((Kind.SAME, X, Y), a, b)
    assert holds((Kind.DISTINCT, X, (Y, Z)), a, b, c)
    assert not holds((Kind.DISTINCT, X, (Y, Z)), a, b, a)
    assert not holds((Kind.DISTINCT, X, (Y, Z)), a, b, b)


def test_elements():
    a, b = Plain(), Plain()
    assert holds((Kind.MEMBER, X, Y), {a, b}, b)
    assert not holds((Kind.MEMBER, X, Y), {a}, b)
    assert not holds((Kind.MEMBER, X, Y), [b], b)
    assert holds((Kind.NOT_MEMBER, X, Y), frozenset({a}), b)
    assert not holds((Kind.NOT_MEMBER, X, Y), {a, b}, a)
    assert not holds((Kind.NOT_MEMBER, X, Y), [], a)
    assert holds((Kind.NOT_MEMBER, X, Y), {a}, [])


def test_int_range():
    for low, high, inside, outside in [
        (2, None, (2, 10**30), (1, -(10**30), 2.0, True)),
        (None, 5, (5, -(10**30)), (6, 10**30)),
        (2, 4, (2, 3, 4), (1, 5)),
    ]:
        both = Both((Kind.INT_RANGE, X, (low, high)))
        assert all(both.holds(value) for value in inside)
        assert not any(both.holds(value) for value in outside)
    assert holds((Kind.INT_RANGE, X, (0, 2**70)), 2**69)
    assert not holds((Kind.INT_RANGE, X, (0, 2**70)), 2**71)


def test_relation():
    both = Both((Kind.RELATION, X, "({} % 10 == 0) is True"))
    assert both.holds(20)
    assert both.holds(20.0)
    assert not any(both.holds(value) for value in (21, True, "20", None, float("nan")))
    assert not Both((Kind.RELATION, X, "(1 / {} < 1) is False")).holds(0)  # raises: does not hold


def test_state():
    values = [1]
    both = Both((Kind.STATE, None, ("first", values.__getitem__, (0,), 1)))
    assert both.holds()
    values[0] = 2
    assert not both.holds()
    values.clear()
    assert not both.program.check((), ())


class Base:
    a = 1


class Child(Base):
    def f(self):
        pass


def test_type_version():
    both = Both((Kind.TYPE_VERSION, Held("Child", Child), Child))
    assert both.holds()
    Base.a = 2
    assert not both.holds()
    Base.a = 1
    assert both.holds()
    Child.g = 1
    assert not both.holds()
    del Child.g
    assert both.holds()
    Child.__bases__ = (type("Other", (), {"a": 1}),)
    assert not both.holds()
    Child.__bases__ = (Base,)


def test_guards_keep_no_class_or_function_alive_that_the_program_made_in_a_function():
    class Made:
        def method(self):
            return __class__

    def function():
        return Made

    made = Made()
    rows = [
        (Kind.TYPE_IS, X, Made),
        (Kind.TYPE_VERSION, Held("Made", Made), Made),
        (Kind.ID_IS, Y, function),
        (Kind.PRESENT, Held("function", function), None),
        (Kind.ID_IS, Attr(Held("method", Made.method), "__code__"), Made.method.__code__),
    ]
    both = Both(*rows)
    assert both.holds(made, function)
    both.guards.weaken()
    text = show_guards(both.guards)
    assert both.holds(made, function)
    program, both.text = both.program, None  # the text holds them
    Made.more = 1
    assert not program.check((made, function), ())
    references = [weakref.ref(Made), weakref.ref(function)]
    del Made, made, function, rows
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert show_guards(both.guards) == text
    assert not program.check((None, None), ()) and not program.check((Base(), None), ())


def test_sources():
    def closure(a, b=5):
        return holds, a

    cell = types.CellType([3, 4])
    assert holds((Kind.EQUALS, Item(Cell(X), 1), 4), cell)
    assert holds((Kind.EQUALS, Item(X, -1), 4), (3, 4))
    assert not holds((Kind.EQUALS, Item(X, 2), 4), (3, 4))
    assert not holds((Kind.EQUALS, Item(X, True), 4), (3, 4))
    assert holds((Kind.EQUALS, Item(X, 0), 1), Point(1, 2))
    assert holds((Kind.EQUALS, Item(X, 0), 1), collections.deque([1]))
    assert holds((Kind.EQUALS, Item(X, "a"), 1), Shouting(a=1))
    assert not holds((Kind.EQUALS, Item(X, "b"), 1), collections.defaultdict(int))
    assert holds((Kind.EQUALS, KeyAt(X, 1), "b"), {"a": 1, "b": 2})
    assert not holds((Kind.EQUALS, KeyAt(X, 2), "b"), {"a": 1, "b": 2})
    assert holds((Kind.EQUALS, Stack(1), 7), stack=(0, 7))
    assert not holds((Kind.EQUALS, Stack(2), 7), stack=(0, 7))
    assert holds((Kind.EQUALS, Global("n"), 7), globals={"n": 7})
    assert not holds((Kind.EQUALS, Global("n"), 7), globals={})
    assert not holds((Kind.EQUALS, Global("n"), 7))
    assert holds((Kind.ID_IS, Attr(X, "__code__"), closure.__code__), closure)
    assert holds((Kind.EQUALS, Attr(X, "__defaults__"), (5,)), closure)
    assert holds((Kind.ID_IS, Attr(X, "__func__"), Plain.__getattr__), Plain().__getattr__)
    assert holds((Kind.ID_IS, Attr(X, "func"), max), functools.partial(max, 1))
    assert holds((Kind.EQUALS, Item(Attr(X, "args"), 0), 1), functools.partial(max, 1))
    assert holds((Kind.EQUALS, Attr(X, "shared"), 7), Plain())
    assert holds((Kind.EQUALS, Attr(X, "shared"), 7), Plain)
    assert not holds((Kind.EQUALS, Attr(X, "computed"), 7), Plain())
    assert holds((Kind.EQUALS, Item(InstanceDict(Held("math", math)), "pi"), math.pi))
    assert holds((Kind.EQUALS, Item(InstanceDict(X), "shared"), 7), Plain)
    assert not holds((Kind.TYPE_IS, InstanceDict(X), dict), 3)
    assert not holds((Kind.TYPE_IS, InstanceDict(X), dict), Slotted())


def test_inline_values_and_dicts_of_instances():
    obj = Plain()
    obj.a, obj.b = 1, [2]
    both = Both((Kind.EQUALS, Item(InstanceDict(X), "a"), 1), (Kind.EQUALS, Item(Item(InstanceDict(X), "b"), 0), 2))
    assert both.holds(obj)
    obj.a = 3
    assert not both.holds(obj)
    obj.a = 1
    assert both.holds(obj)
    obj.b[0] = 3
    assert not both.holds(obj)


def test_exports():
    obj = Plain()
    obj.a, cell = [], types.CellType("c")
    both = Both((Kind.TYPE_IS, X, Plain), exports=[Item(InstanceDict(X), "a"), Cell(Y), X])
    for _ in range(3):
        assert both.program.check((obj, cell), (), values=True) == (obj.a, "c", obj)
    assert both.program.check((Plain(), cell), (), values=True) is False
    other = Plain()
    other.a = 5
    assert both.program.check((other, cell), (), values=True) == (5, "c", other)
    assert both.program.check((obj, types.CellType()), (), values=True) is False


def test_values_handed_out_as_one_tuple():
    obj = Plain()
    obj.a, cell = [], types.CellType("c")
    both = Both((Kind.TYPE_IS, X, Plain), exports=[X], packed=[Cell(Y), Item(InstanceDict(X), "a"), X, X])
    held = sys.getrefcount(obj.a)
    for _ in range(3):
        assert both.program.check((obj, cell), (), values=True) == (obj, ("c", obj.a, obj, obj))
        assert both.program.check((obj, types.CellType()), (), values=True) is False  # one of them is missing
        assert both.program.check((Plain(), cell), (), values=True) is False
    kept = sys.getrefcount(obj.a) - held
    assert kept == 0 and both.program.n_exports == 1
    other = Plain()
    other.a = 5
    assert both.program.check((other, cell), (), values=True) == (other, ("c", 5, other, other))


def test_failed_row():
    both = Both((Kind.TYPE_IS, X, int), (Kind.EQUALS, Y, 3))
    assert both.program.check((1, 3), ()) and both.program.failed_row == -1
    assert not both.program.check((1, 4), ()) and both.program.failed_row == 1
    assert not both.program.check((1.0, 4), ()) and both.program.failed_row == 0


@pytest.mark.parametrize(
    "instructions",
    [((99, 0, -1, 0, False, 0),), ((0, 5, -1, 0, False, 0),), ((0, 0, 0, 0, False, 0),), ("x",), ((0, 0, -1, 0, False, "x"),)],
)
def test_bad_programs_are_refused(instructions):
    from magneto import _C

    with pytest.raises((ValueError, TypeError)):
        _C.GuardProgram(instructions, 1)


def test_registers_are_written_before_they_are_read():
    from magneto import _C

    ops = _C.GUARD_OPS
    with pytest.raises(ValueError):
        _C.GuardProgram(((ops["TYPE_IS"], -1, 0, 0, False, int),), 1)


def test_every_kind_and_every_source_has_a_native_form():
    from magneto.dynamo.guards import native, source, text

    assert set(text.SHOW) == set(Kind) == set(text._CHECKS)
    sources = {cls.__name__ for cls in source.Source.__subclasses__()}
    assert {cls.__name__ for cls in native.LOADS} == sources == {cls.__name__ for cls in text._EXPRESSIONS}


ITERATORS = {
    "list": lambda: iter([10, 20, 30, 40]),
    "tuple": lambda: iter((10, 20, 30, 40)),
    "ascii": lambda: iter("abcd"),
    "bytes": lambda: iter(b"abcd"),
    "text": lambda: iter("ab\u0130\u0131"),
    "reversed list": lambda: reversed([10, 20, 30, 40]),
    "reversed tuple": lambda: reversed((10, 20, 30, 40)),
    "range": lambda: iter(range(9, -3, -3)),
    "keys": lambda: iter({10: 1, 20: 2, 30: 3, 40: 4}),
    "values": lambda: iter(Shouting(a=1, b=2, c=3, d=4).values()),
    "items": lambda: iter({10: 1, 20: 2, 30: 3, 40: 4}.items()),
    "set": lambda: iter({10, 20, 30, 40}),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
@pytest.mark.parametrize("taken", range(6))
def test_what_an_iterator_gives_next(make, taken):
    rest, it = list(make())[taken:], make()
    for _ in range(taken):
        next(it, None)
    for ahead, item in enumerate(rest):
        assert holds((Kind.EQUALS, Peek(X, ahead), item), it)
        assert not holds((Kind.EQUALS, Peek(X, ahead), "other"), it)
        assert not holds((Kind.ABSENT, Peek(X, ahead), None), it)
    assert holds((Kind.ABSENT, Peek(X, len(rest)), None), it)
    assert not holds((Kind.PRESENT, Peek(X, len(rest)), None), it)
    assert list(it) == rest, "looking steps nothing"


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
@pytest.mark.parametrize("steps", range(7))
def test_stepping_an_iterator_without_its_items(make, steps):
    from magneto import _C

    ours, plain = make(), make()
    _C.iterator_advance(ours, steps)
    for _ in range(steps):
        next(plain, None)
    assert list(ours) == list(plain)


def test_iterators_that_change_or_are_not_known():
    table = {1: 2, 3: 4}
    keys, pairs = iter(table), iter(table.items())
    assert holds((Kind.EQUALS, Peek(X, 1, 1), 3), pairs)
    assert holds((Kind.EQUALS, Peek(X, 1, 2), 4), pairs)
    table[5] = 6  # the next step raises
    assert not holds((Kind.EQUALS, Peek(X, 0), 1), keys)
    assert not holds((Kind.ABSENT, Peek(X, 0), None), keys)
    items = [1, 2, 3]
    it = iter(items)
    next(it)
    items[1:] = []
    assert holds((Kind.ABSENT, Peek(X, 0), None), it)
    items += [7]
    assert holds((Kind.EQUALS, Peek(X, 0), 7), it)
    for unknown in (iter(collections.OrderedDict(a=1)), (n for n in items), iter(Point(1, 2).__getitem__, 3), 7):
        assert not holds((Kind.PRESENT, Peek(X, 0), None), unknown)
        assert not holds((Kind.ABSENT, Peek(X, 0), None), unknown)
    assert not holds((Kind.ABSENT, Part(X, 0), None), 7)


def test_parts_of_iterators():
    from magneto import _C

    first, second = iter([1, 2]), iter("ab")
    assert holds((Kind.EQUALS, Peek(Part(X, 0), 1), 2), enumerate(first, 7))
    assert holds((Kind.EQUALS, Peek(X, 1), 8), enumerate(first, 7))
    assert not holds((Kind.PRESENT, Peek(X, 1), None), enumerate(first, 2**70))
    assert holds((Kind.SAME, Item(Part(X, 0), 1), Y), zip(first, second), second)
    assert holds((Kind.EQUALS, Part(X, 1), True), zip(first, second, strict=True))
    assert holds((Kind.ID_IS, Part(X, 1), int), map(int, first))
    assert holds((Kind.ID_IS, Part(X, 0), int), filter(int, first))
    assert holds((Kind.SAME, Part(X, 1), Y), filter(int, first), first)
    assert holds((Kind.ABSENT, Part(X, 0), None), iter([])) is False
    numbers = enumerate(first, 7)
    _C.iterator_advance(numbers, 3)
    assert next(numbers) == (10, 1)
    for it in (zip(first), map(int, first), iter(collections.deque())):
        with pytest.raises(TypeError):
            _C.iterator_advance(it, 1)


def test_equal_rows_are_made_once() -> None:
    guards, asked = GuardSet(), []

    def read_at() -> tuple[str, str]:
        asked.append(1)
        return f"app.py:{len(asked)}", ""

    for _ in range(3):
        guards.require(Kind.EQUALS, Local(0, "x"), 3, read_at)
        guards.require(Kind.EQUALS, Local(0, "x"), 3.0, read_at)  # of another type
    assert [row.user_line for row in guards] == ["app.py:1", "app.py:2"]
    guards.add(Row(Kind.EQUALS, Local(0, "x"), 3))
    assert len(guards) == 2
