"""What a caller of the compiler says about replaying a graph on a GPU."""

from __future__ import annotations

from magneto.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Replay:
    """That a graph may be recorded and replayed. `results`: how many outputs at the front go to the user, who may keep them (None: all)."""

    results: int | None = None
