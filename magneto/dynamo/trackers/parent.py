"""super(cls, owner): attributes of the classes after `cls` in the owner's method resolution order."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.attributes import bind_attr
from magneto.dynamo.trackers.base import Tracker, namespace_of
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.klass import ClassTracker, class_attr, guard_class

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


class SuperTracker(Tracker):
    """super(cls, owner)."""

    __slots__ = ("cls", "owner")
    exact_type = super

    def __init__(self, cls: type, owner: Tracker) -> None:
        super().__init__()
        self.cls = cls
        self.owner = owner

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name == "__class__":
            return ClassTracker(super)
        owner_is_class = isinstance(self.owner, ClassTracker) and issubclass(self.owner.obj, self.cls)
        start: type = self.owner.obj if owner_is_class else self.owner.python_type()
        guard_class(m, start)
        mro = start.__mro__
        for base in mro[mro.index(self.cls) + 1 :]:
            if name in namespace_of(base):
                raw = namespace_of(base)[name]
                break
        else:
            return None
        if not owner_is_class:
            return bind_attr(m, raw, self.owner, start, name)
        assert isinstance(self.owner, ClassTracker)
        if isinstance(raw, types.BuiltinFunctionType):  # object.__new__, tuple.__new__
            return BuiltinTracker(raw, Held(name, raw))
        if isinstance(raw, types.ClassMethodDescriptorType):
            return BoundMethodTracker(BuiltinTracker(raw), self.owner)
        return class_attr(m, self.owner, raw, name)

    def emit(self, em: Emitter) -> str:
        return em.assign("parent", f"super({em.borrowed(self.cls, self.cls.__name__)}, {em.value(self.owner)})")

    def show(self) -> str:
        return f"super({self.cls.__name__}, {self.owner.show()})"
