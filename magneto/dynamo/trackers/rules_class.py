"""Rows of what programs ask of classes: dir, subclasses, checks by metaclasses, descriptors called by hand; functions known by their code."""

from __future__ import annotations

import functools
import inspect
import types
import typing
import weakref
from typing import TYPE_CHECKING, Any

from torch.distributions.utils import _lazy_property_and_property

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.attributes import user_method
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.basic_iterator import IteratorTracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS, fold, rule
from magneto.dynamo.trackers.function import CODE_RULES, METHOD_GET, BoundMethodTracker, BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker, guard_class, held
from magneto.dynamo.trackers.object import ObjectTracker
from magneto.dynamo.trackers.plain import plain_all
from magneto.dynamo.trackers.rules_identity import same
from magneto.dynamo.trackers.rules_operator import ask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Machine


@rule(dir, Tracker)
def dir_of(m: Machine, v: Tracker) -> Any:
    if user_method(m, v, "__dir__") is not MISSING:
        return m.apply(sorted, ask(m, v, "__dir__") or m.const(None))
    if isinstance(v, ClassTracker):
        guard_class(m, v.obj)
        return m.const(dir(v.obj))
    if type(v) is not ObjectTracker:
        return fold(m, dir, (v,), {})
    guard_class(m, v.cls)
    attrs = v.attrs(m)
    names = [] if attrs is None else [key.try_const() for key in attrs.keys(m)]
    return m.const(sorted({*type.__dir__(v.cls), *(name.value for name in names if name is not None)}))


@rule(_lazy_property_and_property, FunctionTracker)
def read_from_class(m: Machine, wrapped: FunctionTracker) -> Any:
    """What a lazy property of a distribution is when its class is asked: only a sign, which nobody keeps."""
    if wrapped.obj is MISSING:
        return NotImplemented
    made = _lazy_property_and_property(wrapped.obj)  # type: ignore[no-untyped-call]
    return m.wrap(made, Held("lazy_property", made))


@rule(type.__subclasses__, ClassTracker)
def subclasses(m: Machine, cls: ClassTracker) -> Any:
    found = cls.obj.__subclasses__()
    m.guard(Kind.STATE, None, (f"{cls.obj.__name__}.__subclasses__", cls.obj.__subclasses__, (), found))
    return ListTracker([held(m, sub, sub.__name__) for sub in found])


@rule(type.__subclasscheck__, ClassTracker, ClassTracker)
def subclasscheck(m: Machine, cls: ClassTracker, sub: ClassTracker) -> Any:
    return m.const(type.__subclasscheck__(cls.obj, sub.obj))


@rule(type.mro, ClassTracker)
def mro(m: Machine, cls: ClassTracker) -> Any:
    guard_class(m, cls.obj)
    return ListTracker([held(m, base, base.__name__) for base in type.mro(cls.obj)])


# -- descriptors and default methods called by hand


@rule(types.MethodType, Tracker, Tracker)
def method_of(m: Machine, fn: Tracker, owner: Tracker) -> Any:
    const = owner.try_const()
    known = isinstance(fn, FunctionTracker) or (isinstance(fn, BuiltinTracker) and type(fn.obj) is types.FunctionType)
    return NotImplemented if not known or (const is not None and const.value is None) else BoundMethodTracker(fn, owner)


@rule(types.FunctionType.__get__, FunctionTracker, Tracker)
def function_get(m: Machine, fn: FunctionTracker, obj: Tracker, owner: Tracker | None = None) -> Tracker:
    if isinstance(obj, ConstTracker) and obj.read() is None and owner is not None:
        return fn
    return BoundMethodTracker(fn, obj)


@rule((METHOD_GET,) if METHOD_GET is not None else (), BoundMethodTracker, Tracker)
def method_get(m: Machine, method: BoundMethodTracker, obj: Tracker, owner: Tracker | None = None) -> Tracker:
    return method


@rule(object.__eq__, Tracker, Tracker)
def object_eq(m: Machine, v: Tracker, other: Tracker) -> Any:
    return m.const(True if same(m, v, other) else NotImplemented)


@rule(object.__ne__, Tracker, Tracker)
def object_ne(m: Machine, v: Tracker, other: Tracker) -> Any:
    method = m.apply(getattr, v, m.const("__eq__"))
    result = m.call(method, [other], {})
    if isinstance(result, ConstTracker) and result.value is NotImplemented:
        return result
    return m.const(not m.truth(result))


@rule(object.__format__, Tracker, Tracker)
def object_format(m: Machine, v: Tracker, spec: Tracker) -> Any:
    const = spec.try_const()
    return m.apply(str, v) if const is not None and const.value == "" else NotImplemented


@rule(object.__init_subclass__)
def object_init_subclass(m: Machine, *args: Tracker) -> None:
    """Nothing to do."""


def step_by_name(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback: __next__ and __iter__ of an iterator, called as methods."""
    if isinstance(fn, types.WrapperDescriptorType) and len(args) == 1 and isinstance(args[0], IteratorTracker):
        if fn.__name__ == "__next__":
            return m.apply(next, args[0])
        if fn.__name__ == "__iter__":
            return args[0]
    return NotImplemented


FALLBACKS.append(step_by_name)


# -- reflection on existing callables and classes


def real_function(m: Machine, v: Tracker) -> Any:
    """The real object of a tracked callable; for a function made inside the region one with the same parameters. MISSING: unknown."""
    if isinstance(v, BoundMethodTracker) and v.obj is MISSING:
        fn, owner = real_function(m, v.fn), v.owner.obj
        if fn is MISSING:
            return MISSING
        return types.MethodType(fn, owner if owner is not MISSING else object())
    if not isinstance(v, FunctionTracker) or v.obj is not MISSING:
        return v.obj
    values = plain_all(m, v.defaults, v.kwdefaults)
    annotations = v.attrs.get("__annotations__")
    notes = plain_all(m, [], {k.try_const().value: x for k, x in annotations.pairs(m)}) if annotations is not None else ([], {})  # type: ignore[attr-defined,union-attr]
    if values is None or notes is None or v.namespace.entries:  # `__wrapped__`, `__text_signature__`, a partialmethod ...
        return MISSING
    closure = tuple(types.CellType() for _ in v.code.co_freevars)
    made = types.FunctionType(v.code, v.globals, v.name, tuple(values[0]), closure)
    made.__kwdefaults__, made.__annotations__ = values[1] or None, notes[1]  # type: ignore[assignment]
    return made


@rule(inspect.signature, Tracker)
def signature(m: Machine, v: Tracker, /, **kwargs: Tracker) -> Any:
    """Of a callable known by identity or by its code: the real signature."""
    real = real_function(m, v)
    if real is MISSING or kwargs or id(real) in m.made or any(v in operands for _, operands in m.effects):  # type: ignore[attr-defined]
        return NotImplemented
    if isinstance(v, ClassTracker):
        guard_class(m, v.obj)
    try:
        return held(m, inspect.signature(real), "signature")
    except (ValueError, TypeError) as error:
        m.raise_exception(error)


def _reflect(fn: Any) -> None:
    @rule(fn, Tracker)
    def body(m: Machine, v: Tracker) -> Any:
        if not isinstance(v, (ClassTracker, FunctionTracker)) or v.obj is MISSING or id(v.obj) in m.made:  # type: ignore[attr-defined]
            return NotImplemented
        if isinstance(v, ClassTracker):
            guard_class(m, v.obj)
        try:
            return m.const(fn(v.obj))
        except Exception as error:
            m.raise_exception(error)


for _fn in (inspect.getfullargspec, inspect.getdoc, typing.get_type_hints):
    _reflect(_fn)


# -- functions known by their code


def _caches_weakly(dispatch: types.FunctionType) -> bool:
    """Whether the look-up may be made while capturing: its cache is the library's own."""
    cells = dict(zip(dispatch.__code__.co_freevars, dispatch.__closure__ or (), strict=True))
    return type(cells["dispatch_cache"].cell_contents) is weakref.WeakKeyDictionary


def dispatch_of(m: Machine, fn: FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """`dispatch` of an existing functools.singledispatch function: the real look-up, guarded by its result."""
    if fn.obj is MISSING or len(args) != 1 or not isinstance(args[0], ClassTracker) or m.effects or not _caches_weakly(fn.obj):  # type: ignore[attr-defined]
        return NotImplemented  # what the region has changed is not in the registry yet
    found = fn.obj(args[0].obj)
    m.guard(Kind.STATE, None, (f"dispatch({args[0].obj.__name__})", fn.obj, (args[0].obj,), found))
    return held(m, found, getattr(found, "__name__", "implementation"))


_dispatched: Any = functools.singledispatch(lambda value: None)
CODE_RULES[_dispatched.dispatch.__code__] = dispatch_of
