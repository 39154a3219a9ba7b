"""Small programs on a GPU: eager, magneto and torch.compile in turns. `python -m benchmarks.gpu_sweep [--out benchmarks/results/gpu_sweep.json] [--jobs 14] [--seconds 480] [names...]`

Processes side by side compile all rows first, so that what compilers keep on disk is there; then one process measures row after row: the mean of six calls whose first begins when
the device has slept some milliseconds, so that every contender's host is ahead of it, the least of four turns, in microseconds. `difference`: from eager, relative to the largest value.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import benchmarks.gpu_sweep_fifth
import benchmarks.gpu_sweep_fourth
import benchmarks.gpu_sweep_sixth
import benchmarks.gpu_sweep_third  # noqa: F401  (with gpu_sweep_more: more rows)
import magneto
from benchmarks.gpu_sweep_rows import ROWS

CALLS, TURNS, ASLEEP = 6, 4, 30_000_000
CONTENDERS: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "magneto": magneto.compile, "torch.compile": torch.compile}


def calls(fn: Callable[..., Any], arguments: list[Any], train: bool) -> Callable[[], Any]:
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    grads: list[torch.Tensor] = []

    def forward() -> Any:
        with torch.no_grad():
            return fn(*arguments)

    def both() -> Any:
        result = fn(*arguments)
        if not grads:
            grads.append(torch.randn_like(result) if result.ndim else torch.ones_like(result))
        return result, *torch.autograd.grad(result, leaves, grads[0], allow_unused=True)

    return both if train else forward


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(ASLEEP)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS * 1000


def difference(ours: Any, eager: Any) -> float:
    """The largest one, relative to eager's largest value, of what is finite."""
    found = 0.0
    for a, b in zip(tensors(ours), tensors(eager), strict=True):
        if a.numel():
            scale = b.double().abs().nan_to_num(0, 0, 0).max().item() + 1e-9
            found = max(found, (a.double() - b.double()).abs().nan_to_num(0, 0, 0).max().item() / scale)
    return found


def measure(name: str, times: bool = True) -> dict[str, Any]:
    fn, make, train = ROWS[name]
    result: dict[str, Any] = {}
    ready: dict[str, Callable[[], Any]] = {}
    seen: dict[str, Any] = {}
    for who, wrap in CONTENDERS.items():
        if who == "torch.compile":
            torch._dynamo.reset()
        try:
            call = calls(wrap(fn), make(), train)
            for _ in range(3):
                seen[who] = call()
            ready[who] = call
        except Exception as error:
            result[f"{who} failed"] = f"{type(error).__name__}: {str(error)[:150]}"
    if {"eager", "magneto"} <= seen.keys():
        result["difference"] = difference(seen["magneto"], seen["eager"])
    seen.clear()
    if times:
        turns = [{who: timed(call) for who, call in ready.items()} for _ in range(TURNS)]
        result |= {who: round(min(turn[who] for turn in turns), 1) for who in ready}
    return result


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for other in ("eager", "torch.compile"):
        ratios = {name: row[other] / row["magneto"] for name, row in rows.items() if other in row and "magneto" in row}
        mean = math.exp(sum(map(math.log, ratios.values())) / max(len(ratios), 1))
        behind = {name: round(ratio, 3) for name, ratio in sorted(ratios.items(), key=lambda item: item[1]) if ratio < 0.95}
        found[f"to_{other}"] = {"rows": len(ratios), "geometric_mean": round(mean, 3), "below_0.95": behind}
    return found


def warm(jobs: int, seconds: float, names: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_sweep", "--part"]
    quiet = subprocess.DEVNULL
    running = [subprocess.Popen([*command, f"{k}/{jobs}", *names], stdout=quiet, stderr=quiet) for k in range(jobs)]
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results/gpu_sweep.json"))
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile first; 0: none")
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no row is begun")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names, end = options.names or list(ROWS), time.monotonic() + options.seconds
    if options.part:
        first, step = map(int, options.part.split("/"))
        for name in names[first::step]:
            measure(name, times=False)
            torch.cuda.empty_cache()
        return 0
    if options.jobs:
        warm(options.jobs, options.seconds / 2, options.names)
    rows: dict[str, dict[str, Any]] = {}
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "magneto": magneto.__version__,
    }
    for name in names:
        if time.monotonic() > end:
            print(f"no time for {name} and what follows")
            break
        rows[name] = measure(name)
        gc.collect()
        torch.cuda.empty_cache()
        print(name, rows[name], flush=True)
        Path(options.out).write_text(json.dumps({**about, "summary": summary(rows), "rows": rows}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
