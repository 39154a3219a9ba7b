"""SizeTracker: a Python number that the graph computes, because it depends on how many elements an operation found.

`x[mask].shape[0]`, and what arithmetic makes of it (`rules_size.py`). As an operand it is a node of the graph; a branch on it is a break; outside the region it is the
number that the graph gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.graph.unknown import UnknownMeta, UnknownNumber

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine
    from magneto.dynamo.trackers.tensor import TensorTracker


class SizeTracker(Tracker):
    """`node` gives the number; `number` is what is known of it."""

    __slots__ = ("node", "number")
    shared = False
    unknown = True

    def __init__(self, node: Node, number: UnknownNumber) -> None:
        super().__init__()
        self.node = node
        self.number = number

    def python_type(self) -> type:
        return self.number.type

    def emit(self, em: Emitter) -> str:
        text = _outside(em, self.node)
        return em.output(self.node) if text is None else text

    def show(self) -> str:
        return f"{self.node.name}, a size that depends on data"


def _outside(em: Emitter, node: Node) -> str | None:
    """Text of what follows from sizes of inputs, which the region computes before the graph runs; None: of something in the graph."""
    if "place" in node.meta:
        source, dim = node.meta["place"]
        return em.source(source) if dim is None else em.early(f"{em.source(source)}.shape[{dim}]")
    if node.op != "call_function":
        return None
    args = [found for arg in node.args if (found := _outside(em, arg) if isinstance(arg, Node) else em.const(arg)) is not None]
    if len(args) < len(node.args):
        return None
    return em.early(f"{em.const(node.target, str(getattr(node.target, '__name__', 'fn')))}({', '.join(args)})")


def sizes_of(m: Machine, v: TensorTracker) -> TupleTracker:
    """`v.shape`."""
    found = [size_at(m, v, dim) if size is None else m.const(size) for dim, size in enumerate(v.meta.sizes())]
    return TupleTracker(found, torch.Size)


def size_at(m: Machine, v: TensorTracker, dim: int) -> Tracker:
    """`v.size(dim)`."""
    size = v.meta.sizes()[dim]
    if size is not None:
        return m.const(size)
    return m.size_node(v, "size", (dim,), lambda meta: meta.shape[dim])


def stride_at(m: Machine, v: TensorTracker, dim: int) -> Tracker:
    """`v.stride(dim)`."""
    if not isinstance(v.meta, UnknownMeta):
        return m.const(v.meta.strides[dim])
    found = {meta.strides[dim] for meta in v.meta.probes if meta is not None}
    return m.size_node(v, "stride", (dim,), lambda meta: meta.strides[dim]) if len(found) > 1 else m.const(found.pop())


def numel_of(m: Machine, v: TensorTracker) -> Tracker:
    """`v.numel()`."""
    if isinstance(v.meta, UnknownMeta) and None in v.meta.sizes():
        return m.size_node(v, "numel", (), lambda meta: meta.numel)
    return m.const(v.meta.numel)
