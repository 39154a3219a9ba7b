"""A joint graph behind a rewriting: laid out anew, or decomposed, so that the cut sees primitives and normalised activations are computed again in backward from what they are normalised of."""

from __future__ import annotations

import operator
from collections.abc import Callable
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
    """The same joint graph in primitives and library calls."""
    from magneto.prims.decompose import decompose

    made = rewritten(joint, decompose)
    for node in made.graph.nodes:
        if node.op == "call_function":
            late = node.meta.pop("late", False)
            of_forward = node.target is operator.getitem and node.all_input_nodes[0].meta["stage"] == "forward"
            node.meta["stage"] = "backward" if late and not of_forward else "forward"
    return made


def lay_out_joint(joint: JointGraph, lay_out: Callable[[fx.Graph], fx.Graph]) -> JointGraph:
    """The joint graph in other layouts; as it is where a result that autograd checks, because backward reads it, would be a copy of what is read."""
    made = rewritten(joint, lay_out)
    if made is joint:
        return joint
    checked = checked_by_autograd(joint)
    pairs = zip(joint.results, made.results, strict=True)
    return joint if any(old in checked and old.target is not new.target for old, new in pairs) else made


def rewritten(joint: JointGraph, rewrite: Callable[[fx.Graph], fx.Graph]) -> JointGraph:
    """The joint graph as `rewrite` makes it. `checked` is what it was before. The old graph is as before."""
    checked = checked_by_autograd(joint)
    wanted = list(dict.fromkeys([*joint.results, *(node for node in joint.gradients if node is not None)]))
    joint.graph.output(tuple(wanted))
    try:
        graph = rewrite(joint.graph)
    finally:
        joint.graph.erase_node(joint.graph.output_node())
    if graph is joint.graph:
        return joint
    output = graph.output_node()
    env = dict(zip(wanted, output.args[0], strict=True))  # type: ignore[arg-type]
    graph.erase_node(output)
    places = [node for node in joint.graph.nodes if node.op == "placeholder"]
    env.update(zip(places, (node for node in graph.nodes if node.op == "placeholder"), strict=True))
    return replace(
        joint,
        graph=graph,
        results=tuple(env[node] for node in joint.results),
        tangents=tuple(env[node] for node in joint.tangents),
        gradients=tuple(None if node is None else env[node] for node in joint.gradients),
        checked=frozenset(env[node] for node in checked),
    )
