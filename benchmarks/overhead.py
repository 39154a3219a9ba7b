"""What a compiled call costs besides its graph: tiny functions, magneto and torch.compile in turns in one process.

    python -m benchmarks.overhead [--seconds 4] [--out DIR]

The reference is a direct call of the compiled graph with the same inputs: the callable that each compiler's own backend returned,
kept by a recording backend. Overhead = compiled call - direct calls of its graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import environment
from magneto.base.text import markdown_table


def sin_cos(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() + y.cos()


def twenty(
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any,
    k: Any, u: Any, m: Any, n: Any, o: Any, p: Any, q: Any, r: Any, s: Any, t: Any,
) -> torch.Tensor:  # fmt: skip
    return a + b + c + d + e + f + g + h + i + j + k + u + m + n + o + p + q + r + s + t


class FiftyParameters(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(4)) for _ in range(50)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight
        return x


def one_break(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x.sin()
    if z.sum() > 100:
        return z
    return z + y.cos()


@dataclass(frozen=True)
class Tiny:
    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


CASES = (
    Tiny("x.sin() + y.cos(), 4 elements", lambda: (sin_cos, (torch.randn(4), torch.randn(4)))),
    Tiny("20 tensor arguments", lambda: (twenty, tuple(torch.randn(4) for _ in range(20)))),
    Tiny("module with 50 parameters", lambda: (FiftyParameters().eval(), (torch.randn(4),))),
    Tiny("one graph break", lambda: (one_break, (torch.rand(4), torch.randn(4)))),
)


class Recorder:
    """A backend round the compiler's own: keeps each compiled graph with the inputs of its first call."""

    def __init__(self, inner: Callable[..., Callable[..., Any]]) -> None:
        self.inner = inner
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
        compiled = self.inner(gm, example_inputs, **options)

        def once(*inputs: Any) -> Any:
            self.calls.append((compiled, inputs))
            return compiled(*inputs)

        return once


def magneto_variants(fn: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], Recorder]:
    import magneto

    recorder = Recorder(magneto.lookup_backend("inductor"))
    magneto.optimize(recorder)(fn)(*args)
    return magneto.optimize("inductor")(fn), recorder


def torch_variants(fn: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], Recorder]:
    from torch._inductor.compile_fx import compile_fx

    recorder = Recorder(compile_fx)
    torch.compile(fn, backend=recorder)(*args)
    torch._dynamo.reset()
    return torch.compile(fn), recorder


MAKERS = {"magneto": magneto_variants, "torch.compile": torch_variants}


def direct(recorder: Recorder) -> Callable[[], None]:
    """Calls the recorded graphs in order."""
    calls = list(recorder.calls)
    if len(calls) == 1:
        ((compiled, inputs),) = calls
        return lambda: compiled(*inputs)

    def several() -> None:
        for compiled, inputs in calls:
            compiled(*inputs)

    return several


def measure(case: Tiny, names: list[str], seconds: float) -> dict[str, Any]:
    """Microseconds per call of eager, each compiled function, and its graphs called directly."""
    torch.manual_seed(0)
    fn, args = case.make()
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: fn(*args)}
    graphs = {}
    for name in names:
        compiled, recorder = MAKERS[name](fn, args)
        torch.testing.assert_close(compiled(*args), fn(*args))
        calls[name] = lambda compiled=compiled: compiled(*args)
        calls[name + " graphs"] = direct(recorder)
        graphs[name] = len(recorder.calls)
    times = in_batches(calls, seconds)
    report: dict[str, Any] = {"case": case.name, "eager_us": times["eager"] * 1e6}
    for name in names:
        total, inner = times[name] * 1e6, times[name + " graphs"] * 1e6
        report[name] = {"call_us": total, "graphs_us": inner, "overhead_us": total - inner, "graphs": graphs[name]}
    return report


def in_batches(calls: dict[str, Callable[[], Any]], seconds: float, batch: int = 200) -> dict[str, float]:
    """Median seconds per call; the variants take turns, each with a batch of calls."""
    for call in calls.values():
        for _ in range(batch):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(batch):
                call()
            times[name].append((time.perf_counter() - begin) / batch)
    return {name: statistics.median(values) for name, values in times.items()}


def markdown(results: dict[str, Any]) -> str:
    headers = ["function", "eager us", "variant", "call us", "its graphs alone us", "overhead us", "graphs"]
    rows, ratio_rows = [], []
    for row in results["rows"]:
        for name in MAKERS:
            if name in row:
                r = row[name]
                rows.append(
                    [
                        row["case"],
                        f"{row['eager_us']:.2f}",
                        name,
                        *(f"{r[k]:.2f}" for k in ("call_us", "graphs_us", "overhead_us")),
                        r["graphs"],
                    ]
                )
        if all(name in row for name in MAKERS):
            ratio_rows.append([row["case"], f"{row['magneto']['overhead_us'] / row['torch.compile']['overhead_us']:.3f}"])
    machine = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    parts = ["# Overhead of a call", machine + ".", markdown_table(rows, headers)]
    if ratio_rows:
        parts += ["## Overhead, magneto / torch.compile (bar: 0.25)", markdown_table(ratio_rows, ["function", "ratio"])]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of measuring per function")
    parser.add_argument("--compilers", default=",".join(MAKERS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    names = options.compilers.split(",")
    results: dict[str, Any] = {"environment": environment(), "rows": []}
    with torch.no_grad():
        for case in CASES:
            results["rows"].append(measure(case, names, options.seconds))
            print(json.dumps(results["rows"][-1]), file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overhead.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "overhead.md").write_text(markdown(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
