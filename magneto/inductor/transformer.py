"""Layers that torch.nn computes as one operation where nothing is differentiated come apart: `take_apart(graph)`.

    _native_multi_head_attention(x, x, x, ...)      becomes      addmm, attention that keeps no matrix of weights, addmm
    _transformer_encoder_layer_fwd(x, ...)          becomes      that, norms, additions, addmm, activation, addmm

As one operation they are libraries' calls of which nothing can be fused, with copies of queries, keys and values, and with weights of attention as large as the square
of the length. Only without masks.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from magneto.graph.narrow import narrow_types
from magneto.inductor.rewrite import Adding, copied

aten = torch.ops.aten
ATTENTION, LAYER = aten._native_multi_head_attention.default, aten._transformer_encoder_layer_fwd.default


def take_apart(graph: fx.Graph) -> fx.Graph:
    """A graph of smaller operations; `graph` itself where there is none to take apart."""
    if not any(_attention(node) or _layer(node) for node in graph.nodes):
        return graph
    made = copied(graph)
    for node in list(made.nodes):
        if _attention(node):
            with made.inserting_before(node):
                x, heads, weights = node.args[0], node.args[4], node.args[5:9]
                result = _attend(Adding(made, node), x, heads, *weights)
            for user in list(node.users):
                user.replace_all_uses_with(result)
                made.erase_node(user)
            made.erase_node(node)
        elif _layer(node):
            with made.inserting_before(node):
                result = _encode(Adding(made, node), *node.args[:18])
            node.replace_all_uses_with(result)
            made.erase_node(node)
    return made


def _attention(node: fx.Node) -> bool:
    """Self-attention without a mask, of which only the result is read?"""
    if node.target is not ATTENTION or len(set(node.args[:3])) != 1:
        return False
    made, weights = node.meta["val"]
    rest = dict(zip(("mask", "need_weights"), node.args[9:], strict=False)) | node.kwargs
    if rest.get("mask") is not None or weights is not None or not _takes(made):
        return False
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _layer(node: fx.Node) -> bool:
    """A layer without a mask?"""
    if node.target is not LAYER or any(argument is not None for argument in (*node.args[18:], *node.kwargs.values())):
        return False
    return len(node.args) >= 18 and _takes(node.meta["val"])


def _takes(meta: Any) -> bool:
    return (
        meta.device.type == "cpu"
        and meta.dtype in (torch.float32, torch.bfloat16, *narrow_types())
        and meta.ndim == 3
        and 0 not in meta.shape
    )


def _linear(add: Adding, rows: Any, weight: Any, bias: Any) -> fx.Node:
    return add(aten.addmm.default, bias, rows, add(aten.permute.default, weight, [1, 0]))


def _attend(add: Adding, x: Any, heads: Any, qkv_weight: Any, qkv_bias: Any, weight: Any, bias: Any) -> fx.Node:
    batch, length, size = x.meta["val"].shape
    rows = [batch * length, size]
    if not x.meta["val"].is_contiguous():
        x = add(aten.clone.default, x, memory_format=torch.contiguous_format)
    qkv = _linear(add, add(aten.view.default, x, rows), qkv_weight, qkv_bias)
    parts = add(aten.permute.default, add(aten.view.default, qkv, [batch, length, 3, heads, size // heads]), [2, 0, 3, 1, 4])
    attended = add(aten._scaled_dot_product_flash_attention_for_cpu.default, *(add(aten.select.int, parts, 0, k) for k in range(3)))
    joined = add(aten.permute.default, add(operator.getitem, attended, 0), [0, 2, 1, 3])
    return add(aten.view.default, _linear(add, add(aten.view.default, joined, rows), weight, bias), [batch, length, size])


def _encode(
    add: Adding, x: Any, size: int, heads: int, qkv_weight: Any, qkv_bias: Any, weight: Any, bias: Any, gelu: bool, first: bool, eps: float,
    *rest: Any,
) -> fx.Node:  # fmt: skip
    """`first`: the norms stand before attention and the two products, else behind the sums."""
    norms, (inner, inner_bias, outer, outer_bias) = (rest[0:2], rest[2:4]), rest[4:8]
    shape = list(x.meta["val"].shape)
    if not x.meta["val"].is_contiguous():
        x = add(aten.clone.default, x, memory_format=torch.contiguous_format)

    def norm(value: fx.Node, which: int) -> fx.Node:
        return add(operator.getitem, add(aten.native_layer_norm.default, value, [size], *norms[which], eps), 0)

    x = add(aten.add.Tensor, _attend(add, norm(x, 0) if first else x, heads, qkv_weight, qkv_bias, weight, bias), x)
    x = x if first else norm(x, 0)
    rows = add(aten.view.default, norm(x, 1) if first else x, [shape[0] * shape[1], shape[2]])
    wide = add(aten.gelu.default if gelu else aten.relu.default, _linear(add, rows, inner, inner_bias))
    x = add(aten.add.Tensor, add(aten.view.default, _linear(add, wide, outer, outer_bias), shape), x)
    return x if first else norm(x, 1)
