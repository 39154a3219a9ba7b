"""Gradients that the forward makes. `prepared(joint)`.

As far as formulas are linear, what flows back of a loss is the loss's own gradient, a number, times a function of the forward's values: softmax minus one at the targets, over the number of rows. The
forward makes that function and keeps it, where the minimum cut finds it no larger than what it is made of. The number is mostly 1; where it is not, what was kept is multiplied in place (`handed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from magneto.aot_autograd.joint import JointGraph
from magneto.base.dataclass import dataclass, replace
from magneto.graph.meta import TensorMeta
from magneto.prims.prim import Prim
from magneto.prims.table import PRIMS

WORTH = 1 << 20  # bytes of a gradient, at least
DEVICES = {"cpu": False, "cuda": True}
"""Kinds of them, and whether only gradients of the graph's own inputs are made ahead there: of products computed in the graph it was no faster on an H200 (`docs/design/gpu.md`)."""
LONGEST = 100  # operations that make one
TYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Of all that a gradient goes through: what float16 holds depends on the factor (that is what losses are scaled for)."""
_OF_FIRST = frozenset("neg convert_element_type sum broadcast_in_dim reshape transpose slice flip index_select gather div".split())


@dataclass(frozen=True, slots=True)
class Ahead:
    """`made` is `plain` for a tangent of 1; `scaled`, which takes the place of `plain`, is `made` times the tangent."""

    plain: fx.Node
    made: fx.Node
    scaled: fx.Node

    def undone(self, joint: JointGraph) -> JointGraph:
        self.scaled.replace_all_uses_with(self.plain)
        return _with(joint, self.scaled, self.plain)


def prepared(joint: JointGraph) -> tuple[JointGraph, list[Ahead]]:
    """The joint graph (in prims), changed in place, and what its forward may make of its gradients."""
    linear = _linear(joint)
    wanted = set(joint.gradients)
    found: list[Ahead] = []
    copies: dict[fx.Node, fx.Node] = {}
    for node, tangent in linear.items():
        meta: TensorMeta = node.meta["val"]
        if node is tangent or meta.nbytes < WORTH or not meta.is_dense() or _is_widened(node, linear):
            continue
        if node not in wanted and all(user in linear and not _is_widened(user, linear) for user in node.users):
            continue
        only_inputs = DEVICES.get(meta.device.type)
        if only_inputs is None or (only_inputs and node not in wanted):
            continue
        closure = _closure(node)
        if closure is None:
            continue
        for one in closure:
            if one not in copies:
                copies[one] = _copied(joint.graph, one, copies, node)
        scaled = _scaled(joint.graph, copies[node], tangent, node)
        node.replace_all_uses_with(scaled)
        joint = _with(joint, node, scaled)
        found.append(Ahead(node, copies[node], scaled))
    return joint, found


def _is_widened(node: fx.Node, linear: Mapping[fx.Node, fx.Node]) -> bool:
    """A larger type of something linear, for products alone (of types that the machine does not multiply): what it is made of is kept instead."""
    if not isinstance(node.target, Prim) or node.target.name != "convert_element_type" or not linear.keys().isdisjoint(node.users):
        return False
    source = node.args[0]
    return source in linear and linear[source] is not source and source.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize  # type: ignore[index,union-attr]


def _with(joint: JointGraph, old: fx.Node, new: fx.Node) -> JointGraph:
    return replace(joint, gradients=tuple(new if node is old else node for node in joint.gradients))


def _linear(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """What is linear in one tangent, a number, and which that is."""
    late = set(joint.tangents)
    found = {t: t for t in joint.tangents if t.meta["val"].shape == () and t.meta["val"].dtype in TYPES}
    for node in joint.graph.nodes if found else ():
        sources = [source for source in node.all_input_nodes if source in late]
        if sources:
            late.add(node)
            tangents = {found.get(source) for source in sources}
            if len(tangents) == 1 and None not in tangents and _is_linear(node, sources, late):
                found[node] = found[sources[0]]
    return found


def _is_linear(node: fx.Node, sources: Sequence[fx.Node], late: set[fx.Node]) -> bool:
    """In its `sources` together, which are."""
    meta, args = node.meta.get("val"), node.args
    if not isinstance(meta, TensorMeta) or meta.dtype not in TYPES or not isinstance(node.target, Prim):
        return False
    name = node.target.name
    if name in _OF_FIRST:
        return sources == [args[0]] and args[0] not in args[1:]
    if name == "mul":
        return len(sources) == 1 and args[0] is not args[1]
    if name == "where":
        return args[0] not in late and all(one in late or one == 0 for one in args[1:])
    if name == "pad":
        return bool(args[3] == 0)
    return name in ("add", "sub") and all(one in late for one in args)


def _closure(node: fx.Node) -> list[fx.Node] | None:
    """The late operations that it is computed of, in order; None where they are no formula."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in found or one.meta["stage"] == "forward":
            continue
        found.add(one)
        if len(found) > LONGEST or (one.op == "call_function" and not isinstance(one.target, Prim)):
            return None
        stack.extend(one.all_input_nodes)
    return sorted(found)


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    """For a tangent of 1, in the forward."""
    meta: TensorMeta = node.meta["val"]
    with graph.inserting_before(before):
        if node.op == "placeholder":
            copy = graph.call_function(PRIMS["full"], ((), 1.0, meta.dtype, meta.device))
        else:
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
    copy.meta = {**node.meta, "stage": "forward"}
    return copy


def _scaled(graph: fx.Graph, made: fx.Node, tangent: fx.Node, before: fx.Node) -> fx.Node:
    """Rounded once."""
    wide = torch.promote_types(made.meta["val"].dtype, torch.float32)

    def call(name: str, x: fx.Node, *args: object) -> fx.Node:
        metas = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in (x, *args)]
        with graph.inserting_before(before):
            node = graph.call_function(PRIMS[name], (x, *args))  # type: ignore[arg-type]
        node.meta.update(val=PRIMS[name].meta(*metas), stack=(), stage="backward")
        return node

    def to(x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype is dtype else call("convert_element_type", x, dtype)

    factor = call("broadcast_in_dim", to(tangent, wide), made.meta["val"].shape, ())
    node = to(call("mul", to(made, wide), factor), made.meta["val"].dtype)
    node.meta.update(val=made.meta["val"], ahead=True)
    return node
