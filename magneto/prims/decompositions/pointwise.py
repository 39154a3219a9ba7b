"""Decompositions of arithmetic, comparisons and logic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from magneto.graph.layout import broadcast_shapes
from magneto.graph.promotion import COMPLEX, FLOAT, INTEGER, category, compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY, common, elementwise, number_of, on_gpu, promoted, stored_number
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()


def _is_int(x: Value) -> bool:
    return category(x.dtype) <= INTEGER


# ---- unary ---------------------------------------------------------------------------------------------------------------


def _unary(name: str) -> Any:
    def formula(x: Value) -> Value:
        return x.unary(name)

    return formula


for _name in (
    "exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf lgamma"
).split():
    row(_name)(elementwise(1, "float")(_unary(_name)))


def _rounding(name: str) -> Any:
    def formula(x: Value) -> Value:
        return x if _is_int(x) else x.unary(name)

    return formula


for _name in ("floor", "ceil", "trunc"):
    row(_name)(elementwise(1)(_rounding(_name)))
row("round.default")(elementwise(1)(_rounding("round")))


@row("neg", "_neg_view")  # the view's memory holds the numbers before negation, which kernels would read
@elementwise(1)
def _neg(x: Value) -> Any:
    return LIBRARY if x.dtype is torch.bool else -x


@row("abs")
@elementwise(1)
def _abs(x: Value) -> Any:
    if x.dtype is torch.bool:
        return LIBRARY
    return x if x.dtype is torch.uint8 else x.unary("abs")


@row("sign", "sgn")
@elementwise(1)
def _sign(x: Value) -> Any:
    return x if x.dtype is torch.bool else x.unary("sign")


@row("positive")
@elementwise(1)
def _positive(x: Value) -> Value:
    return x


@row("frac")
@elementwise(1)
def _frac(x: Value) -> Any:
    return LIBRARY if _is_int(x) else x - x.unary("trunc")


@row("square")
@elementwise(1)
def _square(x: Value) -> Any:
    return LIBRARY if x.dtype is torch.bool else x * x


def _float_test(name: str) -> Any:
    def test(b: Builder, x: Value) -> Any:
        if category(x.dtype) == COMPLEX:
            return LIBRARY
        return b.full(x.shape, False, torch.bool, x.device) if _is_int(x) else x.unary(name)

    return test


row("isnan")(_float_test("isnan"))
row("isinf")(_float_test("isinf"))


@row("isfinite")
def _isfinite(b: Builder, x: Value) -> Any:
    if category(x.dtype) == COMPLEX:
        return LIBRARY
    if _is_int(x):
        return b.full(x.shape, True, torch.bool, x.device)
    return (x.unary("isnan") | x.unary("isinf")).unary("logical_not")


@row("bitwise_not")
def _bitwise_not(b: Builder, x: Value) -> Any:
    if category(x.dtype) > INTEGER:
        return LIBRARY
    return x.unary("logical_not" if x.dtype is torch.bool else "bitwise_not")


@row("logical_not")
def _logical_not(b: Builder, x: Value) -> Any:
    return LIBRARY if category(x.dtype) == COMPLEX else x.unary("logical_not")


@row("nan_to_num.default")
def _nan_to_num(b: Builder, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
    if category(x.dtype) != FLOAT:
        return LIBRARY
    info = torch.finfo(x.dtype)
    largest = float(posinf if posinf is not None else info.max)
    smallest = float(neginf if neginf is not None else info.min)
    inner = x.eq(-math.inf).where(smallest, x)
    inner = x.eq(math.inf).where(largest, inner)
    return x.unary("isnan").where(0.0 if nan is None else float(nan), inner)


# ---- arithmetic ----------------------------------------------------------------------------------------------------------


def _scaled(value: Any, alpha: Any) -> Any:
    """Kernels see the factor in the type that they compute in."""
    if alpha == 1:
        return value
    return value * (stored_number(alpha, value.dtype) if type(value) is Value else alpha)


@row("add.Tensor", "add.Scalar")
@elementwise(2, exact_numbers="gpu")
def _add(left: Any, right: Any, alpha: Any = 1) -> Any:
    if _dtype_of(left, right) is torch.bool:
        return left | right if alpha == 1 else LIBRARY
    return left + _scaled(right, alpha)


@row("sub.Tensor", "sub.Scalar")
@elementwise(2, exact_numbers="gpu")
def _sub(left: Any, right: Any, alpha: Any = 1) -> Any:
    """The kernel adds -alpha times the right side, which shows in the sign of zero."""
    if _dtype_of(left, right) is torch.bool:
        return LIBRARY
    return left - right if alpha == 1 else left + _scaled(right, -alpha)


@row("rsub.Tensor", "rsub.Scalar")
def _rsub(b: Builder, left: Any, right: Any, alpha: Any = 1) -> Any:
    return _sub(b, right, left, alpha)


def _dtype_of(left: Any, right: Any) -> torch.dtype:
    dtype: torch.dtype = (left if type(left) is Value else right).dtype
    return dtype


@row("mul.Tensor", "mul.Scalar")
@elementwise(2, exact_numbers=True)
def _mul(left: Any, right: Any) -> Any:
    if (left if type(left) is Value else right).dtype is torch.bool:
        return left & right
    return left * right


@row("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar")
@elementwise(2, "float", exact_numbers=True)
def _div(left: Any, right: Any) -> Any:
    return _quotient(left, right)


def by_reciprocal(x: Value) -> bool:
    """A GPU's kernels multiply by a number's reciprocal: what is rounded down behind them (a bucket, a step) shows the last bit."""
    return x.device.type == "cuda"


def _quotient(left: Any, right: Any) -> Any:
    if type(right) is Value or not by_reciprocal(left):
        return left / right
    kind = np.float64 if left.dtype is torch.float64 else np.float32
    with np.errstate(all="ignore"):
        return left * float(kind(1) / kind(right))


def _divides_safely(left: Any, right: Any) -> bool:
    """Integer division by a tensor may meet a zero, for which eager raises."""
    dtype = (left if type(left) is Value else right).dtype
    return category(dtype) > INTEGER or (type(right) is not Value and right != 0 and dtype is not torch.bool)


@row("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(b: Builder, left: Any, right: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return _div(b, left, right)
    return _floor_divide(b, left, right) if rounding_mode == "floor" else _trunc_divide(b, left, right)


@row("floor_divide")
@elementwise(2, exact_numbers=True)
def _floor_divide(left: Any, right: Any) -> Any:
    if not _divides_safely(left, right):
        return LIBRARY
    return left._binary("floordiv", right) if type(left) is Value else right._binary("floordiv", left, True)


@elementwise(2, exact_numbers=True)
def _trunc_divide(left: Any, right: Any) -> Any:
    if not _divides_safely(left, right):
        return LIBRARY
    if category((left if type(left) is Value else right).dtype) > INTEGER:
        return _quotient(left, right).unary("trunc")
    return (left - left._binary("fmod", right))._binary("floordiv", right) if type(left) is Value else LIBRARY


@row("remainder")
@elementwise(2)
def _remainder(left: Any, right: Any) -> Any:
    if not _divides_safely(left, right):
        return LIBRARY
    return left._binary("remainder", right) if type(left) is Value else right._binary("remainder", left, True)


@row("fmod")
@elementwise(2)
def _fmod(left: Any, right: Any) -> Any:
    if not _divides_safely(left, right):
        return LIBRARY
    return left._binary("fmod", right) if type(left) is Value else right._binary("fmod", left, True)


@row("atan2")
@elementwise(2, "float")
def _atan2(left: Value, right: Value) -> Value:
    return left._binary("atan2", right)


def _maximum(left: Any, right: Any) -> Any:
    return left | right if left.dtype is torch.bool else left.maximum(right)


def _minimum(left: Any, right: Any) -> Any:
    return left & right if left.dtype is torch.bool else left.minimum(right)


row("maximum", "max.other")(elementwise(2)(_maximum))
row("minimum", "min.other")(elementwise(2)(_minimum))


def _bitwise(name: str) -> Any:
    @elementwise(2)
    def formula(left: Any, right: Any) -> Any:
        if category(_dtype_of(left, right)) == FLOAT:
            return LIBRARY
        return left._binary(name, right) if type(left) is Value else right._binary(name, left)

    return formula


for _op, _aliases in (("and", "__and__"), ("or", "__or__"), ("xor", "__xor__")):
    row(f"bitwise_{_op}", _aliases)(_bitwise(f"bitwise_{_op}"))


def _shift(name: str) -> Any:
    @elementwise(2)
    def formula(left: Any, right: Any) -> Any:
        if type(left) is not Value or category(left.dtype) != INTEGER:
            return LIBRARY
        return left._binary(name, right)

    return formula


row("bitwise_left_shift", "__lshift__")(_shift("shift_left"))
row("bitwise_right_shift", "__rshift__")(_shift("shift_right"))


def _comparison(name: str) -> Any:
    @elementwise(2, "bool")
    def formula(left: Any, right: Any) -> Any:
        return left._binary(name, right) if type(left) is Value else LIBRARY

    return formula


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    row(_name)(_comparison(_name))


def truth(x: Value) -> Value:
    """Whether each element is non-zero."""
    return x if x.dtype is torch.bool else x.ne(0)


def _logical(name: str) -> Any:
    def formula(b: Builder, left: Value, right: Value) -> Any:
        if COMPLEX in (category(left.dtype), category(right.dtype)):
            return LIBRARY
        first, second = common((truth(left), truth(right)), torch.bool)
        return first._binary(name, second)

    return formula


for _name in ("and", "or", "xor"):
    row(f"logical_{_name}")(_logical(f"bitwise_{_name}"))


# ---- pow -----------------------------------------------------------------------------------------------------------------


MOST_PRODUCTS = 8  # as an exponent: two to four roundings, about those of a GPU's own function, which takes as long as a hundred products


def _by_squares(x: Value, exponent: int) -> Value:
    if exponent == 1:
        return x
    half = _by_squares(x, exponent // 2)
    return half * half * x if exponent % 2 else half * half


@row("pow.Tensor_Scalar")
def _pow_scalar(b: Builder, x: Value, exponent: Any) -> Any:
    """The kernel's own special cases."""
    dtype = promoted((x, exponent))
    if category(dtype) == COMPLEX or isinstance(exponent, bool) or dtype is torch.bool:
        return LIBRARY
    if exponent == 0:
        return b.full(x.shape, 1, dtype, x.device)
    if exponent == 1:
        return x.to(dtype)
    wide = x.to(compute_type(dtype))
    if exponent == 2:
        return (wide * wide).to(dtype)
    if exponent == 3:
        return ((wide * wide).to(dtype).to(wide.dtype) * wide).to(dtype)
    if category(dtype) <= INTEGER:
        return LIBRARY
    if on_gpu(x) and 3 <= abs(exponent) <= MOST_PRODUCTS and float(exponent).is_integer():
        power = _by_squares(wide, abs(int(exponent)))
        return (power if exponent > 0 else power.unary("reciprocal")).to(dtype)
    if dtype is torch.float16:  # that kernel knows no special cases
        return wide._binary("pow", float(exponent)).to(dtype)
    if exponent == 0.5:
        return wide.unary("sqrt").to(dtype)
    if exponent == -0.5:
        return wide.unary("rsqrt").to(dtype)
    if exponent == -1:
        return wide.unary("reciprocal").to(dtype)
    if exponent == -2:
        return (wide * wide).to(dtype).to(wide.dtype).unary("reciprocal").to(dtype)
    return wide._binary("pow", float(exponent)).to(dtype)


@row("pow.Tensor_Tensor", "pow.Scalar")
@elementwise(2)
def _pow(base: Any, exponent: Value) -> Any:
    if category(exponent.dtype) <= INTEGER:
        return LIBRARY
    return base._binary("pow", exponent) if type(base) is Value else exponent._binary("pow", base, True)


# ---- choice and combination ----------------------------------------------------------------------------------------------


@row("where.self", "where.ScalarOther", "where.ScalarSelf")
def _where(b: Builder, condition: Value, left: Any, right: Any) -> Any:
    dtype = promoted((left, right))
    if category(dtype) == COMPLEX:
        return LIBRARY
    operands = [operand for operand in (left, right) if type(operand) is Value]
    if not operands:
        return LIBRARY
    shape = broadcast_shapes([condition.shape, *(operand.shape for operand in operands)])
    mark = truth(condition).broadcast(shape)
    first, second = (x.to(dtype).broadcast(shape) if type(x) is Value else number_of(x, dtype) for x in (left, right))
    return mark.where(first, second)


@row("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(b: Builder, x: Value, mask: Value, value: Any) -> Any:
    if category(x.dtype) == COMPLEX or mask.dtype is not torch.bool:
        return LIBRARY
    fill = value.to(x.dtype).broadcast(x.shape) if type(value) is Value else stored_number(value, x.dtype)
    return mask.broadcast(x.shape).where(fill, x)


@row("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_min.Tensor")
def _clamp(b: Builder, x: Value, low: Any = None, high: Any = None, **named: Any) -> Any:
    low, high = named.get("min", low), named.get("max", high)
    if any(isinstance(bound, float) and math.isnan(bound) for bound in (low, high)):
        return LIBRARY
    if x.dtype is torch.bool:
        return LIBRARY
    if category(x.dtype) == INTEGER and any(type(bound) is int and not _fits(bound, x.dtype) for bound in (low, high)):
        return LIBRARY  # which raises
    return _clamped(b, x, low, high)


def _fits(bound: int, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= bound <= limits.max


@row("clamp_max.default", "clamp_max.Tensor")
def _clamp_max(b: Builder, x: Value, high: Any) -> Any:
    return _clamp(b, x, None, high)


@elementwise(3)
def _clamped(x: Value, low: Any, high: Any) -> Any:
    if x.dtype is torch.bool:
        return LIBRARY
    if low is not None:
        x = at_least(x, low)
    return x if high is None else at_most(x, high)


def at_least(x: Value, low: Any) -> Value:
    """maximum, where equal operands (zeros of either sign) give `x`."""
    return x._binary("maximum", low, True)


def at_most(x: Value, high: Any) -> Value:
    """minimum, where equal operands (zeros of either sign) give `x`."""
    return x._binary("minimum", high, True)


@row("lerp.Scalar", "lerp.Tensor")
def _lerp(b: Builder, start: Value, end: Value, weight: Any) -> Any:
    kept = type(weight) is Value and weight.ndim and weight.dtype != start.dtype
    if category(start.dtype) != FLOAT or end.dtype != start.dtype or kept:
        return LIBRARY  # which raises where types differ
    if type(weight) is Value:
        return _lerp_tensor(b, start, end, weight)
    return _lerp_number(b, start, end, weight)


@elementwise(2)
def _lerp_number(start: Value, end: Value, weight: float) -> Value:
    span = end - start
    return start + span * weight if abs(weight) < 0.5 else end - span * (1 - weight)


@elementwise(3)
def _lerp_tensor(start: Value, end: Value, weight: Value) -> Value:
    span = end - start
    return (weight.unary("abs") < 0.5).where(start + weight * span, end - span * (1 - weight))


@row("addcmul")
@elementwise(3)
def _addcmul(x: Value, left: Value, right: Value, *, value: Any = 1) -> Any:
    return LIBRARY if x.dtype is torch.bool else x + _scaled(left, value) * right


@row("addcdiv")
@elementwise(3, "float")
def _addcdiv(x: Value, left: Value, right: Value, *, value: Any = 1) -> Any:
    return x + _scaled(left, value) / right


# ---- updates scaled by a number that lies in a tensor (graph/scaled.py)


def _scaled_row(n: int, formula: Any) -> Any:
    body = elementwise(n)(formula)

    def update(b: Builder, x: Value, *others: Any) -> Value:
        """The number is float64 and must not decide the type, not even where all are 0-dimensional."""
        *tensors, number = others
        single = number.to(x.dtype) if x.dtype in (torch.float32, torch.float64) else number
        result: Value = body(b, x, *tensors, single)
        return result.to(x.dtype)

    return update


ROWS["magneto.scaled_add"] = _scaled_row(3, lambda x, other, number: x + other * number)
ROWS["magneto.scaled_addcmul"] = _scaled_row(4, lambda x, one, two, number: x + one * number * two)
ROWS["magneto.scaled_addcdiv"] = _scaled_row(4, lambda x, one, two, number: x + one * number / two)
ROWS["magneto.scaled_pow"] = _scaled_row(2, lambda x, number: x._binary("pow", number))
