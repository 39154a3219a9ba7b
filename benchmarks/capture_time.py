"""What capturing a model costs: `backend="eager"`, magneto against torch.compile, each measurement in a process of its own, in turns.

    python -m benchmarks.capture_time [--rounds 5] [--models bert,resnet50] [--out DIR]

Measured: everything from `import magneto` (or `torch.compile`, which imports its compiler at the first call) to the end of the first optimised call, less an eager
call of the same process; the model's own library is imported before
(`loaded_before` says what of the compilers it had loaded: transformers imports much of torch's). Both sides' modules are there as bytecode, as in an
installation (torch's wheel brings its own along when pip installs it; a checkout with PYTHONDONTWRITEBYTECODE would compile ours anew in each process). A second input of the same shape is called afterwards to see that nothing is captured again.
"""

from __future__ import annotations

import argparse
import compileall
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT, Cost, cost_of, environment, run_worker
from benchmarks.models import torchvision, transformers

COMPILERS = ("magneto", "torch.compile")
MODELS = {"bert": "BERT, 12 layers, 1x32", "resnet50": "ResNet-50, 1x3x64x64"}
BAR = 1 / 3


def build(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Small inputs: the eager call is subtracted and should not drown the rest."""
    torch.manual_seed(0)
    if name == "bert":
        config = transformers().BertConfig(num_hidden_layers=12)
        ids = torch.randint(config.vocab_size, (1, 32))
        return transformers().BertModel(config).eval(), (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return torchvision().models.resnet50().eval(), (torch.randn(1, 3, 64, 64),), {}


def first_call(compiler: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(optimised model, its first result)."""
    if compiler == "magneto":
        import magneto

        fast = magneto.optimize("eager")(model)
    else:
        fast = torch.compile(model, backend="eager")
    return fast, fast(*args, **kwargs)


def worker(compiler: str, name: str) -> dict[str, Any]:
    """One measurement. Run in a fresh process."""
    warnings.simplefilter("ignore")
    model, args, kwargs = build(name)
    for _ in range(2):
        model(*args, **kwargs)
    preloaded = sorted(package for package in ("magneto", "torch._dynamo", "torch._inductor", "sympy") if package in sys.modules)
    with torch.no_grad():
        calls = [cost_of(lambda: model(*args, **kwargs))[1] for _ in range(5)]
        eager = Cost(*(statistics.median(getattr(call, unit) for call in calls) for unit in ("wall", "cpu")))
        (fast, _), cost = cost_of(lambda: first_call(compiler, model, args, kwargs))
        _, again = cost_of(lambda: fast(*args, **kwargs))
    return {
        "cpu_s": cost.cpu - eager.cpu,
        "wall_s": cost.wall - eager.wall,
        "eager_wall_s": eager.wall,
        "second_call_wall_s": again.wall,
        "loaded_before": preloaded,
    }


def measure(name: str, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {compiler: [] for compiler in COMPILERS}
    for turn in range(rounds):
        for compiler in COMPILERS if turn % 2 == 0 else COMPILERS[::-1]:
            done = run_worker("benchmarks.capture_time", ["--worker", compiler, name], {}, 600)
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-4000:])
            runs[compiler].append(json.loads(done.stdout.splitlines()[-1]))
    row: dict[str, Any] = {"model": name, "what": MODELS[name], "runs": runs}
    for compiler in COMPILERS:
        row[compiler] = {key: statistics.median(run[key] for run in runs[compiler]) for key in ("cpu_s", "wall_s")}
    row["cpu_ratio"] = row["magneto"]["cpu_s"] / row["torch.compile"]["cpu_s"]
    row["wall_ratio"] = row["magneto"]["wall_s"] / row["torch.compile"]["wall_s"]
    return row


def markdown(results: dict[str, Any]) -> str:
    from magneto.base.text import markdown_table  # not at the top: workers measure the import of magneto

    rows = [
        [
            row["what"],
            *(f"{row[compiler][key]:.2f}" for compiler in COMPILERS for key in ("cpu_s", "wall_s")),
            f"{row['cpu_ratio']:.3f}",
            f"{row['wall_ratio']:.3f}",
        ]
        for row in results["rows"]
    ]
    headers = [
        "model",
        *(f"{compiler} {unit} s" for compiler in COMPILERS for unit in ("processor", "wall")),
        "ratio processor",
        "ratio wall",
    ]
    machine = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    return "\n\n".join(["# Capture time (backend eager, bar: ratio at most 0.33)", machine + ".", markdown_table(rows, headers)]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", nargs=2, metavar=("COMPILER", "MODEL"))
    options = parser.parse_args(argv)
    if options.worker:
        print(json.dumps(worker(*options.worker)))
        return 0
    compileall.compile_dir(ROOT / "magneto", quiet=2)
    results = {"environment": environment(), "rows": [measure(name, options.rounds) for name in options.models.split(",")]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "capture_time.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "capture_time.md").write_text(markdown(results))
    print(markdown(results))
    return 0 if all(row["cpu_ratio"] <= BAR for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
