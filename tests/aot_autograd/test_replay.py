"""Higher derivatives of compiled graphs: the graph runs again in eager, with its random numbers and without a second write of its statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.base.errors import UserError


class Running(nn.Module):
    """Reads what it writes."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.get_buffer("mean")
        mean.mul_(0.9).add_(x.detach().mean(0))
        return (x * mean).tanh()


class Constants(nn.Module):
    """A graph with a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x)[:, [1, 0, 1]] * torch.tensor([1.0, 2.0, 0.5])).sin().sum(1, keepdim=True)


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 1)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, 1)),
    "both": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)),
    "evaluation": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).eval(),
    "running": lambda: nn.Sequential(nn.Linear(4, 8), Running(8), nn.Softplus(), nn.Dropout(0.2), Running(8), nn.Linear(8, 1)),
    "constants": lambda: Constants(),
}


def penalised(net: nn.Module, run: Callable[..., torch.Tensor]) -> list[Any]:
    """Two steps with a gradient penalty: losses, gradients, statistics and the random stream."""
    seen: list[Any] = []
    for k in range(2):
        torch.manual_seed(k)
        x = torch.randn(6, 4, requires_grad=True)
        y = run(x)
        drawn = torch.rand(3)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = ((g.norm(2, 1) - 1) ** 2).mean() + y.pow(2).mean()
        loss.backward()
        seen += [loss, x.grad, drawn, torch.rand(2), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]
        net.zero_grad()
    return seen


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", list(NETS))
def test_gradient_penalty(name: str, backend: str) -> None:
    found = []
    for optimise in (lambda net: net, magneto.optimize(backend, nopython=True)):
        torch.manual_seed(0)
        net = NETS[name]()
        found.append(penalised(net, optimise(net)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_that_reads_what_it_writes_is_refused(backend: str) -> None:
    n = 1 << 17  # too large for a copy in each forward
    x = torch.ones(1, n, requires_grad=True)
    y = magneto.optimize(backend, nopython=True)(Running(n))(x).sum()
    with pytest.raises(UserError, match="writes inputs that it reads"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["select", "chunk", "expand", "both", "unbind", "nested", "real"])
def test_results_that_are_views(backend: str, name: str) -> None:
    layer = torch.nn.Linear(4, 4)
    programs: dict[str, Callable[[torch.Tensor], Any]] = {
        "select": lambda x: layer(x).tanh()[0],
        "chunk": lambda x: layer(x).tanh().chunk(2, 1),
        "expand": lambda x: layer(x).tanh()[:, :1].expand(3, 4),
        "both": lambda x: (lambda y: (y, y.view(-1)))(layer(x).tanh()),
        "unbind": lambda x: layer(x).exp().unbind(0),
        "nested": lambda x: layer(x).sin()[1:][0][:2],
        "real": lambda x: torch.view_as_complex((layer(x) ** 2).view(3, 2, 2)).real,
    }

    def run(call: Callable[..., Any]) -> list[torch.Tensor]:
        layer.zero_grad()
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        results = call(x)
        first = results[0] if isinstance(results, tuple) else results
        (gradient,) = torch.autograd.grad((first * first).sum(), layer.weight, create_graph=True)
        (gradient * gradient).sum().backward()
        assert x.grad is not None and layer.weight.grad is not None
        return [gradient.detach(), x.grad, layer.weight.grad.clone()]

    for one, other in zip(run(programs[name]), run(magneto.optimize(backend)(programs[name])), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
