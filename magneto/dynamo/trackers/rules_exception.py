"""Rows of exceptions: what is being handled, tracebacks, notes, exception groups."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import ListTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.exception import ExceptionTracker

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
def with_traceback(m: Machine, exc: ExceptionTracker, traceback: Tracker) -> Any:
    m.apply(setattr, exc, m.const("__traceback__"), traceback)
    return exc


@rule(BaseException.add_note, ExceptionTracker, Tracker)
def add_note(m: Machine, exc: ExceptionTracker, note: Tracker) -> Any:
    if not issubclass(note.python_type(), str):
        m.raise_exception(TypeError(f"note must be a str, not '{note.python_type().__name__}'"))
    if not m.truth(m.apply(hasattr, exc, m.const("__notes__"))):
        m.apply(setattr, exc, m.const("__notes__"), ListTracker([]))
    m.apply(list.append, m.apply(getattr, exc, m.const("__notes__")), note)
    return None
