"""Rows of copy.copy and copy.deepcopy: the library's own code is inlined; here is what it asks of C: object.__reduce_ex__ and its kin, and tensors."""

from __future__ import annotations

import collections
import copy
import types
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.base import Tracker, namespace_of
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker, heap_bases, held
from magneto.dynamo.trackers.mapping import DictTracker, SetTracker
from magneto.dynamo.trackers.object import ObjectTracker, payload_of
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph.layout import preserved_strides

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_COPY: Any = copy.copy
_DEEPCOPY: Any = copy.deepcopy


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """copy.copy of a plain tensor: the same memory, and a version counter of its own, at 1 (the copy is made by `set_`)."""
    data = tensor.data
    if not data.is_inference():
        torch._C._autograd._unsafe_set_version_counter((data,), (1,))
    return data


def deepcopied(tensor: torch.Tensor) -> torch.Tensor:
    """copy.deepcopy of a plain tensor, which copies the whole storage: the copy begins where the tensor does. Its version counter starts at 1 as well."""
    if tensor.storage_offset() and not torch._C._len_torch_dispatch_stack():
        return copy.deepcopy(tensor)
    return copied(tensor.clone())


_SHARED = (ConstTracker, FunctionTracker, BuiltinTracker, ClassTracker)


@rule(copy.copy, Tracker)
def copy_(m: Machine, x: Tracker) -> Any:
    if isinstance(x, _SHARED):
        return x
    if isinstance(x, TensorTracker):
        return _plain_tensor(m, x) and m.node(copied, [x], {})
    return m.call(FunctionTracker.existing(m, _COPY, Held("copy", _COPY)), [x], {})


@rule(copy.deepcopy, Tracker)
def deepcopy(m: Machine, x: Tracker, memo: Tracker | None = None, *args: Tracker) -> Any:
    if isinstance(x, _SHARED):
        return x
    fn = FunctionTracker.existing(m, _DEEPCOPY, Held("deepcopy", _DEEPCOPY))
    return m.call(fn, [x] if memo is None else [x, memo], {})


def _plain_tensor(m: Machine, v: TensorTracker) -> bool:
    """A tensor whose copy is its data: without a class of its own, attributes, gradient."""
    if v.python_type() is not torch.Tensor or v.meta.requires_grad or (isinstance(v.obj, torch.Tensor) and v.obj.__dict__):
        m.graph_break("B104", operation="copy", value=v.show())
    return True


@rule(torch.Tensor.__deepcopy__, TensorTracker, Tracker)
def deepcopy_tensor(m: Machine, v: TensorTracker, memo: Tracker) -> Any:
    """The memo keeps the copies of one tensor together; two tensors that share memory would have to share it again."""
    _plain_tensor(m, v)
    copied: list[TensorTracker] = m.__dict__.setdefault("_copied_tensors", [])
    copied.append(v)
    if len(copied) > 1:
        if any(tensor.source is None and tensor.views is not None for tensor in copied):
            m.graph_break("B104", operation="copy.deepcopy", value=v.show())
        sources = [tensor.source for tensor in copied if tensor.source is not None]
        if len(sources) > 1:
            m.guard(Kind.DISTINCT, sources[0], tuple(sources[1:]))
    if v.source is None and v.meta.storage_offset or preserved_strides(v.meta.shape, v.meta.strides) != v.meta.strides:
        m.graph_break("B104", operation="copy.deepcopy", value=f"{v.show()}, a part of a larger tensor")
    return m.node(deepcopied, [v], {})


def _class_of(m: Machine, v: Tracker) -> Tracker:
    return held(m, v.python_type(), v.python_type().__name__)


def _state(m: Machine, v: Tracker) -> Tracker:
    """The instance dictionary of a subclass, None otherwise."""
    spaces = [
        space for base in heap_bases(v.python_type()) if "__slots__" in (space := namespace_of(base))
    ]  # (defaultdict itself: no slots)
    if any(type(raw) is types.MemberDescriptorType for space in spaces for raw in space.values()):
        m.graph_break("B104", operation="copy", value=f"{v.show()}, whose class has slots")
    attrs = v.attrs(m) if isinstance(v, ObjectTracker) else v.namespace() if isinstance(v, DictTracker) else None
    return attrs if attrs is not None and attrs.length() else m.const(None)


@rule(collections.deque.__reduce__, Tracker)
def reduce_deque(m: Machine, v: Tracker) -> Any:
    inner = payload_of(v)
    assert isinstance(inner, DequeTracker)
    args = TupleTracker([]) if inner.maxlen is None else TupleTracker([TupleTracker([]), m.const(inner.maxlen)])
    return TupleTracker([_class_of(m, v), args, _state(m, v), m.apply(iter, inner)])


@rule((collections.OrderedDict.__reduce__, collections.defaultdict.__reduce__), Tracker)
def reduce_dict(m: Machine, v: Tracker) -> Any:
    inner = payload_of(v)
    assert isinstance(inner, DictTracker)
    args = [] if inner.default_factory is None else [inner.default_factory]
    items = m.apply(iter, ListTracker([TupleTracker(pair) for pair in inner.pairs(m)]))
    return TupleTracker([_class_of(m, v), TupleTracker(args), _state(m, v), m.const(None), items])


@rule((set.__reduce__, frozenset.__reduce__), Tracker)
def reduce_set(m: Machine, v: Tracker) -> Any:
    inner = payload_of(v)
    assert isinstance(inner, SetTracker)
    return TupleTracker([_class_of(m, v), TupleTracker([ListTracker(inner.items(m))]), _state(m, v)])


@rule(tuple.__getnewargs__, Tracker)  # type: ignore[attr-defined]
def tuple_arguments(m: Machine, v: Tracker) -> Any:
    return TupleTracker([TupleTracker(m.iterate(payload_of(v)))])


@rule((collections.defaultdict.__copy__, collections.OrderedDict.copy), Tracker)  # type: ignore[attr-defined]
def copy_dict(m: Machine, v: Tracker) -> Any:
    inner = payload_of(v)
    if not isinstance(inner, DictTracker) or inner is not v:
        return NotImplemented
    made = DictTracker.of(m, inner.pairs(m), inner.cls)
    made.default_factory = inner.default_factory
    return made
