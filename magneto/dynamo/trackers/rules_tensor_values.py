"""Rows of what asks a tensor for its numbers: known where the region makes it out of constants; otherwise a break at exactly that point."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_scalar
from magneto.dynamo.trackers.container import SequenceTracker
from magneto.dynamo.trackers.device_mode import default_device
from magneto.dynamo.trackers.dispatch import prefer, rule
from magneto.dynamo.trackers.item import number_of
from magneto.dynamo.trackers.size import SizeTracker
from magneto.dynamo.trackers.tensor import TensorTracker, overrides_operations
from magneto.dynamo.trackers.torch_calls import lower, record

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def asked(m: Machine, v: TensorTracker, compute: Callable[[torch.Tensor], Any], operation: str, kind: Any = None) -> Tracker:
    """`compute` of the tensor's numbers; a number of type `kind` that the region computes, or the break B102."""
    value = m.known(v)
    if value is None:
        number = number_of(m, v, operation, kind) if kind is not None else None
        if number is None:
            m.graph_break("B102", operation=operation)
        return number
    try:
        result = compute(value)
    except Exception as error:
        m.raise_exception(error)
    return m.const(result)


def _kind(v: TensorTracker, name: str) -> type | None:
    """The type of the number that a conversion gives, where it always gives one."""
    if name == "item":
        return object
    if name in ("float", "__float__", "bool", "__bool__", "is_nonzero"):
        return float if "float" in name else bool
    return int if name in ("int", "__int__") and not v.meta.dtype.is_floating_point else None


def _method(name: str) -> None:
    fn = getattr(torch.Tensor, name)

    @rule(fn, TensorTracker)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        if args or kwargs:
            return NotImplemented
        return asked(m, v, fn, f"Tensor.{name}", _kind(v, name))


for _name in ("item", "tolist", "is_nonzero", "__bool__", "__int__", "__float__", "__index__", "__complex__"):
    _method(_name)


def _conversion(fn: Callable[[Any], Any]) -> None:
    method = getattr(torch.Tensor, f"__{fn.__name__}__", None)

    @rule(fn, TensorTracker)
    def body(m: Machine, v: TensorTracker) -> Tracker:
        if method is not None and overrides_operations(m, v):
            return m.apply(method, v)
        return asked(m, v, fn, f"{fn.__name__}()", _kind(v, fn.__name__))


for _fn in (int, float, complex, math.floor, math.ceil, math.trunc, torch.is_nonzero):
    _conversion(_fn)


def _comparison(fn: Any) -> None:
    @rule(fn, TensorTracker, TensorTracker)
    def body(m: Machine, a: TensorTracker, b: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        one, two = m.known(a), m.known(b)
        consts = {name: const.value for name, value in kwargs.items() if (const := value.try_const()) is not None}
        if one is None or two is None or args or len(consts) < len(kwargs):
            return NotImplemented
        return m.const(fn(one, two, **consts))


for _compare in (torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose):
    _comparison(_compare)


def _of_numpy(fn: Any) -> None:
    @rule(fn, Tracker)
    def body(m: Machine, data: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        """Scalars of numpy say of which type the tensor is; the graph has plain numbers in their place."""
        if args or "dtype" in kwargs or not _holds_numpy(m, data):
            return NotImplemented
        const = data.try_const()
        if const is None:
            m.graph_break("B102", operation=f"torch.{fn.__name__} of {data.show()}")
        return m.apply(fn, data, **kwargs, dtype=m.const(fn(const.value).dtype))


def _holds_numpy(m: Machine, v: Tracker) -> bool:
    if isinstance(v, SequenceTracker):
        return any(_holds_numpy(m, item) for item in v.items(m))
    return isinstance(v, ConstTracker) and is_numpy_scalar(v.read())


for _constructor in (torch.tensor, torch.as_tensor, torch.asarray):
    _of_numpy(_constructor)


@rule(torch.asarray, TensorTracker)
def asarray(m: Machine, data: TensorTracker, /, **kwargs: Tracker) -> Any:
    """A tensor that shall not require gradients (torch 2.11: that is not said to) is detached, one that is a leaf changes itself."""
    given = kwargs.get("requires_grad")
    const = given.try_const() if given is not None else None
    wanted = const.value if const is not None and const.value is not None else _as_it_is() and data.meta.requires_grad
    if wanted == data.meta.requires_grad or not isinstance(wanted, bool):
        return NotImplemented
    if wanted or data.meta.is_leaf:
        m.graph_break("B102", operation="torch.asarray, which changes requires_grad of its argument")
    return m.apply(torch.asarray, m.node("detach", [data], {}, method=True), **kwargs)


@rule(torch.bincount, TensorTracker)
@rule(torch.Tensor.bincount, TensorTracker)
def bincount(m: Machine, x: TensorTracker, /, weights: Tracker | None = None, minlength: Tracker | None = None, **kwargs: Tracker) -> Any:
    """Of numbers below `minlength`, which is assumed, there are as many bins."""
    given = minlength.try_const() if minlength is not None else None
    count = given.value if given is not None else 0
    weighed = weights if isinstance(weights, TensorTracker) else None
    none = weights is None or ((const := weights.try_const()) is not None and const.value is None)
    numbers = x.meta.ndim == 1 and x.meta.dtype in _NUMBERS and x.meta.sizes()[0] != 0
    if kwargs or type(count) is not int or count < 1 or not numbers or m.unknown_sizes or m.known(x) is not None:
        return NotImplemented
    if not none and (
        weighed is None or weighed.meta.requires_grad or weighed.meta.sizes() != x.meta.sizes() or weighed.meta.dtype.is_complex
    ):
        return NotImplemented
    below = number_of(m, m.node(operator.lt, [m.node("amax", [x], {}, method=True), count], {}), "torch.bincount", bool)  # type: ignore[arg-type]
    if below is None or not m.assume(below):
        return NotImplemented
    return m.node(torch.ops.magneto.bincount, [x, weighed, count], {})


_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@prefer(F.ctc_loss, TensorTracker, TensorTracker)
def ctc_loss(m: Machine, x: TensorTracker, targets: TensorTracker, *args: Tracker, **options: Tracker) -> Any:
    """Lengths in lists as tensors, which need not be the same at each call."""
    names = ("input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    given = {**dict(zip(names, args, strict=False)), **options}
    lengths = {name: made for name in names[:2] if (made := _whole_numbers(m, given.get(name))) is not None}
    if (
        len(lengths) < 2
        or len(given) < len(args) + len(options)
        or not (x.meta.ndim == 3 and targets.meta.ndim == 2)
        or x.meta.device.type != "cpu"
    ):
        return NotImplemented
    return m.apply(F.ctc_loss, x, targets, **{**given, **lengths})


def _whole_numbers(m: Machine, v: Tracker | None) -> Tracker | None:
    """The tensor of a list of whole numbers, None of anything else."""
    items = v.items(m) if isinstance(v, SequenceTracker) else []
    whole = bool(items) and all(isinstance(item, (ConstTracker, SizeTracker)) and item.python_type() is int for item in items)
    return m.apply(torch.tensor, v, dtype=m.const(torch.int64)) if v is not None and whole else None


@functools.cache
def _as_it_is() -> bool:
    """Whether torch.asarray keeps requires_grad of a tensor where nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.asarray(torch.zeros(1, requires_grad=True) * 1).requires_grad


@rule(torch.tensor, Tracker)
def tensor(m: Machine, data: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    """From numbers, and from nested lists that hold tensors of one number."""
    if isinstance(data, TensorTracker):
        m.graph_break("B102", operation="torch.tensor of a tensor, which warns")
    if not _holds_tensor(m, data):
        return record(m, torch.tensor, [data, *args], kwargs)
    leaves, shape = _flatten(m, data)
    dtype = kwargs.pop("dtype", None)
    device = kwargs.pop("device", None)
    const = dtype.try_const() if dtype is not None else None
    wanted = const.value if const is not None and const.value is not None else _common_dtype(leaves)
    if kwargs or args or wanted is None:
        m.graph_break("B102", operation="torch.tensor of tensors")
    place = device.try_const() if device is not None else None
    target = torch.device(place.value) if place is not None and place.value is not None else default_device(m)
    parts = [_as_scalar(m, leaf, wanted, target) for leaf in leaves]
    return m.node(torch.reshape, [m.node(torch.stack, [parts], {}), shape], {})


def _as_scalar(m: Machine, leaf: Tracker, dtype: torch.dtype, device: torch.device) -> Tracker:
    if isinstance(leaf, TensorTracker):
        return m.node("to", [m.node("detach", [leaf], {}, method=True), device, dtype], {}, method=True)
    return m.node(torch.tensor, [lower(m, leaf)], {"dtype": dtype, "device": device})


def _holds_tensor(m: Machine, v: Tracker) -> bool:
    if isinstance(v, TensorTracker):
        return True
    return isinstance(v, SequenceTracker) and any(_holds_tensor(m, item) for item in v.items(m))


def _flatten(m: Machine, v: Tracker) -> tuple[list[Tracker], tuple[int, ...]]:
    """Leaves of a nested list, and its shape; what is ragged or holds larger tensors is left to torch."""
    if isinstance(v, SequenceTracker) and v.cls in (list, tuple):
        parts = [_flatten(m, item) for item in v.items(m)]
        shapes = {shape for _, shape in parts}
        if len(shapes) == 1:
            return [leaf for leaves, _ in parts for leaf in leaves], (len(parts), *shapes.pop())
    elif isinstance(v, TensorTracker) and not v.meta.ndim or isinstance(v, ConstTracker) and type(v.read()) in (int, float, bool):
        return [v], ()
    m.graph_break("B102", operation="torch.tensor of tensors")


def _common_dtype(leaves: list[Tracker]) -> torch.dtype | None:
    """What torch infers: the promotion of the leaves' dtypes, numbers counting as tensors of the default dtypes."""
    found: torch.dtype | None = None
    for leaf in leaves:
        dtype = leaf.meta.dtype if isinstance(leaf, TensorTracker) else torch.tensor(leaf.try_const().value).dtype  # type: ignore[union-attr]
        found = dtype if found is None else torch.promote_types(found, dtype)
    return found
