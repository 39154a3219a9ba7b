"""A joint graph behind decomposition: the cut sees primitives, so that normalised activations are computed again in backward from what they are normalised of."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from magneto.aot_autograd.joint import JointGraph
from magneto.aot_autograd.partition import checked_by_autograd


def decomposable(joint: JointGraph) -> bool:
    """Whether what the cut needs to know survives: a backward inside and checkpointed bodies are marked on ATen's operations."""
    return not any("checkpoint" in node.meta or _of_a_backward_inside(node) for node in joint.graph.nodes)


def _of_a_backward_inside(node: fx.Node) -> bool:
    return "in_backward" in node.meta and node.meta["stage"] == "forward" and node.target is not operator.getitem


def decompose_joint(joint: JointGraph) -> JointGraph:
    """The same joint graph in primitives and library calls. `checked` is what it was in ATen's operations. The old graph is as before."""
    from magneto.prims import decompose

    checked = checked_by_autograd(joint)
    wanted = list(dict.fromkeys([*joint.results, *(node for node in joint.gradients if node is not None)]))
    joint.graph.output(tuple(wanted))
    graph = decompose(joint.graph)
    joint.graph.erase_node(joint.graph.output_node())
    output = graph.output_node()
    env = dict(zip(wanted, output.args[0], strict=True))  # type: ignore[arg-type]
    graph.erase_node(output)
    places = [node for node in joint.graph.nodes if node.op == "placeholder"]
    env.update(zip(places, (node for node in graph.nodes if node.op == "placeholder"), strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            late = node.meta.pop("late", False)
            of_forward = node.target is operator.getitem and node.all_input_nodes[0].meta["stage"] == "forward"
            node.meta["stage"] = "backward" if late and not of_forward else "forward"
    return replace(
        joint,
        graph=graph,
        results=tuple(env[node] for node in joint.results),
        tangents=tuple(env[node] for node in joint.tangents),
        gradients=tuple(None if node is None else env[node] for node in joint.gradients),
        checked=frozenset(env[node] for node in checked),
    )


__all__ = ["decomposable", "decompose_joint"]
