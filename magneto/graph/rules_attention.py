"""Meta rules of attention and recurrent kernels as eager chooses them on the CPU."""

from __future__ import annotations

from typing import Any

from magneto.graph.layout import RuleError, ordered_strides, preserved_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()


def _check_attention(query: TensorMeta, key: TensorMeta, value: TensorMeta) -> None:
    if not (len(query.shape) == len(key.shape) == len(value.shape) == 4):
        raise RuleError("attention expects (batch, heads, length, size)")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2] or not query.dtype is key.dtype is value.dtype:
        raise RuleError("attention operands do not fit")


@rule("_scaled_dot_product_flash_attention_for_cpu.default")
def _flash_cpu(
    query: TensorMeta, key: TensorMeta, value: TensorMeta, dropout: float = 0.0, causal: bool = False, **options: Any
) -> tuple[TensorMeta, TensorMeta]:
    """The result has the query's layout; the row sums are kept as (batch, length, heads)."""
    _check_attention(query, key, value)
    batch, heads, length, _ = query.shape
    out = TensorMeta(query.shape, preserved_strides(query.shape, query.strides), query.dtype, query.device)
    sums = (batch, heads, length)
    return out, TensorMeta(sums, ordered_strides(sums, (1, 2, 0)), compute_type(query.dtype), query.device)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_cpu_backward(
    grad: TensorMeta, query: TensorMeta, key: TensorMeta, value: TensorMeta, *rest: Any, **options: Any
) -> tuple[TensorMeta, TensorMeta, TensorMeta]:
    def like(meta: TensorMeta) -> TensorMeta:
        return TensorMeta(meta.shape, ordered_strides(meta.shape, (3, 1, 2, 0)), meta.dtype, meta.device)

    return like(query), like(key), like(value)
