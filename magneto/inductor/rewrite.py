"""What passes of this layer that put other calls in the place of some need: a graph of their own, and calls with metadata."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from magneto.graph.append import append_copy
from magneto.graph.rules import propagate


def copied(graph: fx.Graph) -> fx.Graph:
    """The same graph, which may be changed."""
    made, env = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        env[node] = append_copy(made, node, env.__getitem__)
    return made


class Adding:
    """Adds calls that stand for a node."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph = graph
        self.meta: dict[str, Any] = {key: node.meta[key] for key in ("stack", "stage") if key in node.meta}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        metas = fx.node.map_arg(args, lambda n: n.meta["val"])
        made.meta = {**self.meta, "val": metas[0][args[1]] if target is operator.getitem else propagate(target, metas, kwargs)}
        return made
