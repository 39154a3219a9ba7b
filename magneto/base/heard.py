"""Warnings that torch gives while the compiler asks it something in the program's stead: kept from the user, or given in the program's own name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from magneto.base.errors import MagnetoWarning

_lock = threading.Lock()
_takers = threading.local()
_count = 0
_shows: Any = None  # what shows warnings while they are taken


@contextmanager
def taken(into: list[warnings.WarningMessage]) -> Iterator[None]:
    """What is warned in this thread goes `into` a list, where filters let it through; but our own warnings. (`catch_warnings` would have all be shown again that have been shown.)"""
    global _count, _shows
    stack = _takers.__dict__.setdefault("stack", [])
    with _lock:
        if not _count:
            _shows, warnings._showwarnmsg = warnings._showwarnmsg, _take  # type: ignore[attr-defined]
        _count += 1
    stack.append(into)
    try:
        yield
    finally:
        stack.pop()
        with _lock:
            _count -= 1
            if not _count and warnings._showwarnmsg is _take:  # type: ignore[attr-defined]
                warnings._showwarnmsg = _shows  # type: ignore[attr-defined]


def _take(message: warnings.WarningMessage) -> None:
    stack = _takers.__dict__.get("stack")
    if stack and not issubclass(message.category, MagnetoWarning):
        stack[-1].append(message)
    else:
        _shows(message)
