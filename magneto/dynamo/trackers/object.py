"""Instances of classes: existing ones read under guards, new ones made inside the region; instances of subclasses of builtin containers."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, Held, InstanceDict, Item, Local, Source
from magneto.dynamo.trackers.base import MISSING, CannotEmit, Tracker, namespace_of
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker, TupleTracker
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


_DICTIONARY = (types.GetSetDescriptorType, types.MemberDescriptorType)


def instance_dict(obj: Any) -> dict[str, Any] | None:
    """The instance dictionary, without running user code (`__dict__` may be a property of the program)."""
    found = None
    for base in type(obj).__mro__:
        raw = namespace_of(base).get("__dict__")
        if isinstance(raw, _DICTIONARY):
            found = raw.__get__(obj)
            break
    return found if type(found) is dict else None


def has_finaliser(obj: Any) -> bool:
    """Whether the object's death runs code of its class. (Generators have a way of their own to end.)"""
    return hasattr(type(obj), "__del__") and type(obj) is not types.GeneratorType


def dict_descriptor(cls: type) -> Any:
    """The descriptor through which instances show their dictionary; None where the program has put something else in its place."""
    found = next((namespace_of(base)["__dict__"] for base in cls.__mro__ if "__dict__" in namespace_of(base)), None)
    return found if isinstance(found, _DICTIONARY) else None


class InstanceDictTracker(DictTracker):
    """The __dict__ of an instance made here: outside it is the instance's own."""

    __slots__ = ("instance",)

    def __init__(self, instance: Tracker) -> None:
        super().__init__()
        self.instance = instance

    def emit(self, em: Emitter) -> str:
        return em.assign("d", f"{em.const(_INSTANCE_DICT, 'instance_dict')}({em.value(self.instance)}, '__dict__')", self)


_INSTANCE_DICT = object.__getattribute__


class ObjectTracker(Tracker):
    """An instance. `attrs` is its __dict__, `slots` the slots written or read, `payload` the builtin container inside (subclasses of dict, list, tuple...)."""

    __slots__ = ("_attrs", "born", "cls", "obj", "payload", "slots")

    def __init__(self, cls: type, source: Source | None = None, obj: Any = MISSING) -> None:
        super().__init__(source)
        self.cls = cls
        self.obj = obj
        self._attrs: DictTracker | None = None
        self.slots: dict[str, Tracker | None] = {}
        self.payload: Tracker | None = None
        self.born: int | None = None  # set: it cannot leave the region, which then ends at this instruction

    def python_type(self) -> type:
        return self.cls

    # -- attributes

    def attrs(self, m: Machine) -> DictTracker | None:
        """The instance dictionary as a value; None for instances without one."""
        if self._attrs is None:
            if self.obj is MISSING:
                if self.cls.__dictoffset__ == 0:
                    return None
                self._attrs = InstanceDictTracker(self)
            else:
                real = instance_dict(self.obj)
                if real is None:
                    return None
                assert self.source is not None
                if (original := getattr(self.cls, "_magneto_original", None)) is not None:  # an optimised module: both have one dictionary
                    shared = m.wrap(original.__get__(self.obj), Attr(self.source, "_magneto_original"))
                    assert isinstance(shared, ObjectTracker)
                    self._attrs = shared.attrs(m)
                    return self._attrs
                self._attrs = DictTracker.existing(real, InstanceDict(self.source), m, dict)
        return self._attrs

    def instance_attr(self, m: Machine, name: str) -> Tracker | None:
        attrs = self.attrs(m)
        return None if attrs is None else attrs.get_token(m, name)

    def slot_attr(self, m: Machine, name: str, descriptor: Any) -> Tracker | None:
        """A __slots__ member; None: not set."""
        if name in self.slots:
            return self.slots[name]
        if self.obj is MISSING or self.source is None:
            return None
        try:
            value = descriptor.__get__(self.obj)
        except AttributeError:
            m.guard(Kind.ABSENT, self.source, name)
            return None
        found = m.wrap(value, Attr(self.source, name))
        self.slots[name] = found
        return found

    def set_instance_attr(self, m: Machine, name: str, value: Tracker | None, is_slot: bool) -> None:
        """Write (None: delete) past all descriptors; existing instances log the effect."""
        if is_slot:
            self.slots[name] = value
        else:
            attrs = self.attrs(m)
            assert attrs is not None
            if value is None:
                attrs.materialise()
                attrs.entries.pop(name, None)
                attrs.removals += 1
            else:
                attrs.put_silently(m, ConstTracker(name), value)
        if self.source is None:
            return
        plain = type.__getattribute__(self.cls, "__setattr__") is object.__setattr__ and name.isidentifier()
        if value is not None:
            text = f"{{0}}.{name} = {{1}}" if plain else f"object.__setattr__({{0}}, {name!r}, {{1}})"
            m.effect(text, self, value)
        else:
            m.effect(f"object.__delattr__({{0}}, {name!r})", self)

    # -- leaving

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        if self.born is not None:
            raise CannotEmit(self)
        name = self.emit_empty(em)
        payload = self.payload
        if isinstance(payload, DictTracker):
            payload.fill(em, name, em.const(payload.cls.__setitem__, "setitem"))  # type: ignore[index]
        elif isinstance(payload, SequenceTracker) and payload.cls is list and payload.entries:
            em.line(f"list.extend({name}, {em.value(payload)})")
        elif isinstance(payload, SetTracker) and payload.cls is set:
            payload.fill(em, name)
        written = dict(self.slots)
        if self._attrs is not None:
            written.update({key: value for key, (_, value) in self._attrs.entries.items()})  # type: ignore[misc]
        for key, value in written.items():
            if value is not None:
                em.line(f"{em.const(object.__setattr__, 'set_attribute')}({name}, {key!r}, {em.value(value)})")
        return name

    def emit_empty(self, em: Emitter) -> str:
        cls = em.borrowed(self.cls, self.cls.__name__)
        payload = self.payload
        if isinstance(payload, TupleTracker) or (isinstance(payload, SetTracker) and payload.cls is frozenset):
            new = em.const(payload.cls.__new__, f"new_{payload.cls.__name__}")
            return em.assign("obj", f"{new}({cls}, {em.value(payload)})", self)
        if payload is None:
            empty: Any = types.SimpleNamespace.__new__ if issubclass(self.cls, types.SimpleNamespace) else object.__new__
            return em.assign("obj", f"{em.const(empty, 'new_object')}({cls})", self)
        if isinstance(payload, ConstTracker):
            base = type(payload.value)
            return em.assign("obj", f"{base.__name__}.__new__({cls}, {em.value(payload)})", self)
        base = payload.python_type()
        return em.assign("obj", f"{em.const(base.__new__, 'new_' + base.__name__)}({cls})", self)

    def show(self) -> str:
        return f"{self.cls.__qualname__} object {self.source.text() if self.source else ''}".rstrip()


def payload_of(v: Tracker) -> Tracker:
    """The built-in value inside an instance of its subclass."""
    return v.payload if isinstance(v, ObjectTracker) and v.payload is not None else v


def forget_object(v: Tracker) -> None:
    """Capture is over: the trackers stand in reference cycles, and the program's object shall not wait for a collection of garbage."""
    for name in _HOLD:
        if getattr(v, name, MISSING) is not MISSING:
            with contextlib.suppress(AttributeError):  # computed
                setattr(v, name, MISSING)


_HOLD = ("obj", "entries", "payload")


class IdTracker(Tracker):
    """id() of a value that has no address yet: good for comparison and as a key."""

    __slots__ = ("of",)
    exact_type = int

    def __init__(self, of: Tracker) -> None:
        super().__init__()
        self.of = of

    def emit(self, em: Emitter) -> str:
        return em.assign("number", f"id({em.value(self.of)})")

    def show(self) -> str:
        return f"id({self.of.show()})"


class OpaqueTracker(Tracker):
    """Any other existing object: can be passed around, compared by identity, and handed to the program; looking inside breaks."""

    __slots__ = ("_machine", "obj")

    def __init__(self, obj: Any, source: Source, m: Machine) -> None:
        super().__init__(source)
        self.obj = obj
        self._machine = m

    def pin(self, m: Machine) -> Any:
        """The object itself, guarded by identity."""
        if not isinstance(self.source, Held):
            m.guard(Kind.ID_IS, self.source, self.obj)
        return self.obj

    def python_type(self) -> type:
        return type(self.obj)

    def instance_attr(self, m: Machine, name: str) -> Tracker | None:
        namespace = instance_dict(self.obj)
        if namespace is None and type(self.obj).__dictoffset__ and dict_descriptor(type(self.obj)) is None:
            m.graph_break("B103", attribute=name, value=self.show())  # there is one, behind a property
        if namespace is None or self.source is None:
            return None
        if name in namespace:
            return m.wrap(namespace[name], Item(InstanceDict(self.source), name))
        m.guard(Kind.KEY_ABSENT, InstanceDict(self.source), name)
        return None

    def show(self) -> str:
        return f"{type(self.obj).__name__} object {self.source.text() if self.source else ''}".rstrip()


def still_held(m: Machine, v: Tracker) -> bool:
    """Whether an object that the region has met is certain to live: a variable holds it, or what the program found it in, none of which has been changed."""
    source = v.source
    if isinstance(source, (Held, Local)):
        return True
    holders = []
    while source is not None and (source := source.base()) is not None:
        holders.append(source)
    if holders and not any(operands and operands[0].source in holders for _, operands in m.effects):  # type: ignore[attr-defined]
        return True
    return any(value is v for frame in m.frames for value in frame.locals)  # type: ignore[attr-defined]


class WeakRefTracker(OpaqueTracker):
    """An existing weak reference: the same reference object means the same referent, as long as that lives. What the region has done may have ended the
    life of anything but tensors, modules and classes."""

    __slots__ = ()

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        referent = self.obj()
        if referent is not None and not isinstance(referent, (torch.Tensor, torch.nn.Module, type)):
            found = m.wrapped.get(id(referent))  # type: ignore[attr-defined]
            if found is None or isinstance(found.source, Held) or not still_held(m, found):
                m.graph_break("B104", operation="a weak reference", value=self.show())
        return m.const(None) if referent is None else m.wrap(referent, Held(f"{self.show()}()", referent))
