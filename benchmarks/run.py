"""The benchmark: eager, magneto and torch.compile on the same models, interleaved, every compile in a fresh process.

    python -m benchmarks.run [--models resnet18,bert.bfloat16] [--dtypes float32,bfloat16] [--modes inference,training]
                             [--compilers magneto,torch.compile,torch.compile-best] [--without-opponent] [--out DIR]
                             [--phases cold,second,memory,steady] [--continue] [--processor-time]

Per model and mode: the cold first call (empty caches), the first call of a second process (caches of the first), the steady median,
memory, graphs and breaks, the largest error against float64. Compile cost is processor seconds, child processes included.
Writes results.json, results.md and results.png after each model; with --continue, models that stand there already are not measured again.
--processor-time (a busy machine): one thread, and processor time instead of the clock.
"""

from __future__ import annotations

import argparse
import compileall
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import environment, geometric_mean, run_worker
from benchmarks.models import CASES
from magneto.base.text import markdown_table

OPPONENTS = ("magneto", "torch.compile")
BEST = "torch.compile-best"
PHASES = ("cold", "second", "memory", "steady")


def cache_directories(compiler: str, folder: Path) -> dict[str, str]:
    """Environment that makes all caches of a compiler live in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if compiler == "magneto":
        return {"MAGNETO_CACHE_DIR": str(folder)}
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton"), "TMPDIR": str(folder)}


def worker(arguments: list[str], env: dict[str, str], timeout: float) -> dict[str, Any]:
    """The worker's report, or {"failed": last line of its complaint}."""
    try:
        process = run_worker("benchmarks.worker", arguments, env, timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {timeout:.0f} s"}
    if process.returncode:
        return {"failed": (process.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    return json.loads(process.stdout.strip().splitlines()[-1])


def measure(case: str, mode: str, compilers: list[str], options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """One row per variant."""
    rows = {name: {"model": case, "mode": mode, "compiler": name} for name in ["eager", *compilers]}
    phases = options.phases.split(",")
    env = _first_calls(rows, case, mode, [phase for phase in ("cold", "second") if phase in phases], options, scratch)
    for name in rows:
        # Without processes of their own, memory is what the calls after the cold one took.
        if "failed" not in rows[name] and ("memory" in phases or "peak_mb" not in rows[name]):
            rows[name]["peak_mb"] = worker(["memory", case, mode, name], env, options.timeout).get("peak_mb")
    if "steady" in phases:
        _steady(rows, case, mode, options, env)
    return list(rows.values())


def _first_calls(
    rows: dict[str, dict[str, Any]], case: str, mode: str, phases: list[str], options: argparse.Namespace, scratch: Path
) -> dict[str, str]:
    """Fills in what first calls cost; returns an environment in which all compilers find what they have compiled."""
    compilers = [name for name in rows if name != "eager"]
    firsts: dict[str, dict[str, list[dict[str, Any]]]] = {name: {phase: [] for phase in phases} for name in compilers}
    extra = {"OMP_NUM_THREADS": "1"} if options.processor_time else {}
    together = scratch / f"{case}-{mode}"
    for attempt in range(options.repeats if phases else 0):
        for phase in phases:
            for name in compilers if attempt % 2 == 0 else compilers[::-1]:
                own = cache_directories(name, scratch / f"{case}-{mode}-{name}-{attempt}") | extra
                firsts[name][phase].append(worker(["first", case, mode, name], own, options.timeout))
                print(f"  {phase} {name}: {_short(firsts[name][phase][-1])}", file=sys.stderr, flush=True)
        for name in compilers:
            shutil.copytree(scratch / f"{case}-{mode}-{name}-{attempt}", together, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            shutil.rmtree(scratch / f"{case}-{mode}-{name}-{attempt}", ignore_errors=True)
    for name in compilers:
        for phase, reports in firsts[name].items():
            good = [report for report in reports if "failed" not in report]
            if good:
                rows[name] |= {f"{phase}_{key}": statistics.median(report[key] for report in good) for key in ("cpu", "wall")}
                rows[name] |= {key: good[-1][key] for key in ("graphs", "breaks", "peak_mb")}
            else:
                rows[name]["failed"] = reports[-1]["failed"] if reports else "not run"
    return {key: value for name in compilers for key, value in cache_directories(name, together).items()} | extra


def _steady(rows: dict[str, dict[str, Any]], case: str, mode: str, options: argparse.Namespace, env: dict[str, str]) -> None:
    """Fills in medians and errors."""
    working = [name for name in rows if "failed" not in rows[name]]
    arguments = ["steady", case, mode, ",".join(working), "--seconds", str(options.seconds)]
    report = worker([*arguments, *(["--processor-time"] if options.processor_time else [])], env, options.timeout)
    print(f"  steady: {_short(report)}", file=sys.stderr, flush=True)
    for name in working:
        if "failed" in report:
            rows[name].setdefault("failed", "steady: " + report["failed"])
        else:
            rows[name] |= {"steady_seconds": report[name]["seconds"], "runs": report[name]["runs"], "error": report[name]["error"]}


def _short(report: dict[str, Any]) -> str:
    return json.dumps(report, default=str)[:300]


HEADERS = [
    "model",
    "mode",
    "variant",
    "cold CPU s",
    "cold wall s",
    "2nd CPU s",
    "2nd wall s",
    "steady ms",
    "over eager",
    "memory MB",
    "graphs",
    "breaks",
    "error",
]


def markdown(results: dict[str, Any]) -> str:
    """The table, the geometric means, and the machine."""
    rows = []
    for row in results["rows"]:
        eager = _find(results, row, "eager").get("steady_seconds")
        steady = row.get("steady_seconds")
        rows.append([
            row["model"], row["mode"], row["compiler"],
            _n(row.get("cold_cpu"), 2), _n(row.get("cold_wall"), 2), _n(row.get("second_cpu"), 2), _n(row.get("second_wall"), 2),
            _n(steady and steady * 1e3, 1), _n(eager and steady and eager / steady, 2), _n(row.get("peak_mb"), 0),
            row.get("graphs"), row.get("breaks"), row.get("failed") or (f"{row['error']:.1e}" if "error" in row else None),
        ])  # fmt: skip
    summary = [[what, _n(value, 3)] for what, value in ratios(results).items()]
    machine = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    return "\n\n".join([
        "# Benchmark",
        machine + ".",
        "Cold: first call in a fresh process with empty caches, loading the compiler included; 2nd: the same in a second process. "
        "CPU: processor seconds with all child processes. Error: largest difference to a float64 run, relative to the largest value of "
        "the tensor. Memory: largest resident size of a process that runs only this variant: with warm caches, or, where these were not measured, of the calls after the first.",
        markdown_table(rows, HEADERS),
        "## Ratios (geometric means over the models)",
        markdown_table(summary, ["ratio", "value"]),
        "## Single models behind their bars",
        markdown_table(shortfalls(results), ["model", "mode", "what", "value", "bar"]),
        "![plot](results.png)\n",
    ])  # fmt: skip


def _n(value: Any, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _find(results: dict[str, Any], row: dict[str, Any], compiler: str) -> dict[str, Any]:
    for other in results["rows"]:
        if (other["model"], other["mode"], other["compiler"]) == (row["model"], row["mode"], compiler):
            return other
    return {}


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """Geometric means that the project sets itself bars for, per mode."""
    out: dict[str, float] = {}
    for mode in dict.fromkeys(row["mode"] for row in results["rows"]):
        ours, theirs = ([row for row in results["rows"] if (row["compiler"], row["mode"]) == (name, mode)] for name in OPPONENTS)

        def mean(key: str, other: str, inverse: bool, ours: list[dict[str, Any]] = ours) -> float:
            pairs = [(row.get(key), _find(results, row, other).get(key)) for row in ours]
            values = [(b / a if inverse else a / b) for a, b in pairs if a and b]
            return geometric_mean(values)

        out |= {
            f"{mode}: cold processor seconds, magneto / torch.compile": mean("cold_cpu", "torch.compile", False),
            f"{mode}: second process, magneto / torch.compile": mean("second_cpu", "torch.compile", False),
            f"{mode}: speed, magneto over eager": mean("steady_seconds", "eager", True),
            f"{mode}: speed, magneto over torch.compile": mean("steady_seconds", "torch.compile", True),
            f"{mode}: speed, magneto over {BEST}": mean("steady_seconds", BEST, True),
            f"{mode}: error, magneto / eager": mean("error", "eager", False),
            f"{mode}: memory, magneto / eager": mean("peak_mb", "eager", False),
            f"{mode}: memory, torch.compile / eager": mean("peak_mb", "eager", False, theirs),
        }
    return {what: value for what, value in out.items() if value == value}


LEAST_SPEED = {"eager": 1.0, "torch.compile": 0.95, BEST: 0.95}
MOST_OF_OPPONENT = {"cold_cpu": 0.25, "peak_mb": 1.0}
MOST_SECONDS = 3.0  # of processor time for the cold compile of an inference model


def shortfalls(results: dict[str, Any]) -> list[list[Any]]:
    """What misses a bar that each single model has to reach."""
    found: list[list[Any]] = []
    for row in results["rows"]:
        if row["compiler"] != "magneto":
            continue
        own = [row["model"], row["mode"]]
        if "failed" in row:
            found.append([*own, "failed", row["failed"], None])
        for other, bar in LEAST_SPEED.items():
            theirs, ours = _find(results, row, other).get("steady_seconds"), row.get("steady_seconds")
            if theirs and ours and theirs / ours < bar:
                found.append([*own, f"speed over {other}", _n(theirs / ours, 2), bar])
        for key, bar in MOST_OF_OPPONENT.items():
            theirs, ours = _find(results, row, "torch.compile").get(key), row.get(key)
            if theirs and ours and ours > bar * theirs:
                found.append([*own, f"{key} of torch.compile's", _n(ours / theirs, 2), bar])
        if row["mode"] == "inference" and (row.get("cold_cpu") or 0) > MOST_SECONDS:
            found.append([*own, "cold processor seconds", _n(row["cold_cpu"], 1), MOST_SECONDS])
    return found


def plot(results: dict[str, Any], path: Path) -> None:
    """Compile cost and speed over eager, per model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = results["rows"]
    groups = list(dict.fromkeys((row["model"], row["mode"]) for row in rows))
    labels = [model if mode == "inference" else f"{model}\n{mode}" for model, mode in groups]
    panels = (
        ("cold first call, processor seconds", "cold_cpu", OPPONENTS),
        ("second process, processor seconds", "second_cpu", OPPONENTS),
        ("speed over eager", "speed", OPPONENTS),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6))
    colours = {"magneto": "#c8452f", "torch.compile": "#4a6fa5"}
    for axis, (title, key, names) in zip(axes, panels, strict=True):
        for i, name in enumerate(names):
            values = []
            for model, mode in groups:
                row = _find(results, {"model": model, "mode": mode}, name)
                eager = _find(results, row or {"model": model, "mode": mode}, "eager")
                if key == "speed":
                    values.append(eager.get("steady_seconds", 0) / row["steady_seconds"] if row.get("steady_seconds") else 0)
                else:
                    values.append(row.get(key) or 0)
            axis.bar([x + (i - 0.5) * 0.38 for x in range(len(groups))], values, 0.36, label=name, color=colours[name])
        axis.set_xticks(range(len(groups)), labels, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        if key == "speed":
            axis.axhline(1, color="grey", linewidth=0.8)
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def write(results: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text(markdown(results))
    try:
        plot(results, out / "results.png")
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--modes", default="inference")
    parser.add_argument("--compilers", default=",".join(OPPONENTS))
    parser.add_argument("--repeats", type=int, default=1, help="fresh processes per compiler for the first calls")
    parser.add_argument("--seconds", type=float, default=10.0, help="of steady running per model")
    parser.add_argument("--timeout", type=float, default=900.0, help="of one process, in seconds")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--dtypes", default="float32", help="of the models that name none")
    parser.add_argument("--without-opponent", action="store_true", help="eager and magneto only")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--continue", dest="continued", action="store_true", help="keep what results.json holds of these compilers")
    parser.add_argument("--processor-time", action="store_true", help="for a busy machine: one thread, processor time")
    options = parser.parse_args(argv)
    compilers = ["magneto"] if options.without_opponent else options.compilers.split(",")
    cases = [case if "." in case else f"{case}.{dtype}" for dtype in options.dtypes.split(",") for case in options.models.split(",")]
    cases = [case.removesuffix(".float32") for case in dict.fromkeys(cases)]
    results: dict[str, Any] = {"environment": environment(), "rows": []}
    if options.continued and (options.out / "results.json").exists():
        results["rows"] = json.loads((options.out / "results.json").read_text())["rows"]
    compileall.compile_dir(Path(__file__).parents[1] / "magneto", quiet=2)  # as in an installation; torch's bytecode is there too
    with tempfile.TemporaryDirectory(prefix="magneto-bench-") as scratch:
        for mode in options.modes.split(","):
            for case in cases:
                wanted = {"eager", *compilers}
                done = [row for row in results["rows"] if (row["model"], row["mode"]) == (case, mode)]
                if wanted <= {row["compiler"] for row in done if "failed" not in row}:
                    continue
                print(f"{case}, {mode}", file=sys.stderr, flush=True)
                results["rows"] = [row for row in results["rows"] if row not in done]
                results["rows"] += measure(case, mode, compilers, options, Path(scratch))
                write(results, options.out)
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
