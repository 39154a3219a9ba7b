"""Rows of types.SimpleNamespace: attributes and nothing else; equal where these are, shown by them."""

from __future__ import annotations

import operator
import types
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import prefer, rule
from magneto.dynamo.trackers.object import ObjectTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_INIT: Any = vars(types.SimpleNamespace)["__init__"]


@rule(_INIT, ObjectTracker)
def init(m: Machine, v: ObjectTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    if args:
        return NotImplemented
    for name, value in kwargs.items():
        v.set_instance_attr(m, name, value, False)
    return None


def _by_attributes(v: ObjectTracker) -> bool:
    return issubclass(v.cls, types.SimpleNamespace) and v.cls.__eq__ is types.SimpleNamespace.__eq__  # type: ignore[comparison-overlap]


@prefer(operator.eq, ObjectTracker, ObjectTracker)
def eq(m: Machine, a: ObjectTracker, b: ObjectTracker) -> Any:
    if not (_by_attributes(a) and _by_attributes(b)):
        return NotImplemented
    one, two = a.attrs(m), b.attrs(m)
    assert one is not None and two is not None
    return m.apply(operator.eq, one, two)


@prefer(operator.ne, ObjectTracker, ObjectTracker)
def ne(m: Machine, a: ObjectTracker, b: ObjectTracker) -> Any:
    equal = eq(m, a, b)
    return equal if equal is NotImplemented else ConstTracker(not m.truth(equal))
