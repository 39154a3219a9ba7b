"""Cases of triton_cases.py: reductions over pairs, sums of few elements where they are read, memory of rows under conditions, tiles of looked up memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.inductor.lower.prim_graphs import Graph

PAIRS: dict[str, tuple[Callable[[Graph], Any], float]] = {}


def case(name: str, tolerance: float = 2e-6) -> Callable[[Callable[[Graph], Iterator[Any]]], None]:
    """A generator of what the graph returns."""

    def add(found: Callable[[Graph], Iterator[Any]]) -> None:
        PAIRS[name] = (lambda g: g.output(*found(g))), tolerance

    return add


def apart(g: Graph, a: Any, b: Any) -> Any:
    """Differences of all pairs of rows."""
    (n, width), m = a.meta["val"].shape, b.meta["val"].shape[0]
    return g.sub(*(g.broadcast_in_dim(x, (n, m, width), dims) for x, dims in ((a, (0, 2)), (b, (1, 2)))))


@case("distances of all pairs", 1e-5)
def _distances(g: Graph) -> Iterator[Any]:
    for n, m, width in ((70, 100, 40), (64, 65, 9), (33, 90, 32)):
        a, b = g.input(torch.randn(n, width)), g.input(torch.randn(m, width))
        yield g.sum(g.abs(apart(g, a, b)), (2,))
        far = g.sum(g.mul(apart(g, a, b), apart(g, a, b)), (2,))
        yield g.exp(g.mul(far, -0.05))
        yield g.amax(g.abs(apart(g, a, b)), (2,))


@case("products of batches written out", 1e-5)
def _batches(g: Graph) -> Iterator[Any]:
    q, k, v = g.input(torch.randn(3, 40, 48)), g.input(torch.randn(3, 70, 48)), g.input(torch.randn(48))
    shape = (3, 40, 70, 48)
    both = g.add(g.broadcast_in_dim(q, shape, (0, 1, 3)), g.broadcast_in_dim(k, shape, (0, 2, 3)))
    yield g.sum(g.mul(g.tanh(both), g.broadcast_in_dim(v, shape, (3,))), (3,))
    yield g.any(g.gt(both, 4.0), (3,))
    yield g.argmax(apart(g, g.input(torch.randn(8, 256)), g.input(torch.randn(33, 256))), 2)


@case("rows that all read the same", 1e-5)
def _shared(g: Graph) -> Iterator[Any]:
    labels, x = g.input(torch.randint(0, 40, (3000,))), g.input(torch.randn(90))
    steps = g.broadcast_in_dim(g.iota(40, torch.int64, labels.meta["val"].device), (3000, 40), (1,))
    found = g.eq(g.broadcast_in_dim(labels, (3000, 40), (0,)), steps)
    yield g.sum(g.convert_element_type(found, torch.float32), (0,))
    y = g.input(torch.randn(1100))
    far = g.abs(g.sub(*(g.broadcast_in_dim(t, (90, 1100), (d,)) for d, t in enumerate((x, y)))))
    yield g.sum(g.exp(g.neg(far)), (1,))
    yield g.amin(far, (1,))
    yield g.argmin(far, 1)


@case("few elements where they are read", 1e-5)
def _few(g: Graph) -> Iterator[Any]:
    a, b = g.input(torch.randn(40, 3)), g.input(torch.randn(70, 3))
    far = g.sum(g.mul(apart(g, a, b), apart(g, a, b)), (2,))
    yield g.amin(far, (0,))
    yield g.argmin(far, 1)
    x = g.input(torch.randn(50, 4).bfloat16())
    wide = g.convert_element_type(x, torch.float32)
    yield g.div(wide, g.broadcast_in_dim(g.sqrt(g.sum(g.mul(wide, wide), (1,))), (50, 4), (0,)))
    yield g.sum(g.input(torch.randint(0, 255, (3, 60), dtype=torch.uint8)), (0,))
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -2.0, 3e38])
    for turned in (False, True):  # the latter is not written out
        triples, numbers = torch.cartesian_prod(special, special, special), torch.randint(-3, 4, (60, 3))
        triples, numbers = (g.input(t if turned else t.t().contiguous().t()) for t in (triples, numbers))
        yield from (g.amax(triples, (1,)), g.argmax(triples, 1), g.argmin(triples, 1), g.argmin(numbers, 1), g.prod(numbers, (1,)))
        yield from (g.all(g.gt(triples, -1.0), (1,)), g.sum(numbers, (1,)), g.mul(g.exp(g.amin(triples, (1,))), 2.0))


@case("joined rows that are looked up", 0)
def _joined(g: Graph) -> Iterator[Any]:
    x, i, j = g.input(torch.randn(30, 16)), g.input(torch.randint(0, 30, (100,))), g.input(torch.randint(0, 30, (100,)))
    a, b = g.index_select(x, 0, i), g.index_select(x, 0, j)
    yield g.cat([a, b, g.sub(a, b)], 1)
    few = g.slice(j, (0,), (60,), (1,))
    yield g.cat([g.index_select(x, 0, few), g.slice(a, (0, 0), (40, 16), (1, 1))], 0)
    yield g.mul(g.cat([g.input(torch.randn(9, k)) for k in (3, 1, 5, 2, 7, 4)], 1), 2.0)


@case("channels-last memory at mirrored and computed places", 0)
def _turned(g: Graph) -> Iterator[Any]:
    x = g.input(torch.randn(2, 40, 33, 12).permute(0, 3, 1, 2))
    place = g.abs(g.sub(g.iota(36, torch.int64, x.meta["val"].device), 3))
    yield g.mul(g.index_select(x, 3, g.sub(32, g.abs(g.sub(32, place)))), 2.0)
    rows = g.index_select(g.input(torch.randn(50, 24)), 0, g.input(torch.randint(0, 50, (3 * 40,))))
    yield g.mul(g.transpose(g.reshape(rows, (3, 40, 24)), (0, 2, 1)), 1.5)


def rolled(g: Graph, x: Any, by: int, dim: int) -> Any:
    n, ends = x.meta["val"].shape[dim], list(x.meta["val"].shape)
    first, second = ([0] * len(ends), list(ends)) , ([0] * len(ends), list(ends))  # fmt: skip
    first[0][dim], second[1][dim] = n - by, n - by
    return g.cat([g.slice(x, tuple(lo), tuple(hi), (1,) * len(ends)) for lo, hi in (first, second)], dim)


def neighbours(g: Graph, x: Any) -> Any:
    """The sum of the eight, and the element."""
    rows = [x, rolled(g, x, 1, 0), rolled(g, x, x.meta["val"].shape[0] - 1, 0)]
    found = [y for row in rows for y in (row, rolled(g, row, 1, 1), rolled(g, row, x.meta["val"].shape[1] - 1, 1))]
    total = found[0]
    for y in found[1:]:
        total = g.add(total, y)
    return total


def windows(g: Graph, x: Any, width: int) -> Any:
    """The largest of `width` neighbours."""
    (rows, size) = x.meta["val"].shape
    found = [g.slice(x, (0, k), (rows, size - width + 1 + k), (1, width)) for k in range(width)]
    total = found[0]
    for y in found[1:]:
        total = g.maximum(total, y)
    return total


def patches(g: Graph, x: Any, side: int) -> Any:
    """Elements of square patches, one patch beside the other (unfold)."""
    n, high, wide = x.meta["val"].shape
    cut = g.reshape(x, (n, high // side, side, wide // side, side))
    return g.mul(g.reshape(g.transpose(cut, (0, 2, 4, 1, 3)), (n, side * side, high * wide // side**2)), 2.0)


@case("operands read element by element", 1e-5)
def _narrow(g: Graph) -> Iterator[Any]:
    for shape in ((9, 35), (8, 36)):
        yield neighbours(g, g.input(torch.randn(shape)))
    yield windows(g, g.input(torch.randn(7, 60)), 4)
    yield patches(g, g.input(torch.randn(3, 32, 48)), 8)


@case("signs of zeros", 0)
def _signs(g: Graph) -> Iterator[Any]:
    x = g.input(torch.tensor([0.0, -0.0, 1.0, -1.0]))
    yield g.neg(x)
    yield g.reciprocal(g.neg(x))
    yield g.neg(g.input(torch.tensor([0.0, -0.0, 2.0], dtype=torch.float64)))
    yield g.floordiv(x, g.neg(g.input(torch.tensor([1.0, 2.0, 3.0, 1e30]))))


@case("long rows by one number", 2e-6)
def _divided(g: Graph) -> Iterator[Any]:
    x = g.input(torch.randn(20, 300) * 50)
    weights = g.exp(g.sub(x, g.broadcast_in_dim(g.amax(x, (1,)), (20, 300), (0,))))
    yield g.div(weights, g.broadcast_in_dim(g.sum(weights, (1,)), (20, 300), (0,)))
