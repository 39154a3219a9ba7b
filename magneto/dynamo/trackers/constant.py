"""ConstTracker: immutable values that capture knows completely, and the lazy guard of scalars that come from outside."""

from __future__ import annotations

import datetime
import decimal
import enum
import re
import struct
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, InstanceDict, Item, Source
from magneto.dynamo.trackers.base import Const, Tracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

SCALARS: frozenset[type] = frozenset({int, float, complex, bool, str, bytes, torch.device, range})
"""Types whose values are compared by value in a guard."""

SINGLETONS: frozenset[type] = frozenset(
    {type(None), type(Ellipsis), type(NotImplemented), bool, torch.dtype, torch.layout, torch.memory_format, torch.qscheme}
)
"""Types of which every value is one object: the guard compares a pointer."""

VALUE_TYPES: frozenset[type] = frozenset(
    {
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, re.Pattern, re.Match, struct.Struct, types.GenericAlias, types.UnionType),
        *(
            cls for cls in vars(torch._C).values() if isinstance(cls, type) and "__entries" in vars(cls)
        ),  # enumerations written in C++ (SDPBackend)
    }
)
"""Types of C whose instances never change and that may be equal where they differ (Decimal("1.0"), Decimal("1.00")): the guard compares a pointer."""

CONST_TYPES: frozenset[type] = SCALARS | SINGLETONS


def is_constant(value: Any) -> bool:
    """Whether a ConstTracker may hold the value: immutable, compared by value, without user code."""
    cls = type(value)
    if cls in CONST_TYPES:
        return True
    if cls is tuple or cls is frozenset or cls is torch.Size:
        return all(is_constant(item) for item in value)
    if cls is slice:
        return is_constant(value.start) and is_constant(value.stop) and is_constant(value.step)
    return isinstance(value, (enum.Enum, types.CodeType))


def is_numpy_scalar(value: Any) -> bool:
    """np.float64(2.0) and its like: constants when capture computed them itself."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.generic, numpy.dtype))


def is_numpy_bool(value: Any) -> bool:
    """Torch takes it for a float, and nowhere for a bool."""
    return is_numpy_scalar(value) and hasattr(value, "item") and value.dtype.kind == "b"


class ConstTracker(Tracker):
    """A constant. With a source it is read lazily: the EQUALS (or ID_IS) row is added when the value is first looked at."""

    __slots__ = ("_machine", "kept", "value")
    shared = False

    def __init__(self, value: Any, source: Source | None = None, machine: Machine | None = None, kept: bool = False) -> None:
        super().__init__(source)
        self.value = value
        self.kept = kept  # the program holds this very object, as a constant of its code
        self._machine = machine if source is not None else None

    @property
    def obj(self) -> Any:
        return self.read()

    def read(self) -> Any:
        """The value, guarded."""
        machine = self._machine
        if machine is not None:
            self._machine = None
            cls = type(self.value)
            by_identity = cls in SINGLETONS or cls in VALUE_TYPES or isinstance(self.value, (enum.Enum, types.CodeType))
            machine.guard(Kind.ID_IS if by_identity else Kind.EQUALS, self.source, self.value)
        return self.value

    def try_const(self) -> Const | None:
        return Const(self.read())

    def python_type(self) -> type:
        """The class; of a number that is known to change, only that is guarded."""
        machine, cls = self._machine, type(self.value)
        if machine is not None and self.source in machine.changing and (cls is int or cls is float or is_numpy_scalar(self.value)):
            machine.guard(Kind.TYPE_IS, self.source, cls)  # type: ignore[arg-type]
            return cls
        return type(self.read())

    def instance_attr(self, m: Machine, name: str) -> Tracker | None:
        self.python_type()
        value = self.value
        if not isinstance(value, enum.Enum) or name not in value.__dict__:
            return None
        return m.wrap(value.__dict__[name], Item(InstanceDict(Held(str(value.name), value)), name))

    def emit(self, em: Emitter) -> str:
        if self.source is not None and (self._machine is not None or type(self.value) not in SINGLETONS):
            return em.source(self.source)
        if type(self.value) is str and len(self.value) > 1 and not _is_interned(self.value):
            return em.held(self.value) if self.kept else em.assign("text", f"{self.value[0]!r}.__add__({self.value[1:]!r})", self)
        return em.const(self.value)

    def show(self) -> str:
        return repr(self.value)


def _is_interned(text: str) -> bool:
    """Whether the text is the one object that stands for all equal names and constants: what is computed is an object of its own."""
    return sys.intern("".join([text[:1], text[1:]])) is text


def same_constant(a: Any, b: Any) -> bool:
    """Equality that tells apart what a guard tells apart: types, signed zeros, NaN payloads."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)
