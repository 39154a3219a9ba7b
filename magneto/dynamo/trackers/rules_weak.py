"""Weak references made inside the region, as hooks' handles make them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.dispatch import rule

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class NewWeakRef(Tracker):
    """A weak reference to an object that existed before: the region's caller keeps that alive as long as the region runs."""

    __slots__ = ("of",)

    def __init__(self, of: Tracker) -> None:
        super().__init__()
        self.of = of

    def python_type(self) -> type:
        return weakref.ReferenceType

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        return None if args or kwargs else self.of

    def emit(self, em: Emitter) -> str:
        return em.assign("ref", f"{em.const(weakref.ref, 'weak_ref')}({em.value(self.of)})", self)

    def show(self) -> str:
        return f"weakref.ref({self.of.show()})"


@rule(weakref.ref, Tracker)
def ref(m: Machine, v: Tracker, *callback: Tracker) -> Any:
    """Without a callback an object has one reference, whoever asks."""
    if callback or v.source is None or getattr(v, "obj", MISSING) is MISSING or not v.python_type().__weakrefoffset__:
        m.graph_break("B101", callee="ReferenceType", reason="a weak reference to an object made here, or with a callback")
    return m.references.setdefault(v, NewWeakRef(v))
