"""When what a compiled forward keeps for its backward dies: as soon as backward has taken it, without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import magneto
from magneto.backends import pipeline

BACKENDS = ["aot_eager", "inductor"]


class Kept:
    """What forwards have kept, beyond their results and inputs."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []

    @property
    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.seen)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    found = Kept()
    original = pipeline.plan_training

    def plan_training(joint: Any, cut: Any, forward: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        n = len(joint.results)

        def watched(*inputs: Any) -> Any:
            out = forward(*inputs)
            found.seen += [StorageWeakRef(x.untyped_storage()) for x in out[n:] if isinstance(x, torch.Tensor)]
            return out

        return original(joint, cut, watched, *rest, **named)

    monkeypatch.setattr(pipeline, "plan_training", plan_training)
    magneto.reset()
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


def made(backend: str) -> tuple[nn.Module, Callable[..., torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    run = magneto.optimize(backend)(m)
    x = torch.randn(6, 8)
    for _ in range(3):
        run(x).sum().backward()
        m.zero_grad()
    return m, run, x


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_frees_it_though_the_result_is_kept(backend: str, kept: Kept) -> None:
    _, run, x = made(backend)
    assert kept.seen and not kept.alive
    out = run(x)
    assert kept.alive
    out.sum().backward()
    assert not kept.alive
    assert out.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_that_is_dropped_takes_it_along(backend: str, kept: Kept) -> None:
    _, run, x = made(backend)
    out = run(x)
    assert kept.alive
    del out
    assert not kept.alive


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_retained_graph_keeps_it_until_the_last_backward(backend: str, kept: Kept) -> None:
    _, run, x = made(backend)
    out = run(x)
    out.sum().backward(retain_graph=True)
    assert kept.alive
    out.sum().backward()
    assert not kept.alive
    other = run(x)
    other.sum().backward(retain_graph=True)
    del other
    assert not kept.alive


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_forward_keeps_its_own(backend: str, kept: Kept) -> None:
    _, run, x = made(backend)
    a, b = run(x), run(x + 1)
    both = kept.alive
    a.sum().backward()
    assert kept.alive == both // 2
    with torch.no_grad():
        run(x)
    assert kept.alive == both // 2
    b.sum().backward()
    assert not kept.alive


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_some_gradients_are_asked_for(backend: str, kept: Kept) -> None:
    m, run, x = made(backend)
    out = run(x)
    torch.autograd.grad(out.sum(), [next(m.parameters())])
    assert not kept.alive


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("before", [False, True])
def test_an_exception_in_backward_keeps_nothing(backend: str, before: bool, kept: Kept) -> None:
    """In front of the compiled backward (it has not run: the graph has what it needs, as in eager) and behind it."""
    m, run, x = made(backend)
    given = x if before else Fails.apply(x.clone().requires_grad_())  # type: ignore[no-untyped-call]
    out = run(given)
    last = Fails.apply(out) if before else out  # type: ignore[no-untyped-call]
    try:
        last.sum().backward()
    except ValueError:
        pass
    assert bool(kept.alive) == before
    del out, last
    assert not kept.alive
