"""types.MappingProxyType: a read-only view of a mapping, through which later changes of the mapping are seen."""

from __future__ import annotations

import operator
import types
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Part
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import apply, prefer, rule
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker

if TYPE_CHECKING:
    from magneto.dynamo.guards.source import Source
    from magneto.dynamo.machine.protocol import Emitter, Machine


class ReadOnlyTracker(Tracker):
    """A view of `mapping`."""

    __slots__ = ("mapping", "obj")
    exact_type = types.MappingProxyType

    def __init__(self, mapping: Tracker, source: Source | None = None, obj: Any = MISSING) -> None:
        super().__init__(source)
        self.mapping = mapping
        self.obj = obj

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        return em.assign("view", f"{em.const(types.MappingProxyType, 'MappingProxyType')}({em.value(self.mapping)})", self)


def wrap_view(m: Machine, obj: Any, source: Source) -> Tracker:
    if not isinstance(source, Held):
        m.guard(Kind.TYPE_IS, source, types.MappingProxyType)
    return ReadOnlyTracker(m.wrap(_C.iterator_part(obj, 0), Part(source, 0)), source, obj)


@rule(types.MappingProxyType, DictTracker)
def view(m: Machine, mapping: DictTracker) -> Tracker:
    return ReadOnlyTracker(mapping)


@prefer(getattr, DictViewTracker, ConstTracker)
def mapping_of_view(m: Machine, v: DictViewTracker, name: ConstTracker) -> Any:
    return ReadOnlyTracker(v.of.owner) if name.value == "mapping" else NotImplemented


def _method(name: str) -> None:
    @rule(vars(types.MappingProxyType)[name], ReadOnlyTracker)
    def body(m: Machine, v: ReadOnlyTracker, *args: Tracker) -> Tracker:
        return m.call(m.apply(getattr, v.mapping, m.const(name)), args, {})


for _name in ("get", "keys", "values", "items", "copy"):
    _method(_name)

_OPERATORS = {
    "__getitem__": operator.getitem,
    "__contains__": operator.contains,
    "__iter__": iter,
    "__len__": len,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__reversed__": reversed,
}


def _on_mapping(fn: Any, *kinds: type[Tracker]) -> None:
    @prefer(fn, *kinds)
    def body(m: Machine, *args: Tracker) -> Tracker:
        return apply(m, fn, [arg.mapping if isinstance(arg, ReadOnlyTracker) else arg for arg in args], {})


for _name, _fn in _OPERATORS.items():
    _on_mapping(_fn, ReadOnlyTracker)
    rule(vars(types.MappingProxyType)[_name], ReadOnlyTracker)(lambda m, v, *args, fn=_fn: apply(m, fn, [v, *args], {}))
for _fn in (operator.eq, operator.ne, operator.or_):
    _on_mapping(_fn, Tracker, ReadOnlyTracker)
_on_mapping(operator.or_, ReadOnlyTracker)


@prefer(operator.ior, ReadOnlyTracker, Tracker)
def no_update(m: Machine, v: ReadOnlyTracker, other: Tracker) -> Any:
    m.raise_exception(TypeError(f"'|=' is not supported by {types.MappingProxyType.__name__}; use '|' instead"))
