"""Both halves of a guard set at once: the native program and its Python text must say the same, in the precise and in the fast way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magneto import _C
from magneto.dynamo.guards.native import build_guards
from magneto.dynamo.guards.reading import Frame
from magneto.dynamo.guards.rows import GuardSet, Kind, Row
from magneto.dynamo.guards.source import Source
from magneto.dynamo.guards.text import HOLD, check_function

UNBOUND = _C.UNBOUND


def guard_set(*rows: Row | tuple[Any, ...]) -> GuardSet:
    guards = GuardSet()
    for row in rows:
        guards.add(row if isinstance(row, Row) else Row(*row))
    return guards


class Both:
    """`holds(...)` asks the text once and the program three times (the second time a recording may be used)."""

    def __init__(self, *rows: Row | tuple[Any, ...], exports: Sequence[Source] = (), packed: Sequence[Source] = ()) -> None:
        self.guards = guard_set(*rows)
        self.program = build_guards(self.guards, exports, None, packed)
        self.text = check_function(self.guards)

    def holds(self, *locals: Any, stack: tuple[Any, ...] = (), globals: dict[str, Any] | None = None) -> bool:
        frame = Frame(locals, stack, globals, UNBOUND)
        expected = self.text(frame)
        for _ in range(3):
            hit = self.program.check(locals, stack, globals, None, None, UNBOUND)
            assert hit is (expected == HOLD), (hit, expected, self.program.failed_row, self.program.fast)
        return expected == HOLD

    def fast(self) -> list[str]:
        """Operations that are left for each call."""
        return [operation for operation, *_ in self.program.fast]


def holds(row: tuple[Any, ...], *locals: Any, **state: Any) -> bool:
    return Both(row).holds(*locals, **state)


__all__ = ["UNBOUND", "Both", "Kind", "Row", "guard_set", "holds"]
