"""Meta rules of Fourier transforms on CUDA: cuFFT lays its results out otherwise than the CPU's library, which answers for the CPU itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magneto.graph.layout import RuleError, contiguous_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import complex_dtype, real_dtype
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()
AT_ONCE = 3  # dimensions that cuFFT transforms in one call


def _on_gpu(meta: TensorMeta) -> None:
    if meta.device.type != "cuda":
        raise RuleError("the CPU answers")


@rule("_fft_r2c.default")
def _fft_r2c(x: TensorMeta, dim: Sequence[int], normalization: int, onesided: bool) -> TensorMeta:
    dims = _checked(x, dim, (torch.float32, torch.float64))
    half = tuple(n // 2 + 1 if d == dims[-1] else n for d, n in enumerate(x.shape))
    strides: Sequence[int] = x.strides
    if x.storage_offset % 2:  # cuFFT takes pairs of numbers
        order = [*(d for d in range(len(half)) if d != dims[-1]), dims[-1]]
        strides = _unpermuted(contiguous_strides([x.shape[d] for d in order]), order)
    if len(dims) <= AT_ONCE and dims[:2] != [0, 1]:
        return _made(x, half if onesided else x.shape, _executed(strides, half if onesided else x.shape, dims), complex_dtype(x.dtype))
    first = half if onesided or len(dims) > 1 else x.shape
    strides = _in_turns(_executed(strides, first, dims[-1:]), first, dims[:-1])
    if not onesided and half != x.shape:
        strides = contiguous_strides(x.shape)
    return _made(x, half if onesided else x.shape, strides, complex_dtype(x.dtype))


@rule("_fft_c2c.default")
def _fft_c2c(x: TensorMeta, dim: Sequence[int], normalization: int, forward: bool) -> TensorMeta:
    return _made(x, x.shape, _in_turns(x.strides, x.shape, _checked(x, dim, (torch.complex64, torch.complex128))), x.dtype)


@rule("_fft_c2r.default")
def _fft_c2r(x: TensorMeta, dim: Sequence[int], normalization: int, last_dim_size: int) -> TensorMeta:
    dims = _checked(x, dim, (torch.complex64, torch.complex128))
    shape = tuple(last_dim_size if d == dims[-1] else n for d, n in enumerate(x.shape))
    strides: Sequence[int] = contiguous_strides(x.shape)
    if len(dims) <= AT_ONCE and dims[:2] != [0, 1]:
        return _made(x, shape, _executed(strides, shape, dims), real_dtype(x.dtype))
    strides = _in_turns(x.strides, x.shape, dims[:-1]) if len(dims) > 1 else strides
    return _made(x, shape, _executed(strides, shape, dims[-1:]), real_dtype(x.dtype))


def _checked(x: TensorMeta, dim: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[int]:
    _on_gpu(x)
    if x.dtype not in dtypes or not dim or 0 in x.shape:
        raise RuleError("a transform of other numbers, or of none")
    return [d % len(x.shape) for d in dim]


def _made(x: TensorMeta, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(tuple(shape), tuple(strides), dtype, x.device)


def _in_turns(strides: Sequence[int], shape: Sequence[int], dims: Sequence[int]) -> Sequence[int]:
    """Behind complex transforms along `dims`: the innermost in memory first, as many at a time as cuFFT takes."""
    left = list(dims)
    while left:
        left.sort(key=lambda d: -strides[d])
        strides, left = _executed(strides, shape, left[-AT_ONCE:]), left[:-AT_ONCE]
    return strides


def _executed(strides: Sequence[int], shape: Sequence[int], dims: Sequence[int]) -> Sequence[int]:
    """Strides behind one call: batches in their order in memory, and inside them `dims`, the last one innermost."""
    batches = sorted((d for d in range(len(shape)) if d not in dims), key=lambda d: -strides[d])
    order = [*batches, *dims]
    return _unpermuted(contiguous_strides([shape[d] for d in order]), order)


def _unpermuted(strides: Sequence[int], order: Sequence[int]) -> Sequence[int]:
    return [strides[order.index(d)] for d in range(len(order))]
