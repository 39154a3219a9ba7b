"""Random programs, random environments, random mutations: the native half and the Python text always agree."""

from __future__ import annotations

import collections
import math
import random
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magneto.dynamo.guards import reading
from magneto.dynamo.guards.rows import Kind, Row, SizesRow
from magneto.dynamo.guards.source import Attr, Cell, Global, Held, InstanceDict, Item, KeyAt, Local, Stack
from tests.dynamo.guards.oracle import UNBOUND, Both

pytestmark = pytest.mark.torchfree

NAMES = ["a", "b", "c"]
ATOMS = [
    0,
    1,
    -1,
    2**70,
    True,
    False,
    None,
    0.0,
    -0.0,
    1.5,
    math.inf,
    "a",
    "b",
    b"a",
    (),
    (1, 2),
    (1, (2.0,)),
    frozenset({1}),
    1j,
    range(3),
    ...,
]


class Node:
    pass


class NoDimensions:
    """As graph.resize.Form, which needs torch."""

    shape = symbols = ()

    def at(self, sizes):
        return (), ()


class Child(Node):
    common = 1


class Slotted:
    __slots__ = ("a", "b", "c")


FITTING = {
    (int,): [Kind.INT_RANGE, Kind.EQUALS, Kind.RELATION],
    (dict,): [Kind.PRESENT, Kind.KEYS, Kind.KEY_ABSENT, Kind.LENGTH, Kind.SAME],
    (list, tuple, collections.deque): [Kind.LENGTH, Kind.SAME, Kind.DISTINCT],
    (set,): [Kind.MEMBER, Kind.NOT_MEMBER, Kind.LENGTH],
    (Node, Slotted): [Kind.ABSENT, Kind.ID_IS, Kind.TYPE_IS, Kind.SAME],
}


class World:
    """A graph of objects that refer to each other, and the frame that sees it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.containers = [
            make()
            for make in (Node, Node, Child, Slotted, dict, dict, list, collections.OrderedDict, collections.deque, types.CellType, set)
            for _ in range(2)
        ]
        for _ in range(60):
            self.mutate()
        self.globals = {name: self.value() for name in NAMES}
        self.locals = [self.value() for _ in range(4)]
        self.stack = [self.value() for _ in range(2)]

    def value(self):
        rng = self.rng
        if rng.random() < 0.65:
            return rng.choice(self.containers)
        if rng.random() < 0.2:
            return (rng.choice(self.containers), rng.choice(ATOMS))
        return rng.choice(ATOMS)

    def mutate(self):
        """One change somewhere."""
        rng, target = self.rng, self.rng.choice(self.containers)
        name, value = rng.choice(NAMES), self.value()
        remove = rng.random() < 0.25
        if isinstance(target, (Node, Slotted)):
            if isinstance(target, Node) and rng.random() < 0.1:
                target.__dict__ = dict(target.__dict__)
            elif isinstance(target, Node) and rng.random() < 0.05:
                target.__class__ = rng.choice([Node, Child])
            elif not remove:
                setattr(target, name, value)
            elif hasattr(target, name) and name in getattr(target, "__dict__", {name: 0}):
                delattr(target, name)
        elif isinstance(target, dict):
            if remove:
                target.pop(name, None)
            elif isinstance(target, collections.OrderedDict) and name in target and rng.random() < 0.5:
                target.move_to_end(name)
            else:
                target[name] = value
        elif isinstance(target, set):
            element = rng.choice([c for c in self.containers if isinstance(c, (Node, Slotted))])
            (target.discard if remove else target.add)(element)
        elif isinstance(target, types.CellType):
            if not remove:
                target.cell_contents = value
        elif remove and target:
            target.pop()
        elif target and rng.random() < 0.5:
            target[rng.randrange(len(target))] = value
        elif len(target) < 4:
            target.append(value)

    def mutate_frame(self):
        rng = self.rng
        where = rng.choice(["locals", "stack", "globals"])
        if where == "globals":
            self.globals[rng.choice(NAMES)] = self.value()
        else:
            entries = getattr(self, where)
            entries[rng.randrange(len(entries))] = UNBOUND if rng.random() < 0.2 else self.value()

    def frame(self):
        return reading.Frame(tuple(self.locals), tuple(self.stack), self.globals, UNBOUND)

    # -- sources and rows

    def source(self):
        rng = self.rng
        source = rng.choice(
            [
                lambda: Local(rng.randrange(5), "v"),
                lambda: Stack(rng.randrange(3)),
                lambda: Global(rng.choice(NAMES)),
                lambda: Held("h", rng.choice(self.containers)),
            ]
        )()
        for _ in range(rng.randrange(5)):
            source = self.step(source)
        return source

    def step(self, source):
        rng = self.rng
        try:
            value = reading.read(source, self.frame())
        except (reading.Absent, reading.Unreadable):
            value = None
        if rng.random() < 0.1:
            value = rng.choice(self.containers)
        if isinstance(value, types.CellType):
            return Cell(source)
        if isinstance(value, Node):
            return Item(InstanceDict(source), rng.choice(NAMES)) if rng.random() < 0.8 else Attr(source, rng.choice([*NAMES, "common"]))
        if isinstance(value, Slotted):
            return Attr(source, rng.choice(NAMES))
        if isinstance(value, dict):
            return Item(source, rng.choice(NAMES)) if rng.random() < 0.8 else KeyAt(source, rng.randrange(3))
        if isinstance(value, (list, tuple, collections.deque)):
            return Item(source, rng.randrange(-2, 3))
        return source

    def row(self):
        rng, source = self.rng, self.source()
        try:
            value = reading.read(source, self.frame())
        except (reading.Absent, reading.Unreadable):
            value = self.value()
            if rng.random() < 0.5:
                return Row(Kind.ABSENT, source, None)
        kinds = [kind for kind in Kind if kind not in (Kind.TENSOR, Kind.STATE, Kind.DECIDES)]
        for types_, fitting in FITTING.items():
            if isinstance(value, types_) and rng.random() < 0.7:
                kinds = fitting
        kind = rng.choice(kinds)
        if rng.random() < 0.15:
            value = self.value()
        return Row(kind, *self.payload(kind, source, value))

    def found(self, source):
        try:
            return source, reading.read(source, self.frame())
        except (reading.Absent, reading.Unreadable):
            return source, reading

    def payload(self, kind, source, value):
        rng = self.rng
        if kind is Kind.TYPE_IS:
            return source, type(value)
        if kind in (Kind.ID_IS, Kind.EQUALS):
            return source, value
        if kind is Kind.LENGTH:
            return source, len(value) if hasattr(value, "__len__") else 1
        if kind is Kind.KEYS:
            return source, tuple(reading.listed(value)) if isinstance(value, (dict, set, frozenset)) else ("a",)
        if kind is Kind.KEY_ABSENT:
            return source, rng.choice(NAMES)
        if kind is Kind.PRESENT:
            return source, None
        if kind is Kind.ABSENT:
            return source, rng.choice([None, *NAMES])
        if kind is Kind.SAME:
            twin = next((other for other in map(self.found, [self.source() for _ in range(20)]) if other[1] is value), None)
            return source, twin[0] if twin else self.source()
        if kind in (Kind.MEMBER, Kind.NOT_MEMBER):
            elements = reading.listed(value) if isinstance(value, (dict, set)) else []
            found = [other for other in (self.source() for _ in range(20)) if any(self.found(other)[1] is one for one in elements)]
            return source, found[0] if found and rng.random() < 0.7 else self.source()
        if kind is Kind.DISTINCT:
            return source, (self.source(), self.source())
        if kind is Kind.SIZES:
            return source, SizesRow((self.source(),), (NoDimensions(),) * 2, (), (), lambda sizes: True)
        if kind is Kind.RELATION:
            return source, rng.choice(("({} % 3 == 0) is True", "({} > 1) is True", "(1 // {} == 0) is False"))
        if kind is Kind.TOGETHER:
            return source, (rng.choice(("({0} < {1}) is True", "({0} // {1} == {2}) is False")), (self.source(), self.source()))
        if kind is Kind.TYPE_VERSION:
            return Held("Child", Child), Child
        return source, rng.choice([(0, None), (None, 1), (-1, 2**80), (None, None)])


def hold(both, world):
    return both.holds(*world.locals, stack=tuple(world.stack), globals=world.globals)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_native_and_text_agree(seed):
    rng = random.Random(seed)
    world = World(rng)
    rows = [world.row() for _ in range(30)]
    holding = [row for row in rows if hold(Both(row), world)]
    for row in rows:
        hold(Both(row), world)
    together = Both(*holding)
    assert hold(together, world)
    parts = [together, *[Both(*rng.sample(holding, min(len(holding), 3))) for _ in range(6)]]
    for _ in range(40):
        world.mutate()
        if rng.random() < 0.1:
            world.mutate_frame()
        for both in parts:
            hold(both, world)
