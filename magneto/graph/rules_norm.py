"""Meta rules of normalisations and classification losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.fallback import UnsupportedFake
from magneto.graph.layout import (
    RuleError,
    contiguous_strides,
    is_channels_last_contiguous,
    is_contiguous,
    iterator_strides,
    preserved_strides,
    suggested_strides,
)
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def _fresh(shape: Sequence[int], like: TensorMeta, dtype: torch.dtype | None = None) -> TensorMeta:
    shape = tuple(shape)
    return TensorMeta(shape, contiguous_strides(shape), dtype or like.dtype, like.device)


def _statistics_dtype(value: TensorMeta, weight: TensorMeta | None) -> torch.dtype:
    """Mixed precision keeps the statistics in the weight's (float32) dtype."""
    return torch.float32 if weight is not None and weight.dtype is not value.dtype else value.dtype


def _check(value: TensorMeta, shape: tuple[int, ...], parameters: Sequence[TensorMeta | None], wide: bool = True) -> None:
    """Parameters have this shape and the input's type; `wide`: or, of a half type, are all float32. Else eager's kernel raises, each device's in words of its own."""
    given = [p for p in parameters if p is not None]
    kinds = {p.dtype for p in given}
    if any(p.shape != shape for p in given):
        raise RuleError("parameters of a norm do not fit")
    if kinds - {value.dtype} and not (wide and value.dtype.itemsize == 2 and kinds == {torch.float32}):
        raise UnsupportedFake("a norm", "its parameters have another type than its input")


@rule("native_layer_norm.default")
def _layer_norm(
    value: TensorMeta, shape: Sequence[int], weight: TensorMeta | None, bias: TensorMeta | None, eps: float
) -> tuple[TensorMeta, TensorMeta, TensorMeta]:
    normalized = tuple(shape)
    axis = len(value.shape) - len(normalized)
    if not normalized or axis < 0 or value.shape[axis:] != normalized or not value.dtype.is_floating_point:
        raise RuleError("normalized shape does not fit")
    _check(value, normalized, (weight, bias), value.device.type == "cpu")
    out = _fresh(value.shape, value)
    statistics = value.shape[:axis] + (1,) * len(normalized)
    dtype = compute_type(value.dtype) if value.device.type == "cuda" else _statistics_dtype(value, weight)
    mean = _fresh(statistics, value, dtype)
    return out, mean, mean


@rule("native_layer_norm_backward.default")
def _layer_norm_backward(
    grad: Any, value: TensorMeta, shape: Any, mean: Any, rstd: Any, weight: TensorMeta | None, bias: TensorMeta | None, mask: Sequence[bool]
) -> tuple[TensorMeta | None, ...]:
    return (
        _fresh(value.shape, value) if mask[0] else None,
        _fresh(weight.shape, weight) if mask[1] and weight is not None else None,
        _fresh(bias.shape, bias) if mask[2] and bias is not None else None,
    )


@rule("_fused_rms_norm.default")
def _rms_norm(value: TensorMeta, shape: Sequence[int], weight: TensorMeta | None, eps: float | None) -> tuple[TensorMeta, TensorMeta]:
    """Of the devices that have a kernel for it (CUDA): the scale of a row has the type in which it is computed."""
    out, _, scale = _layer_norm(value, shape, weight, None, 0.0)
    return out, _fresh(scale.shape, value, compute_type(value.dtype))


@rule("_fused_rms_norm_backward.default")
def _rms_norm_backward(
    grad: TensorMeta, value: TensorMeta, shape: Sequence[int], rstd: TensorMeta, weight: TensorMeta | None, mask: Sequence[bool]
) -> tuple[TensorMeta | None, ...]:
    return _layer_norm_backward(grad, value, shape, rstd, rstd, weight, None, (*mask, False))[:2]


@rule("native_group_norm.default")
def _group_norm(
    value: TensorMeta, weight: TensorMeta | None, bias: TensorMeta | None, n: int, c: int, hw: int, group: int, eps: float
) -> tuple[TensorMeta, TensorMeta, TensorMeta]:
    if group <= 0 or c % group or value.numel != n * c * hw or not value.dtype.is_floating_point:
        raise RuleError("group norm shapes")
    _check(value, (c,), (weight, bias), value.device.type == "cpu")
    strides = suggested_strides(value.shape, value.is_channels_last())
    out = TensorMeta(value.shape, strides, value.dtype, value.device)
    mean = _fresh((n, group), value, _statistics_dtype(value, weight))
    return out, mean, mean


@rule("native_group_norm_backward.default")
def _group_norm_backward(
    grad: TensorMeta, value: TensorMeta, mean: Any, rstd: Any, weight: TensorMeta | None, n: int, c: int, *rest: Any
) -> tuple[TensorMeta | None, ...]:
    if grad.dtype is not value.dtype or value.is_channels_last():
        raise RuleError("group norm gradient layout")
    mask, parameter = rest[-1], _fresh((c,), value, value.dtype if weight is None else weight.dtype)
    return _fresh(value.shape, value) if mask[0] else None, parameter if mask[1] else None, parameter if mask[2] else None


def _check_batch_norm(value: TensorMeta, parameters: Sequence[TensorMeta | None]) -> None:
    if len(value.shape) < 2 or not value.dtype.is_floating_point or 0 in value.shape:
        raise RuleError("batch norm input")
    _check(value, value.shape[1:2], parameters)


def _batch_norm_out(value: TensorMeta) -> TensorMeta:
    """Layouts that are dense channels-last for some size of 1 count as channels-last here, unlike elsewhere."""
    shape, strides = value.shape, value.strides
    last = not is_contiguous(shape, strides) and (is_channels_last_contiguous(shape, strides) or value.is_channels_last())
    return TensorMeta(shape, suggested_strides(shape, last), value.dtype, value.device)


@rule("native_batch_norm.default", "_native_batch_norm_legit.default")
def _batch_norm(
    value: TensorMeta, weight: TensorMeta | None, bias: TensorMeta | None, running_mean: TensorMeta | None, running_var: TensorMeta | None,
    training: bool, momentum: float, eps: float,
) -> tuple[TensorMeta, TensorMeta, TensorMeta]:  # fmt: skip
    _check_batch_norm(value, (weight, bias, running_mean, running_var))
    if not training and (running_mean is None or running_var is None):
        raise RuleError("inference needs running statistics")
    kept = _fresh((value.shape[1] if training else 0,), value, _batch_statistics_dtype(value, weight, running_mean))
    cudnn = weight is not None and bias is not None and len(value.shape) > 2 and (running_mean is None) == (running_var is None)
    if value.device.type == "cuda" and not cudnn:
        return TensorMeta(value.shape, preserved_strides(value.shape, value.strides), value.dtype, value.device), kept, kept
    return _batch_norm_out(value), kept, kept


@rule("cudnn_batch_norm.default")
def _cudnn_batch_norm(value: TensorMeta, weight: TensorMeta, *rest: Any) -> tuple[TensorMeta, TensorMeta, TensorMeta, TensorMeta]:
    """What eager's batch norm calls on a GPU. Only cuDNN knows the size of what a backward needs; traces see native_batch_norm."""
    _check_batch_norm(value, (weight, *rest[:3]))
    kept = _fresh((value.shape[1] if rest[3] else 0,), weight)
    out = TensorMeta(value.shape, suggested_strides(value.shape, value.is_channels_last()), value.dtype, value.device)
    return out, kept, kept, _fresh((0,), value, torch.uint8)


def _batch_statistics_dtype(value: TensorMeta, weight: TensorMeta | None, running: TensorMeta | None) -> torch.dtype:
    return next((parameter.dtype for parameter in (weight, running) if parameter is not None), value.dtype)


rule("_native_batch_norm_legit.no_stats")(lambda *args: _batch_norm(*(*args[:3], None, None, *args[3:])))
rule("_native_batch_norm_legit_no_training.default")(lambda *args: _batch_norm(*(*args[:5], False, *args[5:])))


@rule("_native_batch_norm_legit_functional.default")
def _batch_norm_functional(*args: Any) -> tuple[TensorMeta, ...]:
    running = (TensorMeta(m.shape, preserved_strides(m.shape, m.strides), m.dtype, m.device) for m in args[3:5])
    return (*_batch_norm(*args), *running)


@rule("native_batch_norm_backward.default")
def _batch_norm_backward(
    grad: TensorMeta, value: TensorMeta, weight: TensorMeta | None, *rest: Any
) -> tuple[TensorMeta | None, TensorMeta | None, TensorMeta | None]:
    mask = rest[-1]
    parameter = _fresh((value.shape[1],), value if weight is None else weight)
    strides = suggested_strides(value.shape, value.is_channels_last())
    given = TensorMeta(value.shape, strides, value.dtype, value.device)
    return given if mask[0] else None, parameter if mask[1] else None, parameter if mask[2] else None


@rule("nll_loss_forward.default")
def _nll_loss(
    value: TensorMeta, target: TensorMeta, weight: TensorMeta | None, reduction: int, ignore_index: int
) -> tuple[TensorMeta, TensorMeta]:
    if len(value.shape) not in (1, 2) or len(target.shape) > 1 or target.dtype not in (torch.int64, torch.uint8):
        raise RuleError("nll_loss input")
    if len(value.shape) == 2 and target.shape != value.shape[:1]:
        raise RuleError("nll_loss batch sizes")
    if weight is not None and weight.shape != value.shape[-1:]:
        raise RuleError("nll_loss weight")
    shape = value.shape[:1] if reduction == 0 and len(value.shape) == 2 else ()
    return _fresh(shape, value), _fresh((), value)


@rule("nll_loss2d_forward.default")
def _nll_loss2d(
    value: TensorMeta, target: TensorMeta, weight: TensorMeta | None, reduction: int, ignore_index: int
) -> tuple[TensorMeta, TensorMeta]:
    if len(value.shape) != 4 or target.shape != (value.shape[0], *value.shape[2:]) or target.dtype is not torch.int64:
        raise RuleError("nll_loss2d input")
    return _fresh(target.shape if reduction == 0 else (), value), _fresh((), value)


@rule("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_loss_backward(grad: TensorMeta, value: TensorMeta, target: TensorMeta, *rest: Any) -> TensorMeta:
    if not value.is_contiguous():
        raise RuleError("layout of an nll_loss gradient")
    return _fresh(value.shape, value)


@rule("binary_cross_entropy.default")
def _binary_cross_entropy(value: TensorMeta, target: TensorMeta, weight: TensorMeta | None = None, reduction: int = 1) -> TensorMeta:
    if value.shape != target.shape or value.dtype is not target.dtype:
        raise RuleError("binary_cross_entropy shapes")
    if reduction != 0:
        return _fresh((), value)
    return TensorMeta(value.shape, iterator_strides(value.shape, ((value.shape, value.strides),)), value.dtype, value.device)
