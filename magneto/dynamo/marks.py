"""Marks that a user or a library puts on functions: left out of capture, taken as one graph node, constant.

Marks are attributes where the object allows it and identities otherwise (C functions). Attributes that libraries already set for the incumbent
(`torch.compiler.disable`, `allow_in_graph` ...) are honoured without importing it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_BY_ID: dict[int, tuple[Any, str]] = {}
_ATTRIBUTE = "_magneto_mark"
DISABLE, ALLOW, DISALLOW, CONSTANT = "disable", "allow", "disallow", "constant"


def mark(fn: Callable[..., Any], kind: str) -> None:
    """Put a mark on a callable (the last one counts)."""
    try:
        setattr(fn, _ATTRIBUTE, kind)
    except (AttributeError, TypeError):
        _BY_ID[id(fn)] = (fn, kind)


def mark_of(fn: Any) -> str | None:
    """The mark of a callable: disable | allow | disallow | constant | None."""
    found = _BY_ID.get(id(fn))
    if found is not None and found[0] is fn:
        return found[1]
    kind = getattr(fn, "__dict__", {}).get(_ATTRIBUTE)
    if kind is not None:
        return str(kind)
    if getattr(fn, "__dict__", {}).get("_torchdynamo_disable"):
        return DISABLE
    return None


def forget() -> None:
    """Remove the marks that are kept by identity (for `reset`)."""
    _BY_ID.clear()


class Capturing(threading.local):
    """Whether this thread is capturing: what `is_compiling()`, called at capture as a constant, answers."""

    active = False


capturing = Capturing()
