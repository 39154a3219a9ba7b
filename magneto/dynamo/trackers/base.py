"""Tracker: what capture knows of one Python value. One subclass per kind of value, one file per kind.

Rules for all trackers:
- `source` is set when the value exists outside the region (frame slot, attribute of such a value ...); values made inside the region have none.
- A tracker is shared by identity: one Python object is one tracker (the machine's `wrap` memoises by id), so aliasing is kept.
- Trackers of mutable containers are mutable; a change to a value with a source is also logged as an Effect and replayed by the generated code, in order.
- A tracker reads the real object only under guards: what was read is guarded (`machine.guard(row)`), what nobody read is not.
- `emit` gives the expression by which generated region code rebuilds the value; the emitter memoises, so identity and cycles are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.source import Source

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter


@dataclass(frozen=True, slots=True)
class Const:
    """A constant that capture knows completely (`try_const` returns it, or None)."""

    value: Any


class Tracker:
    """Base class. `obj` is the real object for values that exist outside, else absent."""

    __slots__ = ("source",)
    source: Source | None

    def __init__(self, source: Source | None = None) -> None:
        self.source = source

    def python_type(self) -> type:
        """The exact type of the value (the machine has guarded it)."""
        raise NotImplementedError

    def try_const(self) -> Const | None:
        """The value, when it is an immutable constant known completely."""
        return None

    def emit(self, em: Emitter) -> str:
        """Expression text in region code. Called through `em.value(tracker)`, which memoises."""
        if self.source is not None:
            return em.source(self.source)
        raise NotImplementedError(type(self).__name__)

    def show(self) -> str:
        """Short text for break reasons and logs."""
        return f"{type(self).__name__}({self.source.text() if self.source else ''})"

    def __repr__(self) -> str:
        return self.show()


class CannotEmit(Exception):
    """A value that cannot be rebuilt outside the region; capture starts again and breaks at the instruction that made it (`tracker.born`)."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(tracker.show())
        self.tracker = tracker
