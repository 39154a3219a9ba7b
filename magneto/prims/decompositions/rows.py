"""How decomposition rows are declared.

A row maps "aten.packet.overload" (or "aten.packet" for every overload) to `fn(b, *args, **kwargs)` over Values. It returns a Value or a
tuple of them (None for an absent result), or LIBRARY when these arguments are better left to the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from magneto.graph.layout import RuleError, broadcast_shapes
from magneto.graph.promotion import COMPLEX, INTEGER, category, compute_type, fits, float_type, result_type
from magneto.prims.value import Builder, Value

Row = Callable[..., Any]


class _Library:
    def __repr__(self) -> str:
        return "LIBRARY"


LIBRARY: Final = _Library()
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
"""What the library's kernels know: types beyond them raise."""


def on_gpu(x: Value) -> bool:
    """There gradients are loops of their own that on a CPU are the library's: its kernels are a pass of their own, slower than what loops fuse with."""
    return x.device.type == "cuda"


def meta_operand(value: Any) -> Any:
    return value.meta if type(value) is Value else value


def promoted(operands: Sequence[Any], kind: str = "promote") -> torch.dtype:
    """The common dtype of Values and numbers; kind "float" turns integers into floats."""
    dtype = result_type([meta_operand(operand) for operand in operands])
    return float_type(dtype) if kind == "float" else dtype


def rounded_number(value: Any, dtype: torch.dtype) -> Any:
    """A number as a kernel sees it once it is stored in `dtype`."""
    if dtype in (torch.float16, torch.bfloat16) and isinstance(value, (int, float)):
        return torch.tensor(value, dtype=torch.float64).to(dtype).item()
    return value


def common(operands: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Values converted to `dtype` and broadcast to their common shape; numbers become numbers of that kind."""
    shapes = [operand.shape for operand in operands if type(operand) is Value]
    shape = broadcast_shapes(shapes)
    result: list[Any] = []
    for operand in operands:
        if type(operand) is Value:
            result.append(operand.to(dtype).broadcast(shape))
        elif operand is None:
            result.append(None)
        else:
            result.append(number_of(operand, dtype))
    return result


def number_of(value: Any, dtype: torch.dtype) -> Any:
    kind = category(dtype)
    if isinstance(value, complex):
        return value
    if kind > INTEGER:
        return float(value)
    return bool(value) if dtype is torch.bool else int(value)


def stored_number(value: Any, dtype: torch.dtype) -> Any:
    """A number that an operation writes into memory of `dtype`: one that does not fit is left to the library, which raises."""
    if not fits(value, dtype):
        raise RuleError(f"{value} does not fit {dtype}")
    return number_of(value, dtype)


def _unrounded(exact_numbers: bool | str, operands: Sequence[Any]) -> bool:
    if exact_numbers != "gpu":
        return bool(exact_numbers)
    return any(type(x) is Value and x.shape and x.device.type != "cpu" for x in operands)


def elementwise(count: int, kind: str = "promote", exact_numbers: bool | str = False) -> Callable[[Row], Row]:
    """Make a row of a formula over `count` operands: promote, broadcast, compute half precision in float32, round the result.

    kind: promote, float (integers become floats) or bool (the formula's result is a truth value).
    exact_numbers: on half precision a number or 0-d tensor takes part unrounded (mul, div; "gpu": not on the CPU: add, sub); other kernels round it to the dtype.
    """

    def wrap(formula: Row) -> Row:
        def row(b: Builder, *args: Any, **kwargs: Any) -> Any:
            operands = args[:count]
            if not any(type(operand) is Value for operand in operands):  # `torch.div(x.size(0), 2, rounding_mode="floor")`
                return LIBRARY
            dtype = promoted(operands, kind)
            if category(dtype) == COMPLEX:
                return LIBRARY
            wide = compute_type(dtype)
            if wide is not dtype and not _unrounded(exact_numbers, operands):
                operands = tuple(x.to(dtype) if type(x) is Value else rounded_number(x, dtype) for x in operands)
            result = formula(*common(operands, wide), *args[count:], **kwargs)
            if result is LIBRARY or kind == "bool":
                return result
            return result.to(dtype)

        return row

    return wrap
