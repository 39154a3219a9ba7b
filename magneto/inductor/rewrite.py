"""What passes of this layer that put other calls in the place of some need: a graph of their own, and calls with metadata."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.storage import memory_order
from magneto.graph.append import append_copy
from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate


def copied(graph: fx.Graph) -> fx.Graph:
    """The same graph, which may be changed."""
    made, env = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        env[node] = append_copy(made, node, env.__getitem__)
    return made


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that reads this one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def addend(add: fx.Node, own: fx.Node) -> fx.Node | None:
    """What a node adds to a value, if it is a tensor like it."""
    if add.target is not torch.ops.aten.add.Tensor or add.kwargs:
        return None
    left, right = add.args
    other = right if left is own else left
    if not isinstance(other, fx.Node) or other is own:
        return None
    a, b = other.meta["val"], own.meta["val"]
    return other if (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype) else None


class Adding:
    """Adds calls that stand for a node."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph = graph
        self.meta: dict[str, Any] = {key: node.meta[key] for key in ("stack", "stage") if key in node.meta}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        metas, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        made.meta = {**self.meta, "val": metas[0][args[1]] if target is operator.getitem else propagate(target, metas, named)}
        return made


def laid_out(add: Adding, node: fx.Node, like: TensorMeta) -> fx.Node:
    """The values with the strides of `like`."""
    if node.meta["val"].strides == like.strides:
        return node
    order, aten = memory_order(like), torch.ops.aten
    dense = add(aten.clone.default, add(aten.permute.default, node, order), memory_format=torch.contiguous_format)
    return add(aten.permute.default, dense, [order.index(d) for d in range(len(order))])
