"""Class statements: a class made inside the region.

While capturing, a *prototype* stands for it: a real class with the same bases, whose namespace holds stand-ins for what exists in the region only. Look-ups,
`isinstance`, layouts and errors are CPython's own, asked of the prototype; `machine.made` leads from the prototype and each stand-in to its tracker. The
prototype never leaves capture: the region makes a new class in each call, as the program does.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import MISSING, CannotEmit, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type
from magneto.dynamo.trackers.object import ObjectTracker
from magneto.dynamo.trackers.plain import plain

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_DROPPED = ("__classcell__",)
_REFUSED = ("__del__", "__init_subclass__", "__prepare__", "__mro_entries__")
_READ_BY_CPYTHON = ("__slots__", "__match_args__", "__abstractmethods__", "__doc__", "__module__", "__qualname__")
_HOLDING_CLASSES = ("__dict__", "__mro__", "__bases__", "__subclasses__", "__weakref__")


class StandIn:
    """In the prototype's namespace, for a value that exists in the region only."""


class MadeClassTracker(ClassTracker):
    """A class made inside the region; `obj` is its prototype."""

    __slots__ = ("_open", "_waiting", "bases", "born", "name", "namespace")

    def __init__(self, prototype: type, name: str, bases: Sequence[Tracker], namespace: Mapping[str, Tracker], born: int) -> None:
        super().__init__(prototype, None)
        self.name, self.bases, self.namespace, self.born = name, tuple(bases), dict(namespace), born
        self._open = False  # it is being emitted: cells that hold it are filled behind it
        self._waiting: list[str] = []

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in _HOLDING_CLASSES:
            m.graph_break("B103", attribute=name, value=self.show())
        raw = find_in_type(m, self.obj, name)
        if isinstance(raw, types.ClassMethodDescriptorType):
            return BoundMethodTracker(BuiltinTracker(raw), self)
        return super().special_attr(m, name)

    def set_made(self, m: Machine, name: str, value: Tracker) -> None:
        """`C.name = value`: nobody outside knows the class yet."""
        if name in vars(type) or name in _REFUSED:
            m.graph_break("B107", value=self.show(), reason=f"attribute {name!r} is set")
        setattr(self.obj, name, _stand_in(m, value, name))
        self.namespace[name] = value

    def filled_later(self, cell: str) -> bool:
        """Whether the cell gets the class when it exists."""
        if self._open:
            self._waiting.append(cell)
        return self._open

    def emit(self, em: Emitter) -> str:
        if self._open:
            raise CannotEmit(self)
        bases = [em.value(base) for base in self.bases]
        self._open = True
        try:
            items = ", ".join(f"{name!r}: {em.value(value)}" for name, value in self.namespace.items())
        finally:
            self._open = False
        known = f"({', '.join(bases)}{',' if len(bases) == 1 else ''})"
        made = em.assign("cls", f"{em.const(type, 'type')}({self.name!r}, {known}, {{{items}}})", self)
        for cell in self._waiting:
            em.line(f"{cell}.cell_contents = {made}")
        self._waiting = []
        return made


class DescriptorTracker(Tracker):
    """property, classmethod or staticmethod made inside the region; `obj` stays MISSING: the prototype's own stands for it."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: type, parts: Mapping[str, Tracker]) -> None:
        super().__init__()
        self.kind, self.parts = kind, dict(parts)

    def python_type(self) -> type:
        return self.kind

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if self.kind is not property:
            if name in ("__func__", "__wrapped__"):
                return self.parts["function"]
            return m.apply(getattr, self.parts["function"], m.const(name)) if name in functools.WRAPPER_ASSIGNMENTS else None
        if name == "__doc__":
            getter = self.parts.get("fget")
            return self.parts.get("doc") or (m.apply(getattr, getter, m.const("__doc__")) if getter is not None else m.const(None))
        if name in ("fget", "fset", "fdel"):
            return self.parts.get(name) or m.const(None)
        if name in ("getter", "setter", "deleter"):
            return BoundMethodTracker(BuiltinTracker(getattr(property, name)), self)
        return None

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        return m.call(self.parts["function"], args, kwargs) if self.kind is staticmethod else None

    def stand_in(self, m: Machine) -> Any:
        parts = {name: _stand_in(m, value, name) for name, value in self.parts.items()}
        made = property(**parts) if self.kind is property else self.kind(parts["function"])
        return made

    def emit(self, em: Emitter) -> str:
        parts = [f"{name}={em.value(value)}" if self.kind is property else em.value(value) for name, value in self.parts.items()]
        return em.assign("descriptor", f"{em.const(self.kind, self.kind.__name__)}({', '.join(parts)})", self)

    def show(self) -> str:
        return f"{self.kind.__name__} object"


def _is_none(v: Tracker) -> bool:
    return isinstance(v, ConstTracker) and v.read() is None


@rule(property)
def make_property(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    """None stands for an accessor that is not given, and for the getter's documentation."""
    names = ("fget", "fset", "fdel", "doc")
    if len(args) > 4 or not kwargs.keys() <= set(names[len(args) :]):
        return NotImplemented
    parts = {**dict(zip(names, args, strict=False)), **kwargs}
    return DescriptorTracker(property, {name: value for name, value in parts.items() if not _is_none(value)})


def _wrapper(kind: type) -> None:
    @rule(kind, FunctionTracker)
    def body(m: Machine, fn: FunctionTracker) -> Any:
        return DescriptorTracker(kind, {"function": fn})


_wrapper(classmethod)
_wrapper(staticmethod)


@rule((classmethod.__get__, staticmethod.__get__), DescriptorTracker, Tracker)
def bind_wrapper(m: Machine, v: DescriptorTracker, obj: Tracker, owner: Tracker | None = None) -> Any:
    if v.kind is staticmethod:
        return v.parts["function"]
    return BoundMethodTracker(v.parts["function"], owner if owner is not None and not _is_none(owner) else m.apply(type, obj))


def _accessor(name: str, part: str) -> None:
    @rule(getattr(property, name), DescriptorTracker, Tracker)
    def body(m: Machine, v: DescriptorTracker, fn: Tracker) -> Any:
        return DescriptorTracker(property, v.parts if _is_none(fn) else {**v.parts, part: fn})


for _name, _part in (("getter", "fget"), ("setter", "fset"), ("deleter", "fdel")):
    _accessor(_name, _part)


def _stand_in(m: Machine, value: Tracker, name: str) -> Any:
    """What the prototype's namespace holds for a value; `machine.made` leads back."""
    if isinstance(value, ConstTracker):
        return value.read()
    if isinstance(value, ClassTracker):
        return value.obj
    made: Any
    if isinstance(value, FunctionTracker) and value.obj is MISSING:
        made = types.FunctionType(value.code, value.globals, value.name, None, tuple(types.CellType() for _ in value.code.co_freevars))
    elif isinstance(value, DescriptorTracker):
        made = value.stand_in(m)
    elif value.obj is not MISSING:
        if hasattr(type(value.obj), "__set_name__"):
            m.graph_break("B101", callee="__build_class__", reason=f"{name} wants to know its name")
        made = value.obj
    else:
        if isinstance(value, ObjectTracker) and any(hasattr(value.cls, hook) for hook in ("__get__", "__set__", "__set_name__")):
            m.graph_break("B101", callee="__build_class__", reason=f"{name} is a descriptor made in the same region")
        made = StandIn()
    m.made[id(made)] = value  # type: ignore[attr-defined]
    m.wrapped[id(made)] = value  # type: ignore[attr-defined]
    m.stand_ins.append(made)  # type: ignore[attr-defined]
    return made


def _readable(m: Machine, name: str, value: Tracker) -> Any:
    """A value that CPython itself reads when it makes the class."""
    known = plain(m, value)
    if known is None or isinstance(known, Tracker):
        m.graph_break("B101", callee="__build_class__", reason=f"{name} is not constant")
    return known.value


class _Nowhere:
    """Base of prototypes that have been used."""


def forget_prototypes(made: Sequence[Any]) -> None:
    """Prototypes die with the next collection of garbage: until then their bases shall not show them as subclasses."""
    for prototype in reversed(made):
        if isinstance(prototype, type) and prototype.__base__ is not object:
            with contextlib.suppress(TypeError):  # laid out otherwise
                prototype.__bases__ = (_Nowhere,)


def _is_ordinary_base(base: Tracker) -> bool:
    """Whether making a subclass runs no code of the program."""
    if not isinstance(base, ClassTracker) or type(base.obj) is not type:
        return False
    hook = next(vars(cls)["__init_subclass__"] for cls in base.obj.__mro__ if "__init_subclass__" in vars(cls))
    return hook is vars(object)["__init_subclass__"]


@rule(builtins.__build_class__, FunctionTracker, ConstTracker)
def build_class(m: Machine, body: FunctionTracker, name: ConstTracker, /, *bases: Tracker, **kwargs: Tracker) -> Any:
    born = m.count  # type: ignore[attr-defined]
    if kwargs or not all(map(_is_ordinary_base, bases)):
        m.graph_break("B101", callee="__build_class__", reason="a metaclass, or code of a base class, takes part")
    namespace = {str(key.try_const().value): value for key, value in m.run_class_body(body).pairs(m)}  # type: ignore[attr-defined,union-attr]
    cell = namespace.get("__classcell__")
    namespace = {key: value for key, value in namespace.items() if key not in _DROPPED}
    if any(key in namespace for key in _REFUSED):
        m.graph_break("B101", callee="__build_class__", reason="it has a finaliser, or hooks for classes")
    real: dict[str, Any] = {}
    for key, value in namespace.items():
        real[key] = _readable(m, key, value) if key in _READ_BY_CPYTHON else _stand_in(m, value, key)
    try:
        prototype = type(name.read(), tuple(base.obj for base in bases), real)
    except TypeError as error:
        m.raise_exception(error)
    made = MadeClassTracker(prototype, name.read(), bases, namespace, born)
    _remember(m, made)
    if cell is not None:
        cell.store(m, made)  # type: ignore[attr-defined]
    return made


def _remember(m: Machine, made: ClassTracker) -> None:
    m.made[id(made.obj)] = made  # type: ignore[attr-defined]
    m.wrapped[id(made.obj)] = made  # type: ignore[attr-defined]
    m.stand_ins.append(made.obj)  # type: ignore[attr-defined]


_NAMEDTUPLE: Any = collections.namedtuple  # noqa: PYI024
_WRITABLE = (type(_NAMEDTUPLE("Probe", "field").field), types.FunctionType, dict, staticmethod)


class MadeNamedTuple(MadeClassTracker):
    """What collections.namedtuple makes inside the region; the region calls it again."""

    __slots__ = ("arguments",)

    def __init__(self, prototype: type, arguments: Mapping[str, Any], born: int) -> None:
        super().__init__(prototype, prototype.__name__, (), {}, born)
        self.arguments = dict(arguments)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if isinstance(vars(self.obj).get(name), _WRITABLE):  # of the prototype; the program may write to its own
            m.graph_break("B103", attribute=name, value=self.show())
        return super().special_attr(m, name)

    def set_made(self, m: Machine, name: str, value: Tracker) -> None:
        m.graph_break("B107", value=self.show(), reason=f"attribute {name!r} is set")

    def emit(self, em: Emitter) -> str:
        arguments = ", ".join(f"{name}={em.const(value, name)}" for name, value in self.arguments.items())
        return em.assign("cls", f"{em.const(_NAMEDTUPLE, 'namedtuple')}({arguments})", self)


@rule(_NAMEDTUPLE, Tracker, Tracker)
def make_namedtuple(m: Machine, typename: Tracker, field_names: Tracker, /, **kwargs: Tracker) -> Any:
    consts = {name: plain(m, value) for name, value in {"typename": typename, "field_names": field_names, **kwargs}.items()}
    if any(const is None for const in consts.values()):
        return NotImplemented
    arguments = {name: const.value for name, const in consts.items() if const is not None}
    if arguments.get("module") is None:
        arguments["module"] = m.frames[-1].globals.get("__name__", "__main__")  # type: ignore[attr-defined]
    try:
        prototype = _NAMEDTUPLE(**arguments)
    except Exception as error:
        m.raise_exception(error)
    made = MadeNamedTuple(prototype, arguments, m.count)  # type: ignore[attr-defined]
    _remember(m, made)
    return made
