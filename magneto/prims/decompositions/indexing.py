"""Decompositions of look-ups. Scatters and lookups by several index tensors stay library calls; of the library's ways of adding rows the fastest is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import wrap_dim
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

LONG_ROW = 64  # elements: shorter rows are added faster one element at a time


@row("embedding.default")
def _embedding(b: Builder, weight: Value, indices: Value, *rest: Any) -> Value:
    return b.emit("index_select", weight, 0, indices)


@row("index_select.default")
def _index_select(b: Builder, x: Value, dim: int, index: Value) -> Any:
    if not x.ndim or index.ndim > 1:
        return LIBRARY
    return b.emit("index_select", x, wrap_dim(dim, x.ndim), index.reshape((index.numel(),)))


def _one_hot(b: Builder, classes: Value, count: int) -> Value:
    """Rows of the unit matrix, of which nothing is in memory: lookups check the classes."""
    steps, shape = b.iota(count, torch.int64, classes.device), (count, count)
    return b.emit("index_select", steps.along(shape, (0,)).eq(steps.along(shape, (1,))), 0, classes).to(torch.int64)


ROWS["magneto.one_hot.default"] = _one_hot


@row("gather.default")
def _gather(b: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Any:
    if not x.ndim or index.ndim != x.ndim or index.dtype is not torch.int64:
        return LIBRARY
    return b.emit("gather", x, wrap_dim(dim, x.ndim), index)


@row("index.Tensor", "_unsafe_index.Tensor")
def _index(b: Builder, x: Value, indices: Sequence[Value | None]) -> Any:
    """One index tensor is an index_select; negative indices count from the end."""
    used = [d for d, index in enumerate(indices) if index is not None]
    index = indices[used[0]] if len(used) == 1 else None
    if index is None or index.dtype not in (torch.int64, torch.int32):
        return LIBRARY
    dim = used[0]
    wide = index.to(torch.int64)
    return b.emit("index_select", x, dim, (wide < 0).where(wide + x.shape[dim], wide))


@row("index_put.default", "_unsafe_index_put.default")
def _index_put(b: Builder, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Any:
    """Rows added up at places of the first dimension, in the same order by index_add, which does not compute an address per element."""
    index = indices[0] if len(indices) == 1 else None
    if (
        not accumulate
        or index is None
        or index.dtype is not torch.int64
        or index.ndim != 1
        or x.dtype not in (torch.float32, torch.float64)
    ):
        return LIBRARY
    if not x.numel() or x.numel() < LONG_ROW * x.shape[0] or values.dtype is not x.dtype or values.shape != (*index.shape, *x.shape[1:]):
        return LIBRARY
    wrapped = (index < 0).where(index + x.shape[0], index)
    return Value(b, b.node(torch.ops.aten.index_add.default, (x.node, 0, wrapped.node, values.node), x.meta), x.meta)
