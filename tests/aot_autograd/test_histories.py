"""Results of one compiled function that go backward one after another: none leads into the history of another's inputs, as in eager."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal

WEIGHT = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()


def losses(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return u.sin().sum(), v.cos().sum()


def reading(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = u.exp(), v.exp()
    return a.sum(), b * a.detach()


def weights(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (u @ WEIGHT).tanh(), v * WEIGHT.diag().exp(), WEIGHT.square().sum()


def drawing(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.dropout(u, 0.5, True).exp(), torch.dropout(v, 0.5, True)


def writing(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    u.mul_(2)
    return u.sum(), v.sin()


def viewing(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return u.exp()[0], v.exp().t()


def computed_from_others(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w = v.exp()
    return (u @ u).relu(), w * 2, w


def stopped(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The last is computed from the first, which leads to one of the inputs only."""
    w = u * 2
    return w, v.cos(), w.sum() + v


def both(u: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return u.sin(), v.cos(), u.detach().sum() * (u + v)


def one_after_another(results: Sequence[torch.Tensor]) -> None:
    for result in results:
        result.sum().backward()


def last_first(results: Sequence[torch.Tensor]) -> None:
    one_after_another(results[::-1])


def together(results: Sequence[torch.Tensor]) -> None:
    sum(result.sum() for result in results).backward()  # type: ignore[union-attr]


def twice(results: Sequence[torch.Tensor]) -> None:
    results[0].sum().backward(retain_graph=True)
    one_after_another(results[:2])


def curved(results: Sequence[torch.Tensor]) -> None:
    first, second = (torch.autograd.grad(r.sum(), leaf, create_graph=True)[0] for r, leaf in zip(results[:2], LEAVES, strict=True))
    (first.square().sum() + second.square().sum()).backward()


LEAVES: list[torch.Tensor] = []


def gradients(fn: Callable[..., Any], back: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(0)
    LEAVES[:] = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]
    WEIGHT.grad = None
    results = fn(LEAVES[0] * LEAVES[0], LEAVES[1].sin())
    back(results)
    return [*results, *(leaf.grad for leaf in (*LEAVES, WEIGHT)), torch.get_rng_state()]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("fn", "back"),
    [(fn, back) for fn in (losses, reading, weights, drawing, viewing) for back in (one_after_another, last_first, together, twice)]
    + [(losses, curved), (weights, curved), (writing, one_after_another), (writing, last_first), (both, together)]
    + [(fn, lambda results: one_after_another(results[:2])) for fn in (computed_from_others, stopped, both)],
)  # fmt: skip
def test_gradients(fn: Callable[..., Any], back: Callable[..., Any], backend: str) -> None:
    compiled = magneto.optimize(backend, nopython=True)(fn)
    for _ in range(2):
        assert_equal(gradients(compiled, back), gradients(fn, back), None if backend == "aot_eager" else 1e-5)


def test_discriminator_and_generator() -> None:
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(3, 4), nn.Linear(4, 1)
    noise, real = torch.randn(5, 3), torch.randn(5, 4)

    def both_losses(on_fake: torch.Tensor, on_real: torch.Tensor, judged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        softplus = nn.functional.softplus
        return softplus(on_fake).mean() + softplus(-on_real).mean(), softplus(-judged).mean()

    def step(fn: Callable[..., Any]) -> list[Any]:
        fake = generator(noise)
        of_discriminator, of_generator = fn(discriminator(fake.detach()), discriminator(real), discriminator(fake))
        of_discriminator.backward()
        found = [p.grad for p in discriminator.parameters()]
        discriminator.zero_grad()
        of_generator.backward()
        found += [p.grad for p in (*generator.parameters(), *discriminator.parameters())]
        generator.zero_grad()
        discriminator.zero_grad()
        return found

    assert_equal(step(magneto.compile(both_losses, fullgraph=True)), step(both_losses), 1e-6)


def test_backward_functions_are_not_called_for_other_results() -> None:
    called: list[float] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            called.append(float(gradient.sum()))
            return gradient * 2

    def run(fn: Callable[..., Any]) -> list[float]:
        called.clear()
        for result in fn(*(Twice.apply(torch.ones(2, requires_grad=True)) for _ in range(2))):
            result.backward()
            called.append(0.0)
        return [round(value, 5) for value in called]

    assert run(magneto.optimize("aot_eager")(losses)) == run(losses)


def test_written_since() -> None:
    def run(fn: Callable[..., Any]) -> list[Any]:
        a, b, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(3)
        first, second = fn(a * x, b.sin())
        x.add_(1)
        second.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()
        return [a.grad, b.grad]

    assert_equal(run(magneto.optimize("aot_eager")(losses)), run(losses))


def test_nothing_is_held() -> None:
    compiled = magneto.optimize("inductor")(reading)
    compiled(*(torch.randn(3, requires_grad=True) * 1 for _ in range(2)))
    gc.disable()
    try:
        u, v = (torch.randn(3, requires_grad=True) * 1 for _ in range(2))
        results = compiled(u, v)
        seen = [weakref.ref(x) for x in (u, v, *results)]
        del u, v, results
        assert [reference() for reference in seen] == [None] * 4
    finally:
        gc.enable()
