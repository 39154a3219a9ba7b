"""Branches on numbers in small tensors from outside are guards, not breaks: counters of averages, an optimiser's step. What decides differently time and again breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal, same


def counted(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    first = bool(n == 0)
    if n > 2:
        x = x * 3
    n += 1
    return x + 1 if first else x * 2


def by_item(n: torch.Tensor, x: torch.Tensor) -> Any:
    number = n.item()
    if number * 2 + 1 > 4:
        return x.sin(), number
    return x.cos(), number


def in_turn(n: torch.Tensor, x: torch.Tensor) -> Any:
    """The number decides before and after it is written, by two ways of writing it."""
    found = [1] if n < 1 else [2]
    n.add_(1)
    found.append(3 if n < 1.5 else 4)
    n[...] = 7
    if n != 7:
        found.append(5)
    return x * len(found), found


def through_views(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n.view(1)[0] += 1
    return x * 2 if n.reshape(()) % 2 == 0 else x * 3


def of_both(n: torch.Tensor, m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each by itself; both together are more than one tensor."""
    if n > 0 and m > 0:
        return x * 2
    if n + m > 0:
        return x * 3
    return x * 4


def many_times(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    while n > 0:
        n -= 1
        x = x * 1.5
    return x


X = torch.linspace(-1, 1, 6)
PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[float, ...]]]] = {
    "counted": (counted, [(0,), (1,), (2,), (3,), (0,), (5,)]),
    "by item": (by_item, [(0.0,), (1.0,), (1.6,), (9.0,), (float("nan"),)]),
    "in turn": (in_turn, [(0.0,), (0.7,), (1.0,), (-3.0,)]),
    "through views": (through_views, [(0,), (1,), (2,), (3,)]),
    "of both": (of_both, [(1, 1), (0, 1), (1, 0), (-1, 3), (0, 0)]),
    "many times": (many_times, [(2,), (0,), (5,), (30,), (1,)]),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs(name: str) -> None:
    fn, cases = PROGRAMS[name]
    compiled = magneto.optimize("eager")(fn)
    for _ in range(2):
        for case in cases:
            same(fn, compiled, *map(torch.tensor, case), X)


def test_no_break() -> None:
    compiled = magneto.optimize("eager", nopython=True)(counted)
    n, plain = torch.tensor(0), torch.tensor(0)
    for _ in range(6):
        assert_equal(compiled(n, X), counted(plain, X))
    assert n == plain
    assert magneto.stats()["recompiles"] == 2  # at 1 and at 3


def test_what_decides_otherwise_all_the_time_breaks() -> None:
    """A new region for each way would soon be one too many."""

    def f(flags: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for k, flag in enumerate(flags):
            if flag:
                x = x + k
        return x

    compiled = magneto.optimize("eager")(f)
    for number in range(16):
        flags = [torch.tensor(bool(number >> k & 1)) for k in range(4)]
        assert_equal(compiled(flags, X), f(flags, X))
    stats = magneto.stats()
    assert stats["breaks"] > 0
    assert not stats["fallbacks"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("averaging", ["plain", "ema", "function"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_averaged_model(averaging: str, backend: str) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        "function": {"avg_fn": lambda average, present, count: 0.5 * average + 0.5 * present},
    }

    def train(optimise: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        averaged = AveragedModel(model, **options[averaging])
        optimiser = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimiser.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimiser.step()
            averaged.update_parameters(model)
            return loss.detach()

        call = optimise(step)
        losses = [call(torch.linspace(-1, k, 12).view(3, 4)) for k in range(6)]
        return [*losses, *(p.detach() for p in averaged.parameters()), averaged.n_averaged]

    expected = train(lambda fn: fn)
    found = train(magneto.optimize(backend))
    assert_equal(found, expected, None if backend == "aot_eager" else 1e-5)
    assert magneto.stats()["breaks"] == 0, magneto.stats()["break_reasons"]


def test_the_guard_says_what_it_decided() -> None:
    compiled = magneto.optimize("eager", nopython=True)(by_item)
    compiled(torch.tensor(1.0), X)
    assert any("is False, decided by" in str(entry) for entry in magneto.inspect(compiled))
