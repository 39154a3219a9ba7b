"""Factories that fill what `out=` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto
from tests.compare import same

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "arange": lambda y: torch.arange(6, out=y),
    "arange from": lambda y: torch.arange(2, 8, out=y),
    "arange by": lambda y: torch.arange(0.5, 6.5, 1, out=y),
    "full": lambda y: torch.full((6,), 2.5, out=y),
    "zeros": lambda y: torch.zeros(6, out=y),
    "ones": lambda y: torch.ones(6, out=y),
    "linspace": lambda y: torch.linspace(-1, 4, 6, out=y),
    "randint": lambda y: torch.randint(0, 9, (6,), out=y),
    "another size": lambda y: torch.arange(4, out=y),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.W104")
@pytest.mark.filterwarnings("ignore:The number of elements in the out tensor")
def test_filled(name: str, dtype: torch.dtype, backend: str) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        made = torch.empty(6, dtype=dtype)
        CALLS[name](made)
        kept = y[1::2]
        CALLS[name](y)
        return made * 2, x + y, kept

    compiled = magneto.optimize(backend)(fn)
    for _ in range(2):
        torch.manual_seed(3)
        expected = fn(torch.ones(1), torch.zeros(12, dtype=dtype)[::2])
        torch.manual_seed(3)
        found = compiled(torch.ones(1), torch.zeros(12, dtype=dtype)[::2])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    torch.manual_seed(3)
    if "rand" not in name:
        same(fn, compiled, torch.ones(1), torch.zeros(6, dtype=dtype))


@pytest.mark.parametrize("name", ["arange", "arange from", "full", "linspace"])
def test_without_a_fallback(name: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        CALLS[name](x)
        return x * 2

    with magneto.config.patch(suppress_errors=False):
        same(fn, magneto.optimize("inductor", nopython=True)(fn), torch.zeros(6))
