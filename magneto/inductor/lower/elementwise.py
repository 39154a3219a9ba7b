"""Lowering of elementwise prims: the body is the prim applied to the operands' values at the same index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from magneto.inductor.loops.ir import Const, Scalar, Size, Value
from magneto.inductor.lower.box import Box, Computed, Index, cost_of
from magneto.inductor.lower.context import CannotLower, Lowering, merge_origins
from magneto.inductor.lower.library import emit_call
from magneto.inductor.lower.values import COMPARISONS, HALF, constant, convert, index_value, make_op

UNARY = (
    "neg abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf floor ceil round trunc sign isnan isinf bitwise_not logical_not lgamma"
).split()
BINARY = (
    "add sub mul div floordiv remainder fmod pow atan2 maximum minimum bitwise_and bitwise_or bitwise_xor shift_left shift_right "
    "eq ne lt le gt ge"
).split()

HEAVY = frozenset(
    "exp exp2 expm1 log log1p log2 log10 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf lgamma pow atan2 fmod "
    "remainder floordiv".split()
)
"""Worth computing once: a library function or an integer division per element."""

BOOL_RESULT = COMPARISONS | {"isnan", "isinf", "logical_not"}

Operand = Box | bool | int | float | complex


def operand(x: Operand, dtype: torch.dtype) -> Box | Value:
    """A Python number becomes a constant of the tensor operands' dtype."""
    return x if isinstance(x, Box) else constant(x, dtype)


def _value(x: Box | Value, index: Index) -> Value:
    return x.load(index) if isinstance(x, Box) else x


def _multiplies(name: str, operands: Sequence[Box | Value]) -> bool:
    """A division of whole numbers by one that is known when kernels are compiled."""
    divisor = operands[-1]
    return name in ("floordiv", "remainder") and isinstance(divisor, Const) and isinstance(divisor.value, int)


def pointwise(
    low: Lowering, name: str, operands: tuple[Box | Value, ...], dtype: torch.dtype, shape: tuple[Size, ...], strides: tuple[Size, ...]
) -> Box:
    """A computed box: prim `name` over operands of equal shape."""
    boxes = [x for x in operands if isinstance(x, Box)]
    ops, heavy, origins, reads = 1, int(name in HEAVY and not (low.on_gpu and _multiplies(name, operands))), low.origins, frozenset[str]()
    for b in boxes:
        o, h, more = cost_of(b)
        ops, heavy, origins, reads = ops + o, heavy + h, merge_origins(more, origins), reads | b.reads

    if len(operands) == 1:
        (a,) = operands

        def fn(index: Index) -> Value:
            return make_op(name, (_value(a, index),), dtype)

    else:

        def fn(index: Index) -> Value:
            return make_op(name, tuple([_value(x, index) for x in operands]), dtype)

    device = boxes[0].device if boxes else torch.device("cpu")
    for b in boxes:
        if b.shape != shape:
            raise CannotLower(f"{name}: operand of shape {b.shape} for a result of shape {shape}")
    return low.computed(Computed(fn, shape, strides, dtype, device, reads, origins, ops, heavy))


def lower_elementwise(name: str, low: Lowering, val: Any, *args: Operand) -> Box:
    """Unary and binary prims. Operands have one dtype; numbers take it."""
    dtypes = {a.dtype for a in args if isinstance(a, Box)}
    if len(dtypes) != 1:
        raise CannotLower(f"{name} of operands of dtypes {sorted(map(str, dtypes))}")
    (dtype,) = dtypes
    if name in BOOL_RESULT and val.dtype is not torch.bool:
        raise CannotLower(f"{name} with a result of {val.dtype}")
    if dtype in HALF and _keeps_precision(name, args, dtype):
        wide = tuple(
            pointwise(low, "convert_element_type", (a,), torch.float32, val.shape, val.strides) if isinstance(a, Box) else a for a in args
        )
        result = lower_elementwise(name, low, replace(val, dtype=torch.float32), *wide)
        return pointwise(low, "convert_element_type", (result,), val.dtype, val.shape, val.strides)
    result = pointwise(
        low, name, tuple(operand(a, dtype) for a in args), torch.bool if name in BOOL_RESULT else dtype, val.shape, val.strides
    )
    if val.dtype is not result.dtype:
        return pointwise(low, "convert_element_type", (result,), val.dtype, val.shape, val.strides)
    return result


def _keeps_precision(name: str, args: tuple[Operand, ...], dtype: torch.dtype) -> bool:
    """Does ATen multiply a half tensor by this number in float32, without rounding the number first? (It does for these two only.)"""
    if len(args) != 2 or not (name == "mul" or (name == "div" and isinstance(args[0], Box))):
        return False
    numbers = [a for a in args if not isinstance(a, Box)]
    return bool(numbers) and constant(numbers[0], dtype).value != numbers[0]


def lower_where(low: Lowering, val: Any, cond: Box, a: Operand, b: Operand) -> Box:
    return pointwise(low, "where", (cond, operand(a, val.dtype), operand(b, val.dtype)), val.dtype, val.shape, val.strides)


def lower_convert(low: Lowering, val: Any, x: Box, dtype: torch.dtype) -> Box:
    if x.dtype is dtype and x.strides == val.strides:
        return x
    return pointwise(low, "convert_element_type", (x,), dtype, val.shape, val.strides)


def lower_full(low: Lowering, val: Any, shape: Any, value: Scalar, dtype: torch.dtype, device: Any = None) -> Box:
    filled = constant(value, dtype)
    return Computed(lambda index: filled, val.shape, val.strides, dtype, val.device, frozenset(), low.origins)


def lower_iota(low: Lowering, val: Any, n: int, dtype: torch.dtype, device: Any = None) -> Box:
    def fn(index: Index) -> Value:
        return convert(index_value(index[0], torch.int64), dtype)

    return Computed(fn, val.shape, val.strides, dtype, val.device, frozenset(), low.origins)


def lower_lgamma(low: Lowering, val: Any, x: Box) -> Any:
    """On a CPU the library's, which has vectors; the C library's takes three times as long."""
    on_cpu = not low.on_gpu and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return emit_call(low, torch.ops.aten.lgamma.default, (x,), {}, val) if on_cpu else lower_elementwise("lgamma", low, val, x)


ROWS: dict[str, Callable[..., Any]] = {name: partial(lower_elementwise, name) for name in (*UNARY, *BINARY)} | {
    "lgamma": lower_lgamma,
    "where": lower_where,
    "convert_element_type": lower_convert,
    "full": lower_full,
    "iota": lower_iota,
}
