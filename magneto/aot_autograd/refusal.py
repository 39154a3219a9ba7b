"""Why a graph is not compiled as a whole: a named refusal, after which its operations run as in eager."""

from __future__ import annotations

from magneto.base.errors import InternalError


class Refusal(InternalError):
    """`reason` in words, lower case, without a full stop. Never reaches the user unless the flag `suppress_errors` is off."""

    def __init__(self, reason: str) -> None:
        super().__init__("I202", reason=reason)
        self.reason = reason


class OtherGraph(Refusal):
    """Of a sample of a family. `lengths`: how many nodes the first sample's graph has, and how many this one's."""

    def __init__(self, reason: str, lengths: tuple[int, int]) -> None:
        super().__init__(reason)
        self.lengths = lengths
