"""`make demo`: ResNet-18 and a BERT encoder with random weights, in eager and through magneto: same results, compile time, speedup."""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import magneto
from benchmarks.measure import cost_of, interleaved
from benchmarks.models import CASES, largest_error

TITLES = {"resnet18": "torchvision ResNet-18", "bert": "transformers BERT"}
TOLERANCE = 1e-4  # relative to the largest output


def demonstrate(name: str, seconds: float, console: Console) -> dict[str, Any]:
    case = CASES[name]
    model, args, kwargs = case.make()
    optimized = magneto.optimize("inductor")(model)
    before = magneto.stats()

    def eager() -> Any:
        return model(*args, **kwargs)

    def compiled() -> Any:
        return optimized(*args, **kwargs)

    for _ in range(3):
        expected = eager()
    console.print(f"[bold]{TITLES[name]}[/bold] ({case.shape}): compiling ...", end=" ")
    result, cost = cost_of(compiled)
    console.print(f"{cost.wall:.2f} s ({cost.cpu:.2f} s of processor time)")
    error = largest_error(result, expected)
    times = _steady({"eager": eager, "magneto": compiled}, seconds)
    after = magneto.stats()
    return {
        "title": TITLES[name],
        "shape": case.shape,
        "graphs": after["graphs"] - before["graphs"],
        "breaks": after["breaks"] - before["breaks"],
        "compile": cost.wall,
        "error": error,
        **times,
    }


def _steady(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    for call in calls.values():
        for _ in range(3):
            call()
    return {name: statistics.median(values) for name, values in interleaved(calls, seconds).items()}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"eager against magneto, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for column in ("model", "input", "graphs", "breaks", "compile s", "eager ms", "magneto ms", "speedup", "difference"):
        table.add_column(column, justify="left" if column in ("model", "input") else "right")
    for row in rows:
        speedup = row["eager"] / row["magneto"]
        table.add_row(
            row["title"], row["shape"], str(row["graphs"]), str(row["breaks"]), f"{row['compile']:.2f}",
            f"{row['eager'] * 1e3:.1f}", f"{row['magneto'] * 1e3:.1f}", f"[{'green' if speedup >= 1 else 'red'}]{speedup:.2f}x[/]",
            f"{row['error']:.1e} {'ok' if row['error'] <= TOLERANCE else 'WRONG'}",
        )  # fmt: skip
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(TITLES))
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring per model")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", FutureWarning)
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows = []
    with torch.no_grad():
        for name in options.models.split(","):
            rows.append(demonstrate(name, options.seconds, console))
    show(rows, console)
    wrong = [row["title"] for row in rows if not row["error"] <= TOLERANCE]
    if wrong:
        console.print(f"[red]results differ from eager: {', '.join(wrong)}[/red]")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
