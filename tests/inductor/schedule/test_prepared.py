"""What is computed of weights only is kept between calls, and computed anew whenever the weights hold other numbers, however they were written."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto import _C


class Net(nn.Module):
    """A convolution whose weight is repacked, a batch norm that is folded into one, a weight that is transformed at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.raw = nn.Parameter(torch.randn(12, 16))
        self.register_buffer("scale", torch.rand(12, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.relu(self.norm(self.first(x))))
        return y.mean((2, 3)) @ (torch.tanh(self.raw) * self.scale).t()  # type: ignore[operator]


def net_and_input() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 8, 10, 10).to(memory_format=torch.channels_last)


def plan_of(fn: Callable[..., Any], *inputs: Any) -> list[_C.Plan]:
    """Plans made by a first call."""
    made: list[_C.Plan] = []
    import magneto.inductor.recall as compiler

    original = compiler._remember
    compiler._remember = lambda plan, code: made.append(plan) or original(plan, code)  # type: ignore[func-returns-value]
    try:
        with torch.no_grad():
            fn(*inputs)
    finally:
        compiler._remember = original
    return made


def _storage(model: Net) -> None:
    model.second.weight.data = model.second.weight.data.clone() * 0.5


def _object(model: Net) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach() + 0.25)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "in place": lambda m: m.second.weight.mul_(1.5),
    "data, which no version sees": lambda m: m.second.weight.data.mul_(-1.0),
    "one number": lambda m: m.first.weight.data.view(-1)[7].add_(3.0),
    "numpy": lambda m: m.raw.detach().numpy().__imul__(0.5),
    "a buffer": lambda m: m.scale.add_(1.0),  # type: ignore[operator, union-attr]
    "running statistics": lambda m: m.norm.running_mean.add_(1.0),  # type: ignore[union-attr]
    "storage": _storage,
    "object": _object,
    "all loaded": lambda m: m.load_state_dict({k: v * 0.5 + 0.125 if v.is_floating_point() else v for k, v in m.state_dict().items()}),
    "swapped": lambda m: m.raw.data.copy_(m.raw.data.flip(0)),
    "requires no gradient": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_changed_weights_are_noticed(change: str) -> None:
    model, x = net_and_input()
    compiled = magneto.compile(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        before = model(x)
        CHANGES[change](model)
        assert change == "requires no gradient" or (model(x) - before).abs().max() > 1e-3
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


def test_training_between_calls() -> None:
    model, x = net_and_input()
    compiled, other = magneto.compile(model), copy.deepcopy(model)
    for _ in range(2):
        for each in (model, other):
            each.train()
            torch.optim.SGD(each.parameters(), 0.1).zero_grad()
            each(x).square().mean().backward()
            torch.optim.SGD(each.parameters(), 0.1).step()
            each.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-4)


def test_the_steps_are_there_once() -> None:
    model, x = net_and_input()
    (plan,) = plan_of(magneto.compile(model), x)
    names = [instruction[0] for instruction in plan.instructions]
    start, end = names.index("KEEP"), names.index("KEPT")
    assert "KERNEL" in names[start:end] and "KERNEL" in names[end:]
    assert plan.instructions[start][1] == end - start


def test_what_is_returned_is_fresh() -> None:
    model, x = net_and_input()
    compiled = magneto.compile(lambda: torch.tanh(model.raw) + 1)
    with torch.no_grad():
        first = compiled()
        first.zero_()
        torch.testing.assert_close(compiled(), torch.tanh(model.raw) + 1)


def test_arguments_are_no_weights() -> None:
    plans = plan_of(magneto.compile(lambda x, w: x @ torch.tanh(w).exp()), torch.randn(4, 8), torch.randn(8, 8))
    assert all(instruction[0] != "KEEP" for plan in plans for instruction in plan.instructions)


def test_a_written_buffer_is_not_kept() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ torch.exp(self.state)
            self.state.add_(1.0)
            return y

    model, x = Counter(), torch.ones(2, 4)
    other, compiled = copy.deepcopy(model), magneto.compile(model)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), other(x))


def test_threads_have_results_of_their_own() -> None:
    model, x = net_and_input()
    compiled = magneto.compile(model)
    with torch.no_grad():
        wanted = compiled(x)
    found: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.extend(compiled(x) for _ in range(5))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15 and all(torch.equal(wanted, y) for y in found)


# ---- the plan's instructions alone -------------------------------------------------------------------------------------------


def counting_plan(fn: Callable[[torch.Tensor], torch.Tensor]) -> _C.Plan:
    """w -> (fn(w), computed when w has changed) + 1"""
    one = torch.ones(1)
    return _C.Plan(
        (("CONST", 3, one), ("KEEP", 2, (0,), (16,), (1,)), ("CALL", 1, fn, (0,), ()), ("KEPT",), ("CALL", 2, torch.add, (1, 3), ())),
        4,
        1,
        (2,),
    )


def test_runs_when_the_memory_differs() -> None:
    calls: list[int] = []
    plan = counting_plan(lambda w: calls.append(1) or w * 2)  # type: ignore[func-returns-value]
    w = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for _ in range(3):
        assert plan(w)[0].tolist() == [3, 5, 7, 9]
    assert len(calls) == 1
    assert plan(w.clone())[0].tolist() == [3, 5, 7, 9] and len(calls) == 1
    w.data[3] = 5
    assert plan(w)[0].tolist() == [3, 5, 7, 11] and len(calls) == 2
    plan.release_workspace()
    assert plan(w)[0].tolist() == [3, 5, 7, 11] and len(calls) == 3


def test_an_error_leaves_nothing_kept() -> None:
    fails = [True]

    def fn(w: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise ValueError("no")
        return w * 2

    plan, w = counting_plan(fn), torch.ones(4)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            plan(w)
    fails[0] = False
    assert plan(w)[0].tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("instruction", [("KEEP", 5, (0,), (4,), ()), ("KEEP", 0, (0,), (), ()), ("KEEP", 0, (9,), (1,), ())])
def test_wrong_instructions_are_refused(instruction: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):
        _C.Plan((instruction,), 1, 1, ())


@pytest.mark.parametrize("size", [1, 7, 64, 65, 1000, 4096])
def test_every_bit_counts(size: int) -> None:
    calls: list[int] = []
    plan = _C.Plan((("KEEP", 2, (0,), (size,), (1,)), ("CALL", 1, lambda w: calls.append(1) or w.sum(), (0,), ()), ("KEPT",)), 2, 1, (1,))  # type: ignore[func-returns-value]
    memory = torch.zeros(size, dtype=torch.uint8)
    plan(memory)
    for place in {0, size // 2, size - 1}:
        for bit in (1, 128):
            before = len(calls)
            memory[place] ^= bit
            plan(memory)
            assert len(calls) == before + 1
            plan(memory)
            assert len(calls) == before + 1
