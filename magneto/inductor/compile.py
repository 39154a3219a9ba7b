"""`compile_graph`: a functional graph of prims and library calls becomes a callable.

lower -> schedule -> write kernels -> build -> plan. What cannot be compiled (no compiler on the machine, a symbolic size, a dtype without a C type)
runs as the graph itself, operation by operation in eager, with one warning or event that names the reason; results are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import fx

from magneto import _C
from magneto.aot_autograd.call import as_function, without_grad
from magneto.base.errors import warn_once
from magneto.base.events import emit, timer
from magneto.base.logs import KERNELS, LOOPS, log, logging, trace_kernel
from magneto.base.varying import any_size
from magneto.inductor.codegen.cpp import kernel_text
from magneto.inductor.codegen.cpp_ordered import ordered_text
from magneto.inductor.codegen.cpp_preamble import preamble
from magneto.inductor.codegen.cpp_table import table_text
from magneto.inductor.codegen.cpp_types import CannotEmit
from magneto.inductor.codegen.plan import plan_code
from magneto.inductor.convolve import hides_nan
from magneto.inductor.describe import describe
from magneto.inductor.loops.ir import LibraryCall, Program, ViewOf
from magneto.inductor.lower.context import CannotLower
from magneto.inductor.lower.graph import lower_graph
from magneto.inductor.recall import BuildFailed, Compiled, foreign_device, loaded, plainly
from magneto.inductor.replay import Replay
from magneto.inductor.runtime.build import KernelText
from magneto.inductor.runtime.compiler import vector_math_level
from magneto.inductor.runtime.invalid import FORGET, LOOK
from magneto.inductor.runtime.kept import Finished, keep
from magneto.inductor.schedule.alike import likeness
from magneto.inductor.schedule.group import CannotSchedule
from magneto.inductor.schedule.inplace import write_inputs
from magneto.inductor.schedule.kernel import FusedKernel, Kernel, TableKernel
from magneto.inductor.schedule.memory import peak_bytes, plan_memory
from magneto.inductor.schedule.prepared import keep_results
from magneto.inductor.schedule.schedule import Schedule, schedule
from magneto.inductor.schedule.table import gather
from magneto.inductor.schedule.unroll import unrolled

CHEAPLY = '__attribute__((optimize("O1"))) '
"""Before a kernel that runs seldom or does next to nothing: gcc takes half the time, and simd loops are vectorised all the same. (clang ignores it.)"""
SMALL = 4096  # points of a pointwise kernel that takes a microsecond at any level


def compile_graph(graph: fx.Graph, name: str = "graph") -> Compiled:
    """The compiled graph: called with one positional argument per placeholder, returns the values of the output node.

    Outputs are fresh memory with the strides of their meta["val"]. Thread-safe. Grad mode is off while it runs.
    """
    return compile_writing(graph, name, {})[0]


def compile_writing(
    graph: fx.Graph, name: str, written: Mapping[int, int], key: str | None = None, state: frozenset[int] = frozenset(),
    training: bool = False, replay: Replay | None = None,
) -> tuple[Compiled, frozenset[int]]:  # fmt: skip
    """As compile_graph, for a graph some of whose outputs (keys of `written`) serve for nothing but to be copied into inputs (the values) afterwards.
    Also which of these the kernels write into the input's memory themselves; the output is then the input. `key`: of `kept_graph`, which finds the result later.
    `state`: inputs that are weights, which seldom change; what is computed of them alone is kept between calls. `training`: memory is held no longer than needed. `replay`: on a GPU, launches
    may be recorded and replayed."""
    nothing: frozenset[int] = frozenset()
    foreign = foreign_device(graph)
    if foreign is not None:
        return compile_foreign(graph, name, written, foreign, replay, key)
    try:
        finished = finish(graph, name, written, state, training)
        plan = loaded(finished, name)
        if key is not None:
            keep(key, finished)
        return plan, finished.written
    except (CannotLower, CannotSchedule, CannotEmit) as error:
        emit("fallback", graph=name, reason=f"{type(error).__name__}: {error}")
        log(LOOPS, f"{name} runs in eager: {error}")
    except BuildFailed as error:
        emit("fallback", graph=name, reason=str(error))
    return without_grad(as_function(graph, name)), nothing


def finish(graph: fx.Graph, name: str, written: Mapping[int, int], state: frozenset[int] = frozenset(), training: bool = False) -> Finished:
    """As compile_writing, up to the C compiler's work. CannotLower, CannotSchedule, CannotEmit."""
    unchanged = _leave_unchanged(graph, written)
    with timer("lower"):
        program = lower_graph(graph, state=state)
    finished = _finished(program, name, {k: place for k, place in written.items() if k not in unchanged}, state, training)
    return replace(finished, written=finished.written | unchanged)


def compile_foreign(
    graph: fx.Graph, name: str, written: Mapping[int, int], kind: str, replay: Replay | None, key: str | None = None
) -> tuple[Compiled, frozenset[int]]:
    """A graph with tensors that are not the CPU's: Triton kernels on a CUDA device, operation by operation elsewhere and where those cannot be had."""
    reason = f"no kernels for {kind} yet"
    if kind == "cuda":
        from magneto.inductor.cuda import compile_on_cuda
        from magneto.inductor.made import NoKernels

        try:
            return compile_on_cuda(graph, name, written, _host_half, replay, plainly(graph, name, written), key)
        except (CannotLower, CannotSchedule, CannotEmit) as error:
            reason = f"{type(error).__name__}: {error}"
        except NoKernels as error:
            warn_once("W004", reason=str(error))
            reason = str(error)
    emit("fallback", graph=name, reason=reason)
    log(LOOPS, f"{name} runs in eager: {reason}")
    return without_grad(as_function(graph, name)), frozenset()


def _host_half(graph: fx.Graph, name: str, lent: frozenset[int] = frozenset()) -> tuple[Compiled, Finished | None]:
    """What of a graph for another device is computed on the CPU; as data too, where it was compiled. `lent`: results that are read before the next call, and never after."""
    try:
        with timer("lower"):
            program = lower_graph(graph)
        finished = _finished(program, name, {}, lent=lent)
        return loaded(finished, name), finished
    except (CannotLower, CannotSchedule, CannotEmit, BuildFailed) as error:
        emit("fallback", graph=name, reason=f"{type(error).__name__}: {error}")
    return without_grad(as_function(graph, name)), None


def _leave_unchanged(graph: fx.Graph, written: Mapping[int, int]) -> frozenset[int]:
    """Outputs that are copies of the very input that they are to be copied into become that input."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    places = [node for node in graph.nodes if node.op == "placeholder"]
    unchanged = frozenset(
        k
        for k, place in written.items()
        if isinstance(node := results[k], fx.Node) and node.target is torch.ops.aten.clone.default and node.args[0] is places[place]
    )
    copies = [results[k] for k in unchanged]
    output.args = (tuple(places[written[k]] if k in unchanged else result for k, result in enumerate(results)),)
    for copy in copies:
        if not copy.users:
            graph.erase_node(copy)
    return unchanged


def compile_program(program: Program, name: str = "program") -> _C.Plan:
    """The plan of a lowered program. CannotSchedule, CannotEmit, BuildFailed."""
    return loaded(_finished(program, name, {}), name)


def _finished(
    program: Program, name: str, written: Mapping[int, int], state: frozenset[int] = frozenset(), training: bool = False,
    lent: frozenset[int] = frozenset(),
) -> Finished:  # fmt: skip
    """Everything but the C compiler's work."""
    with timer("schedule"):
        plan = schedule(program, _updates(program, written), training)
        plan = gather(write_inputs(plan if any_size() else unrolled(plan, on_gpu=False), written))
        plan = keep_results(plan, frozenset(b.name for k in state if (b := program.inputs[k]) is not None))
    with timer("codegen"):
        kernels = _texts(plan, name)
    looks = {look: KernelText.of(look, preamble(vector_math_level())) for look in (FORGET, LOOK)}
    with timer("plan"):
        memory = plan_memory(plan, training, lent=_lent(program, lent))
        code = plan_code(plan, memory, lambda step: (looks if isinstance(step, str) else kernels)[step].hash)  # type: ignore[index]
    distinct = {kernel.hash: (describe(step), kernel.body) for step, kernel in kernels.items()}
    if any(isinstance(step, LibraryCall) and hides_nan(step.op, step.args) for step in plan.steps):
        distinct |= {text.hash: ("", text.body) for text in looks.values()}
    direct = frozenset(k for k in written if isinstance(view := program.outputs[k], ViewOf) and view.buffer in plan.into)
    return Finished(
        code, tuple(distinct.values()), len(kernels), len(plan.steps) - len(kernels), len(plan.into), direct, peak_bytes(plan, memory)
    )


def _lent(program: Program, lent: frozenset[int]) -> frozenset[str]:
    """Buffers that no other outputs than those `lent` show."""
    names: tuple[set[str], set[str]] = set(), set()
    for k, view in enumerate(program.outputs):
        if isinstance(view, ViewOf):
            names[k in lent].add(view.buffer)
    for node in reversed(program.nodes):
        if isinstance(node, LibraryCall) and node.may_alias and any(b.name in names[False] for b in node.buffers):
            names[False].update(view.buffer for view in node.views)
    return frozenset(names[True] - names[False])


def _updates(program: Program, written: Mapping[int, int]) -> frozenset[str]:
    return frozenset(view.buffer for k in written if isinstance(view := program.outputs[k], ViewOf))


def _texts(plan: Schedule, name: str) -> dict[Kernel, KernelText]:
    """The text of each kernel of a schedule; of kernels that are alike it is written once."""
    seldom = set(plan.steps[: plan.prepared])
    written: dict[Hashable, KernelText] = {}
    texts: dict[Kernel, KernelText] = {}
    for step in plan.steps:
        if isinstance(step, LibraryCall):
            continue
        cheaply = step in seldom or (is_small(step) and not any_size())
        key: Hashable = (likeness(step), cheaply) if isinstance(step, FusedKernel) else step
        kernel = written.get(key)
        if kernel is None:
            text = CHEAPLY + _text_of(step) if cheaply else _text_of(step)
            kernel = written[key] = KernelText.of(text, preamble(vector_math_level()))
        texts[step] = kernel
        trace_kernel(lambda s=step, k=kernel: f"{describe(s)}\n{k.source}", f"{name}: {', '.join(step.stored)}")  # type: ignore[misc]
        if logging(KERNELS):
            log(KERNELS, f"{name}: {kernel.symbol} computes {', '.join(step.stored)}")
    return texts


def _text_of(step: Kernel) -> str:
    if isinstance(step, FusedKernel):
        return kernel_text(step)
    return table_text(step) if isinstance(step, TableKernel) else ordered_text(step)


def is_small(step: Kernel | LibraryCall) -> bool:
    """Is it a pointwise kernel over few points?"""
    if not isinstance(step, FusedKernel) or any(member.is_reduction for member in step.members):
        return False
    return prod(dim.size for dim in (*step.rows, *step.cols)) <= SMALL
