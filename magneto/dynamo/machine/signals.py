"""Control signals inside the machine. None of them ever leaves capture."""

from __future__ import annotations

from magneto.base.dataclass import dataclass
from magneto.base.errors import GraphBreak
from magneto.dynamo.trackers.base import Raised, Signal, Tracker


class CapturedRaise(Raised):
    """The traced program raised `value`; `count` is the instruction that did."""

    def __init__(self, value: Tracker, count: int, exc: BaseException | None = None) -> None:
        super().__init__(value, exc)
        self.count = count


class Restart(Signal):
    """Capture starts again; at instruction `count` it breaks for `reason`; `interpret`: CPython runs the rest from that instruction on."""

    def __init__(self, count: int, reason: GraphBreak | None, interpret: bool) -> None:
        super().__init__(count)
        self.count = count
        self.reason = reason
        self.interpret = interpret


class RegionEnd(Signal):
    """Capture is complete: the machine's `ending` says how."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A break decided by an earlier attempt at the same region."""

    reason: GraphBreak | None
    interpret: bool


@dataclass(slots=True)
class Ending:
    """How a region ends. `value` for a return; otherwise `reason` (None: an uncaught exception of the program) and `interpret`. `suspends`: the frame is a
    generator's, and stands at its next yield or at its return, which CPython executes."""

    value: Tracker | None = None
    reason: GraphBreak | None = None
    interpret: bool = False
    suspends: bool = False
