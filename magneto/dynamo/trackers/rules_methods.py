"""Rows of the containers' methods reached as special methods (`dict.__getitem__`) or through an instance of a subclass."""

from __future__ import annotations

import collections
import operator
import types
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.dispatch import apply, pure, rule
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker
from magneto.dynamo.trackers.object import ObjectTracker, payload_of
from magneto.dynamo.trackers.rules_set import isdisjoint

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

ODict = collections.OrderedDict

_SPECIAL = {
    "__getitem__": operator.getitem, "__setitem__": operator.setitem, "__delitem__": operator.delitem, "__contains__": operator.contains,
    "__iter__": iter, "__len__": len, "__eq__": operator.eq, "__ne__": operator.ne, "__add__": operator.add, "__or__": operator.or_,
    "__ior__": operator.ior, "__iadd__": operator.iadd,
}  # fmt: skip


_COPIES = {cls.copy for cls in (ODict, collections.defaultdict, collections.deque, set, frozenset)}  # type: ignore[attr-defined]


def _through(fn: Any, target: Any) -> None:
    """Calls of a container's C method mean the operator `target` on the container itself, past overrides of the subclass."""

    @rule(fn, Tracker)
    def body(m: Machine, v: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        inner = payload_of(v)
        if inner is v and isinstance(v, ObjectTracker):
            return NotImplemented
        if inner is not v and fn in _COPIES:  # the copy is of the subclass
            return NotImplemented
        past_order = fn.__objclass__ is dict and fn.__name__ in vars(ODict)
        if past_order and isinstance(inner, DictTracker) and inner.cls is ODict:
            return NotImplemented
        if inner is v and target is fn:
            return NotImplemented
        return apply(m, target, [inner, *args], kwargs)


_view: Any
for _view in ({}.keys(), {}.items(), ODict().keys(), ODict().items()):
    rule(type(_view).isdisjoint, DictViewTracker, Tracker)(isdisjoint)
    for _name in ("__contains__", "__iter__", "__len__"):
        _through(getattr(type(_view), _name), _SPECIAL[_name])


for _cls in (list, tuple, dict, ODict, set, frozenset, collections.deque, collections.defaultdict):
    for _method_name, _raw in list(vars(_cls).items()):
        if _method_name in _SPECIAL:
            _through(_raw, _SPECIAL[_method_name])
        elif not _method_name.startswith("__") and callable(_raw):
            _through(_raw, _raw)
    pure(_raw for _name, _raw in vars(_cls).items() if _cls in (tuple, frozenset) and callable(_raw))

for _method_name in ("get", "keys", "values", "items"):
    _through(vars(types.MappingProxyType)[_method_name], getattr(dict, _method_name))
