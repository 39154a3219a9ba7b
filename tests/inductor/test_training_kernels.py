"""Backward graphs in which sums over rows, what is computed from them and whole rows meet in one kernel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import magneto


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (33, 4), (4, 4)])
def test_linear_norm_relu_dropout_linear(train: bool, shape: tuple[int, int]) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)).train(train)
    ours = copy.deepcopy(plain)
    fast = magneto.optimize("inductor")(ours)
    x = torch.randn(shape)
    for module in (plain, fast):
        torch.manual_seed(1)
        module(x).square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("row", [0, 2, -1])
def test_conditions_known_outside_of_the_loop_that_reads_under_them(row: int) -> None:
    """The gradient of a row is padded: which rows it reaches is decided outside of the vector loop."""

    def f(x, scale):
        picked = x[row] * scale
        return picked.sum() * 3 + (x * x).sum(0).relu().sum() + x[row:].sum()

    fast = magneto.optimize("inductor")(f)
    gradients = []
    for fn in (f, fast):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        scale = torch.tensor(2.0, requires_grad=True)
        fn(x, scale).backward()
        gradients.append((x.grad, scale.grad))
    for ours, plain in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, plain)
    assert magneto.stats()["fallbacks"] == 0
