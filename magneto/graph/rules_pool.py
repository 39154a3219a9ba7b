"""Meta rules of pooling, padding and resampling. These kernels keep the input's suggested memory format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import RuleError, contiguous_strides, preserved_strides, suggested_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.rule_table import Rule, rule_table

RULES, rule = rule_table()


def _sizes(values: Sequence[int], count: int) -> list[int]:
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise RuleError("wrong number of pooling parameters")
    return list(values)


def _window(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    reach = size + 2 * pad - dilation * (kernel - 1) - 1
    if stride <= 0 or kernel <= 0 or dilation <= 0 or pad < 0 or 2 * pad > kernel:
        raise RuleError("bad pooling window")
    count = (reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + pad:
        count -= 1
    if count < 1:
        raise RuleError("pooling output is too small")
    return count


def _spatial(meta: TensorMeta, spatial: Sequence[int], dtype: torch.dtype | None = None) -> TensorMeta:
    dims = len(spatial)
    if len(meta.shape) not in (dims + 1, dims + 2) or 0 in meta.shape:
        raise RuleError("rank or emptiness of a pooling input")
    shape = (*meta.shape[:-dims], *spatial)
    return TensorMeta(shape, suggested_strides(shape, meta.is_channels_last()), dtype or meta.dtype, meta.device)


def _max_pool(dims: int) -> Rule:
    def max_pool(
        meta: TensorMeta, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[TensorMeta, TensorMeta]:  # fmt: skip
        size, step = _sizes(kernel, dims), _sizes(stride or kernel, dims)
        pad, spread = _sizes(padding, dims), _sizes(dilation, dims)
        spatial = [_window(meta.shape[d - dims], size[d], step[d], pad[d], spread[d], ceil_mode) for d in range(dims)]
        values = _spatial(meta, spatial)
        return values, values.with_(dtype=torch.int64)

    return max_pool


def _avg_pool(dims: int) -> Rule:
    def avg_pool(
        meta: TensorMeta, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), ceil_mode: bool = False, *rest: Any,
    ) -> TensorMeta:  # fmt: skip
        size, step, pad = _sizes(kernel, dims), _sizes(stride or kernel, dims), _sizes(padding, dims)
        spatial = [_window(meta.shape[d - dims], size[d], step[d], pad[d], 1, ceil_mode) for d in range(dims)]
        if not meta.dtype.is_floating_point:
            raise RuleError("average of integers")
        return _spatial(meta, spatial)

    return avg_pool


def _adaptive(meta: TensorMeta, size: Sequence[int]) -> TensorMeta:
    if any(s <= 0 for s in size) or not meta.dtype.is_floating_point:
        raise RuleError("empty adaptive pooling")
    return _spatial(meta, size)


def _adaptive_max(meta: TensorMeta, size: Sequence[int]) -> tuple[TensorMeta, TensorMeta]:
    values = _adaptive(meta, size)
    return values, values.with_(dtype=torch.int64)


rule("max_pool2d_with_indices.default")(_max_pool(2))
rule("avg_pool2d.default")(_avg_pool(2))
rule("_adaptive_avg_pool2d.default", "adaptive_avg_pool2d.default")(_adaptive)
rule("adaptive_max_pool2d.default")(_adaptive_max)


@rule(
    "max_pool2d_with_indices_backward.default",
    "avg_pool2d_backward.default",
    "_adaptive_avg_pool2d_backward.default",
    "adaptive_max_pool2d_backward.default",
)
def _pool_backward(grad: TensorMeta, value: TensorMeta, *rest: Any) -> TensorMeta:
    if grad.dtype is not value.dtype or len(value.shape) != 4:
        raise RuleError("gradient of pooling")
    return TensorMeta(value.shape, suggested_strides(value.shape, value.is_channels_last()), value.dtype, value.device)


def _upsample(dims: int) -> Rule:
    """upsample_*.default takes the output size; .vec takes an optional size and scale factors."""

    def upsample(meta: TensorMeta, size: Sequence[int] | None, *rest: Any) -> TensorMeta:
        if len(meta.shape) != dims + 2 or 0 in meta.shape[1:]:
            raise RuleError("rank of an upsampling input")
        if size is None:
            scales = rest[-1]
            size = [int(meta.shape[2 + d] * scales[d]) for d in range(dims)]
        if len(size) != dims or any(s <= 0 for s in size):
            raise RuleError("bad upsampling size")
        shape = (*meta.shape[:2], *size)
        return TensorMeta(shape, suggested_strides(shape, meta.is_channels_last()), meta.dtype, meta.device)

    return upsample


for _dims, _names in (
    (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
    (2, "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d"),
    (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
):
    for _name in _names.split():
        rule(f"{_name}.default", f"{_name}.vec")(_upsample(_dims))


@rule("constant_pad_nd.default")
def _constant_pad(meta: TensorMeta, pad: Sequence[int], value: Any = 0) -> TensorMeta:
    """Pads from the last dimension backwards; keeps the suggested memory format."""
    if len(pad) % 2 or len(pad) > 2 * len(meta.shape):
        raise RuleError("bad padding")
    shape = list(meta.shape)
    for pair in range(len(pad) // 2):
        before, after = pad[2 * pair], pad[2 * pair + 1]
        if shape[-1 - pair] + min(before, 0) + min(after, 0) < 0:
            raise RuleError("cuts more than there is")
        shape[-1 - pair] += before + after
    if all(p <= 0 for p in pad):  # a clone of what is left
        return TensorMeta(tuple(shape), preserved_strides(shape, meta.strides), meta.dtype, meta.device)
    return TensorMeta(tuple(shape), suggested_strides(shape, meta.is_channels_last()), meta.dtype, meta.device)


@rule("reflection_pad1d.default", "reflection_pad2d.default", "replication_pad1d.default", "replication_pad2d.default")
def _edge_pad(meta: TensorMeta, pad: Sequence[int]) -> TensorMeta:
    """CUDA's kernels answer in rows."""
    n = len(pad) // 2
    if 0 in meta.shape or len(meta.shape) - n not in (1, 2) or any(not 0 <= p < meta.shape[-1 - i // 2] for i, p in enumerate(pad)):
        raise RuleError("edge padding")
    shape = (*meta.shape[:-n], *(meta.shape[-i] + pad[2 * i - 2] + pad[2 * i - 1] for i in range(n, 0, -1)))
    return TensorMeta(shape, suggested_strides(shape, meta.device.type != "cuda" and meta.is_channels_last()), meta.dtype, meta.device)


@rule("pixel_shuffle.default")
def _pixel_shuffle(meta: TensorMeta, factor: int) -> TensorMeta:
    """CUDA has no kernel for it: the result of dimensions cut and exchanged lies in rows. So in `_pixel_unshuffle`."""
    if len(meta.shape) < 3 or factor <= 0 or meta.shape[-3] % (factor * factor):
        raise RuleError("pixel_shuffle")
    if len(meta.shape) > 3 and not meta.is_contiguous() and meta.device.type != "cuda":
        raise RuleError("layout of pixel_shuffle")
    shape = (*meta.shape[:-3], meta.shape[-3] // factor**2, meta.shape[-2] * factor, meta.shape[-1] * factor)
    return TensorMeta(shape, contiguous_strides(shape), meta.dtype, meta.device)


@rule("pixel_unshuffle.default")
def _pixel_unshuffle(meta: TensorMeta, factor: int) -> TensorMeta:
    if len(meta.shape) < 3 or factor <= 0 or meta.shape[-2] % factor or meta.shape[-1] % factor or meta.device.type != "cuda":
        raise RuleError("pixel_unshuffle")
    shape = (*meta.shape[:-3], meta.shape[-3] * factor**2, meta.shape[-2] // factor, meta.shape[-1] // factor)
    return TensorMeta(shape, contiguous_strides(shape), meta.dtype, meta.device)
