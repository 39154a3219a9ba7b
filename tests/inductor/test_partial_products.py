"""Sums of products over rows become one product: the same numbers, and only where it spares memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from magneto.aot_autograd.call import as_function
from magneto.base.flags import config
from magneto.inductor.lower import lower_graph
from magneto.inductor.partial_products import join_products
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from magneto.prims import PRIMS
from tests.inductor.lower.prim_graphs import Graph as Recorded

aten = torch.ops.aten


class Graph(Recorded):
    """Of the prims themselves."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.call(PRIMS[name], *args)


def gradient(g: Graph, rows: int, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    """What `steps` uses of a weight of 48 by 32 make of its gradient."""
    total = None
    for _ in range(steps):
        x, y = (g.input(torch.randn(rows, n).to(dtype)) for n in (48, 32))
        product = g.call(aten.mm.default, g.transpose(g.add(x, 1.0), (1, 0)), y)
        total = product if total is None else g.add(total, product)
    return total


def products(graph: fx.Graph) -> Counter[str]:
    return Counter(str(n.target) for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))


def agrees(g: Graph, graph: fx.Graph, tolerance: float = 1e-4) -> None:
    for found, wanted in zip(as_function(graph, "graph")(*g.inputs), g.expected, strict=True):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10), (torch.bfloat16, 0.25)])
def test_a_few_rows_at_a_time(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    g = Graph()
    g.output(gradient(g, 4, 20, dtype))
    graph = join_products(g.fx)
    # 3,072 elements are two results; a step's operands have 320
    assert products(graph) == {"aten.cat.default": 6, "aten.mm.default": 1, "aten.addmm.default": 2}
    assert products(g.fx) == {"aten.mm.default": 20}
    agrees(g, graph, tolerance)


def test_two_gradients_and_what_else_is_added() -> None:
    torch.manual_seed(0)
    g = Graph()
    first, second = gradient(g, 3, 5), gradient(g, 2, 6)
    more = g.input(torch.randn(48, 32))
    g.output(g.mul(g.add(first, more), 2.0), second, g.add(second, more))
    graph = join_products(g.fx)
    assert products(graph)["aten.mm.default"] == 2
    agrees(g, graph)


def test_what_would_take_more_memory_or_is_read_stays() -> None:
    g = Graph()
    g.output(gradient(g, 30, 6))  # 2,400 elements of operands, 1,536 of the result
    assert join_products(g.fx) is g.fx
    g = Graph()
    g.output(gradient(g, 4, 3))
    assert join_products(g.fx) is g.fx
    g = Graph()
    total = gradient(g, 4, 3)
    g.output(g.add(total, gradient(g, 4, 2)), total)
    assert products(join_products(g.fx)) == {"aten.mm.default": 5}


def test_eagers_numerics_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "numerics", "eager")
    g = Graph()
    g.output(gradient(g, 4, 6))
    assert join_products(g.fx) is g.fx


def test_the_same_by_a_whole_network() -> None:
    """The gradients of a cell that is written out."""
    torch.manual_seed(0)
    g = Graph()
    w = g.input(torch.randn(32, 32) / 8)
    hidden = [g.input(torch.randn(4, 32))]
    for _ in range(6):
        hidden.append(g.tanh(g.call(aten.mm.default, hidden[-1], w)))
    back, total = g.input(torch.randn(4, 32)), None
    for before, after in zip(hidden[-2::-1], hidden[:0:-1], strict=True):
        back = g.mul(back, g.sub(1.0, g.mul(after, after)))
        product = g.call(aten.mm.default, g.transpose(before, (1, 0)), back)
        total = product if total is None else g.add(total, product)
        back = g.call(aten.mm.default, back, g.transpose(w, (1, 0)))
    g.output(total, back)
    graph = join_products(g.fx)
    assert products(graph)["aten.cat.default"] == 2
    agrees(g, graph)


def test_a_part_that_is_kept_is_copied_while_the_whole_is_there() -> None:
    """Its copy is a result, which lives to the end in any case; the product dies with the kernel that reads it."""
    g = Graph()
    x, w, v = g.input(torch.randn(64, 8)), g.input(torch.randn(8, 1536)), g.input(torch.randn(512, 8))
    y = g.call(aten.mm.default, x, w)
    part = g.slice(y, (0, 1024), (64, 1536), (1, 1))
    z = g.call(aten.mm.default, g.tanh(part), v)
    g.output(z, g.mul(part, 1.0))
    steps = schedule(lower_graph(g.fx, on_gpu=True), training=True).steps
    assert [isinstance(step, FusedKernel) for step in steps] == [False, True, False]


@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_an_input_are_joined(bias: bool) -> None:
    torch.manual_seed(0)
    g = Graph()
    x, h, b = g.input(torch.randn(64, 20, 8)), g.input(torch.zeros(64, 24)), g.input(torch.randn(24))
    w = g.transpose(g.input(torch.randn(24, 8)), (1, 0))
    v = g.input(torch.randn(24, 24) / 5)
    for t in range(20):
        part = g.reshape(g.slice(x, (0, t, 0), (64, t + 1, 8), (1, 1, 1)), (64, 8))
        product = g.call(aten.addmm.default, b, part, w) if bias else g.call(aten.mm.default, part, w)
        h = g.tanh(g.add(product, g.call(aten.mm.default, h, v)))
    g.output(h)
    graph = join_products(g.fx)
    # eight at a time: two groups of eight and one of four; the first state is an input too
    assert (
        products(graph)
        == Counter({"aten.cat.default": 3, "aten.addmm.default": 3 * bias, "aten.mm.default": 20 + 3 * (not bias)}) - Counter()
    )
    agrees(g, graph)


def test_what_others_read_or_is_large_is_not_joined() -> None:
    torch.manual_seed(0)
    g = Graph()
    x, w, b = g.input(torch.randn(6, 64, 8)), g.input(torch.randn(8, 24)), g.input(torch.randn(64, 24))
    wide = g.input(torch.randn(6, 256, 8))
    found = []
    for t in range(6):
        part = g.reshape(g.slice(x, (t, 0, 0), (t + 1, 64, 8), (1, 1, 1)), (64, 8))
        large = g.reshape(g.slice(wide, (t, 0, 0), (t + 1, 256, 8), (1, 1, 1)), (256, 8))
        found += [
            g.call(aten.mm.default, part, w),
            g.tanh(g.call(aten.addmm.default, b, part, w)),
            g.tanh(g.call(aten.mm.default, large, w)),
        ]
    g.output(*found)
    assert join_products(g.fx) is g.fx
