"""Decompositions of layer, group and batch normalisation and their gradients. Statistics are computed in float32 at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from magneto.base.varying import any_size
from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()


@row("native_layer_norm.default")
def _layer_norm(b: Builder, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float) -> Any:
    axis = x.ndim - len(shape)
    inner = tuple(range(axis, x.ndim))
    if x.numel() == 0:
        return LIBRARY
    dtype = compute_type(x.dtype)
    source = x.to(dtype)
    variance, mean = b.var(source, inner, 0.0)
    rstd = (variance + eps).unary("rsqrt")
    result = (source - mean.spread(x.shape, inner)) * rstd.spread(x.shape, inner)
    if weight is not None:
        result = result * weight.to(dtype).along(x.shape, inner)
    if bias is not None:
        result = result + bias.to(dtype).along(x.shape, inner)
    wide = x.device.type == "cuda" or (weight is not None and weight.dtype is not x.dtype)
    statistics = dtype if wide else x.dtype
    return result.to(x.dtype), mean.kept(x.shape, inner).to(statistics), rstd.kept(x.shape, inner).to(statistics)


@row("native_layer_norm_backward.default")
def _layer_norm_backward(
    b: Builder, grad: Value, x: Value, shape: Sequence[int], mean: Value | None, rstd: Value, weight: Value | None, bias: Value | None,
    mask: Sequence[bool],
) -> Any:  # fmt: skip
    axis = x.ndim - len(shape)
    outer, inner = tuple(range(axis)), tuple(range(axis, x.ndim))
    if x.numel() == 0:
        return LIBRARY
    dtype = compute_type(x.dtype)
    g, rs = grad.to(dtype), rstd.to(dtype).broadcast(x.shape)
    normal = (x.to(dtype) if mean is None else x.to(dtype) - mean.to(dtype).broadcast(x.shape)) * rs
    dx = dweight = dbias = None
    if mask[0]:
        scaled = g if weight is None else g * weight.to(dtype).along(x.shape, inner)
        count = float(x.count(inner))
        second = ((scaled * normal).reduce("sum", inner) / count).spread(x.shape, inner)
        centred = scaled if mean is None else scaled - (scaled.reduce("sum", inner) / count).spread(x.shape, inner)
        dx = ((centred - normal * second) * rs).to(x.dtype)
    if mask[1] and weight is not None:
        dweight = (g * normal).reduce("sum", outer).to(weight.dtype) if outer else (g * normal).to(weight.dtype)
    if mask[2] and bias is not None:
        dbias = g.reduce("sum", outer).to(bias.dtype) if outer else g.to(bias.dtype)
    return dx, dweight, dbias


@row("_fused_rms_norm.default")
def _rms_norm(b: Builder, x: Value, shape: Sequence[int], weight: Value | None, eps: float | None) -> Any:
    if x.numel() == 0:
        return LIBRARY
    inner, dtype = tuple(range(x.ndim - len(shape), x.ndim)), compute_type(x.dtype)
    source = x.to(dtype)
    mean = (source * source).reduce("sum", inner) / float(x.count(inner))
    rstd = (mean + (torch.finfo(dtype).eps if eps is None else eps)).unary("rsqrt")
    result = source * rstd.spread(x.shape, inner)
    if weight is not None:
        result = result * weight.to(dtype).along(x.shape, inner)
    return result.to(x.dtype), rstd.kept(x.shape, inner)


@row("_fused_rms_norm_backward.default")
def _rms_norm_backward(
    b: Builder, grad: Value, x: Value, shape: Sequence[int], rstd: Value, weight: Value | None, mask: Sequence[bool]
) -> Any:
    """Of a layer norm that subtracts no mean."""
    results = _layer_norm_backward(b, grad, x, shape, None, rstd, weight, None, (*mask, False))
    return results if results is LIBRARY else results[:2]


# ---- group norm ----------------------------------------------------------------------------------------------------------


@row("native_group_norm.default")
def _group_norm(b: Builder, x: Value, weight: Value | None, bias: Value | None, n: int, c: int, hw: int, group: int, eps: float) -> Any:
    if x.numel() == 0:
        return LIBRARY
    dtype = compute_type(x.dtype)
    rows = x.to(dtype).reshape((n, group, (c // group) * hw))
    variance, mean = b.var(rows, (2,), 0.0)
    rstd = (variance + eps).unary("rsqrt")
    per_channel = (n, group, c // group)
    scale, shift = rstd.spread(per_channel, (2,)), mean.spread(per_channel, (2,))
    if weight is not None:
        scale = scale * weight.to(dtype).reshape((group, c // group)).along(per_channel, (1, 2))
    shift = -scale * shift
    if bias is not None:
        shift = shift + bias.to(dtype).reshape((group, c // group)).along(per_channel, (1, 2))
    full = x.to(dtype)
    result = full * scale.reshape((n, c)).along(x.shape, (0, 1)) + shift.reshape((n, c)).along(x.shape, (0, 1))
    statistics = dtype if weight is not None and weight.dtype is not x.dtype else x.dtype
    return result.to(x.dtype), mean.to(statistics), rstd.to(statistics)


@row("native_group_norm_backward.default")
def _group_norm_backward(
    b: Builder, grad: Value, x: Value, mean: Value, rstd: Value, weight: Value | None, n: int, c: int, hw: int, group: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Everything follows from two sums per image and channel, so that no normalised values are kept: the gradient is a linear form of `grad` and x."""
    if x.numel() == 0:
        return LIBRARY
    dtype = compute_type(x.dtype)
    per_channel, blocks = (n, group, c // group), (n, group, c // group, hw)
    g = grad.to(dtype).reshape(blocks)
    centred = x.to(dtype).reshape(blocks) - mean.to(dtype).along(blocks, (0, 1))
    rs = rstd.to(dtype).reshape((n, group))
    total, product = g.reduce("sum", (3,)), (g * centred).reduce("sum", (3,))
    w = None if weight is None else weight.to(dtype).reshape((group, c // group)).along(per_channel, (1, 2))
    spread = rs.along(per_channel, (0, 1))
    dx = dweight = dbias = None
    if mask[0]:
        count = float((c // group) * hw)
        first, second = ((s if w is None else s * w).reduce("sum", (2,)) / count for s in (total, product))
        scale, slope = spread if w is None else spread * w, second * rs * rs * rs
        dx = g * scale.along(blocks, (0, 1, 2)) - centred * slope.along(blocks, (0, 1)) - (first * rs).along(blocks, (0, 1))
        dx = dx.reshape(x.shape).to(x.dtype)
    parameter = x.dtype if weight is None else weight.dtype
    if mask[1]:
        dweight = (product * spread).reduce("sum", (0,)).reshape((c,)).to(parameter)
    if mask[2]:
        dbias = total.reduce("sum", (0,)).reshape((c,)).to(parameter)
    return dx, dweight, dbias


# ---- batch norm ----------------------------------------------------------------------------------------------------------


def _channels(x: Value) -> tuple[int, ...]:
    """Every dimension but the channel."""
    return (0, *range(2, x.ndim))


def _affine(x: Value, mean: Value, invstd: Value, weight: Value | None, bias: Value | None) -> Value:
    """(x - mean) * invstd * weight + bias, folded into one scale and shift per channel as the CPU kernel does."""
    dtype = mean.dtype
    scale = invstd if weight is None else invstd * weight.to(dtype)
    shift = -(mean * scale) if bias is None else bias.to(dtype) - mean * scale
    return (x.to(dtype) * scale.along(x.shape, (1,)) + shift.along(x.shape, (1,))).to(x.dtype)


def _statistics_type(x: Value, *parameters: Value | None) -> torch.dtype:
    return next((p.dtype for p in parameters if p is not None), x.dtype)


def _inference(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value, eps: float
) -> Value:
    dtype = compute_type(x.dtype)
    invstd = (running_var.to(dtype) + eps).unary("rsqrt")
    return _affine(x, running_mean.to(dtype), invstd, weight, bias)


def _training(b: Builder, x: Value, weight: Value | None, bias: Value | None, eps: float) -> tuple[Value, Value, Value, Value]:
    """(result, mean, invstd, biased variance)."""
    dtype = compute_type(x.dtype)
    variance, mean = b.var(x.to(dtype), _channels(x), 0.0)
    invstd = (variance + eps).unary("rsqrt")
    return _affine(x, mean, invstd, weight, bias), mean, invstd, variance


@row("native_batch_norm.default", "_native_batch_norm_legit.default")
def _batch_norm(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, running_mean: Value | None, running_var: Value | None, training: bool,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Training writes the running statistics: only the functional form is decomposed then."""
    if x.numel() == 0 or (training and (running_mean is not None or running_var is not None)):
        return LIBRARY
    kept = _statistics_type(x, weight, running_mean)
    if training:
        result, mean, invstd, _ = _training(b, x, weight, bias, eps)
        return result, mean.to(kept), invstd.to(kept)
    assert running_mean is not None and running_var is not None
    result = _inference(b, x, weight, bias, running_mean, running_var, eps)
    empty = b.full((0,), 0, kept, x.device)
    return result, empty, empty


@row("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(b: Builder, x: Value, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return _batch_norm(b, x, weight, bias, None, None, training, momentum, eps)


@row("_native_batch_norm_legit_no_training.default")
def _batch_norm_no_training(b: Builder, x: Value, weight: Any, bias: Any, mean: Value, var: Value, momentum: float, eps: float) -> Any:
    return _batch_norm(b, x, weight, bias, mean, var, False, momentum, eps)


@row("_native_batch_norm_legit_functional.default")
def _batch_norm_functional(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, running_mean: Value, running_var: Value, training: bool, momentum: float,
    eps: float,
) -> Any:  # fmt: skip
    if not training:
        results = _batch_norm(b, x, weight, bias, running_mean, running_var, False, momentum, eps)
        return LIBRARY if results is LIBRARY else (*results, running_mean, running_var)
    count = x.count(_channels(x)) if x.numel() else 0
    if count < 2:
        return LIBRARY
    result, mean, invstd, variance = _training(b, x, weight, bias, eps)
    kept = _statistics_type(x, weight, running_mean)
    updated = _updated(running_mean, running_var, mean, variance, momentum, count)
    return result, mean.to(kept), invstd.to(kept), *updated


def _updated(running_mean: Value, running_var: Value, mean: Value, variance: Value, momentum: Any, count: int) -> list[Value]:
    """The running statistics after these, which are of `count` elements. `momentum`: a number, or one for each channel."""
    unbiased = variance / (count - 1) * count if any_size() else variance * (count / (count - 1))  # the quotient tells no count
    return [
        (old.to(mean.dtype) * (1.0 - momentum) + new * momentum).to(old.dtype)
        for old, new in ((running_mean, mean), (running_var, unbiased))
    ]


def _statistics(b: Builder, x: Value, running_mean: Value, running_var: Value, momentum: Value) -> Any:
    """`graph/numbered.py`: the update alone, by a momentum in a tensor."""
    count = x.count(_channels(x)) if x.numel() else 0
    if count < 2:
        return LIBRARY
    variance, mean = b.var(x.to(compute_type(x.dtype)), _channels(x), 0.0)
    weight = momentum.to(mean.dtype).reshape(()).broadcast(mean.shape)
    return tuple(_updated(running_mean, running_var, mean, variance, weight, count))


ROWS["magneto.statistics"] = _statistics


@row("native_batch_norm_backward.default")
def _batch_norm_backward(
    b: Builder, grad: Value, x: Value, weight: Value | None, running_mean: Value | None, running_var: Value | None, save_mean: Value | None,
    save_invstd: Value | None, train: bool, eps: float, mask: Sequence[bool],
) -> Any:  # fmt: skip
    if x.numel() == 0:
        return LIBRARY
    dtype, dims, shape = compute_type(x.dtype), _channels(x), x.shape
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, invstd = save_mean.to(dtype), save_invstd.to(dtype)
    else:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean.to(dtype), (running_var.to(dtype) + eps).unary("rsqrt")
    g = grad.to(dtype)
    centred = x.to(dtype) - mean.along(shape, (1,))
    total = g.reduce("sum", dims)
    product = (g * centred).reduce("sum", dims)
    scale = invstd if weight is None else invstd * weight.to(dtype)
    dx = None
    if mask[0]:
        inner = g
        if train:
            count = float(math.prod(shape[d] for d in dims))
            slope = product * (invstd * invstd) / count
            inner = g - (total / count).along(shape, (1,)) - centred * slope.along(shape, (1,))
        dx = (inner * scale.along(shape, (1,))).to(x.dtype)
    parameter = x.dtype if weight is None else weight.dtype
    return dx, (product * invstd).to(parameter) if mask[1] else None, total.to(parameter) if mask[2] else None
