"""Indexing with a whole number that the graph computes: part of the graph where nobody can tell eager's view from a copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import magneto
from tests.compare import outcome, same

BACKENDS = ("eager", "aot_eager", "inductor")
pytestmark = pytest.mark.filterwarnings("ignore:.*W104.*share memory")  # behind a break: a view and its base


def table(x: torch.Tensor, i: torch.Tensor) -> object:
    return x[i].sqrt() * 2 + x[-i, 1:].sum() + x[2, i, ::2].sum(), x[i, ..., None] + 1, x[i, i] * x[i].sum()


def narrow(x: torch.Tensor, i: torch.Tensor) -> object:
    return x[i.int()] + 1, x[i.to(torch.int8), i] * 2


def searches(x: torch.Tensor, i: torch.Tensor) -> object:
    for _ in range(3):
        i = (x.sum(-1) + i).argmax()
        x = x - 0.1 * x[i]
    return x


def writes(x: torch.Tensor, i: torch.Tensor) -> object:
    y = x.clone()
    y[i] = 1.5
    y[i, 0] = y[0, 1]
    y[0, i] = i
    y[i, 1:3] = torch.arange(2.0, dtype=torch.float64)
    x[i] = y[i] * 2
    return y * 2


def returns(x: torch.Tensor, i: torch.Tensor) -> object:
    y = x[i]
    return y, y[1:], x + 1


def writes_the_view(x: torch.Tensor, i: torch.Tensor) -> object:
    y = x[i]
    y.add_(1)
    return x * 2


def writes_the_base(x: torch.Tensor, i: torch.Tensor) -> object:
    y = x[i]
    x.mul_(3)
    return y * 1


def columns(x: torch.Tensor, i: torch.Tensor) -> object:
    y = torch.stack([x, x.sin(), x * 2])
    a, b = y[:, i], y[:, :, i]
    layouts = a.stride(), b.is_contiguous(), a.exp(), (b + 1).T, a.mT.stride()
    return x[:, i] + 1, y[:, i, 1:] * 2, y[:, :, i, None] - x, y[:, i, 2].sum(), y[0][:, i.int()] * x[i], layouts


def returns_a_column(x: torch.Tensor, i: torch.Tensor) -> object:
    return x[:, i], x + 1


def views_a_column(x: torch.Tensor, i: torch.Tensor) -> object:
    y = x.view(2, 2, 4)[:, i % 2]
    try:
        return y.view(-1) * 2
    except RuntimeError as error:
        return str(error), y + 1


def writes_a_column(x: torch.Tensor, i: torch.Tensor) -> object:
    x[:, i].mul_(2)
    return x + 1


def writes_behind_a_column(x: torch.Tensor, i: torch.Tensor) -> object:
    y = x[:, i]
    x.mul_(3)
    return y * 1


PROGRAMS = {table: 0, narrow: 0, searches: 0, writes: 0, columns: 0, views_a_column: 0, returns: 1, writes_the_view: 1, writes_the_base: 1}
PROGRAMS |= {returns_a_column: 1, writes_a_column: 1, writes_behind_a_column: 1}
"""And how often they break."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_results_writes_and_breaks(program: Callable[..., object], backend: str) -> None:
    compiled = magneto.optimize(backend)(program)
    for i in (1, 3, 0):
        same(program, compiled, torch.rand(4, 4) + 1, torch.tensor(i), tolerance=1e-5)
    assert magneto.stats()["breaks"] == PROGRAMS[program]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_shares_memory_unseen(backend: str) -> None:
    def program(x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        row = x[i]
        y.mul_(2)
        return row * 1

    results = []
    for call in (program, magneto.optimize(backend)(program)):
        memory = torch.arange(6.0)
        results.append((call(memory[:4], memory[2:], torch.tensor(3)), memory))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_place_out_of_range(backend: str) -> None:
    def program(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x[i] * 2

    def assigned(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x[i] = 1
        return x

    def unread(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x[0, i * 1]
        return x.add_(1)

    def column(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x[:, i] * 2

    def unread_column(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x[:, i * 1]
        return x.add_(1)

    for one in (program, assigned, unread, column, unread_column):
        _, error = outcome(magneto.optimize(backend)(one), ((torch.ones(3, 3), torch.tensor(3)), {}))
        assert isinstance(error, IndexError)
        assert str(error) == str(outcome(one, ((torch.ones(3, 3), torch.tensor(3)), {}))[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    def program(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[i] = x[0] * x[i, 1]
        return (y[i] * x[i]).sum() + y.sin().sum() + (x[:, i] * y[:, i]).cos().sum() + x.view(3, 2, 2)[:, i - 1].prod()

    found = []
    for call in (program, magneto.optimize(backend)(program)):
        x = torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
        call(x, torch.tensor(2)).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_place_out_of_range_behind_a_write_that_autograd_has_recorded(backend: str) -> None:
    """Of a tensor that retains its gradient, such a write cannot be taken back: torch itself failed."""

    def program(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x[i] * 1

    for retain in (False, True):
        x = torch.ones(3, requires_grad=True) * 1
        if retain:
            x.retain_grad()
        with pytest.raises(IndexError, match="index 3 is out of bounds"):
            magneto.optimize(backend)(program)(x, torch.tensor(3))
        assert x.tolist() == [2, 2, 2]
