"""One measurement in one fresh process; started by `benchmarks.run`, prints one line of JSON.

`first`: build the model, warm eager up, then measure the first compiled call, loading the compiler included.
`memory`: largest resident memory of a process that compiles (from its caches) and runs this variant only.
`steady`: all variants in one process in turns; medians and errors against float64.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import cost_of, interleaved, memory_peak_mb
from benchmarks.models import build, largest_error, tensors_of, to_float64

Step = Callable[[], Any]


def eager(model: torch.nn.Module) -> Callable[..., Any]:
    return model


def with_magneto(model: torch.nn.Module) -> Callable[..., Any]:
    import magneto

    return magneto.compile(model)


def with_torch_compile(model: torch.nn.Module) -> Callable[..., Any]:
    return torch.compile(model)


def with_best_mode(model: torch.nn.Module) -> Callable[..., Any]:
    """The opponent's slowest compile: kernels tried out, and weights made constants where no gradient is asked for."""
    import torch._inductor.config as config

    config.freezing = not model.training
    return torch.compile(model, mode="max-autotune-no-cudagraphs")


COMPILERS = {"eager": eager, "magneto": with_magneto, "torch.compile": with_torch_compile, "torch.compile-best": with_best_mode}


def graphs_and_breaks(compiler: str) -> tuple[int, int]:
    """As the compiler itself counts them."""
    if compiler == "magneto":
        import magneto

        stats = magneto.stats()
        return stats["graphs"], stats["breaks"]
    if compiler.startswith("torch.compile"):
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return 0, 0


def loss_of(result: Any) -> torch.Tensor:
    """A scalar in which every floating-point output takes part."""
    return sum(t.float().square().mean() for t in tensors_of(result) if t.is_floating_point() and t.requires_grad)  # type: ignore[return-value]


def prepare(model: torch.nn.Module, mode: str) -> None:
    """eval mode, or training mode without randomness (so that results can be compared)."""
    model.train(mode == "training")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    config = getattr(model, "config", None)
    if mode == "training" and config is not None:
        for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
            if hasattr(config, name):
                setattr(config, name, 0.0)


def step_of(model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, mode: str) -> Step:
    """One call (inference), or forward, loss and backward (training; returns the outputs and all gradients)."""
    if mode == "inference":

        def infer() -> Any:
            with torch.no_grad():
                return forward(*args, **kwargs)

        return infer

    def train() -> Any:
        model.zero_grad(set_to_none=True)
        loss = loss_of(forward(*args, **kwargs))
        loss.backward()
        return [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]

    return train


def first(case: str, mode: str, compiler: str) -> dict[str, Any]:
    model, args, kwargs = build(case)
    prepare(model, mode)
    warm = step_of(model, model, args, kwargs, mode)
    for _ in range(2):
        warm()
    compile_model = COMPILERS[compiler]
    step, cost = cost_of(lambda: _compiled_once(compile_model, model, args, kwargs, mode))

    def run() -> None:
        for _ in range(3):
            step()

    peak = memory_peak_mb(run)
    graphs, breaks = graphs_and_breaks(compiler)
    return {"wall": cost.wall, "cpu": cost.cpu, "graphs": graphs, "breaks": breaks, "peak_mb": peak}


def _compiled_once(compile_model: Any, model: torch.nn.Module, args: Any, kwargs: Any, mode: str) -> Step:
    """The step, after its first call, or after the second where a graph is compiled in that."""
    step = step_of(model, compile_model(model), args, kwargs, mode)
    step()
    if "magneto" in sys.modules and sys.modules["magneto.base.events"].counters().get("graphs_for_one_call"):
        step()
    return step


def memory(case: str, mode: str, compiler: str) -> dict[str, Any]:
    model, args, kwargs = build(case)
    prepare(model, mode)

    def run() -> None:
        step = step_of(model, COMPILERS[compiler](model), args, kwargs, mode)
        for _ in range(4):
            step()

    return {"peak_mb": memory_peak_mb(run)}


def steady(case: str, mode: str, compilers: list[str], seconds: float, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    model, args, kwargs = build(case)
    prepare(model, mode)
    steps, results = {}, {}
    for name in compilers:
        twin = copy.deepcopy(model)
        steps[name] = step_of(twin, COMPILERS[name](twin), args, kwargs, mode)
        results[name] = copy.deepcopy(tensors_of(steps[name]()))
    double = copy.deepcopy(model).double()
    reference = tensors_of(step_of(double, double, to_float64(args), to_float64(kwargs), mode)())
    errors = {name: largest_error(result, reference) for name, result in results.items()}
    del double, reference, results
    for _ in range(3):
        for step in steps.values():
            step()
    times = interleaved(steps, seconds, clock=clock)
    return {name: {"seconds": statistics.median(times[name]), "runs": len(times[name]), "error": errors[name]} for name in compilers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["first", "memory", "steady"])
    parser.add_argument("case", help="bert, or bert.bfloat16")
    parser.add_argument("mode", choices=["inference", "training"])
    parser.add_argument("compilers", help="comma-separated: " + ", ".join(COMPILERS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    compilers = options.compilers.split(",")
    if options.what == "first":
        report = first(options.case, options.mode, compilers[0])
    elif options.what == "memory":
        report = memory(options.case, options.mode, compilers[0])
    else:
        report = steady(
            options.case, options.mode, compilers, options.seconds, time.process_time if options.processor_time else time.perf_counter
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
