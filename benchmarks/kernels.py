"""Single kernels: eager, ours and torch.compile's in turns in one process, with working sets beyond and within the processor's caches.

    python -m benchmarks.kernels [--kernels softmax,gelu] [--sizes beyond,within] [--without-opponent] [--clock cpu] [--seconds 0.5] [--out DIR]

`--kernels` takes parts of names or families. *beyond*: inputs and results together are larger than the last-level cache; *within*: about 2 MB. Results are compared with
eager's before anything is timed. The share of bandwidth is (bytes of inputs and results) / time, against the copy of one tensor into another of the same working set,
measured in the same turns of the run; it is given beyond the cache, for kernels that could run at the speed of memory. glibc is told to keep the memory of freed results (as it does
below 32 MB of its own), because mapping fresh pages would cost every variant more than the kernel itself. `--clock cpu` counts processor time: for a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_table import KERNELS, Kernel
from benchmarks.measure import environment, geometric_mean, interleaved
from benchmarks.models import tensors_of
from magneto.base.text import markdown_table

MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}
WITHIN = 2 << 20
LEAST = 2e-3  # seconds that one timed turn takes at least


def cache_bytes() -> int:
    """The largest cache; 32 MB where the system does not tell."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)


def nbytes(*values: Any) -> int:
    """Of the memory of different tensors."""
    found = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors_of(values)}
    return sum(found.values())


def inputs_for(kernel: Kernel, wanted: int) -> tuple[Any, ...]:
    """Inputs that, with the results, take about `wanted` bytes."""
    probe = kernel.make(1 << 18), kernel.make(1 << 19)
    small, large = (nbytes(*inputs, kernel.call(*inputs)) for inputs in probe)
    per_element = (large - small) / (1 << 18)
    fixed = large - per_element * (1 << 19)
    return kernel.make(max(1 << 14, int((wanted - fixed) / per_element)))


def difference(result: Any, reference: Any) -> float:
    """The largest difference, relative to each tensor's largest magnitude."""
    worst = 0.0
    for a, b in zip(tensors_of(result), tensors_of(reference), strict=True):
        if a.shape != b.shape or a.dtype is not b.dtype:
            return float("inf")
        if torch.equal(a, b):
            continue
        scale = float(b.abs().max()) or 1.0
        worst = max(worst, float((a - b).abs().max()) / scale if a.is_floating_point() else float((a != b).sum()) / a.numel())
    return worst


def repeated(call: Callable[[], Any], clock: Callable[[], float]) -> int:
    """How many calls make a turn long enough for the clock."""
    call()
    begin = clock()
    call()
    once = clock() - begin
    return max(1, min(2000, int(LEAST / max(once, 1e-7))))


def measured(name: str, size: str, ways: dict[str, Any], wanted: int, options: argparse.Namespace) -> dict[str, Any]:
    kernel = KERNELS[name]
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    inputs = inputs_for(kernel, wanted)
    reference = kernel.call(*inputs)
    moved = nbytes(*inputs, reference)
    calls: dict[str, Callable[[], Any]] = {}
    row: dict[str, Any] = {"family": kernel.family, "mb": moved / 1e6, "ms": {}, "difference": {}, "first_call_s": {}}
    for way, optimise in ways.items():
        call = optimise(kernel.call) if optimise else kernel.call
        begin = time.perf_counter()
        try:
            result = call(*inputs)
        except Exception as error:
            row["difference"][way] = f"{type(error).__name__}: {error}"[:200]
            continue
        row["first_call_s"][way] = time.perf_counter() - begin
        row["difference"][way] = difference(result, reference)
        del result
        calls[way] = lambda call=call: call(*inputs)  # type: ignore[misc]
    del reference
    source = torch.zeros(moved // 8)
    target = torch.zeros(moved // 8)
    calls["copy"] = lambda: target.copy_(source)
    turns = {way: (call, repeated(call, clock)) for way, call in calls.items()}

    def turn(call: Callable[[], Any], count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                call()

        return run

    times = interleaved({way: turn(*pair) for way, pair in turns.items()}, options.seconds, options.rounds, clock)
    row["ms"] = {way: statistics.median(found) / turns[way][1] * 1e3 for way, found in times.items()}
    row["turns"] = len(next(iter(times.values())))
    _ratios(row, kernel.streams and size == "beyond")
    return row


def _ratios(row: dict[str, Any], streams: bool) -> None:
    ms = row["ms"]
    if "magneto" not in ms:
        return
    row["to_eager"] = ms["eager"] / ms["magneto"]
    row["gb_per_s"] = row["mb"] / ms["magneto"]
    if "torch.compile" in ms:
        row["to_torch.compile"] = ms["torch.compile"] / ms["magneto"]
    if streams:
        row["of_copy"] = ms["copy"] / ms["magneto"]


def ways_of(options: argparse.Namespace) -> dict[str, Any]:
    import magneto

    ways: dict[str, Any] = {"eager": None, "magneto": magneto.optimize("inductor", nopython=True)}
    if not options.without_opponent:
        ways["torch.compile"] = lambda call: torch.compile(call, dynamic=False)
    return ways


def run(options: argparse.Namespace) -> dict[str, Any]:
    limit = options.megabytes << 20 if options.megabytes else cache_bytes() * 5 // 4
    sizes = {"beyond": limit, "within": WITHIN}
    chosen = [part for part in options.kernels.split(",") if part]
    names = [name for name, k in KERNELS.items() if not chosen or any(part in name or part == k.family for part in chosen)]
    report: dict[str, Any] = {"environment": environment(), "clock": options.clock, "cache_mb": cache_bytes() / 1e6, "kernels": {}}
    begin = time.perf_counter()
    for name in names:
        for size in options.sizes.split(","):
            found = measured(name, size, ways_of(options), sizes[size], options)
            report["kernels"].setdefault(name, {})[size] = found
            print(f"{time.perf_counter() - begin:5.0f} s  {name:22} {size:7} {_line(found)}", flush=True)
            forget(options)
    report["summary"] = {size: summary([r[size] for r in report["kernels"].values() if size in r]) for size in sizes}
    return report


def forget(options: argparse.Namespace) -> None:
    """Each size is compiled for itself."""
    import magneto

    magneto.reset()
    if not options.without_opponent:
        torch.compiler.reset()
    gc.collect()


def _line(row: dict[str, Any]) -> str:
    parts = [f"{way} {ms:.3f}" for way, ms in row["ms"].items()]
    parts += [f"{key} {row[key]:.2f}" for key in ("to_eager", "to_torch.compile", "of_copy") if key in row]
    return "  ".join(parts) + f"  difference {row['difference'].get('magneto')}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of the ratios, and how many streaming kernels reach 85 % of the copy's bandwidth."""
    result: dict[str, Any] = {"kernels": len(rows)}
    for key in ("to_eager", "to_torch.compile", "of_copy"):
        values = [row[key] for row in rows if key in row]
        if values:
            result[key] = {"geometric_mean": geometric_mean(values), "least": min(values)}
    shares = [row["of_copy"] for row in rows if "of_copy" in row]
    result["at_85_percent"] = f"{sum(share >= 0.85 for share in shares)} of {len(shares)}"
    return result


def page(report: dict[str, Any]) -> str:
    env = report["environment"]
    lines = ["# Kernels", "", ", ".join(f"{key} {value}" for key, value in env.items()), f"Clock: {report['clock']}.", ""]
    for size, found in report["summary"].items():
        rows = [(name, row[size]) for name, row in report["kernels"].items() if size in row]
        if not rows:
            continue
        lines += [
            f"## Working set {'beyond the last-level cache' if size == 'beyond' else 'within the cache'}",
            "",
            f"{json.dumps(found)}",
            "",
        ]
        table = [
            [
                name,
                f"{row['mb']:.1f}",
                *(f"{row['ms'][way]:.3f}" if way in row["ms"] else "-" for way in ("eager", "magneto", "torch.compile", "copy")),
                *(f"{row[key]:.2f}" if key in row else "" for key in ("to_eager", "to_torch.compile", "of_copy")),
            ]
            for name, row in rows
        ]
        heads = [
            "kernel",
            "MB",
            "eager ms",
            "magneto ms",
            "torch.compile ms",
            "copy ms",
            "against eager",
            "against torch.compile",
            "of copy bandwidth",
        ]
        lines += [markdown_table(table, heads), ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="")
    parser.add_argument("--sizes", default="beyond,within")
    parser.add_argument("--megabytes", type=int, default=0, help="working set of the size beyond, instead of 1.25 of the last-level cache")
    parser.add_argument("--without-opponent", action="store_true")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if arguments is None and any(os.environ.get(key) != value for key, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]], {**os.environ, **MALLOC})
    warnings.simplefilter("ignore")
    with torch.no_grad():
        report = run(options)
    text = page(report)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "kernels.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
