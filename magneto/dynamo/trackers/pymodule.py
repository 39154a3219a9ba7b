"""Attributes of Python modules. torch's and the standard library's functions are not guarded: replacing them is not supported by anyone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magneto.dynamo.guards.source import Held, InstanceDict, Item
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import is_constant
from magneto.dynamo.trackers.klass import held
from magneto.dynamo.trackers.object import PyModuleTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_UNGUARDED = frozenset({"torch", "math", "operator", "functools", "itertools", "builtins", "collections", "typing", "types", "contextlib", "copy", "inspect"})


def module_attr(m: Machine, module: PyModuleTracker, name: str) -> Tracker | None:
    """The module's global; missing names ask the module's __getattr__ (executed: it imports)."""
    obj = module.obj
    namespace = obj.__dict__
    if name in namespace:
        value = namespace[name]
        if obj.__name__.partition(".")[0] in _UNGUARDED and not (is_constant(value) or isinstance(value, (list, dict, set))):
            return held(m, value, f"{obj.__name__}.{name}")
        return m.wrap(value, Item(InstanceDict(Held(obj.__name__, obj)), name))
    value = getattr(obj, name, MISSING)
    return None if value is MISSING else held(m, value, f"{obj.__name__}.{name}")
