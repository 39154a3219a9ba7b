"""Batched products with one matrix for the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import magneto
from magneto.aot_autograd.trace import trace
from magneto.inductor.matmul import flatten


def products(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)]


def shared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.transpose(0, 1), w.expand(x.shape[1], w.shape[0], w.shape[1])).relu()


def rows_behind_each_other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, w.t().contiguous().t().expand(x.shape[0], w.shape[0], w.shape[1]))


def different(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, w.expand(x.shape[0], w.shape[0], w.shape[1]) + x[:, :1, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fn", "kind"), [(shared, "mm"), (rows_behind_each_other, "mm"), (different, "bmm")])
def test_what_is_flattened(fn, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, 16).to(dtype), torch.randn(16, 12).to(dtype)
    with torch.no_grad():
        graph = flatten(trace(fx.symbolic_trace(fn), (x, w)).graph)
        graph.lint()
        assert products(graph) == [f"aten.{kind}.default"]
        wanted, got = fn(x, w), magneto.compile(fn)(x, w)
    torch.testing.assert_close(got, wanted)
    assert got.stride() == wanted.stride()


def test_a_batch_of_one_and_an_empty_one_stay() -> None:
    for batch in (1, 0):
        with torch.no_grad():
            x, w = torch.randn(batch, 3, 4), torch.randn(4, 5)
            graph = trace(fx.symbolic_trace(rows_behind_each_other), (x, w)).graph
            assert flatten(graph) is graph
            assert torch.equal(magneto.compile(rows_behind_each_other)(x, w), rows_behind_each_other(x, w))


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_of_one_pixel_are_products(bias: bool) -> None:
    def squeezed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x.mean((2, 3), keepdim=True), w, b if bias else None).relu() * x

    torch.manual_seed(0)
    x, w, b = torch.randn(4, 16, 5, 5), torch.randn(16, 16, 1, 1), torch.randn(16)
    with torch.no_grad():
        graph = flatten(trace(fx.symbolic_trace(squeezed), (x, w, b)).graph)
        graph.lint()
        targets = [str(node.target) for node in graph.nodes]
        assert ("aten.addmm.default" if bias else "aten.mm.default") in targets and "aten.convolution.default" not in targets
        wanted, got = squeezed(x, w, b), magneto.compile(squeezed)(x, w, b)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert got.stride() == wanted.stride()
