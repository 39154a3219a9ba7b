"""Rows of tensor methods that are answered from metadata, and of tensors' special methods."""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.basic_iterator import ItemsIterator
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import SEEN, meaning, rule
from magneto.dynamo.trackers.iterator import tensor_rows
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type
from magneto.dynamo.trackers.rules_operator import ARITHMETIC, COMPARISONS
from magneto.dynamo.trackers.rules_tensor_state import LEGACY
from magneto.dynamo.trackers.size import size_at, sizes_of, stride_at
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES, TensorTracker
from magneto.dynamo.trackers.torch_calls import TENSOR_BASE
from magneto.graph.meta import CONJ, NEG, TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def _const_int(m: Machine, v: Tracker) -> int:
    const = v.try_const()
    if const is None:
        m.settle(v)
        m.graph_break("B102", operation="use as a dimension")
    return int(const.value)


def _dim(m: Machine, meta: TensorMeta, dim: Tracker) -> int:
    index, rank = _const_int(m, dim), meta.ndim
    if not -max(rank, 1) <= index < max(rank, 1):
        low, high = -max(rank, 1), max(rank, 1) - 1
        m.raise_exception(IndexError(f"Dimension out of range (expected to be in range of [{low}, {high}], but got {index})"))
    return index


def method(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Row for a tensor method."""
    return rule(getattr(torch.Tensor, name), TensorTracker)


@method("size")
def size(m: Machine, v: TensorTracker, dim: Tracker | None = None) -> Tracker:
    if dim is None or (isinstance(dim, ConstTracker) and dim.read() is None):
        return sizes_of(m, v)
    return size_at(m, v, _dim(m, v.meta, dim))


def _check_layout(m: Machine, v: TensorTracker) -> None:
    """Under a transform tensors are laid out otherwise than what capture sees."""
    if m.recorder.transformed:  # type: ignore[attr-defined]
        m.graph_break("B103", attribute="stride", value=f"{v.show()} under a transform")


@method("stride")
def stride(m: Machine, v: TensorTracker, dim: Tracker | None = None) -> Tracker:
    _check_layout(m, v)
    if dim is None or (isinstance(dim, ConstTracker) and dim.read() is None):
        return TupleTracker([stride_at(m, v, d) for d in range(v.meta.ndim)])
    return stride_at(m, v, _dim(m, v.meta, dim))


@method("is_contiguous")
def is_contiguous(m: Machine, v: TensorTracker, memory_format: Tracker | None = None) -> Tracker:
    _check_layout(m, v)
    const = memory_format.try_const() if memory_format is not None else None
    wanted = const.value if const is not None else torch.contiguous_format
    if wanted is torch.contiguous_format:
        return m.const(v.meta.is_contiguous())
    real = torch.empty_strided(v.meta.shape, v.meta.strides, device="meta")
    return m.const(real.is_contiguous(memory_format=wanted))


@method("storage_offset")
def storage_offset(m: Machine, v: TensorTracker) -> Tracker:
    """Guards do not look at where an input begins in its storage."""
    if any(tensor.source is not None for tensor in v.memory or [v]):
        m.graph_break("B103", attribute="storage_offset", value=v.show())
    return m.const(v.meta.storage_offset)


METHODS: dict[str, Callable[[TensorMeta], Any]] = {
    "dim": lambda t: t.ndim, "ndimension": lambda t: t.ndim, "element_size": lambda t: t.dtype.itemsize,
    "is_floating_point": lambda t: t.dtype.is_floating_point, "is_complex": lambda t: t.dtype.is_complex,
    "is_signed": lambda t: t.dtype.is_signed, "is_conj": lambda t: bool(t.lazy & CONJ), "is_neg": lambda t: bool(t.lazy & NEG),
    "is_coalesced": lambda t: False, "has_names": lambda t: False, "get_device": lambda t: -1 if t.device.type == "cpu" else t.device.index,
    "dense_dim": lambda t: t.ndim, "sparse_dim": lambda t: 0,
}  # fmt: skip
"""Methods without arguments that are constants of the metadata."""


def _meta_method(compute: Callable[[TensorMeta], Any]) -> Callable[..., Any]:
    return lambda m, v: m.const(compute(v.meta))


for _name, _compute in METHODS.items():
    if hasattr(torch.Tensor, _name):
        method(_name)(_meta_method(_compute))


@rule(torch.Tensor.__len__, TensorTracker)
def tensor_len(m: Machine, v: TensorTracker) -> Any:
    return meaning(m, len, (v,), {})


@rule(torch.Tensor.__iter__, TensorTracker)
def tensor_iter(m: Machine, v: TensorTracker) -> Any:
    return ItemsIterator(tensor_rows(m, v))


@rule(torch.Tensor.__hash__, TensorTracker)
def tensor_hash(m: Machine, v: TensorTracker) -> Any:
    return meaning(m, hash, (v,), {})


def _dtype_named(v: Tracker) -> torch.dtype | None:
    """torch.float64, "torch.DoubleTensor" or torch.DoubleTensor, of which the last two name the CPU as well."""
    const = v.try_const()
    value = const.value if const is not None else v.obj if isinstance(v, ClassTracker) else None
    if isinstance(value, torch.dtype):
        return value
    return next((dtype for cls, dtype in LEGACY.items() if value is cls or value == f"torch.{cls.__name__}"), None)


@method("type")
def type_(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    if args or kwargs:
        dtype = _dtype_named(args[0]) if len(args) == 1 and not kwargs else None
        if dtype is not None:
            return m.apply(torch.Tensor.to, v, m.const(dtype))
        m.graph_break("B104", operation="Tensor.type(...)", value=v.show())
    return m.const(torch.empty(0, dtype=v.meta.dtype, device=v.meta.device).type())


@rule(torch.Tensor.dim_order, TensorTracker)
def dim_order(m: Machine, v: TensorTracker, /, **kwargs: Tracker) -> Any:
    return NotImplemented if kwargs else m.const(torch.empty_strided(v.meta.shape, v.meta.strides, dtype=v.meta.dtype).dim_order())


@method("type_as")
def type_as(m: Machine, v: TensorTracker, other: TensorTracker) -> Any:
    return m.node("type_as", [v, other], {}, method=True)


_COMPARABLE = (torch.Tensor, int, float, complex)


def _dunder(name: str, fn: Callable[..., Any], swap: bool = False) -> None:
    raw = (
        getattr(TENSOR_BASE, name, None)
        if not isinstance(torch.Tensor.__dict__.get(name), types.FunctionType)
        else torch.Tensor.__dict__[name]
    )
    if raw is None:
        return
    own = inspect.getattr_static(torch.Tensor, name)

    @rule(raw, TensorTracker)
    def body(m: Machine, v: Tracker, *args: Tracker) -> Any:
        if find_in_type(m, torch.Tensor, name) is not own:  # the graph would call what the program has put in its place
            m.graph_break("B104", operation=f"torch's own {name}", value=v.show())
        if swap and (
            len(args) != 1 or isinstance(args[0], TensorTracker)
        ):  # called by name: the operator would not come here, and divides otherwise
            return NotImplemented
        if fn in (operator.eq, operator.ne) and args and not issubclass(args[0].python_type(), _COMPARABLE):  # called by name it declines
            return NotImplemented
        return meaning(m, fn, (args[0], v) if swap else (v, *args), {})  # (a class was asked about the method, not about the operator)


def _register_dunders() -> None:
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
        fn = getattr(operator, f"__{name}__")
        _dunder(f"__{name}__", getattr(operator, name, None) or getattr(operator, f"{name}_", fn))
        _dunder(f"__i{name}__", getattr(operator, f"i{name}"))
        _dunder(f"__r{name}__", getattr(operator, name, None) or getattr(operator, f"{name}_", fn), swap=True)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "invert", "getitem", "setitem"):
        _dunder(f"__{name}__", getattr(operator, name))
    _dunder("__abs__", abs)


_register_dunders()


def _seen(fn: Any, name: str, reflected: str = "") -> None:
    """An operator means what torch.Tensor has for it, which is guarded: a program may have put its own there."""

    def called(m: Machine, v: TensorTracker, name: str, *args: Tracker) -> Any:
        if v.cls not in PLAIN_CLASSES or find_in_type(m, v.cls, name) is originals[name]:
            return NotImplemented
        method = find_special(m, v, name)
        result = m.call(method, args, {}) if method is not None else None
        if result is None or (isinstance(result, ConstTracker) and result.value is NotImplemented):
            m.graph_break("B104", operation=name, value=v.show())
        return result

    def asked(m: Machine, *args: Tracker) -> Any:
        if args and isinstance(args[0], TensorTracker):
            return called(m, args[0], name, *args[1:])
        if reflected and len(args) > 1 and isinstance(args[1], TensorTracker):
            return called(m, args[1], reflected, args[0])
        return NotImplemented

    originals = {each: inspect.getattr_static(torch.Tensor, each, MISSING) for each in (name, reflected) if each}
    SEEN[fn] = asked


for _name, (_plain, _in_place, _) in ARITHMETIC.items():
    _seen(_plain, f"__{_name}__", f"__r{_name}__")
    _seen(_in_place, f"__i{_name}__")
for _name, (_plain, _other, _) in COMPARISONS.items():
    _seen(_plain, f"__{_name}__", f"__{_other}__")
_unary = (operator.neg, operator.pos, operator.invert, operator.getitem, operator.setitem, operator.delitem)
for _plain in (abs, len, iter, reversed, hash, *_unary):
    _seen(_plain, f"__{_plain.__name__}__")


@rule(torch.Tensor.__contains__, TensorTracker, Tracker)
def tensor_contains(m: Machine, v: TensorTracker, item: Tracker) -> Any:
    m.graph_break("B102", operation="in")
