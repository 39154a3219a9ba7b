"""Classes as values, and super(). Class attributes are read under one TYPE_VERSION row per class."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, Held, InstanceDict, Item, Source
from magneto.dynamo.trackers.base import MISSING, Entry, Later, Tracker, namespace_of
from magneto.dynamo.trackers.constant import ConstTracker, is_constant
from magneto.dynamo.trackers.dispatch import TABLE
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.mapping import DictTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_HEAP_TYPE = 1 << 9
_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


WRITTEN: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
"""Data attributes of classes that functions write: they are read one by one, and the rest of these classes is guarded by its contents."""


class Data:
    """What `find_in_type` gives for a written attribute; its value is in `written_attr`."""


_DATA = Data()


def contents(cls: type) -> list[Any]:
    """What a class holds beside its written attributes."""
    return [
        (base, [(key, id(value)) for key, value in namespace_of(base).items() if key not in WRITTEN.get(base, ())])
        for base in heap_bases(cls)
    ]


def heap_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE]


def written_attr(m: Machine, cls: type, name: str) -> Tracker | None:
    """The value of a written attribute as the program now finds it; None: not there."""
    for base in cls.__mro__:
        found = _own_written(m, base, name)
        if found is not None:
            return found
    return None


def _own_written(m: Machine, cls: type, name: str) -> Tracker | None:
    """`namespace_of(cls).get(name)` as the program now finds it, guarded."""
    overlay: dict[tuple[int, str], Tracker | None] = m.overlay  # type: ignore[attr-defined]
    if (id(cls), name) in overlay:
        return overlay[(id(cls), name)]
    source = Held(cls.__name__, cls)
    if name in namespace_of(cls):
        if _binds(type(namespace_of(cls)[name])):
            m.graph_break("B103", attribute=name, value=f"class {cls.__qualname__}")
        return m.wrap(namespace_of(cls)[name], Item(InstanceDict(source), name))
    if name in WRITTEN.get(cls, ()):
        m.guard(Kind.KEY_ABSENT, InstanceDict(source), name)
    return None


def find_in_type(m: Machine, cls: type, name: str) -> Any:
    """The raw class attribute along the MRO, or MISSING. Classes that can be modified get a TYPE_VERSION row."""
    if cls.__flags__ & _HEAP_TYPE:
        guard_class(m, cls)
        if WRITTEN and any(name in WRITTEN.get(base, ()) for base in cls.__mro__):
            return MISSING if written_attr(m, cls, name) is None else _DATA
    for base in cls.__mro__:
        if name in namespace_of(base):
            return namespace_of(base)[name]
    return MISSING


def guard_class(m: Machine, cls: type) -> None:
    """One row per class and region."""
    if id(cls) in m.made:  # type: ignore[attr-defined]
        for base in cls.__bases__:
            if base.__flags__ & _HEAP_TYPE:
                guard_class(m, base)
        return
    seen = m.__dict__.setdefault("_guarded_classes", set())
    if cls not in seen:
        if cls.__mro__ is None:  # its metaclass is working it out
            m.graph_break("B104", operation="use", value=f"class {cls.__qualname__}, which is not complete,")
        seen.add(cls)
        if WRITTEN and any(base in WRITTEN for base in cls.__mro__):
            m.guard(Kind.STATE, None, (f"contents of {cls.__name__}", contents, (cls,), contents(cls)))
            return
        m.guard(Kind.TYPE_VERSION, Held(cls.__name__, cls), cls)


def held(m: Machine, obj: Any, name: str) -> Tracker:
    """Tracker of an object that the region holds (found behind an identity or class-version guard)."""
    if is_constant(obj):
        return m.const(obj)
    return m.wrap(obj, Held(name, obj))


class ClassTracker(Tracker):
    """A class. Calling it is in construct.py."""

    __slots__ = ("obj",)

    def __init__(self, obj: type, source: Source | None = None) -> None:
        super().__init__(source)
        self.obj = obj

    def python_type(self) -> type:
        return type(self.obj)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        cls = self.obj
        if name in _NAMES:
            value = getattr(cls, name)
            return m.wrap(value, Attr(Held(cls.__name__, cls), name)) if self._changeable(m, name) else held(m, value, name)
        if name == "__dict__" and find_in_type(m, type(cls), name) is vars(type)[name]:
            guard_class(m, cls)
            views = m.__dict__.setdefault("_class_views", {})
            if cls not in views:
                views[cls] = _contents_view(m, cls)
            view: Tracker = views[cls]
            return view
        if name == "__class__":
            return ClassTracker(type(cls))
        if isinstance(cls, enum.EnumType) and name in cls.__members__:
            return ConstTracker(cls.__members__[name])
        meta_raw = find_in_type(m, type(cls), name)
        if isinstance(meta_raw, property):
            return m.call(held(m, meta_raw.fget, name), [self], {})
        if isinstance(meta_raw, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            if isinstance(find_in_type(m, type(cls), "mro"), types.FunctionType):  # it may see the class between two states
                m.graph_break("B103", attribute=name, value=self.show())
            found = getattr(cls, name, MISSING)
            if found is not MISSING and self._changeable(m, name):
                return m.wrap(found, Attr(Held(cls.__name__, cls), name))
            return None if found is MISSING else held(m, found, f"{cls.__name__}.{name}")
        raw = find_in_type(m, cls, name)
        if raw is MISSING:
            if isinstance(meta_raw, types.FunctionType):
                return BoundMethodTracker(held(m, meta_raw, name), self)
            if isinstance(meta_raw, types.MethodDescriptorType):
                return BoundMethodTracker(BuiltinTracker(meta_raw), self)
            if meta_raw is MISSING:
                return None
            return held(m, getattr(cls, name), f"{cls.__name__}.{name}")
        return class_attr(m, self, raw, name)

    def _changeable(self, m: Machine, name: str) -> bool:
        """Whether a program may set what `type` itself keeps of the class: its name, its bases."""
        if id(self.obj) in m.made or not self.obj.__flags__ & _HEAP_TYPE:  # type: ignore[attr-defined]
            return False
        return find_in_type(m, type(self.obj), name) is vars(type).get(name)

    def set_made(self, m: Machine, name: str, value: Tracker) -> None:
        """Set an attribute of a class made in the region."""
        raise NotImplementedError

    def special_set(self, m: Machine, name: str, value: Tracker | None) -> bool:
        """A class attribute that is data: counters, caches, settings."""
        cls = self.obj
        meta: Any = type(cls)
        plain = meta.__setattr__ is type.__setattr__ and meta.__delattr__ is type.__delattr__
        old = namespace_of(cls).get(name)
        if id(cls) in m.made or not plain or name.startswith("__") or not name.isidentifier():  # type: ignore[attr-defined]
            return False
        if not cls.__flags__ & _HEAP_TYPE or _binds(type(old)) or (value is not None and _binds(value.python_type())):
            return False
        if hasattr(type(cls), name) or (cls.__module__.partition(".")[0] == "torch" and not self._counts(m, name, old)):
            return False
        if name not in WRITTEN.get(cls, ()):
            WRITTEN.setdefault(cls, set()).add(name)
            m.restart_knowing()  # type: ignore[attr-defined]
        if value is None and (namespace_of(self.obj).get(name, MISSING) is MISSING and m.overlay.get((id(cls), name)) is None):  # type: ignore[attr-defined]
            return False
        m.overlay[(id(cls), name)] = value  # type: ignore[attr-defined]
        if (view := m.__dict__.get("_class_views", {}).get(cls)) is not None:
            _follow(view, name, value)
        m.effect(f"{{0}}.{name} = {{1}}" if value is not None else f"del {{0}}.{name}", self, *([] if value is None else [value]))
        return True

    def _counts(self, m: Machine, name: str, old: Any) -> bool:
        """A number of hooks, of handles. One that differed and was looked at makes each call another program: a break is better."""
        return type(old) is int and Item(InstanceDict(Held(self.obj.__name__, self.obj)), name) not in m.changing

    def emit(self, em: Emitter) -> str:
        return em.borrowed(self.obj, self.obj.__name__)

    def show(self) -> str:
        return f"class {self.obj.__qualname__}"


def _contents_view(m: Machine, cls: type) -> DictTracker:
    """`cls.__dict__`; the class is guarded as a whole but for its written attributes, which are read one by one."""
    contents = namespace_of(cls)
    entries: dict[Any, tuple[Entry, Entry]] = {
        key: (ConstTracker(key), Later(value, Held(f"[{key!r}]", value))) for key, value in contents.items()
    }
    view = DictTracker(entries, types.MappingProxyType, Held(f"{cls.__name__}.__dict__", contents), contents)
    for name in WRITTEN.get(cls, ()):
        _follow(view, name, _own_written(m, cls, name))
    return view


def _follow(view: DictTracker, name: str, value: Tracker | None) -> None:
    if value is None:
        view.entries.pop(name, None)
    else:
        view.entries[name] = (ConstTracker(name), value)


def _binds(kind: type) -> bool:
    """Whether values of this type are descriptors."""
    return any(hasattr(kind, name) for name in ("__get__", "__set__", "__delete__", "__set_name__"))


def has_class_rows(raw: Any) -> bool:
    """Whether a class method of C has rows that take the class it is called on."""
    return isinstance(raw, types.ClassMethodDescriptorType) and any(kinds[:1] == (ClassTracker,) for kinds, _ in TABLE.get(raw, ()))


def class_attr(m: Machine, owner: ClassTracker, raw: Any, name: str) -> Tracker:
    """What `owner.name` gives for the raw attribute found along the MRO."""
    cls: type = owner.obj
    if raw is _DATA and (found := written_attr(m, cls, name)) is not None:
        return found
    label = f"{cls.__name__}.{name}"
    kind = type(raw)
    if kind is staticmethod:
        return held(m, raw.__func__, label)
    if kind is classmethod:
        return BoundMethodTracker(held(m, raw.__func__, label), owner)
    if has_class_rows(raw):
        return BoundMethodTracker(BuiltinTracker(raw), owner)
    if kind in (types.ClassMethodDescriptorType, types.BuiltinFunctionType):
        return BuiltinTracker(getattr(cls, name), Held(label, getattr(cls, name)))
    if isinstance(raw, (property, types.FunctionType, functools.cached_property)) or not hasattr(kind, "__get__"):
        return held(m, raw, label)
    if isinstance(kind.__get__, types.FunctionType):
        return m.call(held(m, kind.__get__, label), [held(m, raw, label), m.const(None), owner], {})
    return held(m, getattr(cls, name), label)
