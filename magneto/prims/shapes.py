"""Shape and dtype rules of the prims: result metadata from operand metadata.

Operands of elementwise prims have one shape and dtype (or are Python numbers); a mismatch raises ValueError, because it is a mistake of
the decomposition that made the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.layout import contiguous_strides, iterator_strides, numel, suggested_strides, view_strides, wrap_dim
from magneto.graph.meta import CPU, TensorMeta
from magneto.graph.promotion import float_type, sum_type


def _layout(metas: Sequence[TensorMeta]) -> tuple[int, ...]:
    shape = metas[0].shape
    return iterator_strides(shape, [(meta.shape, meta.strides) for meta in metas])


def elementwise_meta(name: str, dtype: torch.dtype | None) -> Callable[..., TensorMeta]:
    """Operands of one shape and dtype; the result has `dtype`, or theirs."""

    def meta(*operands: Any) -> TensorMeta:
        metas = [operand for operand in operands if type(operand) is TensorMeta]
        first = metas[0]
        for other in metas[1:]:
            if other.shape != first.shape or other.dtype is not first.dtype:
                raise ValueError(f"prims.{name} of {first} and {other}")
        return TensorMeta(first.shape, _layout(metas), dtype or first.dtype, first.device)

    return meta


def where_meta(condition: TensorMeta, left: Any, right: Any) -> TensorMeta:
    values = [operand for operand in (left, right) if type(operand) is TensorMeta]
    if condition.dtype is not torch.bool or not values:
        raise ValueError("prims.where needs a bool condition and a tensor value")
    if any(value.shape != condition.shape or value.dtype is not values[0].dtype for value in values):
        raise ValueError(f"prims.where of {condition}, {left} and {right}")
    return TensorMeta(condition.shape, _layout([condition, *values]), values[0].dtype, condition.device)


def convert_meta(x: TensorMeta, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(x.shape, _layout([x]), dtype, x.device)


def reduction_meta(dtype_rule: str) -> Callable[..., TensorMeta]:
    """Reduce `dims` (an int for argmax and argmin) away."""

    def meta(x: TensorMeta, dims: Sequence[int] | int) -> TensorMeta:
        chosen = {wrap_dim(d, len(x.shape)) for d in ((dims,) if isinstance(dims, int) else dims)}
        shape = tuple(size for d, size in enumerate(x.shape) if d not in chosen)
        dtype = {"bool": torch.bool, "int64": torch.int64}.get(dtype_rule, x.dtype)
        return TensorMeta(shape, contiguous_strides(shape), dtype, x.device)

    return meta


_reduced = reduction_meta("same")


def sum_meta(x: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    """Integers and bool add up in int64."""
    return _reduced(x, dims).with_(dtype=sum_type(x.dtype))


def var_meta(x: TensorMeta, dims: Sequence[int], correction: float = 1) -> tuple[TensorMeta, TensorMeta]:
    meta = _reduced(x.with_(dtype=float_type(x.dtype)), dims)
    return meta, meta


def broadcast_meta(x: TensorMeta, shape: Sequence[int], dims: Sequence[int]) -> TensorMeta:
    strides = [0] * len(shape)
    for size, stride, dim in zip(x.shape, x.strides, dims, strict=True):
        if size not in (1, shape[dim]):
            raise ValueError(f"prims.broadcast_in_dim of {x} to {tuple(shape)} along {tuple(dims)}")
        strides[dim] = stride if size == shape[dim] else 0
    return TensorMeta(tuple(shape), tuple(strides), x.dtype, x.device)


def reshape_meta(x: TensorMeta, shape: Sequence[int]) -> TensorMeta:
    shape = tuple(shape)
    if numel(shape) != numel(x.shape):
        raise ValueError(f"prims.reshape of {x} to {shape}")
    strides = view_strides(x.shape, x.strides, shape)
    return TensorMeta(shape, contiguous_strides(shape) if strides is None else strides, x.dtype, x.device)


def transpose_meta(x: TensorMeta, perm: Sequence[int]) -> TensorMeta:
    if sorted(perm) != list(range(len(x.shape))):
        raise ValueError(f"prims.transpose of {x} by {tuple(perm)}")
    return TensorMeta(tuple(x.shape[d] for d in perm), tuple(x.strides[d] for d in perm), x.dtype, x.device)


def slice_meta(x: TensorMeta, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int]) -> TensorMeta:
    shape = tuple(max(-(-(limit - start) // step), 0) for start, limit, step in zip(starts, limits, steps, strict=True))
    if any(not 0 <= start <= limit <= size for start, limit, size in zip(starts, limits, x.shape, strict=True)):
        raise ValueError(f"prims.slice of {x} from {tuple(starts)} to {tuple(limits)}")
    strides = tuple(stride * step for stride, step in zip(x.strides, steps, strict=True))
    return TensorMeta(shape, strides, x.dtype, x.device)


def flip_meta(x: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    return TensorMeta(x.shape, contiguous_strides(x.shape), x.dtype, x.device)


def cat_meta(xs: Sequence[TensorMeta], dim: int) -> TensorMeta:
    first = xs[0]
    if any(x.dtype is not first.dtype or x.shape[:dim] + x.shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :] for x in xs):
        raise ValueError(f"prims.cat of {', '.join(map(str, xs))} along {dim}")
    shape = first.shape[:dim] + (sum(x.shape[dim] for x in xs),) + first.shape[dim + 1 :]
    return TensorMeta(shape, contiguous_strides(shape), first.dtype, first.device)


def pad_meta(x: TensorMeta, lo: Sequence[int], hi: Sequence[int], value: Any) -> TensorMeta:
    shape = tuple(size + below + above for size, below, above in zip(x.shape, lo, hi, strict=True))
    return TensorMeta(shape, contiguous_strides(shape), x.dtype, x.device)


def iota_meta(n: int, dtype: torch.dtype, device: torch.device = CPU) -> TensorMeta:
    return TensorMeta((n,), (1,), dtype, device)


def full_meta(shape: Sequence[int], value: Any, dtype: torch.dtype, device: torch.device = CPU) -> TensorMeta:
    return TensorMeta.contiguous(tuple(shape), dtype, device)


def index_select_meta(x: TensorMeta, dim: int, index: TensorMeta) -> TensorMeta:
    """Dimension `dim` gives way to the dimensions of `index` (a vector, or of any rank)."""
    return TensorMeta.contiguous(x.shape[:dim] + index.shape + x.shape[dim + 1 :], x.dtype, x.device)


def gather_meta(x: TensorMeta, dim: int, index: TensorMeta) -> TensorMeta:
    return TensorMeta.contiguous(index.shape, x.dtype, x.device)


def window_meta(dtype: torch.dtype | None) -> Callable[..., TensorMeta]:
    """One element for each window over the last dimensions."""

    def meta(x: TensorMeta, size: Sequence[int], step: Any, pad: Any, dilation: Any, count: Sequence[int]) -> TensorMeta:
        shape = (*x.shape[: -len(size)], *count)
        return TensorMeta(shape, suggested_strides(shape, x.is_channels_last()), dtype or x.dtype, x.device)

    return meta
