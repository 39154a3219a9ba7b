"""Reading values for guards without running user code: the meaning of sources, in Python. csrc/guard_values.c is the native twin.

Attributes come from C descriptors and instance dictionaries, items from the storage of builtin containers (also inside their subclasses).
"""

from __future__ import annotations

import builtins
import collections
import math
import struct
import types
from collections.abc import Callable, Sequence
from typing import Any

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.dynamo.guards.source import Attr, Cell, Global, Held, InstanceDict, Item, KeyAt, Local, Part, Peek, Source, Stack

_HEAPTYPE = 1 << 9
_NOTHING: Any = object()
_SIZED: tuple[Any, ...] = (dict, list, tuple, set, frozenset)


class Absent(Exception):
    """The place exists but holds nothing: unbound slot, missing key, unset attribute."""


class Unreadable(Exception):
    """There is no such place, or user code would have to run to read it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a guard looks at: slots (with `unbound` for empty ones), value stack, globals."""

    locals: tuple[Any, ...]
    stack: tuple[Any, ...] = ()
    globals: dict[str, Any] | None = None
    unbound: Any = _NOTHING

    @classmethod
    def of_state(cls, state: Any, unbound: Any) -> Frame:
        """From the FrameState that the hook hands to the compiler."""
        return cls(tuple(state.locals), tuple(state.stack), state.globals, unbound)


def slot(frame: Frame, index: int) -> Any:
    return _entry(frame.locals, index, frame.unbound)


def stack(frame: Frame, index: int) -> Any:
    return _entry(frame.stack, index, frame.unbound)


def _entry(entries: tuple[Any, ...], index: int, unbound: Any) -> Any:
    if index >= len(entries):
        raise Unreadable
    if entries[index] is unbound:
        raise Absent
    return entries[index]


def global_name(frame: Frame, name: str) -> Any:
    if type(frame.globals) is not dict:
        raise Unreadable
    return item(frame.globals, name)


def cell(obj: Any) -> Any:
    if type(obj) is not types.CellType:
        raise Unreadable
    try:
        return obj.cell_contents
    except ValueError:
        raise Absent from None


def instance_dict(obj: Any) -> Any:
    """The instance dictionary itself (for a class: a view of it)."""
    for cls in type(obj).__mro__:
        getter: Any = vars(cls).get("__dict__")
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            try:
                found = getter.__get__(obj)
            except (AttributeError, TypeError):
                break
            if type(found) in (dict, types.MappingProxyType):
                return found
            break
    raise Absent


def _find_in_mro(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return _NOTHING


def _is_tensor_class(cls: type) -> bool:
    """A getter of this class may run __torch_function__."""
    return any(base.__module__.startswith("torch") and base.__name__ in ("TensorBase", "_TensorBase") for base in cls.__mro__)


def _plain_getter(owner: type, obj: Any) -> bool:
    if not _is_tensor_class(owner):
        return True
    import torch

    from magneto.dynamo.guards.tensors import plain_types

    return type(obj) in plain_types() and torch._C._len_torch_function_stack() == 0


def attr(obj: Any, name: str) -> Any:
    descr = _find_in_mro(type(obj), name)
    if type(descr) in (types.MemberDescriptorType, types.GetSetDescriptorType):
        owner = descr.__objclass__
        if type(descr) is types.GetSetDescriptorType and (
            owner.__flags__ & _HEAPTYPE and owner is not collections.deque or not _plain_getter(owner, obj)
        ):
            raise Unreadable
        try:
            return descr.__get__(obj)
        except AttributeError:
            raise Absent from None
        except Exception:
            raise Unreadable from None
    if descr is not _NOTHING and (_has(descr, "__set__") or _has(descr, "__delete__")):
        raise Unreadable
    if isinstance(obj, type):
        found = _find_in_mro(obj, name)
        if found is not _NOTHING:
            if _has(found, "__get__") and type(found) is not types.FunctionType:
                raise Unreadable
            return found
    else:
        try:
            return item(instance_dict(obj), name)
        except Absent:
            pass
    if descr is _NOTHING:
        raise Absent
    if _has(descr, "__get__"):
        raise Unreadable
    return descr


def _has(obj: Any, name: str) -> bool:
    return _find_in_mro(type(obj), name) is not _NOTHING


def item(obj: Any, key: Any) -> Any:
    if isinstance(obj, (dict, types.MappingProxyType)):
        get: Any = dict.get if isinstance(obj, dict) else types.MappingProxyType.get
        try:
            found = get(obj, key, _NOTHING)
        except TypeError:  # unhashable
            raise Absent from None
        if found is _NOTHING:
            raise Absent
        return found
    for cls in (tuple, list):
        if isinstance(obj, cls):
            return _at(cls, obj, key)
    if type(obj) is collections.deque:
        return _at(collections.deque, obj, key)
    raise Absent


def _at(cls: Any, obj: Any, key: Any) -> Any:
    if type(key) is not int:
        raise Absent
    try:
        return cls.__getitem__(obj, key)
    except IndexError:
        raise Absent from None


def keys(obj: Any) -> list[Any]:
    """Keys in order (an OrderedDict keeps an order of its own)."""
    if isinstance(obj, collections.OrderedDict):
        return list(collections.OrderedDict.__iter__(obj))
    if isinstance(obj, dict):
        return list(dict.__iter__(obj))
    if isinstance(obj, types.MappingProxyType):
        return list(obj)
    raise Unreadable


def listed(obj: Any) -> list[Any]:
    """`keys`, and the elements of a set in their order of iteration."""
    elements: Any
    for elements in (set, frozenset):
        if isinstance(obj, elements):
            return list(elements.__iter__(obj))
    return keys(obj)


def is_element(elements: Any, obj: Any) -> bool:
    """Whether a set holds this very object."""
    if not isinstance(elements, (set, frozenset)):
        raise Unreadable
    return any(element is obj for element in listed(elements))


def key_at(obj: Any, index: int) -> Any:
    try:
        return keys(obj)[index]
    except (Unreadable, IndexError):
        raise Absent from None


def part(obj: Any, index: int) -> Any:
    return _of_iterator(_C.iterator_part, obj, index)


def peek(obj: Any, ahead: int, part: int = 0) -> Any:
    """What an iterator is about to give (tests/guards compare it with stepping a copy)."""
    return _of_iterator(_C.iterator_peek, obj, ahead, part)


def _of_iterator(read: Callable[..., Any], *args: Any) -> Any:
    try:
        return read(*args)
    except LookupError:
        raise Absent from None
    except TypeError:
        raise Unreadable from None


def length(obj: Any) -> int:
    for cls in _SIZED:
        if isinstance(obj, cls):
            return int(cls.__len__(obj))
    if type(obj) in (collections.deque, types.MappingProxyType):
        return len(obj)
    raise Unreadable


def same_constant(a: Any, b: Any) -> bool:
    """Same type and equal: floats by bit pattern, containers element by element, instances of Python classes by identity."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if kind is complex:
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    if isinstance(a, tuple) or kind is list:
        return len(a) == len(b) and all(map(same_constant, a, b))
    if kind in (set, frozenset):
        return len(a) == len(b) and all(any(same_constant(x, y) for y in b) for x in a)
    if kind is slice:
        return same_constant((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if kind.__flags__ & _HEAPTYPE or isinstance(a, (type, dict)):
        return False
    return bool(a == b)


def memory_range(tensor: Any) -> tuple[Any, int, int]:
    """(device, first byte, byte after the last); an empty tensor occupies nothing."""
    low, high = 0, 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return tensor.device, 0, 0
        if (size - 1) * stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    start = tensor.data_ptr()
    if start == 0:
        raise Unreadable
    return tensor.device, start + low * tensor.element_size(), start + high * tensor.element_size()


def class_snapshot(cls: type) -> list[tuple[type, dict[str, Any] | None]]:
    """Contents of a class and of its bases (classes of C cannot be modified)."""
    return [(base, dict(vars(base)) if base.__flags__ & _HEAPTYPE else None) for base in cls.__mro__]


def class_unchanged(cls: type, snapshot: list[tuple[type, dict[str, Any] | None]]) -> bool:
    if len(cls.__mro__) != len(snapshot):
        return False
    for base, (was, contents) in zip(cls.__mro__, snapshot, strict=True):
        now = vars(base)
        if base is not was:
            return False
        if contents is not None and not (
            len(now) == len(contents) and all(now.get(key, _NOTHING) is value for key, value in contents.items())
        ):
            return False
    return True


def in_range(value: Any, low: int | None, high: int | None) -> bool:
    return type(value) is int and (-math.inf if low is None else low) <= value <= (math.inf if high is None else high)


_READERS: dict[type, Callable[[Any, Frame], Any]] = {
    Local: lambda source, frame: slot(frame, source.slot),
    Stack: lambda source, frame: stack(frame, source.index),
    Global: lambda source, frame: global_name(frame, source.name),
    Held: lambda source, frame: source.obj,
    Cell: lambda source, frame: cell(read_base(source, frame)),
    InstanceDict: lambda source, frame: instance_dict(read_base(source, frame)),
    Attr: lambda source, frame: attr(read_base(source, frame), source.name),
    Item: lambda source, frame: item(read_base(source, frame), source.key),
    KeyAt: lambda source, frame: key_at(read_base(source, frame), source.index),
    Part: lambda source, frame: part(read_base(source, frame), source.index),
    Peek: lambda source, frame: peek(read_base(source, frame), source.ahead, source.part),
}


def read(source: Source, frame: Frame) -> Any:
    """The value at a source; raises Absent or Unreadable."""
    return _READERS[type(source)](source, frame)


def read_base(source: Source, frame: Frame) -> Any:
    """The value that `source` is read from: where that is absent, `source` cannot be read at all."""
    base = source.base()
    assert base is not None
    try:
        return read(base, frame)
    except Absent:
        raise Unreadable from None


_NUMBER_NAMES = {
    "math": math,
    **{name: getattr(builtins, name) for name in "abs float int round min max str bytes".split()},
    "__builtins__": {},
}


def relation(condition: str, others: Sequence[Source] = ()) -> Callable[..., bool]:
    """The condition of a RELATION or TOGETHER row as a predicate; values for which it raises do not fulfil it."""
    names = [f"number{i}" for i in range(1 + len(others))]
    filled = condition.format(*(names if others else names * condition.count("{}")))
    holds = eval(f"lambda {', '.join(names)}: {filled}", dict(_NUMBER_NAMES))

    def check(*values: Any) -> bool:
        try:
            return all(map(_is_number, values)) and bool(holds(*values))
        except (ArithmeticError, TypeError, ValueError):
            return False

    return check


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, (str, bytes)) or type(value).__module__ == "numpy"
