"""A whole Adam step over 300 parameters: eager foreach, eager fused, torch.compile of the step, and ours, in turns in one process.

    python -m benchmarks.adam_step [--hidden 256] [--seconds 20] [--optimiser Adam] [--without torch.compile] [--out DIR]

The sizes are those of a transformer of 18 layers. Each way has parameters, gradients and state of its own, equal at the start; they are compared before anything is
timed. Kernels are counted for the step in the steady state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Cost, cost_of, environment, interleaved
from magneto.base.text import markdown_table

WAYS = ("eager foreach", "eager fused", "torch.compile", "magneto")
LAYERS = 18


def shapes(hidden: int) -> list[tuple[int, ...]]:
    """300 parameters: embeddings, 18 layers of 16, and what stands behind them."""
    layer = [*[(hidden, hidden), (hidden,)] * 4, (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,), *[(hidden,)] * 4]
    ends = [(8000, hidden), (512, hidden), (2, hidden), *[(hidden,)] * 4, (hidden, hidden), (hidden,), (10, hidden), (10,), (1,)]
    return layer * LAYERS + ends


@dataclass
class Contender:
    parameters: list[torch.nn.Parameter]
    optimiser: torch.optim.Optimizer
    step: Callable[[], Any]
    first: Cost | None = None
    kernels: int | None = None


def contender(way: str, optimiser: str, hidden: int) -> Contender:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes(hidden)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.01
    options: dict[str, Any] = {"fused": True} if way == "eager fused" else {"foreach": True}
    opt = getattr(torch.optim, optimiser)(parameters, lr=1e-3, **options)

    def step() -> None:
        opt.step()

    return Contender(parameters, opt, optimised(way, step))


def optimised(way: str, step: Callable[[], None]) -> Callable[[], Any]:
    if way == "torch.compile":
        return torch.compile(step)
    if way == "magneto":
        import magneto

        return magneto.optimize("inductor", nopython=True)(step)
    return step


def kernel_count(way: str) -> int | None:
    """Generated kernels so far."""
    if way == "magneto":
        from magneto.base import events

        return int(events.counters().get("kernels", 0))
    if way == "torch.compile":
        from torch._inductor import metrics

        return int(metrics.generated_kernel_count)
    return None


def warm(way: str, it: Contender) -> None:
    """Three steps: the first makes the state, the second is compiled for what stays."""
    _, first = cost_of(it.step)
    before = kernel_count(way)
    _, second = cost_of(it.step)
    it.first = Cost(first.wall + second.wall, first.cpu + second.cpu)
    after = kernel_count(way)
    it.kernels = None if before is None or after is None else after - before
    it.step()


def largest_difference(one: Contender, two: Contender) -> float:
    """Of parameters, in units of their largest value."""
    return max(
        float((a.detach().double() - b.detach().double()).abs().max() / b.detach().double().abs().max().clamp_min(1e-30))
        for a, b in zip(one.parameters, two.parameters, strict=True)
    )


def measure(ways: list[str], optimiser: str, hidden: int, seconds: float) -> dict[str, Any]:
    contenders = {way: contender(way, optimiser, hidden) for way in ways}
    for way, it in contenders.items():
        warm(way, it)
    reference = contenders["eager foreach"]
    count = sum(p.numel() for p in reference.parameters)
    difference = {way: largest_difference(it, reference) for way, it in contenders.items()}  # each has made three steps
    report: dict[str, Any] = {"optimiser": optimiser, "parameters": len(reference.parameters), "elements": count, "ways": {}}
    for way, times in interleaved({way: it.step for way, it in contenders.items()}, seconds).items():
        it = contenders[way]
        assert it.first is not None
        report["ways"][way] = {
            "step_ms": statistics.median(times) * 1e3,
            "steps": len(times),
            "kernels": it.kernels,
            "first_two_steps_s": it.first.wall,
            "first_two_steps_cpu_s": it.first.cpu,
            "difference_from_foreach": difference[way],
        }
    base = report["ways"]["eager foreach"]["step_ms"]
    for row in report["ways"].values():
        row["speedup"] = base / row["step_ms"]
    return report


def table(report: dict[str, Any]) -> str:
    rows = [
        [
            way,
            f"{row['step_ms']:.2f}",
            f"{row['speedup']:.2f}x",
            "" if row["kernels"] is None else str(row["kernels"]),
            f"{row['first_two_steps_s']:.1f}",
            f"{row['difference_from_foreach']:.1e}",
        ]
        for way, row in report["ways"].items()
    ]
    return markdown_table(rows, ["way", "step, ms", "against foreach", "kernels", "first two steps, s", "difference"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--optimiser", default="Adam")
    parser.add_argument("--without", nargs="*", default=[], choices=WAYS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    ways = [way for way in WAYS if way not in options.without]
    report = {**measure(ways, options.optimiser, options.hidden, options.seconds), "environment": environment()}
    print(f"{report['optimiser']}, {report['parameters']} parameters, {report['elements']:,} elements\n")
    print(table(report))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "adam_step.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
