"""torch's zeros without memory, which derivatives of constants are: generated code reads memory."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jacfwd, vmap

import magneto

WEIGHT = torch.linspace(-1, 1, 9).reshape(3, 3)


def cost(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(WEIGHT @ x).sum() ** 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_second_derivatives(backend: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return hessian(cost)(x), jacfwd(grad(cost))(x), vmap(grad(cost))(torch.stack([x, x * 2]))

    x = torch.tensor([0.5, -1.0, 2.0])
    for found, expected in zip(magneto.optimize(backend)(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore::magneto.base.errors.MagnetoWarning")  # (a fallback by name)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_an_input_without_memory(backend: str) -> None:
    optimised = magneto.optimize(backend)(lambda x: (x + 1) * 2)
    for x in (torch._efficientzerotensor(3), torch.ones(3), torch._efficientzerotensor(3)):  # type: ignore[attr-defined]
        torch.testing.assert_close(optimised(x), (x + 1) * 2)
