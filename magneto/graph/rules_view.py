"""Meta rules of views: exact strides and storage offsets. What they alias is in their schemas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.layout import RuleError, contiguous_strides, inferred_shape, view_strides, wrap_dim
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import COMPLEX, category, complex_dtype, real_dtype
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def view_of(meta: TensorMeta, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None) -> TensorMeta:
    return TensorMeta(shape, strides, meta.dtype, meta.device, False, meta.storage_offset if offset is None else offset)


@rule("view.default", "_unsafe_view.default")
def _view(meta: TensorMeta, size: Sequence[int]) -> TensorMeta:
    shape = inferred_shape(size, meta.numel)
    strides = view_strides(meta.shape, meta.strides, shape)
    if strides is None:
        raise RuleError("view size is not compatible")
    return view_of(meta, shape, strides)


@rule("_reshape_alias.default")
def _reshape_alias(meta: TensorMeta, size: Sequence[int], stride: Sequence[int]) -> TensorMeta:
    return view_of(meta, tuple(size), tuple(stride))


@rule("reshape.default")
def _reshape(meta: TensorMeta, size: Sequence[int]) -> TensorMeta:
    """As a functional operation: a view where one exists, otherwise a contiguous copy."""
    shape = inferred_shape(size, meta.numel)
    strides = view_strides(meta.shape, meta.strides, shape)
    return view_of(meta, shape, strides) if strides is not None else TensorMeta.contiguous(shape, meta.dtype, meta.device)


@rule("permute.default")
def _permute(meta: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    rank = len(meta.shape)
    order = [wrap_dim(dim, rank) for dim in dims]
    if len(order) != rank or len(set(order)) != rank:
        raise RuleError("permute needs each dimension once")
    return view_of(meta, tuple(meta.shape[d] for d in order), tuple(meta.strides[d] for d in order))


@rule("transpose.int")
def _transpose(meta: TensorMeta, dim0: int, dim1: int) -> TensorMeta:
    rank = len(meta.shape)
    left, right = wrap_dim(dim0, rank), wrap_dim(dim1, rank)
    if left == right:
        return view_of(meta, meta.shape, meta.strides)
    shape, strides = list(meta.shape), list(meta.strides)
    shape[left], shape[right] = shape[right], shape[left]
    strides[left], strides[right] = strides[right], strides[left]
    return view_of(meta, tuple(shape), tuple(strides))


@rule("t.default")
def _t(meta: TensorMeta) -> TensorMeta:
    if len(meta.shape) > 2:
        raise RuleError("t() expects at most two dimensions")
    return view_of(meta, meta.shape[::-1], meta.strides[::-1])


@rule("numpy_T.default")
def _numpy_t(meta: TensorMeta) -> TensorMeta:
    return view_of(meta, meta.shape[::-1], meta.strides[::-1])


@rule("expand.default")
def _expand(meta: TensorMeta, size: Sequence[int], *, implicit: bool = False) -> TensorMeta:
    lead = len(size) - len(meta.shape)
    if lead < 0:
        raise RuleError("expand to fewer dimensions")
    shape, strides = list(size), [0] * len(size)
    if not meta.shape:
        if any(s < 0 for s in size):
            raise RuleError("expand cannot infer a new dimension")
        return view_of(meta, tuple(size), tuple(strides))
    for dim in range(len(size) - 1, -1, -1):
        source = dim - lead
        have = meta.shape[source] if source >= 0 else 1
        if source >= 0:
            stride = meta.strides[source]
        else:
            stride = shape[dim + 1] * strides[dim + 1]
        wanted = size[dim]
        if wanted == -1:
            if source < 0:
                raise RuleError("expand cannot infer a new dimension")
            wanted = have
        if have != wanted:
            if have != 1 or wanted < 0:
                raise RuleError("expanded size does not match")
            stride = 0
        shape[dim], strides[dim] = wanted, stride
    return view_of(meta, tuple(shape), tuple(strides))


@rule("slice.Tensor")
def _slice(meta: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> TensorMeta:
    if not meta.shape or step <= 0:
        raise RuleError("slice of a 0-d tensor or a bad step")
    dim = wrap_dim(dim, len(meta.shape))
    first, last, step = slice_bounds(meta.shape[dim], start, end, step)
    shape, strides = list(meta.shape), list(meta.strides)
    shape[dim] = (last - first + step - 1) // step
    strides[dim] *= step
    return view_of(meta, tuple(shape), tuple(strides), meta.storage_offset + first * meta.strides[dim])


def slice_bounds(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """Clamped (start, end, step) of a slice with a positive step, end >= start."""
    first = 0 if start is None else start
    last = size if end is None else end
    first = max(first + size, 0) if first < 0 else min(first, size)
    if last < 0:
        last += size
    last = min(max(last, first), size)
    return first, last, step


@rule("select.int")
def _select(meta: TensorMeta, dim: int, index: int) -> TensorMeta:
    rank = len(meta.shape)
    if not rank or not isinstance(index, int):
        raise RuleError("select() of a 0-d tensor")
    dim = wrap_dim(dim, rank)
    size = meta.shape[dim]
    if not -size <= index < size:
        raise RuleError("index out of range")
    offset = meta.storage_offset + (index % size) * meta.strides[dim]
    return view_of(meta, meta.shape[:dim] + meta.shape[dim + 1 :], meta.strides[:dim] + meta.strides[dim + 1 :], offset)


@rule("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(meta: TensorMeta, dims: int | Sequence[int] | None = None) -> TensorMeta:
    rank = len(meta.shape)
    if dims is None:
        chosen = set(range(rank))
    else:
        chosen = {wrap_dim(dim, rank) for dim in ((dims,) if isinstance(dims, int) else dims)}
    keep = [d for d in range(rank) if not (d in chosen and meta.shape[d] == 1)]
    return view_of(meta, tuple(meta.shape[d] for d in keep), tuple(meta.strides[d] for d in keep))


@rule("unsqueeze.default")
def unsqueezed(meta: TensorMeta, dim: int) -> TensorMeta:
    rank = len(meta.shape)
    dim = wrap_dim(dim, rank + 1)
    stride = meta.shape[dim] * meta.strides[dim] if dim < rank else 1
    return view_of(meta, meta.shape[:dim] + (1,) + meta.shape[dim:], meta.strides[:dim] + (stride,) + meta.strides[dim:])


def _pieces(meta: TensorMeta, dim: int, sizes: Sequence[int]) -> list[TensorMeta]:
    pieces, start = [], 0
    for size in sizes:
        shape = meta.shape[:dim] + (size,) + meta.shape[dim + 1 :]
        pieces.append(view_of(meta, shape, meta.strides, meta.storage_offset + start * meta.strides[dim]))
        start += size
    return pieces


@rule("split.Tensor")
def _split(meta: TensorMeta, size: int, dim: int = 0) -> list[TensorMeta]:
    if not meta.shape:
        raise RuleError("split of a 0-d tensor")
    dim = wrap_dim(dim, len(meta.shape))
    total = meta.shape[dim]
    if size < 0 or (size == 0 and total != 0):
        raise RuleError("bad split size")
    count = max((total + size - 1) // size, 1) if size else 1
    return _pieces(meta, dim, [size] * (count - 1) + [total - size * (count - 1)])


@rule("unsafe_split.Tensor")
def _unsafe_split(meta: TensorMeta, size: int, dim: int = 0) -> list[TensorMeta]:
    return _split(meta, size, dim)


@rule("split_with_sizes.default", "unsafe_split_with_sizes.default", "split.sizes")
def _split_with_sizes(meta: TensorMeta, sizes: Sequence[int], dim: int = 0) -> list[TensorMeta]:
    if not meta.shape:
        raise RuleError("split of a 0-d tensor")
    dim = wrap_dim(dim, len(meta.shape))
    if sum(sizes) != meta.shape[dim] or any(size < 0 for size in sizes):
        raise RuleError("split sizes do not add up")
    return _pieces(meta, dim, sizes)


@rule("unbind.int")
def _unbind(meta: TensorMeta, dim: int = 0) -> list[TensorMeta]:
    if not meta.shape:
        raise RuleError("unbind of a 0-d tensor")
    dim = wrap_dim(dim, len(meta.shape))
    return [_select(meta, dim, index) for index in range(meta.shape[dim])]


@rule("as_strided.default")
def _as_strided(meta: TensorMeta, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> TensorMeta:
    if len(size) != len(stride) or any(s < 0 for s in (*size, *stride)):
        raise RuleError("bad as_strided")
    return view_of(meta, tuple(size), tuple(stride), storage_offset)


@rule("diagonal.default")
def _diagonal(meta: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorMeta:
    rank = len(meta.shape)
    dim1, dim2 = wrap_dim(dim1, rank), wrap_dim(dim2, rank)
    if dim1 == dim2:
        raise RuleError("diagonal dimensions are equal")
    if offset >= 0:
        length = max(min(meta.shape[dim1], meta.shape[dim2] - offset), 0)
        start = offset * meta.strides[dim2]
    else:
        length = max(min(meta.shape[dim1] + offset, meta.shape[dim2]), 0)
        start = -offset * meta.strides[dim1]
    keep = [d for d in range(rank) if d not in (dim1, dim2)]
    shape = tuple(meta.shape[d] for d in keep) + (length,)
    strides = tuple(meta.strides[d] for d in keep) + (meta.strides[dim1] + meta.strides[dim2],)
    return view_of(meta, shape, strides, meta.storage_offset + (start if length else 0))


@rule("unfold.default")
def _unfold(meta: TensorMeta, dimension: int, size: int, step: int) -> TensorMeta:
    rank = len(meta.shape)
    if not rank:
        raise RuleError("unfold of a 0-d tensor")
    dim = wrap_dim(dimension, rank)
    if size < 0 or step <= 0 or size > meta.shape[dim]:
        raise RuleError("bad unfold")
    shape, strides = list(meta.shape), list(meta.strides)
    shape[dim] = (meta.shape[dim] - size) // step + 1
    strides[dim] = meta.strides[dim] * step
    return view_of(meta, (*shape, size), (*strides, meta.strides[dim]))


@rule("alias.default", "detach.default", "lift_fresh.default", "_conj.default", "_neg_view.default", "view_as.default")
def _alias(meta: TensorMeta, *rest: Any) -> TensorMeta:
    if rest:
        return _view(meta, rest[0].shape)
    return view_of(meta, meta.shape, meta.strides)


@rule("view_as_real.default")
def _view_as_real(meta: TensorMeta) -> TensorMeta:
    if category(meta.dtype) != COMPLEX:
        raise RuleError("view_as_real of a real tensor")
    strides = tuple(2 * stride for stride in meta.strides) + (1,)
    return TensorMeta(meta.shape + (2,), strides, real_dtype(meta.dtype), meta.device, False, 2 * meta.storage_offset)


@rule("view_as_complex.default")
def _view_as_complex(meta: TensorMeta) -> TensorMeta:
    if not meta.shape or meta.shape[-1] != 2 or meta.strides[-1] != 1 or any(s % 2 for s in (*meta.strides[:-1], meta.storage_offset)):
        raise RuleError("view_as_complex layout")
    if meta.dtype not in (torch.float16, torch.float32, torch.float64):
        raise RuleError("view_as_complex dtype")
    strides = tuple(stride // 2 for stride in meta.strides[:-1])
    return TensorMeta(meta.shape[:-1], strides, complex_dtype(meta.dtype), meta.device, False, meta.storage_offset // 2)


@rule("view.dtype")
def _view_dtype(meta: TensorMeta, dtype: torch.dtype) -> TensorMeta:
    if dtype.itemsize != meta.dtype.itemsize:
        raise RuleError("view with another element size")
    return TensorMeta(meta.shape, meta.strides, dtype, meta.device, False, meta.storage_offset)


def _copy_of(view_rule: Callable[..., Any]) -> Callable[..., Any]:
    """The `*_copy` form of a view: same shape, contiguous fresh memory."""

    def copied(*args: Any, **kwargs: Any) -> Any:
        answer = view_rule(*args, **kwargs)
        if isinstance(answer, list):
            return [TensorMeta(m.shape, contiguous_strides(m.shape), m.dtype, m.device) for m in answer]
        return TensorMeta(answer.shape, contiguous_strides(answer.shape), answer.dtype, answer.device)

    return copied


_COPIES = (
    "permute.default transpose.int t.default expand.default slice.Tensor select.int squeeze.default squeeze.dim squeeze.dims unsqueeze.default "
    "unbind.int as_strided.default diagonal.default unfold.default alias.default detach.default view_as_real.default "
    "view_as_complex.default split.Tensor split_with_sizes.default view.default view.dtype"
)
for _full in _COPIES.split():
    _packet, _overload = _full.split(".")
    RULES[f"aten.{_packet}_copy.{_overload}"] = _copy_of(RULES[f"aten.{_full}"])
RULES["aten.lift_fresh_copy.default"] = _copy_of(_alias)
