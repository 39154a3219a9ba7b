"""Every optimiser of torch.optim in whole steps, with its options: results, parameters, gradients and state are eager's, bit for bit; parameter groups, closures, freezing, loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import magneto
from tests.python.test_training_programs import _compare, _facts, _flat, net

optim = torch.optim
Make = Callable[[Any], optim.Optimizer]
MAKES: dict[str, tuple[Make, int]] = {
    "sgd": (lambda p: optim.SGD(p, 0.1, momentum=0.5, dampening=0.2, maximize=True, foreach=False), 0),
    "adam": (lambda p: optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1, maximize=True, foreach=True), 0),
    "adamw": (lambda p: optim.AdamW(p, 0.01, amsgrad=True, foreach=False), 0),
    "nadam": (lambda p: optim.NAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True), 0),
    "nadam_foreach": (lambda p: optim.NAdam(p, 0.01, maximize=True, foreach=True), 0),
    "radam": (lambda p: optim.RAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True), 0),
    "adagrad": (lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1), 0),
    "adadelta": (lambda p: optim.Adadelta(p, 1.0, rho=0.8, weight_decay=0.1, maximize=True, foreach=True), 0),
    "adamax": (lambda p: optim.Adamax(p, 0.01, weight_decay=0.1), 0),
    "adamax_foreach": (lambda p: optim.Adamax(p, 0.01, foreach=True), 0),
    "asgd": (lambda p: optim.ASGD(p, 0.01, t0=1, weight_decay=0.1), 0),
    "rmsprop": (lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.3, weight_decay=0.1, foreach=True), 0),
    "rprop": (lambda p: optim.Rprop(p, 0.01, maximize=True), 0),
    "adafactor": (lambda p: optim.Adafactor(p, 0.01), 0),
}


def groups(n: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": list(n[0].parameters())}, {"params": list(n[2].parameters()), "lr": 0.003}]


def run(make: Make, backend: str | None, between: Callable[..., None] | None = None) -> list[list[Any]]:
    n = net()
    o = make(groups(n))

    def step(x: torch.Tensor) -> Any:
        o.zero_grad()
        loss = n(x).pow(2).mean()
        loss.backward()
        o.step()
        return loss

    call = magneto.optimize(backend)(step) if backend else step
    rows, kept = [], {}
    for number in range(7):
        torch.manual_seed(number)
        if between is not None:
            between(number, n, o, kept)
        value = call(torch.randn(5, 4))
        rows.append([_facts(item) for item in _flat([value, n, o])])
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MAKES))
def test_optimiser(name: str) -> None:
    make, breaks = MAKES[name]
    for one, two in zip(run(make, None), run(make, "aot_eager"), strict=True):
        _compare(one, two, 0)
    stats = magneto.stats()
    assert (stats["breaks"], stats["fallbacks"]) == (breaks, 0), stats["break_reasons"]


def load(number: int, n: Any, o: Any, kept: dict[str, Any]) -> None:
    if number == 2:
        kept.update(o=copy.deepcopy(o.state_dict()), n=copy.deepcopy(n.state_dict()))
    if number == 4:
        o.load_state_dict(kept["o"])
        n.load_state_dict(kept["n"])


def freeze(number: int, n: Any, o: Any, kept: dict[str, Any]) -> None:
    if number in (2, 5):
        n[2].requires_grad_(number == 5)


def grow(number: int, n: Any, o: Any, kept: dict[str, Any]) -> None:
    if number == 2:
        kept["new"] = nn.Parameter(torch.ones(3))
        o.add_param_group({"params": [kept["new"]], "lr": 0.1})
        n[2].register_forward_hook(lambda module, args, output: output * kept["new"])


@pytest.mark.parametrize("between", [load, freeze, grow], ids=["load", "freeze", "grow"])
def test_what_happens_between_the_steps(between: Any) -> None:
    make = MAKES["adam"][0]
    for one, two in zip(run(make, None, between), run(make, "aot_eager", between), strict=True):
        _compare(one, two, 0)
    assert magneto.stats()["breaks"] == 0


def anneal(number: int, n: Any, o: Any, kept: dict[str, Any]) -> None:
    for group in o.param_groups:
        group["lr"] *= 0.9
        for name in kept.get("more", ("weight_decay", "momentum", "alpha", "rho", "eps")):
            if group.get(name):
                group[name] *= 0.98
        if "betas" in group and "more" not in kept:
            group["betas"] = tuple(beta * 0.99 for beta in group["betas"])


def anneal_rate(number: int, n: Any, o: Any, kept: dict[str, Any]) -> None:
    anneal(number, n, o, {"more": ()})


def rates_of_numpy(number: int, n: Any, o: Any, kept: dict[str, Any]) -> None:
    for group in o.param_groups:
        group["lr"], group["weight_decay"] = np.linspace(0.01, 0.001, 9)[number], np.linspace(0.1, 0.2, 9)[number]


SCHEDULED: dict[str, tuple[Make, Callable[..., None]]] = {
    "sgd": (lambda p: optim.SGD(p, 0.1, momentum=0.5, weight_decay=0.1, foreach=True), anneal),
    "adam": (lambda p: optim.Adam(p, 0.01, weight_decay=0.1, foreach=True), anneal),
    "adamw": (lambda p: optim.AdamW(p, 0.01, amsgrad=True, foreach=True), anneal),
    "rmsprop": (lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.3, foreach=True), anneal),
    "adadelta": (lambda p: optim.Adadelta(p, 1.0, rho=0.8, weight_decay=0.1, foreach=True), anneal),
    "adamw_numpy": (lambda p: optim.AdamW(p, 0.01), rates_of_numpy),
    "sgd_numpy": (lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=True), rates_of_numpy),
    "adam_fused": (lambda p: optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True, fused=True), anneal_rate),
    "adamw_fused": (lambda p: optim.AdamW(p, 0.01, fused=True), anneal_rate),
    "sgd_fused": (lambda p: optim.SGD(p, 0.1, momentum=0.5, fused=True), anneal_rate),
    "adagrad_fused": (lambda p: optim.Adagrad(p, 0.1, fused=True), anneal_rate),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", list(SCHEDULED))
def test_schedules(name: str, backend: str) -> None:
    """Hyperparameters that change with each step, where all parameters are updated by one call: three graphs at most (the first step, the second, all others)."""
    make, between = SCHEDULED[name]
    for one, two in zip(run(make, None, between), run(make, backend, between), strict=True):
        _compare(one, two, 0 if backend == "aot_eager" else 3e-6)
    stats = magneto.stats()
    assert stats["graphs"] <= 3 and (stats["breaks"], stats["fallbacks"]) == (0, 0), stats


def test_averages_of_weights() -> None:
    """EMA over lists of tensors with a decay that warms up."""

    def update(averages: Any, parameters: Any, step: int) -> None:
        decay = min(0.99, (1 + step) / (10 + step))
        torch._foreach_lerp_(averages, parameters, 1 - decay)
        torch._foreach_mul_(averages, 1 + decay * 1e-3)
        torch._foreach_add_(averages, parameters, alpha=decay * 1e-2)
        torch._foreach_clamp_max_(averages, 2 + decay)

    parameters = [torch.linspace(-3, 3, 6), torch.linspace(1, 2, 4).reshape(2, 2)]
    for backend in ("eager", "aot_eager", "inductor"):
        compiled = magneto.optimize(backend)(update)
        plain, ours = ([torch.ones(6), torch.ones(2, 2)] for _ in range(2))
        for step in range(8):
            update(plain, parameters, step)
            compiled(ours, parameters, step)
            for a, b in zip(plain, ours, strict=True):
                torch.testing.assert_close(b, a, rtol=0 if backend != "inductor" else 1e-6, atol=0)
        assert magneto.stats()["graphs"] == 2
        magneto.reset()


def test_lists_of_numbers() -> None:
    """A number for each tensor, of which some change; out of place."""

    def fn(tensors: Any, s: float) -> Any:
        scaled = torch._foreach_mul(tensors, [s, 2.0])
        return torch._foreach_sub(scaled, s), torch._foreach_pow(tensors, s), torch._foreach_addcdiv(scaled, tensors, tensors, value=s)

    compiled = magneto.optimize("eager")(fn)
    tensors = [torch.linspace(1, 3, 6), torch.linspace(1, 2, 4)]
    for s in (0.5, 0.25, 3.0, 1.5):
        for a, b in zip(_flat([fn(tensors, s)]), _flat([compiled(tensors, s)]), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0)
    assert magneto.stats()["graphs"] == 2
    with pytest.raises(RuntimeError, match="same number of elements"):
        compiled([tensors[0]], 4.5)
