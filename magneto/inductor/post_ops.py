"""An activation behind a bfloat16 product becomes part of the product: `fuse_activations(graph)`.

    mm or addmm -> (view) -> silu      becomes      one oneDNN linear layer that applies the activation to its accumulators

The result is rounded once where eager rounds twice. Only where the product is a linear layer as oneDNN has it, and nobody else reads it. Which activations: activation.py.
"""

from __future__ import annotations

import torch
from torch import fx

from magneto.aot_autograd.trace import drop_dead
from magneto.inductor.activation import attribute_of
from magneto.inductor.lower.operations import linear_available
from magneto.inductor.rewrite import copied

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default)
TURNED = {aten.t.default: (), aten.transpose.int: (0, 1), aten.permute.default: ([1, 0],)}


def fuse_activations(graph: fx.Graph) -> fx.Graph:
    """A graph with fewer operations; `graph` itself when there is nothing to fuse."""
    if not any(_product_of(node) for node in graph.nodes) or not linear_available():
        return graph
    made = copied(graph)
    for node in list(made.nodes):
        product = _product_of(node)
        if product is not None:
            _replace(made, product, node)
    drop_dead(made)
    return made


def _product_of(node: fx.Node) -> fx.Node | None:
    """The product whose result only this activation reads, if it is a linear layer of bfloat16."""
    if attribute_of(node) is None:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.meta["val"].strides != node.meta["val"].strides:
        return None
    if source.target in VIEWS and len(source.users) == 1:
        source = source.args[0]
    if (
        not isinstance(source, fx.Node)
        or source.target not in (aten.mm.default, aten.addmm.default)
        or source.kwargs
        or len(source.users) != 1
    ):
        return None
    meta = source.meta["val"]
    if meta.dtype is not torch.bfloat16 or meta.device.type != "cpu" or _weight(source) is None:
        return None
    bias, a = source.args[0] if source.target is aten.addmm.default else None, source.args[-2]
    columns = meta.shape[1]
    if isinstance(bias, fx.Node) and (bias.meta["val"].shape, bias.meta["val"].strides, bias.meta["val"].dtype) != (
        (columns,),
        (1,),
        meta.dtype,
    ):
        return None
    value = a.meta["val"]  # type: ignore[union-attr]
    return source if value.is_contiguous() and min(*value.shape, columns) > 1 else None


def _weight(product: fx.Node) -> fx.Node | None:
    """The contiguous (columns, inner) matrix whose transpose is the second factor."""
    turned = product.args[-1]
    if not isinstance(turned, fx.Node) or turned.target not in TURNED or turned.args[1:] != TURNED[turned.target]:
        return None
    weight = turned.args[0]
    assert isinstance(weight, fx.Node)
    meta = weight.meta["val"]
    return weight if meta.ndim == 2 and meta.is_contiguous() and meta.dtype is torch.bfloat16 else None


def _replace(graph: fx.Graph, product: fx.Node, activation: fx.Node) -> None:
    bias = product.args[0] if product.target is aten.addmm.default else None
    with graph.inserting_before(product):
        name, numbers, algorithm = attribute_of(activation) or ("none", (), "")
        args = (product.args[-2], _weight(product), bias, name, list(numbers), algorithm)
        made = graph.call_function(torch.ops.mkldnn._linear_pointwise.default, args)
    made.meta = dict(product.meta)
    product.replace_all_uses_with(made)
    graph.erase_node(product)
    activation.replace_all_uses_with(activation.args[0])  # type: ignore[arg-type]
    graph.erase_node(activation)
