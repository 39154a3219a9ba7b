"""Meta rules of reductions, scans and sorts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.layout import RuleError, Shape, contiguous_strides, preserved_strides, wrap_dim, wrap_dims
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import COMPLEX, INTEGER, category, real_dtype, sum_type
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def reduced(meta: TensorMeta, dims: Shape, keepdim: bool, dtype: torch.dtype) -> TensorMeta:
    """Result of reducing `dims` (sorted, distinct): contiguous, except that a kept layout may follow the input."""
    if keepdim:
        shape = tuple(1 if d in dims else size for d, size in enumerate(meta.shape))
    else:
        shape = tuple(size for d, size in enumerate(meta.shape) if d not in dims)
    return TensorMeta(shape, contiguous_strides(shape), dtype, meta.device)


def _floating(meta: TensorMeta) -> TensorMeta:
    if category(meta.dtype) <= INTEGER:
        raise RuleError("needs a floating point input")
    return meta


@rule("sum.default", "prod.default")
def _sum_all(meta: TensorMeta, *, dtype: torch.dtype | None = None) -> TensorMeta:
    return TensorMeta((), (), dtype or sum_type(meta.dtype), meta.device)


@rule("sum.dim_IntList", "nansum.default")
def _sum(meta: TensorMeta, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TensorMeta:
    return reduced(meta, wrap_dims(dims, len(meta.shape)), keepdim, dtype or sum_type(meta.dtype))


@rule("prod.dim_int")
def _prod(meta: TensorMeta, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TensorMeta:
    return reduced(meta, wrap_dims(dim, len(meta.shape)), keepdim, dtype or sum_type(meta.dtype))


@rule("mean.default")
def _mean_all(meta: TensorMeta, *, dtype: torch.dtype | None = None) -> TensorMeta:
    return TensorMeta((), (), dtype or _floating(meta).dtype, meta.device)


@rule("mean.dim", "nanmean.default")
def _mean(meta: TensorMeta, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> TensorMeta:
    return reduced(meta, wrap_dims(dims, len(meta.shape)), keepdim, dtype or _floating(meta).dtype)


def _spread(fn: Callable[..., Any]) -> None:
    """Rules of torch.var or torch.std, and of the one with the mean."""
    name = fn.__name__

    @rule(f"{name}.correction")
    def var(
        meta: TensorMeta, dims: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False, fn: Any = fn
    ) -> TensorMeta:
        found = reduced(_floating(meta), wrap_dims(dims, len(meta.shape)), keepdim, real_dtype(meta.dtype))
        if (meta.numel // found.numel if found.numel else 0) <= (1 if correction is None else correction):
            fn(torch.zeros(1, dtype=torch.float32, device="cpu"), correction=1)  # warns of the degrees of freedom
        return found

    @rule(f"{name}.default")
    def var_all(meta: TensorMeta, unbiased: bool = True) -> TensorMeta:
        return var(meta, correction=int(unbiased))

    @rule(f"{name}.dim")
    def var_dim(meta: TensorMeta, dims: Sequence[int] | None, unbiased: bool = True, keepdim: bool = False) -> TensorMeta:
        return var(meta, dims, correction=int(unbiased), keepdim=keepdim)

    @rule(f"{name}_mean.correction")
    def var_mean(
        meta: TensorMeta, dims: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False
    ) -> tuple[TensorMeta, TensorMeta]:
        spread = var(meta, dims, correction=correction, keepdim=keepdim, fn=getattr(torch, f"{name}_mean"))
        return spread, spread.with_(dtype=meta.dtype)


_spread(torch.var)
_spread(torch.std)


@rule("amax", "amin")
def _amax(meta: TensorMeta, dims: Sequence[int] = (), keepdim: bool = False) -> TensorMeta:
    wrapped = wrap_dims(dims, len(meta.shape))
    _needs_elements(meta, wrapped)
    if category(meta.dtype) == COMPLEX:
        raise RuleError("complex numbers have no order")
    return reduced(meta, wrapped, keepdim, meta.dtype)


def _needs_elements(meta: TensorMeta, dims: Shape) -> None:
    if any(meta.shape[d] == 0 for d in dims):
        raise RuleError("reduction over no elements")


@rule("max.default", "min.default")
def _max_all(meta: TensorMeta) -> TensorMeta:
    _needs_elements(meta, tuple(range(len(meta.shape))))
    return TensorMeta((), (), meta.dtype, meta.device)


@rule("median.default", "nanmedian.default")
def _median_all(meta: TensorMeta) -> TensorMeta:
    return TensorMeta((), (), meta.dtype, meta.device)


@rule("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode.default")
def _max_dim(meta: TensorMeta, dim: int = -1, keepdim: bool = False) -> tuple[TensorMeta, TensorMeta]:
    dims = wrap_dims(dim, len(meta.shape))
    _needs_elements(meta, dims)
    values = reduced(meta, dims, keepdim, meta.dtype)
    return values, values.with_(dtype=torch.int64)


@rule("kthvalue.default")
def _kthvalue(meta: TensorMeta, k: int, dim: int = -1, keepdim: bool = False) -> tuple[TensorMeta, TensorMeta]:
    values = _max_dim(meta, dim, keepdim)
    if not 1 <= k <= (meta.shape[dim] if meta.shape else 1):
        raise RuleError("k out of range")
    return values


@rule("argmax", "argmin")
def _argmax(meta: TensorMeta, dim: int | None = None, keepdim: bool = False) -> TensorMeta:
    dims = wrap_dims(dim, len(meta.shape))
    _needs_elements(meta, dims)
    return reduced(meta, dims, keepdim, torch.int64)


@rule("any.default", "all.default")
def _any_all(meta: TensorMeta) -> TensorMeta:
    return TensorMeta((), (), torch.uint8 if meta.dtype is torch.uint8 else torch.bool, meta.device)


@rule("any.dim", "all.dim", "any.dims", "all.dims")
def _any(meta: TensorMeta, dims: Any = None, keepdim: bool = False) -> TensorMeta:
    return reduced(meta, wrap_dims(dims, len(meta.shape)), keepdim, torch.uint8 if meta.dtype is torch.uint8 else torch.bool)


@rule("logsumexp.default")
def _logsumexp(meta: TensorMeta, dims: Sequence[int], keepdim: bool = False) -> TensorMeta:
    return reduced(_floating(meta), wrap_dims(dims, len(meta.shape)), keepdim, meta.dtype)


@rule("linalg_vector_norm.default")
def _vector_norm(
    meta: TensorMeta, order: Any = 2, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorMeta:
    wrapped = wrap_dims(dims, len(meta.shape))
    if meta.numel == 0 and (order < 0 or order == float("inf")):
        raise RuleError("norm of no elements")
    return reduced(_floating(meta), wrapped, keepdim, real_dtype(dtype or meta.dtype))


@rule("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim_dtype")
def _norm(
    meta: TensorMeta, order: Any = 2, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> TensorMeta:
    return reduced(_floating(meta), wrap_dims(dims, len(meta.shape)), keepdim, real_dtype(dtype or meta.dtype))


@rule("cumsum", "cumprod")
def _cumsum(meta: TensorMeta, dim: int, *, dtype: torch.dtype | None = None) -> TensorMeta:
    wrap_dim(dim, len(meta.shape))
    dtype = dtype or sum_type(meta.dtype)
    return TensorMeta.contiguous(meta.shape, dtype, meta.device)


@rule("logcumsumexp")
def _logcumsumexp(meta: TensorMeta, dim: int) -> TensorMeta:
    wrap_dim(dim, len(meta.shape))
    return TensorMeta.contiguous(meta.shape, meta.dtype, meta.device)


@rule("cummax", "cummin")
def _cummax(meta: TensorMeta, dim: int) -> tuple[TensorMeta, TensorMeta]:
    wrap_dim(dim, len(meta.shape))
    values = TensorMeta.contiguous(meta.shape, meta.dtype, meta.device)
    return values, values.with_(dtype=torch.int64)


@rule("sort.default", "sort.stable")
def _sort(meta: TensorMeta, *args: Any, **kwargs: Any) -> tuple[TensorMeta, TensorMeta]:
    dim = kwargs.get("dim", args[0] if args else -1)
    wrap_dim(dim, len(meta.shape))
    values = TensorMeta(meta.shape, preserved_strides(meta.shape, meta.strides), meta.dtype, meta.device)
    return values, values.with_(dtype=torch.int64)


@rule("argsort")
def _argsort(meta: TensorMeta, *args: Any, **kwargs: Any) -> TensorMeta:
    return _sort(meta)[1]


@rule("topk.default")
def _topk(meta: TensorMeta, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> tuple[TensorMeta, TensorMeta]:
    dim = wrap_dim(dim, len(meta.shape))
    if not 0 <= k <= (meta.shape[dim] if meta.shape else 1):
        raise RuleError("k out of range")
    shape = meta.shape[:dim] + (k,) + meta.shape[dim + 1 :] if meta.shape else ()
    values = TensorMeta.contiguous(shape, meta.dtype, meta.device)
    return values, values.with_(dtype=torch.int64)


def _softmax_rule(meta: TensorMeta, dim: int, half_to_float: bool) -> TensorMeta:
    wrap_dim(dim, len(meta.shape))
    if half_to_float:
        raise RuleError("half_to_float exists on accelerators only")
    return TensorMeta(meta.shape, contiguous_strides(meta.shape), _floating(meta).dtype, meta.device)


rule("_softmax.default", "_log_softmax.default")(_softmax_rule)


@rule("_safe_softmax.default")
def _safe_softmax(meta: TensorMeta, dim: int, dtype: torch.dtype | None = None) -> TensorMeta:
    return _softmax_rule(meta if dtype is None else meta.with_(dtype=dtype), dim, False)


@rule("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_backward(grad: TensorMeta, output: TensorMeta, dim: int, dtype: torch.dtype) -> TensorMeta:
    if grad.shape != output.shape or dtype is not grad.dtype:
        raise RuleError("softmax gradient of another shape or dtype")
    return TensorMeta(grad.shape, contiguous_strides(grad.shape), dtype, grad.device)
