"""Small inputs whose strides vary from call to call (the last tokens of sequences that grow), and that a graph of an inference only reads, are made dense ahead of it: it is compiled once for all strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from magneto.backends.sized import varying_sizes
from magneto.base.dataclass import dataclass
from magneto.graph.dense import dense
from magneto.graph.specialise import specialised

Compiled = Callable[..., Any]
MOST = 1 << 18  # bytes: to copy more costs more than to know strides


@dataclass(frozen=True, slots=True)
class Laid:
    """A graph for dense inputs. `places`: these, and their dimensions from outside in; none where they lie in that order."""

    gm: fx.GraphModule
    places: tuple[tuple[int, tuple[int, ...]], ...]

    def given(self, inputs: Sequence[Any]) -> list[Any]:
        """Inputs for it."""
        found = list(inputs)
        for k, order in self.places:
            found[k] = _copied(found[k], order)
        return found

    def ahead_of(self, compiled: Compiled) -> Compiled:
        """What is compiled, for inputs as they come."""

        def run(*inputs: Any) -> Any:
            return compiled(*self.given(inputs))

        return run


def _copied(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    if not order:
        return tensor.clone(memory_format=torch.contiguous_format)
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def laid_dense(gm: fx.GraphModule, inputs: Sequence[Any], exact: bool) -> Laid | None:
    """None where there are no such inputs. `exact`: the last bits of sums are eager's, which follow strides."""
    rows, meta = varying_sizes(gm), gm.meta["magneto"]
    written = meta.get("mutated_inputs", ())
    may = sorted({k for k, dim, *_ in rows if dim < 0 and k not in written and _is_cheap(inputs[k], exact)})
    if not may or (written and _share_memory(inputs)):
        return None
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    outputs = set(gm.graph.output_node().all_input_nodes)
    for chosen in (may, *([k] for k in may if len(may) > 1)):
        found = dense(meta["resizer"], {placeholders[k] for k in chosen}, outputs)
        if found is None:
            continue
        orders = [(k, found.orders[placeholders[k]][::-1]) for k in chosen]
        places = tuple((k, () if order == tuple(sorted(order)) else order) for k, order in orders)
        return Laid(_module(gm, found.resizer, placeholders, chosen), places)
    return None


def _is_cheap(tensor: torch.Tensor, exact: bool) -> bool:
    return tensor.nbytes <= MOST and not (exact and (tensor.is_floating_point() or tensor.is_complex()))


def _share_memory(inputs: Sequence[Any]) -> bool:
    """(Guards see to it that inputs which do not share memory, of a graph that writes some, do not in other calls.)"""
    storages = [x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)]
    return len(set(storages)) < len(storages)


def _module(gm: fx.GraphModule, resizer: Any, placeholders: Sequence[fx.Node], copies: Sequence[int]) -> fx.GraphModule:
    rows = tuple(row for k, node in enumerate(placeholders) for row in resizer.rows(k, node))
    told = dict(gm.meta["magneto"])
    told["state_inputs"] = tuple(k for k in told.get("state_inputs", ()) if k not in copies)  # what is computed of a copy is not kept
    made = fx.GraphModule(gm, gm.graph)
    made.meta.update(gm.meta, magneto={**told, "varying": rows, "resizer": resizer})
    return made if rows else specialised(made, resizer.run(()))
