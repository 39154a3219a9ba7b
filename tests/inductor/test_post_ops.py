"""Activations behind bfloat16 products become part of them: as close to float64 as eager, and only where nobody else reads the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import magneto
from magneto.aot_autograd.trace import trace
from magneto.inductor.lower.operations import linear_available
from magneto.inductor.post_ops import fuse_activations

pytestmark = pytest.mark.skipif(not linear_available(), reason="oneDNN does not multiply bfloat16 here")
bf16 = torch.bfloat16
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": F.relu,
}  # fmt: skip


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(bf16)


def fused(fn: Callable[..., Any], *args: torch.Tensor) -> int:
    with torch.no_grad():
        graph = fuse_activations(trace(fx.symbolic_trace(fn), args).graph)
    graph.lint()
    return sum(node.target is torch.ops.mkldnn._linear_pointwise.default for node in graph.nodes)


@pytest.mark.parametrize("name", ["gelu_tanh", "silu", "tanh", "sigmoid"])
@pytest.mark.parametrize("shape", [(16, 64), (2, 9, 64), (300, 64)])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_as_close_to_float64_as_eager(name: str, shape: tuple[int, ...], bias: bool) -> None:
    act = ACTIVATIONS[name]
    x, w, b = made(*shape), made(96, 64, seed=1) / 8, made(96, seed=2) if bias else None

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return act(F.linear(x, w, b))

    exact = fn(x.double(), w.double(), None if b is None else b.double())
    plain, ours = fn(x, w, b), magneto.compile(fn)(x, w, b)
    assert (ours.shape, ours.stride(), ours.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()
    assert ((ours - exact).abs() / (exact.abs() + 1e-3)).max() <= 2 * ((plain - exact).abs() / (exact.abs() + 1e-3)).max()


@pytest.mark.parametrize("name", ACTIVATIONS)
@torch.no_grad()
def test_extreme_numbers(name: str) -> None:
    """NaN stays NaN, infinities give what the function does in double precision (eager's gelu has two answers)."""
    x, w = torch.zeros(8, 64, dtype=bf16), torch.zeros(70, 64, dtype=bf16)
    w[:, 0] = 1
    x[:, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, -200.0])

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[name](x @ w.t())

    torch.testing.assert_close(magneto.compile(fn)(x, w), fn(x.double(), w.double()).to(bf16), equal_nan=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


@torch.no_grad()
def test_with_packed_weights() -> None:
    torch.manual_seed(0)
    model = Block().eval().to(bf16)
    x = made(40, 128)
    compiled = magneto.compile(model)
    exact, plain = model.double()(x.double()), model.to(bf16)(x)
    for _ in range(3):
        assert (compiled(x) - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-3
    model.up.weight.mul_(2)
    wanted = model(x)
    torch.testing.assert_close(compiled(x), wanted, rtol=2e-2, atol=2e-2)


def test_what_is_fused() -> None:
    x, w, b = made(8, 64), made(32, 64), made(32)
    assert fused(lambda x, w, b: F.silu(F.linear(x, w, b)), x, w, b) == 1
    assert fused(lambda x, w: F.silu((x @ w.t()).view(2, 4, 32)), x, w) == 1
    for fn in (
        lambda x, w: (y := x @ w.t(), F.silu(y)),  # somebody else reads the product
        lambda x, w: F.silu((x @ w.t()).t()),  # another layout
        lambda x, w: F.silu(w @ x.t().contiguous()),  # no transposed weight
        lambda x, w: torch.exp(x @ w.t()),
        lambda x, w: F.gelu(x @ w.t()),  # infinity would become NaN
        lambda x, w: F.relu(x @ w.t()),  # NaN would become 0
        lambda x, w: F.silu(x[:, ::2] @ w[:, ::2].t()),
    ):
        assert fused(fn, x, w) == 0
    assert fused(lambda x, w: F.silu(x @ w.t()), x.float(), w.float()) == 0
