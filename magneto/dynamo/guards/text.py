"""GuardSet -> Python text. `show_guards` is for people; `check_text` is a program over guards/reading.py that says which row fails first: the
oracle of the native program, and what `explain` runs after a miss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from magneto.base.text import compile_source
from magneto.dynamo.guards import reading
from magneto.dynamo.guards.rows import GuardSet, Kind, Row, Weak, show_value
from magneto.dynamo.guards.source import Attr, Cell, Global, Held, InstanceDict, Item, KeyAt, Local, Part, Peek, Source, Stack

HOLD = -1


def show_tensor(row: Any) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in row.shape)
    text = f"{row.cls.__name__} {str(row.dtype).removeprefix('torch.')}[{sizes}] on {row.device}"
    if row.strides is not None:
        text += f", strides ({', '.join('?' if stride is None else str(stride) for stride in row.strides)})"
    if row.requires_grad is not None:
        text += f", requires_grad {row.requires_grad}"
    return text + (", inference" if row.inference else "") + ("", ", conj", ", neg", ", conj, neg")[row.lazy]


def _between(x: str, low: int | None, high: int | None) -> str:
    return f"type({x}) is int" + (f" and {low} <= {x}" if low is not None else "") + (f" and {x} <= {high}" if high is not None else "")


def _name(payload: Any) -> str:
    return payload.text if isinstance(payload, Weak) else show_value(payload)


# kind -> text for people of (source text, payload)
SHOW: dict[Kind, Callable[[str, Any], str]] = {
    Kind.TYPE_IS: lambda x, p: f"type({x}) is {_name(p)}", Kind.ID_IS: lambda x, p: f"{x} is {_name(p)}",
    Kind.EQUALS: lambda x, p: f"{x} == {p!r}", Kind.TENSOR: lambda x, p: f"{x}: {show_tensor(p)}",
    Kind.LENGTH: lambda x, p: f"len({x}) == {p}", Kind.KEYS: lambda x, p: f"list({x}) == {list(p)!r}",
    Kind.KEY_ABSENT: lambda x, p: f"{show_value(p)} not in {x}",
    Kind.ABSENT: lambda x, p: f"{x} is unbound" if p is None else f"{x}.{p} is not set", Kind.PRESENT: lambda x, p: f"{x} is there",
    Kind.SAME: lambda x, p: f"{x} is {p.text()}", Kind.MEMBER: lambda x, p: f"{p.text()} in {x}",
    Kind.NOT_MEMBER: lambda x, p: f"{p.text()} not in {x}",
    Kind.DISTINCT: lambda x, p: f"distinct({', '.join([x, *[source.text() for source in p]])})",
    Kind.TYPE_VERSION: lambda x, p: f"class {_name(p)} is not modified", Kind.STATE: lambda x, p: f"{p[0]} == {p[3]!r}",
    Kind.INT_RANGE: lambda x, p: _between(x, *p),
    Kind.SIZES: lambda x, p: f"the sizes of {', '.join([x, *[source.text() for source in p.others]])} are some that it was captured for",
    Kind.RELATION: lambda x, p: p.format(*[x] * p.count("{}")), Kind.DECIDES: lambda x, p: f"({p.text}) is {p.expected}, decided by {x}",
    Kind.TOGETHER: lambda x, p: p[0].format(x, *[source.text() for source in p[1]]),
}  # fmt: skip


def show_row(row: Row) -> str:
    """One row as text."""
    return SHOW[row.kind](row.source.text() if row.source is not None else "", row.payload)


def show_guards(guards: GuardSet) -> str:
    """The rows one per line, with the line of the program that made each necessary (L: locals, S: value stack, G: globals)."""
    lines = [(show_row(row), row.user_line) for row in guards]
    width = min(100, max((len(text) for text, _ in lines), default=0))
    return "\n".join(f"{text.ljust(width)}  # {line}" if line else text for text, line in lines)


# ---- the runnable text

# source class -> expression of (base expression, source, name of a constant)
_EXPRESSIONS: dict[type, Callable[[str, Any, Callable[[Any], str]], str]] = {
    Local: lambda base, s, const: f"slot(frame, {s.slot})", Stack: lambda base, s, const: f"stack(frame, {s.index})",
    Global: lambda base, s, const: f"global_name(frame, {s.name!r})", Held: lambda base, s, const: const(s.obj),
    Cell: lambda base, s, const: f"cell({base})", InstanceDict: lambda base, s, const: f"instance_dict({base})",
    Attr: lambda base, s, const: f"attr({base}, {s.name!r})",
    Item: lambda base, s, const: f"item({base}, {repr(s.key) if type(s.key) in (int, str) else const(s.key)})",
    KeyAt: lambda base, s, const: f"key_at({base}, {s.index})", Part: lambda base, s, const: f"part({base}, {s.index})",
    Peek: lambda base, s, const: f"peek({base}, {s.ahead}, {s.part})",
}  # fmt: skip


class _Writer:
    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}

    def const(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def source(self, source: Source) -> str:
        base = source.base()
        inner = f"present({self.source(base).join(('lambda: ', ''))})" if base is not None else ""
        return _EXPRESSIONS[type(source)](inner, source, self.const)

    def row(self, row: Row) -> str:
        x = self.source(row.source) if row.source is not None else ""
        return _CHECKS[row.kind](self, x, row.payload)

    def pinned(self, payload: Any) -> str:
        """The object of a row (that may be gone)."""
        return f"{self.const(payload.ref)}()" if isinstance(payload, Weak) else self.const(payload)


def known(payload: Any) -> Any:
    return payload.known() if isinstance(payload, Weak) else payload


def _absent(w: _Writer, x: str, payload: str | None) -> str:
    return f"is_absent(lambda: {x})" if payload is None else f"attr_absent({x}, {payload!r})"


_CHECKS: dict[Kind, Callable[[_Writer, str, Any], str]] = {
    Kind.TYPE_IS: lambda w, x, p: f"type({x}) is {w.pinned(p)}", Kind.ID_IS: lambda w, x, p: f"same_object({x}, {w.pinned(p)})",
    Kind.EQUALS: lambda w, x, p: f"same_constant({x}, {w.const(p)})", Kind.TENSOR: lambda w, x, p: f"tensor_holds({w.const(p)}, {x})",
    Kind.LENGTH: lambda w, x, p: f"length({x}) == {p}",
    Kind.KEYS: lambda w, x, p: f"same_constant(tuple(listed({x})), {w.const(tuple(p))})",
    Kind.KEY_ABSENT: lambda w, x, p: f"key_absent({x}, {w.const(p)})", Kind.ABSENT: _absent,
    Kind.PRESENT: lambda w, x, p: f"({x}, True)[1]", Kind.SAME: lambda w, x, p: f"{x} is {w.source(p)}",
    Kind.MEMBER: lambda w, x, p: f"is_element({x}, {w.source(p)})", Kind.NOT_MEMBER: lambda w, x, p: f"not is_element({x}, {w.source(p)})",
    Kind.DISTINCT: lambda w, x, p: f"all_distinct({', '.join([x, *[w.source(source) for source in p]])})",
    Kind.TYPE_VERSION: lambda w, x, p: f"class_unchanged({w.const(known(p))}, {w.const(reading.class_snapshot(known(p)))})",
    Kind.STATE: lambda w, x, p: f"same_constant({w.const(p[1])}(*{w.const(p[2])}), {w.const(p[3])})",
    Kind.INT_RANGE: lambda w, x, p: f"in_range({x}, {p[0]}, {p[1]})",
    Kind.SIZES: lambda w, x, p: f"{w.const(p.holds_for)}({', '.join([x, *[w.source(source) for source in p.others]])})",
    Kind.RELATION: lambda w, x, p: f"{w.const(reading.relation(p))}({x})", Kind.DECIDES: lambda w, x, p: f"{w.const(p.holds)}({x})",
    Kind.TOGETHER: lambda w, x, p: f"{w.const(reading.relation(*p))}({', '.join([x, *[w.source(source) for source in p[1]]])})",
}  # fmt: skip


def _present(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except reading.Absent:
        raise reading.Unreadable from None


def _is_absent(read: Callable[[], Any]) -> bool:
    try:
        read()
    except reading.Absent:
        return True
    return False


def _attr_absent(obj: Any, name: str) -> bool:
    return _is_absent(lambda: reading.attr(obj, name))


def _key_absent(obj: Any, key: Any) -> bool:
    reading.keys(obj)
    try:
        hash(key)
    except TypeError:
        return False
    return _is_absent(lambda: reading.item(obj, key))


def _all_distinct(*values: Any) -> bool:
    if len({id(value) for value in values}) < len(values):
        return False
    import sys

    torch = sys.modules.get("torch")
    ranges = []
    for value in values:
        if torch is not None and isinstance(value, torch.Tensor):
            try:
                device, low, high = reading.memory_range(value)
            except (RuntimeError, NotImplementedError):
                return False
            if low != high:
                ranges.append((str(device), low, high))
    ranges.sort()
    return all(before[0] != after[0] or before[2] <= after[1] for before, after in itertools.pairwise(ranges))


def _tensor_holds(row: Any, value: Any) -> bool:
    from magneto.dynamo.guards.tensors import tensor_holds

    return tensor_holds(row, value)


_NAMES: dict[str, Any] = {
    **{
        name: getattr(reading, name)
        for name in ("slot", "stack", "global_name", "cell", "instance_dict", "attr", "item", "key_at", "part", "peek", "keys", "length")
    },
    **{
        name: getattr(reading, name)
        for name in ("listed", "is_element", "same_constant", "class_unchanged", "in_range", "Absent", "Unreadable")
    },
    "present": _present,
    "is_absent": _is_absent,
    "attr_absent": _attr_absent,
    "key_absent": _key_absent,
    "all_distinct": _all_distinct,
    "tensor_holds": _tensor_holds,
    "same_object": lambda a, b: a is b,
}


def check_text(guards: GuardSet) -> tuple[str, dict[str, Any]]:
    """Text of `check(frame)`, which returns the index of the first row that fails or HOLD, and the constants it needs."""
    writer = _Writer()
    lines = ["def check(frame):", f"    at = {HOLD}", "    try:"]
    for index, row in enumerate(guards):
        expression = writer.row(row)
        lines.append(f"        at = {index}  # {show_row(row)}".replace("\n", " "))
        lines.append(f"        if not ({expression}): return at")
    lines += [f"        at = {HOLD}", "    except (Absent, Unreadable):", "        pass", "    return at"]
    return "\n".join(lines) + "\n", writer.constants


def holds_later(guards: GuardSet, whole: bool) -> Callable[[bool], bool] | None:
    """Whether rows that need no frame hold when it is called, and, where `whole`, all gradients are there, which it is told; None without either."""
    if not guards.rows:
        return bool if whole else None
    check, nothing = check_function(guards), reading.Frame(())
    return lambda there: (there or not whole) and check(nothing) == HOLD


def check_function(guards: GuardSet) -> Callable[[reading.Frame], int]:
    """The guard set as a Python function of a reading.Frame: index of the first failing row, or HOLD."""
    text, constants = check_text(guards)
    namespace = compile_source("magneto guards", text, {**_NAMES, **constants})
    return namespace["check"]  # type: ignore[no-any-return]
