"""Decompositions of elementwise functions that are formulas of others: logarithms with a meaning at zero, minima without nan, steps, shrinkage."""

from __future__ import annotations

import math
from typing import Any

import torch

from magneto.graph.promotion import COMPLEX, FLOAT, INTEGER, category
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.activations import _elu
from magneto.prims.decompositions.pointwise import _maximum, _minimum
from magneto.prims.decompositions.rows import LIBRARY, elementwise
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()


def _spread(left: Any, right: Any) -> tuple[Value, Value]:
    """Both as Values of one shape; at least one is."""
    like: Value = left if type(left) is Value else right
    first, second = (x if type(x) is Value else like.b.full(like.shape, x, like.dtype, like.device) for x in (left, right))
    return first, second


def _scaled_by(factor: float) -> Any:
    @elementwise(1, "float", exact_numbers=True)
    def formula(x: Value) -> Value:
        return x * factor

    return formula


row("deg2rad")(_scaled_by(math.pi / 180.0))
row("rad2deg")(_scaled_by(180.0 / math.pi))


def _is(number: float) -> Any:
    def test(b: Builder, x: Value) -> Any:
        if category(x.dtype) == COMPLEX:
            return LIBRARY
        return b.full(x.shape, False, torch.bool, x.device) if category(x.dtype) <= INTEGER else x.eq(number)

    return test


row("isposinf")(_is(math.inf))
row("isneginf")(_is(-math.inf))


@row("angle")
@elementwise(1, "float")
def _angle(x: Value) -> Value:
    return x.unary("isnan").where(x, (x < 0.0).where(math.pi, 0.0 * x.unary("sign")))


@row("fmax")
@elementwise(2)
def _fmax(left: Value, right: Value) -> Any:
    if category(left.dtype) != FLOAT:
        return _maximum(left, right)
    return left.unary("isnan").where(right, (right > left).where(right, left))


@row("fmin")
@elementwise(2)
def _fmin(left: Value, right: Value) -> Any:
    if category(left.dtype) != FLOAT:
        return _minimum(left, right)
    return left.unary("isnan").where(right, (right < left).where(right, left))


@row("heaviside")
@elementwise(2)
def _heaviside(x: Value, values: Value) -> Any:
    if x.dtype is torch.bool:
        return LIBRARY
    zero = 0.0 if category(x.dtype) == FLOAT else 0
    return x.eq(zero).where(values, (x > zero).to(x.dtype))


def _times_log(name: str) -> Any:
    @elementwise(2, "float")
    def formula(left: Any, right: Any) -> Value:
        x, y = _spread(left, right)
        return y.unary("isnan").where(math.nan, x.eq(0.0).where(0.0, x * y.unary(name)))

    return formula


row("xlogy")(_times_log("log"))
row("special_xlog1py")(_times_log("log1p"))


@row("special_entr")
@elementwise(1, "float")
def _entr(x: Value) -> Value:
    inner = (x > 0.0).where(-x * x.unary("log"), x.eq(0.0).where(0.0, x.b.full(x.shape, -math.inf, x.dtype, x.device)))
    return x.unary("isnan").where(x, inner)


@row("sinc")
@elementwise(1, "float")
def _sinc(x: Value) -> Value:
    product = x * math.pi
    return x.eq(0.0).where(1.0, product.unary("sin") / product)


@row("softshrink")
@elementwise(1)
def _softshrink(x: Value, bound: Any = 0.5) -> Any:
    if category(x.dtype) != FLOAT:
        return LIBRARY
    edge = float(bound)
    if not 0 <= edge <= torch.finfo(x.dtype).max:
        return LIBRARY  # which raises
    return (x > edge).where(x - edge, (x < -edge).where(x + edge, x * 0.0))


@row("celu")
def _celu(b: Builder, x: Value, alpha: Any = 1.0) -> Any:
    return LIBRARY if category(x.dtype) != FLOAT or not alpha else _elu(b, x, alpha, 1.0, 1.0 / alpha)
