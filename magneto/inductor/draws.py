"""Random numbers that our own kernels draw on a CUDA device, bit for bit the library's (loops/philox.py).

Where every draw of a graph is a dropout of fresh memory, each becomes `magneto.dropout`, a loop body like others, of a state (seed, offset) that the host reads from the generator before the device's half runs and
advances as the library would: in recordings too, which read the states where each call writes them. A graph that draws otherwise as well stays with the library's calls altogether, since those count
while a stream is captured what the host cannot see.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from magneto.graph.fake_tensor import draws_numbers
from magneto.graph.meta import TensorMeta
from magneto.inductor.halves import agrees, multiprocessors
from magneto.inductor.loops.philox import advance_of, threads_of, vector_of
from magneto.inductor.lower.dropout import DROPOUT
from magneto.inductor.lower.graph import prim_name

DRAWN: Any = torch.ops.aten.native_dropout.default
MOST = 1 << 31  # elements: from here on the library draws in several kernels

# ---- graphs --------------------------------------------------------------------------------------------------------------


def draw_state(advance: int) -> None:
    """Stands in a graph for the state of one draw, which is sent to the device (devices.py)."""
    raise AssertionError("the host sends it")


def states_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is draw_state]


def aligned(graph: fx.Graph, written: Collection[int] = ()) -> tuple[int, ...]:
    """The inputs that must begin at a multiple of 16 bytes: their dropout is drawn as for such memory, by loops, and by the library where a recording has them copied or writes them (`written`)."""
    calls = [node for node in graph.nodes if node.target in (DROPOUT, DRAWN)]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    roots = {_input_of(node.args[0]) for node in calls if node.meta.get("of_input", "train" in node.kwargs)}
    roots.update(inputs if None in roots else [inputs[k] for k in written] if any(n.target is DRAWN for n in calls) else ())
    return tuple(k for k, node in enumerate(inputs) if node in roots and not _on_cpu(node))


def _input_of(node: Any) -> fx.Node | None:
    """The input that the node is a view of. None: it is computed."""
    while node.op != "placeholder" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if node.op == "placeholder" else None


def drawn_by_loops(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """The graph with its draws made by loops; the graph itself where the library makes them."""
    found = [n for n in graph.nodes if n.op == "call_function" and _draws(n)]
    if not found or not all(map(_is_ours, found)) or not all(map(_is_known, graph.nodes)) or not agrees(device):
        return graph
    made = fx.Graph(graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = _replaced(made, node, env, device) if node in found else made.node_copy(node, env.__getitem__)
    return made


def _replaced(made: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], device: torch.device) -> fx.Node:
    x, p = node.args[0], node.args[1]
    assert isinstance(x, fx.Node)
    meta = x.meta["val"]
    threads = threads_of(meta.numel, *multiprocessors(device))
    state = made.call_function(draw_state, (advance_of(meta.numel, threads),))
    state.meta["val"] = TensorMeta.contiguous((2,), torch.int64, device)
    call = made.call_function(DROPOUT, (env[x], state, p, threads, vector_of(meta.numel, meta.dtype.itemsize)))
    call.meta.update(node.meta, of_input="train" in node.kwargs)
    return call


def _draws(node: fx.Node) -> bool:
    """Does it draw from the device's generator?"""
    return draws_numbers(node.target, node.args) and not _on_cpu(node)


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    metas = value if isinstance(value, (tuple, list)) else (value,)
    return all(getattr(m, "device", torch.device("cpu")).type == "cpu" for m in metas)


def _is_ours(node: fx.Node) -> bool:
    """A dropout; its memory is aligned, or an input's, of which the trace gives `train` by keyword and which is looked at in each call (`aligned`)."""
    x, p, train = (*node.args, *node.kwargs.values(), None)[:3] if node.target is DRAWN else (None,) * 3
    if train is not True:
        return False
    meta: Any = x.meta["val"]  # type: ignore[union-attr]
    return (
        isinstance(p, float)
        and 0.0 < p < 1.0
        and 0 < meta.numel < MOST
        and meta.is_contiguous()
        and meta.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    )


def _is_known(node: fx.Node) -> bool:
    """Is it known whether the call draws? Operations of others, and functions, may without saying so."""
    if node.op != "call_function" or prim_name(node.target) is not None:
        return True
    return getattr(node.target, "namespace", "aten" if getattr(node.target, "__module__", "") == "_operator" else "") in ("aten", "prims")
