"""`__torch_function__`: operations on tensors of a user's class, and on other objects that have the method, are the user's code.

A tensor of such a class is a TensorTracker whose `cls` says so; the graph computes on its plain data, and what leaves the region is made an instance again.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers import dispatch
from magneto.dynamo.trackers.attributes import bind_attr
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker, TupleTracker
from magneto.dynamo.trackers.context import ModeTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker, guard_class, held
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.object import ObjectTracker
from magneto.dynamo.trackers.tensor import (
    DISABLED,
    PLAIN_CLASSES,
    TensorTracker,
    join_memory,
    overrides_operations,
    own_attr,
    set_tensor_attr,
    tensor_attr,
)
from magneto.dynamo.trackers.torch_calls import is_graph_callable

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

DEFAULT = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_GETTERS: dict[Any, str] = {}


def overrides(m: Machine, v: Tracker) -> bool:
    """Whether torch asks the value's class what an operation on it means."""
    if isinstance(v, TensorTracker):
        return overrides_operations(m, v)
    return isinstance(v, ObjectTracker) and not m.functions_off and getattr(v.cls, "__torch_function__", DISABLED) is not DISABLED  # type: ignore[attr-defined]


def overriding(m: Machine, values: Sequence[Tracker]) -> list[Tracker]:
    """The values whose classes are asked, one of each class, subclasses first; lists are looked into."""
    found: list[Tracker] = []
    for value in values:
        for v in value.items(m) if isinstance(value, SequenceTracker) else (value,):
            cls = v.python_type() if overrides(m, v) else None
            if cls is None or any(other.python_type() is cls for other in found):
                continue
            place = next((i for i, other in enumerate(found) if issubclass(cls, other.python_type())), len(found))
            found.insert(place, v)
    return found


def override(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """What a call of torch means where a class overrides it; NotImplemented: no class does."""
    if isinstance(fn, types.MethodWrapperType) and args and isinstance(args[0], TensorTracker) and fn in _GETTERS:
        return tensor_attr(m, args[0], _GETTERS[fn])
    owners = overriding(m, [*args, *kwargs.values()])
    if fn in _OPERATORS:
        sorts = _sorts(m, args)
        called = _operator_call(fn, sorts) if sorts is not None else None
        if called is None:
            return NotImplemented
        func, order = called
        operands = [args[i] for i in order]
        return ask(m, func, owners, operands, {}) if not isinstance(func, str) else _own_operator(m, func, operands)
    if not owners:
        return NotImplemented
    try:
        known = is_graph_callable(fn)
    except TypeError:
        return NotImplemented
    if not known or fn in _NOT_ASKED:
        return NotImplemented
    if isinstance(fn, types.FunctionType):  # torch's Python functions ask by themselves
        return m.inline(FunctionTracker.existing(m, fn, Held(fn.__name__, fn)), args, kwargs)
    return ask(m, fn, owners, args, kwargs)


def _own_operator(m: Machine, name: str, operands: Sequence[Tracker]) -> Tracker:
    """A method that a class derived from torch.Tensor defines for an operator."""
    method = subclass_attr(m, operands[0], name)  # type: ignore[arg-type]
    result = m.call(method, operands[1:], {}) if method is not None else m.const(NotImplemented)
    const = result.try_const()
    if const is not None and const.value is NotImplemented:
        m.graph_break("B109", value=f"of the class {operands[0].python_type()}, whose {name} does not answer")
    return result


def ask(m: Machine, func: Any, owners: Sequence[Tracker], args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """Call `__torch_function__` of the owners' classes until one answers."""
    classes = [owner.python_type() for owner in owners]
    for cls in classes:
        guard_class(m, cls)
        hook = cls.__torch_function__  # type: ignore[attr-defined]
        if getattr(hook, "__func__", None) is DEFAULT:
            result = _default(m, cls, func, classes, args, kwargs)
        else:
            types_ = TupleTracker([ClassTracker(one) for one in classes])
            named = DictTracker.of(m, [(ConstTracker(name), value) for name, value in kwargs.items()])
            bound = m.apply(getattr, ClassTracker(cls), ConstTracker("__torch_function__"))
            result = m.call(bound, [_callable(m, func), types_, TupleTracker(args), named], {})
        const = result.try_const()
        if const is None or const.value is not NotImplemented:
            return result
    m.graph_break("B109", value=f"of classes {classes}, none of which answers")


def _callable(m: Machine, func: Any) -> Tracker:
    if isinstance(func, types.MethodWrapperType):
        return BuiltinTracker(func, Held(func.__name__, func))
    return m.wrap(func, Held(getattr(func, "__name__", "function"), func))


def _default(m: Machine, cls: type, func: Any, classes: Sequence[type], args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """torch.Tensor.__torch_function__: the plain operation, its results made instances of the class."""
    if not all(issubclass(cls, one) for one in classes):
        return ConstTracker(NotImplemented)
    m.functions_off += 1  # type: ignore[attr-defined]
    try:
        result = m.call(_callable(m, func), args, kwargs)
    finally:
        m.functions_off -= 1  # type: ignore[attr-defined]
    return result if func in torch.overrides.get_default_nowrap_functions() else _converted(m, result, cls)


def _converted(m: Machine, v: Tracker, cls: type) -> Tracker:
    if isinstance(v, TensorTracker) and not issubclass(v.cls, cls):
        return TensorTracker(v.meta, cls, v.node) if v.source is None else instance_of(m, v, cls)
    if isinstance(v, (ListTracker, TupleTracker)):
        for index, item in enumerate(v.items(m)):
            v.entries[index] = _converted(m, item, cls)
    return v


def instance_of(m: Machine, v: TensorTracker, cls: type) -> TensorTracker:
    """`v.as_subclass(cls)`: another object over the same memory."""
    alias = m.node("view_as", [v, v], {}, method=True)
    assert isinstance(alias, TensorTracker)
    made = TensorTracker(alias.meta, cls, alias.node)
    join_memory(v, made)
    if cls not in PLAIN_CLASSES:
        m.overriding = True  # type: ignore[attr-defined]
    return made


@rule(torch.Tensor.as_subclass, TensorTracker, ClassTracker)
def as_subclass(m: Machine, v: TensorTracker, cls: ClassTracker) -> Any:
    return instance_of(m, v, cls.obj) if follows(cls.obj) else NotImplemented


def follows(cls: type) -> bool:
    """Whether tensors of the class are plain memory, and its attributes are found in the usual way."""
    return (
        issubclass(cls, torch.Tensor)
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and all(
            getattr(cls, name, None) is getattr(torch.Tensor, name, None) for name in ("__getattribute__", "__setattr__", "__getattr__")
        )
    )


@rule(DEFAULT, ClassTracker, Tracker, SequenceTracker)
def default_function(
    m: Machine, cls: ClassTracker, func: Tracker, classes: SequenceTracker, args: Tracker | None = None, kwargs: Tracker | None = None
) -> Any:
    """super().__torch_function__(...)."""
    kinds = [one.obj for one in classes.items(m)]
    given = m.iterate(args) if args is not None else []
    named = {key.try_const().value: value for key, value in kwargs.pairs(m)} if isinstance(kwargs, DictTracker) else {}  # type: ignore[union-attr]
    return _default(m, cls.obj, func.obj, kinds, given, named) if func.obj is not MISSING else NotImplemented


@rule(torch.overrides.handle_torch_function, Tracker, SequenceTracker)
def handle_torch_function(m: Machine, func: Tracker, relevant: SequenceTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    owners = overriding(m, relevant.items(m))
    return ask(m, func.obj, owners, args, kwargs) if owners and func.obj is not MISSING else NotImplemented


for _fn in (torch.overrides.has_torch_function, torch._C._has_torch_function):
    rule(_fn, SequenceTracker)(lambda m, values: m.const(any(overrides(m, v) for v in values.items(m))))
for _asks in (torch._C._has_torch_function_unary, torch._C._has_torch_function_variadic):
    rule(_asks)(lambda m, *values: m.const(any(overrides(m, v) for v in values)))


# -- operators


_OPERATORS = frozenset(
    fn
    for fn in (*vars(operator).values(), abs, len, reversed, round, pow, divmod)
    if callable(fn)
    and fn
    not in (operator.is_, operator.is_not, operator.itemgetter, operator.attrgetter, operator.methodcaller, operator.truth, operator.not_)
)
_METHODS = [f"__{kind}{fn.__name__.strip('_')}__" for fn in _OPERATORS for kind in ("", "r", "i")]
_NOT_ASKED = frozenset({torch.Tensor.as_subclass, torch.Tensor._make_subclass})  # type: ignore[attr-defined]


Sort = tuple[str, bool, frozenset[str], int]
"""An operand: a tensor, an object or another value; whether torch asks its class; the operators that the class defines; which operand's class it derives from."""


def _sorts(m: Machine, args: Sequence[Tracker]) -> tuple[Sort, ...] | None:
    """None: all operands are plain."""
    classes: list[Any] = []
    for v in args:
        other = v.cls not in PLAIN_CLASSES if isinstance(v, TensorTracker) else isinstance(v, ObjectTracker) and overrides(m, v)
        classes.append(v.cls if other else None)  # type: ignore[attr-defined]
    found: list[Sort] = []
    for i, (v, cls) in enumerate(zip(args, classes, strict=True)):
        kind, own, parent = "tensor" if isinstance(v, TensorTracker) else "object" if cls is not None else "", frozenset[str](), -1
        if cls is not None:
            guard_class(m, cls)
            above = (k for k, other in enumerate(classes) if other is not None and issubclass(cls, other) and (k < i or other is not cls))
            parent = next(above, -1)
            base = classes[parent] if parent >= 0 else torch.Tensor if kind == "tensor" else object
            own = frozenset(name for name in _METHODS if getattr(cls, name, None) is not getattr(base, name, None))
        found.append((kind, overrides(m, v), own, parent))
    return tuple(found) if any(classes) else None


@functools.cache
def _operator_call(fn: Any, sorts: tuple[Sort, ...]) -> tuple[Any, tuple[int, ...]] | None:
    """What an operator calls first, and which operand stands where: found out by trying.

    That is the function that torch hands to `__torch_function__`, or the name of a method of the first of these operands. None: neither.
    """
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    def asked(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append((func, args))
        return torch.zeros(2, 2)

    def method(name: str) -> Any:
        return lambda *args: calls.append((name, args))

    def probe(i: int) -> type:
        if i not in made:
            kind, hears, own, parent = sorts[i]
            body = {"__torch_function__": classmethod(asked) if hears else DISABLED, **{name: method(name) for name in own}}
            above: tuple[type, ...] = (probe(parent),) if parent >= 0 else (torch.Tensor,) if kind == "tensor" else ()
            made[i] = type("Probe", above, body)
        return made[i]

    made: dict[int, type] = {}
    operands: list[Any] = []
    for i, (kind, hears, own, parent) in enumerate(sorts):
        cls = probe(i) if hears or own or parent >= 0 else None
        plain = torch.zeros(2, 2) if kind == "tensor" else i + 1
        operands.append(plain if cls is None else plain.as_subclass(cls) if isinstance(plain, torch.Tensor) else cls())
    try:
        fn(*operands)
    except Exception:  # perhaps because the answer is no number
        pass
    names = [called for called, _ in calls if isinstance(called, str)]
    if not calls or (len(calls) != 1 and not names):
        return None
    func, args = calls[0]
    order = tuple(next((i for i, operand in enumerate(operands) if operand is arg), -1) for arg in args)
    return None if -1 in order or (names and (names[0] != func or sorts[order[0]][0] == "object")) else (func, order)


# -- attributes


def subclass_attr(m: Machine, v: TensorTracker, name: str) -> Tracker | None:
    """`v.name` for a tensor of a user's class."""
    if name in v.attrs or name == "__class__":
        return v.attrs[name] if name in v.attrs else ClassTracker(v.cls)
    raw = MISSING
    for base in v.cls.__mro__[: v.cls.__mro__.index(torch.Tensor)]:
        if name in base.__dict__ and base not in PLAIN_CLASSES:
            guard_class(m, v.cls)
            raw = base.__dict__[name]
            break
    if raw is not MISSING and hasattr(type(raw), "__set__"):
        return bind_attr(m, raw, v, v.cls, name)
    if raw is MISSING and hasattr(torch.Tensor, name):
        inherited = getattr(torch.Tensor, name)
        if overrides(m, v) and isinstance(inherited, (types.GetSetDescriptorType, property)):
            getter = inherited.__get__
            _GETTERS[getter] = name
            return ask(m, getter, [v], [v], {})
        return tensor_attr(m, v, name)
    own = own_attr(m, v, name)
    if own is not None or raw is MISSING:
        return own
    return bind_attr(m, raw, v, v.cls, name)


def set_subclass_attr(m: Machine, v: TensorTracker, name: str, value: Tracker | None) -> None:
    raw = getattr(v.cls, name, MISSING)
    if isinstance(raw, property) and not hasattr(torch.Tensor, name) and value is not None and raw.fset is not None:
        m.call(held(m, raw.fset, name), [v, value], {})
        return
    if hasattr(torch.Tensor, name) and overrides(m, v) and v.cls.__torch_function__.__func__ is not DEFAULT:  # type: ignore[attr-defined]
        m.graph_break("B107", value=v.show(), reason=f"attribute {name!r} is set through __torch_function__")
    set_tensor_attr(m, v, name, value)


# -- switched off


class FunctionsOff(ModeTracker):
    """torch._C.DisableTorchFunctionSubclass()."""

    __slots__ = ()

    def enter(self, m: Machine) -> None:
        m.contexts.append(self)  # type: ignore[attr-defined]
        m.functions_off += 1  # type: ignore[attr-defined]

    def exit(self, m: Machine) -> None:
        m.contexts.remove(self)  # type: ignore[attr-defined]
        m.functions_off -= 1  # type: ignore[attr-defined]

    def emit(self, em: Emitter) -> str:
        return em.assign("mode", f"{em.const(self.cls, self.cls.__name__)}()", self)


@rule(torch._C.DisableTorchFunctionSubclass)
def functions_off(m: Machine) -> Tracker:
    return FunctionsOff(torch._C.DisableTorchFunctionSubclass)  # type: ignore[arg-type]


dispatch.OVERRIDES.append(override)
TensorTracker.subclass_attr = staticmethod(subclass_attr)
TensorTracker.set_subclass_attr = staticmethod(set_subclass_attr)
