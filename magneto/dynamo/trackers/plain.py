"""Real objects equal to tracked values, made for a computation that only looks at them: folding, and the text of a value."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.base import Const, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import DequeTracker, SequenceTracker
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker
from magneto.dynamo.trackers.object import ObjectTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Machine


class _Unknown(Exception):
    """A part that is no constant."""


def plain(m: Machine, v: Tracker) -> Const | None:
    """A fresh object equal to the value, built-in containers included; None where a part is unknown, or the value contains itself."""
    try:
        return Const(_plain(m, v, ()))
    except _Unknown:
        return None


def _plain(m: Machine, v: Tracker, outer: tuple[int, ...]) -> Any:
    if id(v) in outer:
        raise _Unknown
    inner = (*outer, id(v))
    if isinstance(v, SequenceTracker):
        items = [_plain(m, item, inner) for item in v.items(m)]
        if isinstance(v, DequeTracker):
            return collections.deque(items, v.maxlen)
        if v.cls is torch.Size:
            return torch.Size(items)
        if v.cls is not list and v.cls.__new__ is not tuple.__new__ and not hasattr(v.cls, "_fields"):  # type: ignore[comparison-overlap]
            raise _Unknown  # a structure laid out by C
        return items if v.cls is list else tuple.__new__(v.cls, items)
    if isinstance(v, SetTracker):
        v.known()
        return v.real if v.real is not None else v.cls(_plain(m, item, inner) for item in v.entries.values())
    if isinstance(v, DictTracker) and v.owner is v:
        pairs = [(_plain(m, key, inner), _plain(m, value, inner)) for key, value in v.pairs(m)]
        if v.cls is collections.defaultdict:
            factory = v.default_factory.obj if v.default_factory is not None else None
            return collections.defaultdict(factory if callable(factory) else None, pairs)
        return v.cls(pairs)
    if isinstance(v, DictViewTracker):
        return getattr(_plain(m, v.of, inner), v.kind)()
    if isinstance(v, ObjectTracker) and isinstance(v.payload, ConstTracker):
        v = v.payload
    const = v.try_const()
    if const is None:
        raise _Unknown
    return const.value


def plain_all(m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a call as real objects; None where one is unknown."""
    consts = [plain(m, arg) for arg in args]
    named = {name: plain(m, arg) for name, arg in kwargs.items()}
    if any(const is None for const in (*consts, *named.values())):
        return None
    return [c.value for c in consts if c is not None], {name: c.value for name, c in named.items() if c is not None}
