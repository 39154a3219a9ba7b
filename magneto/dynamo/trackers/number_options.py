"""Numbers that change from call to call as options of operations and as elements: `x.clamp(-c, c)`, `x.add(y, alpha=a)`, `torch.full((b,), t)`, `torch.tensor([t, 0])`.

Each is the same operation with the number in a tensor (bounds, elements), or one of ours that takes it there (`graph/scaled.py`). Where torch would refuse a number that is too large for
the type of the result, a guard keeps it in range.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker, TupleTracker
from magneto.dynamo.trackers.device_mode import default_device
from magneto.dynamo.trackers.dispatch import FALLBACKS, prefer, rule
from magneto.dynamo.trackers.function import FunctionTracker
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.item_graph import graph_number
from magneto.dynamo.trackers.lazy_number import changing, guard_types, is_unread, leaves, text_of
from magneto.dynamo.trackers.lifted import decide, lift, may_decide
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import is_graph_callable
from magneto.graph import UnknownMeta, scaled

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_MOST = 64  # elements of a list that are made one by one
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def moves(m: Machine, v: Any) -> bool:
    """Whether it is a number that changes from call to call."""
    return isinstance(v, ConstTracker) and is_unread(v) and type(v.value) in (int, float) and changing(m, v)


def arguments(names: Sequence[str], args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> dict[str, Tracker] | None:
    """By name; None where there are others."""
    if len(args) > len(names) or not set(kwargs) <= set(names[len(args) :]):
        return None
    return dict(zip(names, args)) | dict(kwargs)


# -- bounds


def _bounded(fn: Any, names: Sequence[str], plain: Any) -> None:
    """`plain`: the same operation, which takes bounds in tensors too."""

    @prefer(fn, TensorTracker)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        given = arguments(names, args, kwargs)
        if given is None or v.meta.dtype not in _REAL or not any(moves(m, bound) for bound in given.values()):
            return NotImplemented
        bounds = {name: given[name] for name in ("min", "max") if name in given and not _is_none(given[name])}
        if not all(isinstance(bound, ConstTracker) for bound in bounds.values()):
            return NotImplemented
        if not v.meta.dtype.is_floating_point:
            whole = [bound for bound in bounds.values() if moves(m, bound) and type(bound.value) is int]  # type: ignore[attr-defined]
            if not all(_in_range(m, bound, v.meta.dtype) for bound in whole):  # type: ignore[arg-type]
                return NotImplemented
        held: dict[str, Any] = {name: lift(m, v, bound) for name, bound in bounds.items()}  # type: ignore[arg-type]
        if any(held[name] is None and moves(m, bound) for name, bound in bounds.items()):
            return NotImplemented
        if None not in held.values():
            return m.apply(plain, v, **held)
        result: Tracker = v
        for name, bound in bounds.items():  # the lower one first, as torch does: where they cross, the upper one counts
            result = m.apply(plain, result, **{name: held[name] or bound})
        return result


def _is_none(v: Tracker) -> bool:
    return isinstance(v, ConstTracker) and v.value is None


for _name in ("clamp", "clip"):
    for _suffix, _owner in (("", torch), ("", torch.Tensor), ("_", torch.Tensor)):
        _bounded(getattr(_owner, _name + _suffix), ("min", "max"), getattr(torch.Tensor, "clamp" + _suffix))
for _end in ("min", "max"):
    for _suffix, _owner in (("", torch), ("", torch.Tensor), ("_", torch.Tensor)):
        _bounded(getattr(_owner, f"clamp_{_end}{_suffix}"), (_end,), getattr(torch.Tensor, "clamp" + _suffix))


# -- factors


def _factor(fn: Any, formula: Any, operands: int, keyword: str, negative: bool = False) -> None:
    @prefer(fn, *[TensorTracker] * operands)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        number, others = kwargs.get(keyword), args[: operands - 1]
        dtypes = {one.meta.dtype for one in (v, *others) if isinstance(one, TensorTracker)}
        if number is None or len(kwargs) > 1 or len(args) >= operands or not v.meta.dtype.is_floating_point or len(dtypes) > 1:
            return NotImplemented
        if not moves(m, number) and not isinstance(number, ItemTracker):
            return NotImplemented
        small = not all(one.meta.ndim for one in (v, *others))  # type: ignore[attr-defined]
        if small and v.meta.dtype not in (torch.float32, torch.float64):
            return NotImplemented
        if negative:
            number = m.apply(operator.neg, number)
        held = graph_number(m, number)
        if held is None and isinstance(number, ConstTracker) and abs(number.value) < 2**53:
            guard_types(m, number)
            held = m.number_input(number)
        return NotImplemented if held is None else m.node(formula, [v, *others, held], {})


_fn: Any
for _fn in (torch.add, torch.Tensor.add):
    _factor(_fn, scaled.add, 2, "alpha")
for _fn in (torch.sub, torch.subtract, torch.Tensor.sub, torch.Tensor.subtract):
    _factor(_fn, scaled.add, 2, "alpha", negative=True)
for _fn in (torch.Tensor.sub_, torch.Tensor.subtract_):
    _factor(_fn, scaled.add_, 2, "alpha", negative=True)
_factor(torch.Tensor.add_, scaled.add_, 2, "alpha")
for _name in ("addcmul", "addcdiv"):
    for _fn in (getattr(torch, _name), getattr(torch.Tensor, _name)):
        _factor(_fn, getattr(scaled, _name), 3, "value")


# -- elements


def _held(m: Machine, number: ConstTracker, dtype: torch.dtype) -> TensorTracker | None:
    """A changing number that becomes an element of this type; None where torch may refuse it."""
    return m.number_input(number) if _in_range(m, number, dtype) else None


def _in_range(m: Machine, number: ConstTracker, dtype: torch.dtype) -> bool:
    """Is a changing number one of this type? A guard keeps it so."""
    numbers = leaves(number)
    if dtype not in _REAL or len({leaf.source for leaf in numbers}) != 1 or (type(number.value) is int and abs(number.value) >= 2**53):
        return False
    text, whole = text_of(number, "{}"), not dtype.is_floating_point
    bounds = torch.iinfo(dtype) if whole else torch.finfo(dtype)
    if not (bounds.min <= number.value <= bounds.max):
        return False
    guard_types(m, number)
    if whole or type(number.value) is int:
        least, most = (max(int(bounds.min), -(2**53)), min(int(bounds.max), 2**53))
        m.guard(Kind.RELATION, numbers[0].source, f"{least} <= {text} <= {most}")
    elif dtype is not torch.float64:
        m.guard(Kind.RELATION, numbers[0].source, f"not {bounds.max} < abs({text}) < math.inf")
    return True


def _filled(m: Machine, make: Any, first: Tracker, number: ConstTracker, dtype: torch.dtype, options: Mapping[str, Tracker]) -> Any:
    """`make(first)` full of the number."""
    held = _held(m, number, dtype)
    if held is None:
        return NotImplemented
    return m.apply(torch.Tensor.fill_, m.apply(make, first, **options), held)


def _says(options: Mapping[str, Tracker]) -> bool:
    """Are type and device known?"""
    return all(options[name].try_const() is not None for name in ("dtype", "device") if name in options)


def _dtype(options: Mapping[str, Tracker]) -> torch.dtype | None:
    given = options.get("dtype")
    const = given.try_const() if given is not None else None
    return const.value if const is not None else None


@prefer(torch.full, Tracker, ConstTracker)
def full(m: Machine, size: Tracker, number: ConstTracker, /, **options: Tracker) -> Any:
    if not set(options) <= {"dtype", "device"} or not moves(m, number) or not _says(options):
        return NotImplemented
    dtype = _dtype(options) or (torch.int64 if type(number.value) is int else torch.get_default_dtype())
    return _filled(m, torch.empty, size, number, dtype, {**options, "dtype": m.const(dtype)})


@prefer(torch.full, Tracker)
def full_by_name(m: Machine, size: Tracker, /, *args: Tracker, fill_value: Tracker | None = None, **options: Tracker) -> Any:
    return full(m, size, fill_value, **options) if isinstance(fill_value, ConstTracker) and not args else NotImplemented


@prefer(torch.full_like, TensorTracker, ConstTracker)
def full_like(m: Machine, v: TensorTracker, number: ConstTracker, /, **options: Tracker) -> Any:
    if not set(options) <= {"dtype", "device", "memory_format"} or not moves(m, number) or not _says(options):
        return NotImplemented
    return _filled(m, torch.empty_like, v, number, _dtype(options) or v.meta.dtype, options)


@prefer(torch.Tensor.new_full, TensorTracker, Tracker, ConstTracker)
def new_full(m: Machine, v: TensorTracker, size: Tracker, number: ConstTracker, /, **options: Tracker) -> Any:
    if not set(options) <= {"dtype", "device"} or not moves(m, number) or not _says(options):
        return NotImplemented
    made = _held(m, number, _dtype(options) or v.meta.dtype)
    return NotImplemented if made is None else m.apply(torch.Tensor.fill_, m.apply(torch.Tensor.new_empty, v, size, **options), made)


@prefer(torch.Tensor.fill_, TensorTracker, ConstTracker)
def fill_(m: Machine, v: TensorTracker, number: ConstTracker) -> Any:
    held = _held(m, number, v.meta.dtype) if moves(m, number) else None
    return NotImplemented if held is None else m.apply(torch.Tensor.fill_, v, held)


def _listed(m: Machine, v: Tracker) -> tuple[list[ConstTracker], tuple[int, ...]] | None:
    """The numbers of a nested list, and its shape; None for anything else."""
    if isinstance(v, ConstTracker):
        return ([v], ()) if type(v.value) in (int, float) else None
    if not isinstance(v, SequenceTracker) or v.cls not in (list, tuple) or not 0 < v.length() <= _MOST:
        return None
    found = [_listed(m, item) for item in v.items(m)]
    if None in found or len({shape for _, shape in found}) > 1 or sum(len(numbers) for numbers, _ in found) > _MOST:  # type: ignore[misc]
        return None
    return [number for numbers, _ in found for number in numbers], (len(found), *found[0][1])  # type: ignore[misc, index]


def _made_of_numbers(fn: Any) -> None:
    @prefer(fn, Tracker)
    def body(m: Machine, data: Tracker, /, **options: Tracker) -> Any:
        if not m.changing or not isinstance(data, (SequenceTracker, ConstTracker)) or not set(options) <= {"dtype", "device"}:
            return NotImplemented
        found = _listed(m, data)
        if found is None or not _says(options) or not any(moves(m, number) for number in found[0]):
            return NotImplemented
        numbers, shape = found
        kinds = {type(number.value) for number in numbers}
        dtype = _dtype(options) or (torch.get_default_dtype() if float in kinds else torch.int64)
        if not dtype.is_floating_point and float in kinds:
            return NotImplemented
        made: dict[int, Tracker] = {}
        place = options["device"].try_const() if "device" in options else None
        device = torch.device(place.value) if place is not None and place.value is not None else default_device(m)
        for number in numbers:
            if id(number) in made:
                continue
            if moves(m, number):
                held: Any = _held(m, number, dtype)
                if held is None:
                    return NotImplemented
                made[id(number)] = m.node("to", [held, device, dtype], {"copy": True}, method=True)
            else:
                made[id(number)] = m.node(torch.tensor, [number.read()], {"dtype": dtype, "device": device})
        parts = [made[id(number)] for number in numbers]
        if len(made) > 1:
            return m.node(torch.reshape, [m.node(torch.stack, [parts], {}), shape], {})
        if not shape:
            return parts[0]
        return m.node(
            "clone", [m.node("expand", [parts[0], shape], {}, method=True)], {"memory_format": torch.contiguous_format}, method=True
        )


for _fn in (torch.tensor, torch.as_tensor):
    _made_of_numbers(_fn)


# -- diagonals


def _triangle(fn: Any, outside: Any) -> None:
    @prefer(fn, TensorTracker)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        given = arguments(("diagonal",), args, kwargs)
        number = given.get("diagonal") if given else None
        if isinstance(v.meta, UnknownMeta) or v.meta.ndim < 2 or not isinstance(number, ConstTracker) or type(number.value) is not int:
            return NotImplemented
        held = _held(m, number, torch.int64) if moves(m, number) else None
        if held is None:
            return NotImplemented
        rows, columns = v.meta.shape[-2:]
        options = {"device": v.meta.device}
        down = m.node("unsqueeze", [m.node(torch.arange, [rows], options), 1], {}, method=True)
        gone = m.node(outside, [m.node(operator.sub, [m.node(torch.arange, [columns], options), down], {}), held], {})
        whole = m.node("contiguous", [v], {}, method=True)
        return m.node(torch.masked_fill, [whole, gone, 0], {})


for _owner in (torch, torch.Tensor):
    _triangle(_owner.triu, operator.lt)
    _triangle(_owner.tril, operator.gt)


# -- powers


@rule(operator.pow, ConstTracker, TensorTracker)
def power_of_number(m: Machine, number: ConstTracker, v: TensorTracker) -> Any:
    held = lift(m, v, number) if moves(m, number) else None
    return NotImplemented if held is None else m.apply(torch.pow, held, v)


def _power(fn: Any) -> None:
    @prefer(fn, TensorTracker, ConstTracker)
    def body(m: Machine, v: TensorTracker, number: ConstTracker) -> Any:
        if v.meta.dtype not in (torch.float32, torch.float64) or not moves(m, number) or abs(number.value) >= 2**53:
            return NotImplemented
        guard_types(m, number)
        return m.node(scaled.power, [v, m.number_input(number)], {})


for _fn in (operator.pow, torch.pow, torch.Tensor.pow):
    _power(_fn)


# -- torch's own Python


def _inlined(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """A function like `F.gumbel_softmax` is followed, so that a number meets the operation that takes it."""
    if not isinstance(fn, types.FunctionType) or not is_graph_callable(fn):
        return NotImplemented
    if not any(isinstance(v, ItemTracker) or moves(m, v) for v in (*args, *kwargs.values())):
        return NotImplemented
    return m.inline(FunctionTracker.existing(m, fn, Held(fn.__name__, fn)), args, kwargs)


FALLBACKS.insert(0, _inlined)


# -- what a changing number decides


@prefer(operator.contains, SequenceTracker, ConstTracker)
def contains(m: Machine, v: SequenceTracker, number: ConstTracker) -> Any:
    """`step in (10, 20)`."""
    if v.cls not in (list, tuple) or not moves(m, number) or not may_decide(m, number):
        return NotImplemented
    items = v.items(m)
    if not all(isinstance(item, ConstTracker) and type(item.value) in (int, float) and not changing(m, item) for item in items):
        return NotImplemented
    values = tuple(item.read() for item in items)  # type: ignore[attr-defined]
    if not all(map(math.isfinite, values)):
        return NotImplemented
    result = number.value in values
    decide(m, number, f"({{}} in {values!r}) is {result}")
    return m.const(result)


@prefer(divmod, ConstTracker, ConstTracker)
def quotient_and_rest(m: Machine, left: ConstTracker, right: ConstTracker) -> Any:
    if type(right.value) not in (int, float) or not right.value or not changing(m, left, right):
        return NotImplemented
    return TupleTracker([m.apply(operator.floordiv, left, right), m.apply(operator.mod, left, right)])
