"""Iterators over values that are known: sequences, dictionaries, sets, counts. Those that run code or step others are in iterator.py."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import CannotEmit, Tracker, read
from magneto.dynamo.trackers.container import DequeTracker, SequenceTracker, TupleTracker
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class IteratorTracker(Tracker):
    """Base: `step` gives the next item, None at the end."""

    __slots__ = ()
    exact_type: type | None = type(iter(()))

    def step(self, m: Machine) -> Tracker | None:
        raise NotImplementedError


class SequenceIterator(IteratorTracker):
    """Iterator over a list or tuple: sees changes made while it runs, as CPython's does."""

    __slots__ = ("index", "of")

    def __init__(self, of: SequenceTracker) -> None:
        super().__init__()
        self.of: SequenceTracker | None = of
        self.index = 0

    def python_type(self) -> type:
        return type(iter([])) if self.of is None or issubclass(self.of.cls, list) else type(iter(()))

    def step(self, m: Machine) -> Tracker | None:
        if self.of is None:
            return None
        if self.index >= len(self.of.entries):
            self.of.sized()
            self.of = None
            return None
        self.index += 1
        return self.of.item(m, self.index - 1)  # (that it is there is guarded, or else the length)

    def emit(self, em: Emitter) -> str:
        if self.of is None:
            return em.assign("it", "iter(())", self)
        base = "list" if issubclass(self.of.cls, list) else "tuple"  # the object's class may have an `__iter__`, which has run
        name = em.assign("it", f"{base}.__iter__({em.value(self.of)})", self)
        if self.index:
            em.line(f"{name}.__setstate__({self.index})")
        return name


class DequeIterator(IteratorTracker):
    """Iterator over a deque: raises once the deque has been changed; the forward one at each further step, also behind its end."""

    __slots__ = ("index", "of", "reverse", "size", "turns")

    def __init__(self, of: DequeTracker, reverse: bool = False) -> None:
        super().__init__()
        self.of, self.reverse = of, reverse
        self.index = 0
        self.turns = of.turns
        self.size = of.length()

    def python_type(self) -> type:
        queue: collections.deque[Any] = collections.deque()
        return type(reversed(queue) if self.reverse else iter(queue))

    def step(self, m: Machine) -> Tracker | None:
        if self.reverse and self.index >= self.size:
            return None
        if self.of.turns != self.turns:
            self.index = self.size
            m.raise_exception(RuntimeError("deque mutated during iteration"))
        if self.index >= self.size:
            return None
        self.index += 1
        return self.of.item(m, self.size - self.index if self.reverse else self.index - 1)

    def emit(self, em: Emitter) -> str:
        start = "reversed" if self.reverse else "iter"
        if self.of.turns == self.turns:
            name = em.assign("it", f"{start}({em.value(self.of)})", self)
            if self.index:
                em.line(f"for _ in range({self.index}): next({name})")
            return name
        other = em.assign("queue", f"{em.const(collections.deque, 'deque')}((None,))")  # one whose iterator raises too
        name = em.assign("it", f"{start}({other})", self)
        if self.index >= self.size:
            em.line(f"next({name})")
        em.line(f"{other}.append(None)")
        return name


class ReverseIterator(IteratorTracker):
    """reversed() of a list or tuple."""

    __slots__ = ("index", "of")

    def __init__(self, of: SequenceTracker) -> None:
        super().__init__()
        self.of: SequenceTracker | None = of
        self.index = of.length() - 1

    def python_type(self) -> type:
        return type(reversed([])) if self.of is None or self.of.cls is list else reversed

    def step(self, m: Machine) -> Tracker | None:
        if self.of is None:
            return None
        if not 0 <= self.index < self.of.length():
            self.of = None
            return None
        self.index -= 1
        return self.of.item(m, self.index + 1)

    def emit(self, em: Emitter) -> str:
        if self.of is None:
            return em.assign("it", "reversed([])", self)
        name = em.assign("it", f"reversed({em.value(self.of)})", self)
        em.line(f"{name}.__setstate__({self.index})" if self.index >= 0 else f"next({name}, None)")
        return name


class DictIterator(IteratorTracker):
    """Iterator over the keys, values or items of a dictionary: notices, as CPython's does, that the dictionary has changed."""

    __slots__ = ("born", "index", "kind", "of", "ordered", "removals", "reverse", "tokens")

    def __init__(self, m: Machine, of: DictTracker, kind: str, reverse: bool = False) -> None:
        super().__init__()
        of.listed()
        self.born: int | None = m.count  # type: ignore[attr-defined]
        self.of: DictTracker | None = of
        self.ordered = issubclass(of.owner.python_type(), collections.OrderedDict)
        self.kind, self.reverse = kind, reverse
        self.tokens = list(of.entries)[:: -1 if reverse else 1]
        self.removals = of.removals
        self.index = 0

    def python_type(self) -> type:
        view = getattr(collections.OrderedDict() if self.ordered else {}, self.kind)()
        return type(reversed(view) if self.reverse else iter(view))

    def step(self, m: Machine) -> Tracker | None:
        of = self.of
        if of is None:
            return None
        if len(of.entries) != len(self.tokens):
            if self.ordered:
                m.graph_break("B110", value=f"{of.show()} which changes")
            m.raise_exception(RuntimeError("dictionary changed size during iteration"))
        if of.removals != self.removals:
            m.graph_break("B110", value=f"{of.show()} which changes")
        if self.index >= len(self.tokens):
            self.of = None
            return None
        self.index += 1
        token = self.tokens[self.index - 1]
        key = read(m, of.entries[token][0])
        if self.kind == "keys":
            return key
        value = of.get_token(m, token)
        assert value is not None
        return value if self.kind == "values" else TupleTracker([key, value])

    def emit(self, em: Emitter) -> str:
        of = self.of
        if of is not None and not self.ordered and len(of.entries) != len(self.tokens):
            other = em.assign("changed", "{None: 0}")  # a dictionary whose iterator raises too
            name = em.assign("it", f"{'reversed' if self.reverse else 'iter'}({other}.{self.kind}())", self)
            em.line(f"{other}[0] = 0")
            return name
        if of is not None and (of.removals != self.removals or len(of.entries) != len(self.tokens)):
            raise CannotEmit(self)
        empty = f"{em.const(collections.OrderedDict, 'OrderedDict')}()" if self.ordered else "{}"
        text = f"{em.value(of.owner) if of is not None else empty}.{self.kind}()"
        name = em.assign("it", f"{'reversed' if self.reverse else 'iter'}({text})", self)
        if self.index:
            em.line(f"for _ in range({self.index}): next({name}, None)")
        return name


class SetIterator(IteratorTracker):
    """Iterator over a set in the order that it has now."""

    __slots__ = ("index", "items", "of")
    exact_type: type | None = type(iter(set()))

    def __init__(self, m: Machine, of: SetTracker) -> None:
        super().__init__()
        self.items = of.items(m)
        self.of: SetTracker | None = of
        self.index = 0

    def step(self, m: Machine) -> Tracker | None:
        if self.of is None:
            return None
        if len(self.of.entries) != len(self.items):
            m.raise_exception(RuntimeError("Set changed size during iteration"))
        if self.index >= len(self.items):
            self.of = None
            return None
        self.index += 1
        return self.items[self.index - 1]

    def emit(self, em: Emitter) -> str:
        if self.of is None:
            return em.assign("it", "iter(())", self)
        if len(self.of.entries) != len(self.items):
            other = em.assign("changed", "{None}")  # a set whose iterator raises too
            name = em.assign("it", f"iter({other})", self)
            em.line(f"{other}.add(0)")
            return name
        if not self.index:
            return em.assign("it", f"iter({em.value(self.of)})", self)
        return em.assign("it", f"iter([{', '.join(em.value(item) for item in self.items[self.index :])}])", self)


class ItemsIterator(IteratorTracker):
    """Iterator over items computed in advance."""

    __slots__ = ("index", "items", "kind")

    def __init__(self, items: Sequence[Tracker], kind: type = type(iter(()))) -> None:
        super().__init__()
        self.items = list(items)
        self.index = 0
        self.kind = kind

    def python_type(self) -> type:
        return self.kind

    def step(self, m: Machine) -> Tracker | None:
        if self.index >= len(self.items):
            return None
        self.index += 1
        return self.items[self.index - 1]

    def emit(self, em: Emitter) -> str:
        rest = "".join(f"{em.value(item)}, " for item in self.items[self.index :])
        return em.assign("it", f"iter(({rest}))" if self.kind is type(iter(())) else f"iter([{rest}])", self)


class RangeIterator(IteratorTracker):
    """Iterator over a constant range, str or bytes; `of`: the instance of a derived class that holds the text, until the iterator is through."""

    __slots__ = ("index", "of", "values")

    def __init__(self, values: Any, of: Tracker | None = None) -> None:
        super().__init__()
        self.values, self.of = values, of
        self.index = 0

    def python_type(self) -> type:
        return type(iter(self.values))

    def step(self, m: Machine) -> Tracker | None:
        if self.index >= len(self.values):
            self.of = None
            return None
        self.index += 1
        return m.const(self.values[self.index - 1])

    def emit(self, em: Emitter) -> str:
        name = em.assign("it", f"iter({em.const(self.values) if self.of is None else em.value(self.of)})", self)
        if self.index:
            em.line(f"{name}.__setstate__({self.index})")
        return name


class CountIterator(IteratorTracker):
    """itertools.count on constants."""

    __slots__ = ("increment", "value")
    exact_type = itertools.count

    def __init__(self, value: Any, increment: Any) -> None:
        super().__init__()
        self.value, self.increment = value, increment

    def step(self, m: Machine) -> Tracker | None:
        value = self.value
        self.value = value + self.increment
        return m.const(value)

    def emit(self, em: Emitter) -> str:
        return em.assign("it", f"{em.const(itertools.count, 'count')}({self.value!r}, {self.increment!r})", self)


class RepeatIterator(IteratorTracker):
    """itertools.repeat; `times` None means for ever."""

    __slots__ = ("times", "value")
    exact_type = itertools.repeat

    def __init__(self, value: Tracker, times: int | None) -> None:
        super().__init__()
        self.value, self.times = value, times

    def step(self, m: Machine) -> Tracker | None:
        if self.times is not None:
            if self.times <= 0:
                return None
            self.times -= 1
        return self.value

    def emit(self, em: Emitter) -> str:
        times = "" if self.times is None else f", {self.times}"
        return em.assign("it", f"{em.const(itertools.repeat, 'repeat')}({em.value(self.value)}{times})", self)


class CycleIterator(IteratorTracker):
    """itertools.cycle over known items."""

    __slots__ = ("index", "items")
    exact_type = itertools.cycle

    def __init__(self, items: Sequence[Tracker]) -> None:
        super().__init__()
        self.items, self.index = list(items), 0

    def step(self, m: Machine) -> Tracker | None:
        if not self.items:
            return None
        item = self.items[self.index]
        self.index = (self.index + 1) % len(self.items)
        return item

    def emit(self, em: Emitter) -> str:
        items = [*self.items[self.index :], *self.items[: self.index]]
        return em.assign("it", f"{em.const(itertools.cycle, 'cycle')}([{', '.join(em.value(item) for item in items)}])", self)
