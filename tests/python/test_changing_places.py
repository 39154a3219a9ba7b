"""Whole numbers that change from call to call as places in tensors: the second one makes them data, and further ones compile nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch

import magneto
from tests.compare import assert_equal, same

CASES: dict[Callable[..., object], tuple[Sequence[int], int]] = {}


def case(values: Sequence[int] = range(2, 7), recompiles: int = 1) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Adds fn(x, value) for all values, and how often it compiles anew."""

    def register(fn: Callable[..., object]) -> Callable[..., object]:
        CASES[fn] = values, recompiles
        return fn

    return register


@case()
def reads(x, i):
    return x[i] * 2 + x[:, i - 1].sum() + x[..., i % 4].mean() + x[i, i].sum(), x[i, :, None, i % 3]


@case()
def slices(x, i):
    return x[i : i + 1] + 1, x[:, i - 2 : i] * 2, x[1, i - 1 : i + 1, 1:3] * x[i], x[i : i + 1, :, i % 4], x[None, i % 3 : i % 3 + 2]


@case()
def methods(x, i):
    return x.select(1, i) + torch.select(x, -1, i % 4).sum(), x.narrow(0, i - 1, 2) * 2, torch.narrow(x, 1, i - 2, 3) + 1


@case()
def views_leave(x, i):
    y = x[i]
    return y, y[1:], x[:, i], x + 1


@case()
def of_what_is_computed(x, i):
    y = x.sin()
    return y[i] + 1, y[i : i + 1].cos(), y[:, i].reshape(-1), y[:, i].is_contiguous(), y.transpose(0, 2)[i % 4] * 2


@case()
def writes(x, i):
    x[i] = 1.5
    x[:, i] = x[:, 0] * 2
    x[2:5, i, ::2] = 7
    x[1, i - 1 : i + 1] = torch.ones(2, 4)
    x[:, i - 2 : i, 1] = torch.arange(2.0)
    x[..., i % 4] = True
    return x * 2


@case()
def ring(x, i):
    x[i % 8] = torch.arange(4)
    return x.mean(0)


@case()
def in_place(x, i):
    x[i] += 1
    x[i, 1] *= 2
    x[i : i + 1] -= 0.5
    x[:, i].mul_(torch.arange(4.0))
    torch.add(x[0], 1, out=x[i])
    return x.sum(0)


@case()
def written_alone(x, i):
    x[i] += 1
    x[i].add_(2)


@case()
def numbers(x, i):
    x[i] = i * 0.5
    x[i, 1] = i
    x[0] = i / 3
    y = (x * 10).to(torch.int8)
    y[i] = i
    return y


@case()
def read_and_written(x, i):
    y = x[i] * 2
    x[i] = y
    x[i : i + 1] = x[i - 1 : i]
    return x[i - 1] + 1


@case()
def into_what_is_computed(x, i):
    y = x.clone()
    y[i] = x[0]
    y[i, i] += 2
    y[:, i] = 3
    return y, y[i] * 2


@case((2, 3, -1, -2, -3, 4), 2)
def behind_the_end(x, i):
    x[i] = 2
    return x[i] + x[:, i]


@case((2, 3, 7, 8, -9), 3)
def out_of_range(x, i):
    x.add_(1)
    return x[i] * 2


@case((2, 3, 6, 7, 4), 2)
def cut_off(x, i):
    return x[i : i + 2] * 2


@case(recompiles=4)
def a_copy_leaves(x, i):
    y = x * 2
    return y[i]


@case(recompiles=4)
def written_behind_the_view(x, i):
    y = x[i]
    x.mul_(2)
    return y * 1


@case(range(2, 4), 0)
def of_another_shape(x, i):
    x[i] = torch.ones(5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_places(fn: Callable[..., object], backend: str) -> None:
    values, recompiles = CASES[fn]
    compiled = magneto.optimize(backend)(fn)
    for value in values[:: 1 if backend == "eager" else 2] if recompiles > 1 else values:
        same(fn, compiled, torch.linspace(-1, 1, 256).reshape(8, 8, 4), value, tolerance=1e-5 if backend == "inductor" else None)
    stats = magneto.stats()
    assert stats["recompiles"] <= recompiles
    assert not stats["breaks"] and not stats["fallbacks"]


class Decoder(torch.nn.Module):
    """A table that learns, a cache, a log in a ring, numbers in an attribute and in a list of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Parameter(torch.linspace(-1, 1, 128).reshape(16, 8)), torch.nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(2, 16, 8))
        self.register_buffer("log", torch.zeros(4))
        self.position, self.config = 0, {"steps": [0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at, step = self.position, self.config["steps"][0]
        y = self.linear(x) + self.table[at] + self.table[at : at + 2].sum(0)
        self.keys[:, at : at + 1] = y.detach()[:, None]
        self.log[step % 4] = step / 10
        self.position += 1
        self.config["steps"][0] += 1
        weights = (y[:, None] @ self.keys.mT).masked_fill(torch.arange(16) > at, -1e9).softmax(-1)
        return (weights @ self.keys)[:, 0] * y


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("training", [True, False])
def test_a_cache_a_table_and_a_log(backend: str, training: bool) -> None:
    plain = Decoder()
    ours = copy.deepcopy(plain)
    compiled = magneto.optimize(backend)(ours)
    for n in range(6):
        with torch.set_grad_enabled(training):
            results = [call(torch.full((2, 8), n / 5.0)) for call in (plain, compiled)]
        assert_equal(results[1], results[0], 1e-5)
        if training:
            for result in results:
                result.sum().backward()
    for name, value in plain.state_dict(keep_vars=True).items():
        other = ours.state_dict(keep_vars=True)[name]
        assert_equal(other.detach(), value.detach(), 1e-5)
        assert_equal(other.grad, value.grad, 1e-5)
    stats = magneto.stats()
    assert (stats["recompiles"], stats["breaks"], stats["fallbacks"]) == (1, 0, 0)


def test_what_is_written_alone_is_all_that_is_touched() -> None:
    """Of an input that the graph does not use otherwise, the region gives it the place alone."""
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append([tuple(one.shape) for one in inputs])
        return gm.forward

    @magneto.optimize(backend)
    def append(x: torch.Tensor, i: int, y: torch.Tensor) -> None:
        x[i % 100] = y * 2

    x = torch.zeros(100, 3)
    for i in range(98, 104):
        append(x, i, torch.full((3,), float(i)))
    assert graphs == [[(3,), (100, 3)], [(3,), (3,)]]
    assert x[:4, 0].tolist() == [200, 202, 204, 206]
    assert x[98:, 2].tolist() == [196, 198]
