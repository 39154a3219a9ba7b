"""Operations that look at numbers in order to raise: they do so whoever reads their results, and before anything is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import magneto
from tests.compare import same
from tests.python.programs import Program, Programs, check

programs = Programs()
SINGULAR, DEFINITE = torch.zeros(3, 3), torch.eye(3) * 2 + 0.1


@programs.add(SINGULAR)
def a_predicate(x: torch.Tensor) -> bool:
    try:
        torch.linalg.cholesky(x)
        return True
    except RuntimeError:
        return False


@programs.add(DEFINITE)
def its_other_answer(x: torch.Tensor) -> tuple[bool, torch.Tensor]:
    try:
        torch.linalg.inv(x)
        return True, x + 1
    except RuntimeError:
        return False, x


@programs.add(DEFINITE)
def factors(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.linalg.cholesky(x) + 1, torch.linalg.inv(x) * 2, torch.linalg.solve(x, x[0])


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_programs(program: Program) -> None:
    check(program)


CALLS = {
    "inv": lambda x: torch.linalg.inv(x) * 2,
    "cholesky": lambda x: torch.linalg.cholesky(x) * 2,
    "solve": lambda x: torch.linalg.solve(x, x[0]) * 2,
    "power": lambda x: torch.linalg.matrix_power(x, -1) + 1,
    "cross_entropy": lambda x: F.binary_cross_entropy(x + 2, x),
    "cross_entropy_of_nan": lambda x: F.binary_cross_entropy(x + float("nan"), x),
    "heaviside": lambda x: torch.heaviside(x.double(), torch.tensor(0.5)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("gradient", [False, True])
def test_eagers_error(name: str, backend: str, gradient: bool) -> None:
    call = CALLS[name]

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(1)
        z = call(x)
        y.mul_(2)
        return z + 1

    same(fn, magneto.optimize(backend)(fn), SINGULAR.clone().requires_grad_(gradient), torch.ones(3))
