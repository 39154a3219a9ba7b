"""Gradients that a forward has made (`ahead.py`) in its backward: their factor, which mostly is 1, is no part of the compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from magneto.aot_autograd import ahead
from magneto.aot_autograd.partition import Gradient
from magneto.aot_autograd.reached import Reached
from magneto.aot_autograd.trace import drop_dead
from magneto.base.dataclass import dataclass, replace
from magneto.prims.table import PRIMS

Scale = Callable[[torch.Tensor, torch.Tensor], None]
"""Multiplies a tensor, in place, by a number that lies in the other one."""


@dataclass(frozen=True, slots=True)
class Handed:
    """`part` without the products of values kept with tangents: `scaled` has (place among the values kept, among the tangents that are there). Of the values kept those at `given`, which the graph
    does not take, are gradients themselves, ("given", place in it) in `part.gradients`."""

    part: Reached
    scaled: tuple[tuple[int, int], ...] = ()
    given: tuple[int, ...] = ()


def handed(part: Reached) -> Handed:
    """The graph is changed in place."""
    graph, output = part.graph, part.graph.output_node()
    places = [node for node in graph.nodes if node.op == "placeholder"]
    count = len(part.kept)
    kept, tangents = ({node: k for k, node in enumerate(some)} for some in (places[:count], places[count:]))
    scaled: list[tuple[int, int]] = []
    given: dict[fx.Node, int] = {}
    for node in list(graph.nodes):
        made, tangent = _factors(node)
        if made not in kept or tangent not in tangents or len(made.users) > 1 or made.meta["val"].nbytes < ahead.WORTH:  # type: ignore[union-attr]
            continue
        if output not in node.users:
            node.replace_all_uses_with(made)  # type: ignore[arg-type]
        elif len(node.users) == 1:
            given[node] = kept[made]  # type: ignore[arg-type]
        else:
            continue
        scaled.append((kept[made], tangents[tangent]))  # type: ignore[arg-type]
    results = list(output.args[0])  # type: ignore[arg-type]
    rest, order = [node for node in results if node not in given], list(given)
    output.args = (tuple(rest),)
    drop_dead(graph)
    for place in given.values():
        graph.erase_node(places[place])

    def renumbered(gradient: Gradient) -> Gradient:
        if not isinstance(gradient, int):
            return gradient
        node = results[gradient]
        return ("given", order.index(node)) if node in given else rest.index(node)

    gradients = tuple(renumbered(gradient) for gradient in part.gradients)
    return Handed(replace(part, gradients=gradients), tuple(scaled), tuple(given.values()))


def _factors(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """A value and a tangent, if `node` is their product that `ahead.py` has made. (Any other value may be somebody else's.)"""
    product = _unconverted(node)
    if "ahead" not in node.meta or product.target is not PRIMS["mul"]:
        return None, None
    wide, factor = product.args
    if not isinstance(factor, fx.Node) or factor.target is not PRIMS["broadcast_in_dim"] or not isinstance(wide, fx.Node):
        return None, None
    made = _unconverted(wide)
    dtypes = [one.meta["val"].dtype for one in (node, made, wide)]
    alike = dtypes[0] is dtypes[1] in ahead.TYPES and dtypes[2] is torch.promote_types(dtypes[0], torch.float32)
    return (made, _unconverted(factor.args[0])) if alike else (None, None)  # type: ignore[arg-type]


def _unconverted(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is PRIMS["convert_element_type"] else node  # type: ignore[return-value]


def scale_here(made: torch.Tensor, factor: torch.Tensor) -> None:
    """On the CPU."""
    number = factor.item()
    if number != 1:
        made.mul_(number)
