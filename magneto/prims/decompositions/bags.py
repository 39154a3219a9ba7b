"""Decompositions of embedding bags by offsets, on a GPU: one library call (or kernel of ours) makes sums; means and gradients are made of lookups and additions.

Which bag an index belongs to is how many bags begin at or before it, the first one aside. Maxima, half types, and gradients scaled by frequency are the library's, and so are gradients of programs that want the
same digits in every run.
"""

from __future__ import annotations

from typing import Any

import torch

from magneto.graph.meta import TensorMeta
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY, on_gpu
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

aten = torch.ops.aten
SUM, MEAN = 0, 1


@row("_embedding_bag.default", "_embedding_bag_forward_only.default")
def _embedding_bag(
    b: Builder, weight: Value, indices: Value, offsets: Value, scale: bool = False, mode: int = SUM, sparse: bool = False,
    samples: Value | None = None, last: bool = False, padding: int = -1,
) -> Any:  # fmt: skip
    """(results, each index's bag, the bags' sizes, where maxima lie)"""
    bags, count, whole = offsets.shape[0] - last, indices.shape[0], weight.dtype in (torch.float32, torch.float64)
    if not on_gpu(weight) or not whole or scale or sparse or mode not in (SUM, MEAN) or not (bags and count and weight.shape[1]):
        return LIBRARY
    if b.wanted == {0} and mode == SUM:
        return _sums(b, weight, indices, offsets, samples, last, padding), None, None, None
    kind = torch.int64 if torch.int64 in (indices.dtype, offsets.dtype) else torch.int32
    places, sizes = _bags(b, offsets, bags, count, kind), None
    if mode == MEAN or 2 in b.wanted:
        sizes = _sizes(b, offsets, bags, count, kind)
        if padding >= 0:
            zeros, ones = b.full(sizes.shape, 0, kind, offsets.device), indices.ne(padding).to(kind)
            sizes = Value(b, b.node(aten.index_add.default, (zeros.node, 0, places.node, ones.node), sizes.meta), sizes.meta)
    made = _sums(b, weight, indices, offsets, samples, last, padding)
    if mode == MEAN:
        assert sizes is not None
        by = sizes.narrow(0, 0, bags)
        made = made / by.maximum(b.full(by.shape, 1, kind, by.device)).to(made.dtype).along(made.shape, (0,))
    return made, places, sizes, b.full((0,), 0, kind, weight.device) if 3 in b.wanted else None


def _sums(b: Builder, weight: Value, indices: Value, offsets: Value, samples: Value | None, last: bool, padding: int) -> Value:
    kind, shape = torch.int64 if torch.int64 in (indices.dtype, offsets.dtype) else torch.int32, (offsets.shape[0] - last, weight.shape[1])
    metas = [TensorMeta.contiguous(shape, weight.dtype, weight.device)]
    metas += [TensorMeta.contiguous(s, kind, weight.device) for s in (indices.shape, offsets.shape, (0,))]
    given = None if samples is None else samples.node
    arguments = (weight.node, indices.node, offsets.node, False, SUM, False, given, last, padding)
    return b.item(b.node(aten._embedding_bag_forward_only.default, arguments, tuple(metas)), 0, metas[0])


def _bags(b: Builder, offsets: Value, bags: int, count: int, kind: torch.dtype) -> Value:
    if bags == 1:
        return b.full((count,), 0, kind, offsets.device)
    begins, at = offsets.narrow(0, 1, bags), b.iota(count, offsets.dtype, offsets.device)
    meta = TensorMeta.contiguous((count,), kind, offsets.device)
    options = {"out_int32": kind is torch.int32, "right": True}
    return Value(b, b.node(aten.searchsorted.Tensor, (begins.node, at.node), meta, options), meta)


def _sizes(b: Builder, offsets: Value, bags: int, count: int, kind: torch.dtype) -> Value:
    """The first bag begins at 0, the last one ends behind the last index."""
    place = b.iota(offsets.shape[0], torch.int64, offsets.device)
    rest = b.full((offsets.shape[0] - bags + 1,), count, offsets.dtype, offsets.device)
    ends = b.cat([offsets.narrow(0, 1, bags), rest], 0) if bags > 1 else rest
    return (ends - place.eq(0).where(0, offsets)).to(kind)


@row("_embedding_bag_dense_backward.default")
def _dense_backward(
    b: Builder, grad: Value, indices: Value, places: Value, sizes: Value, largest: Value, count: int, scale: bool, mode: int,
    samples: Value | None = None, padding: int = -1,
) -> Any:  # fmt: skip
    if not _by_loops(grad, indices, places) or scale or mode not in (SUM, MEAN):
        return LIBRARY
    rows = b.emit("index_select", grad, 0, places)
    if mode == MEAN:
        rows = rows / b.emit("index_select", sizes, 0, places).to(rows.dtype).along(rows.shape, (0,))
    if samples is not None:
        rows = rows * samples.along(rows.shape, (0,))
    meta = TensorMeta.contiguous((count, grad.shape[1]), grad.dtype, grad.device)
    return Value(b, b.node(aten.embedding_dense_backward.default, (rows.node, indices.node, count, padding, False), meta), meta)


@row("_embedding_bag_per_sample_weights_backward.default")
def _samples_backward(
    b: Builder, grad: Value, weight: Value, indices: Value, offsets: Value, places: Value, mode: int, padding: int = -1
) -> Any:
    if not _by_loops(grad, indices, places) or mode != SUM or grad.dtype is not weight.dtype:
        return LIBRARY
    found = (b.emit("index_select", grad, 0, places) * b.emit("index_select", weight, 0, indices)).reduce("sum", (1,))
    return indices.ne(padding).where(found, 0.0) if padding >= 0 else found


def _by_loops(grad: Value, indices: Value, places: Value) -> bool:
    """Are gradients loops: of float32 or float64, where nobody wants the same digits in every run?"""
    known = grad.dtype in (torch.float32, torch.float64) and places.shape == indices.shape and indices.shape[0] > 0 and grad.shape[1] > 0
    return on_gpu(grad) and known and not torch.are_deterministic_algorithms_enabled()
