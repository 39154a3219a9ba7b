"""What a step assumes of numbers (an assertion, an argument check of a distribution, an extreme of what a mask selects) is checked by its graph, before it writes parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal, outcome

BACKENDS = ("aot_eager", "inductor")
Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor]


def finite(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = net(x).square().mean()
    if not torch.isfinite(loss):
        raise ArithmeticError("the loss is not finite")
    loss.backward()
    optimiser.step()
    return loss.detach()


def bounded(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = net(x).square().mean()
    if not loss.item() <= 1e6:
        raise ValueError("the loss explodes")
    loss.backward()
    optimiser.step()
    return loss.detach()


def looked_at_afterwards(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimiser.step()
    for p in net.parameters():
        if torch.isnan(p).any():
            raise ArithmeticError("a parameter is not a number")
    return loss.detach()


def distribution(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = -torch.distributions.Normal(net(x), 1.0).log_prob(x).mean()
    loss.backward()
    optimiser.step()
    return loss.detach()


def drawn(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = nn.functional.dropout(net(x), 0.5).square().mean()
    if not torch.isfinite(loss):
        raise ArithmeticError("the loss is not finite")
    loss.backward()
    optimiser.step()
    return loss.detach() + torch.rand(())


def extremes(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    y = net(x)
    loss = y[x < 1e3].max() - y[:, 0][x[:, 0] < 1e3].min() + y[x.sum(-1) < 1e3].amax(0).sum()
    loss.backward()
    optimiser.step()
    return loss.detach()


STEPS: dict[str, Step] = {f.__name__: f for f in (finite, bounded, looked_at_afterwards, distribution, drawn, extremes)}


def run(step: Step, optimize: Callable[[Any], Any], bad: float, times: int) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    optimised = optimize(lambda x: step(net, optimiser, x))
    found = []
    for i in range(times):
        x = torch.randn(5, 6)
        result, error = outcome(optimised, ((x * (bad if i == 3 else 1.0),), {}))
        gradients = copy.deepcopy([p.grad for p in net.parameters()])
        found.append((result, repr(error).split("grad_fn")[0], gradients, copy.deepcopy(net.state_dict()), torch.get_rng_state()))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", STEPS)
def test_no_break(name: str, backend: str) -> None:
    plain = run(STEPS[name], lambda fn: fn, 1.0, 4)
    assert_equal(run(STEPS[name], magneto.optimize(backend), 1.0, 4), plain, 1e-5)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
@pytest.mark.parametrize("bad", [float("nan"), 1e30])
@pytest.mark.parametrize("name", STEPS)
def test_eagers_error_at_eagers_state(name: str, bad: float, backend: str) -> None:
    plain = run(STEPS[name], lambda fn: fn, bad, 6)
    assert_equal(run(STEPS[name], magneto.optimize(backend), bad, 6), plain, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_of_a_write_that_autograd_records(backend: str) -> None:
    def fn(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y.mul_(w)
        if y.sum() > 100:
            raise ArithmeticError("too large")
        return y * 2

    w = torch.ones(4, requires_grad=True)
    compiled = magneto.optimize(backend)(fn)
    for scale in (1.0, 2.0, 1e3):
        found = [outcome(call, ((torch.ones(4) * scale, w), {})) for call in (fn, compiled)]
        assert_equal(found[1][0], found[0][0])
        assert repr(found[1][1]) == repr(found[0][1])
