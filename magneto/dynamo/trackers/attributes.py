"""The attribute protocol: object.__getattribute__, __setattr__ and __delattr__ on trackers. Exists once; dispatch rows and trackers come here."""

from __future__ import annotations

import collections
import contextvars
import functools
import re
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.bytecode.decode import NO_DICT
from magneto.dynamo.trackers.base import MISSING, Raised, Tracker, namespace_of
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker
from magneto.dynamo.trackers.exception import ExceptionTracker
from magneto.dynamo.trackers.function import FUNCTION_SLOTS, BoundMethodTracker, BuiltinTracker, FunctionTracker, PartialTracker
from magneto.dynamo.trackers.klass import ClassTracker, Data, find_in_type, held, written_attr
from magneto.dynamo.trackers.object import ObjectTracker, OpaqueTracker, payload_of

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_TUPLE_FIELD = type(collections.namedtuple("Probe", "field").field)  # type: ignore[attr-defined]  # noqa: PYI024
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_ASK_ELSEWHERE = (*PROXIES, threading.local)  # what their attributes are is neither in the class nor in a dictionary of the object
_BUILTIN_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def get_attr(m: Machine, v: Tracker, name: str) -> Tracker | None:
    """`v.name`; None: there is no such attribute (an AttributeError raised by user code propagates as Raised)."""
    try:
        special = v.special_attr(m, name)
    except Raised as raised:  # by a descriptor
        if not isinstance(v, ClassTracker) or not raised.matches(AttributeError) or not hasattr(type(v.obj), "__getattr__"):
            raise
        special = None
    if special is not None:
        return special
    if isinstance(v, ClassTracker):
        hook = find_in_type(m, type(v.obj), "__getattr__")
        return m.call(held(m, hook, "__getattr__"), [v, ConstTracker(name)], {}) if isinstance(hook, types.FunctionType) else None
    cls = v.python_type()
    if issubclass(cls, _ASK_ELSEWHERE) and (name != "__class__" or cls in PROXIES):
        m.graph_break("B103", attribute=name, value=v.show())
    if cls.__getattribute__ is not object.__getattribute__ and isinstance(cls.__getattribute__, types.FunctionType):  # type: ignore[comparison-overlap]
        hook = find_in_type(m, cls, "__getattribute__")
        try:
            return m.call(held(m, hook, "__getattribute__"), [v, ConstTracker(name)], {})
        except Raised as raised:
            if not raised.matches(AttributeError) or not hasattr(cls, "__getattr__"):
                raise
    else:
        try:
            found = generic_get(m, v, cls, name)
        except Raised as raised:  # by a property or descriptor
            if not raised.matches(AttributeError) or not hasattr(cls, "__getattr__"):
                raise
            found = None
        if found is not None:
            return found
    if hasattr(cls, "__getattr__"):
        hook = find_in_type(m, cls, "__getattr__")
        known = v.hooked_attr(m, hook, name)
        if known is not NotImplemented:
            return known  # type: ignore[no-any-return]
        if isinstance(hook, types.FunctionType):
            return m.call(held(m, hook, "__getattr__"), [v, ConstTracker(name)], {})
        if (
            isinstance(getattr(type(hook), "__get__", None), types.FunctionType)
            and (bound := find_special(m, v, "__getattr__")) is not None
        ):
            return m.call(bound, [ConstTracker(name)], {})
    return None


def generic_get(m: Machine, v: Tracker, cls: type, name: str) -> Tracker | None:
    """object.__getattribute__(v, name) without __getattr__; None: absent."""
    if name == "__class__" and not any(name in namespace_of(base) for base in cls.__mro__[:-1]):
        return held(m, cls, cls.__name__)
    if name == "__dict__" and isinstance(v, ObjectTracker):
        return v.attrs(m)
    raw = find_in_type(m, cls, name)
    if raw is not MISSING and hasattr(type(raw), "__get__") and (hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__")):
        return bind_attr(m, raw, v, cls, name)
    found = v.instance_attr(m, name)
    if found is not None:
        return found
    if raw is MISSING:
        return None
    return bind_attr(m, raw, v, cls, name)


def bind_attr(m: Machine, raw: Any, v: Tracker, cls: type, name: str) -> Tracker | None:
    """What the raw class attribute gives on the instance."""
    kind = type(raw)
    label = f"{cls.__name__}.{name}"
    if kind is Data:
        return written_attr(m, cls, name)
    if kind is types.FunctionType:
        return BoundMethodTracker(held(m, raw, label), v)
    if kind is staticmethod:
        return held(m, raw.__func__, label)
    if kind is classmethod:
        return BoundMethodTracker(held(m, raw.__func__, label), ClassTracker(cls))
    if kind in _BUILTIN_METHODS:
        if not issubclass(cls, raw.__objclass__):
            text = f"descriptor '{raw.__name__}' for '{raw.__objclass__.__name__}' objects doesn't apply to a '{cls.__name__}' object"
            m.raise_exception(TypeError(text))
        return BoundMethodTracker(BuiltinTracker(raw), v)
    if isinstance(raw, property):
        if raw.fget is None:
            m.raise_exception(_no_accessor(cls, raw.__get__, object()))
        return m.call(held(m, raw.fget, label), [v], {})
    if isinstance(raw, functools.cached_property):
        value = m.call(held(m, raw.func, label), [v], {})
        if isinstance(v, ObjectTracker):
            attrs = v.attrs(m)
            assert attrs is not None
            attrs.put(m, ConstTracker(name), value)
        return value
    if kind is types.MemberDescriptorType and isinstance(v, ObjectTracker):
        found = v.slot_attr(m, name, raw)
        if found is None and find_in_type(m, cls, "__new__") is object.__new__ and not cls.__flags__ & 1 << 20:  # not abstract
            try:
                raw.__get__(object.__new__(cls))
            except AttributeError as error:
                m.raise_exception(AttributeError(str(error), name=name))
        return found
    if kind is types.MemberDescriptorType and isinstance(v, SequenceTracker) and name in getattr(cls, "__match_args__", ()):
        return v.item(m, cls.__match_args__.index(name))  # type: ignore[attr-defined]
    if kind in (types.GetSetDescriptorType, types.MemberDescriptorType) or isinstance(raw, types.DynamicClassAttribute):
        return _computed(m, v, raw, name)
    if kind is _TUPLE_FIELD:
        fields = v.payload if isinstance(v, ObjectTracker) else v
        if isinstance(fields, SequenceTracker):
            return fields.item(m, raw.__reduce__()[1][0])
    if kind.__name__ == "cython_function_or_method":
        return BoundMethodTracker(BuiltinTracker(raw), v)
    getter = getattr(kind, "__get__", None)
    if getter is None:
        return held(m, raw, label)
    if isinstance(getter, types.FunctionType):
        return m.call(held(m, getter, label), [held(m, raw, label), v, ClassTracker(cls)], {})
    if isinstance(raw, (types.BuiltinFunctionType, functools.partial)):
        return held(m, raw, label)
    if isinstance(raw, (functools._lru_cache_wrapper, _C.Optimized, _C.Disabled)) and isinstance(raw.__wrapped__, types.FunctionType):
        return BoundMethodTracker(held(m, raw, label), v)
    if isinstance(raw, types.ClassMethodDescriptorType):
        return BoundMethodTracker(BuiltinTracker(raw), ClassTracker(cls))
    m.graph_break("B103", attribute=name, value=v.show())


def _no_accessor(cls: type, accessor: Any, *args: Any) -> AttributeError:
    """CPython's words for a property that lacks the accessor (it may know its name, or not)."""
    try:
        accessor(*args)
    except AttributeError as error:
        return AttributeError(str(error).replace("of 'object' object", f"of '{cls.__qualname__}' object"))
    raise AssertionError


def _computed(m: Machine, v: Tracker, raw: Any, name: str) -> Tracker | None:
    """A C attribute: answered from the value where it is constant or immutable."""
    const = payload_of(v).try_const()
    if const is not None:
        try:
            return m.const(raw.__get__(const.value))
        except AttributeError:
            return None
    if isinstance(v, OpaqueTracker) and isinstance(v.obj, torch.Tensor):
        m.graph_break("B109", value=v.show())
    if isinstance(v, OpaqueTracker) and isinstance(v.obj, _TRANSPARENT):
        found = getattr(v.pin(m), name, MISSING)
        return None if found is MISSING else held(m, found, name)
    if name == "__weakref__" and isinstance(v, ObjectTracker) and v.source is None and v not in m.references:  # type: ignore[attr-defined]
        return ConstTracker(None)
    if name in ("__doc__", "__module__"):
        return held(m, getattr(v.pin(m) if isinstance(v, OpaqueTracker) else v.python_type(), name), name)
    m.graph_break("B103", attribute=name, value=v.show())


_TRANSPARENT = (
    *(contextvars.ContextVar, property, staticmethod, classmethod, types.GenericAlias, types.UnionType, re.Pattern, re.Match),
    *(torch.finfo, torch.Generator, torch.iinfo),
)
"""C types whose instances never change: their attributes are read from the real object."""


_CALLING = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")
"""Attributes of a function that decide how it is called."""


_GENERIC_SETTERS = tuple(
    getattr(cls, name) for cls in (object, BaseException, types.SimpleNamespace) for name in ("__setattr__", "__delattr__")
)


def set_attr(m: Machine, v: Tracker, name: str, value: Tracker | None) -> None:
    """`v.name = value`, or `del v.name` for None."""
    if isinstance(v, FunctionTracker) and v.source is None and value is not None and name not in _CALLING:
        if name in FUNCTION_SLOTS:
            v.attrs[name] = value
        else:
            v.namespace.put(m, ConstTracker(name), value)
        if name in ("__name__", "__qualname__") and (const := value.try_const()) is not None:
            setattr(v, name.strip("_"), const.value)
        return
    if isinstance(v, FunctionTracker) and v.source is not None and value is not None and not (name in _CALLING or name in FUNCTION_SLOTS):
        if name.isidentifier():
            v.namespace.put_silently(m, ConstTracker(name), value)
            m.effect(f"{{0}}.{name} = {{1}}", v, value)
            return
    if v.special_set(m, name, value):
        return
    if isinstance(v, PartialTracker) and v.source is None and value is not None and name.isidentifier():
        v.namespace.put(m, ConstTracker(name), value)
        return
    if isinstance(v, ClassTracker) and isinstance(find_in_type(m, type(v.obj), "__setattr__"), types.FunctionType) and value is not None:
        hook = find_special(m, v, "__setattr__")
        assert hook is not None
        m.call(hook, [ConstTracker(name), value], {})
        return
    made = id(v.obj) in m.made and name not in ("__bases__", "__abstractmethods__")  # type: ignore[attr-defined]  # (CPython may refuse)
    if made and isinstance(v, ClassTracker) and value is not None:
        v.set_made(m, name, value)
        return
    if not isinstance(v, ObjectTracker):
        m.graph_break("B107", value=v.show(), reason=f"attribute {name!r} is {'set' if value is not None else 'deleted'}")
    cls = v.cls
    method = "__setattr__" if value is not None else "__delattr__"
    hook = find_in_type(m, cls, method)
    if v.hooked_set(m, hook, name, value):
        return
    if hook in _GENERIC_SETTERS:
        generic_set(m, v, name, value)
    else:
        bound = find_special(m, v, method)
        assert bound is not None
        m.call(bound, [ConstTracker(name), *([value] if value is not None else [])], {})


def generic_set(m: Machine, v: ObjectTracker, name: str, value: Tracker | None) -> None:
    """object.__setattr__ / object.__delattr__."""
    cls = v.cls
    raw = find_in_type(m, cls, name)
    if isinstance(raw, property):
        accessor = raw.fset if value is not None else raw.fdel
        if accessor is None:
            m.raise_exception(_no_accessor(cls, *((raw.__set__, object(), None) if value is not None else (raw.__delete__, object()))))
        m.call(held(m, accessor, name), [v, *([value] if value is not None else [])], {})
        return
    if name == "__class__" and type(v) is ObjectTracker and isinstance(value, ClassTracker) and _same_layout(cls, value.obj):
        v.cls = value.obj
        if v.source is not None:
            m.effect("object.__setattr__({0}, '__class__', {1})", v, value)
        return
    if name == "__class__" or isinstance(raw, types.GetSetDescriptorType):
        if isinstance(v, ExceptionTracker) and v.set_link(m, name, value):
            return
        m.graph_break("B107", value=v.show(), reason=f"attribute {name!r} is computed by C code")
    is_slot = type(raw) is types.MemberDescriptorType
    if raw is not MISSING and not is_slot and hasattr(type(raw), "__set__"):
        setter = type(raw).__set__ if value is not None else getattr(type(raw), "__delete__", None)
        if isinstance(setter, types.FunctionType):
            m.call(held(m, setter, name), [held(m, raw, name), v, *([value] if value is not None else [])], {})
            return
        m.graph_break("B107", value=v.show(), reason=f"attribute {name!r} is a descriptor")
    if not is_slot and v.attrs(m) is None:
        why = f"has no attribute '{name}'{NO_DICT}" if raw is MISSING else f"attribute '{name}' is read-only"
        m.raise_exception(AttributeError(f"'{_C.type_name(cls)}' object {why}"))
    if value is None:
        present = v.slot_attr(m, name, raw) if is_slot else v.instance_attr(m, name)
        if present is None:
            m.raise_exception(AttributeError(name if is_slot else f"'{_C.type_name(cls)}' object has no attribute '{name}'"))
    v.set_instance_attr(m, name, value, is_slot)


def _same_layout(one: type, two: type) -> bool:
    """Whether an instance of one class may become one of the other, as CPython sees it."""
    new: Any = one.__new__
    if new is not object.__new__:
        return False
    probe: Any = object.__new__(one)
    try:
        object.__setattr__(probe, "__class__", two)
    except TypeError:
        return False
    return True


def no_attribute(m: Machine, v: Tracker, name: str) -> AttributeError:
    """CPython's AttributeError for a missing attribute."""
    if isinstance(v, ClassTracker):
        return AttributeError(f"type object '{v.obj.__name__}' has no attribute '{name}'", name=name)
    if isinstance(v.obj, types.ModuleType):
        return AttributeError(f"module '{v.obj.__name__}' has no attribute '{name}'", name=name)
    return AttributeError(f"'{_C.type_name(v.python_type())}' object has no attribute '{name}'", name=name)


def find_special(m: Machine, v: Tracker, name: str) -> Tracker | None:
    """A special method, looked up on the type as the interpreter does, bound to `v`."""
    cls = v.python_type()
    raw = find_in_type(m, cls, name)
    if raw is MISSING or raw is None:
        return None
    if type(raw) is types.WrapperDescriptorType and not issubclass(cls, raw.__objclass__):  # it is called as it is
        needed = f"requires a '{raw.__objclass__.__name__}' object but received a '{cls.__name__}'"
        m.raise_exception(TypeError(f"descriptor '{raw.__name__}' {needed}"))
    return bind_attr(m, raw, v, cls, name)


def user_method(m: Machine, v: Tracker, name: str) -> Any:
    """The attribute of the type that gives the operation, where a program defined it; MISSING where it is that of the C class below, or absent."""
    if not isinstance(v, (ObjectTracker, ClassTracker, SequenceTracker)):
        return MISSING
    cls = v.python_type()
    raw = find_in_type(m, cls, name)
    if raw is None and any(name in namespace_of(base) for base in cls.__mro__):
        return None  # `__add__ = None`: the class refuses the operation
    if raw is None or (isinstance(raw, _BUILTIN_METHODS) and _inherited(cls, name, raw)):
        return MISSING
    return raw


def _inherited(cls: type, name: str, raw: Any) -> bool:
    """Whether C code is that of the nearest C class among the bases, and not put into a class of the program by an assignment."""
    own = (namespace_of(base)[name] for base in cls.__mro__ if getattr(namespace_of(base).get(name), "__objclass__", None) is base)
    return raw is next(own, None)
