"""Weak references made inside the region, and context variables."""

from __future__ import annotations

import contextvars
import itertools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Local, Stack
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.klass import ClassTracker, held
from magneto.dynamo.trackers.object import OpaqueTracker, still_held

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_UNSET = object()


class RefTracker(Tracker):
    """weakref.ref(referent). Whether the referent lives is known while a frame of the region or its caller holds it."""

    __slots__ = ("callback", "referent")
    exact_type = weakref.ReferenceType

    def __init__(self, referent: Tracker, callback: Tracker | None = None) -> None:
        super().__init__()
        self.referent = referent
        self.callback = callback

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        if not self.alive(m):
            m.graph_break("B104", operation="a weak reference", value=self.referent.show())
        return self.referent

    def alive(self, m: Machine) -> bool:
        return isinstance(self.referent, ClassTracker) or still_held(m, self.referent)

    def emit(self, em: Emitter) -> str:
        callback = "" if self.callback is None else f", {em.value(self.callback)}"
        return em.assign("ref", f"{em.const(weakref.ref, 'ref')}({em.value(self.referent)}{callback})", self)


@rule(weakref.ref, Tracker)
def make_ref(m: Machine, v: Tracker, callback: Tracker | None = None) -> Any:
    owned = not isinstance(v, ClassTracker) and (v.source is None or isinstance(v.source, (Local, Stack)))
    if callback is not None and not isinstance(callback, ConstTracker) and (owned or not RefTracker(v).alive(m)):
        m.graph_break("B101", callee="weakref.ref", reason="its callback runs when the object dies")
    if v.python_type().__weakrefoffset__ == 0:
        m.raise_exception(TypeError(f"cannot create weak reference to '{_C.type_name(v.python_type())}' object"))
    return m.references.setdefault(v, RefTracker(v)) if callback is None else RefTracker(v, callback)


# -- context variables


class TokenTracker(Tracker):
    """What ContextVar.set returns: the statement of the effect binds it to `name`."""

    __slots__ = ("name", "old", "var")
    exact_type = contextvars.Token

    def __init__(self, var: contextvars.ContextVar[Any], old: Tracker | None, name: str) -> None:
        super().__init__()
        self.var, self.old, self.name = var, old, name

    def emit(self, em: Emitter) -> str:
        return self.name


def _values(m: Machine) -> dict[int, Tracker | None]:
    """What the region has set, by variable; None: not set."""
    found: dict[int, Tracker | None] = m.__dict__.setdefault("_context_values", {})
    return found


def _current(m: Machine, v: OpaqueTracker) -> Tracker | None:
    var = v.pin(m)
    values = _values(m)
    if id(var) not in values:
        value = var.get(_UNSET)
        if value is _UNSET:
            try:
                value = var.get()
            except LookupError:
                pass
        m.guard(Kind.STATE, None, (f"{var.name}.get", _get, (var,), value))
        values[id(var)] = None if value is _UNSET else held(m, value, var.name)
    return values[id(var)]


def _get(var: contextvars.ContextVar[Any]) -> Any:
    """The value of a variable, its default, or a mark."""
    try:
        return var.get()
    except LookupError:
        return _UNSET


@rule(contextvars.ContextVar.get, OpaqueTracker)
def get_variable(m: Machine, v: OpaqueTracker, *default: Tracker) -> Any:
    if default and v.pin(m).get(_UNSET) is _UNSET and id(v.obj) not in _values(m):
        return NotImplemented  # whether the variable itself has a default does not matter then
    found = _current(m, v) or (default[0] if default else None)
    if found is None:
        m.raise_exception(LookupError(v.obj))
    return found


@rule(contextvars.ContextVar.set, OpaqueTracker, Tracker)
def set_variable(m: Machine, v: OpaqueTracker, value: Tracker) -> Any:
    var = v.pin(m)
    old = None if var.get(_UNSET) is _UNSET and id(var) not in _values(m) else _current(m, v)
    _values(m)[id(var)] = value
    token = TokenTracker(var, old, f"context_token_{len(m.effects)}")  # type: ignore[attr-defined]
    m.effect(f"{token.name} = {{0}}.set({{1}})", v, value)
    return token


@rule(contextvars.ContextVar.reset, OpaqueTracker, TokenTracker)
def reset_variable(m: Machine, v: OpaqueTracker, token: TokenTracker) -> None:
    if token.var is not v.pin(m):
        return NotImplemented  # type: ignore[return-value]
    _values(m).pop(id(v.obj), None)
    if token.old is not None:
        _values(m)[id(v.obj)] = token.old
    else:
        m.graph_break("B104", operation="reset() of a variable that was not set", value=v.show())
    m.effect("{0}.reset({1})", v, token)


_OWNED_BY_OTHERS = (torch.Tensor, torch.nn.Module, types.ModuleType, types.CodeType)


def can_be_watched(obj: Any, inside: bool = False) -> bool:
    """Whether weak references can tell when an object, or one in a container, dies. Tensors and modules are left out: they are kept a little longer."""
    if issubclass(type(obj), _OWNED_BY_OTHERS):
        return False
    if type(obj) in (list, tuple, set, dict):
        items = itertools.islice(obj.values() if type(obj) is dict else obj, 50)
        return not inside and any(can_be_watched(item, True) for item in items)
    return type(obj).__weakrefoffset__ != 0
