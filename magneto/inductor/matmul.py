"""Products of a batch with one matrix become one large product: `flatten(graph)`.

    bmm(a, w expanded over the batch)      becomes      mm(a as rows, w)

PyTorch takes the batched form where the rows of `a` do not lie one behind the other (a recurrent network's batch-first input); libraries then work through one
small product after the other. A copy of `a` costs less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from magneto.graph.layout import view_strides
from magneto.graph.rules import propagate

aten = torch.ops.aten


def flatten(graph: fx.Graph) -> fx.Graph:
    """A graph with larger products; `graph` itself when there is nothing to gain."""
    if not any(_spread(node) for node in graph.nodes):
        return graph
    made = fx.Graph(graph.owning_module)
    made.output(made.graph_copy(graph, {})).meta.update(graph.output_node().meta)
    for node in list(made.nodes):
        if _spread(node):
            _replace(made, node)
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


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    a, b = node.all_input_nodes
    meta = node.meta["val"]
    batch, rows, inner = a.meta["val"].shape

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        metas = fx.node.map_arg(args, lambda n: n.meta["val"])
        made.meta = {**{key: node.meta[key] for key in ("stack", "stage") if key in node.meta}, "val": propagate(target, metas, kwargs)}
        return made

    with graph.inserting_before(node):
        if view_strides(a.meta["val"].shape, a.meta["val"].strides, (batch * rows, inner)) is None:
            a = add(aten.clone.default, a, memory_format=torch.contiguous_format)
        product = add(aten.mm.default, add(aten.view.default, a, [batch * rows, inner]), add(aten.select.int, b, 0, 0))
        made = add(aten.view.default, product, list(meta.shape))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


__all__ = ["flatten"]
