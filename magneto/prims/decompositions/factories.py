"""Decompositions of factories, copies and fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.meta import CPU
from magneto.graph.promotion import COMPLEX, category, scalar_dtype
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY, stored_number
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()


def _device(options: dict[str, Any], default: torch.device = CPU) -> torch.device:
    device = options.get("device")
    return default if device is None else torch.device(device)


def _filled(b: Builder, size: Sequence[int], value: Any, options: dict[str, Any], dtype: torch.dtype | None, device: torch.device) -> Any:
    dtype = options.get("dtype") or dtype or torch.get_default_dtype()
    if category(dtype) == COMPLEX or isinstance(value, complex) or options.get("layout") not in (None, torch.strided):
        return LIBRARY
    return b.full(size, stored_number(value, dtype), dtype, _device(options, device))


@row("full.default")
def _full(b: Builder, size: Sequence[int], value: Any, **options: Any) -> Any:
    if type(value) is Value:
        return LIBRARY
    return _filled(b, size, value, options, scalar_dtype(value), CPU)


@row("zeros.default", "empty.memory_format", "empty_strided.default")
def _zeros(b: Builder, size: Sequence[int], *stride: Any, **options: Any) -> Any:
    """Uninitialised memory may hold anything: zeros cost nothing once fused."""
    return _filled(b, size, 0, options, None, CPU)


@row("_efficientzerotensor.default")
def _zero_tensor(b: Builder, size: Sequence[int], **options: Any) -> Any:
    """torch's zeros without memory, which derivatives of constants are: kernels read memory."""
    return _filled(b, size, 0, options, None, CPU)


@row("ones.default")
def _ones(b: Builder, size: Sequence[int], **options: Any) -> Any:
    return _filled(b, size, 1, options, None, CPU)


@row("scalar_tensor.default")
def _scalar_tensor(b: Builder, value: Any, **options: Any) -> Any:
    return _filled(b, (), value, options, None, CPU)


@row("zeros_like", "empty_like", "zero")
def _zeros_like(b: Builder, x: Value, **options: Any) -> Any:
    return _filled(b, x.shape, 0, options, x.dtype, x.device)


@row("ones_like")
def _ones_like(b: Builder, x: Value, **options: Any) -> Any:
    return _filled(b, x.shape, 1, options, x.dtype, x.device)


@row("full_like", "fill.Scalar")
def _full_like(b: Builder, x: Value, value: Any, **options: Any) -> Any:
    return _filled(b, x.shape, value, options, x.dtype, x.device)


@row("fill.Tensor")
def _fill_tensor(b: Builder, x: Value, value: Value) -> Any:
    return LIBRARY if category(value.dtype) == COMPLEX else value.to(x.dtype).broadcast(x.shape)


@row("new_zeros", "new_empty", "new_empty_strided")
def _new_zeros(b: Builder, x: Value, size: Sequence[int], *stride: Any, **options: Any) -> Any:
    return _filled(b, size, 0, options, x.dtype, x.device)


@row("new_ones")
def _new_ones(b: Builder, x: Value, size: Sequence[int], **options: Any) -> Any:
    return _filled(b, size, 1, options, x.dtype, x.device)


@row("new_full")
def _new_full(b: Builder, x: Value, size: Sequence[int], value: Any, **options: Any) -> Any:
    return _filled(b, size, value, options, x.dtype, x.device)


@row("arange.default", "arange.start", "arange.start_step")
def _arange(b: Builder, *bounds: Any, **options: Any) -> Any:
    if not all(isinstance(bound, int) for bound in bounds):
        return LIBRARY
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (bounds[0], bounds[1], bounds[2] if len(bounds) > 2 else 1)
    dtype = options.get("dtype") or torch.int64
    if category(dtype) == COMPLEX or dtype in (torch.float16, torch.bfloat16, torch.bool):
        return LIBRARY
    count = -((start - end) // step)
    values = b.iota(count, torch.int64, _device(options))
    if step != 1:
        values = values * step
    if start:
        values = values + start
    return values.to(dtype)


@row("eye.default", "eye.m")
def _eye(b: Builder, rows: int, columns: int | None = None, **options: Any) -> Any:
    dtype = options.get("dtype") or torch.get_default_dtype()
    if category(dtype) == COMPLEX:
        return LIBRARY
    shape = (rows, rows if columns is None else columns)
    device = _device(options)
    return b.iota(shape[0], torch.int64, device).along(shape, (0,)).eq(b.iota(shape[1], torch.int64, device).along(shape, (1,))).to(dtype)


@row("_to_copy.default")
def _to_copy(b: Builder, x: Value | complex, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    """Another device is a library call; the memory format is the caller's business. A number: one that vmap converts as the tensor it is to torch."""
    if not isinstance(x, Value):
        return (
            LIBRARY
            if dtype is None or category(dtype) == COMPLEX
            else b.full((), stored_number(x, dtype), dtype, _device({"device": device}))
        )
    dtype = dtype or x.dtype
    if _device({"device": device}, x.device) != x.device or COMPLEX in (category(dtype), category(x.dtype)):
        return LIBRARY
    return x.to(dtype)


@row("copy.default")
def _copy(b: Builder, x: Value, source: Any, non_blocking: bool = False) -> Any:
    if type(source) is not Value or source.device != x.device or COMPLEX in (category(source.dtype), category(x.dtype)):
        return LIBRARY
    return source.to(x.dtype).broadcast(x.shape)
