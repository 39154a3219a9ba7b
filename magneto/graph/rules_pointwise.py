"""Meta rules of elementwise operations: broadcast, promote, and the layout of ATen's TensorIterator.

One row per operation: how many leading arguments are operands, and what dtype comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.layout import RuleError, Untried, broadcast_shapes, iterator_strides, preserved_strides
from magneto.graph.meta import CPU, TensorMeta
from magneto.graph.promotion import BOOL, COMPLEX, INTEGER, category, fits, float_type, promote, real_dtype, result_type
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()

# kind -> (number of operands, operations)
_ROWS: tuple[tuple[str, int, str], ...] = (
    (
        "promote",
        1,
        """neg positive square sign relu relu6 ceil floor trunc round frac bitwise_not silu gelu elu selu celu hardswish hardsigmoid hardtanh
        leaky_relu softplus mish softshrink hardshrink threshold log_sigmoid sgn nan_to_num conj_physical fill fix""",
    ),
    (
        "float",
        1,
        """exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc
        erfinv sigmoid lgamma digamma sinc logit i0 special_i0e special_i1 special_ndtri special_log_ndtr special_erfcx
        special_entr special_ndtr""",
    ),
    ("bool", 1, "isnan isinf isfinite isposinf isneginf logical_not signbit"),
    ("real", 1, "abs"),
    (
        "promote",
        2,
        """add sub mul rsub maximum minimum fmax fmin remainder fmod floor_divide pow bitwise_and bitwise_or bitwise_xor bitwise_left_shift
        bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ hypot nextafter gcd lcm _prelu_kernel
        prelu clamp_min clamp_max gelu_backward silu_backward tanh_backward sigmoid_backward hardtanh_backward
        hardswish_backward hardsigmoid_backward softplus_backward mish_backward
        softshrink_backward hardshrink_backward logit_backward""",
    ),
    ("float", 2, "div true_divide atan2 xlogy copysign special_xlog1py special_zeta igamma igammac logaddexp logaddexp2"),
    ("bool", 2, "eq ne lt le gt ge logical_and logical_or logical_xor"),
    ("promote", 3, "addcmul clamp lerp clip"),
    ("float", 3, "addcdiv"),
)


@rule("log_sigmoid_forward.default")
def _log_sigmoid_forward(meta: TensorMeta) -> tuple[TensorMeta, TensorMeta]:
    if meta.device.type == "cpu":
        raise RuleError("the CPU answers")
    return TensorMeta(meta.shape, preserved_strides(meta.shape, meta.strides), meta.dtype, meta.device), TensorMeta.contiguous(
        (0,), meta.dtype, meta.device
    )


@rule("log_sigmoid_backward.default")
def _log_sigmoid_backward(grad: TensorMeta, value: TensorMeta, buffer: TensorMeta) -> TensorMeta:
    """Made like the gradient; the buffer is empty where the kernel has no use for it."""
    if grad.shape != value.shape:
        raise RuleError("log_sigmoid gradient")
    return TensorMeta(grad.shape, preserved_strides(grad.shape, grad.strides), result_type((grad, value)), grad.device)


@rule("heaviside.default")
def _heaviside(value: TensorMeta, values: TensorMeta) -> TensorMeta:
    if value.dtype is not values.dtype:
        raise RuleError("heaviside of two types")
    return elementwise((value, values), value.dtype)


@rule("mvlgamma.default")
def _mvlgamma(value: TensorMeta, p: int) -> TensorMeta:
    """A sum over functions of the value: contiguous."""
    return TensorMeta.contiguous(value.shape, float_type(value.dtype), value.device)


def elementwise(operands: Sequence[Any], dtype: torch.dtype, common: torch.dtype | None = None) -> TensorMeta:
    """The result of one elementwise kernel over TensorMeta and Python numbers (None is skipped). `common`: what operands of other types are converted to
    first, as copies, whose layout then decides."""
    tensors = [operand for operand in operands if type(operand) is TensorMeta]
    if not tensors:
        raise RuleError("no tensor operand")
    first = tensors[0]
    if len(tensors) == 1 and len(operands) == 1:
        shape, strides = first.shape, first.strides
        return TensorMeta(shape, iterator_strides(shape, ((shape, strides),)), dtype, first.device)
    device = first.device
    pairs = []
    for operand in operands:
        if type(operand) is TensorMeta:
            copied = common is not None and operand.dtype is not common
            pairs.append((operand.shape, preserved_strides(operand.shape, operand.strides) if copied else operand.strides))
            if operand.device != device:
                device = _common_device(device, operand, first)
        elif operand is not None:
            pairs.append(((), ()))
    shape = broadcast_shapes([pair[0] for pair in pairs])
    return TensorMeta(shape, iterator_strides(shape, pairs), dtype, device)


def _common_device(device: torch.device, operand: TensorMeta, first: TensorMeta) -> torch.device:
    """0-d CPU tensors mix with tensors of another device."""
    if operand.device == CPU and not operand.shape:
        return device
    if device == CPU and not first.shape:
        return operand.device
    raise RuleError("tensors on different devices")


def _family(kind: str, count: int) -> Callable[..., TensorMeta]:
    def family(*args: Any, **kwargs: Any) -> TensorMeta:
        operands = args[:count]
        if count == 1:
            dtype = operands[0].dtype
        else:
            dtype = result_type(operands)
        if kind == "float":
            dtype = float_type(dtype)
        common = dtype
        if kind == "bool":
            dtype = torch.bool
        elif kind == "real":
            dtype = real_dtype(dtype)
        return elementwise(operands, dtype, common)

    return family


for _kind, _count, _names in _ROWS:
    rule(*_names.split())(_family(_kind, _count))


@rule("div.Tensor_mode", "div.Scalar_mode", "divide.Tensor_mode", "divide.Scalar_mode")
def _div_mode(left: Any, right: Any, *, rounding_mode: str | None) -> TensorMeta:
    dtype = result_type((left, right))
    if rounding_mode is None:
        dtype = float_type(dtype)
    elif category(dtype) == BOOL and rounding_mode == "trunc":
        raise RuleError("rounded division of bool")
    return elementwise((left, right), dtype, dtype)


@rule("add")
def _add(left: Any, right: Any, alpha: Any = 1) -> TensorMeta:
    dtype = result_type((left, right))
    if (
        category(dtype) <= INTEGER
        and isinstance(alpha, float)
        or (isinstance(alpha, bool) and category(dtype) != BOOL)
        or not fits(alpha, dtype)
    ):
        raise RuleError("alpha of a kind that the result has not")
    return elementwise((left, right), dtype, dtype)


@rule("angle")
def _angle(value: TensorMeta) -> TensorMeta:
    if category(value.dtype) == COMPLEX:  # copied out of a complex result
        return TensorMeta.contiguous(value.shape, real_dtype(value.dtype), value.device)
    return elementwise((value,), float_type(real_dtype(value.dtype)))


@rule("rsub")
def _rsub(left: Any, right: Any, alpha: Any = 1) -> TensorMeta:
    return _sub(right, left, alpha)


@rule("sub")
def _sub(left: Any, right: Any, alpha: Any = 1) -> TensorMeta:
    if any(isinstance(operand, bool) or (type(operand) is TensorMeta and operand.dtype is torch.bool) for operand in (left, right)):
        raise RuleError("subtraction of bool")
    return _add(left, right, alpha)


@rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(condition: TensorMeta, left: Any, right: Any) -> TensorMeta:
    if condition.dtype not in (torch.bool, torch.uint8):
        raise RuleError("where expects a boolean condition")
    dtype = result_type((left, right))
    return elementwise((condition.with_(dtype=dtype), left, right), dtype, dtype)  # the condition is never converted


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(value: TensorMeta, mask: TensorMeta, fill: Any) -> TensorMeta:
    """The result is a contiguous clone of the (expanded) input."""
    if mask.dtype is not torch.bool:
        raise RuleError("masked_fill expects a boolean mask")
    if type(fill) is TensorMeta and fill.shape:
        raise RuleError("masked_fill with a value that has dimensions")
    return TensorMeta.contiguous(broadcast_shapes((value.shape, mask.shape)), value.dtype, value.device)


@rule("clamp.default", "clip.default", "clamp_min.default", "clamp_max.default")
def _clamp(value: TensorMeta, *bounds: Any, **kwargs: Any) -> TensorMeta:
    """Scalar bounds promote the result but are no operands of the iteration."""
    bounds += tuple(kwargs.values())
    if all(bound is None for bound in bounds):
        raise RuleError("clamp without bounds")
    return elementwise((value,), result_type((value, *bounds)))


@rule("clamp.Tensor", "clip.Tensor")
def _clamp_tensor(
    value: TensorMeta, low: TensorMeta | None = None, high: TensorMeta | None = None, **named: TensorMeta | None
) -> TensorMeta:
    operands = (value, named.get("min", low), named.get("max", high))
    if operands[1] is None and operands[2] is None:
        raise RuleError("clamp without bounds")
    dtype = result_type(operands)
    return elementwise(operands, dtype, dtype)


@rule("fill.Tensor")
def _fill(value: TensorMeta, fill: TensorMeta) -> TensorMeta:
    if fill.shape:
        raise RuleError("fill with a value that has dimensions")
    return elementwise((value,), value.dtype)


@rule("isin.Tensor_Tensor")
def _isin(elements: TensorMeta, tests: TensorMeta, **kwargs: Any) -> TensorMeta:
    return TensorMeta.contiguous(elements.shape, torch.bool, elements.device)


@rule("elu_backward")
def _elu_backward(grad: TensorMeta, alpha: Any, scale: Any, input_scale: Any, is_result: bool, value: TensorMeta) -> TensorMeta:
    return elementwise((grad, value), result_type((grad, value)))


@rule("pow.Scalar")
def _pow_scalar(base: Any, exponent: TensorMeta) -> TensorMeta:
    return TensorMeta.contiguous(exponent.shape, result_type((base, exponent)), exponent.device)


@rule("threshold_backward", "leaky_relu_backward")
def _threshold_backward(grad: TensorMeta, value: TensorMeta, *parameters: Any) -> TensorMeta:
    """The kernel's first operand is the input, not the gradient."""
    return elementwise((value, grad), result_type((value, grad)))


@rule("complex")
def _complex(real: TensorMeta, imag: TensorMeta) -> TensorMeta:
    if real.dtype is not imag.dtype:
        raise RuleError("complex of different dtypes")
    table = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}
    return elementwise((real, imag), table[real.dtype])


@rule("glu")
def _glu(value: TensorMeta, dim: int = -1) -> TensorMeta:
    rank = len(value.shape)
    if rank == 0 or not -rank <= dim < rank or value.shape[dim] % 2:
        raise RuleError("glu halves an even dimension")
    dim %= rank
    shape = tuple(size // 2 if d == dim else size for d, size in enumerate(value.shape))
    half = TensorMeta(shape, value.strides, value.dtype, value.device)
    return elementwise((half, half), value.dtype)


def _loss_rule(reduction_at: int, weighted: bool = False, same: bool = False) -> Callable[..., TensorMeta]:
    """Losses of (input, target, ...) with `reduction` (0 none, 1 mean, 2 sum) as argument number `reduction_at`."""

    def loss(value: TensorMeta, target: TensorMeta, *rest: Any) -> TensorMeta:
        reduction = rest[reduction_at - 2] if len(rest) > reduction_at - 2 else 1
        operands = (value, target, *(m for m in rest[:1] if weighted and type(m) is TensorMeta))
        dtype = result_type((value, target))
        if category(dtype) == COMPLEX:
            raise RuleError("loss of complex numbers")
        if same and value.dtype is not target.dtype:
            raise RuleError("loss of different dtypes")
        full = elementwise(operands, dtype)
        if same and full.shape == value.shape:  # its kernel writes into an empty_like of the input
            full = full.with_(strides=preserved_strides(value.shape, value.strides))
        return full if reduction == 0 else TensorMeta((), (), dtype, full.device)

    return loss


RULES["aten.mse_loss"] = RULES["aten.smooth_l1_loss"] = RULES["aten.soft_margin_loss"] = _loss_rule(2)
RULES["aten.huber_loss"] = _loss_rule(2, same=True)


def _loss_backward(grad: TensorMeta, value: TensorMeta, target: TensorMeta, *rest: Any) -> TensorMeta:
    """Gradients have the input's shape; kernels write into a zeros_like of it."""
    if grad.shape not in ((), value.shape) or value.shape != target.shape:
        raise RuleError("broadcast gradient of a loss")
    if not value.is_contiguous():
        raise RuleError("layout of a loss gradient")
    return TensorMeta(value.shape, value.strides, promote(value.dtype, target.dtype), value.device)


for _name in ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"):
    RULES[f"aten.{_name}"] = _loss_backward


def _scaled(x: TensorMeta, *args: TensorMeta) -> TensorMeta:
    """`graph/scaled.py`: the last argument is a number."""
    try:
        return elementwise((x, *args[:-1]), x.dtype)
    except RuleError as problem:  # sizes that vary may be equal at some sizes only
        raise Untried(str(problem)) from problem


RULES.update({f"magneto.scaled_{name}": _scaled for name in ("add", "addcmul", "addcdiv", "pow")})
