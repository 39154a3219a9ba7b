"""Rows of the methods that only collections.deque has."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import DequeTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.iterator import iterate
from magneto.dynamo.trackers.mapping import equal_keys
from magneto.dynamo.trackers.rules_identity import same
from magneto.dynamo.trackers.rules_subscript import index_of

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

deque = collections.deque


@rule(deque.extendleft, DequeTracker, Tracker)
def extendleft(m: Machine, v: DequeTracker, items: Tracker) -> None:
    for item in iterate(m, items):
        m.apply(deque.appendleft, v, item)


@rule(deque.rotate, DequeTracker)
def rotate(m: Machine, v: DequeTracker, steps: Tracker | None = None) -> None:
    count = 1 if steps is None else index_of(m, steps)
    if count is None:
        return NotImplemented  # type: ignore[return-value]
    length = v.length()
    if length:
        cut = -count % length
        v.entries[:] = v.entries[cut:] + v.entries[:cut]
    v.log(m, "rotate", m.const(count))


@rule(deque.insert, DequeTracker, Tracker, Tracker)
def insert(m: Machine, v: DequeTracker, index: Tracker, item: Tracker) -> None:
    position = index_of(m, index)
    if position is None:
        return NotImplemented  # type: ignore[return-value]
    if v.maxlen is not None and v.length() >= v.maxlen:
        m.raise_exception(IndexError("deque already at its maximum size"))
    v.sized()
    v.entries.insert(position, item)
    v.log(m, "insert", m.const(position), item)


def _position(m: Machine, v: DequeTracker, item: Tracker, start: int = 0, stop: int | None = None) -> int | None:
    for position in range(*slice(start, stop).indices(v.length())):
        candidate = v.item(m, position)
        if same(m, candidate, item) or equal_keys(m, candidate, item):
            return position
    return None


@rule(deque.remove, DequeTracker, Tracker)
def remove(m: Machine, v: DequeTracker, item: Tracker) -> Any:
    position = _position(m, v, item)
    if position is None:
        const = item.try_const()
        if const is None:
            return NotImplemented
        try:
            deque().remove(const.value)  # (the text differs between versions of Python)
        except ValueError as error:
            m.raise_exception(error)
    assert position is not None
    del v.entries[position]
    v.log(m, "__delitem__", m.const(position))


@rule(deque.index, DequeTracker, Tracker)
def index_(m: Machine, v: DequeTracker, item: Tracker, *bounds: Tracker) -> Any:
    limits = [index_of(m, bound) for bound in bounds]
    position = _position(m, v, item, *(limit for limit in limits if limit is not None))
    if position is not None:
        return m.const(position)
    const = item.try_const()
    if const is None:
        return NotImplemented
    m.raise_exception(ValueError(f"{const.value!r} is not in deque"))


@rule((deque.copy, deque.__copy__), DequeTracker)  # type: ignore[attr-defined]
def copy(m: Machine, v: DequeTracker) -> Tracker:
    return DequeTracker(v.items(m), v.maxlen)


@rule(deque.__reversed__, DequeTracker)
def reverse_iterator(m: Machine, v: DequeTracker) -> Tracker:
    return m.apply(reversed, v)
