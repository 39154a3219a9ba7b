"""Type promotion, in one place: the dtype an operation computes in, from its operands' dtypes and ranks.

Operands are TensorMeta or Python scalars. Tensors with dimensions outrank 0-d tensors, which outrank Python scalars; a lower rank only
counts when its category (bool < integer < float < complex) is higher.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from magneto.graph.meta import TensorMeta

BOOL, INTEGER, FLOAT, COMPLEX = range(4)

_CATEGORY: dict[torch.dtype, int] = {torch.bool: BOOL, torch.complex32: COMPLEX, torch.complex64: COMPLEX, torch.complex128: COMPLEX}
_PAIRS: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {}
_REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX_OF = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


def category(dtype: torch.dtype) -> int:
    found = _CATEGORY.get(dtype)
    if found is None:
        found = _CATEGORY[dtype] = FLOAT if dtype.is_floating_point else INTEGER
    return found


def promote(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """The smallest dtype both convert to."""
    if left is right:
        return left
    found = _PAIRS.get((left, right))
    if found is None:
        found = _PAIRS[left, right] = torch.promote_types(left, right)
    return found


def scalar_dtype(value: Any) -> torch.dtype:
    """Dtype a Python number has by itself."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int64
    if isinstance(value, float):
        return torch.get_default_dtype()
    if isinstance(value, complex):
        return complex_dtype(torch.get_default_dtype())
    raise TypeError(f"not a number: {value!r}")


def result_type(operands: Iterable[Any]) -> torch.dtype:
    """`torch.result_type` for any number of TensorMeta and Python numbers (None is ignored)."""
    dimensioned: torch.dtype | None = None
    zero_dim: torch.dtype | None = None
    number: torch.dtype | None = None
    for operand in operands:
        if type(operand) is TensorMeta:
            dtype = operand.dtype
            if operand.shape:
                dimensioned = dtype if dimensioned is None else promote(dimensioned, dtype)
            else:
                zero_dim = dtype if zero_dim is None else promote(zero_dim, dtype)
        elif operand is not None:
            dtype = scalar_dtype(operand)
            number = dtype if number is None else promote(number, dtype)
    return _combine(dimensioned, _combine(zero_dim, number))


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype:
    if higher is None:
        return lower  # type: ignore[return-value]
    if lower is None or category(higher) >= category(lower):
        return higher
    if category(lower) == COMPLEX and category(higher) == FLOAT:
        return complex_dtype(higher)
    return lower


def fits(value: Any, dtype: torch.dtype) -> bool:
    """Whether ATen stores the number in `dtype`, or raises ("cannot be converted ... without overflow"). Unsigned types take negative integers."""
    kind = category(dtype)
    if kind in (BOOL, COMPLEX) or isinstance(value, (bool, complex)):
        return True
    if kind == FLOAT:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    lowest = -info.max if not info.min and isinstance(value, int) else info.min
    return math.isfinite(value) and lowest <= value <= info.max


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    return _COMPLEX_OF.get(dtype, torch.complex64)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return _REAL_OF.get(dtype, dtype)


def float_type(dtype: torch.dtype) -> torch.dtype:
    """Integers and bool compute in the default float; everything else in itself."""
    return torch.get_default_dtype() if category(dtype) <= INTEGER else dtype


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """The wider type in which kernels compute half precision ("opmath")."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Result dtype of sum/prod/cumsum without an explicit one."""
    return torch.int64 if category(dtype) <= INTEGER else dtype


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether an in-place or out variant may store `source` results in a `target` tensor."""
    return category(source) <= category(target) or (category(source) == INTEGER and category(target) == INTEGER)
