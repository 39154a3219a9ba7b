"""Layers of one class that reach the same entry point one after the other share regions; what tells them apart is guarded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import Capturing


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.scale = 1.0
        self.linear = nn.Linear(4, 4)
        self.norm: nn.Module = nn.LayerNorm(4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale
        if y.sum() > 0:
            y = y + 1
        self.steps = self.steps + 1
        return torch.tanh(self.norm(y))


class Model(nn.Module):
    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(k) for k in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def run(make: Any, calls: int = 2) -> int:
    """Training steps, eager against captured; the number of graphs."""
    plain, ours = (seeded(make) for _ in range(2))
    backend = Capturing()
    compiled = magneto.optimize(backend)(ours)
    for _ in range(calls):
        wanted, found = plain(X), compiled(X)
        assert torch.equal(found, wanted)
        (wanted * X).sum().backward()
        (found * X).sum().backward()
    for (name, one), (_, two) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert (one.grad is None and two.grad is None) or torch.equal(one.grad, two.grad), name
    for (name, one), (_, two) in zip(plain.named_buffers(), ours.named_buffers(), strict=True):
        assert torch.equal(one, two), name
    return len(backend.graphs)


def seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make()  # type: ignore[no-any-return]


def test_layers_share_regions() -> None:
    assert run(Model) <= 12
    assert magneto.stats()["breaks"] <= 8


def scaled() -> nn.Module:
    model = Model(6)
    model.layers[4].scale = 3.0
    model.layers[2].eval()
    return model


def other_parts() -> nn.Module:
    model = Model(6)
    model.layers[3].norm = nn.Identity()
    model.layers[4].linear = nn.Linear(4, 4, bias=False)
    model.layers[5].linear.weight.requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = Model(6)
    model.layers[4].linear.register_forward_hook(lambda module, args, output: output * 2)
    model.layers[5].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def tied() -> nn.Module:
    model = Model(6)
    model.layers[3].linear = model.layers[2].linear
    model.layers[4] = model.layers[2]
    model.layers[5].norm = model.layers[1].norm
    return model


class Own(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def replaced() -> nn.Module:
    model = Model(7)
    model.layers[3] = Own(3)
    layer = model.layers[5]
    layer.forward = lambda x: Layer.forward(layer, x) * 5  # type: ignore[method-assign]
    return model


class Keyed(nn.Module):
    """Looks its layers up, and compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(k) for k in range(6))
        self.last = self.layers[-1]
        self.weights = {layer: 0.5 * k for k, layer in enumerate(self.layers)}
        self.names = {id(layer): k for k, layer in enumerate(self.layers)}

    def one(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x) * self.weights.get(layer, 7.0)
        if y.sum() > 100:
            return y
        if layer is self.last:
            y = y - 1
        return y + self.names[id(layer)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.one(layer, x)
        return x


@pytest.mark.parametrize("make", [scaled, other_parts, hooked, tied, replaced, Keyed])
def test_what_tells_layers_apart(make: Any) -> None:
    run(make, 3)


def test_models_of_one_class() -> None:
    """One optimised function, several models."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    backend = Capturing()
    compiled = magneto.optimize(backend)(step)
    models = [nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(5)]
    models[3][1] = nn.Tanh()
    for _ in range(2):
        for model in models:
            assert torch.equal(compiled(model, X), step(model, X))
    assert len(backend.graphs) == 3
