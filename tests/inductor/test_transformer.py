"""Layers that torch.nn computes as one operation where nothing is differentiated: their metadata, and what they become."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import magneto
from magneto.aot_autograd.trace import trace
from magneto.graph import TensorMeta
from magneto.graph.rules import propagate
from magneto.inductor.transformer import ATTENTION, LAYER, take_apart


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0] * 2.0


def layer(activation: str, first: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 4, 32, activation=activation, norm_first=first, batch_first=True, dtype=dtype)


def fast(x: torch.Tensor, weights: tuple[torch.Tensor, ...], need: bool, average: bool) -> tuple[torch.Tensor, ...]:
    return torch._native_multi_head_attention(x, x, x, 16, 4, *weights, None, need, average, None)


def check(module: nn.Module, x: torch.Tensor) -> None:
    module = module.eval()
    magneto.reset()
    with torch.no_grad():
        wanted, got = module(x), magneto.optimize("inductor", nopython=True)(module)(x)
        exact = module.double()(x.double())
    assert got.stride() == wanted.stride() and got.dtype is wanted.dtype
    ours, theirs = ((y.double() - exact).abs().max() for y in (got, wanted))
    assert ours <= 2 * theirs + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_attention(dtype: torch.dtype, batch: int) -> None:
    x = torch.randn(batch, 7, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(Attention(dtype), x)
    check(Attention(dtype), x.transpose(0, 1).contiguous().transpose(0, 1))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("first", [False, True])
def test_layer(activation: str, first: bool) -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    check(layer(activation, first), x)
    check(layer(activation, first), x.transpose(0, 1).contiguous().transpose(0, 1))


def test_nan_and_infinity() -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    x[0, 1, 2], x[1, 1, 2] = torch.nan, torch.inf
    for module in (Attention().eval(), layer("relu", True).eval()):
        magneto.reset()
        with torch.no_grad():
            torch.testing.assert_close(magneto.compile(module)(x), module(x), equal_nan=True)


def test_numerics_of_eager() -> None:
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))
    for module in (Attention().eval(), layer("gelu", False).eval()):
        magneto.reset()
        with torch.no_grad(), magneto.config.patch(numerics="eager"):
            assert torch.equal(magneto.compile(module)(x), module(x))


@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_what_comes_apart(need: bool, average: bool) -> None:
    """Not where the weights of attention are asked for."""
    attention, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    weights = tuple(
        w.detach() for w in (attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias)
    )

    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        result, shares = fast(x, weights, need, average)
        return result.relu() + shares.sum() if need else result.relu()

    graph = trace(fx.symbolic_trace(lambda x, a, b, c, d: call(x, a, b, c, d)), (x, *weights), False, "call").graph
    apart = take_apart(graph)
    apart.lint()
    assert any(node.target is ATTENTION for node in apart.nodes) == need
    assert (apart is graph) == need


def metas(*values: object) -> list[object]:
    return [TensorMeta.of(v) if isinstance(v, torch.Tensor) else v for v in values]


def test_rules() -> None:
    module, x = layer("relu", False).eval(), torch.randn(2, 5, 16).transpose(0, 1)
    attention = module.self_attn
    weights = [w.detach() for w in (attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias)]
    others = [module.norm1, module.norm2, module.linear1, module.linear2]
    parts = [p.detach() for one in others for p in (one.weight, one.bias)]
    for need, average in ((False, True), (True, True), (True, False)):
        args = (x, x, x, 16, 4, *weights, None, need, average, None)
        assert list(propagate(ATTENTION, metas(*args), {})) == metas(*ATTENTION(*args))
    args = (x, 16, 4, *weights, False, False, 1e-5, *parts)
    assert [propagate(LAYER, metas(*args), {})] == metas(LAYER(*args))
    for wrong in ((x, x, x, 16, 3, *weights), (x, x[1:], x, 16, 4, *weights), (x, x, x, 16, 4, weights[0][1:], *weights[1:])):
        with pytest.raises(Exception) as theirs:
            ATTENTION(*wrong)
        with pytest.raises(type(theirs.value)):
            propagate(ATTENTION, metas(*wrong), {})


@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_layers_under_autocast(first: bool) -> None:
    """Autocast reaches into the operation that eager calls for a layer."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=first).eval()
    x = torch.randn(3, 12, 16)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        y = layer(x)
        return y, str(y.dtype)

    with torch.autocast("cpu", torch.bfloat16):
        (plain, name), (value, ours) = program(x), magneto.compile(program, fullgraph=True)(x)
    assert ours == name == "torch.bfloat16"
    torch.testing.assert_close(value, plain, rtol=0.03, atol=0.03)
    assert magneto.compile(program)(x)[1] == "torch.float32"
