"""The gradients that a compiled backward is called with: given up where the engine alone has them, left alone elsewhere; many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.aot_autograd.tangents import given_up
from tests.compare import assert_equal

LARGE = 1 << 15


class Gives(torch.autograd.Function):
    """Notes which of its gradients are left without memory."""

    gone: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        taken = given_up(gradients)
        Gives.gone[:] = [g is not None and g.numel() == 0 for g in gradients]
        return sum((i + 1) * g for i, g in enumerate(taken) if g is not None)


def held_by_a_variable(y: torch.Tensor, held: list[Any]) -> None:
    held.append(torch.ones(LARGE))
    y.backward(held[0])


def held_by_a_hook(y: torch.Tensor, held: list[Any]) -> None:
    y.register_hook(held.append)
    (3 * y).sum().backward()


def held_by_a_hook_of_the_node(y: torch.Tensor, held: list[Any]) -> None:
    y.grad_fn.register_hook(lambda _, outputs: held.append(outputs[0]))  # type: ignore[union-attr]
    (3 * y).sum().backward()


def asked_for(y: torch.Tensor, held: list[Any]) -> None:
    held += torch.autograd.grad((3 * y).sum(), [y, *held])


def test_what_the_engine_alone_has_is_given_up() -> None:
    x = torch.ones(LARGE, requires_grad=True)
    (3 * Gives.apply(x)[0]).sum().backward()  # type: ignore[no-untyped-call]
    assert Gives.gone == [True, False]
    assert_equal(x.grad, torch.full((LARGE,), 3.0))
    a, b = Gives.apply(x)  # type: ignore[no-untyped-call]
    (a * b).sum().backward()
    assert Gives.gone == [True, True]
    small = torch.ones(3, requires_grad=True)
    Gives.apply(small)[1].sum().backward()  # type: ignore[no-untyped-call]
    assert Gives.gone == [False, False]


@pytest.mark.parametrize("use", [held_by_a_variable, held_by_a_hook, held_by_a_hook_of_the_node, asked_for])
def test_what_others_have_is_left(use: Callable[[torch.Tensor, list[Any]], None]) -> None:
    x = torch.ones(LARGE, requires_grad=True)
    held: list[Any] = [x] if use is asked_for else []
    use(Gives.apply(x)[0], held)  # type: ignore[no-untyped-call]
    assert Gives.gone == [False, False]
    assert held[0].numel() == LARGE


def batched(y: torch.Tensor, leaves: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(y, leaves, torch.eye(y.numel()).view(-1, *y.shape), is_grads_batched=True)


def mapped(y: torch.Tensor, leaves: list[torch.Tensor]) -> Any:
    return torch.func.vmap(lambda v: torch.autograd.grad(y, leaves, v, retain_graph=True))(torch.eye(y.numel()).view(-1, *y.shape))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("ask", [batched, mapped])
def test_many_gradients_at_once(ask: Callable[..., Any], backend: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5))
    x = torch.randn(3, 4, requires_grad=True)
    leaves = [x, *net.parameters()]
    compiled = magneto.optimize(backend, nopython=True)(net)
    for _ in range(2):
        for then in (lambda y: y, lambda y: y.sum(0)):  # the gradients of the latter are expanded ones
            for expected, found in zip(ask(then(net(x)), leaves), ask(then(compiled(x)), leaves), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
