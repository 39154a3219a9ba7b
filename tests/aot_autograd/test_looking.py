"""Operations whose gradient PyTorch computes after a look at the data."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import magneto
from tests.compare import assert_equal

ROWS = {
    "no zero": [1.5, -2.0, 0.3, 7.0],
    "a zero": [1.5, 0.0, 0.3, 7.0],
    "two zeros": [1.5, 0.0, 0.0, 7.0],
    "what is not finite": [1.5, math.nan, 0.3, 7.0],
    "two zeros beside what is not finite": [math.inf, 0.0, 0.0, math.nan],
}

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x.prod(),
    "dimension": lambda x: torch.prod(x, 1),
    "kept": lambda x: x.prod(0, keepdim=True),
    "negative": lambda x: torch.prod(x.t(), dim=-1, keepdim=False),
    "dtype": lambda x: x.prod(1, dtype=torch.float64),
    "up to each": lambda x: x.cumprod(1),
    "of an infinite gradient": lambda x: x.prod() * math.inf,
    "of a product": lambda x: (x * 2).prod(1).sin().prod(),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", list(FORMS))
def test_gradient_of_a_product(form: str, backend: str) -> None:
    compiled = magneto.optimize(backend, nopython=True)(FORMS[form])
    for row in ROWS.values():
        given = torch.tensor([row, [0.5, 2.0, -1.0, 3.0]])
        x, y = given.clone().requires_grad_(), given.clone().requires_grad_()
        FORMS[form](x).sum().backward()
        compiled(y).sum().backward()
        if backend == "aot_eager":
            assert_equal(y.grad, x.grad)
        else:
            torch.testing.assert_close(y.grad, x.grad, equal_nan=True)


def test_layout_of_what_is_turned() -> None:
    for form in ("up to each", "dimension"):
        grads = []
        for run in (FORMS[form], magneto.optimize("inductor", nopython=True)(lambda x, form=form: FORMS[form](x))):
            x = torch.randn(5, 3).t().requires_grad_()
            grads.append(torch.autograd.grad(run(x).sum(), x)[0].stride())
        assert grads[0] == grads[1], form


def test_whole_step_and_second_derivative() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        loss = (x * w).prod()
        loss.backward()
        return loss.detach()

    x, w, v = torch.tensor([2.0, 0.0, 3.0]), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert_equal(magneto.optimize("aot_eager", nopython=True)(step)(x, v), step(x, w))
    assert_equal(v.grad, w.grad)

    for fn in (torch.prod, magneto.optimize("aot_eager", nopython=True)(lambda x: x.prod())):
        y = torch.tensor([2.0, 5.0, 3.0], requires_grad=True)
        (first,) = torch.autograd.grad(fn(y), y, create_graph=True)
        first.sum().backward()
        assert_equal(y.grad, torch.tensor([8.0, 5.0, 7.0]))


@pytest.mark.filterwarnings("ignore::magneto.MagnetoWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", list(FORMS))
def test_second_derivative_inside(form: str, backend: str) -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(FORMS[form](x).sum(), x, create_graph=True)
        return first.square().sum()

    compiled = magneto.optimize(backend)(penalty)
    for row in ROWS.values():
        given, found = torch.tensor([row, [0.5, 2.0, -1.0, 3.0]]), []
        for call in (penalty, compiled):
            x = given.clone().requires_grad_()
            call(x).backward()
            found.append(x.grad)
        torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_product_of_integers_of_floats_is_refused_as_in_eager(backend: str) -> None:
    with pytest.raises(RuntimeError, match="Autograd not support dtype"):
        magneto.optimize(backend)(lambda x: x.prod(dtype=torch.int64))(torch.ones(3, requires_grad=True))


def test_eigenvectors_whose_phase_matters_are_refused() -> None:
    def phase(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eig(x)[1].imag.sum()

    x = torch.tensor([[0.0, 1.0, 0.5], [-1.0, 0.2, 0.1], [0.3, 0.4, 0.7]], requires_grad=True)
    with pytest.warns(UserWarning, match="eigenvectors"):
        result = magneto.optimize("inductor")(phase)(x)
    with pytest.raises(RuntimeError, match="ill-defined"):
        result.backward()
