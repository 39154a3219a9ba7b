"""`mode="max-autotune"`: which products and convolutions are computed by kernels of ours, together with the loops around them, and in which tiles.

Measured on the device against the library's call and the kernels around it, on random numbers, once for each shape class; the choice is kept on disk. A graph has a
budget of seconds for that, beyond which the library serves. Where runs are recorded, what the host takes to launch them does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from magneto.base.errors import warn_once
from magneto.base.events import counter, emit
from magneto.base.flags import config
from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_types import CannotEmit
from magneto.inductor.codegen.triton import triton_kernel
from magneto.inductor.codegen.triton_nest import power_above
from magneto.inductor.codegen.triton_product import triton_product
from magneto.inductor.loops.ir import Buffer, LibraryCall, ViewOf
from magneto.inductor.runtime.calls import FAST
from magneto.inductor.runtime.plan_code import TritonKernel
from magneto.inductor.runtime.store import key_of, store
from magneto.inductor.runtime.triton_launch import begin, launchers
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.product import Match, TiledKernel, Tiles, chosen_ahead, joined, matches, product_kernel
from magneto.inductor.schedule.schedule import Schedule

SECONDS = 60.0  # of one graph
REPEATS, ROUNDS = 10, 5
ASLEEP = 4_000_000  # cycles that the device sleeps, while the host launches what is measured
GAIN = 0.97  # of the library's time: less is not worth another rounding order

BLOCKS = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 32, 4, 4),
    (64, 256, 64, 4, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3),
)  # fmt: skip
DESCRIBED = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 256, 64, 4, 3), (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
)  # fmt: skip
WALKING = (  # the seventh number: programs of each multiprocessor
    (128, 256, 64, 8, 3, 1, 1), (256, 128, 64, 8, 3, 1, 1), (128, 128, 64, 8, 4, 1, 1), (128, 128, 64, 4, 3, 1, 2), (128, 128, 64, 4, 3, 1, 2, 2),
)  # fmt: skip
AHEAD = (*BLOCKS[4:], *((*numbers, 1) for numbers in DESCRIBED[3:6]))  # where loops compute an operand
WINDOWS = (  # of convolutions, where they are no products of matrices
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (256, 64, 64, 8, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (128, 32, 32, 4, 4),
)  # fmt: skip
FLOATS = (  # larger blocks need more registers than there are
    (128, 128, 32, 8, 3), (128, 128, 32, 8, 4), (128, 64, 32, 4, 4), (128, 64, 32, 8, 4), (256, 64, 32, 8, 4), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4), (128, 32, 32, 4, 4),
)  # fmt: skip
EXACT = ((64, 64, 16, 4, 3), (128, 64, 16, 8, 3), (64, 32, 16, 4, 3))  # float32 that may not be TF32
IN_PARTS = (
    (128, 128, 32, 8, 3),
    (128, 64, 32, 4, 3),
    (64, 128, 32, 4, 3),
    (64, 64, 32, 4, 4),
)  # each number as two of TF32: blocks of 64 terms round more
DEEP = (  # of depthwise convolutions
    (16, 64, 1, 4, 0), (32, 64, 1, 4, 0), (64, 64, 1, 4, 0), (128, 64, 1, 8, 0), (64, 32, 1, 4, 0), (128, 32, 1, 4, 0),
)  # fmt: skip
HOPPER = (9, 0)  # compute capability from which on there are descriptors


def candidates(device: torch.device, match: Match | None = None) -> tuple[Tiles, ...]:
    """Tiles worth a trial on a device. Those for all products with loops behind them are left out where these are missing."""
    of = None if match is None else match.of
    if of is not None and (of.window is not None or of.precision):
        behind = found = [
            Tiles(*numbers)
            for numbers in (DEEP if of.deep else {"": WINDOWS, "tf32": FLOATS, "ieee": EXACT, "tf32x3": IN_PARTS}[of.precision])
        ]
    else:
        found = [Tiles(*numbers) for numbers in AHEAD if len(numbers) == 5 or torch.cuda.get_device_capability(device) >= HOPPER]
        behind = _behind(device) if match is None or match.kernel != match.call or match.of.convolution else []
    possible = 0 if match is None else sum(bit for bit, p in zip((1, 2), match.ahead, strict=True) if p is not None)
    computing = [replace(tiles, ahead=bits) for bits in (1, 2, 3) if bits & possible == bits for tiles in found]
    return (*behind, *computing)


def _behind(device: torch.device) -> list[Tiles]:
    plain = [Tiles(*numbers) for numbers in BLOCKS]
    if torch.cuda.get_device_capability(device) < HOPPER:
        return plain
    many = torch.cuda.get_device_properties(device).multi_processor_count
    plain += [Tiles(*numbers, 1) for numbers in DESCRIBED]
    return [*plain, *(Tiles(*numbers[:6], numbers[6] * many, *numbers[7:]) for numbers in WALKING)]


def tuned(plan: Schedule, device: torch.device) -> Schedule:
    """The schedule with the products and convolutions that kernels of ours compute faster."""
    until = time.monotonic() + SECONDS
    keys = {match: _key(plan, match, device) for match in matches(plan)}
    known = {key: store().get("tiles", key) for key in keys.values()}
    new = {key: match for match, key in keys.items() if known[key] is None}
    following = [*new.values(), None][1:]
    for (key, match), other in zip(new.items(), following, strict=True):
        if time.monotonic() > until:
            break
        try:
            best = _measured(plan, match, other, device)
        except torch.OutOfMemoryError:
            warn_once("W005")
            continue
        found = known[key] = b"" if best is None else " ".join(str(getattr(best, name)) for name in Tiles.__slots__).encode()
        store().put("tiles", key, found)
    chosen = {match: Tiles(*map(int, text.split())) for match, key in keys.items() if (text := known[key])}
    counter("products_of_ours", len(chosen))
    return joined(plan, chosen) if chosen else plan


def _key(plan: Schedule, match: Match, device: torch.device) -> str:
    """Under which the choice is kept."""
    *batch, rows, columns = (int(n) for n in match.result.shape)  # type: ignore[arg-type]
    of = match.of
    views = [(v.strides, v.offset, v.dtype) for v in (of.a, of.b)]
    call = of.bias is not None, of.window, of.precision, of.relu, of.residual is not None, of.convolution, of.deep
    shape = batch, power_above(rows), columns, int(of.a.shape[-1])  # type: ignore[arg-type]
    kind = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device), torch.__version__, config.cuda_graphs
    texts = [triton_kernel(kernel, plan.buffers).body for kernel in _around(plan, match).values()]
    return key_of("tiles", repr((shape, views, call, kind, candidates(device, match))), *texts)


def _around(plan: Schedule, match: Match) -> dict[int, FusedKernel]:
    """The kernels ahead of a product and behind it, by position."""
    positions = sorted({p for p in (*match.ahead, match.kernel) if p is not None} - {match.call})
    return {p: plan.steps[p] for p in positions}  # type: ignore[misc]


def _measured(plan: Schedule, match: Match, other: Match | None, device: torch.device) -> Tiles | None:
    """The fastest tiles; None: the library with the kernels around it is about as fast. `other`: what is measured next, whose kernels are compiled meanwhile."""
    for step in (match, other):
        for _, text in () if step is None else _texts(plan, step, device).values():
            begin(text, device)
    times = times_of(plan, match, device)
    best = min(times, key=lambda tiles: times[tiles])
    shape = "x".join(map(str, (*match.result.shape, match.of.a.shape[-1])))
    emit("artifact", artifact="tuning", product=shape, library_ms=times[None], best=str(best), best_ms=times[best])
    return best if best is not None and times[best] < GAIN * times[None] else None


def times_of(plan: Schedule, match: Match, device: torch.device) -> dict[Tiles | None, float]:
    """Milliseconds of each way; None: the library's call with the kernels around it."""
    around = _around(plan, match)
    names = {match.result.name, *(v.buffer for v in match.views), *(n for k in around.values() for n in parameters(k))}
    memory = {name: _filled(plan.buffers[name], device) for name in names}
    written = {p: triton_kernel(kernel, plan.buffers) for p, kernel in around.items()}
    made = launchers(written.values(), device)
    runs = {p: _kernel(made[k], parameters(around[p]), memory) for p, k in written.items()}
    runs[match.call] = _library(plan.steps[match.call], memory)  # type: ignore[arg-type]
    ways: dict[Tiles | None, list[Callable[[], Any]]] = {None: [runs[p] for p in sorted(runs)]}
    texts = _texts(plan, match, device)
    ours = launchers([text for _, text in texts.values()], device, True)
    for tiles, (step, text) in texts.items():
        if text in ours:
            left = {*match.ahead} - {None, *chosen_ahead(match, tiles)}
            ways[tiles] = [*(runs[p] for p in left), partial(ours[text], *(memory[n] for n in parameters(step)))]  # type: ignore[index]
    times: dict[Tiles | None, float] = {}
    for which, way in ways.items():
        try:
            times[which] = _milliseconds(way, device)
        except RuntimeError as error:  # more registers or threads than the device has
            if which is None or isinstance(error, torch.OutOfMemoryError):
                raise
    return times


def _texts(plan: Schedule, match: Match, device: torch.device) -> dict[Tiles, tuple[TiledKernel, TritonKernel]]:
    """Kernels of all tiles that fit."""
    texts = {}
    rows, columns = (2 * power_above(int(n)) for n in match.result.shape[-2:])  # type: ignore[arg-type]
    for tiles in candidates(device, match):
        if tiles.rows <= rows and tiles.columns <= columns:
            step = product_kernel(plan, match, tiles)
            with suppress(CannotEmit):  # operands that have no descriptor
                texts[tiles] = step, triton_product(step, plan.buffers)
    return texts


def _kernel(launch: Callable[..., Any], names: Sequence[str], memory: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
    """Reads what the library has made, where that lies in memory of its own."""
    return lambda: launch(*[memory[name] for name in names])


def _filled(buffer: Buffer, device: torch.device) -> torch.Tensor:
    flat = torch.empty(int(buffer.storage_numel), dtype=buffer.dtype, device=device)  # type: ignore[arg-type]
    flat = flat.normal_() if buffer.dtype.is_floating_point and buffer.dtype.itemsize > 1 else flat.zero_()
    return torch.as_strided(flat, buffer.shape, buffer.strides)  # type: ignore[arg-type]


def _library(call: LibraryCall, memory: dict[str, torch.Tensor]) -> Callable[[], Any]:
    args = [torch.as_strided(memory[x.buffer], x.shape, x.strides, x.offset) if isinstance(x, ViewOf) else x for x in call.args]  # type: ignore[arg-type]
    op, name = FAST.get(call.op, call.op), call.buffers[0].name
    if call.out_op is None:
        return lambda: memory.update({name: op(*args)})
    result = memory[name]
    return lambda: op(*args, out=result)


def _milliseconds(runs: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Of one call: the best of some means."""
    best = float("inf")
    for n in range(ROUNDS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        if config.cuda_graphs:
            torch.cuda._sleep(ASLEEP)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(REPEATS if n else 2):
            for run in runs:
                run()
        end.record()
        torch.cuda.synchronize(device)
        best = min(best, float(begin.elapsed_time(end)) / REPEATS) if n else best
    return best
