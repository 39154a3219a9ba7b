"""Training: loss curves, memory and compile time of whole steps (forward, backward, optimiser in one function), and what a tiny call costs.

    python -m benchmarks.training [--parts curves,memory,forward_memory,compile,calls] [--models resnet18,bert] [--steps 100] [--rounds 3] [--out FILE]

Each measurement is a process of its own; its row says what it took (`took_s`, processor seconds). FILE is written after each model, and other parts and models in it stay. *curves*: losses of Adam's steps under three backends beside a float64 run; a distance is the root mean square difference
to it, relative to its first loss. *memory*: growth of the C heap during a step, counted (benchmarks/heap.py), gradients being None before it; beside it that of resident memory,
with malloc giving everything back at once, and what is kept between steps (the optimiser's state, and what a compiler holds). *forward_memory*: the same where only the model is optimised,
loss and backward stand outside, and there is no optimiser.
*compile*: processor and wall seconds of the first three steps less three of eager's (the optimiser's state is made in the first), with empty caches and again in a second process;
torch.compile gets the model and the optimiser's step, as its documents advise. *calls*: microseconds of a forward and backward of one small layer.
"""

from __future__ import annotations

import argparse
import compileall
import ctypes
import functools
import gc
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.heap import Heap, counter_library
from benchmarks.measure import (
    ROOT,
    Cost,
    _status_mb,
    cost_of,
    environment,
    geometric_mean,
    interleaved,
    memory_peak_mb,
    processor_seconds,
    run_worker,
)
from benchmarks.training_models import as_float64, build, training_step

COMPILERS = ("eager", "magneto", "torch.compile")
CURVES = ("resnet18", "bert", "gpt2", "vit", "recommendation", "recurrent")
LARGE = ("resnet18", "resnet50", "bert", "gpt2", "vit")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def prepare(compiler: str, name: str, small: bool) -> tuple[Callable[[int], torch.Tensor], Callable[[], None]]:
    """(step number -> loss, a function that drops the gradients)."""
    model, loss, batches = build(name, small)
    if compiler == "float64":
        batches = as_float64(model, batches)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    step = training_step(loss)
    if compiler == "torch.compile":
        model.compile()
        optimiser.step = torch.compile(optimiser.step)  # type: ignore[method-assign]
    elif compiler not in ("eager", "float64"):
        import magneto

        step = magneto.optimize("inductor" if compiler == "magneto" else compiler)(step)

    def run(number: int) -> torch.Tensor:
        return step(model, optimiser, *batches[number % len(batches)])

    return run, optimiser.zero_grad


def prepare_forward(compiler: str, name: str) -> tuple[Callable[[int], torch.Tensor], Callable[[], None]]:
    """As `prepare`, only the model being optimised."""
    model, loss, batches = build(name, False)
    run: Any = model
    if compiler == "torch.compile":
        run = torch.compile(model)
    elif compiler == "magneto":
        import magneto

        run = magneto.optimize("inductor")(model)

    def step(number: int) -> torch.Tensor:
        value = loss(run, *batches[number % len(batches)])
        value.backward()
        return value.detach()

    return step, model.zero_grad


# -- one measurement, in a process of its own


def curve(compiler: str, name: str, steps: int) -> dict[str, Any]:
    run, _ = prepare(compiler, name, True)
    torch.manual_seed(1)
    losses = [run(number).item() for number in range(steps)]
    return {"losses": losses, **_graphs(compiler)}


def _graphs(compiler: str) -> dict[str, Any]:
    if compiler in ("eager", "float64", "torch.compile"):
        return {}
    import magneto

    stats = magneto.stats()
    return {key: stats[key] for key in ("graphs", "breaks", "fallbacks")}


def memory(compiler: str, name: str, steps: int) -> dict[str, Any]:
    return _growth(lambda: prepare(compiler, name, False), compiler, steps)


def forward_memory(compiler: str, name: str, steps: int) -> dict[str, Any]:
    return _growth(lambda: prepare_forward(compiler, name), compiler, steps)


def _growth(prepared: Callable[[], tuple[Callable[[int], torch.Tensor], Callable[[], None]]], compiler: str, steps: int) -> dict[str, Any]:
    heap = Heap()
    run, drop = prepared()
    made = heap.live()
    resident, counted = [], []
    for number in range(steps + 3):
        drop()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        present, start = _status_mb("VmRSS"), heap.live()
        heap.mark()
        peak = memory_peak_mb(lambda number=number: run(number))  # type: ignore[misc]
        resident.append(peak - present)
        counted.append((heap.peak() - start) / 2**20)
    drop()
    gc.collect()
    found = {"resident_mb": statistics.median(resident[3:]), "kept_mb": (heap.live() - made) / 2**20, "each": counted}
    return {"step_mb": statistics.median(counted[3:]), **found, **_graphs(compiler)}


def compile_time(compiler: str, name: str, steps: int) -> dict[str, Any]:
    plain, _ = prepare("eager", name, True)
    for number in range(3):
        plain(number)
    eager = [cost_of(lambda: plain(0))[1] for _ in range(5)]
    base = Cost(3 * statistics.median(c.wall for c in eager), 3 * statistics.median(c.cpu for c in eager))

    def first() -> None:
        run, _ = prepare(compiler, name, True)
        for number in range(3):
            run(number)

    _, cost = cost_of(first)
    return {"cpu_s": cost.cpu - base.cpu, "wall_s": cost.wall - base.wall, **_graphs(compiler)}


def calls(compiler: str, name: str, steps: int) -> dict[str, Any]:
    """All compilers in one process, in turns of 200 calls; processor time."""
    import magneto

    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x)).sum()

    def both(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(200):
                layer.weight.grad = layer.bias.grad = None
                call(x).backward()

        return run

    def whole(x: torch.Tensor) -> torch.Tensor:
        loss = forward(x)
        loss.backward()
        return loss

    inside = magneto.optimize("inductor")(whole)

    def inside_step() -> None:
        for _ in range(200):
            layer.weight.grad = layer.bias.grad = None
            inside(x)

    variants = {
        "eager": both(forward),
        "magneto": both(magneto.optimize("inductor")(forward)),
        "torch.compile": both(torch.compile(forward)),
    }
    variants["magneto, backward inside"] = inside_step
    for run in variants.values():
        run()
    times = interleaved(variants, 10.0, 11, time.process_time)
    return {name: statistics.median(found) / 200 * 1e6 for name, found in times.items()}


PARTS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    "curves": curve,
    "memory": memory,
    "forward_memory": forward_memory,
    "compile": compile_time,
    "calls": calls,
}


# -- all of them


def measured(part: str, compiler: str, name: str, steps: int, env: dict[str, str]) -> dict[str, Any]:
    start = processor_seconds()
    done = run_worker("benchmarks.training", ["--worker", part, compiler, name, "--steps", str(steps)], env, 1800)
    if done.returncode != 0:
        return {"error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "took_s": round(processor_seconds() - start, 1)}


def _distance(losses: list[float], exact: list[float]) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(losses, exact, strict=True)) / len(exact)) / abs(exact[0])


def model_curves(name: str, steps: int, rounds: int) -> dict[str, Any]:
    found = {c: measured("curves", c, name, steps, {}) for c in ("float64", "eager", "aot_eager", "magneto")}
    if any("error" in one for one in found.values()):
        return found
    losses = {c: one["losses"] for c, one in found.items()}
    ours, eager = (_distance(losses[c], losses["float64"]) for c in ("magneto", "eager"))
    return {
        "steps": steps,
        "first_loss": losses["float64"][0],
        "last_loss": losses["float64"][-1],
        "aot_eager_bitwise": losses["aot_eager"] == losses["eager"],
        "eager_distance": eager,
        "inductor_distance": ours,
        "ratio": ours / eager if eager else math.inf,
        **{c: {key: found[c][key] for key in ("graphs", "breaks", "fallbacks")} for c in ("aot_eager", "magneto")},
        "took_s": sum(one["took_s"] for one in found.values()),
    }


def model_memory(name: str, steps: int, rounds: int, part: str = "memory", compilers: Sequence[str] = COMPILERS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = {**MALLOC, "LD_PRELOAD": counter_library(Path(folder))}
        row: dict[str, Any] = {c: measured(part, c, name, min(steps, 4), env) for c in compilers}
    return row


def model_compile(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """Cold, and a second process that finds the first one's caches; median of rounds."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {when: {c: [] for c in COMPILERS[1:]} for when in ("cold", "second")}
    for _ in range(rounds):
        for compiler in COMPILERS[1:]:
            with tempfile.TemporaryDirectory() as folder:
                env = {"MAGNETO_CACHE_DIR": folder + "/ours", "TORCHINDUCTOR_CACHE_DIR": folder + "/torch"}
                for when in ("cold", "second"):
                    runs[when][compiler].append(measured("compile", compiler, name, 3, env))
    return {when: _medians(of) for when, of in runs.items()}


def _medians(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for compiler, found in runs.items():
        good = [one for one in found if "error" not in one]
        row[compiler] = {key: statistics.median(one[key] for one in good) for key in ("cpu_s", "wall_s", "took_s")} if good else found[0]
        if good and "graphs" in good[0]:
            row[compiler].update({key: good[0][key] for key in ("graphs", "breaks", "fallbacks")})
    for key in ("cpu_s", "wall_s"):
        _ratios(row, key)
    return row


def _ratios(row: dict[str, Any], key: str) -> None:
    ours = row["magneto"].get(key)
    for other in ("eager", "torch.compile"):
        if ours is not None and other in row and row[other].get(key):
            row[f"{key}_to_{other}"] = ours / row[other][key]


def means(rows: dict[str, Any], path: tuple[str, ...]) -> float:
    values = []
    for row in rows.values():
        for step in path:
            row = row.get(step, {}) if isinstance(row, dict) else {}
        if isinstance(row, float):
            values.append(row)
    return geometric_mean(values)


def _summarise(results: dict[str, Any]) -> None:
    """Geometric means over the models measured so far."""
    for part in ("memory", "forward_memory"):
        rows = results.get(part, {})
        results[f"{part}_means"] = {c: means(rows, (f"step_mb_to_{c}",)) for c in ("eager", "torch.compile")}
    rows = results.get("compile", {})
    results["compile_means"] = {
        when: {key: means(rows, (when, f"{key}_to_torch.compile")) for key in ("cpu_s", "wall_s")} for when in ("cold", "second")
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default="")
    parser.add_argument("--compilers", default=",".join(COMPILERS), help="for memory; what is recorded of the others stays")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training.json")
    parser.add_argument("--worker", nargs=3, metavar=("PART", "COMPILER", "MODEL"))
    options = parser.parse_args(argv)
    if options.worker:
        warnings.simplefilter("ignore")
        part, compiler, name = options.worker
        print(json.dumps(PARTS[part](compiler, name, options.steps)))
        return 0
    compilers = options.compilers.split(",")
    chosen = [name for name in options.models.split(",") if name]
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    results["environment"] = environment()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    compileall.compile_dir(ROOT / "magneto", quiet=2)  # as in an installation; torch's bytecode is there too
    for part in options.parts.split(","):
        if part == "calls":
            results[part] = measured("calls", "all", "tiny", 0, {})
        for name in () if part == "calls" else CURVES if part == "curves" else LARGE:
            if not chosen or name in chosen:
                measure = {
                    "curves": model_curves,
                    "memory": functools.partial(model_memory, compilers=compilers),
                    "forward_memory": functools.partial(model_memory, part=part, compilers=compilers),
                    "compile": model_compile,
                }[part]
                row = measure(name, options.steps, options.rounds)
                if "memory" in part:
                    row = {**results.get(part, {}).get(name, {}), **row}
                    _ratios(row, "step_mb")
                results.setdefault(part, {})[name] = row
                _summarise(results)
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
