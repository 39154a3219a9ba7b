"""`repeat_interleave` with a tensor of repeats and the size of the result is part of the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import magneto
from tests.compare import outcome


def rows(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x * 2, r, dim=0, output_size=6) + 1


def columns(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return (x.t() * 2).repeat_interleave(r.int(), dim=1, output_size=6).sin()


def places(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(r, output_size=6) + x.sum()


COUNTS = {"fits": [1, 2, 3], "others": [0, 6, 0], "too many": [4, 2, 3], "negative": [-1, 4, 3], "one for all": [2], "none": []}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", [rows, columns, places], ids=lambda program: program.__name__)
def test_values_gradients_and_errors(program: Callable[..., torch.Tensor], backend: str) -> None:
    compiled = magneto.optimize(backend)(program)
    for counts in COUNTS.values():
        found = []
        for call in (program, compiled):
            x = torch.linspace(-1, 1, 6).view(3, 2).requires_grad_()
            y, error = outcome(call, ((x, torch.tensor(counts, dtype=torch.long)), {}))
            if y is not None:
                y.square().sum().backward()
            found.append((y, x.grad, None if error is None else (type(error), str(error))))
        (y, gradient, error), (ours, our_gradient, our_error) = found
        assert our_error == error and (y is None) == (ours is None)
        if y is not None:
            assert ours.stride() == y.stride()
            torch.testing.assert_close((ours, our_gradient), (y, gradient))
    reached = magneto.stats()
    assert reached["graphs"] >= 1 and reached["breaks"] <= 1  # no counts at all: torch refuses the size
