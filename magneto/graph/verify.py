"""verify: an FX graph is well formed and its metadata agree with its operations."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from magneto.graph.meta import TensorMeta, map_metas
from magneto.graph.show import show


class GraphFault(Exception):
    """A graph that is not what it should be, with the lines round the fault."""

    def __init__(self, reason: str, graph: fx.Graph, node: fx.Node | None = None) -> None:
        super().__init__(f"{reason}\n{_around(graph, node)}" if node is not None else reason)
        self.reason = reason
        self.node = node


def verify(graph: fx.Graph, functional: bool = True) -> None:
    """Raise GraphFault unless nodes are defined before use, inputs come first, there is one output, and every result has metadata.

    `functional` graphs hold ATen overloads without mutation and prims only; the prims' shape rules are checked against the metadata.
    """
    defined: set[fx.Node] = set()
    outputs = 0
    calls_seen = False
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used not in defined:
                raise GraphFault(f"{node.name} uses {used.name} before it is defined", graph, node)
        defined.add(node)
        if node.op == "placeholder":
            if calls_seen:
                raise GraphFault(f"the input {node.name} comes after a call", graph, node)
        elif node.op == "output":
            outputs += 1
        elif node.op != "get_attr":
            calls_seen = True
            if outputs:
                raise GraphFault(f"{node.name} comes after the output", graph, node)
            _verify_call(graph, node, functional)
    if outputs != 1:
        raise GraphFault(f"the graph has {outputs} outputs", graph)


def _verify_call(graph: fx.Graph, node: fx.Node, functional: bool) -> None:
    if "val" not in node.meta:
        raise GraphFault(f"{node.name} has no metadata", graph, node)
    if not functional:
        return
    target = node.target
    if node.op != "call_function":
        raise GraphFault(f"{node.op} has no place in a functional graph", graph, node)
    if isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable:
            raise GraphFault(f"{target} writes its arguments", graph, node)
    elif hasattr(target, "torch_meaning"):
        _verify_prim(graph, node)
    elif target is operator.getitem:
        _verify_item(graph, node)
    else:
        raise GraphFault(f"{target} is neither an ATen overload nor a prim", graph, node)


def _verify_prim(graph: fx.Graph, node: fx.Node) -> None:
    """The prim's rule gives the shape and dtype that the node claims."""
    prim: Any = node.target
    try:
        expected = prim.meta(*fx.node.map_arg(node.args, lambda used: used.meta["val"]))
    except ValueError as problem:
        raise GraphFault(str(problem), graph, node) from None
    if _essence(expected) != _essence(node.meta["val"]):
        raise GraphFault(f"{node.name} claims {node.meta['val']}, prims.{prim.name} gives {expected}", graph, node)


def _verify_item(graph: fx.Graph, node: fx.Node) -> None:
    source, position = node.args
    if isinstance(source, fx.Node) and isinstance(position, int):
        values = source.meta.get("val")
        if isinstance(values, (tuple, list)) and _essence(values[position]) != _essence(node.meta["val"]):
            raise GraphFault(f"{node.name} claims {node.meta['val']}, item {position} is {values[position]}", graph, node)


def _essence(value: Any) -> Any:
    """Shapes, dtypes and devices; layouts are the compiler's choice."""

    def essential(meta: TensorMeta) -> tuple[Any, ...]:
        return meta.shape, meta.dtype, meta.device

    return map_metas(essential, list(value) if isinstance(value, tuple) else value)


def _around(graph: fx.Graph, node: fx.Node, reach: int = 5) -> str:
    """Ten lines of the graph, the fault marked."""
    lines = show(graph).splitlines()
    starts = (f"    {node.name} = ", f"    # {node.name}:")
    at = next((i for i, line in enumerate(lines) if line.startswith(starts)), 0)
    shown = range(max(at - reach, 0), min(at + reach + 1, len(lines)))
    return "\n".join(("--> " if i == at else "    ") + lines[i] for i in shown)
