"""What an equal graph has become before, in this process or another (`kept_graph`), and for the CPU what of it runs here (`loaded`). Nothing that lowers or writes kernels is imported on the way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import fx

from magneto import _C
from magneto.aot_autograd.call import as_function, without_grad
from magneto.base.errors import warn_once
from magneto.base.events import counter, emit, timer
from magneto.base.flags import config
from magneto.base.logs import dump
from magneto.graph.layout import is_dense
from magneto.inductor.codegen.cpp_preamble import preamble
from magneto.inductor.replay import Replay
from magneto.inductor.runtime.build import Address, KernelText, build
from magneto.inductor.runtime.compiler import CompileError, NoCompiler, vector_math_level
from magneto.inductor.runtime.kept import Finished, key_of_graph, recall_data
from magneto.inductor.runtime.plan_code import PlanCode, show_plan

Compiled = Callable[..., Sequence[Any]]

DRAWN: Any = torch.ops.aten.native_dropout.default
AT_ONCE = 16  # bytes that a thread of the library's dropout reads at once
MUCH = 64 << 20  # bytes that a graph holds, from which on the process gives unused memory back before they are taken
ARENAS_KEPT = 1 << 30  # bytes that all plans together keep between calls; beyond it the oldest plans give theirs back


def kept_graph(
    graph: fx.Graph, name: str, written: Mapping[int, int], state: frozenset[int], training: bool, replay: Replay | None
) -> tuple[str | None, tuple[Compiled, frozenset[int]] | None]:
    """(the key of a graph that has not been decomposed yet, what compile_writing made of an equal one before)."""
    found = devices_of(graph)
    kind = found[0].type if found else ""
    key = key_of_graph(graph, written, state, training, kind) if kind in ("", "cuda") else None
    if key is None or len(found) > 1:
        return key, None
    try:
        if kind:
            from magneto.inductor.made import kept_on_cuda

            return key, kept_on_cuda(key, found[0], name, replay, loaded, plainly(graph, name, written))
        if (data := recall_data(key, len(Finished.__slots__))) is None:
            return key, None
        finished = Finished(*data)
        counter("graphs_from_store")
        return key, (loaded(finished, name), finished.written)
    except BuildFailed:
        return None, None


def plainly(graph: fx.Graph, name: str, written: Mapping[int, int]) -> Callable[[frozenset[int]], Compiled]:
    """Given the outputs that are to be written into inputs: the graph operation by operation."""

    def writing(done: frozenset[int]) -> Compiled:
        made = cache(lambda: without_grad(as_function(_drawing(graph), name)))

        def run(*inputs: Any) -> Sequence[Any]:
            found = list(made()(*inputs))
            for k in done:
                inputs[written[k]].detach().copy_(found[k])
                found[k] = inputs[written[k]]
            return found

        return run

    return writing


def _drawing(graph: fx.Graph) -> fx.Graph:
    """The graph with dropouts that draw as for memory of their own, where the graph has become another one whose views begin elsewhere."""
    if not any(_draws_afresh(node) for node in graph.nodes):
        return graph
    made = fx.Graph(graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = made.node_copy(node, env.__getitem__)
        if _draws_afresh(node):
            env[node].target = _dropout_of_its_own
    return made


def _draws_afresh(node: fx.Node) -> bool:
    """The trace gives `train` by place where eager's argument begins at a multiple of what a thread reads at once (aot_autograd/special.py)."""
    return node.target is DRAWN and len(node.args) == 3


def _dropout_of_its_own(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if x.data_ptr() % gcd(x.numel() * x.itemsize, AT_ONCE) and is_dense(x.shape, x.stride()):
        x = x.clone()
    return DRAWN(x, p, train)  # type: ignore[no-any-return]


def foreign_device(graph: fx.Graph) -> str | None:
    """The kind of the first device that is not the CPU: its memory is not ours to read."""
    return next((str(device.type) for device in devices_of(graph)), None)


def devices_of(graph: fx.Graph) -> list[torch.device]:
    """All devices but the CPU, with their numbers, as they come."""
    values = (node.meta.get("val") for node in graph.nodes)
    metas = (meta for value in values for meta in (value if isinstance(value, (tuple, list)) else (value,)))
    found = dict.fromkeys(d for meta in metas if (d := getattr(meta, "device", None)) is not None and d.type != "cpu")
    return list(dict.fromkeys(torch.device(d.type, d.index or 0) for d in found))


class BuildFailed(Exception):
    """There is no compiler, or it refused our text; the user has been warned."""


def loaded(finished: Finished, name: str) -> _C.Plan:
    """The plan in this process; kernels that neither this process nor the store has are built. BuildFailed."""
    text = preamble(vector_math_level())
    kernels = [KernelText.of(body, text) for _, body in finished.kernels]
    with timer("build"):
        addresses = built(kernels)
    code = finished.code.with_addresses(addresses)
    made = _C.Plan(code.instructions, code.n_registers, code.n_inputs, code.outputs, recycle=config.recycle_results)
    _remember(made, code)
    if finished.peak_bytes >= MUCH:
        give_back()
    _report(name, finished, kernels, code)
    return made


def built(kernels: list[KernelText]) -> dict[str, Address]:
    """Kernels by their hashes. BuildFailed."""
    result = build(kernels, preamble(vector_math_level())) if kernels else {}
    if isinstance(result, NoCompiler):
        warn_once("W002")
        raise BuildFailed(result.reason)
    if isinstance(result, CompileError):
        warn_once("W003", error=result.output.splitlines()[0] if result.output else "no message")
        dump("refused_kernels", ".c", result.source)
        raise BuildFailed(result.output)
    return result


def _report(name: str, finished: Finished, kernels: Sequence[KernelText], code: PlanCode) -> None:
    for (what, _), kernel in zip(finished.kernels, kernels, strict=True):
        emit("kernel", name=kernel.symbol, source=f"{what}\n{kernel.source}", graph=name)
    counter("kernels", finished.n_kernels)
    counter("kernels_distinct", len(kernels))
    counter("library_calls", finished.n_calls)
    counts = {
        "kernels": finished.n_kernels,
        "distinct": len(kernels),
        "library_calls": finished.n_calls,
        "inputs_written": finished.inputs_written,
    }
    held = {"arena_bytes": code.arena_bytes, "peak_bytes": finished.peak_bytes, "kept_bytes": code.kept_bytes}
    emit("artifact", artifact="plan", graph=name, **counts, **held)
    dump(f"{name}_plan", ".txt", lambda: f"# holds {finished.peak_bytes} bytes at its peak, besides its inputs\n{show_plan(code)}")


def give_back() -> None:
    """Memory that the allocator holds free goes back to the system, where it is glibc's: plans ask for large pieces, which do not fit between what eager calls and compiling have left
    (a ViT's training after a first step in eager: 1,510 MB -> 1,100)."""
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


# ---- arenas of plans that are not running -----------------------------------------------------------------------------------

_arenas: list[tuple[weakref.ref[Any], int]] = []
_arenas_lock = threading.Lock()


def _remember(plan: _C.Plan, code: PlanCode) -> None:
    """Bound what idle plans keep: the oldest give their workspaces back (a later call makes a fresh one)."""
    held = code.arena_bytes + code.kept_bytes
    if not held:
        return
    with _arenas_lock:
        _arenas[:] = [(ref, size) for ref, size in _arenas if ref() is not None]
        _arenas.append((weakref.ref(plan), held))
        total = sum(size for _, size in _arenas)
        for ref, size in _arenas[:-1]:
            if total <= ARENAS_KEPT:
                break
            if (old := ref()) is not None:
                old.release_workspace()
            total -= size
