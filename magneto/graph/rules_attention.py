"""Meta rules of attention and recurrent kernels as eager chooses them on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from magneto.graph.layout import RuleError, ordered_strides, preserved_strides
from magneto.graph.meta import TensorMeta
from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table

RULES, rule = rule_table()

_SEEDS = {"_scaled_dot_product_efficient_attention_backward": (7, 9), "_efficient_attention_backward": (12, 11)}
"""Where these are given the seed of the dropout (behind it the offset), and its probability."""


@cache
def seeded(op: Any) -> Callable[..., Any] | None:
    """A backward of attention that takes the seed of its dropout from wherever it lies (None for other operations). Forwards leave it on the host, or on the device while they are captured; ATen's
    backwards look for it on the host, or on the device while they are captured, and check nothing: a captured forward's is read here, and a host's is never made part of a capture."""
    packet = getattr(op, "overloadpacket", None)
    if packet is None or not str(packet).startswith("aten.") or packet.__name__ not in _SEEDS:
        return None
    seed, probability = _SEEDS[packet.__name__]

    def run(*args: Any, **options: Any) -> Any:
        state = args[seed : seed + 2]
        if not args[probability] or all(x.is_cuda is torch.cuda.is_current_stream_capturing() for x in state):
            return op(*args, **options)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the forward of attention with dropout is captured, or its backward is not")
        return op(*args[:seed], *(x.cpu() for x in state), *args[seed + 2 :], **options)

    return run


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


RULES["magneto.attention.default"] = lambda query, key, value, *rest: _flash_cpu(query, key, value)


@rule("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_cpu_backward(
    grad: TensorMeta, query: TensorMeta, key: TensorMeta, value: TensorMeta, *rest: Any, **options: Any
) -> tuple[TensorMeta, TensorMeta, TensorMeta]:
    def like(meta: TensorMeta) -> TensorMeta:
        return TensorMeta(meta.shape, ordered_strides(meta.shape, (3, 1, 2, 0)), meta.dtype, meta.device)

    return like(query), like(key), like(value)


@rule("_native_multi_head_attention.default")
def _native_attention(
    query: TensorMeta, key: TensorMeta, value: TensorMeta, embed_dim: int, num_head: int, qkv_weight: TensorMeta, qkv_bias: TensorMeta,
    proj_weight: TensorMeta, proj_bias: TensorMeta, mask: TensorMeta | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[TensorMeta, TensorMeta | None]:  # fmt: skip
    """What torch.nn.MultiheadAttention calls where nothing is differentiated. Weights only where they are asked for."""
    if not query.shape == key.shape == value.shape or not query.dtype is key.dtype is value.dtype or mask is not None:
        raise RuleError("attention operands do not fit")
    _check_projections(query, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias)
    batch, length, _ = query.shape
    heads = () if average_attn_weights else (num_head,)
    weights = TensorMeta.contiguous((batch, *heads, length, length), query.dtype, query.device) if need_weights else None
    return TensorMeta.contiguous(query.shape, query.dtype, query.device), weights


def _check_projections(
    x: TensorMeta, size: int, heads: int, qkv_weight: TensorMeta, qkv_bias: TensorMeta, weight: TensorMeta, bias: TensorMeta
) -> None:
    """Whatever is unusual (masks too) is for torch itself to check."""
    given = (x, qkv_weight, qkv_bias, weight, bias)
    if len(x.shape) != 3 or x.shape[2] != size or 0 in x.shape or heads <= 0 or size % heads or not x.dtype.is_floating_point:
        raise RuleError("attention expects (batch, length, size)")
    if any(m.dtype is not x.dtype or m.device.type != "cpu" for m in given):
        raise RuleError("attention operands are of several types")
    if tuple(m.shape for m in given[1:]) != ((3 * size, size), (3 * size,), (size, size), (size,)):
        raise RuleError("attention weights do not fit")


@rule("_transformer_encoder_layer_fwd.default")
def _encoder_layer(
    src: TensorMeta, embed_dim: int, num_heads: int, qkv_weight: TensorMeta, qkv_bias: TensorMeta, proj_weight: TensorMeta, proj_bias: TensorMeta,
    use_gelu: bool, norm_first: bool, eps: float, *rest: TensorMeta | int | None,
) -> TensorMeta:  # fmt: skip
    """What torch.nn.TransformerEncoderLayer calls where nothing is differentiated."""
    _check_projections(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
    parts = [m for m in rest[:8] if isinstance(m, TensorMeta)]
    if len(parts) != 8 or any(m is not None for m in rest[8:]) or any(m.dtype is not src.dtype or m.device.type != "cpu" for m in parts):
        raise RuleError("operands of a layer do not fit")
    wide = parts[4].shape[0]
    if tuple(m.shape for m in parts) != (*((embed_dim,),) * 4, (wide, embed_dim), (wide,), (embed_dim, wide), (embed_dim,)):
        raise RuleError("weights of a layer do not fit")
    return TensorMeta.contiguous(src.shape, src.dtype, src.device)
