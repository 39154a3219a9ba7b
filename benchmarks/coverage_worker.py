"""One program of the coverage sweep in a process of its own: eager twice, then the optimised step twice, on equal models from equal seeds.

The row says whether outputs, loss, gradients, buffers and random generators are eager's, and what the compiler made of the step.
"""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.sameness import ROUNDING, differences
from benchmarks.zoo import Inputs, Program, Step, generators, seed

COMPILED = 2e-3  # what a compiler may change in float32 through a whole model, relative to a tensor's largest number
CALLS = 2  # the second call takes what the first compiled


class Counting:
    """A backend that runs the captured graph as it is, counting graphs, operations in them, and their calls."""

    def __init__(self) -> None:
        self.graphs = 0
        self.operations = 0
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        self.operations += sum(node.op in ("call_function", "call_method", "call_module") for node in gm.graph.nodes)
        forward = gm.forward

        def run(*args: Any) -> Any:
            self.calls += 1
            return forward(*args)

        return run


def measure(program: Program, mode: str, side: str, backend: str = "eager") -> dict[str, Any]:
    """The row of one program. `status` is ok, rounding, wrong, crash, or eager (the program itself does not run here)."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"program": program.name, "mode": mode, "side": side}
    started = time.perf_counter()
    try:
        model, inputs = program.make()
        model.train(mode == "train")
        twin = copy.deepcopy(model)
        step = program.steps[mode]
        wanted = [observe(model, step, inputs) for _ in range(CALLS)]
    except Exception as error:
        return row | {"status": "eager", "error": _brief(error)}
    row["eager_seconds"] = round(time.perf_counter() - started, 2)
    if side == "eager":
        return row | {"status": "ok"}
    counting = Counting()
    optimized = optimize(step, side, counting if backend == "eager" else backend)
    started = time.perf_counter()
    found: list[str] = []
    try:
        for call, want in enumerate(wanted):
            got = observe(twin, optimized, inputs)
            found += differences(got, want, f"call {call + 1}", ROUNDING if backend == "eager" else COMPILED)
            if call == 0:
                row |= made(side, counting)
                row["graph_calls"] = counting.calls
    except Exception as error:
        return row | {"status": "crash", "error": _brief(error), "traceback": traceback.format_exc()[-4000:]}
    again = made(side, counting)
    row["second_call_graphs"] = again["graphs"] - row["graphs"]
    row["recompiles"] = again["recompiles"]
    row["seconds"] = round(time.perf_counter() - started, 2)
    real = [line for line in found if "rounding differ" not in line]
    row["differences"] = found
    return row | {"status": "wrong" if real else "rounding" if found else "ok"}


def optimize(step: Step, side: str, backend: Any) -> Step:
    if side == "magneto":
        import magneto

        magneto.config.suppress_errors = False  # an internal error is a crash here, not a fallback
        return magneto.optimize(backend)(step)
    return torch.compile(step, backend=backend)


def made(side: str, counting: Counting) -> dict[str, Any]:
    """Graphs, operations, breaks with reasons and recompiles so far, as the compiler itself counts them."""
    if side == "magneto":
        import magneto
        from magneto.base import events

        reasons = Counter(f"{event.fields['id']} {event.fields['reason']} at {_place(event)}" for event in events.events("break"))
        recompiles, breaks = magneto.stats()["recompiles"], magneto.stats()["breaks"]
    else:
        from torch._dynamo.utils import counters

        reasons = Counter({" ".join(str(reason).split())[:300]: n for reason, n in counters["graph_break"].items()})
        recompiles, breaks = sum(counters["recompiles"].values()), sum(reasons.values())
    return {
        "graphs": counting.graphs,
        "operations": counting.operations,
        "breaks": breaks,
        "reasons": dict(reasons.most_common()),
        "recompiles": recompiles,
    }


def _place(event: Any) -> str:
    stack = event.fields.get("stack") or ()
    if not stack:
        return event.fields.get("function", "?")
    file, line, function = stack[-1]
    return f"{'/'.join(file.split('/')[-2:])}:{line} {function}"


def observe(model: torch.nn.Module, step: Step, inputs: Inputs) -> dict[str, Any]:
    """One training step from a fixed seed: everything that a user could see afterwards."""
    inputs = copy.deepcopy(inputs)
    model.zero_grad(set_to_none=True)
    seed(1)
    outputs, loss = step(model, inputs)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    return {
        "outputs": _detached(outputs),
        "loss": _detached(loss),
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "generators": [state.tolist() if hasattr(state, "tolist") else _plain(state) for state in generators()],
        "inputs": inputs,
        "training": model.training,
    }


def _plain(state: Any) -> Any:
    return [part.tolist() if hasattr(part, "tolist") else part for part in state]


def _detached(value: Any) -> Any:
    """Structure and classes as they are, tensors without the history that would keep the graph alive; requires_grad is noted beside them."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone(), value.requires_grad, value.is_leaf, str(type(value))]
    if isinstance(value, dict):
        return [type(value).__name__, {key: _detached(item) for key, item in value.items()}]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_detached(item) for item in value]]
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        return [type(value).__name__, {key: _detached(item) for key, item in vars(value).items() if "config" not in key}]
    return value


def _brief(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:200]} ({'/'.join(last.filename.split('/')[-2:])}:{last.lineno})"
