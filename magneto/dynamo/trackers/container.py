"""Sequences, slices and ranges as values: TupleTracker, ListTracker, DequeTracker, SliceTracker. Dictionaries and sets are in mapping.py.

The items of an existing container are `Later` entries until they are read, so that only what the program looked at is guarded. An existing container's
type is guarded when it is wrapped, its length when anything but an item at a given position is asked.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Item, Source
from magneto.dynamo.trackers.base import MISSING, Const, Entry, Later, Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_constant

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class SequenceTracker(Tracker):
    """Base of tuples, lists and deques. `cls` is the exact type."""

    __slots__ = ("_machine", "_sized", "_started", "cls", "entries", "obj")

    def __init__(
        self, items: Sequence[Entry], cls: type, source: Source | None = None, obj: Any = MISSING, machine: Machine | None = None
    ) -> None:
        super().__init__(source)
        self.entries: list[Entry] = list(items)
        self.cls = cls
        self.obj = obj
        self._machine = machine
        self._sized = machine is None
        self._started = len(self.entries)  # of an existing sequence: its length when the region starts

    def python_type(self) -> type:
        return self.cls

    def sized(self) -> None:
        """Somebody learnt the length."""
        if not self._sized:
            self._sized = True
            self._machine.guard(Kind.LENGTH, self.source, self._started)  # type: ignore[union-attr]

    def length(self) -> int:
        self.sized()
        return len(self.entries)

    def item(self, m: Machine, index: int) -> Tracker:
        """Item at a position; the caller has checked the bounds with `length`, or the index is a non-negative one within the entries."""
        if not 0 <= index < self._started:
            self.sized()
        entry = self.entries[index]
        if type(entry) is Later:
            entry = self.entries[index] = entry.read(m)
        return entry  # type: ignore[return-value]

    def items(self, m: Machine) -> list[Tracker]:
        """All items, read."""
        self.sized()
        entries = self.entries
        for index, entry in enumerate(entries):
            if type(entry) is Later:
                entries[index] = entry.read(m)
        return list(entries)  # type: ignore[arg-type]

    def log(self, m: Machine, method: str, *operands: Tracker) -> None:
        """Log the call of a method that changes an existing sequence, past overrides of a subclass."""
        m.changes += 1
        if self.source is None:
            return
        places = [f"{{{i}}}" for i in range(1, len(operands) + 1)]
        if type(self.obj) is self.cls:
            m.effect(f"{{0}}.{method}({', '.join(places)})", self, *operands)
        else:
            m.effect(f"{self.cls.__name__}.{method}({', '.join(['{0}', *places])})", self, *operands)

    def _parts(self, em: Emitter) -> list[str]:
        return [em.source(e.source) if isinstance(e, Later) else em.value(e) for e in self.entries]

    def show(self) -> str:
        return f"{self.cls.__name__}[{len(self.entries)}]({self.source.text() if self.source else ''})"


class TupleTracker(SequenceTracker):
    """tuple, torch.Size, named tuples (`cls`)."""

    __slots__ = ()

    def __init__(
        self, items: Sequence[Entry], cls: type = tuple, source: Source | None = None, obj: Any = MISSING, machine: Machine | None = None
    ) -> None:
        super().__init__(items, cls, source, obj, machine)

    def try_const(self) -> Const | None:
        if self.cls is not tuple and self.cls is not torch.Size:
            return None
        values = []
        for index, entry in enumerate(self.entries):
            if type(entry) is Later:
                if not is_constant(entry.obj):
                    return None
                entry = self.entries[index] = entry.read(self._machine)  # type: ignore[arg-type]
            const = entry.try_const()  # type: ignore[union-attr]
            if const is None:
                return None
            values.append(const.value)
        self.sized()
        return Const(tuple(values) if self.cls is tuple else torch.Size(values))

    def emit(self, em: Emitter) -> str:
        if isinstance(self.source, Held):
            return em.held(self.source.obj)
        if self.source is not None:
            return em.source(self.source)
        parts = self._parts(em)
        text = "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"
        if self.cls is tuple:
            if parts and all(isinstance(entry, ConstTracker) for entry in self.entries):
                text = (
                    f"tuple([{', '.join(parts)}])"  # what the program makes is another object at each call, a display of constants is not
                )
            return em.assign("t", text) if parts else "()"
        if self.cls is torch.Size:
            return em.assign("size", f"{em.const(torch.Size, 'Size')}({text})")
        if hasattr(self.cls, "_fields") and self.cls.__new__ is not tuple.__new__:  # type: ignore[comparison-overlap]
            return em.assign("t", f"{em.const(tuple.__new__, 'tuple_new')}({em.borrowed(self.cls, self.cls.__name__)}, {text})")
        return em.assign("t", f"{em.borrowed(self.cls, self.cls.__name__)}({text})")


_WRITTEN_BY_NAMEDTUPLE = frozenset(vars(collections.namedtuple("Probe", "field")))  # noqa: PYI024


def is_bare_tuple(cls: type[tuple[Any, ...]]) -> bool:
    """Whether instances of a Python subclass of tuple are their items only: no dictionary, and no special method but those that every named tuple has."""
    own = [name for base in cls.__mro__[: cls.__mro__.index(tuple)] for name in vars(base) if name not in _WRITTEN_BY_NAMEDTUPLE]
    return not cls.__dictoffset__ and not any(name.startswith("__") and isinstance(getattr(cls, name), types.FunctionType) for name in own)


def NamedTupleTracker(cls: type, items: Sequence[Entry]) -> TupleTracker:
    """A named tuple or a torch.return_types structure."""
    return TupleTracker(items, cls)


class ListTracker(SequenceTracker):
    """list. Changes to an existing list are logged as effects by the rules that make them."""

    __slots__ = ()

    def __init__(
        self, items: Sequence[Entry], cls: type = list, source: Source | None = None, obj: Any = MISSING, machine: Machine | None = None
    ) -> None:
        super().__init__(items, cls, source, obj, machine)

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        name = em.assign("items", "[]", self)
        if self.entries:
            em.line(f"{name}.extend([{', '.join(self._parts(em))}])")
        return name


class DequeTracker(SequenceTracker):
    """collections.deque without a maximal length, or with one that the operation does not reach."""

    __slots__ = ("maxlen", "turns")

    def __init__(
        self, items: Sequence[Entry], maxlen: int | None = None, source: Source | None = None, obj: Any = MISSING, machine: Machine | None = None,
    ) -> None:  # fmt: skip
        super().__init__(items, collections.deque, source, obj, machine)
        self.maxlen = maxlen
        self.turns = 0  # changes that its iterators notice

    def log(self, m: Machine, method: str, *operands: Tracker) -> None:
        self.turns += method not in ("reverse", "__setitem__") and not (method == "rotate" and len(self.entries) < 2)
        super().log(m, method, *operands)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        return m.const(self.maxlen) if name == "maxlen" else None

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        name = em.assign("queue", f"{em.const(collections.deque, 'deque')}((), {self.maxlen!r})", self)
        em.line(f"{name}.extend([{', '.join(self._parts(em))}])")
        return name


class SliceTracker(Tracker):
    """slice whose parts may be trackers of anything."""

    __slots__ = ("start", "step", "stop")
    exact_type = slice

    def __init__(self, start: Tracker, stop: Tracker, step: Tracker, source: Source | None = None) -> None:
        super().__init__(source)
        self.start, self.stop, self.step = start, stop, step

    def parts(self) -> tuple[Tracker, Tracker, Tracker]:
        return (self.start, self.stop, self.step)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        return {"start": self.start, "stop": self.stop, "step": self.step}.get(name)

    def try_const(self) -> Const | None:
        consts = [part.try_const() for part in self.parts()]
        if any(const is None for const in consts):
            return None
        return Const(slice(*(const.value for const in consts if const is not None)))

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        return f"slice({', '.join(em.value(part) for part in self.parts())})"

    def show(self) -> str:
        return f"slice({', '.join(part.show() for part in self.parts())})"


def later_items(obj: Sequence[Any], source: Source) -> list[Entry]:
    """Unread entries of an existing sequence."""
    return [Later(item, Item(source, index)) for index, item in enumerate(obj)]
