"""Meta rules of factorisations: LAPACK lays matrices out column by column, and takes seconds for the sizes that are tried for one that varies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magneto.graph.layout import RuleError, contiguous_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import complex_dtype, real_dtype
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()
_DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


@rule("_linalg_svd.default")
def _svd(
    x: TensorMeta, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[TensorMeta, TensorMeta, TensorMeta]:
    batch, rows, columns = _matrices(x)
    least = min(rows, columns)
    if driver is not None:
        raise RuleError("a driver, which the CPU refuses")
    left, right = (rows, columns) if full_matrices else (least, least)
    values = _dense(x, (*batch, least), real_dtype(x.dtype))
    if not compute_uv:
        return _dense(x, (0,)), values, _dense(x, (0,))
    return _by_columns(x, (*batch, rows, left)), values, _by_columns(x, (*batch, right, columns))


@rule("linalg_qr.default")
def _qr(x: TensorMeta, mode: str = "reduced") -> tuple[TensorMeta, TensorMeta]:
    batch, rows, columns = _matrices(x)
    if mode not in ("reduced", "complete", "r"):
        raise RuleError("an unknown mode")
    inner = rows if mode == "complete" else min(rows, columns)
    q = _dense(x, (0,)) if mode == "r" else _by_columns(x, (*batch, rows, inner))
    return q, _by_columns(x, (*batch, inner, columns))


@rule("_linalg_eigh.default")
def _eigh(x: TensorMeta, uplo: str = "L", compute_v: bool = True) -> tuple[TensorMeta, TensorMeta]:
    batch, size = _square(x)
    if uplo not in ("L", "U"):
        raise RuleError("an unknown triangle")
    return _dense(x, (*batch, size), real_dtype(x.dtype)), _by_columns(x, x.shape) if compute_v else _dense(x, (0,))


@rule("linalg_eig.default")
def _eig(x: TensorMeta) -> tuple[TensorMeta, TensorMeta]:
    return _eigvals(x), _by_columns(x, x.shape, complex_dtype(x.dtype))


@rule("linalg_eigvals.default", "_linalg_eigvals.default")
def _eigvals(x: TensorMeta) -> TensorMeta:
    batch, size = _square(x)
    return _dense(x, (*batch, size), complex_dtype(x.dtype))


@rule("linalg_inv_ex.default", "linalg_cholesky_ex.default")
def _inverse(x: TensorMeta, *, upper: bool = False, check_errors: bool = False) -> tuple[TensorMeta, TensorMeta]:
    batch, _ = _square(x)
    if check_errors:
        raise RuleError("an error by values")
    return _by_columns(x, x.shape), _dense(x, batch, torch.int32)


@rule("linalg_lu_factor_ex.default")
def _lu_factor(x: TensorMeta, *, pivot: bool = True, check_errors: bool = False) -> tuple[TensorMeta, TensorMeta, TensorMeta]:
    batch, rows, columns = _matrices(x)
    if check_errors or not pivot:
        raise RuleError("an error by values, or no pivots")
    return _by_columns(x, x.shape), _dense(x, (*batch, min(rows, columns)), torch.int32), _dense(x, batch, torch.int32)


@rule("_linalg_det.default")
def _det(x: TensorMeta) -> tuple[TensorMeta, ...]:
    batch, size = _square(x)
    return _dense(x, batch), _by_columns(x, x.shape), _dense(x, (*batch, size), torch.int32)


@rule("_linalg_slogdet.default")
def _slogdet(x: TensorMeta) -> tuple[TensorMeta, ...]:
    sign, factors, pivots = _det(x)
    return sign, sign.with_(dtype=real_dtype(x.dtype)), factors, pivots


@rule("linalg_pinv.atol_rtol_tensor")
def _pinv(x: TensorMeta, *, atol: TensorMeta | None = None, rtol: TensorMeta | None = None, hermitian: bool = False) -> TensorMeta:
    batch, rows, columns = _matrices(x)
    if (hermitian and rows != columns) or any(t is not None and (t.shape or t.dtype.is_complex) for t in (atol, rtol)):
        raise RuleError("no square matrices, or tolerances whose shapes and dtypes torch checks")
    return _dense(x, (*batch, columns, rows))


def _matrices(x: TensorMeta) -> tuple[tuple[int, ...], int, int]:
    if len(x.shape) < 2 or x.dtype not in _DTYPES or x.device.type != "cpu":
        raise RuleError("no matrices of numbers that LAPACK knows")
    return x.shape[:-2], x.shape[-2], x.shape[-1]


def _square(x: TensorMeta) -> tuple[tuple[int, ...], int]:
    batch, rows, columns = _matrices(x)
    if rows != columns:
        raise RuleError("no square matrices")
    return batch, rows


def _dense(x: TensorMeta, shape: Sequence[int], dtype: torch.dtype | None = None) -> TensorMeta:
    return TensorMeta.contiguous(shape, dtype or x.dtype, x.device)


def _by_columns(x: TensorMeta, shape: Sequence[int], dtype: torch.dtype | None = None) -> TensorMeta:
    *batch, rows, columns = shape
    strides = contiguous_strides((*batch, columns, rows))
    return TensorMeta(tuple(shape), (*strides[:-2], strides[-1], strides[-2]), dtype or x.dtype, x.device)
