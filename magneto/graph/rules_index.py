"""Meta rules of concatenation, indexing, gathering and scattering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.fallback import DataDependent
from magneto.graph.layout import (
    CHANNELS_LAST_ORDER,
    RuleError,
    broadcast_shapes,
    channels_last_strides,
    contiguous_strides,
    expanded_strides,
    iterator_strides,
    preserved_strides,
    view_strides,
    wrap_dim,
    wrap_dims,
)
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import result_type
from magneto.graph.rule_table import rule_table
from magneto.graph.rules_view import slice_bounds, unsqueezed

RULES, rule = rule_table()

_INDEX_DTYPES = (torch.int64, torch.int32)
_BAG_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _fresh(meta: TensorMeta) -> TensorMeta:
    return TensorMeta.contiguous(meta.shape, meta.dtype, meta.device)


def _like(meta: TensorMeta) -> TensorMeta:
    """The layout of a clone."""
    return TensorMeta(meta.shape, preserved_strides(meta.shape, meta.strides), meta.dtype, meta.device)


@rule("cat.default", "concat.default")
def _cat(tensors: Sequence[TensorMeta], dim: int = 0) -> TensorMeta:
    if not tensors:
        raise RuleError("cat of nothing")
    parts = [m for m in tensors if m.shape != (0,)] or list(tensors[:1])
    first = parts[0]
    dim = wrap_dim(dim, len(first.shape))
    total = 0
    for part in parts:
        if not part.shape or len(part.shape) != len(first.shape) or part.device != first.device:
            raise RuleError("cat of different ranks or devices")
        if part.shape[:dim] != first.shape[:dim] or part.shape[dim + 1 :] != first.shape[dim + 1 :]:
            raise RuleError("cat of sizes that differ elsewhere")
        total += part.shape[dim]
    shape = first.shape[:dim] + (total,) + first.shape[dim + 1 :]
    last = len(shape) in CHANNELS_LAST_ORDER and all(m.is_channels_last() for m in tensors)
    strides = channels_last_strides(shape) if last else contiguous_strides(shape)
    return TensorMeta(shape, strides, result_type(tensors), first.device)


@rule("stack.default")
def _stack(tensors: Sequence[TensorMeta], dim: int = 0) -> TensorMeta:
    """The layout is that of cat along `dim`, which is then taken apart; behind the last dimension, of cat over the unsqueezed tensors."""
    first = tensors[0]
    dim = wrap_dim(dim, len(first.shape) + 1)
    if any(m.shape != first.shape or m.device != first.device for m in tensors):
        raise RuleError("stack of different sizes")
    if dim == len(first.shape) or not first.numel:
        return _cat([unsqueezed(m, dim) for m in tensors], dim)
    joined = _cat(tensors, dim)
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    strides = view_strides(joined.shape, joined.strides, shape)
    if strides is None:
        raise RuleError("layout of stack")
    return joined.with_(shape=shape, strides=strides)


@rule("embedding.default")
def _embedding(weight: TensorMeta, indices: TensorMeta, *rest: Any) -> TensorMeta:
    if len(weight.shape) != 2 or indices.dtype not in _INDEX_DTYPES:
        raise RuleError("embedding operands")
    return TensorMeta.contiguous((*indices.shape, weight.shape[1]), weight.dtype, weight.device)


@rule("embedding_dense_backward.default")
def _embedding_backward(grad: TensorMeta, indices: TensorMeta, count: int, *rest: Any) -> TensorMeta:
    return TensorMeta.contiguous((count, grad.shape[-1]), grad.dtype, grad.device)


@rule("_embedding_bag.default")
def _embedding_bag(
    weight: TensorMeta, indices: TensorMeta, offsets: TensorMeta, scale: bool = False, mode: int = 0, sparse: bool = False,
    samples: TensorMeta | None = None, last: bool = False, padding: int = -1,
) -> tuple[TensorMeta, ...]:  # fmt: skip
    """Rows per bag; and for backward: which bag an index belongs to (nothing where sums are made without it), the bags' sizes, where maxima lie."""
    if len(weight.shape) != 2 or len(indices.shape) != 1 or len(offsets.shape) != 1 or offsets.shape[0] <= last:
        raise RuleError("ranks of embedding_bag")
    if indices.dtype not in _INDEX_DTYPES or offsets.dtype not in _INDEX_DTYPES or weight.dtype not in _BAG_DTYPES or mode not in (0, 1, 2):
        raise RuleError("dtypes or mode of embedding_bag")
    if samples is not None and (mode != 0 or samples.shape != indices.shape or samples.dtype is not weight.dtype):
        raise RuleError("weights of embedding_bag")
    kind = torch.int64 if torch.int64 in (indices.dtype, offsets.dtype) else torch.int32
    bags, width = offsets.shape[0] - last, weight.shape[1]
    if weight.device.type != "cpu":
        shapes = (indices.shape, offsets.shape, (bags, width) if mode == 2 else (0,))
        made_there = (TensorMeta.contiguous(shape, kind, weight.device) for shape in shapes)
        return TensorMeta.contiguous((bags, width), weight.dtype, weight.device), *made_there
    sums = mode == 0 and weight.dtype is not torch.float64 and weight.strides[1] == 1 and padding < 0
    fast = sums and (samples is None or samples.strides[0] == 1)

    def made(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
        return TensorMeta.contiguous(shape, dtype, weight.device)

    largest = made((bags, width) if mode == 2 else (bags,), kind)
    return made((bags, width), weight.dtype), made((0,) if fast else indices.shape, kind), made((bags,), kind), largest


@rule("_embedding_bag_forward_only.default")
def _embedding_bag_forward_only(*args: Any) -> tuple[TensorMeta, ...]:
    """Sums have one size per offset."""
    made, places, sizes, largest = _embedding_bag(*args)
    if made.device.type == "cpu" and (len(args) < 5 or args[4] == 0):
        sizes = largest = TensorMeta.contiguous(args[2].shape, sizes.dtype, sizes.device)
    return made, places, sizes, largest


@rule("index_select.default")
def _index_select(meta: TensorMeta, dim: int, index: TensorMeta) -> TensorMeta:
    dim = wrap_dim(dim, len(meta.shape))
    if len(index.shape) > 1 or index.dtype not in _INDEX_DTYPES:
        raise RuleError("index_select index")
    if not meta.shape:
        return TensorMeta((), (), meta.dtype, meta.device)
    return TensorMeta.contiguous(meta.shape[:dim] + (index.numel,) + meta.shape[dim + 1 :], meta.dtype, meta.device)


@rule("gather.default")
def _gather(meta: TensorMeta, dim: int, index: TensorMeta, **options: Any) -> TensorMeta:
    dim = wrap_dim(dim, len(meta.shape))
    if index.dtype not in _INDEX_DTYPES or (index.numel and len(meta.shape or (1,)) != len(index.shape or (1,))):
        raise RuleError("gather index")
    if index.numel and meta.shape and any(i > s for d, (i, s) in enumerate(zip(index.shape, meta.shape, strict=False)) if d != dim):
        raise RuleError("gather index is larger than the input")
    return TensorMeta.contiguous(index.shape, meta.dtype, meta.device)


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(meta: TensorMeta, dim: int, index: TensorMeta, source: Any, *rest: Any, **options: Any) -> TensorMeta:
    wrap_dim(dim, len(meta.shape))
    if index.dtype not in _INDEX_DTYPES or (type(source) is TensorMeta and source.dtype is not meta.dtype):
        raise RuleError("scatter operands")
    if index.numel and len(index.shape or (1,)) != len(meta.shape or (1,)):
        raise RuleError("scatter ranks")
    if type(source) is TensorMeta and any(i > s for i, s in zip(index.shape, source.shape, strict=False)):
        raise RuleError("scatter index is larger than the source")
    if any(i > s for d, (i, s) in enumerate(zip(index.shape, meta.shape, strict=False)) if d != dim % max(len(meta.shape), 1)):
        raise RuleError("scatter index is larger than the tensor")
    return _fresh(meta)


@rule("index_add", "index_copy", "index_reduce")
def _index_add(meta: TensorMeta, dim: int, index: TensorMeta, *rest: Any, **options: Any) -> TensorMeta:
    wrap_dim(dim, len(meta.shape))
    if len(index.shape) > 1 or index.dtype not in _INDEX_DTYPES:
        raise RuleError("index of index_add")
    source = rest[0] if rest else None
    if type(source) is TensorMeta and source.shape and source.dtype is not meta.dtype:
        raise RuleError("index_add dtypes")
    return _fresh(meta)


@rule("index_fill")
def _index_fill(meta: TensorMeta, dim: int, index: TensorMeta, value: Any) -> TensorMeta:
    _index_add(meta, dim, index)
    return _like(meta)


@rule("index_put.default", "_unsafe_index_put.default")
def _index_put(meta: TensorMeta, indices: Sequence[TensorMeta | None], values: TensorMeta, *rest: Any) -> TensorMeta:
    if any(m is not None and m.dtype in (torch.bool, torch.uint8) for m in indices):
        if values.dtype is not meta.dtype:
            raise RuleError("index_put values")
        return _like(meta)
    selected = _index(meta, indices)
    if values.dtype is not meta.dtype or broadcast_shapes((values.shape, selected.shape)) != selected.shape:
        raise RuleError("index_put values")
    return _like(meta)


@rule("masked_scatter.default")
def _masked_scatter(meta: TensorMeta, mask: TensorMeta, source: TensorMeta) -> TensorMeta:
    if mask.dtype is not torch.bool or source.dtype is not meta.dtype or broadcast_shapes((meta.shape, mask.shape)) != meta.shape:
        raise RuleError("masked_scatter operands")
    return _fresh(meta)


@rule("repeat_interleave.Tensor")
def _repeat_interleave(repeats: TensorMeta, *, output_size: int | None = None) -> TensorMeta:
    if output_size is None:
        raise DataDependent("aten.repeat_interleave.Tensor")
    if len(repeats.shape) != 1 or repeats.dtype not in _INDEX_DTYPES or output_size < 0 or repeats.shape[0] == 0:
        raise RuleError("repeats")
    return TensorMeta.contiguous((output_size,), repeats.dtype, repeats.device)


@rule("index.Tensor", "_unsafe_index.Tensor")
def _index(meta: TensorMeta, indices: Sequence[TensorMeta | None]) -> TensorMeta:
    """Advanced indexing: indexed dimensions give way to the broadcast index shape, in place if adjacent, otherwise in front."""
    if any(m is not None and m.dtype in (torch.bool, torch.uint8) for m in indices):
        raise DataDependent("aten.index.Tensor with a mask")
    if len(indices) > len(meta.shape) or any(m is not None and m.dtype not in _INDEX_DTYPES for m in indices):
        raise RuleError("too many indices")
    used = [d for d, m in enumerate(indices) if m is not None]
    if not used:
        raise RuleError("no index")
    shape = broadcast_shapes([m.shape for m in indices if m is not None])
    rest = [d for d in range(len(meta.shape)) if d not in used]
    adjacent = used == list(range(used[0], used[-1] + 1))
    before = [d for d in rest if d < used[0]] if adjacent else []
    after = [d for d in rest if d not in before]
    if 0 in (meta.shape[d] for d in used) and 0 not in shape:
        raise RuleError("index into an empty dimension")
    result = tuple(meta.shape[d] for d in before) + shape + tuple(meta.shape[d] for d in after)
    own = tuple(meta.strides[d] for d in before) + (0,) * len(shape) + tuple(meta.strides[d] for d in after)
    operands = [(result, own)]
    for m in indices:
        if m is not None:
            padded = (1,) * len(before) + shape + (1,) * len(after)
            strides = view_strides(shape, expanded_strides(shape, m.shape, m.strides), padded)
            operands.append((padded, strides or contiguous_strides(padded)))
    return TensorMeta(result, iterator_strides(result, operands, general=True), meta.dtype, meta.device)


@rule("tril.default", "triu.default")
def _triangle(meta: TensorMeta, diagonal: int = 0) -> TensorMeta:
    if len(meta.shape) < 2:
        raise RuleError("a triangle needs two dimensions")
    return _fresh(meta)


@rule("roll.default")
def _roll(meta: TensorMeta, shifts: Sequence[int], dims: Sequence[int] = ()) -> TensorMeta:
    for dim in dims:
        wrap_dim(dim, len(meta.shape))
    if (dims and len(dims) != len(shifts)) or (not dims and len(shifts) != 1):
        raise RuleError("shifts and dims of roll")
    if not meta.numel:
        return TensorMeta(meta.shape, preserved_strides(meta.shape, meta.strides), meta.dtype, meta.device)
    rolled = meta if dims and meta.device.type != "cuda" else _fresh(meta)
    for shift, dim in zip(shifts, dims, strict=False):  # one after the other: cat of the two pieces, of which the second may be empty
        size = meta.shape[dim]
        start = (size - shift) % size
        rolled = _cat(
            [rolled.with_(shape=(*meta.shape[: dim % len(meta.shape)], n, *meta.shape[dim:][1:])) for n in (size - start, start)], dim
        )
    return rolled.with_(requires_grad=False, storage_offset=0)


@rule("flip.default")
def _flip(meta: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    if dims:
        wrap_dims(dims, len(meta.shape))
    return _like(meta)


@rule("repeat.default")
def _repeat(meta: TensorMeta, repeats: Sequence[int]) -> TensorMeta:
    lead = len(repeats) - len(meta.shape)
    if lead < 0 or any(r < 0 for r in repeats):
        raise RuleError("repeat dimensions")
    shape = tuple(r * s for r, s in zip(repeats, (1,) * lead + meta.shape, strict=True))
    return TensorMeta(shape, contiguous_strides(shape), meta.dtype, meta.device)


@rule("copy.default")
def _copy(meta: TensorMeta, source: Any, non_blocking: bool = False) -> TensorMeta:
    if type(source) is TensorMeta and broadcast_shapes((meta.shape, source.shape)) != meta.shape:
        raise RuleError("copy does not broadcast")
    return meta.with_(requires_grad=False, storage_offset=0, strides=preserved_strides(meta.shape, meta.strides), is_leaf=True)


@rule("slice_scatter.default")
def _slice_scatter(
    meta: TensorMeta, source: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TensorMeta:
    dim = wrap_dim(dim, len(meta.shape))
    first, last, step = slice_bounds(meta.shape[dim], start, end, step)
    if source.shape != (*meta.shape[:dim], max(-(-(last - first) // step), 0), *meta.shape[dim + 1 :]):
        raise RuleError("slice_scatter of another size")
    return _scatter_into_view(meta, source)


@rule("select_scatter.default", "diagonal_scatter.default", "as_strided_scatter.default")
def _scatter_into_view(meta: TensorMeta, source: TensorMeta, *rest: Any) -> TensorMeta:
    """The whole storage is copied: strides and offset stay, unless elements overlap."""
    if any(stride == 0 and size > 1 for stride, size in zip(meta.strides, meta.shape, strict=True)):
        return _like(meta)
    return TensorMeta(meta.shape, meta.strides, meta.dtype, meta.device, False, meta.storage_offset)


@rule("slice_backward.default", "select_backward.default", "diagonal_backward.default")
def _view_backward(grad: TensorMeta, sizes: Sequence[int], *rest: Any) -> TensorMeta:
    return TensorMeta.contiguous(tuple(sizes), grad.dtype, grad.device)


@rule("nonzero_static.default")
def _nonzero_static(meta: TensorMeta, *, size: int, fill_value: int = -1) -> TensorMeta:
    """Of CUDA: by columns, as `nonzero`'s."""
    if meta.device.type == "cpu" or size < 0:
        raise RuleError("the CPU answers")
    return TensorMeta((size, len(meta.shape)), (1, max(size, 1)), torch.int64, meta.device)
