"""What passes of this layer that put other calls in the place of some need: a graph of their own, and calls with metadata."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from magneto.graph.rules import propagate


def copied(graph: fx.Graph, env: dict[fx.Node, fx.Node] | None = None) -> fx.Graph:
    """The same graph, which may be changed. `env` gets the new node of each."""
    made = fx.Graph(graph.owning_module)
    made.output(made.graph_copy(graph, {} if env is None else env)).meta.update(graph.output_node().meta)  # type: ignore[arg-type]
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
