"""Exceptions as values: made inside the region, or existing (caught by the frame before the region, passed in).

An exception that was raised inside the region has a traceback that only CPython can write. While it stays inside, capture follows it; where it would leave,
capture starts again and ends the region at the instruction that raised it (`born`): there the exception is raised for real, and the handler is an entry point.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, Source
from magneto.dynamo.trackers.base import MISSING, CannotEmit, Const, Tracker, namespace_of
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.object import ObjectTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_LINKS = ("__cause__", "__context__")


class ExceptionTracker(ObjectTracker):
    """An exception. `born`: the count of the instruction that raised it inside the region; `caught`: a handler of the program has run for it."""

    __slots__ = ("_arguments", "caught", "cause", "context", "real")

    def __init__(
        self, cls: type[BaseException], args: Sequence[Tracker] = (), real: BaseException | None = None, source: Source | None = None,
        obj: Any = MISSING,
    ) -> None:  # fmt: skip
        super().__init__(cls, source, obj)
        self._arguments: tuple[Tracker, ...] | None = tuple(args) if obj is MISSING else None
        self.cause: Tracker | None = None
        self.context: Tracker | None = None
        self.real = real
        self.born: int | None = None
        self.caught = False

    @classmethod
    def of(cls, m: Machine, exc: BaseException) -> ExceptionTracker:
        """Tracker of an exception that a rule met while computing for the program."""
        made = cls(type(exc), [m.const(arg) for arg in exc.args], exc)
        name = getattr(exc, "name", None)  # of AttributeError and NameError
        if isinstance(name, str):
            made.slots["name"] = ConstTracker(name)
        return made

    def arguments(self, m: Machine) -> tuple[Tracker, ...]:
        """`args`."""
        if self._arguments is None:
            assert self.source is not None
            self._arguments = tuple(m.iterate(m.wrap(self.obj.args, Attr(self.source, "args"))))
        return self._arguments

    def set_arguments(self, args: Sequence[Tracker]) -> None:
        self._arguments = tuple(args)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name == "args":
            return TupleTracker(self.arguments(m))
        if name == "__traceback__":
            return self.traceback(m)
        if name in self.slots:
            return self.slots[name]
        if self.source is not None:
            known = name in _LINKS or name == "__suppress_context__"
            return m.wrap(getattr(self.obj, name), Attr(self.source, name)) if known else self._existing_member(m, name)
        if name == "__cause__":
            return self.cause or ConstTracker(None)
        if name == "__context__":
            if isinstance(self.context, OutsideException):
                return m.handled_by_callers()  # type: ignore[attr-defined,no-any-return]
            return self.context or ConstTracker(None)
        if name == "__suppress_context__":
            return ConstTracker(self.cause is not None)
        return self._made_member(m, name)

    def traceback(self, m: Machine) -> Tracker:
        """`__traceback__`."""
        if self.source is None:
            return ConstTracker(None) if self.born is None else TracebackTracker(self)
        return m.wrap(self.obj.__traceback__, Attr(self.source, "__traceback__"))

    def _descriptor(self, name: str) -> Any:
        """The attribute that a built-in exception class keeps in C (`StopIteration.value`, `OSError.errno`), or None."""
        for base in self.cls.__mro__:
            if name in namespace_of(base):
                raw = namespace_of(base)[name]
                return (
                    raw
                    if isinstance(raw, (types.MemberDescriptorType, types.GetSetDescriptorType)) and not base.__flags__ & 1 << 9
                    else None
                )
        return None

    def _existing_member(self, m: Machine, name: str) -> Tracker | None:
        raw = self._descriptor(name)
        if raw is None or name in ("__dict__", "__class__"):
            return None
        assert self.source is not None
        return m.wrap(raw.__get__(self.obj), Attr(self.source, name))

    def _made_member(self, m: Machine, name: str) -> Tracker | None:
        args = self.arguments(m)
        if name in ("value", "code", "message") and self._descriptor(name) is not None and issubclass(self.cls, _FIRST_ARGUMENT):
            return args[0] if args else ConstTracker(None)
        if name == "exceptions" and issubclass(self.cls, BaseExceptionGroup):
            return TupleTracker(m.iterate(args[1]))
        if self._descriptor(name) is None or name in ("__dict__", "__class__"):
            return None
        real = self.real
        if real is None:
            consts = [arg.try_const() for arg in args]
            if any(const is None for const in consts):
                m.graph_break("B103", attribute=name, value=self.show())
            real = built_in(self.cls)(*(const.value for const in consts if const is not None))
        return m.const(getattr(real, name))

    def set_link(self, m: Machine, name: str, value: Tracker | None) -> bool:
        """Set an attribute that lives in C on an exception made here; False: not followed."""
        if self.source is not None:
            return False
        const = value.try_const() if value is not None else None
        none = const is not None and const.value is None
        if name in _LINKS and value is None:
            m.raise_exception(TypeError(f"{name} may not be deleted"))
        if name in _LINKS and value is not None and not none and not issubclass(value.python_type(), BaseException):
            m.raise_exception(TypeError(f"exception {name.strip('_')} must be None or derive from BaseException"))
        if name == "args" and value is not None:
            self._arguments = tuple(m.iterate(value))
        elif name == "__cause__" and value is not None:
            self.cause = value
        elif name == "__context__" and value is not None:
            self.context = None if none else value
        elif name == "__traceback__" and none:
            self.born = None
        elif name != "__traceback__" or not isinstance(value, TracebackTracker) or value.of is not self:
            return False
        return True

    def emit(self, em: Emitter) -> str:
        if self.source is not None:
            return em.source(self.source)
        if self.born is not None:
            raise CannotEmit(self)
        cls, base = em.borrowed(self.cls, self.cls.__name__), built_in(self.cls)
        assert self._arguments is not None
        args = "".join(f", {em.value(arg)}" for arg in self._arguments)
        name = em.assign("error", f"{em.const(base, base.__name__)}.__new__({cls}{args})", self)
        if base.__init__ is not BaseException.__init__:  # some keep an argument by themselves
            em.line(f"{em.const(base, base.__name__)}.__init__({name}{args})")
        written: dict[str, Any] = dict(self.slots)
        if self._attrs is not None:
            written.update({key: value for key, (_, value) in self._attrs.entries.items()})  # type: ignore[misc]
        if self.context is not None and not isinstance(self.context, OutsideException):
            written["__context__"] = self.context
        if self.cause is not None:
            written["__cause__"] = self.cause
        for key, value in written.items():
            if key not in self.slots or value.try_const() != Const(None):  # members start as None
                em.line(f"{name}.{key} = {em.value(value)}")
        return name

    def show(self) -> str:
        if self._arguments is None:
            return super().show()
        return f"{self.cls.__name__}({', '.join(arg.show() for arg in self._arguments)})"


_FIRST_ARGUMENT = (StopIteration, SystemExit, BaseExceptionGroup)


def built_in(cls: type) -> Any:
    """The class of C that lays an exception class out."""
    return next(base for base in cls.__mro__ if not base.__flags__ & 1 << 9)


class TracebackTracker(Tracker):
    """The traceback of an exception that was raised inside the region: there is one, and nobody can look inside."""

    __slots__ = ("of",)
    exact_type = types.TracebackType

    def __init__(self, of: ExceptionTracker) -> None:
        super().__init__()
        self.of = of

    @property
    def born(self) -> int | None:
        """Where capture breaks when the traceback is needed."""
        return self.of.born

    def emit(self, em: Emitter) -> str:
        raise CannotEmit(self)

    def show(self) -> str:
        return f"traceback of {self.of.show()}"


class OutsideException(Tracker):
    """What the frame's callers handle when the region begins (`sys.exception()`): restored when the frame's own handlers end; looked at under a guard."""

    __slots__ = ()
    exact_type = type(None)

    def emit(self, em: Emitter) -> str:
        return em.assign("handled", "handled_here()", self)

    def show(self) -> str:
        return "sys.exception()"


def wrap_exception(m: Machine, obj: BaseException, source: Source) -> Tracker:
    """An existing exception."""
    m.guard(Kind.TYPE_IS, source, type(obj))
    return ExceptionTracker(type(obj), source=source, obj=obj)
