"""`config.numerics = "eager"`: the bits of eager, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import magneto


def chain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = (x * 3.7 + y) / (y.abs() + 0.3) - x * y * x
    b = torch.where(a > 0.1, a.clamp(-2, 2), (y - a).neg().relu()) * 0.1
    return a, b, torch.add(a, b, alpha=1.3), (a * b).sqrt(), torch.maximum(a, b).flip(0) - b.T.contiguous().T


def curves(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.sigmoid(x * 1.1) * y.tanh() + F.gelu(x - y)
    b = F.silu(a) * (x.exp() + 1).log() + (a * a + 1).rsqrt() + x.abs().pow(1.7)
    return (
        a,
        b,
        F.softmax(b, -1) * a,
        b.sum(0) + a.mean(0),
        b.var(1),
        F.layer_norm(a, (a.shape[-1],)) * b,
        torch.addcmul(a, b, x, value=0.7),
        a.lerp(b, 0.3),
    )


def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    i = torch.arange(x.shape[0] - 1, -1, -1)
    return (
        (x * y).sum(),
        (x - y).cumsum(1),
        x.index_add(0, i // 2, y * 2),
        (x + y).logsumexp(1),
        x[i] * y,
        (x * y).amax(1),
        F.cross_entropy(x * 2, i % x.shape[1]),
    )


def bits(value: Any) -> Any:
    return (
        [bits(v) for v in value]
        if isinstance(value, (list, tuple))
        else value.detach().contiguous().view(torch.uint8)
        if value.ndim
        else value.detach()
    )


def run(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = fn(*leaves)
    torch.autograd.backward([r for r in results if r.requires_grad], [torch.ones_like(r) * 0.3 for r in results if r.requires_grad])
    return [*[r.detach() for r in results], *[x.grad for x in leaves if x.grad is not None]]


def test_zeros_of_two_signs() -> None:
    """Eager's vectors and its tails answer differently."""

    def extremes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.maximum(x, y),
            torch.min(x, y),
            x.clamp(min=y),
            x.clamp(y, y),
            torch.fmax(x, y),
            x.clamp(-0.0, 0.0),
            x.relu(),
            torch.maximum(x.long(), y.long()),
        )

    for n in (1, 17, 67):
        for x in (torch.tensor([0.0, -0.0, 0.0]), torch.tensor([0.0, -0.0, 0.0])[:, None].expand(3, 2)[:, 0]):
            x, y = x.repeat(n), -x.repeat(n)
            with magneto.config.patch(numerics="eager"):
                got = magneto.compile(extremes)(x, y)
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, extremes(x, y), strict=True))
            magneto.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [chain, curves, sums])
def test_chains(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(37, 53).to(dtype), torch.randn(37, 53).to(dtype)]
    inputs[0][3, 3], inputs[1][5, 5] = float("nan"), float("inf")
    with magneto.config.patch(numerics="eager"):
        got = run(magneto.compile(fn), inputs)
    for k, (want, value) in enumerate(zip(run(fn, inputs), got, strict=True)):
        torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True, msg=lambda text, k=k: f"result {k}: {text}")


BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_xor"]
UNARY = ["neg", "abs", "floor", "ceil", "trunc", "round", "sign", "relu", "isnan", "isinf", "isfinite", "logical_not", "square", "positive"]
NUMBERS = [0.1, -3, 7.25]


def everything(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    whole = not x.is_floating_point()
    out = [getattr(torch, name)(x, y) for name in BINARY]
    out += [getattr(torch, name)(x) for name in UNARY]
    out += [getattr(torch, name)(x, n) for name in ("add", "sub", "mul", "div") for n in NUMBERS]
    out += [
        x.clamp(-1, 2),
        x.clamp_min(0),
        x.clamp_max(1),
        torch.where(x > y, x, y),
        x.masked_fill(y > 0, 3),
        2 - x,
        1 / (y.abs() + 1),
        x + y * 2,
        (x * 2 + y) * x,
    ]
    out += [x & y, x ^ y, ~x] if whole else [F.hardtanh(x), x.to(torch.float16), x.to(torch.bfloat16), x.double(), x.float()]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8])
def test_arithmetic_on_edges(dtype: torch.dtype) -> None:
    """Signs of zeros too."""
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, 1e-40, 6e-8, 3e4, 1e30, float("inf"), -float("inf"), float("nan")]
    values = torch.tensor(edges if dtype.is_floating_point else [0, 1, 2, 3, 7, 100, 120]).to(dtype)
    torch.manual_seed(0)
    values = torch.cat([values, (torch.randn(9) * 3).abs().to(dtype)])
    x, y = (t.contiguous() for t in torch.broadcast_tensors(values[:, None], values[None]))
    with magneto.config.patch(numerics="eager"):
        got = magneto.compile(everything)(x, y)
    for k, (want, value) in enumerate(zip(everything(x, y), got, strict=True)):
        torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True, msg=lambda text, k=k: f"result {k}: {text}")
        if want.is_floating_point():
            assert torch.equal(value.signbit()[~want.isnan()], want.signbit()[~want.isnan()]), k


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.attention, self.out = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.gelu(self.deep(x) + x)
        return self.out(self.attention(x.flatten(2).mT)).log_softmax(-1)


@pytest.mark.parametrize("training", [False, True])
def test_a_network(training: bool) -> None:
    x = torch.randn(2, 3, 12, 12)
    losses, grads = [], []
    for wrap in (lambda net: net, magneto.compile):
        net = Net().train(training)
        with magneto.config.patch(numerics="eager"):
            compiled = wrap(net)
            torch.manual_seed(1)
            if not training:
                with torch.no_grad():
                    losses.append([compiled(x), compiled(x)])
                continue
            optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            values = []
            for _ in range(3):
                optimiser.zero_grad()
                loss = compiled(x)[..., 0].mean().neg()
                loss.backward()
                optimiser.step()
                values.append(loss.detach())
            losses.append(values)
        grads.append([p.detach().clone() for p in net.parameters()])
    for want, got in zip(losses[0], losses[1], strict=True):
        assert torch.equal(want, got)
    for want, got in zip(grads[0] if grads else (), grads[1] if grads else (), strict=True):
        assert torch.equal(want, got)


def test_arithmetic_is_still_fused() -> None:
    x, y = torch.randn(16, 16), torch.randn(16, 16)
    with magneto.config.patch(numerics="eager"):
        compiled = magneto.compile(lambda x, y: (x + y) * x - y / 3)
        before = magneto.stats()["kernels"]
        assert torch.equal(compiled(x, y), (x + y) * x - y / 3)
        assert magneto.stats()["kernels"] - before == 1


def test_what_is_not_a_choice() -> None:
    with pytest.raises(magneto.MagnetoError, match="one of fast, eager"), magneto.config.patch(numerics="exact"):
        pass


def test_uninitialised_memory_is_filled_where_torch_fills_it():
    def fn(x):
        return torch.empty(3), x.new_empty(2, dtype=torch.int64), torch.empty_like(x), torch.empty(2, dtype=torch.bool).all()

    x, compiled = torch.ones(4), magneto.optimize("inductor")(fn)
    compiled(x)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for got, want in zip(compiled(x), fn(x), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(before)
