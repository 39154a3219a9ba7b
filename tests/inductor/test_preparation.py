"""What the plans of a family compute of weights alone: once for all sizes, again when a weight is written, by whatever way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.inductor import family
from magneto.inductor.runtime.plan_code import PlanCode, carve
from magneto.inductor.runtime.preparation import Preparation


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.last(self.other(torch.relu(self.norm(self.one(x))))))


def network() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    ).eval()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[operator, union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[operator, union-attr]
    return made


def calls_of(name: str, call: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == name)


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[Preparation | None]:
    found: list[Preparation | None] = []
    of = Preparation.of

    def noted(*args: Any) -> Preparation | None:
        found.append(of(*args))
        return found[-1]

    monkeypatch.setattr(family.Preparation, "of", staticmethod(noted))
    return found


def test_weights_are_prepared_once_for_all_sizes(preparations: list[Preparation | None]) -> None:
    model = network()
    compiled = magneto.compile(model, dynamic=True)
    reorders = "mkldnn::_reorder_convolution_weight"
    with torch.no_grad():

        def same(batch: int) -> None:
            x = torch.randn(batch, 3, 40, 40)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)

        same(4)
        same(6)
        (made,) = preparations
        if made is None or not torch.backends.mkldnn.is_available():  # pragma: no cover (a processor for which nothing is repacked)
            pytest.skip("nothing is prepared on this processor")
        same(4)
        assert calls_of(reorders, lambda: (same(9), same(5), same(17), same(4))) == 0
        model[2].one.weight.data.mul_(1.5)  # no version tells
        assert calls_of(reorders, lambda: same(11)) > 0
        assert calls_of(reorders, lambda: (same(9), same(12), same(11))) == 0
        model[2].norm.running_var.numpy()[:] = 3.0
        same(9)
        model[3].other.weight = nn.Parameter(torch.randn(16, 16, 3, 3))
        same(5)
        same(13)
        model.load_state_dict(network().state_dict())
        same(17)
        same(7)
    assert magneto.stats()["fallbacks"] == 0


def test_weights_of_a_linear_layer_in_another_type() -> None:
    """Casts under autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    compiled = magneto.compile(model, dynamic=True)
    for turn, rows in enumerate((5, 7, 40, 13, 9, 40)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(compiled(x), model(x), rtol=3e-2, atol=3e-2)
        if turn == 3:  # (inside of the block eager keeps what it has cast)
            model[0].weight.data.add_(1)


def code(*instructions: tuple[Any, ...], registers: int = 6, outputs: tuple[int, ...] = (5,)) -> PlanCode:
    return PlanCode(instructions, registers, 2, outputs, 0)


ALLOC = ("ALLOC", 2, torch.empty_strided, ((4,), (1,)), {"dtype": torch.float32}, True)
SECTION = (("KEEP", 2, (0,), (16,), (3,)), ("CALL", 3, torch.neg, (0,), ()), ("KEPT",))
REST = (("CALL", 5, torch.add, (1, 3), ()),)


def test_parts() -> None:
    whole = (("CONST", 4, 7), *SECTION, *REST)
    made = Preparation.of(whole, code(*whole))
    assert made is not None
    assert made.results == (3,)
    rest, registers, inputs, outputs = made.apart(whole, code(*whole))
    assert rest == (("CONST", 5, 7), ("CALL", 6, torch.add, (1, 2), ()))
    assert (registers, inputs, outputs) == (7, 3, (6,))
    weight = torch.arange(4.0)
    run = made.ahead_of(magneto._C.Plan(rest, registers, inputs, outputs))
    assert torch.equal(run(weight, torch.ones(4))[0], 1 - weight)
    weight.add_(2)
    assert torch.equal(run(weight, torch.ones(4))[0], 1 - weight)


def test_what_lies_in_the_arena_for_a_moment() -> None:
    lent = ("VIEW", 4, 2, carve, (0, 16, torch.float32, (4,), (1,)), True)
    arena = ("ALLOC", 2, torch.empty, (64,), {"dtype": torch.uint8}, True)
    section = (("KEEP", 3, (0,), (16,), (3,)), ("CALL", -1, torch.Tensor.copy_, (4, 0), ()), ("CALL", 3, torch.neg, (4,), ()), ("KEPT",))
    whole = (arena, lent, *section, *REST)
    made = Preparation.of(whole, code(*whole))
    assert made is not None
    rest, *others = made.apart(whole, code(*whole))
    run = made.ahead_of(magneto._C.Plan(rest, *others))
    for _ in range(2):
        assert torch.equal(run(torch.arange(4.0), torch.ones(4))[0], 1 - torch.arange(4.0))


def test_refusals() -> None:
    """Nothing is prepared, or not alike for all sizes, or it is a result, or lies in memory that the next call uses."""
    assert Preparation.of(REST, code(*REST)) is None
    whole = (*SECTION, *REST)
    assert Preparation.of((SECTION[0], None, SECTION[2], *REST), code(*whole)) is None
    assert Preparation.of(whole, code(*whole, outputs=(3,))) is None
    passing = (("KEEP", 2, (0,), (16,), ()), *SECTION[1:], *REST)
    assert Preparation.of(passing, code(*passing)) is None
