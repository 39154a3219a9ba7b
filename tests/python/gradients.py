"""Training steps compared: a function and its gradients, plain against traced, under several backends, twice each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import magneto
from magneto.base import events
from tests.compare import assert_equal

BACKENDS = ("eager", "aot_eager")


@dataclass
class Outcome:
    """What one training step gave."""

    value: Any
    gradients: list[torch.Tensor | None]
    random: torch.Tensor
    said: list[str] = field(default_factory=list)
    error: Exception | None = None


def P(*shape: int) -> torch.Tensor:
    """A parameter."""
    return torch.nn.Parameter(torch.linspace(-1.0, 1.5, int(torch.Size(shape).numel())).reshape(shape))


def step(fn: Callable[..., Any], args: tuple[Any, ...], said: list[str]) -> Outcome:
    """Run `fn`, then backward from all its results, each weighted differently."""
    leaves = [leaf for arg in args for leaf in (arg.parameters() if isinstance(arg, torch.nn.Module) else tree_leaves(arg))]
    leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(7)
    said.clear()
    try:
        value = fn(*args)
        results = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if results:
            total = sum((result * (torch.arange(result.numel()).reshape(result.shape) % 7 + 1)).sum() for result in results)
            total.backward()
    except Exception as error:
        error.__traceback__ = None  # in torch 2.11 a checkpoint's hooks stay in place as long as the frames that it raised through
        return Outcome(None, [], torch.get_rng_state(), list(said), error)
    gradients = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return Outcome(value, gradients, torch.get_rng_state(), list(said))


def compare(
    fn: Callable[..., Any],
    *args: Any,
    graphs: int | None = 1,
    backends: tuple[str, ...] = BACKENDS,
    breaks: str | None = None,
    fallback: str | None = None,
    said: list[str] | None = None,
) -> None:
    """Values, gradients, random stream, exceptions and what `fn` appends to `said` must be eager's. `graphs`: exactly so many, captured without
    a break (None: any number); `breaks`: text of a break that must be reported; `fallback`: why a compiler runs the graph in eager, if it does."""
    said = [] if said is None else said
    plain = step(fn, args, said)
    for backend in backends:
        magneto.reset()
        count = [0]

        def counting(gm: torch.fx.GraphModule, inputs: list[Any], backend: str = backend, count: list[int] = count) -> Callable[..., Any]:
            count[0] += 1
            return magneto.lookup_backend(backend)(gm, inputs)

        compiled = magneto.optimize(counting)(fn)
        made = []
        for _ in range(2):
            ours = step(compiled, args, said)
            made.append(count[0])
            assert type(ours.error) is type(plain.error) and str(ours.error) == str(plain.error), (
                f"{backend}: {ours.error!r}, {plain.error!r}"
            )
            tolerance = 1e-4 if backend == "inductor" else 1e-6 if backend != "eager" else None
            assert_equal(ours.value, plain.value, tolerance, f"{backend}: result")
            assert_equal(ours.gradients, plain.gradients, tolerance, f"{backend}: gradients")
            assert torch.equal(ours.random, plain.random), f"{backend}: random stream"
            assert ours.said == plain.said, f"{backend}: {ours.said} against {plain.said}"
        reasons = [str(reason) for reason in magneto.stats()["break_reasons"]]
        if graphs is not None:
            assert made == [graphs, graphs] and not reasons, (backend, made, reasons)
        if breaks is not None:
            assert any(breaks in reason for reason in reasons), (backend, reasons)
        refused = [str(event.fields.get("reason")) for event in events.events() if event.kind == "fallback"]
        if graphs is not None and (fallback is None or backend == "eager"):
            assert not refused, (backend, refused)
        elif fallback is not None:
            assert any(fallback in reason for reason in refused), (backend, refused)
