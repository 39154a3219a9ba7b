"""How many items an object of the program expects to give: what list(), tuple() and operator.length_hint ask of it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.dynamo.trackers.attributes import find_special, user_method
from magneto.dynamo.trackers.base import MISSING, Raised, Tracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.iterator import ReversedIterator, drain, iterate
from magneto.dynamo.trackers.object import ObjectTracker
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES, TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def expected(m: Machine, v: Tracker) -> list[Tracker]:
    """All items of an iterable, which is asked how many to expect, behind `iter`."""
    length, hint = [isinstance(v, ObjectTracker) and user_method(m, v, name) is not MISSING for name in ("__len__", "__length_hint__")]
    if isinstance(v, TensorTracker) and v.cls not in PLAIN_CLASSES:
        items = iterate(m, v)
        m.apply(len, v)  # a class with a `__torch_function__` hears it
        return items
    if not length and not hint:
        return iterate(m, v)
    iterator = m.apply(iter, v)
    m.apply(operator.length_hint, v)
    return drain(m, iterator, v)


@rule(operator.length_hint, ReversedIterator)
def left(m: Machine, v: ReversedIterator, default: Tracker | None = None) -> Any:
    try:
        return v.left(m)
    except Raised as raised:
        if not raised.matches(TypeError):
            raise
        return default or m.const(0)


@rule(operator.length_hint, ObjectTracker)
def length_hint(m: Machine, v: ObjectTracker, default: Tracker | None = None) -> Any:
    default = default or m.const(0)
    try:
        if hasattr(v.cls, "__len__"):
            return m.apply(len, v)
    except Raised as raised:
        if not raised.matches(TypeError):
            raise
    if user_method(m, v, "__length_hint__") in (MISSING, None):
        return default
    method = find_special(m, v, "__length_hint__")
    try:
        result = m.call(method, [], {}) if method is not None else m.const(NotImplemented)
    except Raised as raised:
        if not raised.matches(TypeError):
            raise
        return default
    const = result.try_const()
    if const is None:
        m.graph_break("B104", operation="use as a length", value=result.show())
    if const.value is NotImplemented:
        return default
    if not isinstance(const.value, int):
        m.raise_exception(TypeError(f"__length_hint__ must be an integer, not {_C.type_name(type(const.value))}"))
    if const.value < 0:
        m.raise_exception(ValueError("__length_hint__() should return >= 0"))
    return result
