"""The update of all parameters: how many kernels it is, how near eager's foreach implementation, and what the program sees of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.base import events

SHAPES = ((8, 4), (8,), (16, 8), (16,), (3, 3, 3), (5,), (40, 7))

OPTIMISERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1), 1),
    "sgd_nesterov": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True), 1),
    "sgd_foreach": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1, foreach=True, maximize=True), 1),
    "sgd_lr_tensor_foreach": (lambda p: torch.optim.SGD(p, torch.tensor(0.01), momentum=0.5, foreach=True), 1),
    "adam": (lambda p: torch.optim.Adam(p, 0.01), 2),
    "adam_foreach_amsgrad": (lambda p: torch.optim.Adam(p, 0.01, foreach=True, amsgrad=True, weight_decay=0.1), 2),
    "adamw_foreach": (lambda p: torch.optim.AdamW(p, 0.01, foreach=True), 2),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True), 2),
    "rmsprop_foreach": (lambda p: torch.optim.RMSprop(p, 0.01, foreach=True), 2),
    "adagrad_foreach": (lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1, foreach=True), 2),
    "adam_fused": (lambda p: torch.optim.Adam(p, 0.01, fused=True, weight_decay=0.1, amsgrad=True), 2),
    "adamw_fused": (lambda p: torch.optim.AdamW(p, 0.01, fused=True, maximize=True), 2),
    "sgd_fused": (lambda p: torch.optim.SGD(p, 0.01, fused=True, momentum=0.9, weight_decay=0.1, nesterov=True), 1),
}

Pair = tuple[list[nn.Parameter], torch.optim.Optimizer]


def pair(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> tuple[Pair, Pair]:
    """Two sets of equal parameters, the last of which never gets a gradient, with an optimiser each."""
    generator = torch.Generator().manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in (*SHAPES, (2,))]
    ours = copy.deepcopy(plain)
    return (plain, make(plain)), (ours, make(ours))


def gradients(*sets: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shape, *params in zip(SHAPES, *sets, strict=False):
        gradient = torch.randn(shape, generator=generator)
        for parameter in params:
            parameter.grad = gradient.to(parameter.dtype).clone()


def step(optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()


def units_apart(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest difference in units in the last place of the largest number of the tensor."""
    scale = plain.detach().abs().max().double() * torch.finfo(plain.dtype).eps
    return float((ours.detach().double() - plain.detach().double()).abs().max() / scale.clamp_min(1e-300))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_kernels_and_numbers(name: str) -> None:
    make, kernels = OPTIMISERS[name]
    (plain, eager), (ours, optimiser) = pair(make)
    addresses = [p.data_ptr() for p in ours]
    before = len(events.events("artifact"))
    fn = magneto.optimize("inductor", nopython=True)(step)
    for number in range(5):
        gradients(plain, ours, seed=number)
        eager.step()
        fn(optimiser)
        for a, b in zip(ours, plain, strict=True):
            assert units_apart(a, b) <= 4
    plans = [event for event in events.events("artifact")[before:] if event.artifact == "plan"]
    assert len(plans) <= 2  # state is made in the first step
    assert plans[-1].kernels <= kernels and plans[-1].library_calls == 0
    assert [p.data_ptr() for p in ours] == addresses
    assert ours[-1].grad is None and (ours[-1] in optimiser.state) == (plain[-1] in eager.state) and torch.equal(ours[-1], plain[-1])
    for a, b in zip(ours, plain, strict=True):
        assert a.is_leaf and a.requires_grad and bool(a._version) == bool(b._version)
        mine, theirs = optimiser.state.get(a, {}), eager.state.get(b, {})
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert type(mine[key]) is type(value)
            if isinstance(value, torch.Tensor):
                assert mine[key].dtype is value.dtype and mine[key].stride() == value.stride() and units_apart(mine[key], value) <= 8


@pytest.mark.parametrize("name", ["sgd_nesterov", "adam", "adamw_foreach", "rmsprop_foreach"])
def test_as_near_the_exact_numbers_as_eager(name: str) -> None:
    """Against the same steps in float64: our error is at most eager's and one unit more."""
    make, _ = OPTIMISERS[name]
    (plain, eager), (ours, optimiser) = pair(make)
    exact = [nn.Parameter(p.detach().double()) for p in plain]
    reference = make(exact)
    fn = magneto.optimize("inductor", nopython=True)(step)
    for number in range(6):
        gradients(plain, ours, exact, seed=number)
        eager.step()
        reference.step()
        fn(optimiser)
    for a, b, c in zip(ours, plain, exact, strict=True):
        rounded = c.detach()
        scale = float(rounded.abs().max()) * torch.finfo(torch.float32).eps
        errors = [float((p.detach().double() - rounded).abs().max()) / scale for p in (a, b)]
        assert errors[0] <= errors[1] + 1


@pytest.mark.parametrize("switch", [1, 3])
def test_checkpoints_at_any_step(switch: int) -> None:
    """What ours saves eager continues, and the other way round."""
    make, _ = OPTIMISERS["adamw_foreach"]
    (plain, eager), (ours, optimiser) = pair(make)
    fn = magneto.optimize("inductor")(step)
    for number in range(6):
        if number == switch:
            mine, theirs = copy.deepcopy(optimiser.state_dict()), copy.deepcopy(eager.state_dict())
            eager.load_state_dict(mine)
            optimiser.load_state_dict(theirs)
        gradients(plain, ours, seed=number)
        eager.step()
        fn(optimiser)
    for a, b in zip(ours, plain, strict=True):
        assert units_apart(a, b) <= 4


def test_double_and_half_precision() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        (plain, eager), (ours, optimiser) = pair(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True), dtype)
        fn = magneto.optimize("inductor", nopython=True)(step)
        for number in range(3):
            gradients(plain, ours, seed=number)
            eager.step()
            fn(optimiser)
        for a, b in zip(ours, plain, strict=True):
            assert units_apart(a, b) <= 4
        magneto.reset()


def test_parameter_groups() -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "weight_decay": 0.1}], 0.01)

    (plain, eager), (ours, optimiser) = pair(make)
    before = len(events.events("artifact"))
    fn = magneto.optimize("inductor", nopython=True)(step)
    for number in range(3):
        gradients(plain, ours, seed=number)
        eager.step()
        fn(optimiser)
    for a, b in zip(ours, plain, strict=True):
        assert units_apart(a, b) <= 4
    assert [event for event in events.events("artifact")[before:] if event.artifact == "plan"][-1].kernels <= 4


def test_clipping_and_averages() -> None:
    """Norms are one kernel; the clipped gradients, the update and an average of the parameters one more."""

    def train(params: list[nn.Parameter], averages: list[torch.Tensor], optimiser: torch.optim.Optimizer) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        optimiser.step()
        torch._foreach_lerp_(averages, [p.detach() for p in params], 0.1)
        return norm

    (plain, eager), (ours, optimiser) = pair(OPTIMISERS["adamw_foreach"][0])
    averages = [[p.detach().clone() for p in plain] for _ in range(2)]
    before = len(events.events("artifact"))
    fn = magneto.optimize("inductor", nopython=True)(train)
    for number in range(4):
        gradients(plain, ours, seed=number)
        expected, found = train(plain, averages[0], eager), fn(ours, averages[1], optimiser)
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
        for a, b in zip([*ours, *averages[1]], [*plain, *averages[0]], strict=True):
            assert units_apart(a, b) <= 6
        for a, b in zip(ours, plain, strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or b.grad is None or units_apart(a.grad, b.grad) <= 4
    assert [event for event in events.events("artifact")[before:] if event.artifact == "plan"][-1].kernels <= 8


def test_hooks_of_the_optimiser() -> None:
    calls: list[str] = []

    def before(optimiser: Any, args: Any, kwargs: Any) -> None:
        calls.append("before")

    def after(optimiser: Any, args: Any, kwargs: Any) -> None:
        calls.append("after")

    (plain, eager), (ours, optimiser) = pair(OPTIMISERS["adam"][0])
    optimiser.register_step_pre_hook(before)
    optimiser.register_step_post_hook(after)
    fn = magneto.optimize("inductor")(step)
    for number in range(3):
        gradients(plain, ours, seed=number)
        eager.step()
        fn(optimiser)
    assert calls == ["before", "after"] * 3
    for a, b in zip(ours, plain, strict=True):
        assert units_apart(a, b) <= 4


def test_backward_notices_updated_parameters() -> None:
    (_, _), (ours, optimiser) = pair(OPTIMISERS["adam"][0])
    gradients(ours, seed=0)
    fn = magneto.optimize("inductor")(step)
    fn(optimiser)
    loss = (ours[0] * ours[0]).sum()
    gradients(ours, seed=1)
    fn(optimiser)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
