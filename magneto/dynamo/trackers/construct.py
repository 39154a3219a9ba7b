"""Calling a class: __new__ and __init__ as type.__call__ runs them."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.trackers.array import numpy_module
from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.build import builtin_base
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker, TupleTracker, is_bare_tuple
from magneto.dynamo.trackers.dispatch import FALLBACKS, apply, has_rows, rule
from magneto.dynamo.trackers.draw import generator_kinds
from magneto.dynamo.trackers.draw import made as made_generator
from magneto.dynamo.trackers.exception import ExceptionTracker
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type, guard_class, held
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import ObjectTracker, OpaqueTracker, payload_of
from magneto.dynamo.trackers.rules_numpy import construct_number

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def construct(m: Machine, klass: ClassTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """`klass(*args, **kwargs)`."""
    cls = klass.obj
    if has_rows(cls):
        return apply(m, cls, args, kwargs)
    if isinstance(cls, enum.EnumType):
        return _enum_member(m, cls, args)  # type: ignore[arg-type]
    numpy = numpy_module()
    if numpy is not None and issubclass(cls, numpy.generic) and not kwargs:
        made = construct_number(m, cls, args)
        if made is not NotImplemented:
            return made
    if numpy is not None and cls is numpy.dtype:
        consts = [numpy.dtype(arg.obj) if isinstance(arg, ClassTracker) else arg.try_const() for arg in args]
        if len(consts) == 1 and not kwargs and consts[0] is not None:
            return m.const(numpy.dtype(getattr(consts[0], "value", consts[0])))
    if cls in generator_kinds() and (generator := made_generator(m, cls, args, kwargs)) is not NotImplemented:
        return generator  # type: ignore[no-any-return]
    meta_call = find_in_type(m, type(cls), "__call__")
    if meta_call is dict:  # typed dictionaries
        return apply(m, dict, args, kwargs)
    if isinstance(meta_call, types.FunctionType):
        return m.call(held(m, meta_call, f"{type(cls).__name__}.__call__"), [klass, *args], kwargs)
    return type_call(m, klass, args, kwargs)


def _enum_member(m: Machine, cls: type[enum.Enum], args: Sequence[Tracker]) -> Tracker:
    consts = [arg.try_const() for arg in args]
    if len(consts) != 1 or consts[0] is None:
        m.graph_break("B101", callee=cls.__name__, reason="enumeration look-up by a value that is not constant")
    try:
        return ConstTracker(cls(consts[0].value))
    except ValueError as error:
        m.raise_exception(error)


def type_call(m: Machine, klass: ClassTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """type.__call__: allocate, initialise."""
    cls = klass.obj
    if getattr(cls, "__abstractmethods__", None):
        m.graph_break("B101", callee=cls.__qualname__, reason="the class is abstract")
    new = find_in_type(m, cls, "__new__")
    fn = new.__func__ if isinstance(new, staticmethod) else new
    if issubclass(cls, torch.Tensor) and not isinstance(fn, types.FunctionType):
        m.graph_break("B101", callee=cls.__qualname__, reason="its instances are made by C code")
    if isinstance(fn, types.FunctionType):
        made = m.call(held(m, fn, f"{cls.__name__}.__new__"), [klass, *args], kwargs)
    else:
        made = allocate(m, klass, fn, args, kwargs)
    if cls in made.python_type().__mro__:
        _initialise(m, klass, fn, made, args, kwargs)
    return made


def _initialise(m: Machine, klass: ClassTracker, new: Any, made: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> None:
    cls = made.python_type()
    init = find_in_type(m, cls, "__init__")
    if isinstance(init, types.FunctionType):
        result = m.call(held(m, init, f"{cls.__name__}.__init__"), [made, *args], kwargs)
        const = result.try_const()
        if const is None or const.value is not None:
            m.raise_exception(TypeError(f"__init__() should return None, not '{_C.type_name(result.python_type())}'"))
    elif init is not object.__init__:
        apply(m, init, [made, *args], kwargs)
    elif (args or kwargs) and new is object.__new__:
        m.raise_exception(TypeError(f"{klass.obj.__name__}() takes no arguments"))


def allocate(m: Machine, klass: ClassTracker, new: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """What a __new__ written in C gives for a Python class."""
    cls = klass.obj
    guard_class(m, cls)
    if issubclass(cls, BaseException):
        return _exception(m, cls, args, kwargs)
    base = builtin_base(cls)
    if base is None:
        m.graph_break("B101", callee=cls.__qualname__, reason="its instances are laid out by C code")
    if hasattr(cls, "__del__"):
        m.graph_break("B101", callee=cls.__qualname__, reason="its instances have a finaliser, which runs when the last reference goes")
    if new is object.__new__ and (args or kwargs):
        _refuse_arguments(m, cls)
    if kwargs and base in (tuple, frozenset) and not isinstance(find_in_type(m, cls, "__init__"), types.FunctionType):
        m.graph_break("B101", callee=cls.__qualname__, reason="keyword arguments")
    m.overriding |= hasattr(cls, "__torch_function__")  # type: ignore[attr-defined]
    made = ModuleTracker(cls) if issubclass(cls, torch.nn.Module) else ObjectTracker(cls)
    if issubclass(base, dict):
        payload = DictTracker(None, base)
        payload.owner = made
        made.payload = payload
    elif base is list:
        made.payload = ListTracker([])
    elif base is tuple:
        items = m.iterate(args[0]) if args else []
        if is_bare_tuple(cls):
            return TupleTracker(items, cls)
        made.payload = TupleTracker(items)
    elif base in (set, frozenset):
        given = m.apply(base, *(args if base is frozenset else ()))
        assert isinstance(given, SetTracker)
        elements = SetTracker(dict(given.entries), base)
        elements.real, elements.owner, made.payload = given.real, made, elements
    elif base in (int, float, complex, str, bytes):
        made.payload = payload_of(m.apply(base, *args, **kwargs))
        if not isinstance(made.payload, ConstTracker):
            m.graph_break("B101", callee=cls.__qualname__, reason="its value is not constant")
    elif new is not object.__new__ and base is not types.SimpleNamespace:
        m.graph_break("B101", callee=cls.__qualname__, reason="its __new__ is C code")
    return made


_MEMBERS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def exception_members(cls: type[BaseException]) -> list[str]:
    """What C code keeps of an exception beside `args` (`SyntaxError.lineno`); `value` of a StopIteration is computed by its tracker."""
    bases = [base for base in cls.__mro__ if issubclass(base, BaseException) and not base.__flags__ & (1 << 9)]
    bases.remove(BaseException)
    return [name for base in bases if base is not StopIteration for name, raw in vars(base).items() if isinstance(raw, _MEMBERS)]


def _exception(m: Machine, cls: type[BaseException], args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """An exception made by C code, before its __init__ (which fills the members in, but for those of OSError)."""
    in_c = isinstance(find_in_type(m, cls, "__init__"), types.WrapperDescriptorType)
    if issubclass(cls, BaseExceptionGroup):
        return _exception_group(m, cls, args)
    if issubclass(cls, OSError) and not in_c:
        m.graph_break("B101", callee=cls.__qualname__, reason="its constructor is C code")
    members = exception_members(cls)
    if kwargs and in_c and not members:
        m.raise_exception(TypeError(f"{_C.type_name(cls)}() takes no keyword arguments"))
    made = ExceptionTracker(cls, args)
    made.slots.update((name, m.const(None)) for name in members)
    return made


def _exception_group(m: Machine, cls: type[BaseException], args: Sequence[Tracker]) -> Tracker:
    """A group of known exceptions; CPython says what is wrong with anything else."""
    message = args[0].try_const() if len(args) == 2 else None
    group = args[1] if len(args) == 2 else None
    items = m.iterate(group) if isinstance(group, SequenceTracker) and group.cls in (list, tuple) else []
    narrow = all(issubclass(item.python_type(), Exception) for item in items)
    wanted = narrow or not issubclass(cls, Exception)
    if (
        message is None
        or type(message.value) is not str
        or not items
        or not wanted
        or not all(isinstance(i, ExceptionTracker) for i in items)
    ):
        m.graph_break("B101", callee=cls.__qualname__, reason="its constructor is C code")
    return ExceptionTracker(ExceptionGroup if narrow and cls is BaseExceptionGroup else cls, args)


def _fill_members(m: Machine, made: ExceptionTracker, base: type, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> None:
    """What the C constructor of a built-in exception makes of its arguments: asked of a real one."""
    if issubclass(base, BaseExceptionGroup) or (issubclass(base, SystemExit) and len(args) == 1 and not kwargs):
        made.set_arguments(args)
        if issubclass(base, SystemExit):
            made.slots["code"] = args[0]
        return
    values, named = [arg.try_const() for arg in args], {name: value.try_const() for name, value in kwargs.items()}
    if any(const is None for const in (*values, *named.values())):
        m.graph_break("B101", callee=made.cls.__qualname__, reason="its constructor is C code")
    try:
        real: Any = base(*(c.value for c in values if c is not None), **{name: c.value for name, c in named.items() if c is not None})
    except Exception as error:
        m.raise_exception(error)
    if type(real) is not base and made.cls is base:  # OSError makes FileNotFoundError ...
        made.cls = type(real)
    made.set_arguments([m.const(arg) for arg in real.args])
    made.slots = {name: m.const(getattr(real, name)) for name in exception_members(made.cls) if hasattr(real, name)}


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.OrderedDict)
_BASES = (object, *_CONTAINERS, int, float, complex, str, bytes, BaseException)


def _new(base: Any) -> None:
    @rule(base.__new__, ClassTracker)
    def new(m: Machine, klass: ClassTracker, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
        cls = klass.obj
        if not issubclass(cls, base) or (base is object and builtin_base(cls) is not object):  # CPython refuses it
            guard_class(m, cls)
            try:
                base.__new__(cls)
            except TypeError as error:
                m.raise_exception(error)
        return _new_of_c(m, klass, args, kwargs)


for _base in _BASES:
    _new(_base)


def _new_of_c(m: Machine, klass: ClassTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """What a `__new__` written in C gives, called by the program."""
    cls = klass.obj
    if issubclass(cls, BaseException):
        return allocate(m, klass, MISSING, args, kwargs)
    if builtin_base(cls) is object and (args or kwargs):
        _refuse_arguments(m, cls)
    if cls is object:
        return ObjectTracker(object)
    if cls in _BASES and cls is not BaseException:
        return m.apply(cls, *(() if cls in (dict, list, set, collections.OrderedDict) else args), **kwargs)
    base = builtin_base(cls)
    return allocate(m, klass, object.__new__ if base is object else MISSING, args, kwargs)


@rule(object.__init__, Tracker)
def object_init(m: Machine, v: Tracker, /, *args: Tracker, **kwargs: Tracker) -> None:
    """Nothing to do but to refuse superfluous arguments, as CPython does where nobody else takes them."""
    cls = v.python_type()
    if not args and not kwargs:
        return
    if find_in_type(m, cls, "__init__") is not object.__init__:
        m.raise_exception(TypeError("object.__init__() takes exactly one argument (the instance to initialize)"))
    if _new_of(m, cls) is object.__new__:
        m.raise_exception(TypeError(f"{_C.type_name(cls)}.__init__() takes exactly one argument (the instance to initialize)"))


def _new_of(m: Machine, cls: type) -> Any:
    found = find_in_type(m, cls, "__new__")
    return found.__func__ if isinstance(found, staticmethod) else found


def _refuse_arguments(m: Machine, cls: type) -> None:
    """object.__new__ with superfluous arguments."""
    guard_class(m, cls)
    try:
        object.__new__(cls, None)  # type: ignore[call-arg]  # CPython decides by more than the class shows: `__new__` may have been deleted
    except TypeError as error:
        m.raise_exception(error)


def exception_methods(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback of dispatch: __init__ of the built-in exceptions (each class has its own)."""
    if not isinstance(fn, types.WrapperDescriptorType) or not issubclass(fn.__objclass__, BaseException):
        return NotImplemented
    if fn.__name__ != "__init__" or not args or not isinstance(args[0], ExceptionTracker):
        return NotImplemented
    made, base = args[0], fn.__objclass__
    if made.source is not None:  # it exists: the call is made for real
        if exception_members(base) or kwargs:
            m.graph_break("B101", callee=f"{base.__qualname__}.__init__", reason="of an existing exception")
        m.apply(setattr, made, m.const("args"), TupleTracker(list(args[1:])))
    elif exception_members(base):
        _fill_members(m, made, base, args[1:], kwargs)
    elif kwargs:
        m.raise_exception(TypeError(f"{made.cls.__name__}() takes no keyword arguments"))
    else:
        made.set_arguments(args[1:])
    return None


FALLBACKS.append(exception_methods)


@rule((dict.__init__, collections.OrderedDict.__init__), ObjectTracker)
def dict_init(m: Machine, v: ObjectTracker, /, *args: Tracker, **kwargs: Tracker) -> None:
    if args or kwargs:
        apply(m, dict.update, [v, *args], kwargs)


@rule(list.__init__, ObjectTracker)
def list_init(m: Machine, v: ObjectTracker, *args: Tracker) -> None:
    if args:
        assert v.payload is not None
        m.apply(list.extend, v.payload, *args)


@rule(set.__init__, ObjectTracker)
def set_init(m: Machine, v: ObjectTracker, *args: Tracker) -> None:
    if args:
        assert v.payload is not None
        m.apply(set.clear, v.payload)
        m.apply(set.update, v.payload, *args)


@rule(type.__call__, ClassTracker)
def call_type(m: Machine, klass: ClassTracker, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
    return type_call(m, klass, args, kwargs)


def call_value(m: Machine, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """Call any tracked value."""
    if isinstance(fn, ClassTracker):
        return construct(m, fn, args, kwargs)
    result = fn.call(m, args, kwargs)
    if result is not None:
        return result
    if isinstance(fn, OpaqueTracker):
        if callable(fn.obj):
            return apply(m, fn.pin(m), args, kwargs)
        m.graph_break("B101", callee=fn.show(), reason="it is not Python code")
    method = find_special(m, fn, "__call__")
    if method is None:
        m.raise_exception(TypeError(f"'{_C.type_name(fn.python_type())}' object is not callable"))
    if isinstance(method, BuiltinTracker) and method.obj is fn:
        m.graph_break("B101", callee=fn.show(), reason="it is not Python code")
    return m.call(method, args, kwargs)
