"""The three kinds of exception, each message a row of the catalogue; warnings said once.

GraphBreak: a construct is not captured; the machine turns it into a resume, and under nopython the user sees it.
UserError: the user asked for something that does not exist or cannot be. InternalError: an invariant of ours does not hold.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any

from magneto.base import events
from magneto.base.catalogue import CATALOGUE, ErrorEntry

__all__ = [
    "CATALOGUE", "ErrorEntry", "GraphBreak", "InternalError", "MagnetoError", "MagnetoWarning", "Unsupported", "UserError", "UserStack",
    "format_stack", "message_of", "warn_once",
]  # fmt: skip

UserStack = Sequence[tuple[str, int, str]]
"""(file, line, function) of the user's frames, outermost first, as in ``node.meta["stack"]``."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class _Fields(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return f"<{name}>"  # a forgotten field must not hide the message it belongs to


def message_of(id: str, fields: dict[str, Any]) -> str:
    """The message of one row, filled in; an id without a row still gives its fields."""
    entry = CATALOGUE.get(id)
    if entry is None:
        return ", ".join(f"{name}={value!r}" for name, value in fields.items()) or "no catalogue entry"
    try:
        return entry.template.format_map(_Fields(fields))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return f"{entry.template} with {fields!r} ({error})"


def format_stack(stack: UserStack) -> str:
    """The user's stack as Python prints it, innermost frame last, with source lines where they can be read."""
    lines = []
    for file, line, function in stack:
        lines.append(f'  File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


class MagnetoError(Exception):
    """Base of all exceptions of magneto: `.id`, `.fields`, `.reason` (the message alone), `.hint`."""

    def __init__(self, id: str, /, **fields: Any) -> None:
        self.id = id
        self.fields = fields
        self.reason = message_of(id, fields)
        super().__init__(id, fields)

    @property
    def entry(self) -> ErrorEntry:
        return CATALOGUE.get(self.id) or ErrorEntry(self.id, self.reason)

    @property
    def hint(self) -> str:
        return self.entry.hint

    def __str__(self) -> str:
        return f"[{self.id}] {self.reason}" + (f"\n  hint: {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.id, self.fields, dict(self.__dict__)))


def _rebuild(cls: type[MagnetoError], id: str, fields: dict[str, Any], state: dict[str, Any]) -> MagnetoError:
    error = cls.__new__(cls)
    Exception.__init__(error, id, fields)
    error.__dict__.update(state)
    return error


class GraphBreak(MagnetoError):
    """A construct at `user_stack` (innermost last) that is not captured."""

    def __init__(self, id: str, user_stack: UserStack = (), /, **fields: Any) -> None:
        super().__init__(id, **fields)
        self.user_stack: tuple[tuple[str, int, str], ...] = tuple(user_stack)
        self.asks_history = False  # behind it the program asks autograd about what the region computes on the way to other results

    @property
    def where(self) -> str:
        """``file:line in function`` of the innermost user frame, or an empty string."""
        if not self.user_stack:
            return ""
        file, line, function = self.user_stack[-1]
        return f"{file}:{line} in {function}"

    def __str__(self) -> str:
        parts = [f"[{self.id}] {self.reason}"]
        if self.user_stack:
            parts.append(format_stack(self.user_stack))
        if self.hint:
            parts.append(f"  hint: {self.hint}")
        return "\n".join(parts)


Unsupported = GraphBreak
"""The name under which users of nopython=True catch it."""


class UserError(MagnetoError):
    """A mistake in how magneto is called."""


class InternalError(MagnetoError):
    """A defect of magneto."""


class MagnetoWarning(UserWarning):
    """Category of every warning of magneto; `.id` is its catalogue row."""

    def __init__(self, text: str, id: str = "") -> None:
        super().__init__(text)
        self.id = id


_said: set[tuple[str, str]] = set()
_said_lock = threading.RLock()


def warn_once(id: str, /, **fields: Any) -> None:
    """Warn at the user's line, once per process for each different message; always recorded as an event."""
    message = message_of(id, fields)
    events.emit("warning", id=id, message=message, fields=fields)
    with _said_lock:
        if (id, message) in _said:
            return
        _said.add((id, message))
    entry = CATALOGUE.get(id)
    hint = f" ({entry.hint})" if entry is not None and entry.hint else ""
    warnings.warn(MagnetoWarning(f"[{id}] {message}{hint}", id), stacklevel=_level_of_user())


def forget_warnings() -> None:
    """Say everything again (for tests and `reset()`)."""
    with _said_lock:
        _said.clear()


def _level_of_user() -> int:
    """`stacklevel` of the first frame outside this package and outside generated code, for a warn() call in warn_once."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and not file.startswith("<magneto"):
            return level
        level, frame = level + 1, frame.f_back
    return level
