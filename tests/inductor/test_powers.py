"""Powers with numbers known to the compiler: a root is another function at -0 and -infinity."""

from __future__ import annotations

import math

import pytest
import torch

import magneto

EDGES = (math.nan, math.inf, -math.inf, -0.0, 0.0, -1.5, 2.5, 0.5, 1.0, -2.0, 3e-5, 6e4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [0.5, -0.5, -1.0, 2.0])
def test_powers_at_the_edges(dtype: torch.dtype, exponent: float) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.pow(exponent), x.clone().pow_(exponent), torch.pow(x, torch.tensor(exponent))

    x = torch.tensor(EDGES * 3, dtype=dtype)
    for want, got in zip(fn(x), magneto.optimize("inductor", nopython=True)(fn)(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)
        assert torch.equal(torch.signbit(got[want == 0]), torch.signbit(want[want == 0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [None, 7.0, -3.0, 1.7, -2.5])
def test_powers_of_everything(dtype: torch.dtype, exponent: float | None) -> None:
    """Values of their own and all pairs of edges: within twice eager's error, and eager's signs, infinities and NaN."""
    edges = torch.tensor((*EDGES, 1e-45, -1e-42, -1.0, 3.0, -3.0, 2e9, -3e38, 1e-30, 4.0, -7.0)).to(dtype)
    x = torch.cat([edges.repeat_interleave(len(edges)), torch.rand(5000).mul(4).to(dtype), torch.linspace(0.9, 1.1, 999).to(dtype)])
    y = torch.cat([edges.repeat(len(edges)), torch.randn(5000).mul(9).to(dtype), torch.linspace(-300, 300, 999).to(dtype)])

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.pow(x, y if exponent is None else exponent)

    call = magneto.optimize("inductor", nopython=True)(fn)
    want, got, exact = fn(x, y), call(x, y), fn(x.double(), y.double())
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
    normal = exact.isfinite() & want.isfinite() & (want.abs() >= torch.finfo(dtype).tiny)
    unit = exact[normal].abs() * torch.finfo(dtype).eps
    mine, theirs = (((t.double()[normal] - exact[normal]).abs() / unit).max().item() for t in (got, want))
    assert mine <= 2 * theirs + 0.6
    assert "mg_pow_f32(" in "".join(magneto.inspect(call).kernels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_become_bytes_as_in_eager(dtype: torch.dtype) -> None:
    """By way of 32 bits: what these do not hold ends in eight zeros."""
    x = torch.cat(
        [torch.tensor((math.inf, -math.inf, math.nan, -0.0, 3e9, -5e9, 1e19, -2e38, 2.0**31, -(2.0**31))), torch.randn(500).exp() * 9999]
    )
    x = torch.cat([x, -x]).to(dtype)
    fn = magneto.optimize("inductor", nopython=True)(lambda x: (x * 1).to(torch.uint8))
    with torch.no_grad():
        assert torch.equal(fn(x), (x * 1).to(torch.uint8))
    assert "(u8)(i32)" in "".join(magneto.inspect(fn).kernels)


def test_exponentials_of_any_argument() -> None:
    """Within eager's errors, subnormal results, both ends and NaN among them."""
    x = torch.cat([
        torch.arange(-(2**31), 2**31, 9_973).to(torch.int32).view(torch.float32),
        torch.linspace(-105, 90, 400_001),
        torch.tensor([88.72283, 88.72284, 88.7228469, 89.0, 89.1, -87.3365479, -103.9, -103.972, -103.98, -104.0, -104.66, -0.0, math.nan, -math.inf]),
    ])  # fmt: skip
    ours, eager, exact = magneto.optimize("inductor")(torch.exp)(x), torch.exp(x), torch.exp(x.double())
    assert torch.equal(ours.isnan(), x.isnan()) and torch.equal(ours == math.inf, exact.float() == math.inf)
    finite = (exact.float() < math.inf) & (exact > 0)
    unit = (exact[finite] * torch.finfo(torch.float32).eps).clamp_min(2.0**-149)
    mine, theirs = (((t.double()[finite] - exact[finite]).abs() / unit).max().item() for t in (ours, eager))
    assert mine <= 2 * theirs and mine < 1 and not ours[exact < 2.0**-150].any()
