"""Callables that switch the hook: `_C.Optimized` and `_C.Disabled` objects met while capturing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Source
from magneto.dynamo.marks import DISABLE, mark_of
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import held
from magneto.dynamo.trackers.marked import MarkedTracker
from magneto.dynamo.trackers.module import ModuleTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class OptimizedTracker(Tracker):
    """An optimised callable inside an optimised region: part of the region where both were asked for the same, otherwise called between two graphs."""

    __slots__ = ("inner", "joined", "obj")

    def __init__(self, obj: Any, source: Source, inner: Tracker | None) -> None:
        super().__init__(source)
        self.obj = obj
        self.inner = inner  # what a call runs as part of this region; None: a region of its own

    def python_type(self) -> type:
        return type(self.obj)

    def resolve_call(self, m: Machine) -> tuple[FunctionTracker, list[Tracker]] | None:
        inner = self.inner
        if isinstance(inner, BoundMethodTracker) and isinstance(inner.fn, BuiltinTracker) and isinstance(inner.owner, ModuleTracker):
            return inner.owner.resolve_call(m)  # nn.Module.__call__, bound
        resolve = getattr(inner, "resolve_call", None)
        return resolve(m) if resolve is not None else None

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        if self.inner is None:
            m.graph_break("B101", callee=self.show(), reason="it is optimised on its own, by another backend or under other conditions")
        return m.call(self.inner, args, kwargs)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        value = getattr(self.obj, name, MISSING)
        return None if value is MISSING or name == "__class__" else held(m, value, f"{self.show()}.{name}")

    def emit(self, em: Emitter) -> str:
        return em.const(self.obj, "optimised")

    def show(self) -> str:
        return f"optimised {getattr(self.obj, '__qualname__', None) or self.obj.fn!r}"


def wrap_optimized(m: Machine, obj: Any, source: Source) -> Tracker:
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)
    joined = m.joins(obj.policy)
    return OptimizedTracker(obj, source, held(m, obj.fn, "fn") if joined else None)


def wrap_disabled(m: Machine, obj: Any, source: Source) -> Tracker:
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)
    return MarkedTracker(obj, mark_of(obj) or DISABLE, source)
