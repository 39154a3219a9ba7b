"""bytearray: its contents are known, so that its methods run on a copy; changes to an existing one are replayed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Source
from magneto.dynamo.trackers.base import MISSING, CannotEmit, Tracker
from magneto.dynamo.trackers.basic_iterator import IteratorTracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import prefer, rule
from magneto.dynamo.trackers.plain import plain_all

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class BytearrayTracker(Tracker):
    """`copy` has the contents at this point of the program; those of an existing bytearray are guarded when somebody looks."""

    __slots__ = ("_machine", "copy", "obj")
    exact_type = bytearray

    def __init__(self, copy: bytearray, source: Source | None = None, obj: Any = MISSING, machine: Machine | None = None) -> None:
        super().__init__(source)
        self.copy = copy
        self.obj = obj
        self._machine = machine

    def known(self) -> bytearray:
        """The contents, guarded."""
        if self._machine is not None:
            machine, self._machine = self._machine, None
            machine.guard(Kind.EQUALS, self.source, bytearray(self.obj))
        return self.copy

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        return em.assign("data", f"bytearray({bytes(self.copy)!r})", self)


class BytearrayIterator(IteratorTracker):
    """Sees what changes while it runs."""

    __slots__ = ("born", "index", "of")
    exact_type = type(iter(bytearray()))

    def __init__(self, m: Machine, of: BytearrayTracker) -> None:
        super().__init__()
        self.of: BytearrayTracker | None = of
        self.index = 0
        self.born: int | None = m.count  # type: ignore[attr-defined]

    def step(self, m: Machine) -> Tracker | None:
        if self.of is None:
            return None
        data = self.of.known()
        if self.index >= len(data):
            self.of = None
            return None
        self.index += 1
        return m.const(data[self.index - 1])

    def emit(self, em: Emitter) -> str:
        if self.of is None:
            name = em.assign("it", "iter(bytearray())", self)
            em.line(f"next({name}, None)")
            return name
        if self.index > len(self.of.known()):  # __setstate__ would put it at the end
            raise CannotEmit(self)
        name = em.assign("it", f"iter({em.value(self.of)})", self)
        if self.index:
            em.line(f"{name}.__setstate__({self.index})")
        return name


_LOOK = (
    *(getattr(operator, name) for name in "getitem add mul mod eq ne lt le gt ge".split()),
    *(operator.contains, len, bytes, bytearray, str, repr, list, tuple, bool, operator.not_, operator.truth, sum, min, max, sorted, hash),
)
_CHANGE = {operator.setitem: "__setitem__", operator.delitem: "__delitem__", operator.iadd: "__iadd__", operator.imul: "__imul__"}
_CHANGING = ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "__setitem__", "__delitem__", "__iadd__", "__imul__")


def _compute(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    real = plain_all(m, [ConstTracker(v.known()) if isinstance(v, BytearrayTracker) else v for v in args], kwargs)
    if real is None:
        m.graph_break("B104", operation=fn.__name__, value="a bytearray")
    try:
        return fn(*real[0], **real[1])
    except Exception as error:
        m.raise_exception(error)


def _tracked(m: Machine, value: Any) -> Tracker:
    return BytearrayTracker(value) if isinstance(value, bytearray) else m.const(value)


def _looking(fn: Any, kinds: tuple[type[Tracker], ...]) -> None:
    @prefer(fn, *kinds)
    def body(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
        return _tracked(m, _compute(m, fn, args, kwargs))


def _changing(fn: Any, method: str) -> None:
    @prefer(fn, BytearrayTracker)
    def body(m: Machine, v: BytearrayTracker, /, *args: Tracker) -> Any:
        result = _compute(m, getattr(bytearray, method), (v, *args), {})
        if v.source is not None:
            m.effect(f"bytearray.{method}({{0}}{''.join(f', {{{i}}}' for i in range(1, len(args) + 1))})", v, *args)
        return v if method in ("__iadd__", "__imul__") else _tracked(m, result)


_fn: Any
for _fn in _LOOK:
    _looking(_fn, (BytearrayTracker,))
for _fn in (operator.add, operator.contains, operator.eq):
    _looking(_fn, (Tracker, BytearrayTracker))
for _fn, _method in _CHANGE.items():
    _changing(_fn, _method)
for _name, _raw in vars(bytearray).items():
    if _name in _CHANGING:
        _changing(_raw, _name)
    elif callable(_raw) and not _name.startswith("__"):
        _looking(_raw, (BytearrayTracker,))


@prefer(bytearray)
def make(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    return BytearrayTracker(_compute(m, bytearray, args, kwargs))


@prefer(iter, BytearrayTracker)
def iterator(m: Machine, v: BytearrayTracker) -> Any:
    return BytearrayIterator(m, v)


@rule(memoryview, ConstTracker)
def view(m: Machine, v: ConstTracker) -> Any:
    """Of bytes: it never changes."""
    return ConstTracker(memoryview(v.read())) if type(v.value) is bytes else NotImplemented
