"""Sets from outside that hold objects, such as the `memo` of a generator in whose middle a region starts. They are asked for single elements:
a guard says of one object that it is, or is not, in the set, so that a region fits whatever else is in there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, Source
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.keys import Identity
from magneto.dynamo.trackers.mapping import key_token
from magneto.dynamo.trackers.object import OpaqueTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


class ObjectSet(OpaqueTracker):
    """A set or frozenset. `changed`: what the region has added (True) or removed; `asked`: the objects from outside that came up. If the region changes the set,
    these have to be different objects at each call."""

    __slots__ = ("asked", "changed", "memory")

    def __init__(self, obj: Any, source: Source, m: Machine) -> None:
        super().__init__(obj, source, m)
        self.changed: dict[Identity, bool] = {}
        self.asked: dict[Identity, Tracker] = {}
        self.memory: set[int] = set()

    def token(self, m: Machine, operation: str, item: Tracker) -> Identity:
        """Breaks for what does not hash by its address."""
        token = key_token(m, item)
        if type(token) is not Identity:
            m.graph_break("B104", operation=operation, value=self.show())
        if item.source is not None and not isinstance(item.source, Held) and item.obj is not MISSING and token not in self.asked:
            self.asked[token] = item
            if isinstance(item.obj, torch.Tensor):
                self._is_apart(m, operation, item.obj)
        return token

    def _is_apart(self, m: Machine, operation: str, tensor: torch.Tensor) -> None:
        """Tensors with one memory are never "different" for a guard."""
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # sparse, or of a wrapper class
            address = -1
        if address in self.memory or address < 0:
            m.graph_break("B104", operation=operation, value=self.show())
        if address:
            self.memory.add(address)

    def has(self, m: Machine, item: Tracker) -> bool:
        token = self.token(m, "in", item)
        inside = self.changed.get(token)
        if inside is not None or item.obj is MISSING:
            return bool(inside)
        inside = any(element is item.obj for element in self.obj)
        assert self.source is not None
        where = item.source if item.source is not None else Held(type(item.obj).__name__, item.obj)
        m.guard(Kind.MEMBER if inside else Kind.NOT_MEMBER, self.source, where)
        return inside

    def change(self, m: Machine, method: str, item: Tracker) -> None:
        """add or discard."""
        self.changed[self.token(m, f"{method}()", item)] = method == "add"
        m.changes += 1
        m.effect(f"set.{method}({{0}}, {{1}})", self, item)

    def different(self) -> list[Tracker]:
        """The objects that must be different ones."""
        return list(self.asked.values()) if self.changed and len(self.asked) > 1 else []
