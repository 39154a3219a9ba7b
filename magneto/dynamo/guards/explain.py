"""After a miss: which row failed first, what it expected, what was there, which line of the program made it necessary."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from magneto.dynamo.guards import reading
from magneto.dynamo.guards.rows import GuardSet, Kind, Row, Weak, show_value
from magneto.dynamo.guards.source import Source
from magneto.dynamo.guards.text import HOLD, check_function, show_row, show_tensor


@dataclass(frozen=True, slots=True)
class Miss:
    """`row` None: every row holds now (what failed has changed back, or another function with the same code has other globals)."""

    row: Row | None
    index: int
    expected: str
    actual: str

    def __str__(self) -> str:
        if self.row is None:
            return "all rows hold"
        line = f" ({self.row.user_line})" if self.row.user_line else ""
        return f"{self.expected}, but {self.actual}{line}"


def explain_miss(guards: GuardSet, state: Any) -> Miss:
    """The first row that fails for a FrameState (or a reading.Frame)."""
    frame = state if isinstance(state, reading.Frame) else _frame_of(state)
    index = check_function(guards)(frame)
    if index == HOLD:
        return Miss(None, HOLD, "", "")
    row = guards.rows[index]
    return Miss(row, index, show_row(row), _actual(row, frame))


def changed_numbers(guards: GuardSet, state: Any) -> set[Source]:
    """Sources of ints and floats that were guarded by value and now have another value of the same type."""
    frame = state if isinstance(state, reading.Frame) else _frame_of(state)
    found = set()
    for row in guards:
        if row.kind is Kind.RELATION and ".tobytes()" in row.payload and row.source is not None:  # an array guarded by its contents
            with contextlib.suppress(reading.Absent, reading.Unreadable):
                if not reading.relation(row.payload)(reading.read(row.source, frame)):
                    found.add(row.source)
        if row.kind is not Kind.EQUALS or type(row.payload) not in (int, float) or row.source is None:
            continue
        with contextlib.suppress(reading.Absent, reading.Unreadable):
            value = reading.read(row.source, frame)
            if type(value) is type(row.payload) and repr(value) != repr(row.payload):
                found.add(row.source)
    return found


def changed_modules(guards: GuardSet, state: Any) -> set[Source]:
    """Sources of modules that were guarded by identity, where another module of the same class is now."""
    import torch

    frame = state if isinstance(state, reading.Frame) else _frame_of(state)
    found = set()
    for row in guards:
        known = row.payload.ref() if isinstance(row.payload, Weak) else row.payload
        if row.kind is not Kind.ID_IS or row.source is None or not isinstance(known, torch.nn.Module):
            continue
        with contextlib.suppress(reading.Absent, reading.Unreadable):
            value = reading.read(row.source, frame)
            if value is not known and type(value) is type(known):
                found.add(row.source)
    return found


def _frame_of(state: Any) -> reading.Frame:
    from magneto import _C

    return reading.Frame.of_state(state, _C.UNBOUND)


def _actual(row: Row, frame: reading.Frame) -> str:
    if row.kind is Kind.STATE:
        _, read, args, _ = row.payload
        return f"it is {show_value(read(*args))}"
    assert row.source is not None
    try:
        value = reading.read(row.source, frame)
    except reading.Absent:
        return "there is no such value"
    except reading.Unreadable:
        return "it cannot be read"
    return _describe(row, value)


def _describe(row: Row, value: Any) -> str:
    kind = row.kind
    if kind is Kind.TYPE_IS:
        return f"it is a {type(value).__qualname__}"
    if kind is Kind.LENGTH:
        try:
            return f"the length is {reading.length(value)}"
        except reading.Unreadable:
            return f"it is a {type(value).__qualname__}"
    if kind is Kind.KEYS and isinstance(value, dict):
        return f"the keys are {show_value(tuple(reading.keys(value)))}"
    if kind is Kind.KEY_ABSENT:
        return "it is there"
    if kind is Kind.TYPE_VERSION:
        return "the class was modified"
    if kind is Kind.TENSOR:
        return f"got {describe_tensor(value)}"
    if kind is Kind.DISTINCT:
        return "they share an object or memory"
    return f"it is {show_value(value)}"


def describe_tensor(value: Any) -> str:
    """A tensor in the words of a TENSOR row."""
    import torch

    from magneto.dynamo.guards.rows import TensorRow
    from magneto.dynamo.guards.tensors import is_plain

    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__qualname__}"
    try:
        with torch._C.DisableTorchFunctionSubclass():  # to look is not to call
            lazy = value.is_conj() + 2 * value.is_neg()
            plain = is_plain(value, value.is_inference(), lazy)
            row = TensorRow(
                type(value), value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad, value.is_inference(), lazy
            )
    except (RuntimeError, NotImplementedError):
        return f"{type(value).__name__} {str(value.layout).removeprefix('torch.')}"
    return show_tensor(row) + ("" if plain else ", with a sparse layout or a subclass's dispatch")
