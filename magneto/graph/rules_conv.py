"""Meta rules of convolutions. The CPU kernels answer channels-last when the input or the weight suggests it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import RuleError, contiguous_strides, has_channels_last_strides, suggested_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.narrow import narrow_types
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def _per_dim(values: Sequence[int], count: int) -> Sequence[int]:
    if len(values) == count:
        return values
    if len(values) == 1:
        return list(values) * count
    raise RuleError("wrong number of convolution parameters")


def convolution_shape(
    value: Sequence[int], weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> tuple[int, ...]:  # fmt: skip
    """Output shape (N, C, spatial...); RuleError where eager refuses."""
    dims = len(value) - 2
    if dims not in (1, 2, 3) or len(weight) != len(value) or groups <= 0:
        raise RuleError("rank of a convolution")
    stride, padding, dilation = _per_dim(stride, dims), _per_dim(padding, dims), _per_dim(dilation, dims)
    if any(s <= 0 for s in stride) or any(p < 0 for p in padding) or any(d <= 0 for d in dilation):
        raise RuleError("bad convolution parameters")
    if transposed:
        if value[1] != weight[0] or value[1] % groups:
            raise RuleError("channels of a transposed convolution")
        extra = _per_dim(output_padding, dims)
        spatial = [(value[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (weight[2 + d] - 1) + extra[d] + 1 for d in range(dims)]
        channels = weight[1] * groups
    else:
        if value[1] != weight[1] * groups or weight[0] % groups or weight[0] == 0:
            raise RuleError("channels of a convolution")
        spatial = [(value[2 + d] + 2 * padding[d] - dilation[d] * (weight[2 + d] - 1) - 1) // stride[d] + 1 for d in range(dims)]
        channels = weight[0]
        if any(value[2 + d] + 2 * padding[d] < dilation[d] * (weight[2 + d] - 1) + 1 for d in range(dims)):
            raise RuleError("kernel larger than the input")
    if any(size <= 0 for size in spatial) or 0 in value:
        raise RuleError("empty convolution")
    return (value[0], channels, *spatial)


@rule("convolution.default", "_convolution.default")
def _convolution(
    value: TensorMeta, weight: TensorMeta, bias: TensorMeta | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int, *flags: Any,
) -> TensorMeta:  # fmt: skip
    shape = convolution_shape(value.shape, weight.shape, stride, padding, dilation, transposed, output_padding, groups)
    if value.dtype is not weight.dtype or value.device != weight.device or not value.dtype.is_floating_point:
        raise RuleError("convolution of different or integer dtypes")
    if bias is not None and (bias.dtype is not weight.dtype or bias.shape != (shape[1],)):
        raise RuleError("convolution bias")
    return TensorMeta(shape, _answered_strides(value, weight, shape, stride, dilation, groups), value.dtype, value.device)


def _without_onednn(value: TensorMeta, weight: TensorMeta, stride: Sequence[int], dilation: Sequence[int], groups: int) -> bool:
    """ATen's choice of its own kernels on the CPU, which know no channels-last volumes: for float64, halves without instructions, and for what it finds too small for oneDNN."""
    if value.dtype is not torch.float32:
        return value.dtype is torch.float64 or value.dtype in narrow_types()
    batch, height, width = value.shape[0], weight.shape[-2], weight.shape[-1]
    if height == width == 1 and batch < 16 and {*stride, *dilation} == {1} and torch.get_num_threads() == 1:
        return True
    return groups == batch == 1 and not (height > 3 and width > 3) and math.prod(value.shape[:4]) <= 20480


def _answered_strides(
    value: TensorMeta, weight: TensorMeta, shape: tuple[int, ...], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> tuple[int, ...]:
    """Strides of what a kernel answers with this shape. One-dimensional ones see an image of height 1, its input made contiguous. cuDNN's know no channels-last in double."""
    on_cpu = value.device.type == "cpu"
    if (len(shape) == 5 and _without_onednn(value, weight, stride, dilation, groups)) if on_cpu else value.dtype is torch.float64:
        return contiguous_strides(shape)
    if len(shape) != 3:
        return suggested_strides(shape, value.is_channels_last() or weight.is_channels_last())
    (out, channels, width), (step, between, along) = weight.shape, weight.strides
    channels_last = has_channels_last_strides((out, channels, 1, width), (step, between, width * along, along))
    first, second, _, last = suggested_strides((*shape[:2], 1, shape[2]), channels_last)
    return first, second, last


@rule("convolution_backward.default")
def _convolution_backward(
    grad: TensorMeta, value: TensorMeta, weight: TensorMeta, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[TensorMeta | None, ...]:
    choice, mask = (rest[0], rest[2], rest[5]), rest[-1]

    def like(meta: TensorMeta, wanted: bool) -> TensorMeta | None:
        strides = _answered_strides(value, weight, meta.shape, *choice)
        if (
            meta is weight
            and len(meta.shape) == 4
            and (choice[-1] == 1 or value.dtype in narrow_types())
            and meta.device.type == "cpu"
            and _without_onednn(value, weight, *choice)
        ):
            if all(n == 1 or s == t for n, s, t in zip(meta.shape, meta.strides, suggested_strides(meta.shape, True), strict=True)):
                strides = suggested_strides(meta.shape, meta.is_channels_last())  # channels-last as it is: not copied
        return TensorMeta(meta.shape, strides, meta.dtype, meta.device) if wanted else None

    bias_shape = (grad.shape[1],)
    bias = TensorMeta(bias_shape, contiguous_strides(bias_shape), grad.dtype, grad.device) if mask[2] else None
    return like(value, mask[0]), like(weight, mask[1]), bias
