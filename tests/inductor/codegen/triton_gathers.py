"""Cases of triton_cases.py: lookups, additions at computed places, reductions of few elements, kernels that are equal but for their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten
GATHERS: dict[str, tuple[Callable[[Graph], Any], float]] = {}


def case(name: str, tolerance: float = 2e-6) -> Callable[[Callable[[Graph], Iterator[Any]]], None]:
    """A generator of what the graph returns."""

    def add(found: Callable[[Graph], Iterator[Any]]) -> None:
        GATHERS[name] = (lambda g: g.output(*found(g))), tolerance

    return add


def column(g: Graph, lists: Any, k: int, shape: tuple[int, int, int]) -> Any:
    """Column k of index lists of this shape."""
    rows, _, each = shape
    return g.reshape(g.slice(lists, (0, k, 0), (rows, k + 1, each), (1, 1, 1)), (rows, each))


def wide(g: Graph, x: Any, shape: tuple[int, int, int]) -> Any:
    return g.broadcast_in_dim(x, shape, (0, 2))


@case("gradients of lookups")
def _embedding(g: Graph) -> Iterator[Any]:
    for width in (16, 5):
        grad, index = g.input(torch.randn(6, 4, width)), g.input(torch.randint(0, 10, (6, 4)))
        for padding, by_frequency in ((-1, False), (3, False), (3, True)):
            yield g.call(aten.embedding_dense_backward.default, grad, index, 10, padding, by_frequency)
        yield g.call(aten.embedding_dense_backward.default, g.mul(grad, 2.0), index, 10, -1, False)
    index = column(g, g.input(torch.randint(0, 10, (6, 5, 4))), 2, (6, 5, 4))
    grad = wide(g, g.input(torch.randn(6, 16)), (6, 4, 16))
    yield g.call(aten.embedding_dense_backward.default, grad, index, 10, -1, False)


@case("padding that infinities are sent to", 0)
def _padding(g: Graph) -> Iterator[Any]:
    grad, index = torch.ones(6, 4), torch.tensor([0, 1, 2, 2, 1, 5])
    grad[2:4] = float("inf")
    yield g.call(aten.embedding_dense_backward.default, g.input(grad), g.input(index), 7, 2, False)


for _dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16):

    @case(f"additions to {_dtype}", {torch.bfloat16: 1e-1, torch.float32: 2e-5}.get(_dtype, 1e-12))
    def _additions(g: Graph, dtype: torch.dtype = _dtype) -> Iterator[Any]:
        x, source = (g.input((torch.randn(n, 9) * 3).to(dtype)) for n in (7, 5))
        yield g.call(aten.index_add.default, x, 0, g.input(torch.tensor([1, 1, 6, 0, 1])), source)
        yield g.call(aten.index_add.default, g.add(x, 1), 0, g.input(torch.tensor([1, 1, 6, 0, 1], dtype=torch.int32)), g.mul(source, 2))
        yield g.call(aten.scatter_add.default, x, 0, g.input(torch.randint(0, 7, (5, 9))), source)
        yield g.call(aten.scatter_add.default, x, 1, g.input(torch.randint(0, 9, (4, 6))), source)
        yield g.call(aten.scatter_reduce.two, x, 1, g.input(torch.randint(0, 9, (4, 9))), source, "sum")
        if dtype.is_floating_point:
            yield g.call(aten.scatter_reduce.two, x, 1, g.input(torch.randint(0, 9, (4, 9))), source, "sum", include_self=False)


def _differ(rows: int, columns: int, of: int) -> torch.Tensor:
    """Places along dimension 0, no two the same in a column."""
    return torch.rand(of, columns).argsort(0)[:rows]


for _dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16, torch.int8, torch.bool):

    @case(f"stores at places of {_dtype}", 0)
    def _stores(g: Graph, dtype: torch.dtype = _dtype) -> Iterator[Any]:
        x, source = (g.input((torch.randn(n, 9) * 3).to(dtype)) for n in (7, 5))
        rows = g.input(torch.randperm(7)[:5])
        y = g.call(aten.logical_not.default, x) if dtype is torch.bool else g.call(aten.neg.default, x)
        yield g.call(aten.index_copy.default, x, 0, rows, source)
        yield g.call(aten.index_copy.default, y, 0, rows, source)
        yield g.call(aten.index_put.default, x, [rows], source, False)
        yield g.call(aten.index_put.default, y, [None, g.input(torch.tensor([-1, 3]))], g.input((torch.randn(7, 1) * 3).to(dtype)), False)
        yield g.call(
            aten.index_put.default,
            y,
            [g.input(torch.tensor([[2], [5]])), g.input(torch.randperm(9)[:4])],
            g.input(torch.randn(()).to(dtype)),
            False,
        )
        yield g.call(aten.scatter.src, x, 0, g.input(_differ(5, 9, 7)), source)
        yield g.call(aten.scatter.src, y, 0, g.input(_differ(3, 8, 7)), source)
        if dtype in (torch.float32, torch.int64):
            yield g.call(aten.scatter.value, y, 1, g.input(_differ(4, 6, 9)), 3)


@case("elements that were the largest of their windows", 0)
def _unpooled(g: Graph) -> Iterator[Any]:
    x = torch.randn(2, 3, 6, 8)
    for memory in (torch.contiguous_format, torch.channels_last):
        values, index = torch.nn.functional.max_pool2d(x.to(memory_format=memory), 2, return_indices=True)
        made = g.call(aten.max_unpool2d.default, g.input(values), g.input(index), (6, 8))
        yield made
        yield g.call(aten.neg.default, g.call(aten.max_unpool2d.default, g.call(aten.neg.default, g.input(values)), g.input(index), (7, 9)))


@case("additions at places of several index tensors", 2e-5)
def _puts(g: Graph) -> Iterator[Any]:
    x, rows, columns = (g.input(t) for t in (torch.randn(3, 7, 9), torch.randint(-7, 7, (5,)), torch.randint(-9, 9, (5,))))
    tall = g.input(torch.randint(0, 3, (4, 1)))
    for values in (torch.randn(3, 5), torch.randn(5), torch.randn(3, 1)):
        yield g.call(aten.index_put.default, x, [None, rows, columns], g.input(values), True)
    yield g.call(aten.index_put.default, x, [tall, None, columns], g.input(torch.randn(4, 5, 7)), True)
    yield g.call(aten.index_put.default, x, [tall], g.input(torch.randn(4, 1, 7, 9)), True)
    zeros = g.full((3, 7, 9), 0.0, torch.float32, x.meta["val"].device)
    yield g.call(aten.index_put.default, zeros, [None, rows, columns], g.input(torch.randn(3, 5)), True)
    yield g.call(
        aten.index_put.default, x, [None, g.iota(5, torch.int64, x.meta["val"].device), columns], g.input(torch.randn(3, 5)), False
    )
    yield g.call(aten.index_put.default, x, [g.input(torch.tensor([True, False, True]))], g.input(torch.randn(2, 7, 9)), True)


@case("lookups by several index tensors")
def _index(g: Graph) -> Iterator[Any]:
    x, rows, columns = (g.input(t) for t in (torch.randn(3, 7, 9), torch.randint(-7, 7, (5,)), torch.randint(-9, 9, (5,)).int()))
    tall = g.input(torch.randint(0, 3, (4, 1)))
    yield g.call(aten.index.Tensor, x, [None, rows, columns])
    yield g.mul(g.call(aten.index.Tensor, g.exp(x), [tall, None, columns]), 2.0)
    yield g.call(aten.index.Tensor, x, [tall, rows])
    yield g.call(aten.index.Tensor, x, [None, g.iota(5, torch.int64, x.meta["val"].device), rows])
    yield g.call(aten.index.Tensor, x, [g.input(torch.tensor([True, False, True]))])


@case("reductions of few elements", 2e-6)
def _few(g: Graph) -> Iterator[Any]:
    x, h = g.input(torch.randn(6, 4, 32)), g.input(torch.randint(-8, 8, (6, 4, 32)).bfloat16())
    v = g.var(x, (1,), 1.0)
    yield from (g.amax(x, (1,)), g.prod(x, (1,)), g.item(v, 0), g.item(v, 1), g.argmax(x, 1))
    yield from (g.any(g.gt(x, 1.0), (1,)), g.all(g.lt(x, 1.0), (1,)), g.sum(h, (1,)), g.amin(h, (1,)))
    e = g.exp(g.sub(x, wide(g, g.amax(x, (1,)), (6, 4, 32))))
    yield from (g.sum(e, (1,)), g.div(e, wide(g, g.sum(e, (1,)), (6, 4, 32))), g.sum(x, (2,)))


@case("sums of looked up vectors, and their gradients")
def _bags(g: Graph) -> Iterator[Any]:
    """Twenty of each, which differ in what they read, and from where on."""
    lists = g.input(torch.randint(0, 50, (12, 20, 4)))
    for k in range(20):
        table, grad = g.input(torch.randn(53, 16)[k % 3 :][:50]), wide(g, g.input(torch.randn(12, 16)), (12, 4, 16))
        index = column(g, lists, k, (12, 20, 4))
        yield g.sum(g.call(aten.embedding.default, table, index), (1,))
        yield g.call(aten.embedding_dense_backward.default, grad, index, 50, -1, False)


@case("sums of many looked up vectors", 2e-5)
def _long_bags(g: Graph) -> Iterator[Any]:
    for bags, of, width in ((12, 40, 64), (9, 100, 36), (3, 11, 5)):
        table, index = g.input(torch.randn(50, width)), g.input(torch.randint(0, 50, (bags, of)))
        rows = g.call(aten.embedding.default, table, index)
        samples = g.broadcast_in_dim(g.input(torch.randn(bags, of)), (bags, of, width), (0, 1))
        yield from (g.sum(rows, (1,)), g.sum(g.mul(rows, samples), (1,)), g.amax(rows, (1,)), g.sum(rows, (2,)), g.sum(rows, (0, 1)))


def by_offsets(g: Graph, weight: Any, index: Any, offsets: Any, samples: Any = None, last: bool = False, padding: int = -1) -> Any:
    call = g.call(aten._embedding_bag_forward_only.default, weight, index, offsets, False, 0, False, samples, last, padding)
    return g.item(call, 0)


@case("bags by offsets", 2e-5)
def _by_offsets(g: Graph) -> Iterator[Any]:
    """Empty ones, long ones, two at once, and what is computed of them."""
    index, samples = g.input(torch.randint(0, 50, (120,))), g.input(torch.randn(120))
    offsets, others = (g.input(torch.tensor(o)) for o in ([0, 4, 4, 40, 119], [0, 0, 90, 93, 120]))
    for width in (64, 130, 5, 1):
        weight = g.input(torch.randn(50, width))
        yield by_offsets(g, weight, index, offsets)
        yield by_offsets(g, weight, index, offsets, samples, padding=3)
        yield by_offsets(g, weight, index, others, last=True)
        yield g.mul(g.exp(by_offsets(g, g.mul(weight, 0.5), index, others)), 2.0)
        scale, bias = (g.broadcast_in_dim(g.input(torch.rand(n)), (5, width), (d,)) for d, n in enumerate((5, width)))
        yield g.add(g.div(by_offsets(g, weight, index, offsets), scale), bias)
        yield g.add(by_offsets(g, weight, index, offsets), by_offsets(g, weight, index, others, samples))
    few = g.input(torch.randint(0, 50, (6,)).int())
    yield by_offsets(g, weight, few, g.input(torch.tensor([0, 2, 2, 5]).int()))
    yield by_offsets(g, weight, few, g.input(torch.tensor([0]).int()))
    yield by_offsets(g, g.input(torch.randn(64, 50, dtype=torch.float64).t()), index, offsets)


@case("bags of bfloat16 by offsets", 2e-2)
def _halves_by_offsets(g: Graph) -> Iterator[Any]:
    index, offsets = g.input(torch.randint(0, 50, (9,)).int()), g.input(torch.tensor([0, 2, 3, 5]).int())
    yield by_offsets(g, g.input(torch.randn(50, 64).bfloat16()), index, offsets)
    yield by_offsets(g, g.input(torch.randn(50, 64).half()), index, offsets, g.input(torch.randn(9).half()))


@case("mirrored and wrapped places, and what comes back from them", 2e-6)
def _edges(g: Graph) -> Iterator[Any]:
    x, grad = g.input(torch.randn(3, 7, 40)), g.input(torch.randn(3, 46))
    place = g.abs(g.sub(g.iota(47, torch.int64, x.meta["val"].device), 3))
    yield g.mul(g.index_select(x, 2, g.sub(39, g.abs(g.sub(39, place)))), 2.0)
    ends = g.slice(x, (0, 0, 37), (3, 7, 40), (1, 1, 1)), x, g.slice(x, (0, 0, 0), (3, 7, 5), (1, 1, 1))
    rows = g.cat(list(ends), 2)
    yield g.add(g.cat([rows, g.slice(rows, (0, 0, 0), (3, 2, 48), (1, 1, 1))], 1), 1.0)
    mirrored = g.flip(g.slice(grad, (0, 0), (3, 3), (1, 1)), (1,))
    yield g.add(g.slice(grad, (0, 3), (3, 43), (1, 1)), g.pad(mirrored, (0, 1), (0, 36), 0.0))


@case("rows of a unit matrix", 0)
def _unit(g: Graph) -> Iterator[Any]:
    classes = g.input(torch.randint(0, 9, (40,)))
    steps = g.iota(9, torch.int64, classes.meta["val"].device)
    rows = g.index_select(g.eq(*(g.broadcast_in_dim(steps, (9, 9), (d,)) for d in (0, 1))), 0, classes)
    yield g.convert_element_type(rows, torch.int64)
    yield g.sum(g.convert_element_type(g.convert_element_type(rows, torch.int64), torch.float32), (0,))


@case("searches", 0)
def _searches(g: Graph) -> Iterator[Any]:
    nan, inf = float("nan"), float("inf")
    x = torch.cat([torch.randn(60), torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0])])
    for count in (0, 1, 2, 5, 16, 31, 66):
        boundaries = torch.cat([x, x])[:count].round().sort()[0]
        for dtype in (torch.float32, torch.bfloat16):
            for right in (False, True):
                searched, found = g.input(x.to(dtype)), g.input(boundaries.to(dtype))
                yield g.call(aten.bucketize.Tensor, searched, found, right=right)
                yield g.add(g.call(aten.bucketize.Tensor, g.mul(searched, 2.0), found, out_int32=True, right=right), 1)
    rows, numbers = torch.randint(-9, 9, (3, 2, 7)).sort(-1)[0], torch.randint(-12, 12, (3, 2, 11))
    for side in ("left", "right"):
        places = g.call(aten.searchsorted.Tensor, g.input(rows), g.input(numbers), side=side)
        yield places
        yield g.gather(g.input(torch.randn(3, 2, 8)), 2, places)
    unsorted = g.input(torch.randn(50))
    yield g.call(aten.searchsorted.Tensor, unsorted, g.input(torch.randn(80)))


@case("one element of each row is added to", 2e-6)
def _one_of_each(g: Graph) -> Iterator[Any]:
    """A choice, not an addition at a computed place."""
    x, index = g.input(torch.randn(6, 40)), g.input(torch.randint(0, 40, (6, 1)))
    added = g.input(torch.randn(6, 1))
    zeros = g.broadcast_in_dim(g.mul(g.reshape(g.slice(added, (0, 0), (1, 1), (1, 1)), ()), 0.0), (6, 40), ())
    yield g.sub(g.call(aten.scatter_add.default, zeros, 1, index, added), g.exp(x))
    yield g.sum(g.call(aten.scatter_add.default, x, 1, index, added), (1,))
    yield g.call(
        aten.scatter_add.default,
        g.input(torch.randn(1, 40)),
        0,
        g.input(torch.zeros(1, 40, dtype=torch.int64)),
        g.input(torch.randn(1, 40)),
    )
