"""Whether, and how, a run of the captured graph in eager during backward is the same computation again: for higher derivatives, whose formulas PyTorch has.

Random numbers are drawn again from the state before the forward. Inputs that the graph writes take part as copies: of what was in them before, where anything depends on that (they must be small), which does not hold for batch norm's
statistics in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.joint import JointGraph
from magneto.aot_autograd.overloads import aten
from magneto.aot_autograd.partition import is_random
from magneto.aot_autograd.signature import Alias, Result
from magneto.base.dataclass import dataclass
from magneto.graph.meta import TensorMeta

_SMALL = 1 << 18  # bytes of a written input of which each forward may keep a copy
_STATISTICS = (3, 4)  # of batch norm: which arguments they are, and which results


@dataclass(frozen=True, slots=True)
class Replay:
    """`outputs`: positions of the differentiable results among the captured graph's outputs, and whether the result is what the output is a view of. `draws`: whether it draws random numbers. `written`: inputs that it writes;
    `before`: those of which the forward keeps a copy."""

    outputs: tuple[tuple[int, bool], ...]
    draws: bool
    written: tuple[int, ...]
    before: tuple[int, ...]

    def results(self, outputs: Sequence[Any]) -> list[Any]:
        return [outputs[place]._base if of_view else outputs[place] for place, of_view in self.outputs]

    def inputs(self, inputs: Sequence[Any], before: Mapping[int, torch.Tensor]) -> list[Any]:
        return [before.get(i, x).detach().clone() if i in self.written else x for i, x in enumerate(inputs)]


def replay_of(joint: JointGraph) -> Replay | None:
    """None when a second run is not the same."""
    signature = joint.signature
    written = tuple(mutation.index for mutation in signature.mutations)
    before = tuple(i for i in written if _matters(joint, (i,))) if _matters(joint, written) else ()
    if signature.single or any(i >= signature.n_inputs or joint.gradients[i] is not None for i in written) or not _small(joint, before):
        return None
    draws = any(is_random(node) for node in joint.graph.nodes)
    if draws and any(_elsewhere(node) for node in joint.graph.nodes if node.op == "placeholder"):
        return None
    views = ((i, output.base) for i, output in enumerate(signature.outputs) if isinstance(output, Alias))
    places = {base.index: (i, True) for i, base in views if isinstance(base, Result)}
    places.update({output.index: (i, False) for i, output in enumerate(signature.outputs) if isinstance(output, Result)})
    if any(index not in places for index in joint.differentiable):
        return None
    return Replay(tuple(places[index] for index in joint.differentiable), draws, written, before)


def _small(joint: JointGraph, before: Sequence[int]) -> bool:
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
    return all(inputs[i].meta["val"].nbytes <= _SMALL for i in before)


def _elsewhere(node: fx.Node) -> bool:
    meta = node.meta["val"]
    return isinstance(meta, TensorMeta) and meta.device.type != "cpu"


def _matters(joint: JointGraph, written: Sequence[int]) -> bool:
    """Whether a differentiable result or a gradient depends on what was in the written inputs."""
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder" and node.meta["stage"] == "forward"]
    depending = {inputs[i] for i in written}
    for node in joint.graph.nodes if depending else ():
        if not depending.isdisjoint(node.all_input_nodes) and not _statistics_only(node, depending):
            depending.add(node)
    results = [joint.results[index] for index in joint.differentiable]
    return not depending.isdisjoint([*results, *(node for node in joint.gradients if node is not None)])


def _statistics_only(node: fx.Node, depending: set[fx.Node]) -> bool:
    """A batch norm in training that depends on nothing but its statistics: all its results but the new statistics are apart from them."""
    if node.target is aten._native_batch_norm_legit_functional.default:
        others = [arg for i, arg in enumerate(node.args) if i not in _STATISTICS]
        return depending.isdisjoint(arg for arg in others if isinstance(arg, fx.Node))
    return False
