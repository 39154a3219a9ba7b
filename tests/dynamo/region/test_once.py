"""Regions that are not expected again (their own effects break their guards) are compiled when they do come again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magneto
from magneto.base import events


def _step(net: torch.nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimiser.zero_grad()
    loss = torch.tanh(net(x)).sum()
    loss.backward()
    optimiser.step()
    return loss


def _kernels() -> int:
    return int(magneto.stats()["kernels"])


def _pair(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 3)
    ours = copy.deepcopy(plain)
    return (plain, make(plain.parameters())), (ours, make(ours.parameters()))


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_the_first_step_is_not_compiled(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    plain, ours = _pair(make)
    fn = magneto.optimize("inductor", nopython=True)(_step)
    before = events.counters().get("graphs_for_one_call", 0)
    compiled = []
    for number in range(3):
        x = torch.full((2, 4), number + 0.5)
        torch.testing.assert_close(fn(*ours, x), _step(*plain, x))
        compiled.append(_kernels())
    assert events.counters()["graphs_for_one_call"] == before + 1
    assert compiled[0] == 0 and compiled[1] > 0 and compiled[2] == compiled[1]
    for one, two in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_first_step_that_comes_again_is_compiled() -> None:
    plain, ours = _pair(torch.optim.Adam)
    fn = magneto.optimize("inductor", nopython=True)(_step)
    compiled = []
    for _ in range(3):
        for net, optimiser in (plain, ours):
            net.zero_grad()
            optimiser.state.clear()
        x = torch.ones(2, 4)
        torch.testing.assert_close(fn(*ours, x), _step(*plain, x))
        compiled.append(_kernels())
    assert magneto.stats()["graphs"] == 1
    assert compiled[0] == 0 and compiled[1] > 0 and compiled[2] == compiled[1]
    assert any(magneto.inspect(fn).kernels)


def test_backends_of_the_user_see_every_graph() -> None:
    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(gm)
        return gm.forward

    fn = magneto.optimize(backend)(_step)
    _, ours = _pair(torch.optim.Adam)
    fn(*ours, torch.ones(2, 4))
    assert len(seen) == 1


class Counter:
    value: Any = None


def _remember(counter: Counter, x: torch.Tensor, value: object) -> torch.Tensor:
    y = torch.sin(x) + 1
    if counter.value is None:
        y = y * 2
    counter.value = value
    return y


@pytest.mark.parametrize(("value", "waits"), [(None, False), (3, True)])
def test_what_is_written_decides(value: object, waits: bool) -> None:
    fn = magneto.optimize("inductor", nopython=True)(_remember)
    counter, x = Counter(), torch.ones(3)
    torch.testing.assert_close(fn(counter, x, value), torch.sin(x) * 2 + 2)
    assert (_kernels() == 0) == waits and counter.value == value


def _with_defaults(x: torch.Tensor, *rest: Any, scale: float = 2.0, **options: Any) -> Any:
    if "bias" not in options:
        options["bias"] = 1
    return torch.sin(x) * scale + options["bias"]


def _in_a_closure(x: torch.Tensor, **options: Any) -> Any:
    options.setdefault("bias", 1)
    return torch.sin(x) + (lambda: options["bias"])()


@pytest.mark.parametrize("fn", [_with_defaults, _in_a_closure])
def test_keyword_arguments_are_new_in_each_call(fn: Callable[..., Any]) -> None:
    ours, x = magneto.optimize("inductor", nopython=True)(fn), torch.ones(3)
    torch.testing.assert_close(ours(x), fn(x))
    assert _kernels() > 0
    given = {"other": 3}
    torch.testing.assert_close(ours(x, **given), fn(x, **given))
    assert given == {"other": 3}


def test_an_error_of_the_first_call_leaves_no_trace() -> None:
    def fn(net: torch.nn.Module, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        net.weight.data.add_(1)
        loss = torch.embedding(x * net.weight, index).sum()
        loss.backward()
        return loss

    net = torch.nn.Linear(2, 2)
    before = net.weight.detach().clone()
    with pytest.raises(IndexError):
        magneto.optimize("inductor")(fn)(net, torch.ones(2, 2), torch.tensor([7]))
    torch.testing.assert_close(net.weight.detach(), before + 1)
    assert net.weight.grad is None
