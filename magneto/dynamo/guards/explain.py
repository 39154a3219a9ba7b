"""After a miss: which row failed first, what it expected, what was there, which line of the program made it necessary."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from magneto.base.dataclass import dataclass
from magneto.dynamo.guards import reading
from magneto.dynamo.guards.rows import GuardSet, Kind, Row, TensorRow, Weak, show_value
from magneto.dynamo.guards.source import Source
from magneto.dynamo.guards.tensors import is_plain
from magneto.dynamo.guards.text import HOLD, check_function, show_tensor
from magneto.dynamo.guards.wording import expected, expression, tensors_differ


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
        places = [place for place in (self.row.user_line, self.row.inside and f"read in {self.row.inside}") if place]
        return f"{self.expected}, but {self.actual}" + (f" ({', '.join(places)})" if places else "")

    def fields(self) -> dict[str, str]:
        """For events: the expression that is guarded, what was expected of it, what it is, the user's line that read it."""
        source = self.row.source if self.row is not None else None
        return {
            "expression": expression(source) if source is not None else "",
            "expected": self.expected,
            "actual": self.actual,
            "user_line": self.row.user_line if self.row is not None else "",
        }


_MANY = 400  # rows: Python needs long to compile a check of so many, and the native one has found a row that fails


def explain_miss(guards: GuardSet, state: Any, found: int = HOLD) -> Miss:
    """The first row that fails for a FrameState (or a reading.Frame). `found`: what the native check found, which remembers how classes were."""
    frame = state if isinstance(state, reading.Frame) else _frame_of(state)
    many = len(guards.rows) > _MANY and 0 <= found < len(guards.rows)
    index = found if many else check_function(guards)(frame)
    if 0 <= found < len(guards.rows) and guards.rows[found].kind is Kind.TYPE_VERSION and (index == HOLD or found < index):
        index = found
    if index == HOLD:
        return Miss(None, HOLD, "", "")
    row = guards.rows[index]
    return Miss(row, index, *_told(row, frame))


def keeps_failing(misses: Sequence[Miss]) -> tuple[Row, int] | None:
    """Of the misses of several variants: a row that fails in most of them, and in how many."""
    rows = [miss.row for miss in misses if miss.row is not None]
    counts = Counter((row.kind, row.source) for row in rows)
    if not counts:
        return None
    worst, count = counts.most_common(1)[0]
    return next(row for row in rows if (row.kind, row.source) == worst), count


def changed_numbers(guards: GuardSet, state: Any) -> set[Source]:
    """Sources of ints and floats, numpy's too, that were guarded by value and now have another value of the same type."""
    frame = state if isinstance(state, reading.Frame) else _frame_of(state)
    found = set()
    for row in guards:
        if row.kind is Kind.RELATION and ".tobytes()" in row.payload and row.source is not None:  # an array guarded by its contents
            with contextlib.suppress(reading.Absent, reading.Unreadable):
                if not reading.relation(row.payload)(reading.read(row.source, frame)):
                    found.add(row.source)
        if row.kind is not Kind.EQUALS or row.source is None or not (type(row.payload) in (int, float) or hasattr(row.payload, "dtype")):
            continue
        with contextlib.suppress(reading.Absent, reading.Unreadable):
            value = reading.read(row.source, frame)
            if type(value) is type(row.payload) and repr(value) != repr(row.payload):
                found.add(row.source)
    return found


def changed_decisions(guards: GuardSet, state: Any) -> set[Source]:
    """Sources of small tensors whose numbers decide otherwise now."""
    frame = state if isinstance(state, reading.Frame) else _frame_of(state)
    found = set()
    for row in guards:
        if row.kind is Kind.DECIDES and row.source is not None:
            with contextlib.suppress(reading.Absent, reading.Unreadable):
                if not row.payload.holds(reading.read(row.source, frame)):
                    found.add(row.source)
    return found


def changed_modules(guards: GuardSet, state: Any) -> set[Source]:
    """Sources of modules that were guarded by identity, where another module of the same class is now."""
    import torch

    frame = state if isinstance(state, reading.Frame) else _frame_of(state)
    found = set()
    for row in guards:
        if row.kind is not Kind.ID_IS or row.source is None:
            continue
        known = row.payload.ref() if isinstance(row.payload, Weak) else row.payload
        with contextlib.suppress(reading.Absent, reading.Unreadable):
            value = reading.read(row.source, frame)
            gone = known is None and isinstance(row.payload, Weak)  # a module made for each call: its successor takes its place
            if isinstance(value, torch.nn.Module) and value is not known and (gone or type(value) is type(known)):
                found.add(row.source)
    return found


def _frame_of(state: Any) -> reading.Frame:
    from magneto import _C

    return reading.Frame.of_state(state, _C.UNBOUND)


def _told(row: Row, frame: reading.Frame) -> tuple[str, str]:
    """(what the row expects, what is there)."""
    wanted = expected(row)
    if row.kind is Kind.STATE:
        _, read, args, _ = row.payload
        return wanted, f"it is {show_value(read(*args))}"
    assert row.source is not None
    try:
        value = reading.read(row.source, frame)
    except reading.Absent:
        return wanted, "there is no such value"
    except reading.Unreadable:
        return wanted, "it cannot be read"
    if row.kind is Kind.TENSOR and isinstance(found := tensor_row(value), TensorRow):
        different = tensors_differ(row.payload, found)
        if different:
            name = expression(row.source)
            return f"{name} has {' and '.join(want for want, _ in different)}", f"it has {' and '.join(got for _, got in different)}"
    return wanted, _describe(row, value)


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
    if kind in (Kind.MEMBER, Kind.NOT_MEMBER):
        return f"it is {'not ' if kind is Kind.MEMBER else ''}there"
    if kind is Kind.KEY_ABSENT:
        return "it is there"
    if kind is Kind.TYPE_VERSION:
        return "the class was modified"
    if kind is Kind.SIZES and isinstance(value, torch.Tensor):
        return f"{expression(row.source)} has the sizes {tuple(value.shape)}" if row.source is not None else ""
    if kind is Kind.TENSOR:
        return f"got {describe_tensor(value)}"
    if kind is Kind.DISTINCT:
        return "they share an object or memory"
    of = (
        expression(row.source) if kind in (Kind.RELATION, Kind.TOGETHER) and row.source is not None else "it"
    )  # a relation is between what follows from it
    return f"{of} is {show_value(value)}"


def tensor_row(value: Any) -> TensorRow | None:
    """The row that this tensor would get; None for what has none."""
    with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError, NotImplementedError):  # to look is not to call
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        facts = (type(value), value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad)
        return TensorRow(*facts, value.is_inference(), value.is_conj() + 2 * value.is_neg())
    return None


def describe_tensor(value: Any) -> str:
    """A tensor in the words of a TENSOR row."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__qualname__}"
    row = tensor_row(value)
    with torch._C.DisableTorchFunctionSubclass():
        if row is None:
            return f"{type(value).__name__} {str(value.layout).removeprefix('torch.')}"
        plain = is_plain(value, row.inference, row.lazy)
    return show_tensor(row) + ("" if plain else ", with a sparse layout or a subclass's dispatch")
