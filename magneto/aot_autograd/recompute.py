"""What the backward inside a graph reads of the forward: kept from there, or computed again right before it is needed. `recompute(graph)`.

For graphs that hold whole training steps (those that are cut in two are the partition's). The graph is one of prims and library calls, its nodes from
the first operation of backward on marked ``meta["late"]``. What is kept is a minimum cut by bytes, as in partition.py, and marked ``meta["keep"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from torch import fx

from magneto.aot_autograd.mincut import min_cut
from magneto.aot_autograd.overloads import aten
from magneto.base.events import counter
from magneto.graph.meta import TensorMeta
from magneto.prims.prim import Prim

AGAIN = {"unary": True, "binary": True, "ternary": True, "convert": True, "shape": True, "reduction": False, "index": False}
"""Categories of prims that are computed again: they are fused into what reads them. Reductions and gathered reads cost a walk of their own. Library calls, random ones among
them, never are."""
AGAIN_BY_NAME = {"cat": False, "iota": True, "full": True}


def computed_again(node: fx.Node) -> bool:
    """Whether the table lets this value be computed twice."""
    if node.op != "call_function" or not isinstance(node.target, Prim):
        return False
    if node.target.name == "index_select":
        return _by_formula(node.args[2])
    return AGAIN_BY_NAME.get(node.target.name, AGAIN.get(node.target.category, False))


def _by_formula(index: Any) -> bool:
    """Whether places are computed of nothing (what a cross product rolls, what an image is enlarged by): reading there is like reading a slice."""
    left: list[Any] = [index]
    seen: set[fx.Node] = set()
    while left:
        node = left.pop()
        if not isinstance(node, fx.Node) or not isinstance(node.target, Prim) or not computed_again(node) or len(seen) > FEW:
            return False
        seen.add(node)
        left += (source for source in node.all_input_nodes if source not in seen)
    return True


INPUTS = {aten.convolution.default: 0, aten.convolution_backward.default: 1}  # where a convolution's input stands


def dear(
    nodes: Iterable[fx.Node], kept: AbstractSet[fx.Node], again: Callable[[fx.Node], bool], late: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """What a minimum cut by bytes should keep all the same: inputs of convolutions on a GPU, which lie in memory in forward and in backward. Computing them again there is a walk
    of its own over what they are computed from (at the ends of residual blocks all blocks before): a tenth of ResNet-50's training."""
    found: set[fx.Node] = set()
    for node in nodes:
        meta = node.meta.get("val")
        if node in kept or late(node) or not again(node) or not isinstance(meta, TensorMeta) or not meta.is_dense() or not _on_gpu(meta):
            continue
        if len({late(user) for user in node.users if user.target in INPUTS and user.args[INPUTS[user.target]] is node}) == 2:  # type: ignore[index]
            found.add(node)
    return found


def read_apart(
    graph: fx.Graph,
    free: AbstractSet[fx.Node],
    kept: AbstractSet[fx.Node],
    again: Callable[[fx.Node], bool],
    late: Callable[[fx.Node], bool],
) -> bool:
    """Of the inputs of convolutions that are kept (`free`) everything else in backward reads a copy, to be computed again, where that takes a few operations on one tensor which backward reads anyway: the
    sign of a relu behind a norm is that of what was normalised. Whether there are such copies."""
    found = False
    for node in free:
        others = [u for u in node.users if late(u) and not (u.target in INPUTS and u.args[INPUTS[u.target]] is node)]  # type: ignore[index]
        if others and _of_one_tensor(node, free, kept, again, late):
            found = True
            with graph.inserting_after(node):
                copy = graph.node_copy(node)
            copy.meta = dict(node.meta)
            for user in others:
                user.replace_input_with(node, copy)
    return found


def _of_one_tensor(
    node: fx.Node, free: AbstractSet[fx.Node], kept: AbstractSet[fx.Node], again: Callable[[fx.Node], bool], late: Callable[[fx.Node], bool]
) -> bool:
    size, seen, large, stack = node.meta["val"].nbytes, {node}, 0, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in seen:
                continue
            seen.add(source)
            meta = source.meta.get("val")
            if not isinstance(meta, TensorMeta):
                return False
            if again(source) and source not in kept and source not in free:
                stack.append(source)
            elif meta.nbytes * SMALL > size:
                large += 1 if any(map(late, source.users)) and meta.nbytes <= size else 2
    return large == 1 and len(seen) <= FEW


SMALL, FEW = (
    64,
    24,
)  # a tensor with fewer bytes than a 64th is one number of each channel; nodes that a copy is computed of, views and numbers of channels among them


def _on_gpu(meta: TensorMeta) -> bool:
    return meta.device.type == "cuda"


def recompute(graph: fx.Graph) -> fx.Graph:
    """The same graph, changed in place."""
    nodes = list(graph.nodes)
    late = {node for node in nodes if "late" in node.meta}
    read = [node for node in nodes if node not in late and node.op == "call_function" and any(user in late for user in node.users)]
    if not read:
        return graph
    kept = set(min_cut(read, _cost, computed_again))
    if free := dear(nodes, kept, computed_again, late.__contains__):
        if read_apart(graph, free, kept, computed_again, late.__contains__):
            nodes = list(graph.nodes)
            read = [node for node in nodes if node not in late and node.op == "call_function" and any(user in late for user in node.users)]
        kept = set(min_cut(read, lambda node: 0 if node in free else _cost(node), computed_again))
    for node in kept:
        node.meta["keep"] = True
    again: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in late:
            for source in node.all_input_nodes:
                if source not in late and source.op == "call_function" and source not in kept:
                    _compute_again(graph, source, node, kept, again)
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: again.get(n, n))
    counter("recomputed", len(again))
    return graph


def _compute_again(graph: fx.Graph, wanted: fx.Node, before: fx.Node, kept: set[fx.Node], again: dict[fx.Node, fx.Node]) -> None:
    """Copies of `wanted`, and of what it is computed from, in front of the first operation that reads it."""
    stack = [wanted]
    while stack:
        node = stack[-1]
        missing = [n for n in node.all_input_nodes if n not in again and n not in kept and n.op == "call_function"]
        if node in again or missing:
            stack.extend(missing) if node not in again else stack.pop()
            continue
        with graph.inserting_before(before):
            copy = again[node] = graph.node_copy(node, lambda n: again.get(n, n))
        copy.meta = {**node.meta, "late": True}
        stack.pop()


def _cost(node: fx.Node) -> int | None:
    """Bytes of keeping a value until backward; None when it cannot be kept. Inputs and results are there anyway."""
    meta = node.meta.get("val")
    if node.op != "call_function" or any(user.op == "output" for user in node.users):
        return 0
    if not isinstance(meta, TensorMeta) or (not meta.is_dense() and computed_again(node)):
        return None
    return meta.nbytes + 1
