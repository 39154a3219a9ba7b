"""Rows of indexing tensors."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_scalar
from magneto.dynamo.trackers.container import ListTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import lower

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


@rule(operator.getitem, TensorTracker, Tracker)
def tensor_getitem(m: Machine, v: TensorTracker, key: Tracker) -> Tracker:
    return m.node(operator.getitem, [v, lower(m, known_index(m, key))], {})


def known_index(m: Machine, key: Tracker) -> Tracker:
    """The index as torch takes it. Boolean masks select a number of elements known only at run time, unless the mask is known."""
    if isinstance(key, TupleTracker) and key.cls is tuple:
        return TupleTracker([known_index(m, part) for part in key.items(m)])
    if isinstance(key, TensorTracker) and (not key.meta.ndim or key.meta.dtype in (torch.bool, torch.uint8)):
        value = m.known(key)
        if value is not None and value.dtype in (torch.bool, torch.uint8) and value.ndim:
            return _by_number(m, value)
        if value is not None:
            return m.const(value.item())
        if key.meta.dtype in (torch.bool, torch.uint8) and not (m.unknown_sizes and key.meta.ndim and key.meta.dtype is torch.bool):
            m.graph_break("B105", operation="indexing with a boolean mask")
    if isinstance(key, ConstTracker) and isinstance(key.read(), range):
        return ListTracker([m.const(i) for i in key.read()])
    return key


def _by_number(m: Machine, mask: torch.Tensor) -> Tracker:
    """A known mask of one dimension as the numbers of the elements it selects."""
    if mask.ndim != 1:
        m.graph_break("B105", operation="indexing with a boolean mask")
    return m.node(torch.tensor, [mask.nonzero().flatten().tolist()], {"dtype": torch.int64})


@rule(operator.setitem, TensorTracker, Tracker, Tracker)
def tensor_setitem(m: Machine, v: TensorTracker, key: Tracker, value: Tracker) -> None:
    if isinstance(value, ConstTracker) and is_numpy_scalar(value.read()) and not isinstance(value.read(), (int, float, complex)):
        m.graph_break("B104", operation="x[...] =", value=value.show())  # torch takes those of numpy's scalars that are Python's too
    m.node(operator.setitem, [v, lower(m, key), lower(m, value)], {})
    gradient = isinstance(value, TensorTracker) and value.meta.requires_grad
    if gradient and not v.meta.requires_grad and m.grad_enabled():  # type: ignore[attr-defined]
        v.meta = v.meta.with_(requires_grad=True, is_leaf=False)
