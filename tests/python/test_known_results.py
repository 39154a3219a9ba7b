"""Operations whose results have sizes that depend on numbers, of tensors that the region makes out of constants: no break."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto
from tests.compare import assert_equal, same

BACKENDS = ("aot_eager", "inductor")


def written(x: torch.Tensor) -> Any:
    places = torch.eye(4).nonzero()
    places[0] = 3
    places += 1
    return places, x * 2


# x: (4, 5)
CAPTURED: dict[str, Any] = {
    "nonzero": lambda x: (x[(torch.arange(4) % 2 == 0).nonzero().squeeze()], torch.eye(3).nonzero(), torch.zeros(2, 2).nonzero()),
    "tuples": lambda x: (x[torch.eye(4, 5).nonzero(as_tuple=True)], x[torch.where(torch.ones(4, 4).tril() > 0)]),
    "argwhere": lambda x: torch.argwhere(torch.tensor([[1, 0], [2, 3]])) * x.sum(),
    "unique": lambda x: (torch.unique(torch.tensor([3, 1, 1])), x + 1),
    "inverse": lambda x: torch.unique(torch.tensor([2.5, 1.0, 2.5]), return_inverse=True, return_counts=True)[1] * x[0, 0],
    "consecutive": lambda x: torch.unique_consecutive(torch.tensor([1, 1, 2, 1])) * x[0, 0],
    "counts": lambda x: torch.bincount(torch.tensor([0, 2, 2])) * x[0, 0],
    "repeated": lambda x: (
        torch.repeat_interleave(x, torch.tensor([1, 2, 0, 3]), 0) + torch.repeat_interleave(torch.tensor([2, 1, 2, 1])).unsqueeze(-1)
    ),
    "repeated along columns": lambda x: x.repeat_interleave(torch.arange(5), dim=1),
    "pairs": lambda x: x[:, torch.combinations(torch.arange(4))].sum(-1),
    "written": written,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CAPTURED)
def test_no_break(name: str, backend: str) -> None:
    compiled = magneto.optimize(backend)(CAPTURED[name])
    for _ in range(3):
        found = same(CAPTURED[name], compiled, torch.randn(4, 5), tolerance=1e-6)
        expected = CAPTURED[name](torch.ones(4, 5))
        if isinstance(found, tuple):
            assert [one.stride() for one in found if one.numel()] == [one.stride() for one in expected if one.numel()]
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        i, j = torch.where(torch.ones(5, 5).triu(1) > 0)
        return (x[:, i] - x[:, j]).abs().mean() + x.repeat_interleave(torch.tensor([2, 0, 1, 1]), 0).square().sum()

    x, found = torch.randn(4, 5), []
    compiled = magneto.optimize(backend)(program)
    for call in (program, compiled):
        given = x.clone().requires_grad_()
        call(given).backward()
        found.append(given.grad)
    assert_equal(found[1], found[0], 1e-6)
    assert magneto.stats()["breaks"] == 0


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
def test_what_depends_on_data_breaks(backend: str) -> None:
    program = lambda x: (x > 0).nonzero() * torch.unique(torch.tensor([1, 2]))  # noqa: E731
    compiled = magneto.optimize(backend)(program)
    for seed in range(3):
        same(program, compiled, torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)))
