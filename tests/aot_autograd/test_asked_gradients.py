"""`torch.autograd.grad` and `backward(inputs=...)` for some of a compiled function's inputs: only what leads there runs, and only what it reads must be unwritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import magneto
from tests.compare import assert_equal

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def ask(y: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[int, Any]:
    with Products() as products:
        found = torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True)
    return products.count, found


def test_only_what_leads_there_runs() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))
    compiled = magneto.optimize("aot_eager", nopython=True)(net)
    x = torch.randn(2, 4, requires_grad=True)
    a, b = net[0].weight, net[2].weight
    for inputs in ([b], [a], [x], [x, b], [a, b], [x, a, b], [b]):
        expected, found = ask(net(x), inputs), ask(compiled(x), inputs)
        assert expected[0] == found[0]
        assert_equal(found[1], expected[1])


@BACKENDS
def test_accumulated_into_some(backend: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * w).sin(), w * v

    compiled = magneto.optimize(backend, nopython=True)(f)

    def run(fn: Any) -> list[Any]:
        x, w, v = (torch.linspace(k, 2, 5, requires_grad=True) for k in (0.1, 0.2, 0.3))
        a, b = fn(x * 1, w, v)
        (a.sum() + b.sum()).backward(inputs=[x], retain_graph=True)
        first = [None if t.grad is None else t.grad.clone() for t in (x, w, v)]
        b.sum().backward(inputs=[v], retain_graph=True)
        a.sum().backward(inputs=[w])
        return [first, [t.grad for t in (x, w, v)]]

    for _ in range(2):
        expected, found = run(f), run(compiled)
        assert [[g is None for g in row] for row in expected] == [[g is None for g in row] for row in found]
        torch.testing.assert_close(found, expected)


@BACKENDS
@pytest.mark.parametrize("create_graph", [False, True])
def test_written_where_nobody_looks(backend: str, create_graph: bool) -> None:
    """Eager saves `x` for the sine and `w` for the other product: each is read on its own way only."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.sin() + w.exp().cos() * v

    compiled = magneto.optimize(backend, nopython=True)(f)
    x, w, v = (torch.linspace(k, 2, 5, requires_grad=True) for k in (0.1, 0.2, 0.3))
    y = f(x, w, v), compiled(x, w, v)
    with torch.no_grad():
        v.add_(1)
    expected, found = (torch.autograd.grad(one.sum(), [x], retain_graph=True) for one in y)
    assert_equal(found, expected, 1e-6 if backend == "inductor" else None)
    for one in y:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(one.sum(), [w], create_graph=create_graph)
