"""Rows of str, repr, ascii, format and the methods of str that ask for the text of their arguments."""

from __future__ import annotations

import contextlib
import operator
import types
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.dynamo.trackers.attributes import find_special, user_method
from magneto.dynamo.trackers.base import MISSING, Raised, Tracker
from magneto.dynamo.trackers.bytearray import BytearrayTracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import DequeTracker, SequenceTracker
from magneto.dynamo.trackers.dispatch import fold, rule
from magneto.dynamo.trackers.exception import ExceptionTracker, built_in
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.iterator import iterate
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker
from magneto.dynamo.trackers.object import ObjectTracker, payload_of
from magneto.dynamo.trackers.plain import plain

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_CONTAINERS = (SequenceTracker, DictTracker, SetTracker, DictViewTracker)


class _Text:
    """Stands in a container for a value whose repr capture has computed."""

    __slots__ = ("text",)
    __hash__ = object.__hash__

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def text_of(m: Machine, v: Tracker, fn: Any) -> str:
    """str(), repr() or ascii() of a value whose text capture knows."""
    const = v.try_const()
    if const is not None:
        return str(fn(const.value))
    if isinstance(v, _CONTAINERS) and getattr(v, "owner", v) is v and not _has_own_text(m, v, fn):
        found = plain(m, v)
        if found is not None:
            return str(fn(found.value))
        return _container_text(m, v, fn)
    if isinstance(v, ClassTracker) and find_in_type(m, type(v.obj), "__repr__") is type.__repr__:
        return str(fn(v.obj))
    if isinstance(v, (ObjectTracker, ExceptionTracker, SequenceTracker)):
        return _object_text(m, v, fn)
    if isinstance(v, BuiltinTracker) and isinstance(v.obj, types.BuiltinFunctionType) and isinstance(v.obj.__self__, types.ModuleType):
        return str(fn(v.obj))
    m.graph_break("B104", operation=f"{fn.__name__}()", value=v.show())


def _has_own_text(m: Machine, v: Tracker, fn: Any) -> bool:
    """Whether a tuple's class (a named tuple) defines its text in Python."""
    names = ("__str__", "__repr__") if fn is str else ("__repr__",)
    return any(isinstance(find_in_type(m, v.python_type(), name), types.FunctionType) for name in names)


def _container_text(m: Machine, v: Tracker, fn: Any) -> str:
    """The text of a container some of whose parts are no constants: their texts are computed one by one."""

    def part(item: Tracker) -> _Text:
        if item is v:
            m.graph_break("B104", operation=f"{fn.__name__}()", value=v.show())
        return _Text(text_of(m, item, repr))

    if isinstance(v, SequenceTracker):
        items = [part(item) for item in v.items(m)]
        if isinstance(v, DequeTracker):
            return repr(v.cls(items, v.maxlen))  # type: ignore[call-arg]
        return repr(items if v.cls is list else tuple.__new__(v.cls, items))  # type: ignore[type-var]
    if isinstance(v, DictTracker) and v.default_factory is None:
        return repr(v.cls([(part(key), part(value)) for key, value in v.pairs(m)]))
    if isinstance(v, SetTracker) and v.length() == 1:
        return repr(v.cls([part(item) for item in v.items(m)]))
    if isinstance(v, DictViewTracker):
        return repr(getattr({part(key): part(value) for key, value in v.of.pairs(m)}, v.kind)())
    m.graph_break("B104", operation=f"{fn.__name__}()", value=v.show())


def _object_text(m: Machine, v: Tracker, fn: Any) -> str:
    names = ("__str__", "__repr__") if fn is str else ("__repr__",)
    for name in names:
        raw = find_in_type(m, v.python_type(), name)
        if isinstance(raw, types.FunctionType) or user_method(m, v, name) is not MISSING:
            method = find_special(m, v, name)
            assert method is not None
            return const_text(m, m.call(method, [], {}), name)
        if isinstance(v, ExceptionTracker) and raw not in (BaseException.__str__, BaseException.__repr__):
            break
        if name == "__str__" and raw is not object.__str__:
            break
    if isinstance(v, ExceptionTracker) and (made := _alike(m, v, fn)) is not None:
        return BaseException.__repr__(made) if fn is repr else str(fn(made))
    if isinstance(v, ObjectTracker) and find_in_type(m, v.cls, "__repr__") is types.SimpleNamespace.__repr__:
        attrs = v.attrs(m)
        parts = [f"{text_of(m, key, str)}={text_of(m, value, repr)}" for key, value in attrs.pairs(m)] if attrs is not None else []
        return f"{'namespace' if v.cls is types.SimpleNamespace else v.cls.__name__}({', '.join(parts)})"
    inner = payload_of(v)
    if inner is not v:
        if isinstance(inner, ConstTracker):
            return str(fn(inner.read()))
        if isinstance(inner, DictTracker) and type(inner.cls) is type and inner.cls is dict:
            return text_of(m, DictTracker.of(m, inner.pairs(m)), repr)
        if isinstance(inner, SequenceTracker):
            return text_of(m, type(inner)(inner.items(m), inner.cls), repr)  # type: ignore[call-arg]
    m.graph_break("B104", operation=f"{fn.__name__}()", value=v.show())


def _alike(m: Machine, v: ExceptionTracker, fn: Any) -> BaseException | None:
    """An exception of the same class, arguments and members in C (what the text of a UnicodeError, OSError or SyntaxError is made of); None: unknown."""
    values = [arg.try_const() for arg in v.arguments(m)]
    if not isinstance(getattr(v.cls, f"__{fn.__name__}__"), types.WrapperDescriptorType) or any(value is None for value in values):
        return None
    args = tuple(value.value for value in values if value is not None)
    base = built_in(v.cls)
    made: BaseException = v.cls.__new__(v.cls, *args)
    made.args = args
    if fn is repr or base.__str__ in (BaseException.__str__, KeyError.__str__):
        return made
    if v.source is None:
        with contextlib.suppress(TypeError):
            base.__init__(made, *args)
    members = (name for cls in base.__mro__ for name, raw in vars(cls).items() if isinstance(raw, types.MemberDescriptorType))
    names = list(v.slots) if v.source is None else [name for name in members if not name.startswith("__")]
    for name in names:
        found = v.special_attr(m, name)
        const = found.try_const() if found is not None else None
        if const is None:
            return None
        if const.value is not None:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(made, name, const.value)
    return made


def const_text(m: Machine, v: Tracker, name: str) -> str:
    """The str that a __str__, __repr__ or __format__ returned."""
    const = payload_of(v).try_const()
    if const is None:
        m.graph_break("B104", operation=f"{name}()", value=v.show())
    if not isinstance(const.value, str):
        m.raise_exception(TypeError(f"{name} returned non-string (type {_C.type_name(type(const.value))})"))
    return str(const.value)


def _is_late(v: Tracker) -> bool:
    """A text with numbers of the run (`late_text.py`)."""
    return isinstance(v, ItemTracker) and v.cls is str


@rule(str, Tracker)
def str_(m: Machine, v: Tracker, *args: Tracker) -> Any:
    return NotImplemented if args else _answer(m, v, ("__str__", "__repr__")) or m.const(text_of(m, v, str))


def _answer(m: Machine, v: Tracker, names: tuple[str, ...]) -> Tracker | None:
    """What the program's own method returns, which may be a str of its own class; None: there is no such method."""
    if not isinstance(v, ObjectTracker):
        return None
    for name in names:
        raw = find_in_type(m, v.python_type(), name)
        if isinstance(raw, types.FunctionType):
            method = find_special(m, v, name)
            assert method is not None
            answer = m.call(method, [], {})
            if not _is_late(answer):
                const_text(m, answer, name)
            return answer
        if raw is not object.__str__:
            return None
    return None


@rule(repr, Tracker)
def repr_(m: Machine, v: Tracker) -> Any:
    return _answer(m, v, ("__repr__",)) or m.const(text_of(m, v, repr))


@rule(ascii, Tracker)
def ascii_(m: Machine, v: Tracker) -> Any:
    answer = _answer(m, v, ("__repr__",))
    text = text_of(m, v, repr) if answer is None else const_text(m, answer, "__repr__")
    return answer if answer is not None and text.isascii() else m.const(text.encode("ascii", "backslashreplace").decode())


@rule((object.__repr__, object.__str__), Tracker)
def object_text(m: Machine, v: Tracker) -> Any:
    return NotImplemented  # it shows the address


@rule(format, Tracker)
def format_(m: Machine, v: Tracker, spec: Tracker | None = None) -> Any:
    inner = payload_of(v) if user_method(m, v, "__format__") is MISSING else v
    if isinstance(inner, ConstTracker):
        if v is not inner and user_method(m, v, "__str__") is not MISSING and (spec is None or const_text(m, spec, "format") == ""):
            return m.apply(str, v)
        return fold(m, format, (inner,) if spec is None else (inner, spec), {})
    if user_method(m, v, "__format__") is not MISSING:
        method = find_special(m, v, "__format__")
        assert method is not None
        answer = m.call(method, [spec if spec is not None else m.const("")], {})
        return answer if _is_late(answer) else m.const(const_text(m, answer, "__format__"))
    const = spec.try_const() if spec is not None else None
    if spec is None or (const is not None and const.value == ""):
        return m.apply(str, v)
    if v.python_type().__format__ is object.__format__ and const is not None:  # type: ignore[comparison-overlap]
        m.raise_exception(TypeError(f"unsupported format string passed to {_C.type_name(v.python_type())}.__format__"))
    return NotImplemented


class _Shown:
    """Stands for a value in str.format and `%`, and asks capture for what they ask it."""

    __slots__ = ("_m", "_v")

    def __init__(self, m: Machine, v: Tracker) -> None:
        self._m, self._v = m, v

    def __str__(self) -> str:
        return text_of(self._m, self._v, str)

    def __repr__(self) -> str:
        return text_of(self._m, self._v, repr)

    def __format__(self, spec: str) -> str:
        return const_text(self._m, self._m.apply(format, self._v, self._m.const(spec)), "format")

    def _number(self, fn: Any) -> Any:
        cls = self._v.python_type()
        if fn is float and not hasattr(cls, "__float__") and not hasattr(cls, "__index__"):
            raise TypeError(f"must be real number, not {_C.type_name(cls)}")
        try:
            const = self._m.apply(fn, self._v).try_const()
        except Raised as raised:
            if fn is not float and raised.matches(TypeError):
                raise TypeError from None  # C code says it in its own words, with the name of the class
            raise
        if const is None:
            self._m.graph_break("B104", operation="%", value=self._v.show())
        return const.value

    def __int__(self) -> int:
        return self._number(int)  # type: ignore[no-any-return]

    def __float__(self) -> float:
        return self._number(float)  # type: ignore[no-any-return]

    def __index__(self) -> int:
        return self._number(operator.index)  # type: ignore[no-any-return]


class _ShownParts(_Shown):
    """The same with parts, for the fields of str.format."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return shown(self._m, self._m.apply(getattr, self._v, self._m.const(name)))

    def __getitem__(self, key: Any) -> Any:
        return shown(self._m, self._m.apply(operator.getitem, self._v, self._m.const(key)))


def shown(m: Machine, v: Tracker, kind: type[_Shown] = _ShownParts) -> Any:
    """A value to be formatted: a constant, or what stands for it."""
    return v.read() if isinstance(v, ConstTracker) else type(v.python_type().__name__, (kind,), {"__slots__": ()})(m, v)


@rule(str.format, ConstTracker)
def str_format(m: Machine, v: ConstTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    real, named = [shown(m, arg) for arg in args], {name: shown(m, arg) for name, arg in kwargs.items()}
    return fold(m, lambda text: text.format(*real, **named), (v,), {})


@rule((str.__mod__, bytes.__mod__), ConstTracker, Tracker)
def percent(m: Machine, v: ConstTracker, arg: Tracker) -> Any:
    inner = payload_of(arg)
    if isinstance(arg, BytearrayTracker):
        return fold(m, operator.mod, (v, ConstTracker(arg.known())), {})
    if issubclass(arg.python_type(), tuple):
        real: Any = tuple(shown(m, item, _Shown) for item in iterate(m, inner))
    elif isinstance(inner, DictTracker):
        real = _Values(
            {const.value: shown(m, item, _Shown) for key, item in inner.pairs(m) if (const := key.try_const()) is not None}, m, arg
        )
    else:
        kind = _ShownParts if hasattr(arg.python_type(), "__getitem__") else _Shown
        real = shown(m, arg, kind)
    return fold(m, lambda text: text % real, (v,), {})


class _Values(dict[Any, Any]):
    """A mapping on the right of `%`, that can be shown as a whole."""

    def __init__(self, values: dict[Any, Any], m: Machine, v: Tracker) -> None:
        super().__init__(values)
        self.whole = _Shown(m, v)

    def __str__(self) -> str:
        return str(self.whole)

    def __repr__(self) -> str:
        return repr(self.whole)


@rule(str.join, ConstTracker, Tracker)
def str_join(m: Machine, v: ConstTracker, items: Tracker) -> Any:
    parts = [payload_of(item) for item in iterate(m, items)]
    return fold(m, lambda text, *parts: text.join(parts), (v, *parts), {})
