"""Rows of exceptions: what is being handled, tracebacks, notes, exception groups."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import ListTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.exception import ExceptionTracker, TracebackTracker
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type, held

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


@rule(sys.exception)
def exception(m: Machine) -> Tracker:
    return m.handled_exception()  # type: ignore[attr-defined,no-any-return]


@rule(sys.exc_info)
def exc_info(m: Machine) -> Tracker:
    exc = m.handled_exception()  # type: ignore[attr-defined]
    if not isinstance(exc, ExceptionTracker):
        return TupleTracker([m.const(None)] * 3)
    return TupleTracker([m.apply(type, exc), exc, exc.traceback(m)])


@rule(BaseException.with_traceback, ExceptionTracker, Tracker)
def with_traceback(m: Machine, exc: ExceptionTracker, tb: Tracker) -> Any:
    m.apply(setattr, exc, m.const("__traceback__"), tb)
    return exc


@rule(traceback.clear_frames, TracebackTracker)
def clear_frames(m: Machine, v: TracebackTracker) -> None:
    """Frames that have run inside the region are gone already."""


NO_EXCEPTION = "catching classes that do not inherit from BaseException is not allowed"
NO_GROUP = "catching ExceptionGroup with except* is not allowed. Use except instead."


def catches(m: Machine, exc: Tracker, kinds: Tracker) -> bool:
    """Whether `except kinds` catches the exception."""
    _check_kinds(m, kinds, star=False)
    return _matches(m, exc, kinds)


def _check_kinds(m: Machine, kinds: Tracker, *, star: bool) -> None:
    for kind in m.iterate(kinds) if issubclass(kinds.python_type(), tuple) else [kinds]:
        if isinstance(kind, ClassTracker):
            parents = kind.obj.__mro__
        elif issubclass(kind.python_type(), type):
            m.graph_break("B104", operation="except", value=kind.show())
        else:
            parents = ()
        if BaseException not in parents:
            m.raise_exception(TypeError(NO_EXCEPTION))
        if star and BaseExceptionGroup in parents:
            m.raise_exception(TypeError(NO_GROUP))


def _matches(m: Machine, exc: Tracker, kinds: Tracker) -> bool:
    """By the classes alone: no metaclass is asked."""
    if issubclass(kinds.python_type(), tuple):
        return any(_matches(m, exc, kind) for kind in m.iterate(kinds))
    return isinstance(kinds, ClassTracker) and kinds.obj in exc.python_type().__mro__


def match_group(m: Machine, exc: Tracker, kinds: Tracker) -> tuple[Tracker | None, Tracker | None]:
    """(match, rest) of `except* kinds`. An existing group is split by CPython, between two graphs."""
    _check_kinds(m, kinds, star=True)
    if exc.try_const() is not None:
        return None, None
    assert isinstance(exc, ExceptionTracker)
    if exc.source is not None:
        m.graph_break("B002", name="CHECK_EG_MATCH", reason="a group that was raised outside of the graph")
    match, rest = _split(m, exc, kinds)
    if match is exc and not issubclass(exc.cls, BaseExceptionGroup):
        match = _group(m, exc, [exc], m.const(""))
    return match, rest


def _split(m: Machine, exc: Tracker, kinds: Tracker) -> tuple[Tracker | None, Tracker | None]:
    if _matches(m, exc, kinds):
        return exc, None
    if not isinstance(exc, ExceptionTracker) or not issubclass(exc.cls, BaseExceptionGroup):
        return None, exc
    pairs = [_split(m, part, kinds) for part in m.iterate(m.apply(getattr, exc, m.const("exceptions")))]
    halves = [[part for part in half if part is not None] for half in zip(*pairs, strict=True)]
    return _derive(m, exc, halves[0]), _derive(m, exc, halves[1])


def _group(m: Machine, exc: ExceptionTracker, parts: list[Tracker], message: Tracker) -> ExceptionTracker:
    kind = ExceptionGroup if all(issubclass(part.python_type(), Exception) for part in parts) else BaseExceptionGroup
    made = m.call(held(m, kind, kind.__name__), [message, ListTracker(parts)], {})
    assert isinstance(made, ExceptionTracker)
    made.born, made.caught = exc.born, True
    return made


def _derive(m: Machine, exc: ExceptionTracker, parts: list[Tracker]) -> Tracker | None:
    """A part of a group, as BaseExceptionGroup.split makes it."""
    if not parts:
        return None
    if find_in_type(m, exc.cls, "derive") is not BaseExceptionGroup.derive:
        m.graph_break("B104", operation="split", value=exc.show())
    made = _group(m, exc, parts, m.apply(getattr, exc, m.const("message")))
    made.cause, made.context = exc.cause, exc.context
    if m.truth(m.apply(hasattr, exc, m.const("__notes__"))):
        m.apply(setattr, made, m.const("__notes__"), m.apply(list, m.apply(getattr, exc, m.const("__notes__"))))
    return made


@rule(BaseException.add_note, ExceptionTracker, Tracker)
def add_note(m: Machine, exc: ExceptionTracker, note: Tracker) -> Any:
    if not issubclass(note.python_type(), str):
        m.raise_exception(TypeError(f"note must be a str, not '{_C.type_name(note.python_type())}'"))
    if not m.truth(m.apply(hasattr, exc, m.const("__notes__"))):
        m.apply(setattr, exc, m.const("__notes__"), ListTracker([]))
    m.apply(list.append, m.apply(getattr, exc, m.const("__notes__")), note)
    return None
