"""Decompositions of views (without aliasing, as in functional graphs), concatenation and index arithmetic on shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import inferred_shape, is_contiguous, wrap_dim, wrap_dims
from magneto.graph.promotion import COMPLEX, INTEGER, category, result_type
from magneto.graph.rule_table import rule_table
from magneto.graph.rules_view import slice_bounds
from magneto.prims.decompositions.rows import LIBRARY, on_gpu, stored_number
from magneto.prims.table import PRIMS
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()


@row("alias.default", "detach.default", "lift_fresh.default", "alias_copy.default", "detach_copy.default")
def _alias(b: Builder, x: Value) -> Value:
    return x


@row("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default")
def _view(b: Builder, x: Value, size: Sequence[int]) -> Value:
    return x.reshape(inferred_shape(size, x.numel()))


@row("_reshape_alias.default")
def _reshape_alias(b: Builder, x: Value, size: Sequence[int], stride: Sequence[int]) -> Value:
    return x.reshape(size)


@row("as_strided.default")
def _as_strided(b: Builder, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Of a value's elements in one dimension, in memory order (as the tracer gives them). Inputs have a storage that only the library knows."""
    if x.ndim != 1 or x.node.op != "call_function" or not x.meta.is_contiguous() or 0 in size:
        return LIBRARY
    first = offset or 0
    if is_contiguous(size, stride):
        return x.narrow(0, first, first + math.prod(size)).reshape(size)
    index = b.full((), first, torch.int64, x.device).broadcast(size)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        if count > 1 and step:
            index = index + (b.iota(count, torch.int64, x.device) * step).along(size, (dim,))
    return b.emit("index_select", x, 0, index)


@row("permute.default", "permute_copy.default")
def _permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return x.transpose([wrap_dim(dim, x.ndim) for dim in dims])


@row("transpose.int", "transpose_copy.int")
def _transpose(b: Builder, x: Value, dim0: int, dim1: int) -> Value:
    if not x.ndim:
        return x
    order = list(range(x.ndim))
    left, right = wrap_dim(dim0, x.ndim), wrap_dim(dim1, x.ndim)
    order[left], order[right] = order[right], order[left]
    return x.transpose(order)


@row("t.default", "numpy_T.default", "t_copy.default")
def _t(b: Builder, x: Value) -> Value:
    return x.transpose(range(x.ndim - 1, -1, -1))


@row("expand.default", "expand_copy.default")
def _expand(b: Builder, x: Value, size: Sequence[int], *, implicit: bool = False) -> Value:
    lead = len(size) - x.ndim
    return x.broadcast([x.shape[d - lead] if s == -1 else s for d, s in enumerate(size)])


@row("slice.Tensor", "slice_copy.Tensor")
def _slice(b: Builder, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    dim = wrap_dim(dim, x.ndim)
    first, last, step = slice_bounds(x.shape[dim], start, end, step)
    return x.narrow(dim, first, last, step)


@row("select.int", "select_copy.int")
def _select(b: Builder, x: Value, dim: int, index: int) -> Value:
    dim = wrap_dim(dim, x.ndim)
    index %= x.shape[dim]
    return x.narrow(dim, index, index + 1).reshape(x.shape[:dim] + x.shape[dim + 1 :])


@row("squeeze", "squeeze_copy")
def _squeeze(b: Builder, x: Value, dims: Any = None) -> Value:
    chosen = range(x.ndim) if dims is None else [wrap_dim(d, x.ndim) for d in ((dims,) if isinstance(dims, int) else dims)]
    return x.reshape([size for d, size in enumerate(x.shape) if not (d in chosen and size == 1)])


@row("unsqueeze.default", "unsqueeze_copy.default")
def _unsqueeze(b: Builder, x: Value, dim: int) -> Value:
    dim = wrap_dim(dim, x.ndim + 1)
    return x.reshape((*x.shape[:dim], 1, *x.shape[dim:]))


def _pieces(x: Value, dim: int, sizes: Sequence[int]) -> tuple[Value, ...]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(x.narrow(dim, start, start + size))
        start += size
    return tuple(pieces)


@row("split.Tensor", "unsafe_split.Tensor", "split_copy.Tensor")
def _split(b: Builder, x: Value, size: int, dim: int = 0) -> Any:
    dim = wrap_dim(dim, x.ndim)
    total = x.shape[dim]
    count = max((total + size - 1) // size, 1) if size else 1
    return _pieces(x, dim, [size] * (count - 1) + [total - size * (count - 1)])


@row("split_with_sizes.default", "unsafe_split_with_sizes.default", "split_with_sizes_copy.default", "split.sizes")
def _split_with_sizes(b: Builder, x: Value, sizes: Sequence[int], dim: int = 0) -> Any:
    return _pieces(x, wrap_dim(dim, x.ndim), sizes)


@row("unbind.int", "unbind_copy.int")
def _unbind(b: Builder, x: Value, dim: int = 0) -> Any:
    dim = wrap_dim(dim, x.ndim)
    return tuple(_select(b, x, dim, index) for index in range(x.shape[dim]))


# ---- joining -------------------------------------------------------------------------------------------------------------


@row("cat.default")
def _cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Any:
    parts = [x for x in tensors if x.shape != (0,)]
    dtype = result_type([x.meta for x in tensors])
    if not parts or category(dtype) == COMPLEX:
        return LIBRARY
    return b.cat([x.to(dtype) for x in parts], wrap_dim(dim, parts[0].ndim))


@row("stack.default")
def _stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Any:
    dim = wrap_dim(dim, tensors[0].ndim + 1)
    dtype = result_type([x.meta for x in tensors])
    if category(dtype) == COMPLEX:
        return LIBRARY
    return b.cat([_unsqueeze(b, x.to(dtype), dim) for x in tensors], dim)


@row("repeat.default")
def _repeat(b: Builder, x: Value, repeats: Sequence[int]) -> Value:
    """Each dimension becomes (repeat, size), then the pairs are joined."""
    shape = (1,) * (len(repeats) - x.ndim) + x.shape
    pairs = [size for repeat, own in zip(repeats, shape, strict=True) for size in (repeat, own)]
    wide = x.reshape(shape).along(pairs, range(1, 2 * len(shape), 2))
    return wide.reshape([repeat * own for repeat, own in zip(repeats, shape, strict=True)])


@row("flip.default")
def _flip(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return b.emit("flip", x, wrap_dims(dims, x.ndim)) if dims and x.ndim else x


@row("roll.default")
def _roll(b: Builder, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not x.numel():
        return x
    if not dims:
        return _rolled(b, x.reshape((x.numel(),)), shifts[0], 0).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(b, x, shift, wrap_dim(dim, x.ndim))
    return x


def _rolled(b: Builder, x: Value, shift: int, dim: int) -> Value:
    cut = -shift % x.shape[dim]
    return x if not cut else b.cat([x.narrow(dim, cut, x.shape[dim]), x.narrow(dim, 0, cut)], dim)


@row("constant_pad_nd.default")
def _constant_pad(b: Builder, x: Value, pad: Sequence[int], value: Any = 0) -> Any:
    """Negative amounts cut."""
    if category(x.dtype) == COMPLEX:
        return LIBRARY
    lo, hi = [0] * x.ndim, [0] * x.ndim
    for pair in range(len(pad) // 2):
        dim = x.ndim - 1 - pair
        lo[dim], hi[dim] = pad[2 * pair], pad[2 * pair + 1]
    for dim in range(x.ndim):
        x = x.narrow(dim, max(-lo[dim], 0), x.shape[dim] - max(-hi[dim], 0))
    return _padded(b, x, [max(n, 0) for n in lo], [max(n, 0) for n in hi], value)


def _padded(b: Builder, x: Value, lo: Sequence[int], hi: Sequence[int], value: Any) -> Value:
    return b.emit("pad", x, tuple(lo), tuple(hi), stored_number(value, x.dtype)) if any(lo) or any(hi) else x


def _padded_along(b: Builder, x: Value, dim: int, before: int, after: int) -> Value:
    lo, hi = [0] * x.ndim, [0] * x.ndim
    lo[dim], hi[dim] = before, after
    return _padded(b, x, lo, hi, 0)


# ---- writing into views, functionally ------------------------------------------------------------------------------------


@row("slice_scatter.default")
def _slice_scatter(b: Builder, x: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim = wrap_dim(dim, x.ndim)
    size = x.shape[dim]
    first, last, step = slice_bounds(size, start, end, step)
    if category(x.dtype) == COMPLEX or (step != 1 and not _stepped(x, dim) and _in_memory(x)):
        return LIBRARY
    source = source.to(x.dtype)
    if source.shape[dim] == size:
        return source
    if not source.shape[dim]:
        return x
    if step > 1:
        count = source.shape[dim]
        short = first + count * step - size
        groups = _padded_along(b, x.narrow(dim, first, size), dim, 0, short) if short > 0 else x.narrow(dim, first, first + count * step)
        groups = groups.reshape((*x.shape[:dim], count, step, *x.shape[dim + 1 :]))
        made = b.cat([_unsqueeze(b, source, dim + 1), groups.narrow(dim + 1, 1, step)], dim + 1).reshape(
            (*x.shape[:dim], count * step, *x.shape[dim + 1 :])
        )
        return b.cat(
            [*x.narrowed_parts(dim, 0, first), made.narrow(dim, 0, size - first), *x.narrowed_parts(dim, first + count * step, size)], dim
        )
    return b.cat([*x.narrowed_parts(dim, 0, first), source, *x.narrowed_parts(dim, last, size)], dim)


@row("select_scatter.default")
def _select_scatter(b: Builder, x: Value, source: Value, dim: int, index: int) -> Any:
    dim = wrap_dim(dim, x.ndim)
    if not -x.shape[dim] <= index < x.shape[dim]:
        return LIBRARY  # which raises
    index %= x.shape[dim]
    return _slice_scatter(b, x, _unsqueeze(b, source, dim), dim, index, index + 1)


@row("slice_backward.default")
def _slice_backward(b: Builder, grad: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    dim = wrap_dim(dim, len(sizes))
    first, last, step = slice_bounds(sizes[dim], start, end, step)
    if category(grad.dtype) == COMPLEX or (step != 1 and not _stepped(grad, dim)):
        return LIBRARY
    if step > 1 and grad.shape[dim]:
        count = grad.shape[dim] * step
        spread = _padded_along(b, _unsqueeze(b, grad, dim + 1), dim + 1, 0, step - 1)
        grad = spread.reshape((*grad.shape[:dim], count, *grad.shape[dim + 1 :])).narrow(dim, 0, sizes[dim] - first)
        last = min(first + count, sizes[dim])
    return _padded_along(b, grad, dim, first, sizes[dim] - last)


def _in_memory(x: Value) -> bool:
    """Not computed of something in loops that writing could fuse with."""
    return x.node.op == "placeholder" or isinstance(x.node.target, torch._ops.OpOverload) or x.node.target is PRIMS["full"]


def _stepped(x: Value, dim: int) -> bool:
    """Whether elements between which others lie are loops: on a CPU not along the last dimension, where they are no vectors."""
    return on_gpu(x) or dim < x.ndim - 1


@row("select_backward.default")
def _select_backward(b: Builder, grad: Value, sizes: Sequence[int], dim: int, index: int) -> Any:
    if category(grad.dtype) == COMPLEX:
        return LIBRARY
    dim = wrap_dim(dim, len(sizes))
    index %= sizes[dim]
    return _padded_along(b, _unsqueeze(b, grad, dim), dim, index, sizes[dim] - index - 1)


# ---- triangles -----------------------------------------------------------------------------------------------------------


def _triangle(lower: bool) -> Any:
    def decomposition(b: Builder, x: Value, diagonal: int = 0) -> Any:
        if category(x.dtype) == COMPLEX:
            return LIBRARY
        plane = x.shape[-2:]
        rows = b.iota(plane[0], torch.int64, x.device).along(plane, (0,))
        columns = b.iota(plane[1], torch.int64, x.device).along(plane, (1,))
        inside = columns <= rows + diagonal if lower else columns >= rows + diagonal
        zero = False if x.dtype is torch.bool else 0 if category(x.dtype) <= INTEGER else 0.0
        return inside.broadcast(x.shape).where(x, zero)

    return decomposition


row("tril.default")(_triangle(True))
row("triu.default")(_triangle(False))
