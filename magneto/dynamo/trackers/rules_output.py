"""Rows of what a program says: print, streams, logging, warnings. Said when the region's effects are replayed, in order, in the program's own name."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr, Held
from magneto.dynamo.trackers.base import MISSING, Awaited, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS, rule
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.late_text import stays_unread
from magneto.dynamo.trackers.lazy_number import guard_types
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import ObjectTracker, OpaqueTracker
from magneto.dynamo.trackers.plain import plain
from magneto.dynamo.trackers.pymodule import Named
from magneto.dynamo.trackers.rules_text import text_of
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES, TensorTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Machine


# -- print and streams


def shown(m: Machine, v: Tracker) -> Tracker:
    """What is handed to the effect: a known text; a tensor as it is, which the region may not write to any more."""
    if isinstance(v, TensorTracker) and v.cls in PLAIN_CLASSES:
        m.recorder.show(v)  # type: ignore[attr-defined]
        return v
    v = m.apply(str, v) if isinstance(v, ConstTracker) else v
    return v if isinstance(v, ItemTracker) else m.const(text_of(m, v, str))


@rule(print)
def print_(m: Machine, /, *args: Tracker, file: Tracker | None = None, **kwargs: Tracker) -> Any:
    consts = {name: value.try_const() for name, value in kwargs.items()}
    if any(const is None for const in consts.values()):
        return NotImplemented
    options = {name: const.value for name, const in consts.items() if const is not None}
    if file is not None and not (isinstance(file, ConstTracker) and file.read() is None):
        if not _is_stream(m, file):
            return _print_to(m, args, file, **options) if isinstance(file, ObjectTracker) else NotImplemented
        kwargs["file"] = file
    operands = [*(shown(m, arg) for arg in args), *kwargs.values()]
    parts = [f"{{{i}}}" for i in range(len(args))] + [f"{name}={{{len(args) + i}}}" for i, name in enumerate(kwargs)]
    m.effect(f"print({', '.join(parts)})", *operands)
    return None


def _print_to(m: Machine, args: Sequence[Tracker], file: Tracker, sep: Any = None, end: Any = None, flush: Any = False) -> Any:
    """On an object of the program: print asks it to write piece by piece."""

    def write(piece: Tracker) -> None:
        m.call(m.apply(getattr, file, m.const("write")), [piece], {})

    if not all(text is None or type(text) is str for text in (sep, end)):
        return NotImplemented
    for i, arg in enumerate(args):
        if i:
            write(m.const(" " if sep is None else sep))
        write(m.apply(str, arg))
    write(m.const("\n" if end is None else end))
    if flush:
        m.call(m.apply(getattr, file, m.const("flush")), [], {})
    return None


def _is_stream(m: Machine, v: Tracker) -> bool:
    """Whether it is an existing, open stream of C, which only passes text on."""
    if not isinstance(v, OpaqueTracker) or not isinstance(v.obj, (io.TextIOWrapper, io.StringIO)) or v.source is None:
        return False
    if type(v.obj).write not in (io.TextIOWrapper.write, io.StringIO.write) or v.obj.closed:
        return False
    if not isinstance(v.source, Held):
        m.guard(Kind.EQUALS, Attr(v.source, "closed"), False)
    return True


@rule((io.TextIOWrapper.write, io.StringIO.write), OpaqueTracker, ConstTracker)
def write(m: Machine, stream: OpaqueTracker, text: ConstTracker) -> Any:
    if type(text.read()) is not str or not _is_stream(m, stream):
        return NotImplemented
    m.effect("{0}.write({1})", stream, text)
    return m.const(len(text.read()))


@rule((io.TextIOWrapper.write, io.StringIO.write), OpaqueTracker, ItemTracker)
def write_late(m: Machine, stream: OpaqueTracker, text: ItemTracker) -> Any:
    if text.cls is not str or not _is_stream(m, stream):
        return NotImplemented
    m.effect("{0}.write({1})", stream, text)
    return m.apply(len, text)


@rule(tuple({io.TextIOWrapper.flush, io.StringIO.flush, io.IOBase.flush}), OpaqueTracker)
def flush(m: Machine, stream: OpaqueTracker) -> Any:
    if not _is_stream(m, stream):
        return NotImplemented
    m.effect("{0}.flush()", stream)
    return None


# -- who speaks


def speaker(m: Machine, level: int, skipped: str = "") -> tuple[str, int, str, dict[str, Any]] | None:
    """(file, line, function, globals) of the frame `level` steps up from the one that calls, frames of the file `skipped` left out; None: not known,
    because eager has frames in between that capture has not, or the frame is none of this region."""
    frames = m.frames  # type: ignore[attr-defined]
    depth = len(frames) - 1
    engine = m.recorder.engine  # type: ignore[attr-defined]
    while depth >= 0:
        if engine is not None and depth == engine[0]:
            level -= engine[1]
            if level < 0:
                return None
        frame = frames[depth]
        if frame.code.co_filename != skipped:
            level -= 1
            if level < 0:
                return (*frame.where(), frame.globals)
            owner = frame.locals[0] if frame.locals else None
            called = frame.tail or (engine is not None and depth == engine[0] + 1)  # by the frame below it, or by autograd's engine
            if not called or (isinstance(owner, ModuleTracker) and frame.code.co_name == "forward"):
                return None
        depth -= 1
    return None


# -- logging


def log_record(logger: logging.Logger, level: int, place: tuple[str, int, str], message: str, args: tuple[Any, ...]) -> None:
    """What Logger._log does, the caller being known."""
    logger.handle(logger.makeRecord(logger.name, level, place[0], place[1], message, args, None, place[2], None, None))


_LOG_RECORD = BuiltinTracker(log_record)


def _log(m: Machine, v: ObjectTracker, level: int, message: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    logger: Any = v.obj
    if logger is MISSING:
        return NotImplemented
    enabled = logger.isEnabledFor(level)
    m.guard(Kind.STATE, None, (f"{logger.name}.isEnabledFor", logger.isEnabledFor, (level,), enabled))
    if not enabled:
        return None
    place = speaker(m, 0, logging._srcfile or "")
    own = type(logger)._log is not logging.Logger._log or type(logger).findCaller is not logging.Logger.findCaller
    if kwargs or own or place is None or (message.try_const() is None and not isinstance(message, ItemTracker)):
        return NotImplemented
    operands = []
    for arg in args:
        if isinstance(arg, TensorTracker) and arg.cls in PLAIN_CLASSES:
            operands.append(shown(m, arg))
            continue
        if isinstance(arg, ItemTracker) or (isinstance(arg, ConstTracker) and stays_unread(m, arg)):
            guard_types(m, *([] if isinstance(arg, ItemTracker) else [arg]))
            operands.append(arg)
            continue
        const = plain(m, arg)
        if const is None:
            return NotImplemented
        operands.append(m.const(const.value))
    text = "".join(f"{{{i}}}, " for i in range(5, 5 + len(args)))
    m.effect(f"{{0}}({{1}}, {{2}}, {{3}}, {{4}}, ({text}))", _LOG_RECORD, v, m.const(level), m.const(place[:3]), message, *operands)
    return None


def _logs(name: str, level: int) -> None:
    """A logger's method: nothing where the level is off (guarded), otherwise an effect where capture knows the message."""

    @rule(getattr(logging.Logger, name), ObjectTracker, Tracker)
    def body(m: Machine, v: ObjectTracker, message: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        return _log(m, v, level, message, args, kwargs)


for _name, _level in (("debug", 10), ("info", 20), ("warning", 30), ("error", 40), ("critical", 50)):
    _logs(_name, _level)


@rule(logging.Logger.log, ObjectTracker, ConstTracker, Tracker)
def log_at(m: Machine, v: ObjectTracker, level: ConstTracker, message: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    return _log(m, v, level.read(), message, args, kwargs) if type(level.read()) is int else NotImplemented


# -- warnings


def warn_there(message: str, category: type[Warning], place: tuple[str, int], names: dict[str, Any]) -> None:
    """What warnings.warn does, the place being known."""
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, *place, names.get("__name__") or "<string>", registry)


def repeat_warnings(m: Machine, heard: Sequence[warnings.WarningMessage]) -> None:
    """What torch has warned when capture asked it, each once, at the program's line. (What it warns at lines of its own stays there.)"""
    for text, message in {(str(message.message), message.category): message for message in heard}.items():
        place = speaker(m, 0) if message.filename.startswith(_OURS) else None
        if place is None:
            warnings._showwarnmsg(message)  # type: ignore[attr-defined]
        else:
            for module in list(sys.modules.values()):  # where it has been shown by our line, of which others ask too
                if getattr(module, "__file__", None) == message.filename:
                    vars(module).pop("__warningregistry__", None)
            warn_there(*text, place[:2], place[3])


_OURS = (str(Path(__file__).parents[2]), contextlib.__file__)  # the latter: modes that are entered round torch's call
_WARN_THERE = BuiltinTracker(warn_there)
_MUTATED = [fn for name, fn in vars(warnings).items() if name.startswith("_filters_mutated") and isinstance(fn, types.BuiltinFunctionType)]


def raises(filters: Any, message: str, category: type[Warning], module: str, line: int) -> bool:
    """Whether the first filter that fits makes the warning an exception."""
    for action, text, kind, place, at in filters:
        fits = (text is None or _match(text, message)) and issubclass(category, kind) and (place is None or _match(place, module))
        if fits and at in (0, line):
            return bool(action == "error")
    return bool(warnings.defaultaction == "error")  # type: ignore[attr-defined]


def _match(pattern: Any, text: str) -> bool:
    return (re.match(pattern, text, re.IGNORECASE) if isinstance(pattern, str) else pattern.match(text)) is not None


def _raises_now(*args: Any) -> bool:
    return raises(warnings.filters, *args)


def _taker() -> str:
    """Who is given a warning: nobody ("" : it is written), a list of catch_warnings, or a function of the program."""
    if warnings.showwarning is not getattr(warnings, "_showwarning_orig", warnings.showwarning):
        return "function"
    shows = warnings._showwarnmsg_impl  # type: ignore[attr-defined]
    if type(shows) is types.BuiltinMethodType and shows.__name__ == "append" and type(shows.__self__) is list:
        return "list"
    return "" if getattr(shows, "__module__", None) == "warnings" else "function"


def _given(m: Machine) -> bool:
    """Whether the warning may be given when the effects are replayed: to nobody who asks before."""
    taker = _taker()
    m.guard(Kind.STATE, None, ("who is given warnings", _taker, (), taker))
    if taker == "list":
        wrapped: dict[int, Tracker] = m.wrapped  # type: ignore[attr-defined]
        log = warnings._showwarnmsg_impl.__self__  # type: ignore[attr-defined]
        return isinstance(wrapped.setdefault(id(log), Awaited("the list of recorded warnings")), Awaited)
    return not taker


@rule(warnings.warn, ConstTracker)
def warn(
    m: Machine, message: ConstTracker, category: Tracker | None = None, stacklevel: Tracker | None = None, source: Tracker | None = None
) -> Any:
    kind = UserWarning if category is None else category.obj
    level = stacklevel.try_const() if stacklevel is not None else None
    text = message.read()
    if type(text) is not str or not isinstance(kind, type) or not issubclass(kind, Warning) or source is not None:
        return NotImplemented
    if stacklevel is not None and (level is None or type(level.value) is not int):
        return NotImplemented
    place = speaker(m, max(0, level.value - 1) if level is not None else 0)
    if place is None:
        return NotImplemented
    file, line, _, names = place
    asked = (text, kind, names.get("__name__") or "<string>", line)
    own = vars(warnings)
    changed = {name: value for (owner, name), value in m.overlay.items() if owner == id(own)}  # type: ignore[attr-defined]
    if any(value is None or value.obj is not own[name] for name, value in changed.items() if name != "filters"):
        return NotImplemented  # somebody records them
    if "filters" in changed:
        raising = raises(_filters(m, changed["filters"]), *asked)
    else:
        raising = _raises_now(*asked)
        m.guard(Kind.STATE, None, ("warnings filters", _raises_now, asked, raising))
    if raising:
        m.raise_exception(kind(text))
    if not _given(m):
        return NotImplemented
    held = Named(names)
    m.effect("{0}({1}, {2}, {3}, {4})", _WARN_THERE, m.const(text), ClassTracker(kind), m.const((file, line)), held)
    return None


def _filters(m: Machine, v: Tracker) -> list[Any]:
    """The filters that the region has made."""
    found = []
    for item in m.iterate(v):
        parts = m.iterate(item) if isinstance(item, SequenceTracker) else []
        values = [part.obj if isinstance(part, ClassTracker) else getattr(part.try_const(), "value", MISSING) for part in parts]
        if len(values) != 5 or MISSING in values:
            m.graph_break("B101", callee="warnings.warn", reason="a filter that is not known")
        found.append(values)
    return found


def filters_mutated(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback: the C function that tells of changed filters."""
    if not any(fn is known for known in _MUTATED):
        return NotImplemented
    m.effect("{0}()", BuiltinTracker(fn))
    return None


FALLBACKS.append(filters_mutated)
