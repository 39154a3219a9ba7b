"""Decompositions of activation functions and their gradients, with the formulas of the CPU kernels."""

from __future__ import annotations

import math
from typing import Any

from magneto.graph.promotion import FLOAT, category
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.pointwise import at_least, at_most
from magneto.prims.decompositions.rows import LIBRARY, elementwise, on_gpu
from magneto.prims.value import Value

ROWS, row = rule_table()

_SQRT_HALF = math.sqrt(0.5)
_BETA = math.sqrt(2.0 / math.pi)
_KAPPA = 0.044715
_SIXTH = 0.1666666716337204  # the kernel's constant is 1.0f / 6.0f for every dtype


def _floats(x: Value) -> bool:
    return category(x.dtype) == FLOAT


def _sigmoid(x: Value) -> Value:
    return 1.0 / (1.0 + (-x).unary("exp"))


@row("sigmoid")
@elementwise(1, "float")
def _sigmoid_row(x: Value) -> Value:
    return _sigmoid(x)


@row("sigmoid_backward")
@elementwise(2)
def _sigmoid_backward(grad: Value, output: Value) -> Value:
    return grad * (1.0 - output) * output


@row("tanh_backward")
@elementwise(2)
def _tanh_backward(grad: Value, output: Value) -> Value:
    return grad * (1.0 - output * output)


@row("relu")
@elementwise(1)
def _relu(x: Value) -> Value:
    return at_least(x, 0.0 if _floats(x) else 0)


@row("threshold")
@elementwise(1)
def _threshold(x: Value, threshold: Any, value: Any) -> Any:
    return (x <= threshold).where(float(value), x) if _floats(x) else LIBRARY


@row("threshold_backward")
@elementwise(2)
def _threshold_backward(grad: Value, x: Value, threshold: Any) -> Any:
    return (x <= float(threshold)).where(0.0, grad) if _floats(x) else LIBRARY


@row("gelu")
@elementwise(1)
def _gelu(x: Value, *, approximate: str = "none") -> Value:
    if approximate == "none":
        return x * 0.5 * (1.0 + (x * _SQRT_HALF).unary("erf"))
    inner = _BETA * (x + _KAPPA * (x * x * x))
    return 0.5 * x * (1.0 + inner.unary("tanh"))


@row("gelu_backward")
@elementwise(2)
def _gelu_backward(grad: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "none":
        cdf = 0.5 * (1.0 + (x * _SQRT_HALF).unary("erf"))
        pdf = (x * x * -0.5).unary("exp") * (0.5 * _BETA)
        return grad * (cdf + x * pdf)
    inner = (_BETA * (x + _KAPPA * (x * x * x))).unary("tanh")
    left, right = 0.5 * x, 1.0 + inner
    inner_derivative = _BETA * (1.0 + 3.0 * _KAPPA * (x * x))
    return grad * (0.5 * right + left * (1.0 - inner * inner) * inner_derivative)


@row("silu")
@elementwise(1)
def _silu(x: Value) -> Value:
    return x / (1.0 + (-x).unary("exp"))


@row("silu_backward")
@elementwise(2)
def _silu_backward(grad: Value, x: Value) -> Value:
    sigmoid = _sigmoid(x)
    return grad * sigmoid * (1.0 + x * (1.0 - sigmoid))


@row("mish")
@elementwise(1)
def _mish(x: Value) -> Value:
    return x * x.unary("exp").unary("log1p").unary("tanh")


@row("mish_backward")
@elementwise(2)
def _mish_backward(grad: Value, x: Value) -> Value:
    inner = x.unary("exp").unary("log1p").unary("tanh")
    return grad * (inner + x * _sigmoid(x) * (1.0 - inner * inner))


@row("hardtanh")
@elementwise(1)
def _hardtanh(x: Value, low: Any = -1, high: Any = 1) -> Any:
    return at_most(at_least(x, float(low)), float(high)) if _floats(x) else LIBRARY


@row("hardtanh_backward")
@elementwise(2)
def _hardtanh_backward(grad: Value, x: Value, low: Any, high: Any) -> Value:
    """nan lets the gradient through."""
    return ((x <= float(low)) | (x >= float(high))).where(0.0, grad)


@row("relu6")
@elementwise(1)
def _relu6(x: Value) -> Any:
    return at_most(at_least(x, 0.0), 6.0) if _floats(x) else LIBRARY


@row("hardswish")
@elementwise(1)
def _hardswish(x: Value) -> Value:
    return x * (x + 3.0).maximum(0.0).minimum(6.0) / 6.0


@row("hardswish_backward")
@elementwise(2)
def _hardswish_backward(grad: Value, x: Value) -> Value:
    middle = (x < 3.0).where(grad * (x / 3.0 + 0.5), grad)
    return (x <= -3.0).where(0.0, middle)


@row("hardsigmoid")
@elementwise(1)
def _hardsigmoid(x: Value) -> Value:
    return (x + 3.0).maximum(0.0).minimum(6.0) / 6.0


@row("hardsigmoid_backward")
@elementwise(2)
def _hardsigmoid_backward(grad: Value, x: Value) -> Value:
    return ((x > -3.0) & (x < 3.0)).where(grad * _SIXTH, 0.0)


@row("leaky_relu")
@elementwise(1)
def _leaky_relu(x: Value, slope: Any = 0.01) -> Value:
    return (x > 0.0).where(x, x * float(slope))


@row("leaky_relu_backward")
@elementwise(2)
def _leaky_relu_backward(grad: Value, x: Value, slope: Any, is_result: bool) -> Any:
    if is_result and not slope >= 0:
        return LIBRARY  # which raises
    return (x > 0.0).where(grad, grad * float(slope))


@row("_prelu_kernel")
@elementwise(2)
def _prelu(x: Value, weight: Value) -> Value:
    return (x > 0.0).where(x, weight * x)


@row("_prelu_kernel_backward")
def _prelu_backward(b: Any, grad: Value, x: Value, weight: Value) -> Any:
    """Of the input, and of a weight for each element: its sum fuses with this."""
    return _prelu_of_input(b, grad, x, weight), _prelu_of_weight(b, grad, x)


@elementwise(3)
def _prelu_of_input(grad: Value, x: Value, weight: Value) -> Value:
    return (x > 0.0).where(grad, weight * grad)


@elementwise(2)
def _prelu_of_weight(grad: Value, x: Value) -> Value:
    return (x > 0.0).where(0.0, x * grad)


@row("elu")
@elementwise(1)
def _elu(x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    negative = (x * float(input_scale)).unary("expm1") * float(alpha * scale)
    return (x < 0.0).where(negative, x * float(scale))


@row("elu_backward")
def _elu_backward(b: Any, grad: Value, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Value) -> Any:
    if is_result and not alpha >= 0:
        return LIBRARY  # which raises
    return _elu_gradient(b, grad, x, float(alpha * scale), float(scale), float(input_scale), is_result)


@elementwise(2)
def _elu_gradient(grad: Value, x: Value, negative: float, positive: float, input_scale: float, is_result: bool) -> Value:
    below = grad * input_scale * (x + negative) if is_result else grad * input_scale * negative * (x * input_scale).unary("exp")
    return (x <= 0.0).where(below, grad * positive)


@row("softplus")
@elementwise(1)
def _softplus(x: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    scaled = x * float(beta)
    return (scaled > float(threshold)).where(x, scaled.unary("exp").unary("log1p") / float(beta))


@row("softplus_backward")
@elementwise(2)
def _softplus_backward(grad: Value, x: Value, beta: Any, threshold: Any) -> Value:
    scaled = x * float(beta)
    power = scaled.unary("exp")
    return (scaled > float(threshold)).where(grad, grad * power / (power + 1.0))


@row("log_sigmoid_forward.default")
def _log_sigmoid(b: Any, x: Value) -> Any:
    """(result, what the gradient needs), which is empty elsewhere than on the CPU."""
    if not _floats(x):
        return LIBRARY
    return _log_of_sigmoid(b, x), b.full((0,), 0.0, x.dtype, x.device) if on_gpu(x) else _below_one(b, x)


@elementwise(1)
def _below_one(x: Value) -> Value:
    return (-x.unary("abs")).unary("exp")


def log_sigmoid(x: Value) -> Value:
    """Of floats that are not rounded to half precision."""
    return x.minimum(0.0) - (-x.unary("abs")).unary("exp").unary("log1p")


_log_of_sigmoid = elementwise(1)(log_sigmoid)


@row("log_sigmoid_backward.default")
def _log_sigmoid_backward(b: Any, grad: Value, x: Value, buffer: Value) -> Any:
    if grad.shape != x.shape or not _floats(x):
        return LIBRARY
    if on_gpu(x):
        return _log_sigmoid_gradient_anew(b, grad, x)
    return _log_sigmoid_gradient(b, grad, x, buffer) if buffer.shape == x.shape else LIBRARY


@elementwise(2)
def _log_sigmoid_gradient_anew(grad: Value, x: Value) -> Value:
    return log_sigmoid_gradient(grad, x, (-x.unary("abs")).unary("exp"))


def log_sigmoid_gradient(grad: Value, x: Value, power: Value) -> Value:
    share = power / (1.0 + power)
    return grad * (x < 0.0).where(1.0 - share, share)


_log_sigmoid_gradient = elementwise(3)(log_sigmoid_gradient)


@row("hardshrink")
@elementwise(1)
def _hardshrink(x: Value, bound: Any = 0.5) -> Value:
    return ((x >= -float(bound)) & (x <= float(bound))).where(0.0, x)


@row("glu.default")
def _glu(b: Any, x: Value, dim: int = -1) -> Any:
    dim %= max(x.ndim, 1)
    half = x.shape[dim] // 2
    return _gated(b, x.narrow(dim, 0, half), x.narrow(dim, half, 2 * half))


@elementwise(2)
def _gated(left: Value, right: Value) -> Value:
    return left * _sigmoid(right)


@row("glu_backward.default")
def _glu_backward(b: Any, grad: Value, x: Value, dim: int) -> Any:
    dim %= max(x.ndim, 1)
    half = x.shape[dim] // 2
    left, right = x.narrow(dim, 0, half), x.narrow(dim, half, 2 * half)
    return b.cat([_gated(b, grad, right), _gates_gradient(b, grad, left, right)], dim)


@elementwise(3)
def _gates_gradient(grad: Value, left: Value, right: Value) -> Value:
    gate = _sigmoid(right)
    return (1.0 - gate) * gate * grad * left
