"""`compile_on_cuda`: as `compile.compile_writing`, for a graph whose tensors are on one CUDA device.

The same lowering, scheduler and plan; kernels are Triton's, library calls ATen's. What is made of a graph is data (`Made`), which is kept on disk as the CPU's is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from magneto.base.events import counter, emit, timer
from magneto.base.flags import config
from magneto.base.logs import KERNELS, dump, log, logging
from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.plan import Builder, plan_code
from magneto.inductor.codegen.triton import memory_of, triton_kernel
from magneto.inductor.codegen.triton_product import triton_product
from magneto.inductor.codegen.triton_table import columns_of, triton_table
from magneto.inductor.describe import describe
from magneto.inductor.devices import device_of, split, untouched
from magneto.inductor.draws import aligned, drawn_by_loops
from magneto.inductor.halves import Compiled
from magneto.inductor.loops.ir import Buffer, LibraryCall, Node, Program, Reduction, ViewOf
from magneto.inductor.lower.context import CannotLower
from magneto.inductor.lower.graph import lower_graph
from magneto.inductor.made import (
    WORTH_RECORDING,
    Build,
    DevicePlan,
    Made,
    NoKernels,
    Plain,
    built,
    key_on,
    loaded,
    plain_of,
    results_of,
    whole,
)
from magneto.inductor.partial_products import join_products
from magneto.inductor.replay import Replay
from magneto.inductor.runtime import claim, triton_workers
from magneto.inductor.runtime.cuda_graphs import Graphed
from magneto.inductor.runtime.kept import Finished, keep_data
from magneto.inductor.runtime.plan_code import Launched, PlanCode, TritonTable, show_plan
from magneto.inductor.runtime.record import recordable
from magneto.inductor.runtime.triton_launch import begin, source_of, why_not
from magneto.inductor.runtime.tuning import tuned
from magneto.inductor.schedule.alike import likeness
from magneto.inductor.schedule.columns import join_columns
from magneto.inductor.schedule.inplace import write_inputs
from magneto.inductor.schedule.kernel import FusedKernel, Kernel, OrderedKernel, TableKernel
from magneto.inductor.schedule.memory import plan_memory
from magneto.inductor.schedule.online import online_sums
from magneto.inductor.schedule.product import TiledKernel
from magneto.inductor.schedule.repeat import repeated
from magneto.inductor.schedule.results import results_last
from magneto.inductor.schedule.scatter import with_scatters
from magneto.inductor.schedule.schedule import Schedule, schedule
from magneto.inductor.schedule.segments import first_blocks
from magneto.inductor.schedule.split import split_reductions
from magneto.inductor.schedule.table import gather
from magneto.inductor.schedule.unroll import unrolled

WORTH_A_TABLE = 16  # kernels in the middle of a graph, whose addresses are sent anew in each call that is no replay

Begin = Callable[[Launched], None]
Host = Callable[[fx.Graph, str, frozenset[int]], tuple[Compiled, Finished | None]]


def compile_on_cuda(
    graph: fx.Graph, name: str, written: Mapping[int, int], host: Host, replay: Replay | None, plain: Plain, key: str | None = None
) -> tuple[Compiled, frozenset[int]]:
    """The compiled graph, and which outputs it writes into inputs itself. `host`: compiles what runs on the CPU. `key`: under which it is kept. CannotLower, CannotSchedule, CannotEmit,
    NoKernels."""
    if reason := why_not(device := device_of(graph)):
        raise NoKernels(reason)
    device, before, graph, after, halves = split(drawn_by_loops(graph, device) if config.draw_in_kernels else graph, written)
    pairs = untouched(after, halves.written(written))
    triton_workers.start()
    plan = _planned(graph, name, pairs, device, results_of(halves, replay) or 0, lambda kernel: begin(kernel, device))
    run = loaded(plan, lambda kernels: built(kernels, device))
    first = host(before, f"{name}_host", halves.lent) if before is not None else None
    last = host(after, f"{name}_behind", frozenset()) if after is not None else None
    beside, finished = zip(*(one or (None, None) for one in (first, last)), strict=True)
    made = Made(device, plan, halves, pairs, _recordable(graph), *finished)
    if key is not None and all(one is None or one[1] is not None for one in (first, last)):
        keep_data(key_on(key, device), plain_of(made))
    return whole(made, run, beside, name, replay, plain), made.written


def replayed(run: Compiled, graph: fx.Graph, name: str, replay: Replay) -> Compiled:
    """A callable that runs the graph operation by operation, recorded; `run` itself where not all is on one device."""
    try:
        device, host, _, behind, _ = split(graph)
    except CannotLower:
        return run
    launches = sum(node.op == "call_function" for node in graph.nodes)
    alone = host is None and behind is None and not aligned(graph)
    return Graphed(run, device, name, launches, replay.results) if alone and _recordable(graph) else run


def _recordable(graph: fx.Graph) -> bool:
    """Can what the graph launches be recorded: it does something, and nothing in it waits for the device or draws from a generator of the program's own?"""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    return bool(calls) and all(map(recordable, calls))


# ---- the device's half ---------------------------------------------------------------------------------------------------


def compile_for(
    graph: fx.Graph, name: str, written: Mapping[int, int], device: torch.device, build: Build
) -> tuple[Compiled, frozenset[int], int]:
    """As compile_on_cuda, for a graph whose memory is all on the device; also how many launches and library calls a run makes. `build`: what makes launchers."""
    plan = _planned(graph, name, written, device)
    return loaded(plan, build)[0], plan.direct, plan.launches


def _planned(
    graph: fx.Graph, name: str, written: Mapping[int, int], device: torch.device, results: int = 0, begin: Begin | None = None
) -> DevicePlan:
    """`results`: how many outputs at the front are copied out of a recording. `begin`: is told each kernel as soon as there is its text."""
    with timer("lower"):
        graph = join_products(graph)
        program = split_reductions(online_sums(_on_device(lower_graph(graph, on_gpu=True), device)))
    with timer("schedule"):
        updates = frozenset(view.buffer for k in written if isinstance(view := program.outputs[k], ViewOf))
        plan = join_columns(with_scatters(schedule(program, updates, True)))
        plan = repeated(gather(write_inputs(unrolled(plan), written), WORTH_A_TABLE, False), WORTH_A_TABLE)
    if config.max_autotune and device.type == "cuda":
        with timer("tune"):
            plan = tuned(plan, device)
    names = [view.buffer if isinstance(view, ViewOf) else "" for view in program.outputs]
    plan = results_last(plan, frozenset(names[:results]).difference(names[results:]), WORTH_RECORDING)
    with timer("codegen"):
        texts = _texts(plan, begin)
    with timer("plan"):
        numbers = {kernel: n for n, kernel in enumerate(dict.fromkeys(texts.values()))}
        memory = plan_memory(plan, True, 0, _given(graph, program))
        code = plan_code(plan, memory, lambda step: numbers[texts[step]], CudaBuilder)
    _report(name, plan, texts, code)
    direct = frozenset(k for k in written if isinstance(view := program.outputs[k], ViewOf) and view.buffer in plan.into)
    return DevicePlan(code, tuple(numbers), direct, len(plan.steps), _lasting(plan), first_blocks(plan, memory))


class CudaBuilder(Builder):
    """A kernel is a LAUNCH until its launcher is known: ("LAUNCH", number of the kernel, registers). Every buffer is allocated when it is first written and freed after its last use: torch's
    allocator serves that from blocks that it keeps, by streams."""

    def kernel(self, step: FusedKernel | OrderedKernel, address: Any) -> None:
        self.instructions.append(("LAUNCH", address, tuple(self.buffer(name) for name in parameters(step))))

    def table(self, step: TableKernel, address: Any) -> None:
        own = sorted(set(columns_of(step, self.plan.into)))
        self.instructions.append(("LAUNCH", address, tuple(self.buffer(row[c]) for row in step.rows for c in own)))

    def taken_over(self, source: str, buffer: Buffer, register: int) -> int:
        """An input's memory is another's only if nobody else holds it."""
        other = self.plan.buffers[source]
        if self.registers[source] >= self.n_inputs:
            return super().taken_over(source, buffer, register)
        if (other.shape, other.strides) == (buffer.shape, buffer.strides):
            self.instructions.append(("CALL", register, claim.claim, (self.registers[source],), ()))
        else:
            layout = {"dtype": buffer.dtype, "device": buffer.device}
            self.instructions.append(("ALLOC", register, torch.empty_strided, (buffer.shape, buffer.strides), layout, False))
        return register


def _texts(plan: Schedule, begin: Begin | None) -> dict[Kernel, Launched]:
    """The text of each kernel; of kernels that are alike it is written once."""
    written: dict[Hashable, Launched] = {}
    texts: dict[Kernel, Launched] = {}
    for step in plan.steps:
        if isinstance(step, LibraryCall):
            continue
        loops = isinstance(step, FusedKernel) and not isinstance(step, TiledKernel)
        key: Hashable = (likeness(step), memory_of(step, plan.buffers)) if loops else step  # type: ignore[arg-type]
        if key not in written:
            written[key] = _text_of(step, plan)
            if begin is not None:
                begin(written[key])
        texts[step] = written[key]
    return texts


def _text_of(step: Kernel, plan: Schedule) -> Launched:
    if isinstance(step, TiledKernel):
        return triton_product(step, plan.buffers)
    assert not isinstance(step, OrderedKernel), "they have become pairs of kernels"
    return triton_table(step, plan.into) if isinstance(step, TableKernel) else triton_kernel(step, plan.buffers)


def _given(graph: fx.Graph, program: Program) -> frozenset[str]:
    """Large inputs of a backward: it may be the only one that holds what was kept for it."""
    of_backward = any(node.op == "placeholder" and node.meta.get("stage") == "backward" for node in graph.nodes)
    if not of_backward or not claim.available():
        return frozenset()
    return frozenset(b.name for b in program.inputs if b is not None and b.nbytes >= claim.WORTH)  # type: ignore[operator]


def _lasting(plan: Schedule) -> frozenset[int]:
    """Inputs in whose memory outputs may lie: library calls may return views."""
    names = {view.buffer for view in plan.program.outputs if isinstance(view, ViewOf)}
    for step in reversed(plan.steps):
        if isinstance(step, LibraryCall) and step.may_alias and any(b.name in names for b in step.buffers):
            names.update(view.buffer for view in step.views)
    return frozenset(k for k, b in enumerate(plan.program.inputs) if b is not None and b.name in names)


def _on_device(program: Program, device: torch.device) -> Program:
    """The program with every buffer on the device: constants and indices that depend on no input may say otherwise."""

    def moved(buffer: Buffer) -> Buffer:
        return buffer if buffer.device == device else replace(buffer, device=device)

    def node(n: Node) -> Node:
        if isinstance(n, LibraryCall) or all(b.device == device for b in n.buffers):
            return n
        return replace(n, buffers=tuple(map(moved, n.buffers))) if isinstance(n, Reduction) else replace(n, buffer=moved(n.buffer))

    return replace(program, nodes=tuple(map(node, program.nodes)))


def _report(name: str, plan: Schedule, texts: Mapping[Kernel, Launched], code: PlanCode) -> None:
    distinct = {kernel: step for step, kernel in texts.items()}
    for kernel, step in distinct.items():
        simple = kernel.kernel if isinstance(kernel, TritonTable) else kernel
        text = "\n".join(f"# {line.strip(' /*')}" for line in describe(step).split("\n")) + "\n" + source_of(simple)
        emit("kernel", name=", ".join(step.writes), source=text, graph=name)
        if logging(KERNELS):
            log(KERNELS, f"{name}: Triton kernel for {', '.join(step.writes)}, grid {simple.grid}")
    calls = sum(isinstance(step, LibraryCall) for step in plan.steps)
    counter("kernels", len(texts))
    counter("kernels_distinct", len(distinct))
    counter("library_calls", calls)
    emit("artifact", artifact="plan", graph=name, kernels=len(texts), distinct=len(distinct), library_calls=calls)
    dump(f"{name}_plan", ".txt", lambda: show_plan(code))
