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
from magneto.prims.decompositions.rows import LIBRARY, on_gpu
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


def _looking_backward(
    b: Builder, grad: Value, name: str, x: Value, result: Value, dim: int | None, keepdim: bool, dtype: torch.dtype | None
) -> Any:
    """Gradient of a product without a look at whether a zero is among its factors (aot_autograd/looking.py)."""
    if x.dtype not in (torch.float32, torch.float64) or not x.numel() or not x.ndim or dtype not in (None, x.dtype):
        return LIBRARY
    if dim is None:
        if x.numel() > SHORT:
            return LIBRARY
        flat = x.reshape((x.numel(),))
        return _prod_backward(b, grad.broadcast(flat.shape), flat, result.broadcast(flat.shape), 0, True).reshape(x.shape)
    d = wrap_dim(dim, x.ndim)
    if name == "cumprod":
        return _cumprod_backward(b, grad, x, result, d) if on_gpu(x) and x.shape[d] > 1 else LIBRARY
    if x.shape[d] > SIDE_BY_SIDE and not on_gpu(x):
        return LIBRARY
    kept = (*x.shape[:d], 1, *x.shape[d + 1 :])
    return _prod_backward(b, grad.reshape(kept).broadcast(x.shape), x, result.reshape(kept).broadcast(x.shape), d, False)


ROWS["magneto.looking_backward.default"] = _looking_backward
SHORT = 16
"""Factors whose products without each of them are computed from all."""
SIDE_BY_SIDE = 7
"""The same on a CPU, where a loop writes them out (inductor/schedule/unroll.py); PyTorch's own way looks for a zero first, and computes products where there is one."""


def _prod_backward(b: Builder, grad: Value, x: Value, result: Value, d: int, every: bool) -> Value:
    """As eager: the result divided by the factor where there is no zero at all, else products of the others; of all elements with several zeros, none."""
    none, dims = x.eq(0.0), tuple(range(x.ndim))
    zeros = none.to(x.dtype).reduce("sum", dims, True).broadcast(x.shape)
    others = _without_each(b, x, d)
    return zeros.eq(0.0).where(grad * (result / x), (zeros > 1.0).where(0.0, grad * others) if every else grad * others)


def _without_each(b: Builder, x: Value, d: int) -> Value:
    """Products along `d` of all elements but the one at this place."""
    n = x.shape[d]
    if n > SHORT:
        one = b.full((*x.shape[:d], 1, *x.shape[d + 1 :]), 1.0, x.dtype, x.device)
        ahead = _along(b, torch.ops.aten.cumprod.default, b.cat([one, x.narrow(d, 0, n - 1)], d), d)
        turned = b.cat([one, b.emit("flip", x, (d,)).narrow(d, 0, n - 1)], d)
        return ahead * b.emit("flip", _along(b, torch.ops.aten.cumprod.default, turned, d), (d,))
    steps, shape = b.iota(n, torch.int64, x.device), (*x.shape[: d + 1], n, *x.shape[d + 1 :])
    own = steps.along(shape, (d,)).eq(steps.along(shape, (d + 1,)))
    return own.where(1.0, x.along(shape, (*range(d), *range(d + 1, x.ndim + 1)))).reduce("prod", (d + 1,))


def _along(b: Builder, scan: Any, of: Value, dim: int) -> Value:
    return Value(b, b.node(scan, (of.node, dim), of.meta), of.meta)


def _cumprod_backward(b: Builder, grad: Value, x: Value, result: Value, dim: int) -> Value:
    """Ahead of the first zero what follows is divided by the factor; the zero gets the sum of products without it; behind it nothing has a gradient."""
    one = b.full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), 1.0, x.dtype, x.device)
    before = b.cat([one, result.narrow(dim, 0, x.shape[dim] - 1)], dim)
    first = x.eq(0.0) & before.ne(0.0)

    def onwards(of: Value) -> Value:
        return b.emit("flip", _along(b, torch.ops.aten.cumsum.default, b.emit("flip", of, (dim,)), dim), (dim,))

    without = _along(b, torch.ops.aten.cumprod.default, first.where(1.0, x), dim)
    return first.where(onwards(grad * without), x.eq(0.0).where(0.0, onwards(grad * result) / x))


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
