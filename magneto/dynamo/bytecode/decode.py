"""Decoding: code object -> instructions that mean the same on every supported Python version.

All knowledge of argument packing (name indices with flag bits, jump bases, comparison shifts) is here; the machine sees `argval` and the flag
bits as fields. Inline caches are dropped; offsets are byte offsets in `co_code`, as `dis` shows them.
"""

from __future__ import annotations

import dis
import opcode
import sys
from types import CodeType
from typing import Any

from magneto.base.dataclass import dataclass

VERSION = sys.version_info[:2]
NO_DICT = " and no __dict__ for setting new attributes" if VERSION >= (3, 13) else ""
"""End of the message with which an object without a dictionary refuses a new attribute."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """`argval`: name, constant, slot number, jump target offset or plain number; `flag`: the low bit(s) packed into the argument."""

    op: str
    arg: int
    argval: Any
    flag: int
    offset: int
    next: int
    line: int
    target: int = -1


@dataclass(frozen=True, slots=True)
class Handler:
    """One row of the exception table: byte range [start, end), handler offset, stack depth to unwind to, push lasti."""

    start: int
    end: int
    target: int
    depth: int
    lasti: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded code object. `index` maps byte offsets to positions in `instructions`."""

    code: CodeType
    instructions: tuple[Instruction, ...]
    index: dict[int, int]
    handlers: tuple[Handler, ...]
    slots: tuple[str, ...]

    def handler_at(self, offset: int) -> Handler | None:
        """The innermost handler covering an instruction (rows are disjoint in CPython's table)."""
        for row in self.handlers:
            if row.start <= offset < row.end:
                return row
        return None


_CACHES: tuple[int, ...] = (
    tuple(getattr(opcode, "_inline_cache_entries", ())) if not isinstance(getattr(opcode, "_inline_cache_entries", ()), dict) else ()
)
if VERSION >= (3, 13):
    _by_name: dict[str, int] = getattr(opcode, "_inline_cache_entries", {})
    _CACHES = tuple(_by_name.get(dis.opname[i], 0) for i in range(256))

_HASJREL = frozenset(dis.hasjrel)
_HASNAME = frozenset(dis.hasname)
_HASCONST = frozenset(dis.hasconst)
_HASLOCAL = frozenset(dis.haslocal)
_HASFREE = frozenset(dis.hasfree)
_NAME_FLAG_BITS = {"LOAD_GLOBAL": 1, "LOAD_ATTR": 1 if VERSION >= (3, 12) else 0, "LOAD_SUPER_ATTR": 2}
_COMPARE_SHIFT = {(3, 11): 0, (3, 12): 4, (3, 13): 5}.get(VERSION, 0)
COMPARE_OPERATORS = ("<", "<=", "==", "!=", ">", ">=")
_PAIRS = frozenset({"LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"})


def slot_names(code: CodeType) -> tuple[str, ...]:
    """Names of localsplus: locals, then cell variables that are not arguments, then free variables (the order CPython lays them out)."""
    names = list(code.co_varnames)
    names += [name for name in code.co_cellvars if name not in code.co_varnames]
    return tuple(names) + code.co_freevars


def _argument(code: CodeType, op: int, name: str, arg: int, slots: tuple[str, ...], after: int) -> tuple[Any, int, int]:
    """(argval, flag, jump target) of one instruction."""
    if op in _HASJREL:
        target = after + (-2 * arg if "BACKWARD" in name else 2 * arg)
        return target, 0, target
    if op in _HASCONST:
        return code.co_consts[arg], 0, -1
    if op in _HASNAME:
        bits = _NAME_FLAG_BITS.get(name, 0)
        return code.co_names[arg >> bits], arg & ((1 << bits) - 1), -1
    if name in _PAIRS:
        return (arg >> 4, arg & 15), 0, -1
    if op in _HASLOCAL or op in _HASFREE:
        return arg, 0, -1
    if name == "COMPARE_OP":
        flag = 1 if VERSION >= (3, 13) and arg & 16 else 0
        return COMPARE_OPERATORS[arg >> _COMPARE_SHIFT], flag, -1
    return arg, 0, -1


_DECODED: dict[CodeType, Decoded] = {}


def decode(code: CodeType) -> Decoded:
    """Decode a code object (cached; code objects compare by value, so the cached one may be an equal twin: offsets are the same)."""
    found = _DECODED.get(code)
    if found is not None and found.code is code:
        return found
    slots = slot_names(code)
    raw = code.co_code
    starts = _line_starts(code)
    rows: list[Instruction] = []
    index: dict[int, int] = {}
    position, extended, first, line = 0, 0, -1, code.co_firstlineno
    while position < len(raw):
        op, arg = raw[position], raw[position + 1] | extended
        if first < 0:
            first = position
        name = dis.opname[op]
        if name == "EXTENDED_ARG":
            extended = arg << 8
            position += 2
            continue
        after = position + 2 + 2 * (_CACHES[op] if op < len(_CACHES) else 0)
        line = starts[position // 2] or line
        has_arg = op >= dis.HAVE_ARGUMENT
        argval, flag, target = _argument(code, op, name, arg, slots, after) if has_arg else (None, 0, -1)
        for covered in range(first, position + 2, 2):
            index[covered] = len(rows)
        rows.append(Instruction(name, arg if has_arg else 0, argval, flag, first, after, line, target))
        position, extended, first = after, 0, -1
    decoded = Decoded(code, tuple(rows), index, exception_table(code), slots)
    _DECODED[code] = decoded
    return decoded


def _line_starts(code: CodeType) -> list[int]:
    lines: list[int] = []
    for start, end, line in code.co_lines():
        lines.extend([line or 0] * ((end - start) // 2))
    lines.extend([0] * (len(code.co_code) // 2 - len(lines)))
    return lines


def exception_table(code: CodeType) -> tuple[Handler, ...]:
    """Parse `co_exceptiontable` (6-bit varints, as CPython's documentation of the format describes)."""
    data = iter(code.co_exceptiontable)
    rows: list[Handler] = []

    def varint(byte: int) -> int:
        value = byte & 63
        while byte & 64:
            byte = next(data)
            value = value << 6 | byte & 63
        return value

    for byte in data:
        start = varint(byte) * 2
        length = varint(next(data)) * 2
        target = varint(next(data)) * 2
        depth_lasti = varint(next(data))
        rows.append(Handler(start, start + length, target, depth_lasti >> 1, bool(depth_lasti & 1)))
    return tuple(rows)
