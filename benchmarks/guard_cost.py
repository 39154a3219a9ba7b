"""What the guards of a 24-layer transformer cost per call, next to torch.compile's.

    python -m benchmarks.guard_cost [--out DIR]

Both sides get a backend whose compiled graph returns constants, so that a call of the compiled module is guards and overhead alone; the same
call with the model's layers cut off at 0 tells what is overhead of any call. For magneto the guard check is also timed in C, with no Python
between the checks. The minimum over many short runs: what other programs do on the machine only adds.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import magneto
from benchmarks.measure import environment
from magneto import _C
from magneto.base.text import markdown_table

LAYERS, WIDTH, RUNS = 24, 32, 400
REPEATS = 10


class Transformer(nn.Module):
    """24 encoder layers of 12 parameters and a final norm: 290 parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def constants(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend: the compiled graph gives back what its first call would give, whatever its inputs."""
    with torch.no_grad():
        results = gm(*example_inputs)
    return lambda *inputs: results


def best(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    least = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter_ns()
        for _ in range(REPEATS):
            call()
        least = min(least, time.perf_counter_ns() - started)
    return least / REPEATS / 1e3


def called(optimise: Callable[[nn.Module], Callable[..., Any]], layers: int) -> float:
    model, x = Transformer(layers), torch.randn(2, 8, WIDTH)
    compiled = optimise(model)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        return best(lambda: compiled(x))


def in_c() -> dict[str, Any]:
    """magneto's check alone: nanoseconds, and what a check executes."""
    model, x = Transformer(LAYERS), torch.randn(2, 8, WIDTH)
    compiled = magneto.optimize(constants, nopython=True)(model)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        region = next(region for region in _C.regions() if region.hits and len(region.info["guards"]) > 100)
        program = region.guards
        slots = (model, x)[: region.code.co_argcount] + (None,) * 8
        check = min(program.time(5, slots, (), Transformer.forward.__globals__) for _ in range(2000))
    rows = region.info["guards"]
    parameters = sum(1 for _ in model.parameters())
    left: dict[str, int] = {}
    for operation, *_ in program.fast:
        left[operation] = left.get(operation, 0) + 1
    return {"parameters": parameters, "rows": len(rows), "check_us": check / 1e3, "ns_per_parameter": check / parameters, "executed": left}


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ours = magneto.optimize(constants, nopython=True)
    theirs = functools.partial(torch.compile, backend=constants)
    result: dict[str, Any] = {"environment": environment(), **in_c()}
    for name, optimise in (("magneto", ours), ("torch.compile", theirs)):
        result[name] = {"call_us": called(optimise, LAYERS), "call_without_layers_us": called(optimise, 0)}
        result[name]["guards_us"] = result[name]["call_us"] - result[name]["call_without_layers_us"]
    return result


def measured_in_processes(n: int) -> dict[str, Any]:
    """The median of each figure over fresh processes: where memory happens to lie in a process changes these by a third."""
    command = [sys.executable, "-m", "benchmarks.guard_cost", "--one"]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]) for _ in range(n)]
    result: dict[str, Any] = runs[0]
    for key in ("check_us", "ns_per_parameter"):
        result[key] = statistics.median(run[key] for run in runs)
    for side in ("magneto", "torch.compile"):
        result[side] = {key: statistics.median(run[side][key] for run in runs) for key in result[side]}
    result["ratio"] = statistics.median(run["magneto"]["guards_us"] / run["torch.compile"]["guards_us"] for run in runs)
    result["ratios"] = sorted(run["magneto"]["guards_us"] / run["torch.compile"]["guards_us"] for run in runs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--one", action="store_true", help="this process alone, as one line of JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure()))
        return
    result = measured_in_processes(options.processes)
    python = ".".join(result["environment"]["python"].split(".")[:2])
    (options.out / f"guard_cost_{python}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['parameters']} parameters, {result['rows']} rows; executed per check: {result['executed']}")
    print(f"check in C: {result['check_us']:.2f} us, {result['ns_per_parameter']:.1f} ns per parameter")
    rows = [
        [side, *(f"{result[side][key]:.1f}" for key in ("call_us", "call_without_layers_us", "guards_us"))]
        for side in ("magneto", "torch.compile")
    ]
    print(markdown_table(rows, ("side", "us per call", "without layers", "guards and inputs of 24 layers")))
    print(f"guards and inputs: 1/{1 / result['ratio']:.1f} of torch.compile's (median of {options.processes} processes)")


if __name__ == "__main__":
    main()
