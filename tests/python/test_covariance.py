"""`cov` and `corrcoef` without weights are part of the graph: whether there are enough observations is in the shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto
from tests.compare import assert_equal, outcome

BACKENDS = ("aot_eager", "inductor")
CAPTURED: dict[str, Any] = {
    "cov": lambda x: torch.cov(x),
    "rows": lambda x: torch.cov(x.t()),
    "one variable": lambda x: torch.cov(x[0]) + x.sum(),
    "correction": lambda x: torch.cov(x, correction=0) + torch.cov(x, correction=-1),
    "correlations": lambda x: torch.corrcoef(x),
    "methods": lambda x: x.cov() + x.corrcoef() + x.cov(correction=2),
    "halves": lambda x: torch.cov(x.bfloat16()).float(),
    "complex": lambda x: torch.cov(torch.complex(x, x * 2)).abs(),
}
OTHERS: dict[str, Any] = {
    "too few": lambda x: torch.cov(x[:, :1]).nan_to_num(0.0) + x.sum(),
    "as many as the correction": lambda x: torch.cov(x, correction=6).nan_to_num(0.0, 1.0, 1.0),
    "weights": lambda x: torch.cov(x, fweights=torch.arange(1, 7), aweights=torch.ones(6)),
    "three dimensions": lambda x: torch.cov(x[None]),
}


def tried(call: Any, x: torch.Tensor) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        result = call(x)
        result.square().sum().backward()
        return result.detach()

    given = x.clone().requires_grad_()
    result, error = outcome(step, ((given,), {}))
    return result, repr(error), given.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", CAPTURED)
def test_no_break(name: str, whole: bool, backend: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        result = CAPTURED[name](x)
        result.square().sum().backward()
        return result.detach()

    compiled = magneto.optimize(backend)(step if whole else CAPTURED[name])
    for _ in range(3):
        x = torch.randn(4, 6)
        found = (given := x.clone().requires_grad_(), compiled(given)) if whole else None
        ours = (found[1], repr(None), found[0].grad) if found is not None else tried(compiled, x)
        assert_equal(ours, tried(CAPTURED[name], x), 1e-4)
    assert (magneto.stats()["breaks"], magneto.stats()["fallbacks"]) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
@pytest.mark.parametrize("name", OTHERS)
def test_what_eager_answers(name: str, backend: str) -> None:
    compiled = magneto.optimize(backend)(OTHERS[name])
    for _ in range(2):
        x = torch.randn(4, 6)
        assert_equal(tried(compiled, x), tried(OTHERS[name], x), 1e-4)
