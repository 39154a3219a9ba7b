"""Marks that a user or a library puts on functions: left out of capture, taken as one graph node, constant.

Marks are attributes where the object allows it and identities otherwise (C functions). An attribute names the object it was put on, because
`functools.wraps` copies attributes to wrappers. What other libraries leave on functions for the incumbent (`torch.compiler.disable`, `allow_in_graph` ...) is
honoured without importing it; only attributes and loaded modules are looked at.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

_BY_ID: dict[int, tuple[Any, str]] = {}
_ATTRIBUTE = "_magneto_mark"
DISABLE, SKIP, ALLOW, DISALLOW, CONSTANT, BREAK, FRAME = "disable", "skip", "allow", "disallow", "constant", "break", "frame"
"""Never captured, nor what it calls | not captured itself | one node | called between two graphs | called once | ends the graph | must be called by the
program's own frame, whose rest is interpreted."""


def mark(fn: Callable[..., Any], kind: str) -> None:
    """Put a mark on a callable (the last one counts)."""
    try:
        setattr(fn, _ATTRIBUTE, (kind, id(fn)))
    except (AttributeError, TypeError):
        _BY_ID[id(fn)] = (fn, kind)


def mark_of(fn: Any) -> str | None:
    """The mark of a callable, None without one."""
    found = _BY_ID.get(id(fn))
    if found is not None and found[0] is fn:
        return found[1]
    names = getattr(fn, "__dict__", None)
    own = names.get(_ATTRIBUTE) if names else None
    if own is not None and own[1] == id(fn):
        return str(own[0])
    return _foreign_mark(fn, names or {})


def _foreign_mark(fn: Any, names: Any) -> str | None:
    """What torch's own compiler left on a function; functions that it has compiled are not looked into."""
    if "_torchdynamo_orig_callable" in names and names.get("_torchdynamo_wrapper_id", id(fn)) == id(fn):
        whole = not names.get("_torchdynamo_disable") or names.get("_torchdynamo_disable_recursive", True)
        if whole:
            return DISABLE
        inner = names["_torchdynamo_orig_callable"]
        _BY_ID[id(inner)] = (inner, SKIP)  # the wrapper calls it
        return SKIP
    if names.get("_torchdynamo_disable") and "_torchdynamo_orig_callable" not in names:
        return DISABLE
    if names.get("_dynamo_marked_constant"):
        return CONSTANT
    if names.get("_dynamo_forbidden"):
        return DISALLOW
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and type(fn) is types.FunctionType:
        allowed = getattr(rules, "is_callable_allowed", None)
        return ALLOW if allowed is not None and allowed(fn) else None
    return None


def forget() -> None:
    """Remove the marks that are kept by identity."""
    _BY_ID.clear()


class Capturing(threading.local):
    """Whether this thread is capturing: what `is_compiling()`, called at capture as a constant, answers."""

    active = False


capturing = Capturing()
