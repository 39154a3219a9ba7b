"""Which callables fold: functions and methods without side effects whose result depends on the values of their arguments alone."""

from __future__ import annotations

import binascii
import cmath
import json
import math
import os
import re
import string
import struct
import sys
import textwrap
import threading
import types
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.basic_iterator import ItemsIterator
from magneto.dynamo.trackers.constant import VALUE_TYPES, ConstTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS, pure, rule
from magneto.dynamo.trackers.plain import plain_all

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

CONST_CLASSES = (int, float, complex, bool, str, bytes, range, slice, torch.dtype, torch.device)
MODULES = (math, cmath, struct, binascii, unicodedata)
_CLOCKS = frozenset({"now", "today", "utcnow"})
_RAW = (types.MethodDescriptorType, types.WrapperDescriptorType)
_BOUND = (types.ClassMethodDescriptorType, types.BuiltinFunctionType, staticmethod)
DEEP: set[Any] = set()
"""Pure callables that never give back an object they were given: they fold on built-in containers of constants as well."""


def _declare(cls: type) -> list[Any]:
    """A class of immutable values: its constructor, methods and class methods."""
    found: list[Any] = [cls]
    for name, raw in vars(cls).items():
        if name in ("__iter__", "__reversed__"):
            continue
        if isinstance(raw, _RAW):
            found.append(raw)
        elif isinstance(raw, _BOUND) and name not in (*_CLOCKS, "__new__"):
            found.append(getattr(cls, name))
    return found


for _cls in (memoryview, *CONST_CLASSES, *sorted(VALUE_TYPES, key=repr)):
    DEEP.update(_declare(_cls))
for _module in MODULES:
    DEEP.update(fn for fn in vars(_module).values() if isinstance(fn, types.BuiltinFunctionType))
_os_of_paths = sys.modules[os.name if os.name == "nt" else "posix"]
DEEP.update((divmod, chr, ord, bin, hex, oct, ascii, len))
DEEP.update((json.dumps, json.loads, string.capwords, textwrap.dedent, textwrap.indent, textwrap.fill, textwrap.wrap, textwrap.shorten))
DEEP.update((re.compile, re.match, re.fullmatch, re.search, re.sub, re.subn, re.split, re.findall, re.escape))
DEEP.difference_update((memoryview, range, slice, re.Pattern.finditer))  # rows of their own
DEEP.update(
    fn for name in ("_path_normpath", "_path_splitroot_ex", "_path_splitroot") if (fn := getattr(_os_of_paths, name, None)) is not None
)  # of os.path, 3.12 on
pure(DEEP)
pure((torch.promote_types, torch.can_cast, torch.finfo, torch.iinfo))


def _state(fn: Any) -> None:
    """A function of the process's state: its answer is guarded."""

    @rule(fn)
    def body(m: Machine) -> Any:
        value = fn()
        m.guard(Kind.STATE, None, (fn.__name__, fn, (), value))
        return m.const(value)


for _fn in (sys.getrecursionlimit, sys.getdefaultencoding, os.getpid, os.getcwd, os.cpu_count, threading.get_ident):
    _state(_fn)
DEEP.add(sys.intern)
pure([sys.getsizeof])  # of constants; what a container takes depends on how it has grown


@rule(os.fspath, Tracker)
def fspath(m: Machine, v: Tracker) -> Any:
    if issubclass(v.python_type(), (str, bytes)):
        return v
    method = find_special(m, v, "__fspath__")
    return NotImplemented if method is None else m.call(method, [], {})


def fold_deep(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback: a pure callable on containers of constants."""
    try:
        known = fn in DEEP
    except TypeError:
        return NotImplemented
    real = plain_all(m, args, kwargs) if known else None
    if real is None:
        return NotImplemented
    try:
        result = fn(*real[0], **real[1])
    except Exception as error:
        m.raise_exception(error)
    return m.const(result)


FALLBACKS.append(fold_deep)


@rule(re.Pattern.sub, ConstTracker, Tracker, ConstTracker)
def sub_by_function(m: Machine, pattern: ConstTracker, repl: Tracker, text: ConstTracker) -> Any:
    """re.sub with a function of the program."""
    if isinstance(repl, ConstTracker):
        return NotImplemented
    pieces: list[str] = []
    end = 0
    for match in pattern.read().finditer(text.read()):
        const = m.call(repl, [ConstTracker(match)], {}).try_const()
        if const is None:
            return NotImplemented
        pieces += [text.read()[end : match.start()], const.value]
        end = match.end()
    return m.const("".join([*pieces, text.read()[end:]]))


@rule((re.finditer, re.Pattern.finditer), ConstTracker, ConstTracker)
def finditer(m: Machine, pattern: ConstTracker, text: ConstTracker, *args: Tracker) -> Any:
    real = plain_all(m, (pattern, text, *args), {})
    return ItemsIterator([ConstTracker(match) for match in re.finditer(*real[0])]) if real is not None else NotImplemented
