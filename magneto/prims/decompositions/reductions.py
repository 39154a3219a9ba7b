"""Decompositions of reductions, softmax and norms of vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import wrap_dim, wrap_dims
from magneto.graph.promotion import COMPLEX, FLOAT, INTEGER, category, compute_type, sum_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.pointwise import truth
from magneto.prims.decompositions.rows import LIBRARY
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

Dims = Sequence[int] | int | None


def wide(x: Value) -> Value:
    """Half precision in float32."""
    return x.to(compute_type(x.dtype))


@row("sum.default", "sum.dim_IntList")
def _sum(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    dtype = dtype or sum_type(x.dtype)
    if category(dtype) == COMPLEX:
        return LIBRARY
    over = wrap_dims(dims, x.ndim)
    if category(dtype) == FLOAT or dtype is torch.int64:
        return wide(x.to(dtype)).reduce("sum", over, keepdim).to(dtype)
    return LIBRARY


@row("prod.default", "prod.dim_int")
def _prod(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    dtype = dtype or sum_type(x.dtype)
    if dtype not in (torch.float32, torch.float64, torch.int64):
        return LIBRARY  # half precision multiplies in half precision
    return wide(x.to(dtype)).reduce("prod", wrap_dims(dim, x.ndim), keepdim).to(dtype)


@row("mean.default", "mean.dim")
def _mean(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    dtype = dtype or x.dtype
    over = wrap_dims(dims, x.ndim)
    if category(dtype) != FLOAT:
        return LIBRARY
    total = wide(x.to(dtype)).reduce("sum", over, keepdim)
    return (total / float(x.count(over))).to(dtype)


def moments(b: Builder, x: Value, dims: Sequence[int], correction: float) -> tuple[Value, Value]:
    """(variance, mean) over `dims`, which are gone afterwards."""
    if not x.ndim:
        return b.var(x.reshape((1,)), (0,), correction)
    return b.var(x, dims, correction)


def _correction(correction: Any) -> float:
    return 1.0 if correction is None else float(correction)


@row("var.correction")
def _var(b: Builder, x: Value, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _first(_spread(b, x, dims, correction, keepdim, False))


@row("std.correction")
def _std(b: Builder, x: Value, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _first(_spread(b, x, dims, correction, keepdim, True))


@row("var_mean.correction")
def _var_mean(b: Builder, x: Value, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _spread(b, x, dims, correction, keepdim, False)


@row("std_mean.correction")
def _std_mean(b: Builder, x: Value, dims: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _spread(b, x, dims, correction, keepdim, True)


def _first(results: Any) -> Any:
    return LIBRARY if results is LIBRARY else results[0]


def _spread(b: Builder, x: Value, dims: Dims, correction: Any, keepdim: bool, root: bool) -> Any:
    over = wrap_dims(dims, x.ndim)
    if category(x.dtype) != FLOAT or x.count(over) == 0:
        return LIBRARY
    spread, mean = moments(b, wide(x), over, _correction(correction))
    if x.count(over) > 1:  # eager's running mean of an infinity and something else is nan
        mean = mean.unary("isinf").where(math.nan, mean)
    if root:
        spread = spread.unary("sqrt")
    if keepdim:
        spread, mean = spread.kept(x.shape, over), mean.kept(x.shape, over)
    return spread.to(x.dtype), mean.to(x.dtype)


def _extremum(name: str) -> Any:
    def decomposition(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Any:
        over = wrap_dims(dims, x.ndim)
        if category(x.dtype) == COMPLEX or x.count(over) == 0:
            return LIBRARY
        if x.dtype is torch.bool:
            return x.reduce("any" if name == "amax" else "all", over, keepdim)
        return x.reduce(name, over, keepdim)

    return decomposition


row("amax.default", "max.default")(_extremum("amax"))
row("amin.default", "min.default")(_extremum("amin"))


def _with_index(value_name: str, index_name: str) -> Any:
    def decomposition(b: Builder, x: Value, dim: int, keepdim: bool = False) -> Any:
        if not x.ndim or x.dtype is torch.bool or category(x.dtype) == COMPLEX or x.shape[dim] == 0:
            return LIBRARY
        dim = wrap_dim(dim, x.ndim)
        index = b.emit(index_name, x, dim)
        values = x.reduce(value_name, (dim,), keepdim)
        return values, index.kept(x.shape, (dim,)) if keepdim else index

    return decomposition


row("max.dim")(_with_index("amax", "argmax"))
row("min.dim")(_with_index("amin", "argmin"))


def _arg(name: str) -> Any:
    def decomposition(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Any:
        if x.dtype is torch.bool or category(x.dtype) == COMPLEX or x.numel() == 0:
            return LIBRARY
        if dim is None or not x.ndim:
            index = b.emit(name, x.reshape((x.numel(),)), 0)
            return index.reshape((1,) * x.ndim) if keepdim else index
        dim = wrap_dim(dim, x.ndim)
        index = b.emit(name, x, dim)
        return index.kept(x.shape, (dim,)) if keepdim else index

    return decomposition


row("argmax")(_arg("argmax"))
row("argmin")(_arg("argmin"))


def _truth_reduction(name: str) -> Any:
    def decomposition(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False) -> Any:
        if x.dtype is torch.uint8 or category(x.dtype) == COMPLEX or (isinstance(dims, (list, tuple)) and not dims):
            return LIBRARY
        return truth(x).reduce(name, wrap_dims(dims, x.ndim), keepdim)

    return decomposition


row("any.default", "any.dim", "any.dims")(_truth_reduction("any"))
row("all.default", "all.dim", "all.dims")(_truth_reduction("all"))


@row("aminmax.default")
def _aminmax(b: Builder, x: Value, *, dim: int | None = None, keepdim: bool = False) -> Any:
    over = wrap_dims(dim, x.ndim)
    if x.dtype is torch.bool or category(x.dtype) == COMPLEX or x.count(over) == 0:
        return LIBRARY
    return x.reduce("amin", over, keepdim), x.reduce("amax", over, keepdim)


@row("count_nonzero.default", "count_nonzero.dim_IntList")
def _count_nonzero(b: Builder, x: Value, dims: Dims = None) -> Any:
    if category(x.dtype) == COMPLEX or not x.ndim:
        return LIBRARY
    return truth(x).to(torch.int64).reduce("sum", wrap_dims(dims, x.ndim))


@row("nansum.default")
def _nansum(b: Builder, x: Value, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if category(x.dtype) != FLOAT:
        return LIBRARY
    return _sum(b, x.unary("isnan").where(0.0, x), dims, keepdim, dtype=dtype)


# ---- softmax -------------------------------------------------------------------------------------------------------------


def _over(x: Value, dim: int) -> tuple[int, ...]:
    return (wrap_dim(dim, x.ndim),)


def _has_work(x: Value) -> bool:
    return bool(x.ndim) and x.numel() > 0 and category(x.dtype) == FLOAT


@row("_softmax.default")
def _softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Any:
    if not _has_work(x) or half_to_float:
        return LIBRARY
    dims, source = _over(x, dim), wide(x)
    power = (source - source.reduce("amax", dims).spread(x.shape, dims)).unary("exp")
    return (power / power.reduce("sum", dims).spread(x.shape, dims)).to(x.dtype)


@row("_safe_softmax.default")
def _safe_softmax(b: Builder, x: Value, dim: int, dtype: torch.dtype | None = None) -> Any:
    """A row of nothing but -inf gives zeros."""
    x = x.to(dtype or x.dtype)
    result = _softmax(b, x, dim, False)
    if result is LIBRARY:
        return LIBRARY
    dims = _over(x, dim)
    masked = x.eq(-math.inf).reduce("all", dims).spread(x.shape, dims)
    return masked.where(0.0, result)


@row("_log_softmax.default")
def _log_softmax(b: Builder, x: Value, dim: int, half_to_float: bool) -> Any:
    if not _has_work(x) or half_to_float:
        return LIBRARY
    dims, source = _over(x, dim), wide(x)
    shifted = source - source.reduce("amax", dims).spread(x.shape, dims)
    total = shifted.unary("exp").reduce("sum", dims).unary("log").spread(x.shape, dims)
    return (shifted - total).to(x.dtype)


@row("_softmax_backward_data.default")
def _softmax_backward(b: Builder, grad: Value, output: Value, dim: int, dtype: torch.dtype) -> Any:
    if not _has_work(output) or dtype is not grad.dtype:
        return LIBRARY
    dims, g, y = _over(output, dim), wide(grad), wide(output)
    total = (g * y).reduce("sum", dims).spread(output.shape, dims)
    return ((g - total) * y).to(dtype)


@row("_log_softmax_backward_data.default")
def _log_softmax_backward(b: Builder, grad: Value, output: Value, dim: int, dtype: torch.dtype) -> Any:
    if not _has_work(output) or dtype is not grad.dtype:
        return LIBRARY
    dims, g = _over(output, dim), wide(grad)
    total = g.reduce("sum", dims).spread(output.shape, dims)
    return (g - wide(output).unary("exp") * total).to(dtype)


@row("logsumexp.default")
def _logsumexp(b: Builder, x: Value, dims: Dims, keepdim: bool = False) -> Any:
    over = wrap_dims(dims, x.ndim)
    if not _has_work(x) or category(x.dtype) <= INTEGER:
        return LIBRARY
    source = wide(x)
    most = source.reduce("amax", over)
    safe = most.unary("isinf").where(0.0, most)
    total = (source - safe.spread(x.shape, over)).unary("exp").reduce("sum", over).unary("log") + safe
    return (total.kept(x.shape, over) if keepdim else total).to(x.dtype)


@row("linalg_vector_norm.default")
def _vector_norm(
    b: Builder, x: Value, order: Any = 2, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    dtype = dtype or x.dtype
    over = wrap_dims(dims, x.ndim)
    if category(x.dtype) != FLOAT or category(dtype) != FLOAT or x.numel() == 0:
        return LIBRARY
    source = wide(x.to(dtype))
    if order != 0 and x.count(over) == 1:
        result = source.unary("abs").reduce("sum", over, keepdim)
    elif order == 2:
        result = (source * source).reduce("sum", over, keepdim).unary("sqrt")
    elif order == 1:
        result = source.unary("abs").reduce("sum", over, keepdim)
    elif order in (math.inf, -math.inf):
        result = source.unary("abs").reduce("amax" if order > 0 else "amin", over, keepdim)
    elif order == 0:
        result = source.ne(0.0).to(source.dtype).reduce("sum", over, keepdim)
    else:
        result = source.unary("abs")._binary("pow", float(order)).reduce("sum", over, keepdim)._binary("pow", 1.0 / float(order))
    return result.to(dtype)


@row("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.Scalar", "norm.ScalarOpt_dtype")
def _norm(b: Builder, x: Value, order: Any = 2, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _vector_norm(b, x, 2 if order is None else order, dims or None, keepdim, dtype=dtype)
