"""The part of a backward graph that runs when only some of the results have a gradient, or when only some inputs' gradients are asked for, as autograd's engine runs only
what it reaches.

Zeros in place of the missing gradients would not do: what is divided by zero somewhere off the path would be NaN, and tensors saved there would be
checked and read. `reached(graph, ...)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from magneto.aot_autograd.overloads import aten
from magneto.aot_autograd.partition import Gradient, is_random, owned
from magneto.aot_autograd.trace import drop_dead
from magneto.base.dataclass import dataclass
from magneto.graph.meta import TensorMeta
from magneto.prims.table import PRIMS

_ACCUMULATES = (aten.add.Tensor, PRIMS["add"])


@dataclass(frozen=True, slots=True)
class Reached:
    """`graph` takes the values kept under the numbers `kept`, then the tangents that there are. `gradients` are as in Partition, None where nothing flows."""

    graph: fx.Graph
    kept: tuple[int, ...]
    gradients: tuple[Gradient, ...]


def reached(
    backward: fx.Graph, n_kept: int, gradients: Sequence[Gradient], origins: Sequence[frozenset[int]], missing: frozenset[int],
    unwanted: frozenset[int] = frozenset(),
) -> Reached:  # fmt: skip
    """A copy of the backward graph without what depends on the tangents `missing` alone and without what serves the inputs `unwanted` alone. An accumulation of two gradients is the one that there is;
    any other operation on both kinds gets zeros, as PyTorch's formulas do. A gradient of which a tangent among its `origins` is there, though its value depends on none of those, is zeros."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(backward, copies))
    places = [copies[node] for node in backward.nodes if node.op == "placeholder"]
    tangents = places[n_kept:]
    undefined = {node for k, node in enumerate(tangents) if k in missing}
    if undefined:
        _prune(graph, set(tangents), undefined)
    gradients = [None if i in unwanted or origins[i] <= missing else gradient for i, gradient in enumerate(gradients)]
    asked = set(gradients)
    results: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    alive: dict[Gradient, fx.Node] = {k: node for k, node in enumerate(results) if k in asked}
    alive.update({("tangent", k): tangents[k] for k in missing if ("tangent", k) in asked})
    taken: set[fx.Node] = set()
    outputs = []
    for node in alive.values():
        with graph.inserting_before(graph.output_node()):
            if node in undefined:
                node = _zeros(graph, node, graph.output_node())
            outputs.append(owned(graph, node, node in taken) if undefined else node)
        taken.add(node)
    graph.output_node().args = (tuple(outputs),)
    for node in reversed(list(graph.nodes)):
        if node in undefined and node.op == "call_function":
            graph.erase_node(node)
    drop_dead(graph)
    kept = tuple(i for i, node in enumerate(places[:n_kept]) if node.users) if missing or unwanted else tuple(range(n_kept))
    for i, node in enumerate(places):
        if node in undefined or (i < n_kept and i not in kept):  # a tangent that nothing reads stays
            graph.erase_node(node)
    renumbered: dict[Gradient, Gradient] = {gradient: i for i, gradient in enumerate(alive)}
    return Reached(graph, kept, tuple(renumbered.get(gradient, gradient) for gradient in gradients))


def left_over(backward: fx.Graph, n_kept: int, first: frozenset[int], late: int) -> tuple[int, ...] | None:
    """The values kept that the tangent `late` needs when those of `first` have gone through the graph and freed what they read. None where both go through
    one formula that reads a value kept: there eager's engine refuses too."""
    places = [node for node in backward.nodes if node.op == "placeholder"]
    sides = {node: 1 if k in first else 2 if k == late else 4 for k, node in enumerate(places[n_kept:])}
    read: dict[fx.Node, frozenset[int]] = {node: frozenset((i,)) for i, node in enumerate(places[:n_kept])}
    needed: set[int] = set()
    for node in backward.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        values = frozenset[int]().union(*(read.get(source, ()) for source in sources))
        side = 0
        for source in sources:
            side |= sides.get(source, 0)
        if not side:
            read[node] = values
            continue
        sides[node] = side
        if side & 3 == 3 and values:
            return None
        if side & 2:
            needed |= values
    return tuple(sorted(needed))


def _prune(graph: fx.Graph, depending: set[fx.Node], undefined: set[fx.Node]) -> None:
    """Adds to `undefined` all that depends on nothing else; no other node reads one of them afterwards."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        sources = [source for source in node.all_input_nodes if source in depending]
        gone = [source for source in sources if source in undefined]
        if sources:
            depending.add(node)
        if not gone:
            continue
        if len(gone) == len(sources) and not is_random(node):
            undefined.add(node)
            continue
        rest = [source for source in sources if source not in undefined]
        if node.target in _ACCUMULATES and len(node.args) == 2 and not node.kwargs and len(rest) == 1 and _alike(node, rest[0]):
            node.replace_all_uses_with(rest[0])
            undefined.add(node)  # nobody reads it any more
            continue
        for source in gone:
            node.replace_input_with(source, _zeros(graph, source, node))


def _alike(a: fx.Node, b: fx.Node) -> bool:
    one, other = a.meta["val"], b.meta["val"]
    return (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype)


def _zeros(graph: fx.Graph, like: fx.Node, before: fx.Node) -> fx.Node:
    meta: TensorMeta = like.meta["val"]
    with graph.inserting_before(before):
        made = graph.call_function(PRIMS["full"], (meta.shape, 0, meta.dtype, meta.device))
    made.meta.update(val=TensorMeta.contiguous(meta.shape, meta.dtype, meta.device), stack=(), stage="backward")
    return made
