"""Decompositions of operations that move elements: diagonals, turns, pixels to channels and back, look-ups in flat memory order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import wrap_dim
from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import FLOATS, LIBRARY, common, on_gpu
from magneto.prims.decompositions.views import _flip, _slice_backward
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()


@row("narrow_copy.default")
def _narrow_copy(b: Builder, x: Value, dim: int, start: int, length: int) -> Any:
    if not x.ndim:
        return LIBRARY
    dim = wrap_dim(dim, x.ndim)
    first = start + x.shape[dim] if start < 0 else start
    return x.narrow(dim, first, first + length)


@row("diagonal.default", "diagonal_copy.default")
def _diagonal(b: Builder, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Both dimensions as one, of which every (columns + 1)-th element is taken."""
    first, second = wrap_dim(dim1, x.ndim), wrap_dim(dim2, x.ndim)
    rest = [d for d in range(x.ndim) if d not in (first, second)]
    rows, columns = x.shape[first], x.shape[second]
    count = min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns)
    if count <= 0:
        return LIBRARY
    shape = [x.shape[d] for d in rest]
    flat = x.transpose([*rest, first, second]).reshape([*shape, rows * columns])
    start = offset if offset >= 0 else -offset * columns
    return flat.narrow(len(rest), start, start + (count - 1) * (columns + 1) + 1, columns + 1)


def _on_diagonal(b: Builder, x: Value, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Any:
    """Zeros of these sizes with `x` on a diagonal."""
    first, second = wrap_dim(dim1, len(sizes)), wrap_dim(dim2, len(sizes))
    rest = [d for d in range(len(sizes)) if d not in (first, second)]
    rows, columns, shape = sizes[first], sizes[second], [sizes[d] for d in rest]
    if not on_gpu(x) or not x.numel():
        return LIBRARY
    start = offset if offset >= 0 else -offset * columns
    end = start + (x.shape[-1] - 1) * (columns + 1) + 1
    flat = _slice_backward(b, x, [*shape, rows * columns], len(rest), start, end, columns + 1)
    order = [*rest, first, second]
    return flat if flat is LIBRARY else flat.reshape([*shape, rows, columns]).transpose([order.index(d) for d in range(len(sizes))])


@row("diagonal_backward.default")
def _diagonal_backward(b: Builder, grad: Value, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Any:
    return _on_diagonal(b, grad, sizes, offset, dim1, dim2)


@row("diag_embed.default")
def _diag_embed(b: Builder, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    rank = x.ndim + 1
    if wrap_dim(dim1, rank) == wrap_dim(dim2, rank):
        return LIBRARY  # which raises
    rest = iter(x.shape[:-1])
    diagonal = {wrap_dim(dim1, rank), wrap_dim(dim2, rank)}
    sizes = [x.shape[-1] + abs(offset) if d in diagonal else next(rest) for d in range(rank)]
    return _on_diagonal(b, x, sizes, offset, dim1, dim2)


@row("linalg_cross.default")
def _cross(b: Builder, x: Value, other: Value, dim: int = -1) -> Any:
    """As one loop with what is around it."""
    if x.dtype not in FLOATS or other.dtype is not x.dtype:
        return LIBRARY
    dim = wrap_dim(dim, x.ndim)
    if x.ndim != other.ndim or not x.numel() or not other.numel():
        return LIBRARY
    dtype = x.dtype
    x, other = common([x, other], compute_type(dtype))
    places = [b.emit("remainder", b.iota(3, device=x.device) + shift, 3) for shift in (1, 2)]
    turned = [[b.emit("index_select", one, dim, place) for place in places] for one in (x, other)]
    return (turned[0][0] * turned[1][1] - turned[0][1] * turned[1][0]).to(dtype)


@row("trace.default")
def _trace(b: Builder, x: Value) -> Any:
    diagonal: Any = _diagonal(b, x) if x.ndim == 2 and x.dtype in (torch.float32, torch.float64, torch.int64) else LIBRARY
    return LIBRARY if diagonal is LIBRARY else diagonal.reduce("sum", (0,))


@row("rot90.default")
def _rot90(b: Builder, x: Value, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    if len(dims) != 2 or x.ndim < 2:
        return LIBRARY
    first, second = wrap_dim(dims[0], x.ndim), wrap_dim(dims[1], x.ndim)
    order = list(range(x.ndim))
    order[first], order[second] = second, first
    turns = k % 4
    if turns == 1:
        return _flip(b, x, [second]).transpose(order)
    if turns == 3:
        return _flip(b, x, [first]).transpose(order)
    return _flip(b, x, [first, second]) if turns else x


@row("pixel_shuffle.default")
def _pixel_shuffle(b: Builder, x: Value, factor: int) -> Any:
    *lead, c, h, w = x.shape
    n, inner = len(lead), c // (factor * factor)
    apart = x.reshape([*lead, inner, factor, factor, h, w])
    return apart.transpose([*range(n), n, n + 3, n + 1, n + 4, n + 2]).reshape([*lead, inner, h * factor, w * factor])


@row("pixel_unshuffle.default")
def _pixel_unshuffle(b: Builder, x: Value, factor: int) -> Any:
    *lead, c, h, w = x.shape
    n = len(lead)
    apart = x.reshape([*lead, c, h // factor, factor, w // factor, factor])
    return apart.transpose([*range(n), n, n + 2, n + 4, n + 1, n + 3]).reshape([*lead, c * factor * factor, h // factor, w // factor])


@row("channel_shuffle.default")
def _channel_shuffle(b: Builder, x: Value, groups: int) -> Any:
    n, c, *rest = x.shape
    apart = x.reshape([n, groups, c // groups, *rest])
    return apart.transpose([0, 2, 1, *range(3, 3 + len(rest))]).reshape(x.shape)


@row("take.default")
def _take(b: Builder, x: Value, index: Value) -> Any:
    """Indices into the elements in order of rows; negative ones count from the end."""
    if index.dtype is not torch.int64 or not x.numel():
        return LIBRARY
    wrapped = (index < 0).where(index + x.numel(), index)
    return b.emit("index_select", x.reshape((x.numel(),)), 0, wrapped)
