"""Meta rules of operations whose result's size depends on data. `count(place)` gives the size: the number of non-zero elements of the argument there, or, without
a place, one that nothing is known about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.fallback import DataDependent
from magneto.graph.layout import RuleError, broadcast_shapes
from magneto.graph.meta import TensorMeta
from magneto.graph.rule_table import rule_table
from magneto.graph.rules_index import RULES as INDEX_RULES

RULES, rule = rule_table()
Count = Callable[..., int]
_MASKS = (torch.bool, torch.uint8)


def _flat(size: int, dtype: torch.dtype, like: TensorMeta) -> TensorMeta:
    return TensorMeta.contiguous((size,), dtype, like.device)


@rule("nonzero.default")
def _nonzero(count: Count, meta: TensorMeta) -> TensorMeta:
    n = count(0)
    return TensorMeta((n, len(meta.shape)), (1, n), torch.int64, meta.device)


@rule("index.Tensor", "_unsafe_index.Tensor")
def _index(count: Count, meta: TensorMeta, indices: Sequence[TensorMeta | None]) -> TensorMeta:
    """A mask of n dimensions stands for n vectors of the indices that it selects."""
    numbers: list[TensorMeta | None] = []
    for place, index in enumerate(indices):
        if index is None or index.dtype not in _MASKS:
            numbers.append(index)
            continue
        if index.shape != meta.shape[len(numbers) : len(numbers) + len(index.shape)]:
            raise RuleError("a mask of another shape")
        numbers += [_flat(count(1, place), torch.int64, index)] * len(index.shape)
    sizes = [size or 1 if d < len(numbers) and numbers[d] is not None else size for d, size in enumerate(meta.shape)]
    meta = meta.with_(shape=tuple(sizes))  # nothing is selected from an empty dimension
    return INDEX_RULES["aten.index.Tensor"](meta, numbers)  # type: ignore[no-any-return]


@rule("masked_select.default")
def _masked_select(count: Count, meta: TensorMeta, mask: TensorMeta) -> TensorMeta:
    if mask.dtype is not torch.bool:
        raise RuleError("a mask that is not bool")
    whole = broadcast_shapes((meta.shape, mask.shape)) == mask.shape
    return _flat(count(1) if whole else count(), meta.dtype, meta)


@rule("_unique2.default")
def _unique2(count: Count, meta: TensorMeta, ordered: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    n = count()
    places = TensorMeta.contiguous(meta.shape if inverse else (0,), torch.int64, meta.device)
    return _flat(n, meta.dtype, meta), places, _flat(n if counts else 0, torch.int64, meta)


@rule("unique_consecutive.default")
def _unique_consecutive(count: Count, meta: TensorMeta, inverse: bool = False, counts: bool = False, dim: int | None = None) -> Any:
    if dim is not None:
        return _unique_dim_consecutive(count, meta, dim, inverse, counts)
    n = count()
    places = TensorMeta.contiguous(meta.shape if inverse else (0,), torch.int64, meta.device)
    return _flat(n, meta.dtype, meta), places, _flat(n if counts else 0, torch.int64, meta)


@rule("unique_dim.default")
def _unique_dim(count: Count, meta: TensorMeta, dim: int, ordered: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    return _unique_dim_consecutive(count, meta, dim, inverse, counts)


@rule("unique_dim_consecutive.default")
def _unique_dim_consecutive(count: Count, meta: TensorMeta, dim: int, inverse: bool = False, counts: bool = False) -> Any:
    if 0 in meta.shape:
        raise RuleError("unique of nothing")
    dim %= len(meta.shape)
    n = count()
    moved = (dim, *(d for d in range(len(meta.shape)) if d != dim))
    rows = TensorMeta.contiguous((n, *(meta.shape[d] for d in moved[1:])), meta.dtype, meta.device)
    back = [moved.index(d) for d in range(len(meta.shape))]
    shape, strides = (tuple(values[d] for d in back) for values in (rows.shape, rows.strides))
    one = TensorMeta(shape, strides, meta.dtype, meta.device)
    return one, _flat(meta.shape[dim], torch.int64, meta), _flat(n, torch.int64, meta)


@rule("bincount.default")
def _bincount(count: Count, meta: TensorMeta, weights: TensorMeta | None = None, minlength: int = 0) -> TensorMeta:
    if len(meta.shape) != 1 or (weights is not None and weights.shape != meta.shape):
        raise RuleError("bincount operands")
    kept = weights is not None and weights.dtype is torch.float32
    return _flat(count(), torch.int64 if weights is None else torch.float32 if kept else torch.float64, meta)


@rule("repeat_interleave.Tensor")
def _repeat_interleave(count: Count, repeats: TensorMeta, *, output_size: int | None = None) -> TensorMeta:
    if len(repeats.shape) != 1 or repeats.dtype not in (torch.int32, torch.int64):
        raise RuleError("repeats")
    return _flat(count() if output_size is None else output_size, repeats.dtype, repeats)


@rule("_ctc_loss.Tensor")
def _ctc_loss(count: Count, log_probs: TensorMeta, targets: TensorMeta, *rest: Any) -> Any:
    """The second result is for the backward pass; its last size follows from the longest target."""
    steps, batch = (*log_probs.shape[:1], log_probs.shape[1] if len(log_probs.shape) == 3 else 1)
    shape = (batch, steps, 2 * count() + 1)
    return _flat(batch, log_probs.dtype, log_probs), TensorMeta.contiguous(shape, log_probs.dtype, log_probs.device)


@rule("_local_scalar_dense.default")
def _number(count: Count, meta: TensorMeta) -> int:
    """A whole number that torch asks a tensor for: the bound of a slice, a size. (A program's own `item()` does not come here.)"""
    if meta.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise DataDependent("aten._local_scalar_dense.default")
    return count()
