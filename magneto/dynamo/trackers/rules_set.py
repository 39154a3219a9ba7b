"""Rows of set and frozenset."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.build import from_value
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker
from magneto.dynamo.trackers.dispatch import prefer, rule
from magneto.dynamo.trackers.iterator import iterate
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker
from magneto.dynamo.trackers.membership import ObjectSet
from magneto.dynamo.trackers.object import payload_of
from magneto.dynamo.trackers.plain import plain_all
from magneto.dynamo.trackers.rules_container import raise_key_error
from magneto.dynamo.trackers.rules_operator import set_algebra

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


@rule(set)
def set_(m: Machine, *args: Tracker) -> Tracker:
    return make_set(m, args, set)


@rule(frozenset)
def frozenset_(m: Machine, *args: Tracker) -> Tracker:
    return make_set(m, args, frozenset)


def make_set(m: Machine, args: tuple[Tracker, ...], kind: type) -> SetTracker:
    """set(iterable): of another set, its table is taken over."""
    if len(args) > 1:
        m.raise_exception(TypeError(f"{kind.__name__} expected at most 1 argument, got {len(args)}"))
    inner = payload_of(args[0]) if args else None
    if isinstance(inner, ConstTracker) and type(inner.value) is frozenset:
        inner = from_value(m, inner.read())
    if isinstance(inner, SetTracker):
        inner.known()
        if kind is frozenset and inner.cls is frozenset and inner is args[0]:
            return inner
        made = SetTracker(dict(inner.entries), kind)
        made.real = kind(inner.real) if inner.real is not None else None
        return made
    return SetTracker.of(m, iterate(m, args[0]) if args else [], kind)


@rule(set.add, SetTracker, Tracker)
def set_add(m: Machine, v: SetTracker, item: Tracker) -> None:
    v.insert(m, item)
    v.effect(m, "add", item)


@rule(set.discard, SetTracker, Tracker)
def set_discard(m: Machine, v: SetTracker, item: Tracker) -> None:
    if v.has(m, item):
        v.drop(m, item)
        v.effect(m, "discard", item)


@rule(set.remove, SetTracker, Tracker)
def set_remove(m: Machine, v: SetTracker, item: Tracker) -> None:
    if not v.has(m, item):
        raise_key_error(m, item)
    set_discard(m, v, item)


@rule(set.pop, SetTracker)
def set_pop(m: Machine, v: SetTracker) -> Tracker:
    items = v.items(m)
    if not items:
        m.raise_exception(KeyError("pop from an empty set"))
    if len(items) > 1:
        m.graph_break("B104", operation="pop()", value=v.show())  # where the search starts is not visible
    set_discard(m, v, items[0])
    return items[0]


@rule(set.clear, SetTracker)
def set_clear(m: Machine, v: SetTracker) -> None:
    v.known()
    v.entries.clear()
    v.real = set()
    v.effect(m, "clear")


_SET_METHODS = {"union": "or", "intersection": "and", "difference": "sub", "symmetric_difference": "xor"}


def _operands(m: Machine, others: tuple[Tracker, ...]) -> list[Tracker]:
    """Containers as they are, iterators as lists."""
    kinds = (SetTracker, SequenceTracker, DictTracker, DictViewTracker, ConstTracker)
    inner = [payload_of(other) for other in others]
    return [v if isinstance(v, kinds) else ListTracker(iterate(m, v)) for v in inner]


def _set_method(name: str, operation: str) -> None:
    """set.union and its like, and the same in place."""

    def combined(m: Machine, v: SetTracker, others: list[Tracker]) -> SetTracker:
        v.known()
        for other in others:
            v = set_algebra(operation, v, _as_set(m, other))
        return v

    @rule((getattr(set, name), getattr(frozenset, name)), SetTracker)
    def fresh(m: Machine, v: SetTracker, *others: Tracker) -> Tracker:
        operands = _operands(m, others)
        made = SetTracker(dict(combined(m, v, operands).entries), v.cls)
        known = plain_all(m, operands, {}) if v.real is not None else None
        made.real = getattr(v.cls, name)(v.real, *known[0]) if known is not None else None
        return made

    method = "update" if name == "union" else f"{name}_update"

    @rule(getattr(set, method), SetTracker)
    def in_place(m: Machine, v: SetTracker, *others: Tracker) -> None:
        operands = _operands(m, others)
        entries = dict(combined(m, v, operands).entries)
        own = v.own()
        known = plain_all(m, operands, {}) if own is not None else None
        if known is not None:
            getattr(set, method)(own, *known[0])
        else:
            v.real = None
        v.entries = entries
        v.effect(m, method, *operands)


for _method, _operation in _SET_METHODS.items():
    _set_method(_method, _operation)


@rule(frozenset.copy, ConstTracker)
def frozen_copy(m: Machine, v: ConstTracker) -> Any:
    return v if type(v.value) is frozenset else NotImplemented


@rule((set.copy, frozenset.copy), SetTracker)
def set_copy(m: Machine, v: SetTracker) -> Tracker:
    v.known()
    if v.cls is frozenset:
        return v
    made = SetTracker(dict(v.entries), v.cls)
    made.real = v.real.copy() if v.real is not None else None
    return made


def _as_set(m: Machine, v: Tracker) -> SetTracker:
    if isinstance(v, SetTracker):
        v.known()
        return v
    return SetTracker.of(m, iterate(m, v))


@rule((set.issubset, frozenset.issubset), Tracker, Tracker)
def issubset(m: Machine, v: Tracker, other: Tracker) -> Any:
    return m.const(_as_set(m, v).entries.keys() <= _as_set(m, other).entries.keys())


@rule((set.issuperset, frozenset.issuperset), Tracker, Tracker)
def issuperset(m: Machine, v: Tracker, other: Tracker) -> Any:
    return m.const(_as_set(m, v).entries.keys() >= _as_set(m, other).entries.keys())


@rule((set.isdisjoint, frozenset.isdisjoint), Tracker, Tracker)
def isdisjoint(m: Machine, v: Tracker, other: Tracker) -> Any:
    return m.const(not _as_set(m, v).entries.keys() & _as_set(m, other).entries.keys())


# -- sets from outside that hold objects


@prefer(operator.contains, ObjectSet, Tracker)
def object_contains(m: Machine, v: ObjectSet, item: Tracker) -> Tracker:
    return m.const(v.has(m, item))


@rule(set.add, ObjectSet, Tracker)
def object_add(m: Machine, v: ObjectSet, item: Tracker) -> None:
    v.change(m, "add", item)


@rule(set.discard, ObjectSet, Tracker)
def object_discard(m: Machine, v: ObjectSet, item: Tracker) -> None:
    v.change(m, "discard", item)


@rule(set.remove, ObjectSet, Tracker)
def object_remove(m: Machine, v: ObjectSet, item: Tracker) -> None:
    if not v.has(m, item):
        raise_key_error(m, item)
    v.change(m, "discard", item)
