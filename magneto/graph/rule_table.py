"""How the rules_*.py files declare their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]
Register = Callable[..., Callable[[Rule], Rule]]


def rule_table() -> tuple[dict[str, Rule], Register]:
    """An empty table and a decorator that adds rows: `@rule("mm", "bmm.default")` registers "aten.mm" and "aten.bmm.default"."""
    rows: dict[str, Rule] = {}

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(fn: Rule) -> Rule:
            for name in names:
                rows[f"aten.{name}"] = fn
            return fn

        return register

    return rows, rule
