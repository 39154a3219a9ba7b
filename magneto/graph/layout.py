"""Stride arithmetic: what ATen decides from shapes and strides alone.

Everything here works on plain tuples of integers, mirrors the observable behaviour of PyTorch's CPU kernels and is tested differentially
(tests/graph/test_layout.py). Strides count elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

Shape = tuple[int, ...]

CHANNELS_LAST_ORDER = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


class RuleError(Exception):
    """A meta rule refuses its arguments; the caller runs the real operation to obtain PyTorch's own error (or its answer)."""


class Untried(RuleError):
    """Arguments with which nothing is run: torch would read beyond memory, or the operation is one of ours."""


def numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Row-major strides; a dimension of size 0 counts as 1, as in ATen."""
    strides = [0] * len(shape)
    running = 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = running
        size = shape[dim]
        if size > 1:
            running *= size
    return tuple(strides)


def ordered_strides(shape: Sequence[int], order: Sequence[int]) -> Shape:
    """Dense strides with `order` listing dimensions from innermost to outermost."""
    strides = [0] * len(shape)
    running = 1
    for dim in order:
        strides[dim] = running
        running *= max(shape[dim], 1)
    return tuple(strides)


def channels_last_strides(shape: Sequence[int]) -> Shape:
    return ordered_strides(shape, CHANNELS_LAST_ORDER[len(shape)])


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    running = 1
    for dim in range(len(shape) - 1, -1, -1):
        size = shape[dim]
        if size == 1:
            continue
        if strides[dim] != running:
            return 0 in shape
        running *= size
    return True


def is_channels_last_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    order = CHANNELS_LAST_ORDER.get(len(shape))
    if order is None:
        return False
    running = 1
    for dim in order:
        size = shape[dim]
        if size != 1:
            if strides[dim] != running:
                return False
            running *= size
    return True


def has_channels_last_strides(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether ATen's `suggest_memory_format` answers channels-last (ambiguous size-1 layouts count as contiguous)."""
    order = CHANNELS_LAST_ORDER.get(len(shape))
    if order is None or strides[1] == 0:
        return False
    least = 0
    for dim in order:
        if shape[dim] == 0 or strides[dim] < least:
            return False
        if dim == 0 and least == strides[1]:
            return False
        least = strides[dim]
        if shape[dim] > 1:
            least *= shape[dim]
    return True


def suggested_strides(shape: Sequence[int], channels_last: bool) -> Shape:
    return channels_last_strides(shape) if channels_last and len(shape) in CHANNELS_LAST_ORDER else contiguous_strides(shape)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Non-overlapping and dense: some permutation of the dimensions is contiguous."""
    if is_contiguous(shape, strides):
        return True
    if len(shape) == 1:
        return shape[0] < 2 or strides[0] == 1
    running = 1
    for stride, size in sorted((strides[d], shape[d]) for d in range(len(shape)) if shape[d] >= 2):
        if stride != running:
            return False
        running *= size
    return True


def overlaps(shape: Sequence[Any], strides: Sequence[Any], repeated: bool = True) -> bool:
    """May two indices mean the same element? Repeated dimensions (stride 0) aside, where `repeated` is False; symbolic sizes are taken not to overlap."""
    if 0 in shape:
        return False
    reach = 0
    for step, size in sorted(
        (t, n) for n, t in zip(shape, strides, strict=True) if type(n) is type(t) is int and n > 1 and (t or repeated)
    ):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


def preserved_strides(shape: Sequence[int], strides: Sequence[int]) -> Shape:
    """Strides of `empty_like(x)` / `clone(x)` under preserve_format."""
    if is_dense(shape, strides):
        return tuple(strides)
    return iterator_strides(tuple(shape), ((tuple(shape), tuple(strides)),), general=True)


def format_strides(shape: Sequence[int], strides: Sequence[int], memory_format: torch.memory_format | None) -> Shape:
    """Strides of a new tensor of this shape; None and preserve_format keep the layout."""
    if memory_format is None or memory_format is torch.preserve_format:
        return preserved_strides(shape, strides)
    if memory_format is torch.contiguous_format:
        return contiguous_strides(shape)
    if (memory_format is torch.channels_last) != (len(shape) == 4) or len(shape) not in CHANNELS_LAST_ORDER:
        raise RuleError("memory format does not fit the rank")
    return channels_last_strides(shape)


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> Shape:
    """NumPy broadcasting; RuleError when the shapes do not fit."""
    first = tuple(shapes[0])
    if all(shape == first for shape in shapes):
        return first
    rank = max(len(shape) for shape in shapes)
    result = [1] * rank
    for shape in shapes:
        offset = rank - len(shape)
        for dim, size in enumerate(shape):
            if size != 1:
                have = result[offset + dim]
                if have == 1:
                    result[offset + dim] = size
                elif have != size:
                    raise RuleError("shapes do not broadcast")
    return tuple(result)


def expanded_strides(shape: Shape, operand_shape: Sequence[int], operand_strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of an operand seen at the broadcast shape (0 where it is broadcast)."""
    offset = len(shape) - len(operand_shape)
    if not offset and shape == operand_shape:
        return tuple(operand_strides)
    result = [0] * len(shape)
    for dim, size in enumerate(operand_shape):
        if not (size == 1 and shape[offset + dim] != 1):
            result[offset + dim] = operand_strides[dim]
    return tuple(result)


def iterator_strides(shape: Shape, operands: Sequence[tuple[Shape, Shape]], general: bool = False) -> Shape:
    """See `_iterator_strides`; equal layers ask the same again and again."""
    return _iterator_strides(shape, tuple(operands), general)


@lru_cache(8192)
def _iterator_strides(shape: Shape, operands: Sequence[tuple[Shape, Shape]], general: bool) -> Shape:
    """Output strides of an elementwise CPU kernel (ATen's TensorIterator) over `operands` = (shape, strides) pairs.

    Same shapes with a common layout keep it; otherwise the dimensions are sorted by the operands' strides, first operand first, and the
    output is dense in that order.
    """
    if not general and all(op_shape == shape for op_shape, _ in operands):
        if all(is_contiguous(shape, strides) for _, strides in operands):
            return contiguous_strides(shape)
        if all(is_channels_last_contiguous(shape, strides) for _, strides in operands):
            return channels_last_strides(shape)
        first = operands[0][1]
        if all(strides == first for _, strides in operands) and is_dense(shape, first):
            return first
    rank = len(shape)
    if rank <= 1:
        return contiguous_strides(shape)
    expanded = [expanded_strides(shape, op_shape, strides) for op_shape, strides in operands if op_shape]
    order = _sorted_dims(shape, expanded)
    if order == list(range(rank - 1, -1, -1)):
        return contiguous_strides(shape)
    strides = [0] * rank
    running = 1
    for dim in order:
        strides[dim] = running
        running *= shape[dim]
    return tuple(strides)


def _sorted_dims(shape: Shape, operands: list[tuple[int, ...]]) -> list[int]:
    """Dimensions from innermost to outermost: an insertion sort that tolerates ambiguous comparisons."""
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        place = i
        for before in range(i - 1, -1, -1):
            verdict = _compare_dims(shape, operands, order[before], order[place])
            if verdict > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif verdict < 0:
                break
    return order


def _compare_dims(shape: Shape, operands: list[tuple[int, ...]], left: int, right: int) -> int:
    """1: `left` belongs outside `right`; -1: inside; 0: ambiguous."""
    for strides in operands:
        a, b = strides[left], strides[right]
        if a == 0 or b == 0:
            continue
        if a < b:
            return -1
        if a > b or shape[left] > shape[right]:
            return 1
    return 0


def view_strides(shape: Shape, strides: Shape, new_shape: Shape) -> Shape | None:
    """Strides that show the same elements at `new_shape` without copying, or None when there are none."""
    if numel(shape) == 0:
        return strides if shape == new_shape else contiguous_strides(new_shape)
    result = [0] * len(new_shape)
    view_dim = len(new_shape) - 1
    chunk_base = strides[-1] if strides else 1
    tensor_count = view_count = 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_count *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != tensor_count * chunk_base):
            while view_dim >= 0 and (view_count < tensor_count or new_shape[view_dim] == 1):
                result[view_dim] = view_count * chunk_base
                view_count *= new_shape[view_dim]
                view_dim -= 1
            if view_count != tensor_count:
                return None
            if dim > 0:
                chunk_base = strides[dim - 1]
                tensor_count = view_count = 1
    if not shape:
        return tuple([1] * len(new_shape))
    return tuple(result) if view_dim == -1 else None


def inferred_shape(shape: Sequence[int], count: int) -> Shape:
    """Resolve one -1 in a requested shape against the number of elements."""
    shape = tuple(shape)
    if -1 not in shape:
        if numel(shape) != count:
            raise RuleError("view size does not match")
        return shape
    known = 1
    for size in shape:
        if size != -1:
            known *= size
    if shape.count(-1) != 1 or known == 0 or count % known or known < 0:
        raise RuleError("view size cannot be inferred")
    return tuple(count // known if size == -1 else size for size in shape)


def wrap_dim(dim: int, rank: int) -> int:
    """Non-negative dimension; a 0-d tensor accepts -1 and 0."""
    limit = max(rank, 1)
    if not -limit <= dim < limit:
        raise RuleError("dimension out of range")
    return dim + limit if dim < 0 else dim


def wrap_dims(dims: Sequence[int] | int | None, rank: int) -> Shape:
    """Sorted distinct dimensions; None or an empty list means all."""
    if dims is None:
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    if not dims:
        return tuple(range(rank))
    result = sorted(wrap_dim(dim, rank) for dim in dims)
    if len(set(result)) != len(result):
        raise RuleError("a dimension appears twice")
    return tuple(result) if rank else ()


def laid_out(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy laid out with `strides`; where they are 0, elements share memory and are written once."""
    made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    target = made
    for dim, stride in enumerate(strides):
        if not stride and result.shape[dim] > 1:
            target, result = target.narrow(dim, 0, 1), result.narrow(dim, 0, 1)
    target.copy_(result)
    return made
