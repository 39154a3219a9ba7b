"""A captured graph whose sizes vary, with the numbers of one call's sizes in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from magneto.graph.append import append_call


def specialised(gm: fx.GraphModule, values: Mapping[fx.Node, Any]) -> fx.GraphModule:
    """The graph for sizes with which its nodes have these values: nodes that compute numbers are gone, and the numbers stand in their places."""
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        args, kwargs = fx.map_arg(node.args, made.__getitem__), fx.map_arg(node.kwargs, made.__getitem__)
        if node.op == "output":
            graph.output(args[0]).meta.update(node.meta)
        elif node.op == "placeholder":
            made[node] = graph.placeholder(str(node.target))
        elif node.op == "get_attr":
            made[node] = graph.get_attr(str(node.target))
        elif _is_number(values[node]):
            made[node] = values[node]
        else:
            made[node] = append_call(graph, node.op, node.target, args, kwargs)
        if isinstance(made.get(node), fx.Node):
            made[node].meta.update(node.meta, val=values.get(node))
    found = fx.GraphModule(gm, graph)
    found.meta.update(gm.meta)
    found.meta["magneto"] = {name: value for name, value in gm.meta.get("magneto", {}).items() if name not in ("varying", "resizer")}
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool) or (isinstance(value, (tuple, list)) and all(map(_is_number, value)))
