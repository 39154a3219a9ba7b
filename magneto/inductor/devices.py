"""Graphs with tensors of the CPU and of one CUDA device: cut in two by `split`.

Eager lets single numbers of the CPU meet tensors of any device (the step count of an optimiser, a learning rate), and programs send what they make on the CPU over. What is
computed of the CPU's inputs alone becomes a graph of its own, which runs first; what of it the device reads is copied there. Indices and constants that depend on no input
belong to whoever reads them. What the CPU makes of results of the device (`loss.cpu()`) is a third graph, which runs behind; where the device goes on with that, the graph is refused.
The states of random draws (draws.py) are sent likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from magneto.graph.fake_tensor import draws_numbers
from magneto.graph.meta import TensorMeta
from magneto.graph.opinfo import stays
from magneto.inductor.draws import aligned, states_of
from magneto.inductor.halves import BEHIND, DEVICE, HOST, PACKED, Back, Halves, Sent
from magneto.inductor.lower.context import CannotLower, is_dense
from magneto.inductor.lower.graph import PRIM_ROWS, prim_name
from magneto.inductor.recall import devices_of


def split(
    graph: fx.Graph, written: Mapping[int, int] | None = None
) -> tuple[torch.device, fx.Graph | None, fx.Graph, fx.Graph | None, Halves]:
    """The CUDA device of a graph, its half on the host (None: nothing is to do there), that on the device, what the CPU does behind it (or None), and how they belong together. `written`:
    output -> the input whose new numbers it is. CannotLower for several devices, and where the device waits for what the CPU makes of its results."""
    device, behind = device_of(graph), _behind(graph)
    hosted = _hosted(graph, behind)
    results = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    of_cpu = hosted | behind
    sent = [n for n in graph.nodes if n in hosted and any(user not in of_cpu and user.op != "output" for user in n.users)]
    places: list[tuple[int, int] | None] = []
    made: tuple[list[Any], ...] = ([], [*sent], [])
    for result in results:
        if not isinstance(result, fx.Node):
            places.append(None)
            continue
        where = BEHIND if result in behind else HOST if result in hosted else DEVICE
        if where == DEVICE and _kind(result) not in (None, "cuda"):
            raise CannotLower("a tensor of the CPU that is made of no input leaves the graph")
        places.append((where, len(made[where])))
        made[where].append(result)
    effects = [n for n in graph.nodes if n.op == "call_function" and stays(n.target)]  # random numbers and checks that nobody reads
    last = [n for n in effects if n in behind]
    of_behind, of_host, of_device = made[BEHIND], made[HOST], made[DEVICE]
    reads, extra = [], {}
    for node in _needed((*of_behind, *last), lambda n: n not in behind and _kind(n) == ("cpu" if n in hosted else "cuda"))[1]:
        if node.op != "placeholder":
            where = HOST if node in hosted else DEVICE
            if where == HOST or node not in of_device:
                made[where].append(node)
            extra[node] = node.meta["val"]
            reads.append((where, len(of_host) - 1 if where == HOST else of_device.index(node)))
    after = _part(graph, of_behind, extra, last) if of_behind or last else None
    checks = [n for n in effects if n in hosted]
    host = _part(graph, of_host, {}, checks) if of_host or checks else None
    dense = [is_dense(n.meta["val"].shape, n.meta["val"].strides) for n in sent]
    extra = {n: _sent(n.meta["val"], device, same) for n, same in zip(sent, dense, strict=True)}
    kinds = tuple(Sent(tuple(m.shape), tuple(m.strides), m.dtype, same) for m, same in zip(extra.values(), dense, strict=True))
    rest = tuple(None if isinstance(result, fx.Node) else result for result in results)
    back, drawn = _back(graph, results, places, written or {}), states_of(graph)
    extra.update((n, n.meta["val"]) for n in drawn)
    draws = tuple(int(n.args[0]) for n in drawn)  # type: ignore[arg-type]
    part = _part(graph, of_device, extra, [n for n in effects if n not in of_cpu])
    return (
        device,
        host,
        part,
        after,
        Halves(kinds, tuple(places), rest, back, draws, aligned(graph, (written or {}).values()), tuple(reads)),
    )


def untouched(behind: fx.Graph | None, pairs: Mapping[int, int]) -> dict[int, int]:
    """The outputs of the device's half that may go into inputs' memory: what runs behind it must not read these inputs, nor raise (a region that raises begins anew)."""
    if behind is None:
        return dict(pairs)
    if any(n.op == "call_function" and n.target is not torch.ops.aten._to_copy.default for n in behind.nodes):
        return {}
    read = {k for k, n in enumerate(n for n in behind.nodes if n.op == "placeholder") if n.users}
    return {output: place for output, place in pairs.items() if place not in read}


def _back(
    graph: fx.Graph, results: Sequence[Any], places: Sequence[tuple[int, int] | None], written: Mapping[int, int]
) -> tuple[Back, ...]:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    found = []
    for output, place in enumerate(places):
        if place is None or place[0] != HOST or output not in written:
            continue
        made, target = results[output].meta["val"], inputs[written[output]].meta["val"]
        alike = (made.shape, made.dtype, made.device) == (target.shape, target.dtype, target.device) and made.strides == target.strides
        if (
            alike
            and is_dense(made.shape, made.strides)
            and results.count(results[output]) == 1
            and target.numel * made.dtype.itemsize <= PACKED
        ):
            found.append(Back(output, place[1], written[output], int(target.numel) * made.dtype.itemsize))
    return tuple(found)


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


def device_of(graph: fx.Graph) -> torch.device:
    """The one CUDA device of a graph. CannotLower for others, and for several."""
    found = devices_of(graph)
    if len(found) != 1:
        raise CannotLower("tensors of several devices")
    (device,) = found
    if device.type != "cuda":
        raise CannotLower(f"no kernels for {device.type}")
    return device


def _behind(graph: fx.Graph) -> set[fx.Node]:
    """What the CPU makes of results of the device. CannotLower where the device goes on with it, and where random numbers would be drawn in another order."""
    found: set[fx.Node] = set()
    drawn = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        sources, kind, draws = node.all_input_nodes, _kind(node), draws_numbers(node.target, node.args)
        comes = kind not in (None, "cuda") and any(_kind(s) == "cuda" for s in sources)
        if comes or any(s in found for s in sources):
            if kind == "cuda" or (comes and not isinstance(node.target, torch._ops.OpOverload)):
                raise CannotLower("the device uses what the CPU makes of its results")
            found.add(node)
            drawn = drawn or draws
        elif drawn and draws and kind != "cuda":
            raise CannotLower("the CPU draws random numbers for the device's results, and then others")
    return found


def _hosted(graph: fx.Graph, behind: set[fx.Node]) -> set[fx.Node]:
    """What is computed on the CPU, of inputs there or by operations that are no loops. Constants, and what is spread out of single numbers, are not (where something hosted reads them, it computes them too)."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output" or node in behind or _kind(node) == "cuda":
            continue
        sources = node.all_input_nodes
        if _kind(node) is None:
            if sources and all(s in found for s in sources):
                found.add(node)
            continue
        given = [s for s in sources if s in found]
        spread = all(_numel(s) == 1 for s in given) and _numel(node) != 1  # of single numbers: the device does that itself
        if node.op in ("placeholder", "get_attr") or prim_name(node.target) not in PRIM_ROWS or (given and not spread):
            found.add(node)
    return found


def _needed(roots: Iterable[fx.Node], given: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], dict[fx.Node, None]]:
    """What is computed for `roots`, and what of it is given."""
    needed: set[fx.Node] = set()
    found: dict[fx.Node, None] = {}
    work = list(roots)
    while work:
        node = work.pop()
        if given(node):
            found[node] = None
        elif node not in needed:
            needed.add(node)
            work.extend(node.all_input_nodes)
    return needed, found


def _part(graph: fx.Graph, results: Sequence[Any], extra: Mapping[fx.Node, Any], effects: Sequence[fx.Node] = ()) -> fx.Graph:
    """`effects`, and what `results` are computed of, over all placeholders of the graph and one for each node of `extra` (node -> its metadata there)."""
    needed = _needed((*results, *effects), extra.__contains__)[0]
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
