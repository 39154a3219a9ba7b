"""Whole numbers that change from call to call as sizes: from the second one on they are captured once for all, but 0, 1 and numbers below 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import magneto
from tests.compare import assert_equal, same

CASES: dict[Callable[..., object], int] = {}


def case(variants: int = 2) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Adds fn(x, n), and how many variants there are for sizes from 2 on."""

    def register(fn: Callable[..., object]) -> Callable[..., object]:
        CASES[fn] = variants
        return fn

    return register


@case()
def ends(x, n):
    return x[:n] * 2, x[n:].sum(0), x[:-n] + 1, x[n // 2 : n].cos()


@case()
def made(x, n):
    return torch.zeros(n, 8) + x[:n], torch.ones((n, 2)), torch.arange(n) * 2, torch.arange(n, n + 4), x.new_full((n + 1,), 2.5)


@case()
def laid_out(x, n):
    return x[:1].expand(n, 8) * 2, x[0].repeat(n, 1) + 1, x[: 2 * n].view(n, 16).sum(1), x.narrow(0, 1, n) * 2


@case()
def written(x, n):
    x[:n] = 1
    x[n:, 1] += 2
    return x * 2


@case()
def masked(x, n):
    return torch.ones(n, n, dtype=torch.bool).tril() & (torch.arange(n) < n - 2)


@case()
def a_place_and_a_size(x, n):
    x[n : n + 1] = 2.0
    return (x[: n + 1] @ x[0]).softmax(0), x[:n].shape[0], x[:n] * n + n


@case()
def parted(x, n):
    padded = F.pad(x, (n, 0)), F.pad(x, (0, 0, n, 2), value=1.0), F.pad(x[None], (n // 2, 1), mode="replicate")
    return *x.split([n, 64 - n]), *torch.split(x, [64 - n, n]), *x.tensor_split([n]), *padded, torch.zeros(4 * n).unflatten(0, (n, 4))


@case()
def chosen(x, n):
    return *x.topk(n, 0), x.repeat_interleave(n, 1)[:, :5], F.one_hot(torch.tensor([0, 1]), n), *x[:, 0].kthvalue(n)


@case()
def rescaled(x, n):
    image = x[None, None]
    return (
        F.interpolate(image, size=(n, 2 * n), mode="bilinear"),
        F.interpolate(x[None], size=n),
        F.interpolate(image, (n, 8), mode="nearest"),
    )


@case(3)
def decides(x, n):
    return x[:n] * 2 if n > 10 else x[:n] + 1


@case(5)
def needs_the_number(x, n):
    for _ in range(n):
        x = x + 1
    return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_sizes(fn: Callable[..., object], backend: str) -> None:
    compiled = magneto.optimize(backend)(fn)
    tensor = torch.linspace(-1, 1, 64 * 8).reshape(64, 8)
    for value in (5, 7, 9, 12, 20):
        same(fn, compiled, tensor, value, tolerance=1e-5)
    assert magneto.stats()["graphs"] == CASES[fn]
    for value in (2, 1, 0, 64, 70, -3) if backend == "eager" and fn is not needs_the_number else ():
        same(fn, compiled, tensor, value, tolerance=1e-5)
    assert not magneto.stats()["breaks"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients(backend: str) -> None:
    def loss(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x[:n] * torch.arange(n)[:, None]).sin().sum() / n

    compiled = magneto.optimize(backend)(loss)
    for n in (3, 5, 6, 9):
        found = []
        for call in (loss, compiled):
            x = torch.linspace(0, 1, 80).reshape(16, 5).requires_grad_()
            call(x, n).backward()
            found.append(x.grad)
        assert_equal(found[1], found[0], 1e-5)
    assert magneto.stats()["graphs"] == 2


class Window:
    """The last tokens of a decoder, as sliding-window caches keep them."""

    def __init__(self) -> None:
        self.keys: torch.Tensor = torch.zeros(1, 0, 4)
        self.seen = 0

    def update(self, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        full = torch.cat([self.keys, key], 1)
        first = max(self.seen + key.shape[1] - 6, 0)
        self.keys, self.seen = full[:, -5:], self.seen + key.shape[1]
        return full, torch.arange(full.shape[1]) + first


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_window_that_slides(backend: str) -> None:
    def step(cache: Window, key: torch.Tensor) -> torch.Tensor:
        keys, at = cache.update(key)
        causal = at <= torch.arange(cache.seen - key.shape[1], cache.seen)[:, None]
        return (key @ keys.mT).masked_fill(~causal, -1e9).softmax(-1) @ keys

    compiled, plain, ours = magneto.optimize(backend)(step), Window(), Window()
    for n in range(20):
        key = torch.full((1, 1 if n else 3, 4), n / 7)
        assert_equal(compiled(ours, key), step(plain, key), 1e-6)
    assert ours.seen == plain.seen == 22
    assert magneto.stats()["recompiles"] <= 6
