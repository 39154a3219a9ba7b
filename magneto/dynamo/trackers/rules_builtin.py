"""Rows of Python's built-in functions and of the small standard-library modules that models use."""

from __future__ import annotations

import abc
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.trackers.attributes import PROXIES, generic_get, generic_set, get_attr, no_attribute, set_attr
from magneto.dynamo.trackers.base import MISSING, Raised, Tracker, namespace_of
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS, fold, rule
from magneto.dynamo.trackers.function import BuiltinTracker, CellTracker
from magneto.dynamo.trackers.klass import ClassTracker, held
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import IdTracker, ObjectTracker
from magneto.dynamo.trackers.parent import SuperTracker
from magneto.dynamo.trackers.rules_tensor_state import LEGACY
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Machine


def const_str(m: Machine, v: Tracker) -> str:
    const = v.try_const()
    if const is None or not isinstance(const.value, str):
        m.raise_exception(TypeError(f"attribute name must be string, not '{_C.type_name(v.python_type())}'"))
    return str(const.value)


# -- attributes


@rule(getattr, Tracker, Tracker)
def getattr_(m: Machine, v: Tracker, name: Tracker, *default: Tracker) -> Tracker:
    text = const_str(m, name)
    try:
        found = get_attr(m, v, text)
    except Raised as raised:
        if default and raised.matches(AttributeError):
            return default[0]
        raise
    if found is not None:
        return found
    if default:
        return default[0]
    m.raise_exception(no_attribute(m, v, text))


@rule(hasattr, Tracker, Tracker)
def hasattr_(m: Machine, v: Tracker, name: Tracker) -> Tracker:
    try:
        return m.const(get_attr(m, v, const_str(m, name)) is not None)
    except Raised as raised:
        if raised.matches(AttributeError):
            return m.const(False)
        raise


@rule(setattr, Tracker, Tracker, Tracker)
def setattr_(m: Machine, v: Tracker, name: Tracker, value: Tracker) -> None:
    set_attr(m, v, const_str(m, name), value)


@rule(delattr, Tracker, Tracker)
def delattr_(m: Machine, v: Tracker, name: Tracker) -> None:
    set_attr(m, v, const_str(m, name), None)


@rule(object.__getattribute__, Tracker, Tracker)
def object_getattribute(m: Machine, v: Tracker, name: Tracker) -> Tracker:
    text = const_str(m, name)
    found = v.special_attr(m, text) or generic_get(m, v, v.python_type(), text)
    if found is None:
        m.raise_exception(no_attribute(m, v, text))
    return found


@rule(object.__setattr__, ObjectTracker, Tracker, Tracker)
def object_setattr(m: Machine, v: ObjectTracker, name: Tracker, value: Tracker) -> None:
    generic_set(m, v, const_str(m, name), value)


@rule(object.__delattr__, ObjectTracker, Tracker)
def object_delattr(m: Machine, v: ObjectTracker, name: Tracker) -> None:
    generic_set(m, v, const_str(m, name), None)


@rule(vars, Tracker)
def vars_(m: Machine, v: Tracker) -> Tracker:
    found = m.apply(getattr, v, m.const("__dict__"), m.const(None))
    if isinstance(found, ConstTracker) and found.read() is None:
        m.raise_exception(TypeError("vars() argument must have __dict__ attribute"))
    return found


def _frame_names(m: Machine) -> DictTracker:
    """locals() of the frame that runs."""
    frame = m.frames[-1]  # type: ignore[attr-defined]
    if frame.names is not None:  # a class body's own namespace, not a copy
        return frame.names  # type: ignore[no-any-return]
    found = []
    for name, value in zip(frame.decoded.slots, frame.locals, strict=True):
        inner = value.load(m) if isinstance(value, CellTracker) else value
        if inner is not None and name.isidentifier():
            found.append((name, inner))
    return DictTracker.of(m, found)


@rule(locals)
def locals_(m: Machine) -> Tracker:
    return _frame_names(m)


@rule(vars)
def vars_of_frame(m: Machine, *args: Tracker) -> Any:
    return NotImplemented if args else _frame_names(m)


@rule(dir)
def dir_(m: Machine, *args: Tracker) -> Any:
    if args:
        return NotImplemented
    return ListTracker(sorted(_frame_names(m).keys(m), key=lambda name: name.try_const().value))  # type: ignore[union-attr]


@rule(globals)
def globals_(m: Machine) -> Any:
    frame = m.frames[-1]  # type: ignore[attr-defined]
    if any(owner == id(frame.globals) for owner, _ in m.overlay):  # type: ignore[attr-defined]
        return NotImplemented
    return m.wrap(frame.globals, frame.globals_source)


@rule(super)
def super_(m: Machine, *args: Tracker) -> Any:
    """Two arguments, written or implied; whatever else they are, CPython says what is wrong with them."""
    if len(args) not in (0, 2):
        return NotImplemented
    cls, owner = args if args else m.super_args()  # type: ignore[attr-defined]
    if not isinstance(cls, ClassTracker) or owner is None:
        return NotImplemented
    fits = issubclass(owner.python_type(), cls.obj) or (isinstance(owner, ClassTracker) and issubclass(owner.obj, cls.obj))
    return SuperTracker(cls.obj, owner) if fits else NotImplemented


# -- types


_OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType)


def class_info(m: Machine, v: Tracker) -> Any:
    """The real second argument of isinstance."""
    if isinstance(v, ClassTracker):
        return v.obj
    if v.obj is not MISSING and isinstance(getattr(type(v.obj), "__instancecheck__", None), _OF_C):
        return v.obj
    const = v.try_const()
    if const is not None and isinstance(const.value, (tuple, types.UnionType)):
        return const.value
    m.graph_break("B104", operation="isinstance", value=v.show())


def _plain_metaclass(cls: Any) -> bool:
    return type(cls).__instancecheck__ is type.__instancecheck__  # type: ignore[comparison-overlap]


def _checks(m: Machine, v: Tracker, info: Tracker, name: str) -> Tracker | None:
    """The hook of an object that stands for classes, and is none."""
    hook = getattr(info.python_type(), name, None)
    if isinstance(info, ClassTracker) or not isinstance(hook, types.FunctionType):
        return None
    return m.const(m.truth(m.call(held(m, hook, name), [info, v], {})))


@rule(isinstance, Tracker, Tracker)
def isinstance_(m: Machine, v: Tracker, info: Tracker) -> Tracker:
    if isinstance(info, SequenceTracker) and issubclass(info.cls, tuple):
        return m.const(any(m.truth(isinstance_(m, v, item)) for item in info.items(m)))
    return _checks(m, v, info, "__instancecheck__") or m.const(is_instance(m, v, class_info(m, info)))


_LIBRARIES = ("abc", "typing", "enum", "torch", "_py_abc")


def _asked(m: Machine, info: Any, name: str, v: Tracker) -> bool | None:
    """The answer of a metaclass of the program, or of an object that stands for classes; None where the check is the interpreter's or of a library's class."""
    hook = getattr(type(info), name, None)
    library = isinstance(info, type) and str(getattr(hook, "__module__", "")).partition(".")[0] in _LIBRARIES
    if library or not isinstance(hook, types.FunctionType):
        return None
    return m.truth(m.call(held(m, hook, name), [held(m, info, getattr(info, "__name__", name)), v], {}))


def _names_a_class(cls: type) -> bool:
    """Whether instances may have a `__class__` of their own, as proxies do."""
    return cls.__getattribute__ is not object.__getattribute__ or any("__class__" in namespace_of(base) for base in cls.__mro__[:-1])  # type: ignore[comparison-overlap]


def _named_class(m: Machine, v: Tracker, info: type) -> bool:
    if (not isinstance(v, ObjectTracker) or isinstance(v, ModuleTracker)) and v.python_type() not in PROXIES:
        return False
    named = m.apply(getattr, v, m.const("__class__"), m.const(None))
    return isinstance(named, ClassTracker) and issubclass(named.obj, info)


def _inherits(cls: type, protocol: Any) -> bool:
    """Whether the class is registered with the protocol, or has all of its methods."""
    try:
        return abc.ABCMeta.__subclasscheck__(protocol, cls)
    except TypeError:  # in Python 3.11, of one with members that are no methods
        registered = (reference() for reference in abc._get_dump(protocol)[0])  # type: ignore[attr-defined]
        return protocol in cls.__mro__ or any(known is not None and issubclass(cls, known) for known in registered)


def _has_members(m: Machine, v: ObjectTracker, protocol: type) -> bool:
    """Whether an instance has the members of a typing.Protocol."""
    cls = v.python_type()
    if _inherits(cls, protocol):
        return True
    members = getattr(protocol, "__protocol_attrs__", None)
    if members is None:
        members = typing._get_protocol_attrs(protocol)  # type: ignore[attr-defined]
    data = getattr(protocol, "__non_callable_proto_members__", None)
    if data is None:
        data = {name for name in members if not callable(getattr(protocol, name, None))}
    missing = sorted(name for name in members if not any(name in namespace_of(base) for base in cls.__mro__))
    if any(getattr(cls, name) is None and name not in data for name in members - set(missing)):  # None refuses a method
        return False
    hooked = hasattr(cls, "__getattr__") or cls.__getattribute__ is not object.__getattribute__  # type: ignore[comparison-overlap]
    if not hooked and not all(m.truth(m.apply(hasattr, v, m.const(name))) for name in missing):
        return False
    found = [] if hooked else [m.apply(getattr, v, m.const(name)) for name in missing]
    if hooked or any(isinstance(value, ConstTracker) and value.read() is None for value in found):  # None refuses a method
        m.graph_break("B104", operation="isinstance of a protocol", value=v.show())
    return True


def is_instance(m: Machine, v: Tracker, info: Any) -> bool:
    """isinstance on a tracked value. Classes with their own __instancecheck__ are asked with the real object, or by subclass."""
    cls = v.python_type()
    if cls is info:
        return True
    answer = _asked(m, info, "__instancecheck__", v)
    if answer is not None:
        return answer
    if isinstance(info, tuple):
        return any(is_instance(m, v, item) for item in info)
    if isinstance(info, types.UnionType):
        return any(is_instance(m, v, type(None) if item is None else item) for item in info.__args__)
    if isinstance(info, type) and _plain_metaclass(info):
        return issubclass(cls, info) or (_names_a_class(cls) and _named_class(m, v, info))
    if isinstance(v, TensorTracker):
        if info is torch.nn.Parameter:
            return issubclass(cls, torch.nn.Parameter)
        if info is torch.nn.Buffer:
            marked = v.attrs.get("_is_buffer")
            return (v.obj is not MISSING and isinstance(v.obj, torch.nn.Buffer)) or (marked is not None and m.truth(marked))
        if info in LEGACY:
            return isinstance(torch.empty(0, dtype=v.meta.dtype), info)
    const = v.try_const()
    if const is not None:
        return _real_check(m, isinstance, const.value, info)
    protocol = isinstance(info, type) and getattr(info, "_is_protocol", False) and getattr(info, "_is_runtime_protocol", False)
    if isinstance(v, ObjectTracker) and protocol:
        return _has_members(m, v, info)
    if v.obj is not MISSING and not isinstance(v, TensorTracker):
        return _real_check(m, isinstance, v.obj, info)
    return _real_check(m, issubclass, cls, info)


def _real_check(m: Machine, check: Any, obj: Any, info: Any) -> bool:
    try:
        return bool(check(obj, info))
    except TypeError as error:
        m.raise_exception(error)


@rule(issubclass, Tracker, Tracker)
def issubclass_(m: Machine, v: Tracker, info: Tracker) -> Any:
    if isinstance(info, SequenceTracker) and issubclass(info.cls, tuple):
        return m.const(any(m.truth(m.apply(issubclass, v, item)) for item in info.items(m)))
    checked = _checks(m, v, info, "__subclasscheck__")
    if checked is not None:
        return checked
    real = class_info(m, info)
    if not isinstance(v, ClassTracker):
        const = v.try_const()
        return NotImplemented if const is None else m.const(_real_check(m, issubclass, const.value, real))
    answer = _asked(m, real, "__subclasscheck__", v)
    return m.const(_real_check(m, issubclass, v.obj, real) if answer is None else answer)


@rule(type, Tracker)
def type_(m: Machine, v: Tracker, *args: Tracker) -> Any:
    if args:
        m.graph_break("B101", callee="type", reason="a class is created")
    cls = v.python_type()
    return held(m, cls, cls.__name__)


@rule(type.__instancecheck__, ClassTracker, Tracker)
def type_instancecheck(m: Machine, cls: ClassTracker, v: Tracker) -> Tracker:
    return m.const(issubclass(v.python_type(), cls.obj))


@rule(callable, Tracker)
def callable_(m: Machine, v: Tracker) -> Tracker:
    return m.const(any("__call__" in namespace_of(base) for base in v.python_type().__mro__))


@rule(id, Tracker)
def id_(m: Machine, v: Tracker) -> Any:
    if isinstance(v, (ModuleTracker, ClassTracker, BuiltinTracker)) and v.obj is not MISSING and id(v.obj) not in m.made:  # type: ignore[attr-defined]
        return m.const(id(v.pin(m) if isinstance(v, ModuleTracker) else v.obj))  # guarded by identity
    return IdTracker(v)


# -- the rest


@rule(typing.cast, Tracker, Tracker)
def cast(m: Machine, cls: Tracker, v: Tracker) -> Tracker:
    return v


def call_numpy(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback: a universal function of numpy on plain numbers (np.sqrt(dim)) folds; on arrays it is the program's business."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(fn, numpy.ufunc) or kwargs:
        return NotImplemented
    if not all(isinstance(arg, ConstTracker) and isinstance(arg.read(), (int, float, numpy.generic)) for arg in args):
        return NotImplemented
    return fold(m, fn, args, {})


FALLBACKS.append(call_numpy)
