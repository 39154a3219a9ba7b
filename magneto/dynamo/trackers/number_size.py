"""Whole numbers that change from call to call as sizes: `x[:n]`, `torch.arange(n)`. The graph is given a tensor of so many elements, all at one place, and its size varies like any other (machine/varying.py)."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SliceTracker, TupleTracker
from magneto.dynamo.trackers.lazy_number import ComputedNumber, changing, guard_types, is_unread
from magneto.dynamo.trackers.size import size_at
from magneto.dynamo.trackers.tensor import MadeInput

if TYPE_CHECKING:
    from magneto.dynamo.guards.source import Source
    from magneto.dynamo.machine.protocol import Emitter, Machine

_MOST = 1 << 24
_TEMPLATES: dict[str, Any] = {
    **{
        f"({{}} {symbol} {{}})": fn
        for symbol, fn in (("+", operator.add), ("-", operator.sub), ("*", operator.mul), ("//", operator.floordiv))
    },
    "(-{})": operator.neg,
    "({} % {})": operator.mod,
    "min({}, {})": min,
    "max({}, {})": max,
}


def elements(number: int) -> torch.Tensor:
    """So many, all at one place."""
    return torch.empty(1, device="cpu").expand(number)


class SizedNumber(MadeInput):
    """That tensor, of a number."""

    __slots__ = ()

    def __init__(self, number: ConstTracker) -> None:
        super().__init__(elements(number.value), "")
        self.source = number.source

    def given(self) -> Source | None:
        return None

    def graph_input(self, em: Emitter) -> str:
        assert self.source is not None
        return f"{em.const(elements, 'elements')}({em.source(self.source)})"


def size_of(m: Machine, v: Tracker) -> Tracker:
    """A number that changes as a size; anything else as it is."""
    if isinstance(v, SliceTracker):
        return SliceTracker(size_of(m, v.start), size_of(m, v.stop), v.step)
    if isinstance(v, (TupleTracker, ListTracker)) and v.cls in (tuple, list):
        items = [size_of(m, item) for item in v.items(m)]
        return TupleTracker(items) if isinstance(v, TupleTracker) else ListTracker(items)
    if not isinstance(v, ConstTracker) or type(v.value) is not int or not m.selects() or not changing(m, v):
        return v
    return _size(m, v) or v


def _size(m: Machine, v: ConstTracker) -> Tracker | None:
    if not is_unread(v):
        return m.const(v.value)
    if isinstance(v, ComputedNumber):
        fn, parts = _TEMPLATES.get(v.template), [_size(m, operand) for operand in v.operands]
        return None if fn is None or None in parts else m.number(fn, *parts)  # type: ignore[arg-type]
    made = m.recorder.sized_number(v) if type(v.value) is int and 2 <= v.value < _MOST else None  # type: ignore[attr-defined]
    if made is None:
        return None
    guard_types(m, v)
    return size_at(m, made, 0)
