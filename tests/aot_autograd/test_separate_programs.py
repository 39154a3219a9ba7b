"""Programs around a compiled forward whose backward is outside: odd gradients, threads, engines inside engines, inputs written between, errors. Plain against compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import magneto

Optimise = Callable[[Callable[..., Any]], Callable[..., Any]]
PROGRAMS: dict[str, Callable[[Optimise], Iterator[Any]]] = {}


def program(fn: Callable[[Optimise], Iterator[Any]]) -> Callable[[Optimise], Iterator[Any]]:
    """A program optimises what it likes and yields what is to be compared; it runs everything three times."""
    PROGRAMS[fn.__name__] = fn
    return fn


def leaf(*shape: int, k: int = 0) -> torch.Tensor:
    n = int(torch.Size(shape).numel())
    return (torch.arange(n) * 0.7 + k + 1).sin().reshape(shape).requires_grad_()


def grads(*leaves: torch.Tensor) -> list[torch.Tensor | None]:
    return [None if x.grad is None else x.grad.clone() for x in leaves]


def tried(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except Exception as error:
        return type(error)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@program
def odd_gradients(opt: Optimise) -> Iterator[Any]:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 3))
    f = opt(m)
    for g in (
        torch.ones(()).expand(2, 2, 2, 2),
        torch.arange(16.0).view(2, 2, 2, 2).permute(2, 3, 1, 0),
        torch.arange(32.0).view(2, 2, 2, 4)[..., ::2],
        torch.arange(8.0).view(2, 1, 2, 2).expand(2, 2, 2, 2),
        torch._neg_view(torch.arange(16.0).view(2, 2, 2, 2)),
    ):
        x = leaf(2, 2, 4, 4)
        f(x).backward(g)
        yield grads(x, *m.parameters())
        m.zero_grad()


@program
def another_thread(opt: Optimise) -> Iterator[Any]:
    m = net()
    f = opt(m)
    for k in range(3):
        x = leaf(2, 4, k=k)
        y = f(x).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
        yield grads(x, *m.parameters())


class Wrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Any, g: Any) -> Any:
        ctx.g = g
        ctx.save_for_backward(x)
        return f(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.g(gradient, *ctx.saved_tensors), None, None


@program
def compiled_inside_a_function(opt: Optimise) -> Iterator[Any]:
    f, g = opt(lambda x: x.sin() * 2), opt(lambda g, x: g * x.cos() * 2)
    for k in range(3):
        x = leaf(4, k=k)
        y = Wrapped.apply(x, f, g)  # type: ignore[no-untyped-call]
        (y * x).sum().backward()
        yield y, grads(x)


@program
def compiled_inside_a_hook(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda x: x.tanh() * 3)
    for k in range(3):
        x = leaf(4, k=k)
        y = f(x)
        y.register_hook(lambda g: f(g))
        y.sum().backward()
        yield grads(x)


@program
def inputs_written_between(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda y, w: (y * w).tanh())
    for k in range(3):
        for requires in (True, False):
            x, w = leaf(4, k=k), leaf(4, k=k + 1).detach().requires_grad_(requires)
            y = x * 2
            result = f(y, w)
            y.add_(1)
            yield tried(result.sum().backward), grads(x, w)


@program
def results_written_between(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda x, w: ((x * w).exp(), (x + w).tanh(), x @ w))
    for j in range(3):
        x, w = leaf(5), leaf(5, k=1)
        results = f(x, w)
        results[j].mul_(2)
        yield tried((results[0].sum() + results[1].sum() + results[2]).backward)


@program
def shares_of_gradients(opt: Optimise) -> Iterator[Any]:
    """A gradient that is passed through belongs to the program: accumulating into one leaf changes no other."""
    f = opt(lambda x, y: x + y)
    for k in range(3):
        x, y, g = leaf(4, k=k), leaf(4, k=k + 1), torch.ones(4)
        f(x, y).backward(g)
        assert x.grad is not None
        x.grad.add_(1)
        yield grads(x, y), g
        f(x, x).backward(g)
        yield grads(x, y), g


@program
def switched_parameters(opt: Optimise) -> Iterator[Any]:
    m = net()
    f = opt(m)
    for k in range(8):
        for bit, p in enumerate((m[0].weight, m[2].bias, m[0].bias)):
            p.requires_grad_(bool(k & 1 << bit))
        m.zero_grad()
        y = f(leaf(2, 4, k=k).detach())
        yield y, y.requires_grad, grads(*m.parameters()), tried(y.sum().backward), grads(*m.parameters())


@program
def saved_tensors_hooks(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda x, w: (x * w).sum())
    for k in range(3):
        x, w = leaf(5, k=k), leaf(5, k=k + 3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 2):
            result = f(x, w)
        result.backward()
        yield grads(x, w)


@program
def hooks_on_several(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda x, w, v: ((x * w).sum(), (v * 2).sum()))
    for k in range(2):
        seen: list[Any] = []
        x, w, v = (leaf(3, k=k + i) for i in range(3))
        torch.autograd.graph.register_multi_grad_hook([x, v], lambda found, seen=seen: seen.append([g is None for g in found]))
        a, b = f(x, w, v)
        (a + b).backward()
        f(x, w, v)[1].backward()
        yield seen, grads(x, w, v)


@program
def hooks_on_results(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda x, w: (x.sin(), x * w, (x + w).exp()))
    for used in ((0,), (1, 2), (0, 1, 2)):
        seen: list[Any] = []
        x, w = leaf(3, k=1), leaf(3, k=2)
        results = f(x, w)
        handles = [r.register_hook(lambda g, k=k, seen=seen: seen.append((k, g.clone())) or g * 2) for k, r in enumerate(results)]
        results[0].register_hook(lambda g: g + 1)
        torch.autograd.graph.register_multi_grad_hook(results, lambda found, seen=seen: seen.append([g is None for g in found]))
        sum((results[k].sum() for k in used), torch.zeros(())).backward(retain_graph=True)
        handles[used[0]].remove()
        results[used[0]].sum().backward()
        yield sorted(seen, key=str), grads(x, w)


@program
def errors(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda x: (x * 2, x.detach(), x > 0))
    for k in range(2):
        x = leaf(4, k=k)
        a, b, _ = f(x)
        yield tried(b.sum().backward), tried(a.backward), tried(torch.autograd.grad, a.sum(), leaf(3)), tried(a.numpy)
        yield tried(a.backward, torch.ones(3)), tried(lambda a=a: a.requires_grad_(False))
        a.sum().backward()
        yield tried(a.sum().backward), grads(x)


@program
def numerical_check(opt: Optimise) -> Iterator[Any]:
    f = opt(lambda x, w: (x * w).sin().cumsum(0) / (1 + w * w))
    x, w = (leaf(3, k=k).detach().double().requires_grad_() for k in range(2))
    yield torch.autograd.gradcheck(f, (x, w), check_batched_grad=True)
    yield torch.autograd.gradgradcheck(f, (x, w))


@program
def transforms(opt: Optimise) -> Iterator[Any]:
    m = net()
    f = opt(m)
    x = leaf(4).detach()
    yield torch.func.grad(lambda x: f(x).sum())(x), torch.func.jacrev(f)(x), torch.func.vmap(f)(leaf(5, 4).detach())
    yield torch.autograd.functional.jacobian(f, x), torch.autograd.functional.jacobian(f, x, vectorize=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_program(name: str, backend: str) -> None:
    expected = list(PROGRAMS[name](lambda fn: fn))
    found = list(PROGRAMS[name](magneto.optimize(backend)))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.requires_grad == expected.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            same(*pair)
    else:
        assert found == expected
