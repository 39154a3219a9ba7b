"""operator.itemgetter, attrgetter and methodcaller."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.container import TupleTracker

if TYPE_CHECKING:
    from magneto.dynamo.guards.source import Source
    from magneto.dynamo.machine.protocol import Emitter, Machine


class GetterTracker(Tracker):
    """`kind(*args, **kwargs)`, where kind is one of the three classes."""

    __slots__ = ("args", "kind", "kwargs", "obj")

    def __init__(
        self, kind: type, args: Sequence[Tracker], kwargs: Mapping[str, Tracker], source: Source | None = None, obj: Any = MISSING
    ) -> None:
        super().__init__(source)
        self.kind = kind
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.obj = obj

    def python_type(self) -> type:
        return self.kind

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        (value,) = args
        if self.kind is operator.methodcaller:
            return m.call(m.apply(getattr, value, self.args[0]), self.args[1:], self.kwargs)
        found = [self._one(m, value, key) for key in self.args]
        return found[0] if len(found) == 1 else TupleTracker(found)

    def _one(self, m: Machine, value: Tracker, key: Tracker) -> Tracker:
        if self.kind is operator.itemgetter:
            return m.apply(operator.getitem, value, key)
        const = key.try_const()
        assert const is not None
        for name in const.value.split("."):
            value = m.apply(getattr, value, m.const(name))
        return value

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        parts = [em.value(arg) for arg in self.args] + [f"{name}={em.value(value)}" for name, value in self.kwargs.items()]
        return em.assign("getter", f"{em.const(self.kind, self.kind.__name__)}({', '.join(parts)})")
