"""Kernels that run seldom or over few points are compiled at a lower level: the same numbers."""

from __future__ import annotations

import pytest
import torch

import magneto
from magneto.base.events import recording
from magneto.inductor.compile import CHEAPLY, SMALL


def chain(x: torch.Tensor) -> torch.Tensor:
    return x * x - x + (x > 0.25) * 3


def compiled_cheaply(x: torch.Tensor) -> int:
    with recording("kernel") as found:
        ours = magneto.compile(chain)(x)
    plain = chain(x)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    return sum(CHEAPLY in event.source for event in found if "source" in event.fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("n", [3, 33, SMALL])
def test_few_points(dtype: torch.dtype, n: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(n, dtype=torch.float64)
    x[0] = -0.0
    big = torch.iinfo(dtype).max if not dtype.is_floating_point else torch.inf
    x = torch.cat([x[:-1].to(dtype), torch.tensor([big], dtype=dtype)])
    assert compiled_cheaply(x) == 1


def test_many_points() -> None:
    assert compiled_cheaply(torch.randn(SMALL + 1)) == 0


@pytest.mark.parametrize("n", [49, 50, 63, 64, 130, 1088, 1100, 1536])
def test_rests_of_rows(n: int) -> None:
    """Sums and largest numbers of rows whose length is no multiple of the accumulators, in one block and in several."""
    torch.manual_seed(n)
    x = torch.randn(40, n)
    ours = magneto.compile(lambda x: (x.softmax(-1), x.sum(-1), x.amax(-1), x.argmax(-1)))(x)
    exact = (x.double().softmax(-1), x.double().sum(-1), x.amax(-1), x.argmax(-1))
    for o, e in zip(ours, exact, strict=True):
        torch.testing.assert_close(o, e.to(o.dtype), rtol=2e-6, atol=2e-5)
