"""Callables that look at the frame they are called from: they must be called by the program's own frame, never by generated code. So must the functions of
CPython's test modules: they show the interpreter's own state (an exception that is not made yet, the frame)."""

from __future__ import annotations

import builtins
import inspect
import logging
import sys
import traceback
import types
import warnings
from typing import Any

from magneto.dynamo.machine.frame import SymFrame
from magneto.dynamo.machine.handlers_control import split_call
from magneto.dynamo.marks import FRAME, mark_of
from magneto.dynamo.trackers.base import MISSING, Tracker

_NAMES = ("locals", "globals", "vars", "dir", "eval", "exec", "super", "breakpoint")
_CALLABLES: frozenset[Any] = frozenset(
    [
        *(getattr(builtins, name) for name in _NAMES),
        sys._getframe,
        sys._current_frames,
        getattr(sys, "_getframemodulename", None),
        sys.settrace,
        sys.setprofile,
        *(getattr(getattr(sys, "monitoring", None), name, None) for name in ("set_events", "set_local_events", "free_tool_id")),
        warnings.warn,
        *(inspect.currentframe, inspect.stack, inspect.trace, inspect.getouterframes),
        *(traceback.print_stack, traceback.extract_stack, traceback.format_stack, traceback.walk_stack),
        *(logging.debug, logging.info, logging.warning, logging.error, logging.exception, logging.critical, logging.log),
        *(getattr(logging.Logger, name) for name in ("debug", "info", "warning", "error", "exception", "critical", "log", "findCaller")),
    ]
)


def asks_for_the_callers_module(code: types.CodeType) -> bool:
    """Whether a function looks at the functions it was called by, as `dataclasses.make_dataclass` does. Behind a break inside it they would not be there."""
    return "_getframemodulename" in code.co_names


def _real(tracker: Tracker) -> Any:
    obj = getattr(tracker, "obj", MISSING)
    if obj is MISSING:
        function = getattr(tracker, "function", None)
        obj = getattr(function, "obj", MISSING) if function is not None else MISSING
    return obj


def calls_reflective(frame: SymFrame) -> bool:
    """Whether the frame's current instruction calls such a callable."""
    instruction = frame.current
    assert instruction is not None
    if instruction.op == "CALL":
        fn, _ = split_call(frame.before, instruction.arg)
    elif instruction.op == "CALL_KW":
        fn, _ = split_call(frame.before[:-1], instruction.arg)
    elif instruction.op == "CALL_FUNCTION_EX":
        candidates = frame.before[-4:]
        return any(_is_reflective(_real(value)) for value in candidates)
    else:
        return False
    return _is_reflective(_real(fn))


def _is_reflective(obj: Any) -> bool:
    if isinstance(obj, types.MethodType):
        obj = obj.__func__
    try:
        return (
            (obj is not None and obj in _CALLABLES)
            or mark_of(obj) == FRAME
            or (isinstance(obj, types.FunctionType) and asks_for_the_callers_module(obj.__code__))
            or getattr(obj, "__module__", None) in ("_testcapi", "_testinternalcapi")
        )
    except TypeError:
        return False
