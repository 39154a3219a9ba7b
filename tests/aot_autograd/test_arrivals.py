"""Where gradients come from and in which order they come: None or zeros, and hooks on parameters, as in eager."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from tests.compare import assert_equal

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


class Halves(torch.autograd.Function):
    """Two results, each of one input; what is missing arrives as zeros."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a * 2, b * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return first * 2, second * 3


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "round": lambda x, w: (x.round(), x * w, w.sin()),
    "floor": lambda x, w: (x.floor() * w, w.exp(), x.sin()),
    "sign": lambda x, w: (x.sign(), w.sign() + x, w * 2),
    "angle": lambda x, w: (x.angle(), x + w, (x * w).sin()),
    "sgn": lambda x, w: (x.sin().sgn(), w.trunc().cos(), x * w),
    "frac": lambda x, w: (x.frac(), w.ceil(), x.ceil() + w),
    "both": lambda x, w: (x.round() + w.round(), x.floor(), x * w),
    "extremes": lambda x, w: (*torch.aminmax(x), x.ceil() * w),
    "one of several": lambda x, w: (x.max(0)[0], w.unbind(0)[1].sin(), x.angle() + w),
    "custom": lambda x, w: (*Halves.apply(x, w), x.round()),  # type: ignore[no-untyped-call]
    "foreach": lambda x, w: (*torch._foreach_mul([x, w], 2.0), w.round()),
    "passed through": lambda x, w: (x + w, x.angle(), x.round() + w),
}


@BACKENDS
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_none_or_zeros(name: str, backend: str) -> None:
    f = FUNCTIONS[name]
    if name == "extremes" and "NotImplemented" in str(torch.aminmax(torch.ones(1, requires_grad=True))[0].grad_fn):
        pytest.skip("this release (2.11) has no derivative of aminmax")
    compiled = magneto.optimize(backend, nopython=True)(f)

    def run(fn: Any, chosen: tuple[int, ...]) -> Any:
        x, w = torch.linspace(-1.7, 2.2, 4).requires_grad_(), torch.linspace(0.3, 3.1, 4).requires_grad_()
        results = fn(x, w)
        sum(results[k].sum() for k in chosen).backward()  # type: ignore[union-attr]
        return [x.grad, w.grad]

    for chosen in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (1, 2, 3)):
        expected, found = run(f, chosen), run(compiled, chosen)
        assert [g is None for g in found] == [g is None for g in expected], chosen
        torch.testing.assert_close(found, expected)


# ---- the order of hooks --------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.twice, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(3, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.twice(self.first(x) * self.scale))
        return self.last(self.twice(y) + y * self.scale)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "norms": lambda: (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(5, 3)),
    "shared": lambda: (Shared(), torch.linspace(-1, 1, 15).view(5, 3)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1, bias=False), nn.PReLU()),
        torch.randn(1, 2, 5, 5),
    ),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.linspace(-1, 1, 48).view(2, 3, 8)),
}


def note(log: list[str], name: str, tensor: torch.Tensor) -> None:
    log.append(name)


def hook(model: nn.Module, log: list[str]) -> list[Any]:
    handles = []
    for name, p in model.named_parameters():
        handles.append(p.register_hook(functools.partial(note, log, f"{name}: gradient")))
        handles.append(p.register_post_accumulate_grad_hook(functools.partial(note, log, f"{name}: accumulated")))
    return handles


@BACKENDS
@pytest.mark.parametrize("name", list(MODELS))
def test_hooks_on_parameters(name: str, backend: str) -> None:
    """Hooks come, go and come again; where there are none, nothing is different."""
    logs: list[list[str]] = []
    gradients = []
    for optimise in (lambda model: model, magneto.optimize(backend, nopython=True)):
        torch.manual_seed(0)
        model, x = MODELS[name]()
        run, log = optimise(model), list[str]()
        for hooked in (False, True, False, True):
            handles = hook(model, log) if hooked else []
            (run(x).sin() * 3).sum().backward()
            for handle in handles:
                handle.remove()
            log.append("step")
        logs.append(log)
        gradients.append([p.grad for p in model.parameters()])
    assert logs[1] == logs[0]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)


@BACKENDS
def test_hooks_change_gradients_and_parameters(backend: str) -> None:
    """The optimiser inside of hooks, as to save memory: each parameter is updated while backward goes on."""

    def run(optimise: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        optimisers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            optimisers[p].step()  # type: ignore[index]
            optimisers[p].zero_grad()  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        compiled = optimise(model)
        for k in range(3):
            compiled(torch.linspace(-1, k, 6).view(2, 3)).square().sum().backward()
        return [p.detach() for p in model.parameters()]

    expected, found = run(lambda model: model), run(magneto.optimize(backend, nopython=True))
    torch.testing.assert_close(found, expected)


@BACKENDS
def test_hooks_with_a_part_of_the_gradients(backend: str) -> None:
    """Only what is asked for arrives; an input that requires grad takes part in the order."""

    def f(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((x * a).sin() @ b).cos() * a.sum()

    def run(fn: Any) -> Any:
        log: list[str] = []
        x, a, b = (torch.linspace(k, 1, 4).view(2, 2).requires_grad_() for k in (0.1, 0.2, 0.3))
        for name, tensor in (("a", a), ("x", x), ("b", b)):
            tensor.register_hook(functools.partial(note, log, name))
        fn(x, a, b).sum().backward()
        fn(x, a, b).sum().backward(inputs=[b, x])
        log += ["asked", *(str(g.sum().item() != 0) for g in torch.autograd.grad(fn(x, a, b).sum(), [a, b]))]
        with torch.no_grad():
            fn(x, a, b)
        return log, [x.grad, a.grad, b.grad]

    expected, found = run(f), run(magneto.optimize(backend, nopython=True)(f))
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])


# ---- what the graph has written ------------------------------------------------------------------------------------------


def read_after(buffer: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    buffer.add_(x.detach())
    return w * buffer, x.sin()


def copied(buffer: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula reads the exponential, not the buffer that is given its numbers."""
    y = x.exp()
    buffer.copy_(y.detach())
    return w * y, x * 2


def replaced(buffer: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = buffer.clone()
    buffer.mul_(2)
    return w * old, x.cos()


@BACKENDS
@pytest.mark.parametrize("f", [read_after, copied, replaced])
def test_written_by_the_graph_and_again(f: Any, backend: str) -> None:
    def run(fn: Any, again: bool) -> Any:
        buffer, x, w = (torch.linspace(k, 1, 4) for k in (0.1, 0.2, 0.3))
        x.requires_grad_(), w.requires_grad_()
        a, b = fn(buffer, x, w)
        if again:
            fn(buffer, x, w)
        try:
            b.sum().backward()
            a.sum().backward()
        except RuntimeError as error:
            return [str(error)[:80], x.grad, buffer]
        return [w.grad, x.grad, buffer]

    compiled = magneto.optimize(backend, nopython=True)(f)
    for again in (False, True, False):
        assert_equal(run(compiled, again), run(f, again), 1e-5)
