"""Rows of the conversions to numbers and bytes, of rounding, and of hash()."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.dynamo.trackers.attributes import find_special, user_method
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import apply, fold, rule
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.mapping import SetTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import IdTracker, ObjectTracker, payload_of
from magneto.dynamo.trackers.rules_operator import ask
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_METHODS: dict[Any, tuple[str, ...]] = {
    int: ("__int__", "__index__", "__trunc__"),
    float: ("__float__", "__index__"),
    complex: ("__complex__", "__float__", "__index__"),
    bytes: ("__bytes__",),
}


def _conversion(fn: Any) -> None:
    @rule(fn, ObjectTracker)
    def body(m: Machine, v: ObjectTracker, *args: Tracker) -> Any:
        for name in _METHODS[fn] if not args else ():
            if user_method(m, v, name) is not MISSING:
                found = ask(m, v, name)
                if fn is bytes:
                    return _bytes(m, found or m.const(None))
                return found if found is not None and found.python_type() is fn else apply(m, fn, [found or m.const(None)], {})
        return apply(m, fn, [v.payload, *args], {}) if v.payload is not None else _no_number(m, fn, v)


def _bytes(m: Machine, found: Tracker) -> Tracker:
    """What `__bytes__` gives, as it is."""
    if not issubclass(found.python_type(), bytes):
        m.raise_exception(TypeError(f"__bytes__ returned non-bytes (type {found.python_type().__name__})"))
    return found


def _no_number(m: Machine, fn: Any, v: Tracker) -> Any:
    name = v.python_type().__name__
    texts = {
        int: f"int() argument must be a string, a bytes-like object or a real number, not '{name}'",
        float: f"float() argument must be a string or a real number, not '{name}'",
    }
    if fn not in texts:
        return NotImplemented
    m.raise_exception(TypeError(texts[fn]))


for _fn in _METHODS:
    _conversion(_fn)


def _digits(fn: Any) -> None:
    """bin, hex, oct."""

    @rule(fn, ObjectTracker)
    def body(m: Machine, v: ObjectTracker) -> Any:
        return fold(m, fn, [m.apply(operator.index, v)], {})


for _fn in (bin, hex, oct):
    _digits(_fn)


def _rounding(fn: Any, name: str) -> None:
    """math.floor, math.ceil, math.trunc and round."""

    @rule(fn, ObjectTracker)
    def body(m: Machine, v: ObjectTracker, *args: Tracker, **kwargs: Tracker) -> Any:
        if user_method(m, v, name) is not MISSING:
            return ask(m, v, name, *args, *kwargs.values())
        if fn in (math.floor, math.ceil) and user_method(m, v, "__float__") is not MISSING:
            return fold(m, fn, [m.apply(float, v)], {})
        return fold(m, fn, [payload_of(v), *args], kwargs)


for _fn, _name in ((math.floor, "__floor__"), (math.ceil, "__ceil__"), (math.trunc, "__trunc__"), (round, "__round__")):
    _rounding(_fn, _name)


@rule(pow, Tracker, Tracker, Tracker)
def pow_modulo(m: Machine, a: Tracker, b: Tracker, c: Tracker) -> Any:
    if user_method(m, a, "__pow__") is not MISSING:
        return ask(m, a, "__pow__", b, c)
    return fold(m, pow, [payload_of(v) for v in (a, b, c)], {})


@rule(operator.length_hint, ObjectTracker)
def length_hint(m: Machine, v: ObjectTracker, default: Tracker | None = None) -> Any:
    for name in ("__len__", "__length_hint__"):
        if user_method(m, v, name) is not MISSING and (found := ask(m, v, name)) is not None:
            return found
    return m.apply(len, v.payload) if v.payload is not None else default or m.const(0)


def math_of_objects(m: Machine, fn: Any, args: tuple[Tracker, ...]) -> list[Tracker]:
    """Arguments as floats where they are instances with __float__ or __index__."""
    return [m.apply(float, v) if _converts(m, v) else v for v in args]


def _converts(m: Machine, v: Tracker) -> bool:
    return any(user_method(m, v, name) is not MISSING for name in ("__float__", "__index__"))


for _math_name in "sqrt pow exp log sin cos tan isnan isinf isfinite fabs atan2 log2 log10 tanh".split():

    def _math(fn: Any) -> None:
        @rule(fn, Tracker)
        def body(m: Machine, *args: Tracker) -> Any:
            if not any(isinstance(v, ObjectTracker) and _converts(m, v) for v in args):
                return NotImplemented
            return fold(m, fn, math_of_objects(m, fn, args), {})

    _math(getattr(math, _math_name))


# -- hash


@rule(hash, Tracker)
def hash_(m: Machine, v: Tracker) -> Any:
    folded = fold(m, hash, (v,), {})
    if folded is not NotImplemented:
        return folded
    if isinstance(v, ModuleTracker) and v.obj is not MISSING:
        v.pin(m)
    if isinstance(v, (ModuleTracker, ClassTracker)):
        return IdTracker(v) if id(v.obj) in m.made else m.const(hash(v.obj))  # type: ignore[attr-defined]
    if isinstance(v, TensorTracker):  # torch says so
        return IdTracker(v)
    if v.python_type().__hash__ is None:
        m.raise_exception(TypeError(f"unhashable type: '{_C.type_name(v.python_type())}'"))
    if user_method(m, v, "__hash__") is not MISSING:
        method = find_special(m, v, "__hash__")
        assert method is not None
        return fold(m, _index_hash, [m.call(method, [], {})], {})
    inner = payload_of(v)
    if inner is not v:
        return m.apply(hash, inner)
    if isinstance(v, TupleTracker):
        parts = [m.apply(hash, item).try_const() for item in v.items(m)]
        if all(part is not None for part in parts):
            return m.const(hash(tuple(_Hashed(part.value) for part in parts if part is not None)))
    if isinstance(v, SetTracker):
        parts = [m.apply(hash, item).try_const() for item in v.entries.values()]
        if all(part is not None for part in parts):
            return m.const(hash(frozenset(_Hashed(part.value) for part in parts if part is not None)))
    return NotImplemented


class _Hashed:
    """Stands in a tuple for an item with a known hash."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self.value


def _index_hash(value: Any) -> int:
    """What hash() makes of the result of __hash__."""
    if not isinstance(value, int):
        raise TypeError("__hash__ method should return an integer")
    return hash(value) if -(2**63) > value or value >= 2**63 - 1 or value == -1 else int(value)
