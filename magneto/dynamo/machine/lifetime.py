"""When objects die: what waits for the death of an object must see it where the program lets go of it, not where the region ends.

A frame keeps what its variables held until the region has ended. Where that can be seen (a weak reference, a finaliser, a collection of garbage), the region
ends: behind the instruction that lets go of the last reference, or before the instruction that looks.
"""

from __future__ import annotations

import collections
import gc
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from magneto.base.errors import GraphBreak
from magneto.dynamo import trackers
from magneto.dynamo.guards.source import Cell, Local, Stack
from magneto.dynamo.machine.frame import SymFrame
from magneto.dynamo.machine.generators import MAY_OWE, owes_inside, reached
from magneto.dynamo.machine.handlers_control import split_call
from magneto.dynamo.trackers.base import MISSING, Tracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine as M

_LOOK_AT_THE_HEAP = frozenset([gc.collect, weakref.getweakrefcount, weakref.getweakrefs])
_REFERENCES_PER_SLOT = 2  # the frame's own, and the one in the state that capture is given


def sole_holders(state: Any) -> frozenset[int]:
    """The ids of objects that only this frame's variables hold, and of whose death weak references will tell."""
    found = set()
    seen = collections.Counter(map(id, (*state.locals, *state.stack)))
    for values in (state.locals, state.stack):
        for index in range(len(values)):
            if not _is_watched(values[index]):
                continue
            others = sys.getrefcount(values[index]) - 1 - _REFERENCES_PER_SLOT * seen[id(values[index])]
            if others <= 0:
                found.add(id(values[index]))
    return frozenset(found)


def _is_watched(obj: Any) -> bool:
    """Whether something can tell when the object dies. Tensors, modules and classes are left out: they are kept a little longer."""
    return type(obj).__weakrefoffset__ != 0 and not issubclass(type(obj), _KEPT) and weakref.getweakrefcount(obj) > 0


_KEPT = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.CodeType)


def let_go(m: M, f: SymFrame, old: Tracker | None, cell: bool = False) -> None:
    """A variable or cell loses its object: where something waits for its death, the region ends behind this instruction."""
    held = _held_finaliser(old) if isinstance(old, trackers.SequenceTracker | trackers.DictTracker) else None
    if held is not None:
        m.end_behind(GraphBreak("B120", m.user_stack(), value=held))
    if old is None or not isinstance(old.source, (Local, Stack, Cell)):  # made here, or reached through what holds it
        return
    if isinstance(old.source, Cell) and not cell:  # the cell holds it still
        return
    obj = MISSING if isinstance(old, trackers.ConstTracker) else old.obj
    composite = isinstance(old, trackers.ExistingComposite)
    if obj is MISSING or not (composite or type(obj).__weakrefoffset__) or issubclass(type(obj), _KEPT):
        return
    if sum(slot is old for frame in m.frames for slot in (*frame.locals, *frame.stack)) > (not cell):  # another variable holds it still
        return
    waited = hasattr(type(obj), "__del__") or (composite and owes_inside(m, old)) or any(_tells(ref) for ref in weakref.getweakrefs(obj))
    alone = weakref.getweakrefcount(obj) > 0 if isinstance(old.source, Cell) else id(obj) in m.sole and f is m.frames[0]
    if waited or alone:
        m.end_behind(GraphBreak("B120", m.user_stack(), value=old.show()))


def _tells(ref: Any) -> bool:
    """Whether a weak reference has a callback; a proxy does not say."""
    return not isinstance(ref, weakref.ReferenceType) or ref.__callback__ is not None


def lose_temporaries(m: M) -> None:
    """The region ends behind the instruction that used up an object with a finaliser which lay on the stack when the region began, or the last holder of a
    generator whose `finally` runs then."""
    held = {id(value) for frame in m.frames for value in (*frame.locals, *frame.stack)}
    for value in m.mortal:
        if id(value) not in held and (not isinstance(value, MAY_OWE) or (owes_inside(m, value) and not reached(m, value))):
            m.mortal = []
            m.end_behind(GraphBreak("B120", m.user_stack(), value=value.show()))
            return


def _held_finaliser(container: trackers.SequenceTracker | trackers.DictTracker, depth: int = 3) -> str | None:
    """What a list, tuple or dictionary holds that has a finaliser (such objects are never made inside a region)."""
    entries = container.entries if isinstance(container, trackers.SequenceTracker) else [value for _, value in container.entries.values()]
    for entry in entries:
        if isinstance(entry, trackers.SequenceTracker | trackers.DictTracker):
            found = _held_finaliser(entry, depth - 1) if depth else None
            if found is not None:
                return found
        elif not isinstance(entry, trackers.ConstTracker) and entry.obj is not MISSING and hasattr(type(entry.obj), "__del__"):
            return f"{type(entry.obj).__name__} object"
    return None


def looks_at_the_heap(frame: SymFrame) -> bool:
    """Whether the frame's current instruction calls what tells which objects live."""
    instruction = frame.current
    if instruction is None or instruction.op != "CALL":
        return False
    fn, _ = split_call(frame.before, instruction.arg)
    obj = getattr(fn, "obj", MISSING)
    return isinstance(obj, types.BuiltinFunctionType | types.FunctionType) and obj in _LOOK_AT_THE_HEAP
