"""`bincount` with a least number of bins: part of the graph while the numbers are below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal, same

BACKENDS = ("aot_eager", "inductor")
CAPTURED: dict[str, Any] = {
    "counts": lambda x, w: torch.bincount(x, minlength=8) * 2,
    "method": lambda x, w: x.bincount(minlength=5).float() / len(x),
    "weights": lambda x, w: (
        torch.bincount(x, w, 8),
        x.bincount(weights=w.double(), minlength=6),
        x.bincount(w.half(), 6),
        x.bincount(x, 7),
    ),
    "no weights": lambda x, w: torch.bincount(x, None, 5),
    "types": lambda x, w: [x.to(t).bincount(minlength=6) + 1 for t in (torch.uint8, torch.int8, torch.int16, torch.int32)],
}
WRONG: dict[str, Any] = {
    "negative": lambda x, w: torch.bincount(x - 2, minlength=8),
    "negative bins": lambda x, w: torch.bincount(x, minlength=-1),
    "weights of another length": lambda x, w: torch.bincount(x, w[1:], minlength=8),
    "two dimensions": lambda x, w: torch.bincount(x[None], minlength=8),
    "floats": lambda x, w: torch.bincount(w, minlength=8),
    "bools": lambda x, w: torch.bincount(x > 1, minlength=8),
}


def numbers(length: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, (length,), generator=generator), torch.randn(length, generator=generator)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CAPTURED)
def test_no_break(name: str, backend: str) -> None:
    compiled = magneto.optimize(backend)(CAPTURED[name])
    for seed in range(3):
        same(CAPTURED[name], compiled, *numbers(seed=seed))
    assert (magneto.stats()["graphs"], magneto.stats()["breaks"]) == (1, 0)


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
@pytest.mark.parametrize("name", WRONG)
def test_eagers_errors(name: str, backend: str) -> None:
    same(WRONG[name], magneto.optimize(backend)(WRONG[name]), *numbers())


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
def test_larger_numbers_have_more_bins(backend: str) -> None:
    fn = lambda x, w: (torch.bincount(x, minlength=5), x.bincount(w, minlength=3), x[:0].bincount(w[:0], 4))  # noqa: E731
    compiled = magneto.optimize(backend)(fn)
    for more in (0, 0, 4, 0, 4):
        x, w = numbers()
        same(fn, compiled, x + more, w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_that_vary(backend: str) -> None:
    compiled = magneto.optimize(backend)(CAPTURED["counts"])
    for length in range(4, 16):
        same(CAPTURED["counts"], compiled, *numbers(length))
    assert magneto.stats()["breaks"] == 0 and magneto.stats()["graphs"] < 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_load_of_experts_in_a_step(backend: str) -> None:
    found = []
    for optimize in (lambda fn: fn, magneto.optimize(backend)):
        torch.manual_seed(0)
        gate, load = nn.Linear(6, 4), torch.zeros(4)
        optimiser = torch.optim.SGD(gate.parameters(), 0.1)

        @optimize
        def step(x: torch.Tensor) -> torch.Tensor:
            optimiser.zero_grad()
            share = gate(x).softmax(-1)
            chosen = torch.bincount(share.argmax(-1), minlength=4)
            load.mul_(0.9).add_(chosen, alpha=0.1)
            loss = (share.mean(0) * chosen / len(x)).sum()
            loss.backward()
            optimiser.step()
            return loss.detach()

        found.append(([step(torch.randn(7, 6)) for _ in range(4)], load, gate.weight))
    assert_equal(found[1], found[0], 1e-6)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)
