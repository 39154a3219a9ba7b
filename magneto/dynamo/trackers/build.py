"""wrap: the tracker of an existing object, from one table type -> builder. Builders add the guards their kind needs; what they do not read is not guarded."""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import operator
import os
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.guards.rows import Kind, TensorRow
from magneto.dynamo.guards.source import Attr, Held, Local, Source, Stack
from magneto.dynamo.marks import DISABLE, mark_of
from magneto.dynamo.trackers.array import function_text, numpy_module, numpy_random, wrap_array
from magneto.dynamo.trackers.base import Tracker, namespace_of
from magneto.dynamo.trackers.bytearray import BytearrayTracker
from magneto.dynamo.trackers.constant import CONST_TYPES, VALUE_TYPES, ConstTracker, is_constant, is_numpy_scalar
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, SliceTracker, TupleTracker, is_bare_tuple, later_items
from magneto.dynamo.trackers.dispatch import has_rows
from magneto.dynamo.trackers.exception import wrap_exception
from magneto.dynamo.trackers.existing_iterator import ITERATORS, wrap_generator, wrap_iterator
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker, CellTracker, FunctionTracker, PartialTracker
from magneto.dynamo.trackers.getter import GetterTracker
from magneto.dynamo.trackers.keys import object_token
from magneto.dynamo.trackers.klass import ClassTracker, has_class_rows
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker
from magneto.dynamo.trackers.marked import SCAN, MarkedTracker
from magneto.dynamo.trackers.membership import ObjectSet
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import ObjectTracker, OpaqueTracker, WeakRefTracker, instance_dict
from magneto.dynamo.trackers.pymodule import PyModuleTracker
from magneto.dynamo.trackers.read_only import wrap_view
from magneto.dynamo.trackers.switched import wrap_disabled, wrap_optimized
from magneto.dynamo.trackers.tensor import TensorTracker, of_one_base
from magneto.dynamo.trackers.torch_calls import is_graph_callable
from magneto.dynamo.trackers.torch_function import follows
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

Builder = Callable[["Machine", Any, Source], Tracker]


def wrap(m: Machine, obj: Any, source: Source) -> Tracker:
    """Tracker of an existing object."""
    builder = BUILDERS.get(type(obj))
    if builder is not None:
        return builder(m, obj, source)
    numpy = numpy_module()
    if numpy is not None and type(obj) is numpy.ndarray:
        return wrap_array(m, obj, source)
    if numpy is not None and issubclass(type(obj), (numpy.number, numpy.bool_)) and type(obj).__module__ == "numpy":
        return wrap_const(m, obj, source)
    if (of_numpy := numpy_random()) is not None and type(obj) is type(of_numpy.seed):  # a function of Cython
        return wrap_callable(m, obj, source)
    kind = type(obj)
    if _asks_metaclass(kind) or _asks_metaclass(type(kind)):
        return wrap_opaque(m, obj, source)
    for cls, builder in SUBCLASS_BUILDERS:
        if issubclass(kind, cls):  # (isinstance would ask the object for its `__class__`)
            return builder(m, obj, source)
    return wrap_object(m, obj, source)


def _asks_metaclass(cls: type) -> bool:
    """Whether a metaclass of the program answers for the attributes of its classes: looking into one of them would run it."""
    return issubclass(cls, type) and isinstance(cls.__getattribute__, types.FunctionType)


def from_value(m: Machine, value: Any) -> Tracker:
    """Tracker of a fresh value computed during capture: no source, nothing guarded."""
    cls = type(value)
    if cls in CONST_TYPES or cls in VALUE_TYPES or (cls is memoryview and type(value.obj) is bytes):
        return ConstTracker(value)
    if cls is bytearray:
        return BytearrayTracker(value)
    if isinstance(value, Tracker):
        return value
    if cls is tuple or cls is torch.Size or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return TupleTracker([from_value(m, item) for item in value], cls)
    if cls is list:
        return ListTracker([from_value(m, item) for item in value])
    if cls is dict or cls is collections.OrderedDict:
        return DictTracker.of(m, [(from_value(m, key), from_value(m, item)) for key, item in value.items()], cls)
    if cls is set or cls is frozenset:
        made = SetTracker.of(m, [from_value(m, item) for item in value], cls)
        made.real = value if made.real is not None else None
        return made
    if is_constant(value) or is_numpy_scalar(value):
        return ConstTracker(value)
    return m.wrap(value, Held(getattr(value, "__name__", cls.__name__), value))


def _typed(m: Machine, obj: Any, source: Source) -> None:
    if not isinstance(source, Held):
        m.guard(Kind.TYPE_IS, source, type(obj))


def _same(m: Machine, obj: Any, source: Source) -> None:
    if not isinstance(source, Held):
        m.guard(Kind.ID_IS, source, obj)


def wrap_const(m: Machine, obj: Any, source: Source) -> Tracker:
    if isinstance(source, Held):
        return ConstTracker(obj, kept=True)
    if not isinstance(
        source, (Local, Stack)
    ):  # found where a program may delete it: this much is relied on even when the value is never read
        m.guard(Kind.PRESENT, source, None)
    return ConstTracker(obj, source, m)


def wrap_subclass(m: Machine, obj: torch.Tensor, source: Source) -> Tracker:
    """A tensor of a user's class: its data, where they are plain memory; operations on it ask the class."""
    if not follows(type(obj)) or torch.nn.parameter.is_lazy(obj):  # lazy modules: no shape yet
        return wrap_opaque(m, obj, source)
    m.overriding = True  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunctionSubclass():
        return wrap_tensor(m, obj, source)


def _history_lost(obj: torch.Tensor) -> bool:
    """A view made without gradients whose base has been written since: autograd raises when its history is asked for."""
    if obj.requires_grad and obj._is_view():
        try:
            obj.grad_fn  # noqa: B018
        except RuntimeError:
            return True
    return False


def wrap_tensor(m: Machine, obj: torch.Tensor, source: Source) -> Tracker:
    cls = type(obj)
    plain = obj.layout is torch.strided and not obj.is_quantized
    if not plain or obj.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(obj) or _history_lost(obj):
        _typed(m, obj, source)
        return OpaqueTracker(obj, source, m)
    if m.begun and any(of_one_base(obj, one) for one in m.begun):
        m.graph_break("B104", operation="a read", value="a view of what has been written with a history")
    meta = TensorMeta.of(obj)
    row = TensorRow(cls, meta.dtype, meta.device, meta.shape, meta.strides, meta.requires_grad, obj.is_inference(), meta.lazy)
    meta, row, symbols = m.varying.enter(obj, source, meta, row)
    m.guard(Kind.TENSOR, source, row)
    m.recorder.inference_tensors |= obj.is_inference()  # type: ignore[attr-defined]
    made = TensorTracker(meta, cls, None, source, obj)
    for symbol, dim in symbols:
        symbol.places.append((made, dim, meta))
    return made


def wrap_sequence(m: Machine, obj: tuple[Any, ...], source: Source) -> Tracker:
    """Tuples, constant or not: items are read one by one."""
    _typed(m, obj, source)
    return TupleTracker(later_items(obj, source), type(obj), source, obj, m)


def wrap_list(m: Machine, obj: list[Any], source: Source) -> Tracker:
    _typed(m, obj, source)
    return ListTracker(later_items(obj, source), list, source, obj, m)


def wrap_deque(m: Machine, obj: collections.deque[Any], source: Source) -> Tracker:
    _typed(m, obj, source)
    if not isinstance(source, Held):
        m.guard(Kind.EQUALS, Attr(source, "maxlen"), obj.maxlen)
    return DequeTracker(later_items(list(obj), source), obj.maxlen, source, obj, m)


def wrap_dict(m: Machine, obj: dict[Any, Any], source: Source) -> Tracker:
    _typed(m, obj, source)
    built = DictTracker.existing(obj, source, m, type(obj))
    if isinstance(obj, collections.defaultdict):
        built.default_factory = m.wrap(obj.default_factory, Attr(source, "default_factory"))
    return built


def wrap_set(m: Machine, obj: Any, source: Source) -> Tracker:
    _typed(m, obj, source)
    if not all(is_constant(item) or isinstance(item, _NAMED) for item in obj):
        return ObjectSet(obj, source, m)
    entries = {object_token(item): ConstTracker(item) if is_constant(item) else m.wrap(item, Held(item.__name__, item)) for item in obj}
    return SetTracker(entries, type(obj), source, obj, m)


_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
"""Elements of sets that the guard on the set compares by identity."""


def wrap_bytearray(m: Machine, obj: bytearray, source: Source) -> Tracker:
    _typed(m, obj, source)
    return BytearrayTracker(bytearray(obj), source, obj, m)


def wrap_slice(m: Machine, obj: slice, source: Source) -> Tracker:
    _typed(m, obj, source)
    parts = [m.wrap(getattr(obj, name), Attr(source, name)) for name in ("start", "stop", "step")]
    return SliceTracker(parts[0], parts[1], parts[2], source)


def wrap_function(m: Machine, obj: types.FunctionType, source: Source) -> Tracker:
    if has_rows(obj) or (is_graph_callable(obj) and mark_of(obj) is None):
        _same(m, obj, source)
        return BuiltinTracker(obj, source)
    if (obj.__module__ or "").partition(".")[0] == "numpy" and function_text(obj) is not None:
        _same(m, obj, source)
        return BuiltinTracker(obj, source)
    for builder in FUNCTION_BUILDERS:
        built = builder(m, obj, source)
        if built is not None:
            return built
    kind = mark_of(obj)
    if kind is not None:
        _same(m, obj, source)
        origin = obj.__dict__.get("_torchdynamo_orig_callable")
        if type(origin) is types.FunctionType and (origin.__module__ or "").startswith("torch.optim"):  # disabled for the incumbent's sake
            return wrap_function(m, origin, Held(origin.__name__, origin))
        return MarkedTracker(obj, kind, source)
    if obj is torch.nn.Module.__init__ and obj is not _MODULE_INIT:  # Dynamo puts its own round it, which counts modules
        _same(m, obj, source)
        return FunctionTracker.existing(m, _MODULE_INIT, Held("Module.__init__", _MODULE_INIT))  # type: ignore[arg-type]
    if _not_followed(obj):
        _same(m, obj, source)
        return MarkedTracker(obj, DISABLE, source)
    return FunctionTracker.existing(m, obj, source)


FUNCTION_BUILDERS: list[Callable[[Machine, types.FunctionType, Source], Tracker | None]] = []
"""Asked before a Python function is followed: kinds of functions with a tracker of their own."""

_MODULE_INIT = torch.nn.Module.__init__
NOT_FOLLOWED = ("torch._functorch", "torch._higher_order_ops", "torch._dynamo", "torch._inductor", "torch.fx", "torch.distributed")
"""Modules whose functions are called between two graphs: transforms and compilers, not models."""
_NOT_FOLLOWED_FILES = tuple(os.path.join(os.path.dirname(torch.__file__), *name.split(".")[1:]) for name in NOT_FOLLOWED)


def _not_followed(obj: types.FunctionType) -> bool:
    module = obj.__module__ or ""
    if module == SCAN and obj.__name__ != SCAN.rpartition(".")[2]:
        return False
    return module.startswith(NOT_FOLLOWED) or obj.__code__.co_filename.startswith(_NOT_FOLLOWED_FILES)


def wrap_method(m: Machine, obj: types.MethodType, source: Source) -> Tracker:
    _typed(m, obj, source)
    held = isinstance(source, Held)
    parts = [
        m.wrap(part, Held(name, part) if held else Attr(source, name))
        for name in ("__func__", "__self__")
        for part in (getattr(obj, name),)
    ]
    return BoundMethodTracker(parts[0], parts[1], source, obj)


_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType, property)


def wrap_builtin(m: Machine, obj: Any, source: Source) -> Tracker:
    owner = getattr(obj, "__self__", None)
    raw = inspect.getattr_static(owner, obj.__name__, None) if isinstance(owner, type) else None
    if raw is not None and has_class_rows(raw):
        _typed(m, obj, source)
        return BoundMethodTracker(BuiltinTracker(raw), m.wrap(owner, Attr(source, "__self__")), source, obj)
    known = has_rows(obj) or is_graph_callable(obj) or owner is None or isinstance(owner, (types.ModuleType, type))
    kind = mark_of(obj)
    if known or kind is not None:
        _same(m, obj, source)
        return BuiltinTracker(obj, source) if kind is None else MarkedTracker(obj, kind, source)
    unbound = getattr(type(owner), obj.__name__, None)
    if not isinstance(unbound, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        _same(m, obj, source)
        return BuiltinTracker(obj, source)
    _typed(m, obj, source)
    if not isinstance(source, Held):
        m.guard(Kind.EQUALS, Attr(source, "__name__"), obj.__name__)
        if isinstance(owner, _DESCRIPTORS):  # `Tensor.requires_grad.__get__`, as a `__torch_function__` is given it
            m.guard(Kind.ID_IS, Attr(source, "__self__"), owner)
    return BoundMethodTracker(BuiltinTracker(unbound), m.wrap(owner, Attr(source, "__self__")), source, obj)


def wrap_callable(m: Machine, obj: Any, source: Source) -> Tracker:
    _same(m, obj, source)
    kind = mark_of(obj)
    if kind is not None:
        return MarkedTracker(obj, kind, source)
    return BuiltinTracker(obj, source)


def wrap_class(m: Machine, obj: type, source: Source) -> Tracker:
    _same(m, obj, source)
    return ClassTracker(obj, source)


def wrap_py_module(m: Machine, obj: types.ModuleType, source: Source) -> Tracker:
    if type(obj).__getattribute__ is not types.ModuleType.__getattribute__ or type(vars(obj).get("__name__")) is not str:
        return wrap_opaque(m, obj, source)
    _same(m, obj, source)
    return PyModuleTracker(obj, source)


def wrap_nn_module(m: Machine, obj: torch.nn.Module, source: Source) -> Tracker:
    if isinstance(obj, torch.jit.ScriptModule):
        _same(m, obj, source)
        return OpaqueTracker(obj, source, m)
    built = ModuleTracker(type(obj), source, obj)
    _typed(m, obj, source)  # besides identity: `module.__class__ = Other` leaves that as it is
    outer: Source | None = source
    while m.changing and outer is not None:
        if outer in m.changing:
            return built
        outer = outer.base()
    built.pin(m)
    return built


def wrap_cell(m: Machine, obj: types.CellType, source: Source) -> Tracker:
    return CellTracker(None, source, obj, m)


def wrap_partial(m: Machine, obj: functools.partial[Any], source: Source) -> Tracker:
    return PartialTracker.existing(m, obj, source)


def wrap_getter(m: Machine, obj: Any, source: Source) -> Tracker:
    _same(m, obj, source)
    kind, args, *_ = obj.__reduce__()
    kwargs: dict[str, Any] = {}
    if isinstance(kind, functools.partial):  # methodcaller with keywords
        kind, args, kwargs = operator.methodcaller, (*kind.args, *args), kind.keywords  # type: ignore[attr-defined]
    return GetterTracker(
        kind, [from_value(m, arg) for arg in args], {name: from_value(m, value) for name, value in kwargs.items()}, source, obj
    )


def wrap_opaque(m: Machine, obj: Any, source: Source) -> Tracker:
    _typed(m, obj, source)
    return OpaqueTracker(obj, source, m)


_VALUES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda obj: bytes.__getitem__(obj, slice(None)),
    complex: lambda obj: complex.__pos__(obj),
}
"""Immutable types that programs subclass, and the plain value of an instance."""
_OBJECT_BASES = (
    object, types.SimpleNamespace, dict, list, tuple, set, frozenset, *_VALUES, collections.OrderedDict, collections.defaultdict,
)  # fmt: skip


def _laid_out_by_c(cls: type) -> bool:
    """Whether a heap type holds more than what a class statement adds: a dictionary, weak references, its __slots__."""
    if cls.__base__ is None:
        return False
    slots = namespace_of(cls).get("__slots__", ())
    members = 1 if isinstance(slots, str) else len(tuple(slots))
    members += sum(name in namespace_of(cls) for name in ("__dict__", "__weakref__"))
    return cls.__basicsize__ - cls.__base__.__basicsize__ > 8 * members


def builtin_base(cls: type) -> type | None:
    """The C class whose layout the instances have, if it is one that ObjectTracker models; None otherwise."""
    for base in cls.__mro__:
        if base is collections.OrderedDict:
            return base
        if not base.__flags__ & (1 << 9):
            return base if base in _OBJECT_BASES else None
        if _laid_out_by_c(base):
            return None
    return None


def wrap_object(m: Machine, obj: Any, source: Source) -> Tracker:
    """Instances of classes written in Python; instances of unknown C classes stay opaque."""
    cls = type(obj)
    base = builtin_base(cls)
    if issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):  # sys.version_info
        _typed(m, obj, source)
        return TupleTracker(later_items(list(obj), source), cls, source, obj, m)
    if base is None or (cls.__dictoffset__ and instance_dict(obj) is None):
        return wrap_opaque(m, obj, source)
    _typed(m, obj, source)
    if hasattr(cls, "__torch_function__"):
        m.overriding = True  # type: ignore[attr-defined]
    built = ObjectTracker(cls, source, obj)
    if issubclass(base, dict):
        payload = DictTracker.existing(obj, source, m, base)
        payload.owner = built
        if isinstance(obj, collections.defaultdict):
            payload.default_factory = m.wrap(obj.default_factory, Attr(source, "default_factory"))
        built.payload = payload
    elif base is list:
        built.payload = ListTracker(later_items(list(list.__iter__(obj)), source), list, source, obj, m)
    elif base in _VALUES:
        value = _VALUES[base](obj)
        if base in (int, float):
            built.payload = ConstTracker(value, Attr(source, "real"), None if isinstance(source, Held) else m)
        else:
            if base in (str, bytes) and isinstance(source, (Local, Stack)):  # perhaps of this call only: it must not be kept
                text = repr(value).replace("{", "{{").replace("}", "}}")
                m.guard(Kind.RELATION, source, f"{base.__name__}.__eq__({{}}, {text})")
            else:
                _same(m, obj, source)
            built.payload = ConstTracker(value)
    elif base in (set, frozenset):
        entries = {item: ConstTracker(item) for item in base.__iter__(obj) if is_constant(item)}
        if len(entries) != base.__len__(obj):
            return wrap_opaque(m, obj, source)
        elements = SetTracker(entries, base, None, obj, m)  # type: ignore[arg-type]
        elements.owner = built
        built.payload = elements
    elif base is tuple:
        items = list(tuple.__iter__(obj))
        if is_bare_tuple(cls):
            return TupleTracker(later_items(items, source), cls, source, obj, m)
        built.payload = TupleTracker(later_items(items, source), tuple, source, obj, m)
    return built


def wrap_weakref(m: Machine, obj: Any, source: Source) -> Tracker:
    _same(m, obj, source)
    return WeakRefTracker(obj, source, m)


BUILDERS: dict[type, Builder] = {
    **dict.fromkeys(CONST_TYPES | VALUE_TYPES, wrap_const),
    types.CodeType: wrap_const,
    torch.Tensor: wrap_tensor,
    torch.nn.Parameter: wrap_tensor,
    torch.nn.Buffer: wrap_tensor,
    tuple: wrap_sequence,
    torch.Size: wrap_sequence,
    list: wrap_list,
    dict: wrap_dict,
    collections.OrderedDict: wrap_dict,
    collections.defaultdict: wrap_dict,
    collections.deque: wrap_deque,
    set: wrap_set,
    frozenset: wrap_set,
    slice: wrap_slice,
    bytearray: wrap_bytearray,
    types.FunctionType: wrap_function,
    types.MethodType: wrap_method,
    types.BuiltinFunctionType: wrap_builtin,
    types.MethodWrapperType: wrap_builtin,
    types.MethodDescriptorType: wrap_callable,
    types.WrapperDescriptorType: wrap_callable,
    types.ClassMethodDescriptorType: wrap_callable,
    types.CellType: wrap_cell,
    types.ModuleType: wrap_py_module,
    types.MappingProxyType: wrap_view,
    **dict.fromkeys(ITERATORS, wrap_iterator),
    types.GeneratorType: wrap_generator,
    weakref.ReferenceType: wrap_weakref,
    weakref.ProxyType: wrap_opaque,
    weakref.CallableProxyType: wrap_opaque,
    functools.partial: wrap_partial,
    operator.itemgetter: wrap_getter,
    operator.attrgetter: wrap_getter,
    operator.methodcaller: wrap_getter,
    functools._lru_cache_wrapper: wrap_callable,
    torch._ops.OpOverload: wrap_callable,
    torch._ops.OpOverloadPacket: wrap_callable,
    torch.finfo: wrap_opaque,
    torch.iinfo: wrap_opaque,
    _C.Optimized: wrap_optimized,
    _C.Disabled: wrap_disabled,
}

SUBCLASS_BUILDERS: tuple[tuple[type, Builder], ...] = (
    (type, wrap_class),
    (torch.nn.Module, wrap_nn_module),
    (enum.Enum, wrap_const),
    (torch.Tensor, wrap_subclass),
    (types.ModuleType, wrap_py_module),
    (BaseException, wrap_exception),
)
