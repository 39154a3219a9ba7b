"""Rows of copy.copy and copy.deepcopy."""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.exception import ExceptionTracker
from magneto.dynamo.trackers.function import BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import ObjectTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_SHARED = (ConstTracker, FunctionTracker, BuiltinTracker, ClassTracker)


def _copies_plainly(m: Machine, v: Tracker, hook: str) -> bool:
    """An instance whose class leaves copying to object.__reduce_ex__ without state methods."""
    if not isinstance(v, ObjectTracker) or isinstance(v, (ModuleTracker, ExceptionTracker)) or v.payload is not None:
        return False
    cls = v.cls
    hooks = (hook, "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__reduce__")
    if any(isinstance(find_in_type(m, cls, name), types.FunctionType) for name in hooks):
        return False
    return (
        cls.__reduce_ex__ is object.__reduce_ex__  # type: ignore[comparison-overlap]
        and v.attrs(m) is not None
        and not any("__slots__" in base.__dict__ for base in cls.__mro__)
    )


@rule(copy.copy, Tracker)
def copy_(m: Machine, v: Tracker) -> Any:
    if isinstance(v, (*_SHARED, TupleTracker)):
        return v
    if isinstance(v, ListTracker):
        return ListTracker(v.items(m))
    if isinstance(v, SetTracker):
        return SetTracker.of(m, v.items(m), v.cls)
    if isinstance(v, DictTracker) and v.owner is v:
        made = DictTracker.of(m, v.pairs(m), v.cls)
        made.default_factory = v.default_factory
        return made
    method = _own_method(m, v, "__copy__")
    if method is not None:
        return m.call(method, [], {})
    if _copies_plainly(m, v, "__copy__"):
        assert isinstance(v, ObjectTracker)
        attrs = v.attrs(m)
        assert attrs is not None
        clone = ObjectTracker(v.cls)
        clone._attrs = DictTracker.of(m, attrs.pairs(m))
        return clone
    return NotImplemented


def _own_method(m: Machine, v: Tracker, name: str) -> Tracker | None:
    if not isinstance(v, ObjectTracker) or not isinstance(find_in_type(m, v.cls, name), types.FunctionType):
        return None
    return find_special(m, v, name)


@rule(copy.deepcopy, Tracker)
def deepcopy(m: Machine, v: Tracker, memo: Tracker | None = None) -> Any:
    if memo is not None and not (isinstance(memo, ConstTracker) and memo.read() is None):
        return NotImplemented
    return _deep(m, v, {})


def _deep(m: Machine, v: Tracker, memo: dict[int, Tracker]) -> Tracker:
    """deepcopy of one value; `memo` by tracker, so that aliases and cycles are kept."""
    if isinstance(v, _SHARED):
        return v
    found = memo.get(id(v))
    if found is not None:
        return found
    if isinstance(v, TupleTracker):
        made: Tracker = TupleTracker([_deep(m, item, memo) for item in v.items(m)], v.cls)
    elif isinstance(v, ListTracker):
        made = memo[id(v)] = ListTracker([])
        made.entries.extend(_deep(m, item, memo) for item in v.items(m))
    elif isinstance(v, SetTracker):
        made = SetTracker.of(m, [_deep(m, item, memo) for item in v.items(m)], v.cls)
    elif isinstance(v, DictTracker) and v.owner is v:
        copied = made = memo[id(v)] = DictTracker(None, v.cls)
        copied.default_factory = v.default_factory
        for key, value in v.pairs(m):
            copied.put(m, _deep(m, key, memo), _deep(m, value, memo))
    elif _copies_plainly(m, v, "__deepcopy__"):
        assert isinstance(v, ObjectTracker)
        clone = made = memo[id(v)] = ObjectTracker(v.cls)
        clone._attrs = DictTracker()
        attrs = v.attrs(m)
        assert attrs is not None
        for key, value in attrs.pairs(m):
            clone._attrs.put(m, key, _deep(m, value, memo))
    else:
        m.graph_break("B104", operation="copy.deepcopy", value=v.show())
    memo[id(v)] = made
    return made
