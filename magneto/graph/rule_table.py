"""How the rules_*.py files declare their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Rule = Callable[..., Any]
R = TypeVar("R", bound=Callable[..., Any])


class Register(Protocol):
    """`@rule(names)`: the decorated function stays what it is."""

    def __call__(self, *names: str) -> Callable[[R], R]: ...


def rule_table() -> tuple[dict[str, Rule], Register]:
    """An empty table and a decorator that adds rows: `@rule("mm", "bmm.default")` registers "aten.mm" and "aten.bmm.default"."""
    rows: dict[str, Rule] = {}

    def rule(*names: str) -> Callable[[R], R]:
        def register(fn: R) -> R:
            for name in names:
                rows[f"aten.{name}"] = fn
            return fn

        return register

    return rows, rule
