"""How results are laid out that eager lays out in an uncommon way: with gaps, or differently without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from tests.compare import assert_equal

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])

WITH_GAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "select_scatter": lambda x: x.select_scatter(torch.ones(x.shape[1:]), 0, 1),
    "slice_scatter": lambda x: x.slice_scatter(x[1:] * 2, 0, 1),
    "diagonal_scatter": lambda x: x.diagonal_scatter(torch.zeros(min(x.shape[:2]), *x.shape[2:]).movedim(0, -1)),
    "and views": lambda x: (lambda y: (y, y[1:], y.transpose(0, 1), y.select(1, 0) + 1))(x.select_scatter(torch.ones(x.shape[1:]), 0, 0)),
    "written": lambda x: (lambda y: (y.mul_(2), y[0]))(x.select_scatter(torch.ones(x.shape[1:]), 0, 0)),
    "empty_strided": lambda x: torch.empty_strided((2, 2), (5, 2)).fill_(3.0) + x.sum(),
    "filled": lambda x: (torch.empty_strided((2, 2), (5, 2)).fill_(3.0), x.sum()),
    "rrelu": lambda x: F.rrelu(x),
    "rrelu training": lambda x: F.rrelu(x, training=True) * 0,
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x[:1].expand_as(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, x[:1].expand_as(x), reduction="none"),
    "mse": lambda x: F.mse_loss(x, x[:, :1].expand_as(x), reduction="none"),
    "soft_margin": lambda x: F.soft_margin_loss(x, x.detach()[:1].expand_as(x).sign(), reduction="none"),
    "l1": lambda x: F.l1_loss(x[:1].expand_as(x), x, reduction="none"),
    "kl_div": lambda x: F.kl_div(x, x[:1].expand_as(x).abs(), reduction="none"),
    "binary": lambda x: F.binary_cross_entropy(x.sigmoid(), x[:1].expand_as(x).sigmoid(), reduction="none"),
    "poisson": lambda x: F.poisson_nll_loss(x, x[:1].expand_as(x).abs(), reduction="none"),
    "margin": lambda x: F.hinge_embedding_loss(x, x[:1].expand_as(x).sign(), reduction="none"),
    "gaussian": lambda x: F.gaussian_nll_loss(x, x[:1].expand_as(x), x.abs() + 1, reduction="none"),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[:, ::2],
    "turned": lambda x: x[:, ::2].transpose(0, 1),
    "window": lambda x: x[1:, 1:4],
    "dense": lambda x: x.transpose(0, 1),
}


def strides(value: Any) -> Any:
    return value.stride() if isinstance(value, torch.Tensor) else [v.stride() for v in value]


@BACKENDS
@pytest.mark.parametrize("name", list(WITH_GAPS))
@pytest.mark.filterwarnings("ignore:.W104")
def test_inputs_with_gaps(name: str, backend: str) -> None:
    f = WITH_GAPS[name]
    compiled = magneto.optimize(backend, nopython=True)(f)
    for lay_out in LAYOUTS.values():
        for grad in (False, True):
            x = lay_out(torch.linspace(-2, 2, 4 * 6).view(4, 6)).requires_grad_(grad)
            expected, found = f(x), compiled(x)
            assert strides(found) == strides(expected)
            assert_equal(found, expected, 1e-6)
            if grad:
                several = expected if isinstance(expected, tuple) else (expected,)
                ours = found if isinstance(found, tuple) else (found,)
                chosen = [k for k, value in enumerate(several) if value.requires_grad]
                wanted = torch.autograd.grad([several[k].sum() for k in chosen], x) if chosen else None
                got = torch.autograd.grad([ours[k].sum() for k in chosen], x) if chosen else None
                torch.testing.assert_close(got, wanted)


@BACKENDS
@pytest.mark.parametrize("grad", [False, True])
def test_max_pool1d(backend: str, grad: bool) -> None:
    def f(x: torch.Tensor) -> Any:
        y = F.max_pool1d(x, 2)
        return y, torch.max_pool1d(x, 3, 1, 1), y.stride(), F.max_pool1d(x, 2, return_indices=True), F.max_pool1d(x[0], 2)

    compiled = magneto.optimize(backend, nopython=True)(f)
    dense = torch.linspace(-1, 1, 48).view(2, 4, 6)
    for x in (dense, dense.transpose(1, 2), dense.transpose(0, 1), dense[:, ::2], dense.permute(2, 1, 0)):
        x = x.detach().requires_grad_(grad)
        expected, found = f(x), compiled(x)
        assert_equal(found, expected, 0.0)
        for ours, plain in zip((*found[:2], *found[3]), (*expected[:2], *expected[3]), strict=True):
            assert ours.stride() == plain.stride()


KEPT: dict[str, Callable[..., torch.Tensor]] = {
    "attention": lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m).sin(),
    "product": lambda q, m: torch.matmul(q.sin()[..., 1:], m[..., 1:4].transpose(-1, -2)).exp(),
    "turned": lambda q, m: torch.bmm(q[:, 0, :, 1:], m[:, 0, 1:4].transpose(-1, -2).exp()[..., :3].transpose(1, 2)).cumprod(-1).view(-1),
    "cumulated": lambda q, m: torch.cumprod(q[..., ::2], -1) * torch.linalg.vector_norm(m[..., 4:], dim=-1, keepdim=True),
}
MASKS = {
    "columns": lambda m: m[..., :6],
    "turned": lambda m: m[..., :6].transpose(-1, -2),
    "expanded": lambda m: m[:1, :, :1, :6].expand(2, 1, 6, 6),
}


@BACKENDS
@pytest.mark.parametrize("name", list(KEPT))
@pytest.mark.parametrize("layout", list(MASKS))
@pytest.mark.filterwarnings("error::magneto.MagnetoWarning")
def test_values_with_gaps_that_backward_reads(name: str, layout: str, backend: str) -> None:
    def run(f: Callable[..., torch.Tensor], grad: bool) -> Any:
        torch.manual_seed(0)
        q, m = torch.randn(2, 3, 6, 4).requires_grad_(), MASKS[layout](torch.randn(2, 1, 6, 8)).detach().requires_grad_(grad)
        f(q, m).sum().backward()
        assert q.grad is not None and (not grad or m.grad is not None)
        return q.grad, m.grad

    for grad in (False, True):
        assert_equal(run(magneto.optimize(backend)(KEPT[name]), grad), run(KEPT[name], grad), 1e-5)
