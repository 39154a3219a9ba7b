"""What is made of a graph for a CUDA device, as data (`Made`; as tuples, which are kept on disk), and in this process (`loaded`, `whole`, of an equal graph `kept_on_cuda`). Nothing here
lowers or writes kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.base.events import counter, timer
from magneto.inductor.halves import DEVICE, Back, Compiled, Halves, Joined, Sent, agrees, multiprocessors
from magneto.inductor.replay import Replay
from magneto.inductor.runtime import triton_workers
from magneto.inductor.runtime.cuda_graphs import Graphed, Parts
from magneto.inductor.runtime.kept import Finished, recall_data, tf32_allowed
from magneto.inductor.runtime.parted import parted
from magneto.inductor.runtime.plan_code import Launched, PlanCode, TritonKernel, TritonTable
from magneto.inductor.runtime.triton_launch import Launcher, launchers, why_not

Plain = Callable[[frozenset[int]], Compiled]
"""Given the outputs that are written into inputs, the whole graph operation by operation."""
Build = Callable[[Iterable[Launched]], dict[Launched, Launcher]]
Loaded = tuple[Compiled, Parts | None]  # the plan, and its parts if it has two
Beside = Sequence[Compiled | None]  # what the CPU does first and last

PARTS = 7  # of what is kept
WORTH_RECORDING = 4  # launches: a replay, with its copies, costs as much as three


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A graph whose memory is all on the device, compiled. `code` launches `kernels` by number. `direct`: outputs that are written into inputs. `launches`: and library calls of a run.
    `lasting`: inputs in whose memory outputs may lie. `first`: blocks that a recording's pool begins with, their bytes."""

    code: PlanCode
    kernels: tuple[Launched, ...]
    direct: frozenset[int]
    launches: int
    lasting: frozenset[int]
    first: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A whole graph, compiled. `pairs`: the device's outputs that may be written into inputs. `host`, `behind`: what the CPU computes first and last, None where that is nothing."""

    device: torch.device
    plan: DevicePlan
    halves: Halves
    pairs: Mapping[int, int]
    recordable: bool
    host: Finished | None
    behind: Finished | None = None

    @property
    def written(self) -> frozenset[int]:
        return self.halves.whole(self.plan.direct)


def _fields(data: Any) -> tuple[Any, ...]:
    return tuple(getattr(data, name) for name in data.__slots__)


def plain_of(made: Made) -> tuple[Any, ...]:
    kernels = tuple((_fields(k.kernel), *_fields(k)[1:]) if isinstance(k, TritonTable) else (_fields(k),) for k in made.plan.kernels)
    plan = (made.plan.code, kernels, *_fields(made.plan)[2:])
    halves = (
        tuple(map(_fields, made.halves.sent)),
        made.halves.places,
        made.halves.rest,
        tuple(map(_fields, made.halves.back)),
        (made.halves.draws, made.halves.aligned, made.halves.reads),
    )
    beside = tuple(None if half is None else _fields(half) for half in (made.host, made.behind))
    return made.device, plan, halves, dict(made.pairs), made.recordable, *beside


def of_plain(data: tuple[Any, ...]) -> Made:
    device, (code, kernels, *plan), (sent, places, rest, back, drawn), pairs, may, *beside = data
    found = tuple(TritonTable(TritonKernel(*k[0]), *k[1:]) if len(k) > 1 else TritonKernel(*k[0]) for k in kernels)
    halves = Halves(tuple(Sent(*s) for s in sent), places, rest, tuple(Back(*b) for b in back), *drawn)
    return Made(device, DevicePlan(code, found, *plan), halves, pairs, may, *(None if half is None else Finished(*half) for half in beside))


class NoKernels(Exception):
    """Kernels cannot be built here, or Triton refuses one; says why."""


def kept_on_cuda(
    key: str, device: torch.device, name: str, replay: Replay | None, host: Callable[[Finished, str], Compiled], plain: Plain
) -> tuple[Compiled, frozenset[int]] | None:
    """What `compile_on_cuda` has kept of an equal graph. `host`: loads what runs on the CPU."""
    if why_not(device):
        return None
    if (data := recall_data(key_on(key, device), PARTS)) is None:
        triton_workers.start()  # they are ready when the graph is lowered
        return None
    made = of_plain(data)
    if made.halves.draws and not agrees(device):
        return None
    try:
        run = loaded(made.plan, lambda kernels: built(kernels, device))
    except NoKernels:
        return None
    counter("graphs_from_store")
    beside = [None if half is None else host(half, f"{name}_{what}") for half, what in ((made.host, "host"), (made.behind, "behind"))]
    return whole(made, run, beside, name, replay, plain), made.written


def key_on(key: str, device: torch.device) -> str:
    """The key on this kind of device, with these kinds of kernels. (Draws depend on how many multiprocessors there are.)"""
    kind = (*torch.cuda.get_device_capability(device), *multiprocessors(device))
    return f"{key}{kind}{' deterministic' * torch.are_deterministic_algorithms_enabled()}"


def results_of(halves: Halves, replay: Replay | None) -> int | None:
    """How many outputs of the device's half, at the front, go to the user."""
    if replay is None:
        return None
    return sum(1 for place in halves.places[: replay.results] if place is not None and place[0] == DEVICE)


def whole(made: Made, found: Loaded, beside: Beside, name: str, replay: Replay | None, plain: Plain) -> Compiled:
    """The graph as one callable. Kernels of ours multiply float32 as TF32 where torch let cuDNN do so when they were chosen; while it does not, the graph runs operation by operation."""
    run = _joined(made, found, beside, name, replay, plain)
    if not any('input_precision="tf32"' in getattr(kernel, "body", "") for kernel in made.plan.kernels):
        return run
    other = plain(made.written)
    return lambda *inputs: (run if torch._C._get_cudnn_enabled() and tf32_allowed() else other)(*inputs)


def _joined(made: Made, found: Loaded, beside: Beside, name: str, replay: Replay | None, plain: Plain) -> Compiled:
    """The plan of the device's half, recorded if it may be, between what the CPU does."""
    halves, plan, (host, behind) = made.halves, made.plan, beside
    run, parts = found
    if replay is not None and plan.launches >= WORTH_RECORDING and made.recordable:
        cloned = None if replay.results is None else results_of(halves, replay)
        run = Graphed(run, made.device, name, plan.launches, cloned, frozenset(made.pairs[k] for k in plan.direct), parts, plan.first)
    drawn = halves.draws or halves.aligned
    if host is None and behind is None and not drawn and all(place is not None for place in halves.places):
        return run
    first = plan.code.n_inputs - len(halves.sent) - len(halves.draws)
    plainly = plain(made.written) if drawn else None
    return Joined(host, run, halves, made.device, any(k >= first for k in plan.lasting), plainly, behind)


def loaded(plan: DevicePlan, build: Build) -> Loaded:
    """The plan in this process."""
    with timer("build"):
        made = build(plan.kernels)

    def load(code: PlanCode) -> Compiled:
        found = [("CALL", -1, made[plan.kernels[i[1]]], i[2], ()) if i[0] == "LAUNCH" else i for i in code.instructions]
        return _C.Plan(tuple(found), code.n_registers, code.n_inputs, code.outputs)

    two = parted(plan.code) if plan.code.tail else None
    return load(plan.code), None if two is None else Parts(load(two.head), load(two.tail), two.places)


def built(kernels: Iterable[Launched], device: torch.device) -> dict[Launched, Launcher]:
    try:
        return launchers(kernels, device)
    except Exception as error:  # Triton refuses our text, or its own compilers fail
        raise NoKernels(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}") from error
