"""The coverage sweep: how much of real models magneto captures, next to torch.compile(backend="eager").

    python -m benchmarks.coverage [--only PATTERN] [--side magneto|torch|both] [--mode eval|train|decode|all] [--jobs 2] [--out DIR]

Each program (models of timm, torchvision and transformers in tiny sizes, with their losses) runs in a process of its own: a training step
`outputs, loss = step(model, inputs)` is optimised as a whole and called twice, the backward pass is called outside. Outputs, loss,
gradients, buffers, inputs and random generators are compared with eager, bit by bit; graphs, breaks and recompiles are the compiler's own
counts. The result is one JSON file, from which `--report FILE` makes docs/coverage.md. A row that exists in the file is replaced.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded: results are compared bit by bit

from benchmarks.coverage_report import document, show, totals
from benchmarks.models import transformers
from benchmarks.zoo import MODES, Program, all_programs

SIDES = ("magneto", "torch")
WALL = 8  # the limit on elapsed time, in limits on processor time
Job = tuple[Program, str, str]


def environment() -> dict[str, str]:
    import timm
    import torch
    import torchvision

    import magneto

    modules = {"torch": torch, "torchvision": torchvision, "timm": timm, "transformers": transformers(), "magneto": magneto}
    return {"python": platform.python_version(), **{name: str(module.__version__) for name, module in modules.items()}}


def child(program: Program, mode: str, side: str, backend: str, path: str, seconds: float) -> None:
    """Runs in the forked process. The limit is on processor time, so that a busy machine does not look like a hang."""
    from benchmarks.coverage_worker import measure

    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))

    log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    row = measure(program, mode, side, backend)
    Path(path).write_text(json.dumps(row, default=str), "utf-8")


def sweep(jobs: list[Job], backend: str, parallel: int, timeout: float, report: Any) -> None:
    """Run all jobs, `parallel` at a time; `report(row)` is called for each as it ends.

    The processes are forked from this one, which has imported the libraries and has never run an operation: no state but imports is shared.
    """
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[Any, Job, str, float]] = {}
    waiting = list(reversed(jobs))
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop()
                path = os.path.join(scratch, f"{len(waiting)}.json")
                process = context.Process(target=child, args=(*job, backend, path, timeout))
                process.start()
                running[process.sentinel] = (process, job, path, time.monotonic())
            ended = wait(list(running), timeout=1.0)
            late = [sentinel for sentinel, entry in running.items() if time.monotonic() - entry[3] > WALL * timeout]
            for sentinel in {*ended, *late}:
                process, job, path, _ = running.pop(sentinel)
                if sentinel not in ended:
                    process.kill()
                process.join()
                report(_row(job, path, process.exitcode, sentinel in ended, timeout))


def _row(job: Job, path: str, code: int | None, ended: bool, timeout: float) -> dict[str, Any]:
    program, mode, side = job
    if os.path.exists(path):
        return json.loads(Path(path).read_text("utf-8"))  # type: ignore[no-any-return]
    base = {"program": program.name, "mode": mode, "side": side, "status": "crash"}
    if not ended or code == -signal.SIGXCPU:
        return base | {"error": f"no result after {timeout:.0f} s of processor time"}
    log = Path(path + ".log")
    tail = log.read_text("utf-8", "replace")[-3000:] if log.exists() else ""
    return base | {"error": f"process ended with code {code}", "traceback": tail}


def select(options: argparse.Namespace) -> list[Job]:
    patterns = options.only or ["*"]
    programs = [p for p in all_programs().values() if any(fnmatch.fnmatch(p.name, pattern) for pattern in patterns)]
    modes = MODES if options.mode == "all" else ("eval", "train") if options.mode == "both" else (options.mode,)
    sides = SIDES if options.side == "both" else (options.side,)
    return [(program, mode, side) for side in sides for program in programs for mode in modes if mode in program.steps]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names of programs, as timm/* (may be given again)")
    parser.add_argument("--side", choices=[*SIDES, "both", "eager"], default="both")
    parser.add_argument("--mode", choices=[*MODES, "both", "all"], default="all")
    parser.add_argument("--backend", default="eager", help="eager measures capture; another one also the compiler behind it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=150.0, help="processor seconds per program")
    parser.add_argument("--out", type=Path, help="directory of coverage.json")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="print the tables of this file and write docs/coverage.md; runs nothing"
    )
    parser.add_argument("--missing", action="store_true", help="only what the file in --out does not hold yet")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.report:
        data = json.loads(options.report.read_text("utf-8"))
        show(data)
        Path("docs/coverage.md").write_text(document(data), "utf-8")
        return 0
    path = options.out and options.out / ("coverage.json" if options.backend == "eager" else f"coverage_{options.backend}.json")
    jobs = select(options)
    if options.missing and path and path.exists():
        have = {(row["program"], row["mode"], row["side"]) for row in json.loads(path.read_text("utf-8"))["rows"]}
        jobs = [job for job in jobs if (job[0].name, *job[1:]) not in have]
    if options.list:
        print("\n".join(f"{program.name} {mode}" for program, mode, side in jobs if side == jobs[0][2]))
        return 0
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"[{len(rows)}/{len(jobs)}] {_line(row)}", file=sys.stderr, flush=True)
        if path:
            save({**data, "rows": [row]}, path)

    preload()
    started = time.monotonic()
    data: dict[str, Any] = {"backend": options.backend, "versions": environment()}
    for side in dict.fromkeys(side for _, _, side in jobs):
        if side == "torch":
            import torch._dynamo  # noqa: F401 -- in this process once, not in each child; after magneto's children
        sweep([job for job in jobs if job[2] == side], options.backend, options.jobs, options.timeout, report)
    data["seconds"] = round(time.monotonic() - started)
    data["rows"] = rows
    show(save(data, path) if path else data)
    return int(any(total["wrong"] or total["crash"] for side, total in totals(data["rows"]).items() if side == "magneto"))


def preload() -> None:
    """What every child would import."""
    library = transformers()
    import timm  # noqa: F401

    for name in ("PreTrainedModel", "DynamicCache", "BertForMaskedLM"):
        getattr(library, name)
    import magneto.api.optimize  # noqa: F401


def save(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write the file; rows of other programs, modes or sides that it holds already stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []

    def key(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["side"], row["program"], row["mode"]

    fresh = {key(row): row for row in data["rows"]}
    merged = {key(row): row for row in kept} | fresh
    data = data | {"rows": [merged[name] for name in sorted(merged)]}
    data["totals"] = totals(data["rows"])
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    return data


def _line(row: dict[str, Any]) -> str:
    text = f"{row['side']:8} {row['mode']:6} {row['program']:45} {row['status']:8}"
    if "graphs" in row:
        text += f" graphs {row['graphs']:3} breaks {row['breaks']:3} again {row.get('second_call_graphs', '?')} {row.get('seconds', '')}s"
    if row.get("error"):
        text += f" {row['error']}"
    if row.get("differences"):
        text += f" {row['differences'][:2]}"
    return text


if __name__ == "__main__":
    sys.exit(main())
