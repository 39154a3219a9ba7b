"""Graphs with tensors of the CPU and of one CUDA device: cut in two by `split`.

Eager lets single numbers of the CPU meet tensors of any device (the step count of an optimiser, a learning rate), and programs send what they make on the CPU over. What is
computed of the CPU's inputs alone becomes a graph of its own, which runs first; what of it the device reads is copied there. Indices and constants that depend on no input
belong to whoever reads them. What comes back from the device is not cut: such a graph is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from magneto.graph.meta import TensorMeta
from magneto.inductor.lower.context import CannotLower, is_dense
from magneto.inductor.lower.graph import PRIM_ROWS, prim_name

Compiled = Callable[..., Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Halves:
    """`host` takes the whole graph's inputs and returns `sent` values for the device, then its outputs; `device` takes the inputs and the sent values. `places`:
    per output of the whole (of the host?, position there). A half without outputs is None."""

    host: fx.Graph | None
    device: fx.Graph
    sent: tuple[bool, ...]  # per sent value: is its memory dense? (it is made so before it is sent)
    places: tuple[tuple[bool, int] | None, ...]
    rest: tuple[Any, ...]  # outputs that are no nodes

    def written(self, pairs: Mapping[int, int]) -> dict[int, int]:
        """The outputs that may go into inputs' memory, counted in the device's half. (The host's do not: it runs before what may raise.)"""
        found = {output: self.places[output] for output in pairs}
        return {place[1]: pairs[output] for output, place in found.items() if place is not None and not place[0]}

    def whole(self, done: frozenset[int]) -> frozenset[int]:
        """Outputs of the device's half, counted in the whole."""
        return frozenset(k for k, place in enumerate(self.places) if place is not None and not place[0] and place[1] in done)


def split(graph: fx.Graph) -> tuple[torch.device, Halves]:
    """The CUDA device of a graph, and its halves. CannotLower for several devices, and where the CPU waits for the device."""
    device = _device(graph)
    hosted = _hosted(graph, device)
    output = graph.output_node()
    results = tuple(output.args[0])  # type: ignore[arg-type]
    sent = [n for n in graph.nodes if n in hosted and any(user not in hosted and user.op != "output" for user in n.users)]
    places: list[tuple[bool, int] | None] = []
    of_host: list[fx.Node] = []
    of_device: list[Any] = []
    for result in results:
        if not isinstance(result, fx.Node):
            places.append(None)
        elif result in hosted:
            places.append((True, len(sent) + len(of_host)))
            of_host.append(result)
        else:
            if _kind(result) not in (None, "cuda"):
                raise CannotLower("a tensor of the CPU that is made of no input leaves the graph")
            places.append((False, len(of_device)))
            of_device.append(result)
    host = _part(graph, (*sent, *of_host), {}) if sent or of_host else None
    dense = tuple(is_dense(n.meta["val"].shape, n.meta["val"].strides) for n in sent)
    extra = {n: _sent(n.meta["val"], device, same) for n, same in zip(sent, dense, strict=True)}
    return device, Halves(host, _part(graph, of_device, extra), dense, tuple(places), results)


def _sent(meta: TensorMeta, device: torch.device, same: bool) -> TensorMeta:
    return replace(meta if same else TensorMeta.contiguous(meta.shape, meta.dtype), device=device)


def _metas(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(m for m in (value if isinstance(value, (tuple, list)) else (value,)) if getattr(m, "device", None) is not None)


def _numel(node: fx.Node) -> int:
    return sum(int(m.numel) for m in _metas(node))


def _kind(node: fx.Node) -> str | None:
    metas = _metas(node)
    return str(metas[0].device.type) if metas else None


def _device(graph: fx.Graph) -> torch.device:
    found = {m.device for node in graph.nodes for m in _metas(node) if m.device.type != "cpu"}
    if len(found) != 1:
        raise CannotLower("tensors of several devices")
    (device,) = found
    if device.type != "cuda":
        raise CannotLower(f"no kernels for {device.type}")
    return device if device.index is not None else torch.device("cuda", 0)


def _hosted(graph: fx.Graph, device: torch.device) -> set[fx.Node]:
    """What is computed on the CPU, of inputs there or by operations that are no loops. Constants, and what is spread out of single numbers, are not (where something hosted reads them, it computes them too)."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output" or _kind(node) == "cuda":
            continue
        sources = node.all_input_nodes
        if _kind(node) is None:
            if sources and all(s in found for s in sources):
                found.add(node)
            continue
        if any(_kind(s) == "cuda" for s in sources):
            raise CannotLower("a result of the device is used on the CPU")
        given = [s for s in sources if s in found]
        spread = all(_numel(s) == 1 for s in given) and _numel(node) != 1  # of single numbers: the device does that itself
        if node.op in ("placeholder", "get_attr") or prim_name(node.target) not in PRIM_ROWS or (given and not spread):
            found.add(node)
    return found


def _part(graph: fx.Graph, results: Sequence[Any], extra: Mapping[fx.Node, Any]) -> fx.Graph:
    """What `results` are computed of, over all placeholders of the graph and one for each node of `extra` (node -> its metadata there)."""
    needed: set[fx.Node] = set()
    work = [r for r in results if r not in extra]
    while work:
        node = work.pop()
        if node not in needed and node not in extra:
            needed.add(node)
            work.extend(node.all_input_nodes)
    made = fx.Graph(graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = made.node_copy(node, env.__getitem__)
            if node not in needed:
                env[node].meta["val"] = None
    for number, (node, meta) in enumerate(extra.items()):
        env[node] = made.placeholder(f"sent_{number}")
        env[node].meta["val"] = meta
    for node in graph.nodes:
        if node in needed and node.op not in ("placeholder", "output"):
            env[node] = made.node_copy(node, env.__getitem__)
    made.output(tuple(env[r] for r in results))
    return made


class Joined:
    """Both halves as one callable."""

    def __init__(self, host: Compiled | None, device: Compiled, halves: Halves, where: torch.device) -> None:
        self.host, self.device, self.where = host, device, where
        self.sent, self.places = halves.sent, halves.places
        self.rest = tuple(None if place is not None else value for place, value in zip(halves.places, halves.rest, strict=True))

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        made = self.host(*inputs) if self.host is not None else ()
        found = self.device(*inputs, *((t if dense else t.contiguous()).to(self.where) for dense, t in zip(self.sent, made, strict=False)))
        return tuple(
            [rest if place is None else (made if place[0] else found)[place[1]] for place, rest in zip(self.places, self.rest, strict=True)]
        )
