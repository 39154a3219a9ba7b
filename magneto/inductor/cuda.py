"""`compile_on_cuda`: as `compile.compile_writing`, for a graph whose tensors are on one CUDA device.

The same lowering, scheduler and plan; kernels are Triton's, library calls ATen's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from magneto import _C
from magneto.base.events import counter, emit, timer
from magneto.base.logs import KERNELS, dump, log, logging
from magneto.inductor.codegen.cuda_plan import cuda_plan
from magneto.inductor.codegen.plan import PlanCode, show_plan
from magneto.inductor.codegen.triton import TritonKernel, triton_kernel
from magneto.inductor.describe import describe
from magneto.inductor.devices import Joined, split
from magneto.inductor.loops.ir import Buffer, LibraryCall, Node, Pointwise, Program, ViewOf
from magneto.inductor.lower.context import CannotLower
from magneto.inductor.lower.graph import lower_graph
from magneto.inductor.replay import Replay
from magneto.inductor.runtime.cuda_graphs import Graphed, recordable
from magneto.inductor.runtime.triton_launch import Launcher, launchers, source_of, why_not
from magneto.inductor.schedule.inplace import write_inputs
from magneto.inductor.schedule.kernel import FusedKernel, Step
from magneto.inductor.schedule.memory import plan_memory
from magneto.inductor.schedule.online import online_sums
from magneto.inductor.schedule.schedule import schedule
from magneto.inductor.schedule.split import split_reductions


class NoKernels(Exception):
    """Kernels cannot be built here, or Triton refuses one; says why."""


WORTH_RECORDING = 4  # launches: a replay, with its copies, costs as much as three

Compiled = Callable[..., Sequence[Any]]
Host = Callable[[fx.Graph, str], Compiled]
Build = Callable[[Iterable[TritonKernel]], dict[TritonKernel, Launcher]]


def compile_on_cuda(
    graph: fx.Graph, name: str, written: Mapping[int, int], host: Host, replay: Replay | None
) -> tuple[Compiled, frozenset[int]]:
    """The compiled graph, and which outputs it writes into inputs itself. `host`: compiles what runs on the CPU. CannotLower, CannotSchedule, CannotEmit, NoKernels."""
    device, halves = split(graph)
    if reason := why_not(device):
        raise NoKernels(reason)
    pairs = halves.written(written)
    run, done, launches = compile_for(halves.device, name, pairs, device, lambda kernels: _built(kernels, device))
    if replay is not None and launches >= WORTH_RECORDING and _recordable(halves.device):
        cloned = (
            None if replay.results is None else sum(1 for place in halves.places[: replay.results] if place is not None and not place[0])
        )
        run = Graphed(run, device, name, launches, cloned, frozenset(pairs[k] for k in done))
    if halves.host is None and all(place is not None for place in halves.places):
        return run, halves.whole(done)
    return Joined(host(halves.host, f"{name}_host") if halves.host is not None else None, run, halves, device), halves.whole(done)


def replayed(run: Compiled, graph: fx.Graph, name: str, replay: Replay) -> Compiled:
    """A callable that runs the graph operation by operation, recorded; `run` itself where not all is on one device."""
    try:
        device, halves = split(graph)
    except CannotLower:
        return run
    launches = sum(node.op == "call_function" for node in graph.nodes)
    return Graphed(run, device, name, launches, replay.results) if halves.host is None and _recordable(graph) else run


def _recordable(graph: fx.Graph) -> bool:
    """Can what the graph launches be recorded: it does something, and nothing in it waits for the device or draws from a generator of the program's own?"""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return bool(calls) and all(recordable(n.target) and n.kwargs.get("generator") is None for n in calls)


def compile_for(
    graph: fx.Graph, name: str, written: Mapping[int, int], device: torch.device, build: Build
) -> tuple[Compiled, frozenset[int], int]:
    """As compile_on_cuda, for a graph whose memory is all on the device; also how many launches and library calls a run makes. `build`: what makes launchers."""
    with timer("lower"):
        program = split_reductions(online_sums(_on_device(lower_graph(graph), device)))
    with timer("schedule"):
        updates = frozenset(view.buffer for k in written if isinstance(view := program.outputs[k], ViewOf))
        plan = write_inputs(schedule(program, updates, True), written)
    with timer("codegen"):
        kernels = {step: triton_kernel(step, plan.buffers) for step in plan.steps if isinstance(step, FusedKernel)}
    with timer("build"):
        made = build(kernels.values())
    with timer("plan"):
        code = cuda_plan(plan, plan_memory(plan, True, 0), lambda step: made[kernels[step]])  # type: ignore[index]
    _report(name, plan.steps, kernels, code)
    direct = frozenset(k for k in written if isinstance(view := program.outputs[k], ViewOf) and view.buffer in plan.into)
    return _C.Plan(code.instructions, code.n_registers, code.n_inputs, code.outputs), direct, len(plan.steps)


def _built(kernels: Iterable[TritonKernel], device: torch.device) -> dict[TritonKernel, Launcher]:
    try:
        return launchers(kernels, device)
    except Exception as error:  # Triton refuses our text, or its own compilers fail
        raise NoKernels(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}") from error


def _on_device(program: Program, device: torch.device) -> Program:
    """The program with every buffer on the device: constants and indices that depend on no input may say otherwise."""

    def moved(buffer: Buffer) -> Buffer:
        return buffer if buffer.device == device else replace(buffer, device=device)

    def node(n: Node) -> Node:
        if isinstance(n, LibraryCall) or all(b.device == device for b in n.buffers):
            return n
        return replace(n, buffer=moved(n.buffer)) if isinstance(n, Pointwise) else replace(n, buffers=tuple(map(moved, n.buffers)))

    return replace(program, nodes=tuple(map(node, program.nodes)))


def _report(name: str, steps: Sequence[Step], kernels: Mapping[FusedKernel, TritonKernel], code: PlanCode) -> None:
    distinct = {kernel: step for step, kernel in kernels.items()}
    for kernel, step in distinct.items():
        text = "\n".join(f"# {line.strip(' /*')}" for line in describe(step).split("\n")) + "\n" + source_of(kernel)
        emit("kernel", name=", ".join(step.stored), source=text, graph=name)
        if logging(KERNELS):
            log(KERNELS, f"{name}: Triton kernel for {', '.join(step.stored)}, grid {kernel.grid}")
    calls = sum(isinstance(step, LibraryCall) for step in steps)
    counter("kernels", len(kernels))
    counter("kernels_distinct", len(distinct))
    counter("library_calls", calls)
    emit("artifact", artifact="plan", graph=name, kernels=len(kernels), distinct=len(distinct), library_calls=calls)
    dump(f"{name}_plan", ".txt", lambda: show_plan(code))
