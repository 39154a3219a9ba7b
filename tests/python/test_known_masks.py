"""Boolean masks that the region makes out of constants, of any dimensions: indexing with them is part of the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from tests.compare import assert_equal, same

BACKENDS = ("aot_eager", "inductor")


# x: (3, 4, 4)
CAPTURED: dict[str, Any] = {
    "last": lambda x: x[0][~torch.eye(4).bool()].view(4, 3),
    "triangle": lambda x: x[1][torch.triu(torch.ones(4, 4), 1) == 1],
    "compared": lambda x: x[0][torch.arange(4)[:, None] > torch.arange(4)].square().mean(),
    "behind a slice": lambda x: x[:, ~torch.eye(4, dtype=torch.bool)],
    "behind dots": lambda x: x[..., torch.eye(4, dtype=torch.bool)],
    "before a number": lambda x: x.permute(1, 2, 0)[torch.eye(4, dtype=torch.bool), 1],
    "behind a number": lambda x: x[1, torch.eye(4, dtype=torch.bool)],
    "beside an index": lambda x: x[torch.tensor([0, 1, 2, 1]), torch.eye(4, dtype=torch.bool)],
    "beside a new dimension": lambda x: x.permute(1, 2, 0)[torch.eye(4, dtype=torch.bool), :, None],
    "three dimensions": lambda x: x[torch.arange(48).reshape(3, 4, 4) % 5 == 0],
    "nothing": lambda x: x[0][torch.zeros(4, 4, dtype=torch.bool)],
    "masked select": lambda x: torch.masked_select(x[0], torch.eye(4) > 0) * x.masked_select(torch.arange(48).reshape(3, 4, 4) < 4),
}
WRONG: dict[str, Any] = {
    "another size": lambda x: x[0, :3][torch.eye(4, dtype=torch.bool)],
    "too many dimensions": lambda x: x[0, 0][torch.eye(4, dtype=torch.bool)],
    "two masks that do not fit": lambda x: x[torch.tensor([True, True, False]), torch.eye(4, dtype=torch.bool)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CAPTURED)
def test_no_break(name: str, backend: str) -> None:
    compiled = magneto.optimize(backend)(CAPTURED[name])
    for _ in range(2):
        same(CAPTURED[name], compiled, torch.randn(3, 4, 4), tolerance=1e-6)
        x, found = torch.randn(3, 4, 4), []
        for call in (CAPTURED[name], compiled):
            given = x.clone().requires_grad_()
            call(given).square().sum().backward()
            found.append(given.grad)
        assert_equal(found[1], found[0], 1e-6)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WRONG)
def test_eagers_errors(name: str, backend: str) -> None:
    same(WRONG[name], magneto.optimize(backend)(WRONG[name]), torch.randn(3, 4, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_contrastive_loss(backend: str) -> None:
    def program(z: torch.Tensor) -> torch.Tensor:
        z = F.normalize(z, dim=1)
        n = z.shape[0]
        alike = z @ z.T / 0.5
        others = alike[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
        return (others.logsumexp(1) - torch.cat([alike.diag(n // 2), alike.diag(-(n // 2))])).mean()

    compiled = magneto.optimize(backend)(program)
    for n in (6, 8):
        z, found = torch.randn(n, 5), []
        for call in (program, compiled):
            given = z.clone().requires_grad_()
            loss = call(given)
            loss.backward()
            found.append((loss.detach(), given.grad))
        assert_equal(found[1], found[0], 1e-6)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)
