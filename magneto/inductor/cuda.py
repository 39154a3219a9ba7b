"""`compile_on_cuda`: as `compile.compile_writing`, for a graph whose tensors are on one CUDA device.

The same lowering, scheduler and plan; kernels are Triton's, library calls ATen's. What is made of a graph is data (`Made`), which is kept on disk as the CPU's is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from magneto import _C
from magneto.base.events import counter, emit, timer
from magneto.base.flags import config
from magneto.base.logs import KERNELS, dump, log, logging
from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cuda_plan import cuda_plan, with_launchers
from magneto.inductor.codegen.parted import parted
from magneto.inductor.codegen.plan import PlanCode, show_plan
from magneto.inductor.codegen.triton import TritonKernel, reaches_far, triton_kernel
from magneto.inductor.codegen.triton_product import triton_product
from magneto.inductor.codegen.triton_table import TritonTable, triton_table
from magneto.inductor.describe import describe
from magneto.inductor.devices import Back, Halves, Joined, Sent, device_of, split
from magneto.inductor.draws import agrees, drawn_by_loops, multiprocessors
from magneto.inductor.loops.ir import Buffer, LibraryCall, Node, Program, Reduction, ViewOf
from magneto.inductor.lower.context import CannotLower
from magneto.inductor.lower.graph import lower_graph
from magneto.inductor.partial_products import join_products
from magneto.inductor.replay import Replay
from magneto.inductor.runtime import claim, triton_workers
from magneto.inductor.runtime.cuda_graphs import Graphed, Parts
from magneto.inductor.runtime.kept import Finished, keep_data, recall_data
from magneto.inductor.runtime.record import recordable
from magneto.inductor.runtime.triton_launch import Launched, Launcher, begin, launchers, source_of, why_not
from magneto.inductor.runtime.tuning import tuned
from magneto.inductor.schedule.alike import likeness
from magneto.inductor.schedule.columns import join_columns
from magneto.inductor.schedule.inplace import write_inputs
from magneto.inductor.schedule.kernel import FusedKernel, Kernel, OrderedKernel, TableKernel
from magneto.inductor.schedule.memory import plan_memory
from magneto.inductor.schedule.online import online_sums
from magneto.inductor.schedule.product import ProductKernel
from magneto.inductor.schedule.repeat import repeated
from magneto.inductor.schedule.results import results_last
from magneto.inductor.schedule.scatter import with_scatters
from magneto.inductor.schedule.schedule import Schedule, schedule
from magneto.inductor.schedule.split import split_reductions
from magneto.inductor.schedule.table import gather
from magneto.inductor.schedule.unroll import unrolled


class NoKernels(Exception):
    """Kernels cannot be built here, or Triton refuses one; says why."""


WORTH_RECORDING = 4  # launches: a replay, with its copies, costs as much as three
WORTH_A_TABLE = 16  # kernels in the middle of a graph, whose addresses are sent anew in each call that is no replay

Compiled = Callable[..., Sequence[Any]]
Host = Callable[[fx.Graph, str, frozenset[int]], tuple[Compiled, Finished | None]]
Plain = Callable[[frozenset[int]], Compiled]
"""Given the outputs that are written into inputs, the whole graph operation by operation."""
Build = Callable[[Iterable[Launched]], dict[Launched, Launcher]]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A graph whose memory is all on the device, compiled. `code` launches `kernels` by number. `direct`: outputs that are written into inputs. `launches`: and library calls of a run.
    `lasting`: inputs in whose memory outputs may lie."""

    code: PlanCode
    kernels: tuple[Launched, ...]
    direct: frozenset[int]
    launches: int
    lasting: frozenset[int]


Loaded = tuple[Compiled, Parts | None]  # the plan, and its parts if it has two


@dataclass(frozen=True, slots=True)
class Made:
    """A whole graph, compiled. `pairs`: the device's outputs that may be written into inputs. `host`: None where nothing is computed there."""

    device: torch.device
    plan: DevicePlan
    halves: Halves
    pairs: Mapping[int, int]
    recordable: bool
    host: Finished | None

    @property
    def written(self) -> frozenset[int]:
        return self.halves.whole(self.plan.direct)


def compile_on_cuda(
    graph: fx.Graph, name: str, written: Mapping[int, int], host: Host, replay: Replay | None, plain: Plain, key: str | None = None
) -> tuple[Compiled, frozenset[int]]:
    """The compiled graph, and which outputs it writes into inputs itself. `host`: compiles what runs on the CPU. `key`: under which it is kept. CannotLower, CannotSchedule, CannotEmit,
    NoKernels."""
    if reason := why_not(device := device_of(graph)):
        raise NoKernels(reason)
    device, before, graph, halves = split(drawn_by_loops(graph, device) if config.draw_in_kernels else graph, written)
    pairs = halves.written(written)
    triton_workers.start()
    plan = _planned(graph, name, pairs, device, _results(halves, replay) or 0, lambda kernel: begin(kernel, device))
    run = _loaded(plan, lambda kernels: _built(kernels, device))
    beside, finished = host(before, f"{name}_host", halves.lent) if before is not None else (None, None)
    made = Made(device, plan, halves, pairs, _recordable(graph), finished)
    if key is not None and (before is None or finished is not None):
        keep_data(_key(key, device), _plain(made))
    return _whole(made, run, beside, name, replay, plain), made.written


def kept_on_cuda(
    key: str, device: torch.device, name: str, replay: Replay | None, host: Callable[[Finished, str], Compiled], plain: Plain
) -> tuple[Compiled, frozenset[int]] | None:
    """What `compile_on_cuda` has kept of an equal graph. `host`: loads what runs on the CPU."""
    if why_not(device):
        return None
    if (data := recall_data(_key(key, device), PARTS)) is None:
        triton_workers.start()  # they are ready when the graph is lowered
        return None
    made = _of_plain(data)
    if made.halves.draws and not agrees(device):
        return None
    try:
        run = _loaded(made.plan, lambda kernels: _built(kernels, device))
    except NoKernels:
        return None
    counter("graphs_from_store")
    return _whole(made, run, None if made.host is None else host(made.host, f"{name}_host"), name, replay, plain), made.written


def _key(key: str, device: torch.device) -> str:
    """The key on this kind of device, with these kinds of kernels. (Draws depend on how many multiprocessors there are.)"""
    kind = (*torch.cuda.get_device_capability(device), *multiprocessors(device))
    return f"{key}{kind}{' deterministic' * torch.are_deterministic_algorithms_enabled()}"


def _results(halves: Halves, replay: Replay | None) -> int | None:
    """How many outputs of the device's half, at the front, go to the user."""
    if replay is None:
        return None
    return sum(1 for place in halves.places[: replay.results] if place is not None and not place[0])


def _whole(made: Made, loaded: Loaded, host: Compiled | None, name: str, replay: Replay | None, plain: Plain) -> Compiled:
    """The plan of the device's half, recorded if it may be, behind the host's half."""
    halves, plan = made.halves, made.plan
    run, parts = loaded
    if replay is not None and plan.launches >= WORTH_RECORDING and made.recordable:
        cloned = None if replay.results is None else _results(halves, replay)
        run = Graphed(run, made.device, name, plan.launches, cloned, frozenset(made.pairs[k] for k in plan.direct), parts)
    if host is None and not halves.draws and all(place is not None for place in halves.places):
        return run
    first = plan.code.n_inputs - len(halves.sent) - len(halves.draws)
    return Joined(host, run, halves, made.device, any(k >= first for k in plan.lasting), plain(made.written) if halves.draws else None)


def replayed(run: Compiled, graph: fx.Graph, name: str, replay: Replay) -> Compiled:
    """A callable that runs the graph operation by operation, recorded; `run` itself where not all is on one device."""
    try:
        device, host, _, _ = split(graph)
    except CannotLower:
        return run
    launches = sum(node.op == "call_function" for node in graph.nodes)
    return Graphed(run, device, name, launches, replay.results) if host is None and _recordable(graph) else run


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
    return _loaded(plan, build)[0], plan.direct, plan.launches


def _planned(
    graph: fx.Graph,
    name: str,
    written: Mapping[int, int],
    device: torch.device,
    results: int = 0,
    begin: Callable[[Launched], None] | None = None,
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
        code = cuda_plan(plan, plan_memory(plan, True, 0, _given(graph, program)), lambda step: numbers[texts[step]])
    _report(name, plan, texts, code)
    direct = frozenset(k for k in written if isinstance(view := program.outputs[k], ViewOf) and view.buffer in plan.into)
    return DevicePlan(code, tuple(numbers), direct, len(plan.steps), _lasting(plan))


def _texts(plan: Schedule, begin: Callable[[Launched], None] | None) -> dict[Kernel, Launched]:
    """The text of each kernel; of kernels that are alike it is written once."""
    written: dict[Hashable, Launched] = {}
    texts: dict[Kernel, Launched] = {}
    for step in plan.steps:
        if isinstance(step, LibraryCall):
            continue
        key: Hashable = (likeness(step), reaches_far(parameters(step), plan.buffers)) if isinstance(step, FusedKernel) else step
        if key not in written:
            written[key] = _text_of(step, plan)
            if begin is not None:
                begin(written[key])
        texts[step] = written[key]
    return texts


def _text_of(step: Kernel, plan: Schedule) -> Launched:
    if isinstance(step, ProductKernel):
        return triton_product(step, plan.buffers)
    assert not isinstance(step, OrderedKernel), "they have become pairs of kernels"
    return triton_table(step, plan.into) if isinstance(step, TableKernel) else triton_kernel(step, plan.buffers)


def _loaded(plan: DevicePlan, build: Build) -> Loaded:
    """The plan in this process."""
    with timer("build"):
        made = build(plan.kernels)

    def load(code: PlanCode) -> Compiled:
        code = with_launchers(code, [made[kernel] for kernel in plan.kernels])
        return _C.Plan(code.instructions, code.n_registers, code.n_inputs, code.outputs)

    two = parted(plan.code) if plan.code.tail else None
    return load(plan.code), None if two is None else Parts(load(two.head), load(two.tail), two.places)


def _given(graph: fx.Graph, program: Program) -> frozenset[str]:
    """Large inputs of a backward: it may be the only one that holds what was kept for it."""
    of_backward = any(node.op == "placeholder" and node.meta.get("stage") == "backward" for node in graph.nodes)
    if not of_backward or not claim.available():
        return frozenset()
    return frozenset(b.name for b in program.inputs if b is not None and b.nbytes >= claim.WORTH)  # type: ignore[operator]


def _built(kernels: Iterable[Launched], device: torch.device) -> dict[Launched, Launcher]:
    try:
        return launchers(kernels, device)
    except Exception as error:  # Triton refuses our text, or its own compilers fail
        raise NoKernels(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}") from error


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


# ---- as plain data -------------------------------------------------------------------------------------------------------


def _fields(data: Any) -> tuple[Any, ...]:
    return tuple(getattr(data, name) for name in data.__slots__)


PARTS = 6


def _plain(made: Made) -> tuple[Any, ...]:
    kernels = tuple((_fields(k.kernel), *_fields(k)[1:]) if isinstance(k, TritonTable) else (_fields(k),) for k in made.plan.kernels)
    plan = (made.plan.code, kernels, *_fields(made.plan)[2:])
    halves = (
        tuple(map(_fields, made.halves.sent)),
        made.halves.places,
        made.halves.rest,
        tuple(map(_fields, made.halves.back)),
        (made.halves.draws, made.halves.aligned),
    )
    return made.device, plan, halves, dict(made.pairs), made.recordable, None if made.host is None else _fields(made.host)


def _of_plain(data: tuple[Any, ...]) -> Made:
    device, (code, kernels, *plan), (sent, places, rest, back, drawn), pairs, may, host = data
    found = tuple(TritonTable(TritonKernel(*k[0]), *k[1:]) if len(k) > 1 else TritonKernel(*k[0]) for k in kernels)
    halves = Halves(tuple(Sent(*s) for s in sent), places, rest, tuple(Back(*b) for b in back), *drawn)
    return Made(device, DevicePlan(code, found, *plan), halves, pairs, may, None if host is None else Finished(*host))


__all__ = ["NoKernels", "compile_for", "compile_on_cuda", "kept_on_cuda", "replayed"]
