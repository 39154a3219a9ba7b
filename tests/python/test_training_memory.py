"""What a training step holds in memory, counted: gradients that are dropped, saved tensors, the bytes of a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import magneto
from magneto.base.events import events


def step(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimiser.step()
    return loss.detach()


def counting(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, log: list[str]) -> torch.Tensor:
    for p in net.parameters():
        if p.grad is not None:
            log.append("dropped")
            p.grad = None
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))


X, Y = torch.tensor([[1, 2], [3, 4], [5, 9]]), torch.tensor([0, 1, 2])


def test_gradients_are_free_before_the_graph_runs() -> None:
    net = words()
    seen: list[int] = []

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            seen.append(sum(p.grad is not None for p in net.parameters()))
            return gm(*tensors)

        return run

    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    fn = magneto.optimize(backend, nopython=True)(step)
    for _ in range(3):
        fn(net, optimiser, X, Y)
    assert seen == [0, 0, 0]


def test_a_gradient_that_somebody_holds_keeps_its_numbers() -> None:
    net = words()
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    fn = magneto.optimize("aot_eager")(step)
    for _ in range(3):
        fn(net, optimiser, X, Y)
        held = net[2].weight.grad
        numbers = held.clone()
        fn(net, optimiser, X.flip(0), Y)
        assert net[2].weight.grad is not held and torch.equal(held, numbers)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fn", [step, counting])
def test_a_step_that_fails_leaves_what_eager_leaves(fn: Callable[..., torch.Tensor], backend: str) -> None:
    """The graph fails behind the point where gradients are dropped; the frame runs again and takes the same way."""
    plain = words()
    ours = copy.deepcopy(plain)
    results = []
    for net, call in ((plain, fn), (ours, magneto.optimize(backend)(fn))):
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        log: list[str] = []
        more = (log,) if fn is counting else ()
        for _ in range(3):
            call(net, optimiser, X, Y, *more)
        with pytest.raises(IndexError, match="out of range"):
            call(net, optimiser, X + 5, Y, *more)
        results.append((log, [p.grad is None for p in net.parameters()]))
        call(net, optimiser, X, Y, *more)
    assert results[0] == results[1]
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.grad, b.grad)


# -- bytes of plans


def plans(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What is said of the plans that two calls make."""
    optimised = magneto.optimize("inductor")(fn)
    before = len(events("artifact"))
    for _ in range(2):
        optimised(*args)
    return [event for event in events("artifact")[before:] if event.artifact == "plan"]


def deep(depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers)


def squares(net: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = net(x).pow(2).mean()
    loss.backward()
    optimiser.step()
    return loss.detach()


def test_activations_are_computed_again() -> None:
    """Of each layer its matrix product is kept, as input of the activation, but not what the activation gives, nor what its derivative has in common with it."""
    rows, depth = 1024, 6
    one = rows * 64 * 4
    net = deep(depth)
    last = plans(squares, net, torch.optim.SGD(net.parameters(), 0.01), torch.randn(rows, 64))[-1]
    assert last.peak_bytes < (depth + 4) * one
    assert last.arena_bytes < one


def test_what_is_computed_again_has_eagers_numbers() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.norms[0](self.first(x)))
            return F.gelu(self.norms[1](self.second(x)) + x).softmax(1) * torch.sigmoid(x)

    torch.manual_seed(0)
    plain = Norms()
    ours = copy.deepcopy(plain)
    x = torch.randn(8, 3, 24, 24)
    results = []
    for net, fn in ((plain, squares), (ours, magneto.optimize("inductor", nopython=True)(squares))):
        optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        results.append([fn(net, optimiser, x + k) for k in range(3)])
    torch.testing.assert_close(results[0], results[1])
    for a, b in zip([*plain.parameters(), *plain.buffers()], [*ours.parameters(), *ours.buffers()], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_dropout_masks_are_drawn_once() -> None:
    """Random numbers are kept; what is computed from them may be computed again."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 256), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.2))
    ours = copy.deepcopy(plain)
    x = torch.randn(256, 16)
    results = []
    for net, fn in ((plain, squares), (ours, magneto.optimize("inductor", nopython=True)(squares))):
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        torch.manual_seed(1)
        results.append([fn(net, optimiser, x) for _ in range(3)] + [torch.rand(3)])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(plain[0].weight.grad, ours[0].weight.grad, rtol=1e-4, atol=1e-6)
