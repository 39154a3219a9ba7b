"""Decompositions of losses and their gradients. Reduction: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

from typing import Any

import torch

from magneto.graph.layout import broadcast_shapes
from magneto.graph.promotion import FLOAT, category, compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.activations import log_sigmoid
from magneto.prims.decompositions.rows import LIBRARY, common, elementwise, promoted
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()


def _reduced(x: Value, reduction: int) -> Value:
    if reduction == 0:
        return x
    total = x.reduce("sum", range(x.ndim))
    return total / float(x.numel()) if reduction == 1 else total


def _loss(formula: Any, stepwise: bool) -> Any:
    """A loss of (input, target): computed in float32 for half types and rounded once; `stepwise`: the kernel rounds the difference too."""

    def decomposition(b: Builder, x: Value, target: Value, reduction: int = 1, *parameters: Any) -> Any:
        dtype = promoted((x, target))
        if category(dtype) != FLOAT:
            return LIBRARY
        first, second = common((x, target), compute_type(dtype))
        if first.numel() == 0:
            return LIBRARY
        difference = first - second
        elements = formula(difference.to(dtype).to(first.dtype) if stepwise else difference, *parameters)
        if compute_type(dtype) is not dtype:
            elements = elements.to(dtype).to(compute_type(dtype))
        return _reduced(elements, reduction).to(dtype)

    return decomposition


def _squared(difference: Value) -> Value:
    return difference * difference


def _smooth_l1(difference: Value, beta: float = 1.0) -> Value:
    distance = difference.unary("abs")
    if beta == 0:
        return distance
    return (distance < beta).where(0.5 * distance * distance / beta, distance - 0.5 * beta)


def _huber(difference: Value, delta: float = 1.0) -> Value:
    distance = difference.unary("abs")
    return (distance <= delta).where(0.5 * distance * distance, delta * (distance - 0.5 * delta))


row("mse_loss.default")(_loss(_squared, True))
_smooth_l1_loss = _loss(_smooth_l1, False)


@row("smooth_l1_loss.default")
def _smooth_l1_row(b: Builder, x: Value, target: Value, reduction: int = 1, beta: float = 1.0) -> Any:
    return _smooth_l1_loss(b, x, target, reduction, beta) if beta >= 0 else LIBRARY  # which raises


@row("huber_loss.default")
def _huber_row(b: Builder, x: Value, target: Value, reduction: int = 1, delta: float = 1.0) -> Any:
    return _huber_loss(b, x, target, reduction, delta) if delta > 0 else LIBRARY  # which raises


_huber_loss = _loss(_huber, True)


@row("binary_cross_entropy.default")
def _binary_cross_entropy(b: Builder, x: Value, target: Value, weight: Value | None = None, reduction: int = 1) -> Any:
    if x.device.type == "cpu":  # eager raises for what is no probability, NaN among it
        return LIBRARY
    if x.dtype not in (torch.float32, torch.float64) or x.dtype is not target.dtype or x.shape != target.shape or x.numel() == 0:
        return LIBRARY
    near = (-x).unary("log1p").maximum(-100.0)
    far = x.unary("log").maximum(-100.0)
    elements = (target - 1.0) * near - target * far
    if weight is not None:
        elements = elements * weight.to(x.dtype).broadcast(x.shape)
    return _reduced(elements, reduction)


@row("binary_cross_entropy_with_logits.default")
def _binary_cross_entropy_with_logits(
    b: Builder, x: Value, target: Value, weight: Value | None = None, pos_weight: Value | None = None, reduction: int = 1
) -> Any:
    """Operation by operation, each of which eager rounds."""
    dtype = x.dtype
    weights = [w for w in (weight, pos_weight) if w is not None]
    if category(dtype) != FLOAT or any(v.dtype is not dtype for v in (target, *weights)) or x.shape != target.shape or x.numel() == 0:
        return LIBRARY
    if any(broadcast_shapes([w.shape, x.shape]) != x.shape for w in weights):
        return LIBRARY

    def rounded(value: Value) -> Value:
        return value.to(dtype).to(compute_type(dtype))

    x, target, *weights = common((x, target, *weights), compute_type(dtype))
    log = rounded(log_sigmoid(x))
    if pos_weight is not None:
        log = rounded(log * rounded(rounded(rounded(weights[-1] - 1.0) * target) + 1.0))
    elements = rounded(rounded(rounded(1.0 - target) * x) - log)
    return _reduced(rounded(elements * weights[0]) if weight is not None else elements, reduction).to(dtype)


def _gradient(formula: Any) -> Any:
    def decomposition(b: Builder, grad: Value, x: Value, target: Value, reduction: int, *parameters: Any) -> Any:
        if x.shape != target.shape or category(x.dtype) != FLOAT or x.numel() == 0:
            return LIBRARY
        norm = 1.0 / x.numel() if reduction == 1 else 1.0
        return _combine(b, grad, x, target, formula, norm, parameters)

    return decomposition


@elementwise(3)
def _combine(grad: Value, x: Value, target: Value, formula: Any, norm: float, parameters: tuple[Any, ...]) -> Value:
    result: Value = formula(grad, x - target, norm, *parameters)
    return result


def _mse_gradient(grad: Value, difference: Value, norm: float) -> Value:
    return difference * (2.0 * norm) * grad


def _smooth_l1_gradient(grad: Value, difference: Value, norm: float, beta: float) -> Value:
    edge = grad * norm
    inner = edge * difference / beta if beta else edge * 0.0
    return (difference <= -beta).where(-edge, (difference >= beta).where(edge, inner))


row("mse_loss_backward.default")(_gradient(_mse_gradient))
row("smooth_l1_loss_backward.default")(_gradient(_smooth_l1_gradient))


# ---- negative log likelihood ---------------------------------------------------------------------------------------------


def _classes(x: Value, target: Value, ignore_index: int, weight: Value | None) -> tuple[Value, Value, Value | None] | None:
    """Of scores (n, classes) or (n, classes, height, width): whether each target counts, the target or class 0, and its weight; None for what is the library's."""
    fits = x.ndim in (2, 4) and target.shape == (x.shape[0], *x.shape[2:]) and target.dtype is torch.int64
    if (
        not fits
        or not x.numel()
        or category(x.dtype) != FLOAT
        or (weight is not None and (weight.dtype, weight.shape) != (x.dtype, x.shape[1:2]))
    ):
        return None
    counted = target.ne(ignore_index)
    safe = counted.where(target, 0)
    if weight is None:
        return counted, safe, None
    picked = x.b.emit("index_select", weight, 0, safe.reshape((safe.numel(),))).reshape(target.shape)
    return counted, safe, picked.to(compute_type(x.dtype))


@row("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll_loss(b: Builder, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int) -> Any:
    """(loss, total weight): a look-up per row, where `ignore_index` counts nothing."""
    if (found := _classes(x, target, ignore_index, weight)) is None:
        return LIBRARY
    (counted, safe, scale), dtype = found, compute_type(x.dtype)
    one = (x.shape[0], 1, *x.shape[2:])
    picked = b.emit("gather", x, 1, safe.reshape(one)).reshape(target.shape).to(dtype)
    elements = counted.where(-picked if scale is None else -picked * scale, 0.0)
    if reduction == 0:
        return elements.to(x.dtype), b.full((), 0, x.dtype, x.device)
    over = range(target.ndim)
    total = (counted.to(dtype) if scale is None else counted.where(scale, 0.0)).reduce("sum", over)
    loss = elements.reduce("sum", over)
    if reduction == 1:
        loss = loss / total
    return loss.to(x.dtype), total.to(x.dtype)


@row("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_loss_backward(
    b: Builder, grad: Value, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int, total_weight: Value
) -> Any:
    """-grad (over the total weight) at each row's target, zero elsewhere."""
    if (found := _classes(x, target, ignore_index, weight)) is None:
        return LIBRARY
    (counted, _, scale), dtype = found, compute_type(x.dtype)
    value = -grad.to(dtype)
    if reduction == 1:
        value = value / total_weight.to(dtype)
    per_row = value if reduction == 0 else value.broadcast(target.shape)
    per_row = counted.where(per_row if scale is None else per_row * scale, 0.0)
    rest = (0, *range(2, x.ndim))
    hit = b.iota(x.shape[1], torch.int64, x.device).along(x.shape, (1,)).eq(target.along(x.shape, rest))
    return hit.where(per_row.along(x.shape, rest), 0.0).to(x.dtype)
