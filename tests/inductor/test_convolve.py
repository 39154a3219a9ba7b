"""Batch norms, residuals and activations as part of the convolution: as close to float64 as eager, and parameters may change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

import magneto
from magneto.aot_autograd.trace import trace
from magneto.inductor import convolve
from magneto.inductor.convolve import fold

pytestmark = pytest.mark.skipif(not convolve.available(), reason="this torch has no oneDNN")


class Block(nn.Module):
    """convolution, norm, relu; convolution with a bias, norm, residual, relu; a norm nothing follows."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.a, self.an = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.b, self.bn = nn.Conv2d(16, 16, 3, padding=1, groups=groups), nn.BatchNorm2d(16)
        self.c, self.cn = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16, affine=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.an(self.a(x)))
        y = torch.relu(self.bn(self.b(x)) + x)
        return y, self.cn(self.c(y))


def block(groups: int = 1) -> Block:
    torch.manual_seed(0)
    model = Block(groups).eval()
    for norm in (model.an, model.bn, model.cn):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.normal_(0, 0.5)
        norm.running_var.uniform_(0.3, 3)
        if norm.affine:
            nn.init.uniform_(norm.weight, -2, 2)
            nn.init.normal_(norm.bias)
    return model


def nhwc(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def fused(graph: fx.Graph) -> int:
    return sum("mkldnn" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize("groups", [1, 16])
def test_as_close_to_float64_as_eager(groups: int) -> None:
    model, x = block(groups), nhwc(4, 8, 24, 24)
    with torch.no_grad():
        exact, plain, ours = copy.deepcopy(model).double()(x.double()), model(x), magneto.compile(model)(x)
    for e, p, o in zip(exact, plain, ours, strict=True):
        assert (o - e).abs().max() <= 2 * (p - e).abs().max() + 1e-6
        assert o.stride() == p.stride()


def test_what_is_folded() -> None:
    def net(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        x = torch.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v))
        return torch.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v) + x) + F.conv2d(x, w)[..., :1, :1]

    with torch.no_grad():
        inputs = (nhwc(4, 16, 24, 24), torch.randn(16, 16, 3, 3), torch.ones(16), torch.zeros(16))
        graph = fold(trace(fx.symbolic_trace(net), inputs).graph)
    graph.lint()
    assert fused(graph) == 2
    assert sum(node.target is torch.ops.aten.convolution.default for node in graph.nodes) == 1


def test_changed_parameters_are_seen() -> None:
    model, x = block(), nhwc(4, 8, 24, 24)
    compiled = magneto.compile(model)
    with torch.no_grad():
        compiled(x)
        model.b.weight.mul_(1.5)
        model.bn.running_mean.add_(1)
        model.an.weight.neg_()
        for want, got in zip(model(x), compiled(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [lambda m: m.train(), lambda m: m.double()])
def test_what_is_left_alone(change: Callable[[Block], Block]) -> None:
    model = change(block())
    x = nhwc(4, 8, 24, 24).to(model.a.weight.dtype)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for want, got in zip(other(x), magneto.compile(model)(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
