"""Numpy meanings of the prims: the executable specification that tests compare against. Not for speed."""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Array = Any

_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_, torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64,
    torch.float16: np.float16, torch.bfloat16: np.float32, torch.float32: np.float32, torch.float64: np.float64,
    torch.complex64: np.complex64, torch.complex128: np.complex128,
}  # fmt: skip


def numpy_dtype(dtype: torch.dtype) -> Any:
    """The numpy dtype (float32 for bfloat16); KeyError for other types that numpy lacks."""
    return _DTYPES[dtype]


def round_bfloat16(x: Array) -> Array:
    """float32 numbers rounded to the nearest that bfloat16 has, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    kept = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, kept.reshape(np.shape(x)))


def rounded(fn: Callable[..., Array], category: str) -> Callable[..., Array]:
    """Python numbers take the array operand's dtype; floats are computed in float64 and rounded once."""

    def meaning(*operands: Any) -> Array:
        dtype = next(operand.dtype for operand in operands if isinstance(operand, (np.ndarray, np.generic)))
        wide = np.dtype(np.float64) if dtype.kind == "f" and fn is not floordiv else dtype
        with np.errstate(all="ignore"):
            result = np.asarray(fn(*[np.asarray(operand).astype(dtype).astype(wide) for operand in operands]))
        return result if result.dtype == np.bool_ else result.astype(dtype)

    return meaning


def rsqrt(x: Array) -> Array:
    return 1 / np.sqrt(x)


def reciprocal(x: Array) -> Array:
    return 1 / x


def sign(x: Array) -> Array:
    """nan has sign 0, as in torch."""
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _lgamma(x: float) -> float:
    if math.isinf(x):
        return math.inf
    if math.isnan(x):
        return math.nan
    return math.inf if x <= 0 and x == math.floor(x) else math.lgamma(x)


erf = np.vectorize(math.erf, otypes=[np.float64])
lgamma = np.vectorize(_lgamma, otypes=[np.float64])


def floordiv(a: Array, b: Array) -> Array:
    return np.where(b == 0, a / b, np.floor_divide(a, b)) if np.issubdtype(a.dtype, np.floating) else np.floor_divide(a, b)


def remainder(a: Array, b: Array) -> Array:
    """The sign of the divisor; a zero keeps the dividend's sign."""
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def maximum(a: Array, b: Array) -> Array:
    """Of equal operands (zeros of either sign) the second; nan wins."""
    return np.where((a > b) | (a != a), a, b)


def minimum(a: Array, b: Array) -> Array:
    return np.where((a < b) | (a != a), a, b)


def shift_left(a: Array, b: Array) -> Array:
    """Shifts of the width or more, and negative ones, give 0."""
    bits = a.dtype.itemsize * 8
    return np.where((b < 0) | (b >= bits), 0, np.left_shift(a, np.clip(b, 0, bits - 1)))


def shift_right(a: Array, b: Array) -> Array:
    """Too large and negative shifts leave only the sign."""
    bits = a.dtype.itemsize * 8
    far = (b < 0) | (b >= bits)
    shifted = np.right_shift(a, np.where(far, bits - 1, b))
    return shifted if np.issubdtype(a.dtype, np.signedinteger) else np.where(far, 0, shifted)


def where(condition: Array, a: Any, b: Any) -> Array:
    dtype = a.dtype if isinstance(a, (np.ndarray, np.generic)) else b.dtype
    return np.where(condition, np.asarray(a).astype(dtype), np.asarray(b).astype(dtype))


def convert(x: Array, dtype: torch.dtype) -> Array:
    """Half precision is reached through float32, as in torch."""
    with np.errstate(all="ignore"):
        if dtype in (torch.float16, torch.bfloat16):
            x = np.asarray(x).astype(np.float32)
        converted = np.asarray(x).astype(numpy_dtype(dtype))
    return round_bfloat16(converted) if dtype is torch.bfloat16 else converted


def _accumulated(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Floats accumulate in float64 and are rounded once; integers and bool accumulate in int64."""

    def reduce(x: Array, dims: Sequence[int]) -> Array:
        wide = x.astype(np.int64 if x.dtype.kind in "bui" else np.float64)
        result = np.asarray(fn(wide, axis=tuple(dims)))
        return result.astype(np.int64 if x.dtype.kind in "bui" else x.dtype)

    return reduce


def _plain(fn: Callable[..., Array]) -> Callable[..., Array]:
    def reduce(x: Array, dims: Sequence[int]) -> Array:
        return np.asarray(fn(x, axis=tuple(dims)))

    return reduce


REDUCTIONS: dict[str, Callable[..., Array]] = {
    "sum": _accumulated(np.sum), "prod": _accumulated(np.prod), "amax": _plain(np.max), "amin": _plain(np.min), "any": _plain(np.any),
    "all": _plain(np.all), "argmax": lambda x, dim: np.asarray(np.argmax(x, axis=dim), dtype=np.int64),
    "argmin": lambda x, dim: np.asarray(np.argmin(x, axis=dim), dtype=np.int64),
}  # fmt: skip


def var(x: Array, dims: Sequence[int], correction: float = 1) -> tuple[Array, Array]:
    axes = tuple(dims)
    wide = x.astype(np.float64)
    count = math.prod(x.shape[d] for d in axes)
    mean = wide.mean(axis=axes, keepdims=True)
    with np.errstate(all="ignore"):
        spread = ((wide - mean) ** 2).sum(axis=axes) / np.float64(max(0, count - correction))
    return np.asarray(spread, dtype=x.dtype), np.asarray(mean.squeeze(axes), dtype=x.dtype)


def broadcast_in_dim(x: Array, shape: Sequence[int], dims: Sequence[int]) -> Array:
    order = builtins.sorted(range(len(dims)), key=lambda i: dims[i])
    sizes = [1] * len(shape)
    for dim, size in zip(dims, x.shape, strict=True):
        sizes[dim] = size
    return np.broadcast_to(np.transpose(x, order).reshape(sizes), tuple(shape))


def slice_(x: Array, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int]) -> Array:
    return x[tuple(builtins.slice(start, limit, step) for start, limit, step in zip(starts, limits, steps, strict=True))]


def flip(x: Array, dims: Sequence[int]) -> Array:
    return np.flip(x, tuple(dims))


def cat(xs: Sequence[Array], dim: int) -> Array:
    return np.concatenate(list(xs), dim)


def pad(x: Array, lo: Sequence[int], hi: Sequence[int], value: Any) -> Array:
    return np.pad(x, list(zip(lo, hi, strict=True)), constant_values=value)


def iota(n: int, dtype: torch.dtype, device: Any = None) -> Array:
    return np.arange(n).astype(numpy_dtype(dtype))


def full(shape: Sequence[int], value: Any, dtype: torch.dtype, device: Any = None) -> Array:
    return np.full(tuple(shape), np.asarray(value).astype(numpy_dtype(dtype)))


def _checked(index: Array, size: int) -> Array:
    if index.size and not (index.min() >= 0 and index.max() < size):
        raise IndexError("index out of range")
    return index


def index_select(x: Array, dim: int, index: Array) -> Array:
    return np.take(x, _checked(index, x.shape[dim]), axis=dim)


def gather(x: Array, dim: int, index: Array) -> Array:
    grids = np.ogrid[tuple(builtins.slice(0, size) for size in index.shape)] if index.ndim else []
    position = [_checked(index, x.shape[d]) if d == dim else grid for d, grid in enumerate(grids)]
    return x[tuple(position)] if index.ndim else x


def _windows(x: Array, size: Sequence[int], step: Any, pad: Any, dilation: Any, count: Any) -> tuple[Array, Array]:
    """All elements of each window one behind the other: the first of those that are the maximum, or the last nan."""
    taps, inside, each = [], [], [*zip(range(x.ndim - len(size), x.ndim), step, pad, dilation, count, strict=True)]
    for at in itertools.product(*map(range, size)):
        tap, known = x, np.ones((1,) * x.ndim, bool)
        for i, (axis, s, p, d, c) in zip(at, each, strict=True):
            where_ = np.arange(c) * s - p + i * d
            tap = np.take(tap, where_.clip(0, x.shape[axis] - 1), axis)
            known = known & ((where_ >= 0) & (where_ < x.shape[axis])).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        taps.append(tap)
        inside.append(np.broadcast_to(known, tap.shape))
    v, ok = np.stack(taps), np.stack(inside)
    nan = np.isnan(v) & ok
    first = np.argmax(ok & (v == np.where(ok, v, -np.inf).max(0)), 0)
    place = np.where(nan.any(0), len(v) - 1 - np.argmax(nan[::-1], 0), first)
    return np.take_along_axis(v, place[None], 0)[0], place.astype(np.int8)


def window_max(*args: Any) -> Array:
    return _windows(*args)[0]


def window_argmax(*args: Any) -> Array:
    return _windows(*args)[1]
