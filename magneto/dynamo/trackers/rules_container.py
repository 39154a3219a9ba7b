"""Rows of the methods and constructors of list, tuple, deque, dict, set and their kin."""

from __future__ import annotations

import collections
import enum
import functools
import operator
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from magneto import _C
from magneto.dynamo.trackers.attributes import find_special, user_method
from magneto.dynamo.trackers.base import MISSING, Tracker, namespace_of
from magneto.dynamo.trackers.basic_iterator import (
    DequeIterator,
    DictIterator,
    ItemsIterator,
    IteratorTracker,
    RangeIterator,
    SequenceIterator,
    SetIterator,
)
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, SequenceTracker, SliceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import fold, rule
from magneto.dynamo.trackers.exception import ExceptionTracker
from magneto.dynamo.trackers.iterator import CallableIterator, GetItemIterator, iterate, known_items
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker, equal_keys
from magneto.dynamo.trackers.object import ObjectTracker, payload_of
from magneto.dynamo.trackers.rules_identity import same
from magneto.dynamo.trackers.rules_length import expected
from magneto.dynamo.trackers.size import size_at
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

ODict = collections.OrderedDict


def _is_none(v: Tracker | None) -> bool:
    return v is None or (isinstance(v, ConstTracker) and v.read() is None)


def position_of(m: Machine, index: Tracker) -> int:
    const = m.apply(operator.index, index).try_const()
    if const is None:
        m.graph_break("B102", operation="use as an index")
    return const.value  # type: ignore[no-any-return]


def raise_key_error(m: Machine, key: Tracker) -> NoReturn:
    """KeyError with the key itself."""
    const = key.try_const()
    m.raise_exception(KeyError(const.value) if const is not None else ExceptionTracker(KeyError, [key]))


# -- constructors


@rule(list)
def list_(m: Machine, items: Tracker | None = None, /) -> Tracker:
    return ListTracker(expected(m, items) if items is not None else [])


@rule(tuple)
def tuple_(m: Machine, items: Tracker | None = None, /) -> Tracker:
    if isinstance(items, TupleTracker) and items.cls is tuple:
        return items
    return TupleTracker(expected(m, items) if items is not None else [])


@rule(torch.Size)
def size(m: Machine, *args: Tracker) -> Tracker:
    given = iterate(m, args[0]) if args else []
    for place, item in enumerate(given):
        if not hasattr(item.python_type(), "__index__"):
            kind = _C.type_name(item.python_type())
            m.raise_exception(TypeError(f"torch.Size() takes an iterable of 'int' (item {place} is '{kind}')"))
    items = [m.apply(operator.index, item) for item in given]
    return TupleTracker(items, torch.Size)


def _fill(m: Machine, target: DictTracker, args: tuple[Tracker, ...], kwargs: dict[str, Tracker]) -> None:
    """dict.update's reading of its arguments."""
    for key, value in pairs_of(m, args, kwargs):
        target.put(m, key, value)


def pairs_of(m: Machine, args: tuple[Tracker, ...], kwargs: dict[str, Tracker]) -> list[tuple[Tracker, Tracker]]:
    """(key, value) pairs of a mapping or iterable of pairs, then of keywords."""
    pairs: list[tuple[Tracker, Tracker]] = []
    if len(args) > 1:
        m.graph_break("B101", callee="dict.update", reason="it takes one positional argument")
    if args:
        source = args[0]
        inner = payload_of(source)
        if isinstance(inner, DictTracker) and (
            inner is source or getattr(source.python_type(), "__iter__", None) in (dict.__iter__, ODict.__iter__)
        ):
            pairs = inner.pairs(m)
        elif hasattr(source.python_type(), "keys"):
            keys = m.iterate(m.call(m.apply(getattr, source, m.const("keys")), [], {}))
            pairs = [(key, m.apply(operator.getitem, source, key)) for key in keys]
        else:
            for item in iterate(m, source):
                pair = iterate(m, item) if any(hasattr(item.python_type(), name) for name in ("__iter__", "__getitem__")) else []
                if len(pair) != 2:
                    m.graph_break("B101", callee="dict.update", reason="an item that is no pair")
                pairs.append((pair[0], pair[1]))
    return pairs + [(ConstTracker(name), value) for name, value in kwargs.items()]


@rule(dict)
def dict_(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
    made = DictTracker()
    _fill(m, made, args, kwargs)
    return made


@rule(ODict)
def odict(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
    made = DictTracker(None, ODict)
    _fill(m, made, args, kwargs)
    return made


@rule(collections.defaultdict)
def defaultdict_(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
    made = DictTracker(None, collections.defaultdict)
    made.default_factory = args[0] if args else m.const(None)
    if not _is_none(made.default_factory) and not m.truth(m.apply(callable, made.default_factory)):
        m.raise_exception(TypeError("first argument must be callable or None"))
    _fill(m, made, args[1:], kwargs)
    return made


@rule(collections.deque)
def deque_(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    limit = kwargs.get("maxlen") or (args[1] if len(args) > 1 else m.const(None))
    const = limit.try_const()
    if (
        const is None
        or len(args) > 2
        or kwargs.keys() - {"maxlen"}
        or not (const.value is None or (type(const.value) is int and const.value >= 0))
    ):
        return NotImplemented
    items = iterate(m, args[0]) if args else []
    kept = items if const.value is None else items[max(0, len(items) - const.value) :]
    return DequeTracker(kept, const.value)


@rule(slice)
def slice_(m: Machine, *args: Tracker) -> Any:
    none = m.const(None)
    if not 1 <= len(args) <= 3:
        return NotImplemented
    if len(args) == 1:
        return SliceTracker(none, args[0], none)
    return SliceTracker(args[0], args[1], args[2] if len(args) > 2 else none)


def _fromkeys(cls: Any) -> None:
    @rule(cls.fromkeys, Tracker)
    def body(m: Machine, keys: Tracker, value: Tracker | None = None) -> Tracker:
        filler = value if value is not None else m.const(None)
        made = DictTracker.of(m, [(key, filler) for key in iterate(m, keys)], cls)
        made.default_factory = m.const(None) if cls is collections.defaultdict else None
        return made


for _mapping in (dict, ODict, collections.defaultdict):
    _fromkeys(_mapping)


# -- sequences


@rule((list.append, collections.deque.append), SequenceTracker, Tracker)
def append(m: Machine, v: SequenceTracker, item: Tracker) -> None:
    if not isinstance(v, ListTracker):  # a list grows without being looked at
        v.sized()
    v.entries.append(item)
    if isinstance(v, DequeTracker) and v.maxlen is not None and len(v.entries) > v.maxlen:
        del v.entries[0]
    v.log(m, "append", item)


@rule((list.extend, collections.deque.extend), SequenceTracker, Tracker)
def extend(m: Machine, v: SequenceTracker, items: Tracker) -> None:
    found = expected(m, items) if isinstance(v, ListTracker) else iterate(m, items)
    if not isinstance(v, ListTracker):
        v.sized()
    v.entries.extend(found)
    if isinstance(v, DequeTracker) and v.maxlen is not None:
        del v.entries[: max(0, len(v.entries) - v.maxlen)]
    if found:
        v.log(m, "extend", ListTracker(found))


@rule(collections.deque.appendleft, DequeTracker, Tracker)
def appendleft(m: Machine, v: DequeTracker, item: Tracker) -> None:
    v.sized()
    v.entries.insert(0, item)
    if v.maxlen is not None and len(v.entries) > v.maxlen:
        v.entries.pop()
    v.log(m, "appendleft", item)


@rule((list.pop, collections.deque.pop), SequenceTracker)
def pop(m: Machine, v: SequenceTracker, index: Tracker | None = None) -> Any:
    position = -1 if index is None else position_of(m, index)
    length = v.length()
    if not length:
        m.raise_exception(IndexError("pop from empty list" if isinstance(v, ListTracker) else "pop from an empty deque"))
    if not -length <= position < length:
        m.raise_exception(IndexError("pop index out of range"))
    item = v.item(m, position)
    del v.entries[position]
    v.log(m, "pop", *([m.const(position)] if isinstance(v, ListTracker) else []))
    return item


@rule(collections.deque.popleft, DequeTracker)
def popleft(m: Machine, v: DequeTracker) -> Any:
    if not v.length():
        m.raise_exception(IndexError("pop from an empty deque"))
    item = v.item(m, 0)
    del v.entries[0]
    v.log(m, "popleft")
    return item


@rule(list.insert, ListTracker, Tracker, Tracker)
def insert(m: Machine, v: ListTracker, index: Tracker, item: Tracker) -> None:
    position = position_of(m, index)
    v.sized()
    v.entries.insert(position, item)
    v.log(m, "insert", m.const(position), item)


@rule((list.clear, collections.deque.clear), SequenceTracker)
def list_clear(m: Machine, v: SequenceTracker) -> None:
    if v.length():
        v.entries.clear()
        v.log(m, "clear")


@rule(list.copy, ListTracker)
def list_copy(m: Machine, v: ListTracker) -> Tracker:
    return ListTracker(v.items(m))


@rule((list.reverse, collections.deque.reverse), SequenceTracker)
def list_reverse(m: Machine, v: SequenceTracker) -> None:
    v.sized()
    v.entries.reverse()
    v.log(m, "reverse")


@rule(list.sort, ListTracker)
def list_sort(m: Machine, v: ListTracker, /, **kwargs: Tracker) -> None:
    items = v.items(m)
    v.entries = []  # what key functions and comparisons see of it
    try:
        ordered = sort_items(m, items, kwargs)
        changed = bool(v.entries)
    finally:
        v.entries = list(items)
    if changed and v.source is not None:
        m.restart_before("list.sort", "the list is changed while it is sorted")
    v.entries = list(ordered)
    v.log(m, "__setitem__", m.const(slice(None)), ListTracker(v.entries))
    if changed:
        m.raise_exception(ValueError("list modified during sort"))


def sort_items(m: Machine, items: list[Tracker], kwargs: dict[str, Tracker]) -> list[Tracker]:
    """sorted(): of constants at once, of other values by their `<`."""
    if not kwargs.keys() <= {"key", "reverse"}:
        try:
            list.sort([], **dict.fromkeys(kwargs, False))  # type: ignore[call-overload]
        except TypeError as error:
            m.raise_exception(error)
    key, reverse = kwargs.get("key"), kwargs.get("reverse")
    keys = items if _is_none(key) else [m.call(key, [item], {}) for item in items]  # type: ignore[arg-type]
    consts = [item.try_const() for item in keys]
    if any(const is None for const in consts):
        before = functools.cmp_to_key(lambda a, b: -1 if m.truth(m.apply(operator.lt, keys[a], keys[b])) else 0)  # type: ignore[call-overload]
        return [items[i] for i in sorted(range(len(items)), key=before, reverse=reverse is not None and m.truth(reverse))]
    try:
        order = sorted(range(len(items)), key=lambda i: consts[i].value, reverse=reverse is not None and m.truth(reverse))  # type: ignore[union-attr]
    except TypeError as error:
        m.raise_exception(error)
    return [items[i] for i in order]


@rule((list.index, tuple.index), SequenceTracker, Tracker)
def sequence_index(m: Machine, v: SequenceTracker, item: Tracker, *bounds: Tracker) -> Any:
    start, stop = 0, v.length()
    if bounds:
        limits = [bound.try_const() for bound in bounds]
        start, stop, _ = slice(*(limit.value for limit in limits if limit is not None), *([None] * (2 - len(limits)))).indices(stop)
    for position in range(start, stop):
        candidate = v.item(m, position)
        if same(m, candidate, item) or equal_keys(m, candidate, item):
            return m.const(position)
    shown = item.try_const()
    text = "tuple.index(x): x not in tuple" if isinstance(v, TupleTracker) else f"{shown.value if shown else item.show()!r} is not in list"
    if shown is not None and isinstance(v, ListTracker):
        text = f"{shown.value!r} is not in list"
    m.raise_exception(ValueError(text))


@rule((list.count, tuple.count, collections.deque.count), SequenceTracker, Tracker)
def count(m: Machine, v: SequenceTracker, item: Tracker) -> Any:
    return m.const(sum(same(m, c, item) or equal_keys(m, c, item) for c in v.items(m)))


@rule(list.remove, ListTracker, Tracker)
def list_remove(m: Machine, v: ListTracker, item: Tracker) -> None:
    for position, candidate in enumerate(v.items(m)):
        if same(m, candidate, item) or equal_keys(m, candidate, item):
            del v.entries[position]
            v.log(m, "__delitem__", m.const(position))
            return
    m.raise_exception(ValueError("list.remove(x): x not in list"))


@rule(torch.Size.numel, TupleTracker)
def size_numel(m: Machine, v: TupleTracker) -> Any:
    return fold(m, torch.Size.numel, (v,), {})


# -- dictionaries


@rule((dict.get, ODict.get), DictTracker, Tracker)
def dict_get(m: Machine, v: DictTracker, key: Tracker, default: Tracker | None = None) -> Any:
    found = v.get(m, key)
    return found if found is not None else default if default is not None else m.const(None)


@rule((dict.keys, ODict.keys), DictTracker)
def dict_keys(m: Machine, v: DictTracker) -> Tracker:
    return DictViewTracker(v, "keys")


@rule((dict.values, ODict.values), DictTracker)
def dict_values(m: Machine, v: DictTracker) -> Tracker:
    return DictViewTracker(v, "values")


@rule((dict.items, ODict.items), DictTracker)
def dict_items(m: Machine, v: DictTracker) -> Tracker:
    return DictViewTracker(v, "items")


@rule((dict.pop, dict.popitem), DictTracker)
def past_the_order(m: Machine, v: DictTracker, *args: Tracker) -> Any:
    """A method of dict on an OrderedDict leaves its order behind, and what it then does is CPython's."""
    if issubclass(v.owner.python_type(), ODict):
        m.graph_break("B107", value=v.show(), reason="its order does not follow")
    return NotImplemented


@rule((dict.pop, ODict.pop), DictTracker, Tracker)
def dict_pop(m: Machine, v: DictTracker, key: Tracker, *default: Tracker, **named: Tracker) -> Any:
    if len(default) + len(named) > 1 or not named.keys() <= ({"default"} if issubclass(v.cls, ODict) else set()):
        return NotImplemented
    found = v.get(m, key)
    if found is not None:
        v.remove(m, key)
        return found
    fallback = default[0] if default else named.get("default")
    if fallback is not None:
        return fallback
    raise_key_error(m, key)


@rule((dict.setdefault, ODict.setdefault), DictTracker, Tracker)
def setdefault(m: Machine, v: DictTracker, key: Tracker, default: Tracker | None = None) -> Any:
    found = v.get(m, key)
    if found is None:
        found = default if default is not None else m.const(None)
        v.put(m, key, found)
    return found


@rule((dict.update, ODict.update), DictTracker)
def dict_update(m: Machine, v: DictTracker, /, *args: Tracker, **kwargs: Tracker) -> None:
    _fill(m, v, args, kwargs)


@rule((dict.update, ODict.update), ObjectTracker)
def object_update(m: Machine, v: ObjectTracker, /, *args: Tracker, **kwargs: Tracker) -> None:
    for key, value in pairs_of(m, args, kwargs):
        m.apply(operator.setitem, v.payload, key, value)  # type: ignore[arg-type]


@rule((dict.clear, ODict.clear), DictTracker)
def dict_clear(m: Machine, v: DictTracker) -> None:
    v.clear(m)


@rule((dict.copy, ODict.copy, collections.defaultdict.copy), DictTracker)
def dict_copy(m: Machine, v: DictTracker) -> Tracker:
    made = DictTracker.of(m, v.pairs(m), v.cls)
    made.default_factory = v.default_factory
    return made


@rule((dict.popitem, ODict.popitem), DictTracker)
def popitem(m: Machine, v: DictTracker, last: Tracker | None = None) -> Any:
    keys = v.keys(m)
    if not keys:
        m.raise_exception(KeyError("dictionary is empty" if issubclass(v.cls, ODict) else "popitem(): dictionary is empty"))
    key = keys[-1 if last is None or m.truth(last) else 0]
    value = v.get(m, key)
    assert value is not None
    v.remove_end(m, key, last is None or m.truth(last))
    return TupleTracker([key, value])


@rule(ODict.move_to_end, DictTracker, Tracker)
def move_to_end(m: Machine, v: DictTracker, key: Tracker, last: Tracker | None = None) -> None:
    if not v.has(m, key):
        raise_key_error(m, key)
    v.reorder(m, key, last is None or m.truth(last))


# -- iteration and length


@rule(iter, Tracker)
def iter_(m: Machine, v: Tracker, *sentinel: Tracker) -> Any:
    if sentinel:
        if len(sentinel) > 1 or not m.truth(m.apply(callable, v)):
            return NotImplemented
        return CallableIterator(v, sentinel[0])
    if isinstance(v, IteratorTracker) or hasattr(v, "next_or_none"):
        return v
    if isinstance(v, DequeTracker):
        return DequeIterator(v)
    if isinstance(v, SequenceTracker):
        return SequenceIterator(v)
    if isinstance(v, ConstTracker) and isinstance(v.read(), (range, str, bytes)):
        return RangeIterator(v.read())
    if isinstance(v, DictTracker) and v.owner is v:
        return DictIterator(m, v, "keys")
    if isinstance(v, DictViewTracker):
        return DictIterator(m, v.of, v.kind)
    if isinstance(v, SetTracker):
        return SetIterator(m, v)
    inner = payload_of(v)
    if isinstance(inner, DictTracker) and inner is not v and user_method(m, v, "__iter__") is MISSING:
        return DictIterator(m, inner, "keys")
    items = known_items(m, v)
    if items is not None:
        return ItemsIterator(items)
    if isinstance(v, (ObjectTracker, ClassTracker)):
        method = find_special(m, v, "__iter__")
        if isinstance(payload_of(v), ConstTracker) and user_method(m, v, "__iter__") is MISSING:
            text = payload_of(v).read()  # type: ignore[attr-defined]
            return RangeIterator(text, v) if isinstance(text, (str, bytes)) else m.apply(iter, payload_of(v))
        if method is not None and not _is_none(method):
            made = m.call(method, [], {})
            if not hasattr(made.python_type(), "__next__"):
                m.raise_exception(TypeError(f"iter() returned non-iterator of type '{_C.type_name(made.python_type())}'"))
            return made
        if method is None and find_special(m, v, "__getitem__") is not None and "__iter__" not in _names(v):
            return GetItemIterator(v)
    if isinstance(v, ConstTracker) and isinstance(v.read(), enum.Flag):
        return ItemsIterator([m.const(member) for member in v.read()])
    cls = v.python_type()
    if not hasattr(cls, "__iter__"):
        m.raise_exception(TypeError(f"'{_C.type_name(cls)}' object is not iterable"))
    m.graph_break("B110", value=v.show())


def _names(v: Tracker) -> set[str]:
    return {name for base in v.python_type().__mro__ for name in namespace_of(base)}


@rule(len, Tracker)
def len_(m: Machine, v: Tracker) -> Any:
    if isinstance(v, (SequenceTracker, DictTracker, SetTracker)):
        return m.const(v.length())
    if isinstance(v, DictViewTracker):
        return m.const(v.of.length())
    if isinstance(v, TensorTracker):
        if not v.meta.ndim:
            m.raise_exception(TypeError("len() of a 0-d tensor"))
        return size_at(m, v, 0)
    if isinstance(v, ConstTracker):
        return fold(m, len, (v,), {})
    if isinstance(v, (ObjectTracker, ClassTracker)):
        method = find_special(m, v, "__len__")
        if method is not None:
            result = m.call(method, [], {})
            const = result.try_const()
            if const is None or type(const.value) is not int or not 0 <= const.value <= sys.maxsize:
                m.graph_break("B104", operation="len()", value=v.show())
            return result
        m.raise_exception(TypeError(f"object of type '{_C.type_name(v.python_type())}' has no len()"))
    if not hasattr(v.python_type(), "__len__"):
        m.raise_exception(TypeError(f"object of type '{_C.type_name(v.python_type())}' has no len()"))
    return NotImplemented
