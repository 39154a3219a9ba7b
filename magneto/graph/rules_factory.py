"""Meta rules of factories and copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import RuleError, contiguous_strides, format_strides
from magneto.graph.meta import CPU, TensorMeta
from magneto.graph.promotion import INTEGER, category, scalar_dtype
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def _made(size: Sequence[int], options: dict[str, Any], dtype: torch.dtype | None = None) -> TensorMeta:
    if any(s < 0 for s in size) or options.get("layout") not in (None, torch.strided):
        raise RuleError("negative size or sparse layout")
    shape = tuple(size)
    dtype = options.get("dtype") or dtype or torch.get_default_dtype()
    device = options.get("device")
    strides = format_strides(shape, contiguous_strides(shape), options.get("memory_format"))
    return TensorMeta(shape, strides, dtype, CPU if device is None else torch.device(device))


@rule("empty.memory_format", "zeros.default", "ones.default", "rand.default", "randn.default", "rand.generator", "randn.generator")
def _filled(size: Sequence[int], **options: Any) -> TensorMeta:
    return _made(size, options)


@rule("full.default")
def _full(size: Sequence[int], value: Any, **options: Any) -> TensorMeta:
    return _made(size, options, scalar_dtype(value))


@rule("scalar_tensor.default")
def _scalar_tensor(value: Any, **options: Any) -> TensorMeta:
    return _made((), options)


@rule("empty_strided.default")
def _empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> TensorMeta:
    made = _made(size, options)
    if len(size) != len(stride):
        raise RuleError("sizes and strides of different lengths")
    return made.with_(strides=tuple(stride))


@rule("empty_permuted.default")
def _empty_permuted(size: Sequence[int], physical: Sequence[int], **options: Any) -> TensorMeta:
    made = _made(size, options)
    strides = [0] * len(size)
    running = 1
    for dim in reversed(physical):
        strides[dim] = running
        running *= max(size[dim], 1)
    return made.with_(strides=tuple(strides))


def _like(meta: TensorMeta, options: dict[str, Any]) -> TensorMeta:
    if options.get("layout") not in (None, torch.strided):
        raise RuleError("sparse layout")
    strides = format_strides(meta.shape, meta.strides, options.get("memory_format"))
    device = options.get("device")
    return TensorMeta(meta.shape, strides, options.get("dtype") or meta.dtype, meta.device if device is None else torch.device(device))


@rule("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "clone", "_to_copy", "randint_like", "full_like")
def _like_rule(meta: TensorMeta, *values: Any, **options: Any) -> TensorMeta:
    return _like(meta, options)


@rule("new_empty", "new_zeros", "new_ones", "new_full")
def _new(meta: TensorMeta, size: Sequence[int], *values: Any, **options: Any) -> TensorMeta:
    if options.get("device") is None:
        options["device"] = meta.device
    return _made(size, options, meta.dtype)


@rule("new_empty_strided")
def _new_strided(meta: TensorMeta, size: Sequence[int], stride: Sequence[int], **options: Any) -> TensorMeta:
    return _new(meta, size, **options).with_(strides=tuple(stride))


@rule("arange.default", "arange.start", "arange.start_step")
def _arange(*bounds: Any, **options: Any) -> TensorMeta:
    start, end, step = _range_bounds(bounds)
    if step == 0 or (end - start) * step < 0:
        raise RuleError("bad arange bounds")
    whole = all(isinstance(b, int) for b in bounds)
    dtype = options.get("dtype") or (torch.int64 if whole else torch.get_default_dtype())
    if category(dtype) <= INTEGER and not whole:
        raise RuleError("an integer arange with float bounds")
    length = -((start - end) // step) if whole else math.ceil((end - start) / step)
    return _made((length,), options, dtype)


def _range_bounds(bounds: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    if len(bounds) == 1:
        return 0, bounds[0], 1
    return (bounds[0], bounds[1], bounds[2] if len(bounds) > 2 else 1)


@rule("linspace.default", "logspace.default")
def _linspace(start: Any, end: Any, steps: int, *base: Any, **options: Any) -> TensorMeta:
    if isinstance(start, complex) or isinstance(end, complex):
        raise RuleError("complex linspace")
    return _made((steps,), options)


@rule("eye.default", "eye.m")
def _eye(rows: int, columns: int | None = None, **options: Any) -> TensorMeta:
    return _made((rows, rows if columns is None else columns), options)


@rule("randperm.default")
def _randperm(count: int, **options: Any) -> TensorMeta:
    return _made((count,), options, torch.int64)


@rule("randint.default", "randint.low")
def _randint(*args: Any, **options: Any) -> TensorMeta:
    return _made(args[-1], options, torch.int64)
