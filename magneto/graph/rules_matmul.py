"""Meta rules of matrix products. Results are contiguous."""

from __future__ import annotations

from typing import Any

import torch

from magneto.graph.layout import RuleError, broadcast_shapes, iterator_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def _product(left: TensorMeta, right: TensorMeta, shape: tuple[int, ...]) -> TensorMeta:
    if left.dtype is not right.dtype or left.device != right.device or left.dtype is torch.bool:
        raise RuleError("operands of different dtypes or devices")
    return TensorMeta.contiguous(shape, left.dtype, left.device)


def _check(condition: bool) -> None:
    if not condition:
        raise RuleError("shapes do not fit a matrix product")


@rule("mm.default")
def _mm(left: TensorMeta, right: TensorMeta) -> TensorMeta:
    _check(len(left.shape) == len(right.shape) == 2 and left.shape[1] == right.shape[0])
    return _product(left, right, (left.shape[0], right.shape[1]))


@rule("bmm.default")
def _bmm(left: TensorMeta, right: TensorMeta) -> TensorMeta:
    _check(len(left.shape) == len(right.shape) == 3 and left.shape[0] == right.shape[0] and left.shape[2] == right.shape[1])
    return _product(left, right, (left.shape[0], left.shape[1], right.shape[2]))


def _added(bias: TensorMeta, result: TensorMeta) -> TensorMeta:
    _check(bias.dtype is result.dtype and len(bias.shape) <= len(result.shape))
    _check(broadcast_shapes((bias.shape, result.shape)) == result.shape)
    return result


@rule("addmm.default", "_addmm_activation.default")
def _addmm(bias: TensorMeta, left: TensorMeta, right: TensorMeta, **scales: Any) -> TensorMeta:
    return _added(bias, _mm(left, right))


@rule("baddbmm.default")
def _baddbmm(bias: TensorMeta, left: TensorMeta, right: TensorMeta, **scales: Any) -> TensorMeta:
    return _added(bias, _bmm(left, right))


@rule("addbmm.default")
def _addbmm(bias: TensorMeta, left: TensorMeta, right: TensorMeta, **scales: Any) -> TensorMeta:
    full = _bmm(left, right)
    return _added(bias, TensorMeta.contiguous(full.shape[1:], full.dtype, full.device))


@rule("mv.default")
def _mv(left: TensorMeta, right: TensorMeta) -> TensorMeta:
    _check(len(left.shape) == 2 and len(right.shape) == 1 and left.shape[1] == right.shape[0])
    return _product(left, right, (left.shape[0],))


@rule("addmv.default")
def _addmv(bias: TensorMeta, left: TensorMeta, right: TensorMeta, **scales: Any) -> TensorMeta:
    return _added(bias, _mv(left, right))


@rule("dot.default", "vdot.default")
def _dot(left: TensorMeta, right: TensorMeta) -> TensorMeta:
    _check(len(left.shape) == len(right.shape) == 1 and left.shape == right.shape)
    return _product(left, right, ())


@rule("addr.default")
def _addr(bias: TensorMeta, left: TensorMeta, right: TensorMeta, **scales: Any) -> TensorMeta:
    """Elementwise: the result's layout follows all three operands."""
    _check(len(left.shape) == len(right.shape) == 1)
    shape = (left.shape[0], right.shape[0])
    column = ((shape[0], 1), (left.strides[0], 1))
    strides = iterator_strides(shape, [(bias.shape, bias.strides), column, (right.shape, right.strides)])
    return _added(bias, _product(left, right, shape).with_(strides=strides))


@rule("linear.default")
def _linear(value: TensorMeta, weight: TensorMeta, bias: TensorMeta | None = None) -> TensorMeta:
    _check(len(weight.shape) == 2 and bool(value.shape) and value.shape[-1] == weight.shape[1])
    result = _product(value, weight, (*value.shape[:-1], weight.shape[0]))
    return result if bias is None else _added(bias, result)
