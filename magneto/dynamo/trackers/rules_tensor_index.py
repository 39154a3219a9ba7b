"""Rows of indexing tensors."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from magneto.dynamo.trackers import masked, places
from magneto.dynamo.trackers.base import Const, Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_scalar
from magneto.dynamo.trackers.container import ListTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.number_size import size_of
from magneto.dynamo.trackers.rules_subscript import is_slice
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import lower
from magneto.graph import UnknownMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


@rule(operator.getitem, TensorTracker, Tracker)
def tensor_getitem(m: Machine, v: TensorTracker, key: Tracker) -> Tracker:
    if (placed := places.read(m, v, _parts(m, key))) is not None:
        return placed
    if (chosen := masked.select(m, v, key)) is not None:
        return chosen
    key = size_of(m, key) if m.changing else key
    key = known_index(m, key, v)
    parts = _parts(m, key)
    if not any(map(_is_place, parts)) or not m.selects():
        return m.node(operator.getitem, [v, lower(m, key)], {})
    made: Tracker = v
    while parts and isinstance(made, TensorTracker) and made.meta.is_contiguous():
        if _is_place(parts[0]):
            base, made = made, m.node("squeeze", [m.node(operator.getitem, [made, _one(m, parts[0])], {}), 0], {}, method=True)
            m.select(made, base)  # type: ignore[arg-type]
        elif _is_int(parts[0]):
            made = m.node(operator.getitem, [made, lower(m, parts[0])], {})
        elif (column := _column(m, made, parts)) is not None:
            whole = parts[: _ahead(parts)]
            made, parts = column, [*whole, *parts[len(whole) + 1 :]]
            if len(parts) == len(whole):
                return made
            continue
        else:
            break
        parts = parts[1:]
    return m.node(operator.getitem, [made, lower(m, TupleTracker(parts))], {}) if parts else made


LAID_OUT = 1 << 16  # elements of a tensor of which a column is laid out as eager's view is


def _ahead(parts: list[Tracker]) -> int:
    """How many whole dimensions come first."""
    return next((at for at, part in enumerate(parts) if not (is_slice(part) and part.try_const() == Const(slice(None)))), len(parts))


def _column(m: Machine, v: TensorTracker, parts: list[Tracker]) -> TensorTracker | None:
    """`v[:, place]`, whatever comes behind; None for other keys."""
    dim = _ahead(parts)
    if (
        dim == 0
        or dim >= min(len(parts), v.meta.ndim)
        or not _is_place(parts[dim])
        or v.meta.numel > LAID_OUT
        or isinstance(v.meta, UnknownMeta)
    ):
        return None
    strides = v.meta.strides[:dim] + v.meta.strides[dim + 1 :]
    column = m.node("squeeze", [m.node(operator.getitem, [v, (*[slice(None)] * dim, _one(m, parts[dim]))], {}), dim], {}, method=True)
    assert isinstance(column, TensorTracker)
    if column.meta.strides != strides:  # the program can tell
        options = {"dtype": v.meta.dtype, "device": v.meta.device}
        laid = m.node(torch.empty_strided, [column.meta.shape, strides], options)
        column = m.node("copy_", [laid, column], {}, method=True)
        assert isinstance(column, TensorTracker)
    m.select(column, v)
    return column


def _parts(m: Machine, key: Tracker) -> list[Tracker]:
    return list(key.items(m)) if isinstance(key, TupleTracker) and key.cls is tuple else [key]


def _is_place(part: Tracker) -> bool:
    """A whole number that depends on data: eager selects there, which gives a view."""
    return isinstance(part, TensorTracker) and not part.meta.ndim and part.meta.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _is_int(part: Tracker) -> bool:
    return isinstance(part, ConstTracker) and type(part.read()) is int


def _one(m: Machine, place: Tracker) -> Tracker:
    """The place as an index of one element."""
    return m.node("to", [m.node("reshape", [place, 1], {}, method=True), torch.int64], {}, method=True)


def known_index(m: Machine, key: Tracker, v: TensorTracker, dim: int = 0) -> Tracker:
    """The index of `v` (of its dimension `dim` and those behind) as torch takes it. Boolean masks select a number of elements known only at run time, unless the mask is known."""
    if isinstance(key, TupleTracker) and key.cls is tuple:
        parts, found = key.items(m), list[Tracker]()
        for part, at in zip(parts, _dims(parts, v.meta.ndim), strict=True):
            known = known_index(m, part, v, at)
            found += known.items(m) if isinstance(known, TupleTracker) and isinstance(part, TensorTracker) else [known]
        return TupleTracker(found)
    if isinstance(key, TensorTracker) and (not key.meta.ndim or key.meta.dtype in (torch.bool, torch.uint8)):
        value = m.known(key)
        if value is not None and value.dtype in (torch.bool, torch.uint8) and value.ndim:
            return _by_number(m, value, v, dim)
        if value is not None:
            return m.const(value.item())
        if key.meta.dtype in (torch.bool, torch.uint8) and not (m.unknown_sizes and key.meta.ndim and key.meta.dtype is torch.bool):
            m.graph_break("B105", operation="indexing with a boolean mask")
    if isinstance(key, ConstTracker) and isinstance(key.read(), range):
        return ListTracker([m.const(i) for i in key.read()])
    return key


def _dims(parts: list[Tracker], ndim: int) -> list[int]:
    """Of each part of an index, the dimension it is about, as far as masks of one dimension ask for that."""
    made, at, left = [], 0, sum(map(_taken, parts))
    for part in parts:
        made.append(at)
        left -= _taken(part)
        at = ndim - left if isinstance(part, ConstTracker) and part.read() is Ellipsis else at + _taken(part)
    return made


def _taken(part: Tracker) -> int:
    """How many dimensions a part of an index takes."""
    if isinstance(part, ConstTracker):
        return 0 if part.read() is None or isinstance(part.read(), bool) or part.read() is Ellipsis else 1
    return part.meta.ndim if isinstance(part, TensorTracker) and part.meta.dtype in (torch.bool, torch.uint8) else 1


def _by_number(m: Machine, mask: torch.Tensor, v: TensorTracker, dim: int) -> Tracker:
    """A known mask as the numbers of the elements it selects, for each of its dimensions."""
    if mask.shape != tuple(v.meta.shape[dim : dim + mask.ndim]) or (mask.ndim > 1 and mask.dtype is not torch.bool):
        m.graph_break("B105", operation="indexing with a boolean mask")
    places = [m.node(torch.tensor, [one.tolist()], {"dtype": torch.int64}) for one in mask.nonzero(as_tuple=True)]
    return places[0] if len(places) == 1 else TupleTracker(places)


@rule(operator.setitem, TensorTracker, Tracker, Tracker)
def tensor_setitem(m: Machine, v: TensorTracker, key: Tracker, value: Tracker) -> None:
    if isinstance(value, masked.MaskedTracker):
        masked.put(m, v, key, value)
        return
    if any(part is v or part in (v.memory or ()) for part in _parts(m, key) if isinstance(part, TensorTracker) and part.meta.ndim):
        m.graph_break("B104", operation="x[...] =", value="an index that shares memory with x")  # eager refuses some
    if isinstance(value, TensorTracker) and value.meta.requires_grad and masked.fill(m, v, key, value):
        return
    if places.write(m, v, _parts(m, key), value):
        return
    if isinstance(value, ConstTracker) and is_numpy_scalar(value.read()) and not isinstance(value.read(), (int, float, complex)):
        m.graph_break("B104", operation="x[...] =", value=value.show())  # torch takes those of numpy's scalars that are Python's too
    key = size_of(m, key) if m.changing else key
    parts = [known_index(m, part, v) if isinstance(part, TensorTracker) and not part.meta.ndim else part for part in _parts(m, key)]
    first = next((part for part in parts if not _is_int(part)), None)
    plain = all(_is_place(part) or is_slice(part) or isinstance(part, ConstTracker) for part in parts)
    if first is not None and _is_place(first) and plain and m.selects():
        key = TupleTracker([_one(m, part) if _is_place(part) else part for part in parts])
        if isinstance(value, TensorTracker):  # what `copy_` into a view takes
            value = m.node("to", [value, v.meta.dtype], {"copy": True}, method=True)
    m.node(operator.setitem, [v, lower(m, key), lower(m, value)], {})
    gradient = isinstance(value, TensorTracker) and value.meta.requires_grad
    if gradient and not v.meta.requires_grad and m.grad_enabled():  # type: ignore[attr-defined]
        v.meta = v.meta.with_(requires_grad=True, is_leaf=False)
