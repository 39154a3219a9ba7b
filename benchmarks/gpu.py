"""GPU benchmark: magneto against eager and torch.compile, interleaved, CUDA events, medians.

`python -m benchmarks.gpu [--out benchmarks/results/gpu.json] [--budget seconds] [--contenders ...] [names...]`. Each row runs all contenders in turn; of models a time is that
of one call between two events with the device idle before, so that the host's part shows; of kernels the mean of ten calls, and of copies that of one, whose first event the device
reaches when it has slept some milliseconds, so that every contender's host is ahead of it. Results are merged into the file row by row. `--host`: host time per call.
`--processes rows`: first calls in processes of their own, cold and with what the first has kept. `--memory rows`: memory of processes of their own, several at a time. Models (benchmarks/gpu_models.py) are whole calls, kernels report the share of the copy
bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_models import FLOPS, MODELS, STEPS, SUITE, moved_by

ROUNDS = 25  # at most
SECONDS = 3.0  # of a row's measuring
REPEATED = 10  # calls of a kernel between two events: what the host costs is not what is asked there
ASLEEP = 6_000_000  # cycles that the device sleeps ahead of them
DEVICE = "cuda"
LOSS = "loss"  # trains by backward() without a factor
Made = tuple[Callable[..., Any], tuple[Any, ...], Any, int]
"""Function, arguments, whether it trains (False, True, LOSS), bytes a perfect kernel moves (0: no kernel row)."""

ROWS: dict[str, Callable[[], Made]] = {}


def row(make: Callable[[], Made]) -> Callable[[], Made]:
    ROWS[make.__name__] = make
    return make


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


# ---- kernels: (function, arguments, trains, bytes) -----------------------------------------------------------------------


@row
def pointwise_chain() -> Made:
    x, y = randn(1 << 26), randn(1 << 26)
    return lambda x, y: torch.sigmoid(x * 2 + y) * x, (x, y), False, 12 << 26


@row
def gelu_bias_bf16() -> Made:
    x, b = randn(16384, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    return lambda x, b: F.gelu(x + b), (x, b), False, 4 * x.numel()


@row
def softmax_8192x4096() -> Made:
    x = randn(8192, 4096)
    return lambda x: F.softmax(x, -1), (x,), False, 8 * x.numel()


@row
def softmax_128x262144() -> Made:
    x = randn(128, 262144)
    return lambda x: F.softmax(x, -1), (x,), False, 8 * x.numel()


@row
def layer_norm_16384x4096_bf16() -> Made:
    x, w, b = randn(16384, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    return lambda x, w, b: F.layer_norm(x, (4096,), w, b), (x, w, b), False, 4 * x.numel()


@row
def layer_norm_training() -> Made:
    x, w, b = randn(16384, 4096, grad=True), randn(4096, grad=True), randn(4096, grad=True)
    return lambda x, w, b: F.layer_norm(x, (4096,), w, b), (x, w, b), True, 4 * 5 * x.numel()


@row
def rms_norm_bf16() -> Made:
    x, w = randn(16384, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)
    return (
        lambda x, w: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w,
        (x, w),
        False,
        4 * x.numel(),
    )


@row
def rms_norm_training() -> Made:
    """Forward 2 walks, backward 3: the gradient, the input, the gradient of the input."""
    x, w = randn(16384, 4096, grad=True), randn(4096, grad=True)
    return lambda x, w: F.rms_norm(x, (4096,), w, 1e-6), (x, w), True, 4 * 5 * x.numel()


@row
def layer_norm_residual_bf16() -> Made:
    """The sum is needed further on, as in a transformer: two walks in, two out."""

    def norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        return total, F.layer_norm(total, (4096,), w, b)

    x, y = (randn(16384, 4096, dtype=torch.bfloat16) for _ in range(2))
    return norm, (x, y, randn(4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16)), False, 8 * x.numel()


@row
def layer_norm_residual_dropout_bf16() -> Made:
    x, y = (randn(16384, 4096, dtype=torch.bfloat16) for _ in range(2))
    w, b = (randn(4096, dtype=torch.bfloat16) for _ in range(2))
    return lambda x, y, w, b: F.layer_norm(x + F.dropout(y, 0.1), (4096,), w, b), (x, y, w, b), False, 6 * x.numel()


@row
def cross_entropy_128k() -> Made:
    x, t = randn(2048, 128256, dtype=torch.bfloat16, grad=True), torch.randint(0, 128256, (2048,), device=DEVICE)
    return lambda x, t: F.cross_entropy(x.float(), t), (x, t), True, 6 * x.numel()


@row
def cross_entropy_128k_loss() -> Made:
    """The same as a program's last word: backward() without a factor."""
    fn, args, _, counted = cross_entropy_128k()
    return fn, args, LOSS, counted


@row
def sum_of_columns() -> Made:
    x = randn(65536, 1024)
    return lambda x: x.sum(0), (x,), False, 4 * x.numel()


@row
def sum_of_everything() -> Made:
    x = randn(1 << 26)
    return lambda x: x.sum(), (x,), False, 4 * x.numel()


@row
def transposed_sum() -> Made:
    x, y = randn(8192, 8192), randn(8192, 8192)
    return lambda x, y: x.t() + y, (x, y), False, 12 * x.numel()


@row
def embedding() -> Made:
    w, i = randn(50000, 1024), torch.randint(0, 50000, (64, 512), device=DEVICE)
    return lambda w, i: F.embedding(i, w) * 2, (w, i), False, 8 * i.numel() * 1024


BAGS, OF = 16384, 64  # vectors of 128 floats in each, out of a million


def _bags(grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A table, the places of all bags, bytes of what is looked up and of the sums."""
    return randn(1 << 20, 128, grad=grad), torch.randint(0, 1 << 20, (BAGS, OF), device=DEVICE), 4 * 128 * (BAGS * OF + BAGS)


def _offsets(even: bool = False) -> torch.Tensor:
    """Where bags begin."""
    if even:
        return torch.arange(0, BAGS * OF, OF, device=DEVICE)
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, BAGS * OF, (BAGS - 1,)).sort().values]).to(DEVICE)


@row
def gather_sum() -> Made:
    w, i, moved = _bags()
    return lambda w, i: w[i].sum(1), (w, i), False, moved


@row
def embedding_bag_rows() -> Made:
    w, i, moved = _bags()
    return lambda w, i: F.embedding_bag(i, w, mode="sum"), (w, i), False, moved


@row
def embedding_bag_sum() -> Made:
    w, i, moved = _bags()
    return lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"), (w, i.view(-1), _offsets()), False, moved


@row
def embedding_bag_mean() -> Made:
    w, i, moved = _bags()
    return lambda w, i, o: F.embedding_bag(i, w, o, mode="mean"), (w, i.view(-1), _offsets()), False, moved


@row
def embedding_bag_training() -> Made:
    """Backward writes zeros for the whole table, and adds to what was looked up."""
    w, i, moved = _bags(True)
    return lambda w, i: F.embedding_bag(i, w, mode="sum"), (w, i), True, 3 * moved + 4 * w.numel()


# ---- measuring -----------------------------------------------------------------------------------------------------------


def contender(fn: Any, args: tuple[Any, ...], train: bool) -> Callable[[], Any]:
    """One call, or one forward and backward."""
    if not train:

        def call() -> Any:
            with torch.no_grad():
                return fn(*args)

        return call
    seeds: list[torch.Tensor] = []
    leaves = [*(x for x in args if isinstance(x, torch.Tensor)), *getattr(fn, "parameters", list)()]

    def step() -> Any:
        out = fn(*args)
        if not seeds:
            seeds.append(torch.ones_like(out) if train == LOSS else torch.randn_like(out))
        out.backward(seeds[0])
        for x in leaves:
            x.grad = None
        return out

    return step


def timed(call: Callable[[], Any], repeats: int = 1, ahead: bool = False) -> float:
    """Milliseconds of one call, the mean of `repeats` between two events. `ahead`: the device is busy while the host launches the first of them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(ASLEEP)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def maker(name: str) -> tuple[Callable[[Any], Callable[[], Any]], bool, int]:
    """What makes a contender's call of what optimises a callable; whether it trains; bytes moved."""
    if name in STEPS:
        return STEPS[name], True, moved_by(name)
    fn, args, train, moved = ({**ROWS, **MODELS})[name]()
    return (lambda wrap: contender(wrap(fn), args, train)), train, moved


def measure(name: str, contenders: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    torch.manual_seed(0)
    make, train, moved = maker(name)
    calls: dict[str, Callable[[], Any]] = {}
    result: dict[str, Any] = {"trains": train, "ms": {}, "first_call_s": {}, "errors": {}, "peak_mib": {}, "held_mib": {}}
    for who, wrap in contenders.items():
        try:
            _warm(who, make, wrap, calls, result)
        except Exception as error:
            calls.pop(who, None)
            result["errors"][who] = f"{type(error).__name__}: {str(error)[:200]}"
    if said := _said():
        result["said"] = said
    repeats = REPEATED if moved or name in FLOPS else 1
    slowest = max((timed(call) for call in calls.values()), default=0.0) * 1e-3 * repeats
    rounds = max(5, min(ROUNDS, int(SECONDS / max(slowest, 1e-6) / max(len(calls), 1))))
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(rounds):
        for who, call in calls.items():
            times[who].append(timed(call, repeats, repeats > 1))
    result["rounds"] = rounds
    result["ms"] = {who: round(statistics.median(t), 5) for who, t in times.items()}
    ours = result["ms"].get("magneto")
    if ours:
        result["speedup"] = {who: round(t / ours, 3) for who, t in result["ms"].items() if who != "magneto"}
        modes = [t for who, t in result["ms"].items() if who.startswith("torch.compile")]
        if len(modes) > 1:
            result["speedup"]["torch.compile, its best mode"] = round(min(modes) / ours, 3)
    if moved:
        copy = _bandwidth()
        result["share_of_copy"] = {who: round(moved / (t * 1e-3) / copy, 3) for who, t in result["ms"].items()}
    if name in FLOPS:
        rate = _product_rate()
        result["share_of_product"] = {who: round(FLOPS[name] / (t * 1e-3) / rate, 3) for who, t in result["ms"].items()}
        print(name, "of", round(rate / 1e12), "TFLOP/s", result["share_of_product"])
    return result


def _said() -> list[str]:
    """What ran otherwise than compiled and recorded, since the last reset."""
    from magneto.base.events import events

    refused = [f"not recorded: {e.refused}" for e in events("artifact") if "refused" in e.fields]
    return [str(e.fields.get("reason", e.fields))[:200] for kind in ("break", "fallback") for e in events(kind)] + refused


def _product_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    n = 8192
    a, b = randn(n, n, dtype=torch.bfloat16), randn(n, n, dtype=torch.bfloat16)
    return 2 * n**3 / (statistics.median([timed(lambda: a @ b, 3, True) for _ in range(5)]) * 1e-3)


def _warm(who: str, make: Any, wrap: Any, calls: dict[str, Callable[[], Any]], result: dict[str, Any]) -> None:
    """Compile, record, and look at the memory: `peak_mib` is the most a call allocates, `held_mib` what the process must have for it (with the pools of recordings, which nobody else can
    use, and without caches that are only kept). Whoever needs a workspace of cuBLAS's lays it out anew, and it counts."""
    torch.cuda.synchronize()
    gc.collect()  # what the row before has left would be counted here and gone later
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    calls[who] = make(wrap)
    start = time.perf_counter()
    calls[who]()
    torch.cuda.synchronize()
    result["first_call_s"][who] = round(time.perf_counter() - start, 2)
    for _ in range(4):
        calls[who]()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calls[who]()
    torch.cuda.synchronize()
    result["peak_mib"][who] = round((torch.cuda.max_memory_allocated() - allocated) / 2**20, 1)
    result["held_mib"][who] = round((torch.cuda.max_memory_reserved() - before) / 2**20, 1)


def _bandwidth() -> float:
    """Bytes read and written by a large copy in a second."""
    source = torch.empty(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    times = [timed(lambda: target.copy_(source), 1, True) for _ in range(7)]
    return 2 * source.nbytes / (statistics.median(times) * 1e-3)


# ---- host time -----------------------------------------------------------------------------------------------------------


def host_times(contenders: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Microseconds that the host spends on a call whose work on the device is next to nothing."""
    layers = [m for _ in range(8) for m in (torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU())]
    module = torch.nn.Sequential(*layers).to(DEVICE)
    cases: dict[str, tuple[Any, tuple[Any, ...], bool]] = {
        "tiny function": (lambda x: x + 1, (randn(8),), False),
        "24 operations": (module, (randn(8, 64),), False),
        "24 operations, forward and backward": (module, (randn(8, 64),), True),
    }
    found: dict[str, Any] = {}
    for name, (fn, args, train) in cases.items():
        calls = {}
        for who, wrap in contenders.items():
            try:
                calls[who] = contender(wrap(fn), args, train)
                for _ in range(20):
                    calls[who]()
            except Exception as error:
                calls.pop(who, None)
                print("host", name, who, type(error).__name__, str(error)[:200], flush=True)
        times: dict[str, list[float]] = {who: [] for who in calls}
        for _ in range(15):
            for who, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(20):
                    call()
                times[who].append((time.perf_counter() - start) / 20 * 1e6)
        found[name] = {who: round(statistics.median(t), 2) for who, t in times.items()}
        print("host us:", name, found[name], flush=True)
        torch.compiler.reset()
    return found


# ---- processes of their own ----------------------------------------------------------------------------------------------


def first_call(name: str, who: str) -> None:
    """Prints the seconds of a row's first call (training: first step); a process of its own runs this."""
    torch.manual_seed(0)
    make, _, _ = maker(name)
    torch.randn(8, device=DEVICE).sum().item()
    call = make(CONTENDERS[who])
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    print(json.dumps({"seconds": round(time.perf_counter() - start, 3)}))


def processes(name: str, contenders: Sequence[str]) -> dict[str, Any]:
    """The first call in a fresh process, and in a second one with what the first has kept on disk."""
    found: dict[str, Any] = {}
    for who in contenders:
        with tempfile.TemporaryDirectory() as directory:
            kept = {"MAGNETO_CACHE_DIR": "magneto", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
            environment = {**os.environ, **{key: f"{directory}/{folder}" for key, folder in kept.items()}}
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--first-call", name, who]
            times = []
            for _ in range(2):
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
                lines = done.stdout.strip().splitlines()
                times.append(json.loads(lines[-1])["seconds"] if done.returncode == 0 and lines else None)
                if done.returncode:
                    print(done.stderr[-500:], flush=True)
        found[who] = dict(zip(("cold_s", "second_process_s"), times, strict=True))
    print("processes:", name, found, flush=True)
    return found


def warm_caches(names: Sequence[str], contenders: Sequence[str], jobs: int) -> None:
    """Every row's first call by processes side by side, so that what compilers keep on disk is there when rows are measured one by one."""
    work = [(name, who) for name in names for who in contenders if who != "eager"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--first-call"]

    def one(item: tuple[str, str]) -> None:
        subprocess.run([*command, *item], capture_output=True, timeout=240, check=False)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, work))


def memory_of(name: str, who: str) -> dict[str, float]:
    """MiB of this process, weights and inputs included: what these take, the most that five calls from the first on allocate and reserve, and the most that a call does behind those."""
    torch.manual_seed(0)
    make, _, _ = maker(name)
    call = make(CONTENDERS[who])  # of a step: made with its parameters
    found = {}

    def begin() -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def end(when: str) -> None:
        torch.cuda.synchronize()
        found[f"{when}_allocated"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        found[f"{when}_reserved"] = round(torch.cuda.max_memory_reserved() / 2**20, 1)

    begin()
    found["given"] = round(torch.cuda.memory_allocated() / 2**20, 1)
    for _ in range(5):
        call()
    end("whole")
    begin()
    call()
    end("steady")
    return found


def memory(names: Sequence[str], contenders: Sequence[str], jobs: int, rows: dict[str, Any], keep: Callable[[], None], end: float) -> None:
    """Each row and contender in a process of its own, so that no slack of others serves it, with the caches of this process' environment. None is begun after `end`."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--memory-of"]

    def one(name: str, who: str) -> dict[str, float] | str:
        if time.perf_counter() > end:
            return "no time"
        try:
            done = subprocess.run([*command, name, who], capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return "no end within 300 s"
        lines = done.stdout.strip().splitlines()
        return dict(json.loads(lines[-1])) if done.returncode == 0 and lines else done.stderr[-300:]

    with ThreadPoolExecutor(jobs) as pool:
        asked = {pool.submit(one, name, who): (name, who) for name in names for who in contenders}
        for done in as_completed(asked):
            name, who = asked[done]
            found = done.result()
            print("memory:", name, who, found, flush=True)
            kept = rows.setdefault(name, {}).setdefault("memory_mib", {})
            kept.pop(who, None)
            if isinstance(found, dict):
                kept[who] = found
            keep()


# ---- the run -------------------------------------------------------------------------------------------------------------


def _magneto(fn: Any, mode: str | None = None) -> Any:
    import magneto

    return magneto.optimize("inductor", mode=mode)(fn)


CONTENDERS: dict[str, Callable[[Any], Any]] = {
    "magneto": _magneto,
    "eager": lambda fn: fn,
    "torch.compile": lambda fn: torch.compile(fn),
    "torch.compile reduce-overhead": lambda fn: torch.compile(fn, mode="reduce-overhead"),
    "torch.compile max-autotune": lambda fn: torch.compile(fn, mode="max-autotune"),
    "magneto max-autotune": lambda fn: _magneto(fn, "max-autotune"),
    "magneto no-cudagraphs": lambda fn: _magneto(fn, "no-cudagraphs"),
}
USUAL = "magneto,eager,torch.compile,torch.compile reduce-overhead"


def summary(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means over the suite."""
    found: dict[str, Any] = {}
    for kind, names in (
        ("inference", [n for n in SUITE if not n.endswith("_training")]),
        ("training", [n for n in SUITE if n.endswith("_training")]),
        ("all", SUITE),
    ):
        for against in ("eager", "torch.compile", "torch.compile, its best mode"):
            ratios = [rows[n]["speedup"][against] for n in names if against in rows.get(n, {}).get("speedup", {})]
            if ratios:
                found[f"{kind}: {against}"] = {
                    "geometric_mean": round(statistics.geometric_mean(ratios), 3),
                    "least": min(ratios),
                    "rows": len(ratios),
                }
        for what in ("held_mib", "peak_mib"):
            pairs = [(rows[n][what].get("magneto"), rows[n][what].get("torch.compile")) for n in names if what in rows.get(n, {})]
            ratios = [a / b for a, b in pairs if a and b and min(a, b) > 0]
            if ratios:
                found[f"{kind}: {what} of torch.compile's"] = {
                    "geometric_mean": round(statistics.geometric_mean(ratios), 3),
                    "most": round(max(ratios), 3),
                }
        for against in ("torch.compile", "torch.compile reduce-overhead"):
            both = [m for n in names if "magneto" in (m := rows.get(n, {}).get("memory_mib", {})) and against in m]
            for what in ("steady_reserved", "whole_reserved", "steady_allocated", "whole_allocated") if both else ():
                ratios = [m["magneto"][what] / m[against][what] for m in both]
                found[f"{kind}: process memory, {what} of {against}'s"] = {
                    "geometric_mean": round(statistics.geometric_mean(ratios), 3),
                    "most": round(max(ratios), 3),
                    "rows": len(ratios),
                }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results/gpu.json"))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--contenders", default=USUAL, help="comma-separated: " + ", ".join(CONTENDERS))
    parser.add_argument("--host", action="store_true", help="host time per call")
    parser.add_argument("--processes", default="", help="comma-separated rows: the first call in a fresh and in a second process")
    parser.add_argument("--warm", type=int, default=0, help="compile the rows by so many processes first")
    parser.add_argument("--memory", default="", help="comma-separated rows or groups: memory of a process of its own for each contender")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time (--memory)")
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="rows, or kernels, suite, steps; none: all")
    options = parser.parse_args()
    if options.first_call:
        first_call(*options.names)
        return 0
    if options.memory_of:
        print(json.dumps(memory_of(*options.names)))
        return 0
    contenders = {who: CONTENDERS[who] for who in options.contenders.split(",")}
    groups = {"kernels": list(ROWS), "suite": SUITE, "steps": list(STEPS), "models": list(MODELS)}

    def members(given: Sequence[str]) -> list[str]:
        return [name for group in given for name in groups.get(group, [group]) if name not in ("", "none")]

    names = members(options.names or ["kernels", "models", "steps"])
    started = time.perf_counter()
    result = _before(Path(options.out))
    if asked := members(options.memory.split(",")):
        memory(asked, list(contenders), options.jobs, result["rows"], lambda: _keep(options.out, result), started + options.budget)
        print(f"memory of {len(asked)} rows after {time.perf_counter() - started:.0f} s", flush=True)
    if options.warm:
        warm_caches(names, list(contenders), options.warm)
        print(f"caches are warm after {time.perf_counter() - started:.0f} s", flush=True)
    if options.host:
        result["host_us"] = host_times(contenders)
        _keep(options.out, result)
    for name in filter(None, options.processes.split(",")):
        result["processes"][name] = processes(name, [who for who in contenders if who in ("magneto", "torch.compile")])
        _keep(options.out, result)
    for name in names:
        if time.perf_counter() - started > options.budget:
            print("no time for", *names[names.index(name) :], flush=True)
            break
        _row(name, contenders, result["rows"])
        _keep(options.out, result)
    print(json.dumps(result.get("summary", {}), indent=1))
    return 0


def _row(name: str, contenders: Mapping[str, Callable[[Any], Any]], rows: dict[str, Any]) -> None:
    import magneto

    begun = time.perf_counter()
    kept = {key: value for key, value in rows.get(name, {}).items() if key == "memory_mib"}  # measured by processes of their own
    try:
        rows[name] = {**measure(name, contenders), **kept}
        row = rows[name]
        print(
            name,
            row["ms"],
            row.get("share_of_copy", ""),
            row["first_call_s"],
            row["held_mib"],
            row["errors"] or "",
            row.get("said", ""),
            flush=True,
        )
    except Exception:
        rows[name] = {"error": traceback.format_exc()[-600:], **kept}
        print(name, rows[name]["error"], flush=True)
    rows[name]["took_s"] = round(time.perf_counter() - begun, 1)
    torch.compiler.reset()
    magneto.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _before(path: Path) -> dict[str, Any]:
    """The file's content, if it is of this device and these versions: rows measured now replace those of the same name."""
    import triton

    head = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    head["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
    found = json.loads(path.read_text()) if path.exists() else {}
    same = all(found.get(key) == value for key, value in head.items())
    return {**head, **{key: found.get(key, {}) if same else {} for key in ("host_us", "processes", "rows")}}


def _keep(out: str, result: dict[str, Any]) -> None:
    result["summary"] = summary(result["rows"])
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
