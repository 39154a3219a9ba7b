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
