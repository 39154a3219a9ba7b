"""Meta rules of random operations (functional forms; in-place fills need no rule of their own)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.layout import RuleError, preserved_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def _same(meta: TensorMeta, dtype: torch.dtype | None = None) -> TensorMeta:
    return TensorMeta(meta.shape, preserved_strides(meta.shape, meta.strides), dtype or meta.dtype, meta.device)


@rule("uniform", "normal_functional", "random", "exponential", "geometric", "log_normal", "cauchy")
def _fill(meta: TensorMeta, *parameters: Any, **kwargs: Any) -> TensorMeta:
    return _same(meta)


@rule("bernoulli", "poisson")
def _bernoulli(meta: TensorMeta, *parameters: Any, **kwargs: Any) -> TensorMeta:
    return TensorMeta.contiguous(meta.shape, meta.dtype, meta.device)


@rule("native_dropout.default")
def _native_dropout(meta: TensorMeta, p: float, train: bool | None) -> tuple[TensorMeta, TensorMeta]:
    if not meta.is_contiguous():
        raise RuleError("layout of native_dropout")
    return _same(meta), _same(meta, torch.bool)


@rule("multinomial")
def _multinomial(weights: TensorMeta, count: int, replacement: bool = False, **kwargs: Any) -> TensorMeta:
    if len(weights.shape) not in (1, 2) or count <= 0 or (not replacement and count > weights.shape[-1]):
        raise RuleError("bad multinomial")
    return TensorMeta.contiguous((*weights.shape[:-1], count), torch.int64, weights.device)


def _drawn(name: str, size: Sequence[int], numbers: Any, *, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta.contiguous(tuple(size), dtype)


RULES["magneto.drawn"] = _drawn
RULES["magneto.statistics"] = lambda x, mean, var, momentum: (_same(mean), _same(var))
