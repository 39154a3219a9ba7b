"""Rows of subscripts: reading, setting and deleting items; indices and slices."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.trackers.attributes import find_special, user_method
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, SequenceTracker, SliceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import fold, rule
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.iterator import iterate
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker
from magneto.dynamo.trackers.object import ObjectTracker, payload_of
from magneto.dynamo.trackers.rules_container import raise_key_error
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def index_of(m: Machine, v: Tracker) -> int | None:
    """An integer index, through __index__ (of what is no integer itself); None for what is none."""
    asked = user_method(m, v, "__index__") is not MISSING and not issubclass(v.python_type(), int)
    method = find_special(m, v, "__index__") if asked else None
    if method is not None:
        found = m.call(method, [], {})
        if not issubclass(found.python_type(), int):
            m.raise_exception(TypeError(f"__index__ returned non-int (type {_C.type_name(found.python_type())})"))
        return index_of(m, found)
    const = payload_of(v).try_const()
    if const is not None:
        return operator.index(const.value) if hasattr(type(const.value), "__index__") else None
    if isinstance(v, TensorTracker):
        value = m.known(v)
        if value is None:
            m.graph_break("B102", operation="use as an index")
        try:
            return operator.index(value)
        except TypeError as error:
            m.raise_exception(error)
    if v.unknown and hasattr(v.python_type(), "__index__"):
        if isinstance(v, ItemTracker):
            v.needed(m)
        m.settle(v)
        m.graph_break("B102", operation="use as an index")
    return None


def slice_of(m: Machine, v: SliceTracker | ConstTracker) -> slice:
    """A slice of integers."""
    parts = v.parts() if isinstance(v, SliceTracker) else [m.const(p) for p in (v.value.start, v.value.stop, v.value.step)]
    values = []
    for part in parts:
        const = part.try_const()
        value = None if const is not None and const.value is None else index_of(m, part)
        if value is None and not (const is not None and const.value is None):
            m.raise_exception(TypeError("slice indices must be integers or None or have an __index__ method"))
        values.append(value)
    return slice(*values)


def is_slice(v: Tracker) -> bool:
    return isinstance(v, SliceTracker) or (isinstance(v, ConstTracker) and type(v.value) is slice)


def _part_of(m: Machine, v: SequenceTracker, key: Tracker) -> slice:
    """The slice by which a list, a tuple or (never) a deque is asked."""
    part = slice_of(m, key)  # type: ignore[arg-type]
    v.sized()
    if isinstance(v, DequeTracker):
        m.raise_exception(TypeError("sequence index must be integer, not 'slice'"))
    if part.step == 0:
        m.raise_exception(ValueError("slice step cannot be zero"))
    return part


@rule(operator.getitem, SequenceTracker, Tracker)
def sequence_getitem(m: Machine, v: SequenceTracker, key: Tracker) -> Any:
    if is_slice(key):
        part = _part_of(m, v, key)
        entries = v.entries[part]
        if isinstance(v, ListTracker):
            return ListTracker([v.item(m, i) for i in range(len(v.entries))[part]])
        items = [v.item(m, i) for i in range(len(v.entries))[part]]
        assert len(items) == len(entries)
        return TupleTracker(items, torch.Size if v.cls is torch.Size else tuple)
    index = index_of(m, key)
    kind = "list" if isinstance(v, ListTracker) else "tuple" if isinstance(v, TupleTracker) else "deque"
    if index is None:
        m.raise_exception(TypeError(f"{kind} indices must be integers or slices, not {_C.type_name(key.python_type())}"))
    if not 0 <= index < len(v.entries):
        length = v.length()
        if not -length <= index < length:
            m.raise_exception(IndexError(f"{kind} index out of range"))
    return v.item(m, index)


@rule(operator.getitem, DictTracker, Tracker)
def dict_getitem(m: Machine, v: DictTracker, key: Tracker) -> Any:
    found = v.get(m, key)
    if found is not None:
        return found
    if v.owner is not v:
        missing = find_special(m, v.owner, "__missing__")
        if missing is not None:
            return m.call(missing, [key], {})
    if v.default_factory is not None and not (isinstance(v.default_factory, ConstTracker) and v.default_factory.read() is None):
        value = m.call(v.default_factory, [], {})
        v.put(m, key, value)
        return value
    raise_key_error(m, key)


@rule(operator.getitem, ConstTracker, Tracker)
def const_getitem(m: Machine, v: ConstTracker, key: Tracker) -> Any:
    if isinstance(key, TensorTracker):
        key = m.const(index_of(m, key))
    if isinstance(key, ObjectTracker):
        position = index_of(m, key)
        return NotImplemented if position is None else fold(m, operator.getitem, (v, m.const(position)), {})
    return fold(m, operator.getitem, (v, m.const(slice_of(m, key)) if isinstance(key, SliceTracker) else key), {})


def _real(m: Machine, v: Tracker) -> Any:
    """A constant, an existing object, or a tuple or list of such (as it is now)."""
    const = v.try_const()
    if const is None and isinstance(v, TupleTracker | ListTracker):
        parts = [_real(m, entry) for entry in v.items(m)]
        return MISSING if any(part is MISSING for part in parts) else list(parts) if isinstance(v, ListTracker) else tuple(parts)
    if const is None and isinstance(v, SequenceTracker | DictTracker | SetTracker):
        return MISSING
    return const.value if const is not None else v.obj


@rule(operator.getitem, ClassTracker, Tracker)
def class_getitem(m: Machine, v: ClassTracker | ObjectTracker, key: Tracker) -> Any:
    """Generic aliases and enumerations by name."""
    value = _real(m, key)
    if value is MISSING:
        return NotImplemented
    try:
        return m.const(v.obj[value])
    except (KeyError, TypeError) as error:
        m.raise_exception(error)


@rule(operator.getitem, ObjectTracker, Tracker)
def object_getitem(m: Machine, v: ObjectTracker, key: Tracker) -> Any:
    if v.cls.__module__ == "typing" and v.obj is not MISSING:  # List[int]: an object of no consequence
        return class_getitem(m, v, key)
    if isinstance(find_in_type(m, v.cls, "__getitem__"), types.FunctionType):
        method = find_special(m, v, "__getitem__")
        assert method is not None
        return m.call(method, [key], {})
    if v.payload is not None:
        return m.apply(operator.getitem, v.payload, key)
    m.raise_exception(TypeError(f"'{_C.type_name(v.cls)}' object is not subscriptable"))


@rule(operator.setitem, SequenceTracker, Tracker, Tracker)
def list_setitem(m: Machine, v: SequenceTracker, key: Tracker, value: Tracker) -> None:
    if isinstance(v, TupleTracker):
        m.raise_exception(TypeError(f"'{_C.type_name(v.cls)}' object does not support item assignment"))
    if is_slice(key):
        if not any(hasattr(value.python_type(), name) for name in ("__iter__", "__getitem__")):
            m.raise_exception(_error_of(list.__setitem__, [], slice_of(m, key), None))  # type: ignore[arg-type]
        items = iterate(m, value)
        part = _part_of(m, v, key)
        try:
            v.entries[part] = items
        except ValueError as error:
            m.raise_exception(error)
        v.log(m, "__setitem__", m.const(part), ListTracker(items))
        return
    index = _checked_index(m, v, key, "assignment index")
    v.entries[index] = value
    v.log(m, "__setitem__", m.const(index), value)


def _error_of(fn: Any, *args: Any) -> Exception:
    """What CPython raises for a call that it refuses."""
    try:
        fn(*args)
    except Exception as error:
        return error
    raise AssertionError(fn)


def _checked_index(m: Machine, v: SequenceTracker, key: Tracker, what: str) -> int:
    kind = "list" if isinstance(v, ListTracker) else "deque"
    index = index_of(m, key)
    if index is None:
        m.raise_exception(TypeError(f"{kind} indices must be integers or slices, not {_C.type_name(key.python_type())}"))
    length = v.length()
    if not -length <= index < length:
        m.raise_exception(IndexError(f"{kind} {what} out of range"))
    return index


@rule(operator.setitem, DictTracker, Tracker, Tracker)
def dict_setitem(m: Machine, v: DictTracker, key: Tracker, value: Tracker) -> None:
    v.put(m, key, value)


@rule(operator.setitem, ObjectTracker, Tracker, Tracker)
def object_setitem(m: Machine, v: ObjectTracker, key: Tracker, value: Tracker) -> Any:
    return _item_method(m, v, "__setitem__", operator.setitem, key, value)


@rule(operator.delitem, SequenceTracker, Tracker)
def list_delitem(m: Machine, v: SequenceTracker, key: Tracker) -> None:
    if isinstance(v, TupleTracker):
        m.raise_exception(TypeError(f"'{_C.type_name(v.cls)}' object doesn't support item deletion"))
    v.sized()
    if is_slice(key):
        part = _part_of(m, v, key)
        del v.entries[part]
        v.log(m, "__delitem__", m.const(part))
    else:
        index = _checked_index(m, v, key, "assignment index")
        del v.entries[index]
        v.log(m, "__delitem__", m.const(index))


@rule(operator.delitem, DictTracker, Tracker)
def dict_delitem(m: Machine, v: DictTracker, key: Tracker) -> None:
    if not v.has(m, key):
        raise_key_error(m, key)
    v.remove(m, key)


@rule(operator.delitem, ObjectTracker, Tracker)
def object_delitem(m: Machine, v: ObjectTracker, key: Tracker) -> Any:
    return _item_method(m, v, "__delitem__", operator.delitem, key)


def _item_method(m: Machine, v: ObjectTracker, name: str, fn: Callable[..., Any], *args: Tracker) -> Any:
    if isinstance(find_in_type(m, v.cls, name), types.FunctionType):
        method = find_special(m, v, name)
        assert method is not None
        m.call(method, args, {})
        return None
    if v.payload is not None:
        return m.apply(fn, v.payload, *args)
    text = "does not support item assignment" if name == "__setitem__" else "doesn't support item deletion"
    m.raise_exception(TypeError(f"'{_C.type_name(v.cls)}' object {text}"))


@rule(operator.index, Tracker)
def index(m: Machine, v: Tracker) -> Any:
    value = index_of(m, v)
    if value is None:
        m.raise_exception(TypeError(f"'{_C.type_name(v.python_type())}' object cannot be interpreted as an integer"))
    return m.const(value)
