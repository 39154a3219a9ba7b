"""Tokens of dictionary keys that exist: they hash and compare as the keys do, without code of the program."""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable
from typing import Any

from magneto.base.dataclass import dataclass
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import VALUE_TYPES, is_constant


class Identity:
    """Token of a key that hashes by identity."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


@dataclass(frozen=True, slots=True, eq=False)
class ByValue:
    """Token of an existing object of a C class that hashes and compares by its value (`list[int]`, a pattern, a date): it is asked itself."""

    of: Any

    def __eq__(self, other: object) -> bool:
        if type(other) is ByValue:
            return self.of is other.of or bool(self.of == other.of)
        return bool(self.of == other) if is_constant(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.of)


@dataclass(frozen=True, slots=True)
class Referent:
    """Token of a weak reference: while its object lives, it hashes and compares as that (`of`: its token)."""

    of: Hashable


def hashes_by_identity(cls: type) -> bool:
    """Whether dictionary look-up of instances compares identity only (tensors count: their __eq__ is not asked for the same object)."""
    if cls.__hash__ in (object.__hash__, type.__hash__) and cls.__eq__ in (object.__eq__, type.__eq__):  # type: ignore[comparison-overlap]
        return True
    return cls in (types.BuiltinFunctionType, types.FunctionType) or hasattr(cls, "__torch_function__")


def hashes_by_value(cls: type) -> bool:
    return not hashes_by_identity(cls) and not isinstance(cls.__hash__, types.FunctionType) and not issubclass(cls, type)


def object_token(obj: Any) -> Hashable:
    """Token of a real key."""
    if is_constant(obj) or type(obj) in VALUE_TYPES:
        token: Hashable = obj
        return token
    if type(obj) is tuple:
        return tuple(object_token(item) for item in obj)
    if type(obj) is weakref.ReferenceType and (referent := obj()) is not None:
        return Referent(object_token(referent))
    return ByValue(obj) if hashes_by_value(type(obj)) else Identity(obj)


def real_key(token: Hashable) -> Any:
    """The key itself, as far as it exists outside of the region; else MISSING, which is in no dictionary."""
    if type(token) is Identity:
        return MISSING if isinstance(token.of, Tracker) else token.of
    if type(token) is ByValue:
        return token.of
    if type(token) is Referent:
        of = real_key(token.of)
        return MISSING if of is MISSING else weakref.ref(of)
    if type(token) is tuple:
        parts = tuple(real_key(item) for item in token)
        return MISSING if any(part is MISSING for part in parts) else parts
    return token
