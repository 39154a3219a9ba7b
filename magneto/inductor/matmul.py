"""Products of a batch with one matrix become one large product: `flatten(graph)`.

    bmm(a, w expanded over the batch)                            becomes      mm(a as rows, w)
    convolution(images of one pixel, windows of one pixel)       becomes      addmm(bias, pixels, w)

PyTorch takes the batched form where the rows of `a` do not lie one behind the other (a recurrent network's batch-first input); libraries then work through one
small product after the other. A copy of `a` costs less. Images of one pixel are what a network squeezes out of its channels; a convolution takes a multiple of
the product's time to begin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from magneto.graph.layout import view_strides
from magneto.inductor.rewrite import Adding, copied

aten = torch.ops.aten


def flatten(graph: fx.Graph) -> fx.Graph:
    """A graph with larger products; `graph` itself when there is nothing to gain."""
    if not any(_spread(node) or _one_pixel(node) for node in graph.nodes):
        return graph
    made = copied(graph)
    for node in list(made.nodes):
        if _spread(node):
            _replace(made, node, _as_product)
        elif _one_pixel(node):
            _replace(made, node, _as_linear)
    return made


def _spread(node: fx.Node) -> bool:
    """A product whose second factor is one matrix for the whole batch, and whose result is contiguous?"""
    if node.target is not aten.bmm.default or len(node.all_input_nodes) != 2:
        return False
    a, b, meta = (n.meta["val"] for n in (*node.all_input_nodes, node))
    if meta.device.type != "cpu" or 0 in (*a.shape, *b.shape):
        return False
    batch: int = b.shape[0]
    return bool(batch > 1 and b.strides[0] == 0 and meta.strides == meta.contiguous_strides(meta.shape))


def _one_pixel(node: fx.Node) -> bool:
    """A float32 convolution of images of one pixel with windows of one pixel, whose result is contiguous?"""
    if node.target is not aten.convolution.default or node.args[6] or node.args[8] != 1:
        return False
    value, weight, meta = (n.meta["val"] for n in (node.args[0], node.args[1], node))  # type: ignore[union-attr]
    if meta.ndim != 4 or meta.device.type != "cpu" or meta.dtype is not torch.float32 or 0 in meta.shape:
        return False
    if not value.shape[2:] == weight.shape[2:] == meta.shape[2:] == (1, 1) or meta.strides != meta.contiguous_strides(meta.shape):
        return False
    return all(view_strides(m.shape, m.strides, m.shape[:2]) is not None for m in (value, weight))


def _replace(graph: fx.Graph, node: fx.Node, with_: Any) -> None:
    with graph.inserting_before(node):
        made = with_(Adding(graph, node), node)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _as_product(add: Adding, node: fx.Node) -> fx.Node:
    a, b = node.all_input_nodes
    batch, rows, inner = a.meta["val"].shape
    if view_strides(a.meta["val"].shape, a.meta["val"].strides, (batch * rows, inner)) is None:
        a = add(aten.clone.default, a, memory_format=torch.contiguous_format)
    product = add(aten.mm.default, add(aten.view.default, a, [batch * rows, inner]), add(aten.select.int, b, 0, 0))
    return add(aten.view.default, product, list(node.meta["val"].shape))


def _as_linear(add: Adding, node: fx.Node) -> fx.Node:
    value, weight, bias = node.args[:3]
    a, w = (add(aten.view.default, n, list(n.meta["val"].shape[:2])) for n in (value, weight))  # type: ignore[union-attr]
    w = add(aten.permute.default, w, [1, 0])
    product = add(aten.mm.default, a, w) if bias is None else add(aten.addmm.default, bias, a, w)
    return add(aten.view.default, product, list(node.meta["val"].shape))
