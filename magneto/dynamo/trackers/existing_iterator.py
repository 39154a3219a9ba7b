"""Built-in iterators that exist when the region starts: on the value stack in the middle of a loop, in a variable, inside another iterator.

Capture looks ahead and steps nothing: the k-th item is a source of its own (`Peek`), so that a region fits every iteration in which the items it took are
like those it was made for. Each step is logged as an effect; the region steps the real iterator when it ends, and it then stands where the program's would.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.base.errors import GraphBreak
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Part, Peek, Source
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.basic_iterator import IteratorTracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker, TupleTracker
from magneto.dynamo.trackers.iterator import ExistingGenerator, FilterIterator, MapIterator, ZipIterator, next_or_none
from magneto.dynamo.trackers.object import has_finaliser, instance_dict

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

MAX_STEPS = 1000  # of one iterator in one region: each item is a guard and an argument
ADVANCE = "advance({0}, 1)"
PUT = "put({0}, {1})"  # a generator where it stands at the region's end
_ITEMS: type = type(iter({}.items()))
_SETS: type = type(iter(set()))


def _part(it: Tracker, index: int) -> Any:
    try:
        return _C.iterator_part(it.obj, index)
    except LookupError:
        return MISSING


class ExistingIterator(IteratorTracker):
    """Over a container, or over numbers: it has a position of its own."""

    __slots__ = ("container", "effects", "finished", "obj", "taken")

    def __init__(self, obj: Any, source: Source) -> None:
        super().__init__(source)
        self.obj = obj
        self.taken = 0
        self.effects = 0  # how many effects have been looked at: none of them has changed the container
        self.finished = False
        self.container: Any = None  # not looked at

    def python_type(self) -> type:
        return type(self.obj)

    def step(self, m: Machine) -> Tracker | None:
        if self.finished:
            return None
        assert self.source is not None
        if self.taken >= MAX_STEPS:
            m.graph_break("B110", value=f"{self.show()} beyond {MAX_STEPS} items")
        if self.container is None:
            self._begin(m)
        elif self._changed(m):
            m.graph_break("B110", value=f"{self.show()} over a container which changes")
        source = Peek(self.source, self.taken)
        try:
            item = _C.iterator_peek(self.obj, self.taken)
        except LookupError:
            m.guard(Kind.ABSENT, source, None)
            m.effect(ADVANCE, self)
            self.finished = True
            if has_finaliser(self.container):  # the iterator lets go of it
                m.end_behind(GraphBreak("B120", m.user_stack(), value=f"{type(self.container).__name__} object"))  # type: ignore[attr-defined]
            return None
        except TypeError:  # the dictionary has changed, and the next step raises
            m.graph_break("B110", value=self.show())
        m.effect(ADVANCE, self)
        self.taken += 1
        if type(self.obj) is not _ITEMS:
            return m.wrap(item, source)
        return TupleTracker([m.wrap(item[i], Peek(source.of, source.ahead, i + 1)) for i in range(2)])

    def _begin(self, m: Machine) -> None:
        """A container that can change becomes known, so that a region which writes to another one holds only while they are two."""
        try:
            self.container = _part(self, 0)
        except TypeError:  # numbers
            self.container = MISSING
        assert self.source is not None
        if isinstance(self.container, (list, dict)):
            m.wrap(self.container, Part(self.source, 0))
        if self._changed(m):
            m.graph_break("B110", value=f"{self.show()} over a container which changes")

    def _changed(self, m: Machine) -> bool:
        """Whether the region has written to the container before this step."""
        new = m.effects[self.effects :]
        self.effects += len(new)
        if not isinstance(self.container, (list, dict, set)):
            return False
        return any(text not in (ADVANCE, PUT) and any(self._concerns(operand) for operand in operands) for text, operands in new)

    def _concerns(self, operand: Tracker) -> bool:
        if isinstance(operand, ConstTracker) or operand.obj is MISSING:
            return False
        if operand.obj is self.container or (type(self.obj) is _SETS and isinstance(operand.obj, set)):
            return True
        if not isinstance(self.container, dict):
            return False
        namespace = instance_dict(operand.obj)  # a module's tables lie in it
        return namespace is not None and (namespace is self.container or any(value is self.container for value in namespace.values()))

    def emit(self, em: Emitter) -> str:
        assert self.source is not None
        return em.source(self.source)

    def show(self) -> str:
        return f"{type(self.obj).__name__} {self.source.text() if self.source else ''}"


class ExistingComposite(IteratorTracker):
    """enumerate, zip, map, filter: looked into when they are first stepped. What steps is inside them; of their own they have enumerate's number."""

    __slots__ = ("inside", "obj")

    def __init__(self, obj: Any, source: Source) -> None:
        super().__init__(source)
        self.obj = obj
        self.inside: IteratorTracker | None = None

    def python_type(self) -> type:
        return type(self.obj)

    def open(self, m: Machine) -> IteratorTracker:
        if self.inside is None:
            self.inside = _INSIDE[type(self.obj)](m, self)
        return self.inside

    def step(self, m: Machine) -> Tracker | None:
        return self.open(m).step(m)

    def part(self, m: Machine, index: int) -> Tracker:
        assert self.source is not None
        return m.wrap(_part(self, index), Part(self.source, index))

    def parts(self, m: Machine) -> list[Tracker]:
        """The iterators inside a zip or map."""
        found = self.part(m, 0)
        assert isinstance(found, SequenceTracker)
        return found.items(m)

    def emit(self, em: Emitter) -> str:
        assert self.source is not None
        return em.source(self.source)

    def show(self) -> str:
        return f"{type(self.obj).__name__} {self.source.text() if self.source else ''}"


class _Numbered(IteratorTracker):
    """The inside of an existing enumerate."""

    __slots__ = ("inner", "of", "taken")

    def __init__(self, of: ExistingComposite, inner: Tracker) -> None:
        super().__init__()
        self.of, self.inner = of, inner
        self.taken = 0

    def step(self, m: Machine) -> Tracker | None:
        item = next_or_none(m, self.inner)
        if item is None:
            return None
        assert self.of.source is not None
        number = m.wrap(_C.iterator_peek(self.of.obj, self.taken), Peek(self.of.source, self.taken))
        m.effect(ADVANCE, self.of)
        self.taken += 1
        return TupleTracker([number, item])


def _enumerate(m: Machine, of: ExistingComposite) -> IteratorTracker:
    try:
        _C.iterator_peek(of.obj, 0)
    except TypeError:  # a number beyond 2**62
        m.graph_break("B110", value=of.show())
    return _Numbered(of, of.part(m, 0))


def _zip(m: Machine, of: ExistingComposite) -> IteratorTracker:
    return ZipIterator(of.parts(m), m.truth(of.part(m, 1)))


def _map(m: Machine, of: ExistingComposite) -> IteratorTracker:
    fn = of.part(m, 1)
    if fn.obj is id:  # addresses of items that nobody holds
        m.graph_break("B110", value=of.show())
    return MapIterator(fn, of.parts(m))


def _filter(m: Machine, of: ExistingComposite) -> IteratorTracker:
    fn = of.part(m, 0)
    plain = isinstance(fn, ConstTracker) and fn.read() is None
    return FilterIterator(None if plain else fn, of.part(m, 1))


_INSIDE: dict[type, Callable[[Machine, ExistingComposite], IteratorTracker]] = {
    enumerate: _enumerate,
    zip: _zip,
    map: _map,
    filter: _filter,
}


def wrap_generator(m: Machine, obj: types.GeneratorType[Any, Any, Any], source: Source) -> Tracker:
    m.guard(Kind.TYPE_IS, source, types.GeneratorType)
    return ExistingGenerator(obj, source)


def wrap_iterator(m: Machine, obj: Any, source: Source) -> Tracker:
    m.guard(Kind.TYPE_IS, source, type(obj))
    return ExistingIterator(obj, source) if type(obj) not in _INSIDE else ExistingComposite(obj, source)


_SAMPLES: tuple[Any, ...] = ([], (), "", "\u0130", b"", range(0), {}, {}.values(), {}.items(), set())
ITERATORS: tuple[type, ...] = (*(type(iter(values)) for values in _SAMPLES), type(reversed([])), reversed, *_INSIDE)


def merged(effects: list[tuple[str, tuple[Tracker, ...]]]) -> list[tuple[str, tuple[Tracker, ...]]]:
    """The effects of a region with the steps of one iterator, between two effects of other kinds, as one. (Steps of different iterators do not concern each other.)
    A generator is put where it stands once."""
    last = {id(operands[0]): index for index, (text, operands) in enumerate(effects) if text == PUT}
    effects = [effect for index, effect in enumerate(effects) if effect[0] != PUT or last[id(effect[1][0])] == index]
    found: list[tuple[str, tuple[Tracker, ...]]] = []
    steps: dict[int, int] = {}  # iterator -> where its steps stand in `found`
    counts: dict[int, int] = {}
    for text, operands in effects:
        if text is not ADVANCE:
            steps.clear()
            found.append((text, operands))
            continue
        place = steps.setdefault(id(operands[0]), len(found))
        if place == len(found):
            found.append((text, operands))
            counts[place] = 0
        counts[place] += 1
        found[place] = (f"advance({{0}}, {counts[place]})", operands)
    return found
