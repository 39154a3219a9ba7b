"""Cases of triton_cases.py: cumulative sums and products, with what is computed in front of them and behind."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten
SCANS: dict[str, tuple[Callable[[Graph], Any], float]] = {}


def case(name: str, tolerance: float = 1e-5) -> Callable[[Callable[[Graph], Iterator[Any]]], None]:
    """A generator of what the graph returns."""

    def add(found: Callable[[Graph], Iterator[Any]]) -> None:
        SCANS[name] = (lambda g: g.output(*found(g))), tolerance

    return add


def along(g: Graph, x: Any, dim: int, **kwargs: Any) -> Any:
    return g.call(aten.cumsum.default, x, dim, **kwargs)


@case("sums in order")
def _sums(g: Graph) -> Iterator[Any]:
    """Along every dimension, of memory that lies otherwise too; long rows and long columns go on in the next turn. NaN and infinities stay in their rows."""
    special = torch.randn(5, 700)
    special[1, 3], special[2, 650], special[3, 200] = float("nan"), float("inf"), -float("inf")
    for x in (
        torch.randn(3, 70),
        torch.randn(4, 5, 6, 7),
        special,
        torch.randn(40, 30).t(),
        torch.randn(900),
        torch.randn(6, 8).expand(3, 6, 8),
    ):
        a = g.input(x)
        for dim in range(x.ndim):
            yield along(g, a, dim)
    yield along(g, g.input(torch.randn(60, 40).bfloat16()), 0, dtype=torch.float32)
    yield along(g, g.flip(g.input(torch.randn(7, 50)), (1,)), 1)


for _dtype in (torch.float64, torch.float16, torch.bfloat16):

    @case(f"sums in order of {_dtype}", {torch.float64: 1e-12, torch.float16: 4e-3}.get(_dtype, 3e-2))
    def _of_type(g: Graph, dtype: torch.dtype = _dtype) -> Iterator[Any]:
        x, whole = g.input(torch.randn(5, 260).to(dtype)), g.input(torch.randint(-2, 3, (5, 260)).to(dtype))
        yield along(g, whole, 1)  # eager's sums of halves are halves on a GPU: whole numbers are exact there too
        yield along(g, x, 0)
        yield g.call(aten.cumprod.default, g.mul(x, 0.5), 0)


@case("numbers in order", 0)
def _numbers(g: Graph) -> Iterator[Any]:
    """Bools and integers add up in 64 bits, or as they are told to."""
    i = g.input(torch.randint(-9, 9, (6, 300)))
    for x in (g.input(torch.rand(6, 300) < 0.5), i, g.input(torch.randint(0, 9, (6, 300), dtype=torch.uint8))):
        for dim in (0, 1):
            yield along(g, x, dim)
            yield along(g, x, dim, dtype=torch.int32)
    yield g.call(aten.cumprod.default, i, 1)
    ids = g.convert_element_type(g.ne(i, 1), torch.int64)
    yield g.where(g.eq(ids, 0), 1, g.add(g.mul(along(g, ids, 1), ids), 1))


@case("sums in order among loops")
def _among(g: Graph) -> Iterator[Any]:
    """Behind a softmax and in front of what normalises them again; behind their own maxima, and read along the other dimension."""
    x = g.input(torch.randn(6, 48))
    wide = lambda v: g.broadcast_in_dim(v, (6, 48), (0,))  # noqa: E731
    e = g.exp(g.sub(x, wide(g.amax(x, (1,)))))
    p = g.div(e, wide(g.sum(e, (1,))))
    sums = along(g, p, 1)
    yield g.lt(g.sub(sums, p), 0.7)
    yield g.div(sums, wide(g.amax(sums, (1,))))
    yield along(g, g.exp(g.neg(sums)), 1)
    yield g.sum(sums, (0,))
    yield g.call(aten.cumprod.default, along(g, p, 0), 1)


@case("sums in order of rows too long for one block")
def _too_long(g: Graph) -> Iterator[Any]:
    """The sums are computed anew in the loop that divides by their maximum."""
    x = g.input(torch.rand(3, 5000))
    sums = along(g, x, 1)
    yield g.div(sums, g.broadcast_in_dim(g.amax(sums, (1,)), (3, 5000), (0,)))
    yield sums
    yield g.call(aten.cumprod.default, g.add(g.mul(x, 0.001), 1.0), 1)


@case("sums in order, in pieces", 5e-5)
def _pieces(g: Graph) -> Iterator[Any]:
    """Few rows are cut, and begin with what is before them; a prime number of elements is not; one row is the library's."""
    x = g.input(torch.randn(2, 2400))
    yield g.mul(along(g, x, 1), 2.0)
    yield along(g, g.input(torch.randn(1000, 3)), 0)
    yield along(g, g.input(torch.randn(2, 240, 18).bfloat16().double()), 1)
    yield along(g, g.convert_element_type(g.gt(x, 0.0), torch.int64), 1)
    yield g.call(aten.cumprod.default, g.add(g.mul(x, 0.001), 1.0), 1)
    yield along(g, g.input(torch.randn(2, 1009)), 1)
    yield along(g, g.input(torch.randn(600)), 0)


@case("sums in order of turned pieces")
def _turned(g: Graph) -> Iterator[Any]:
    """Memory is walked in another order than rows, and a reduction beside it in the memory's."""
    x = g.input(torch.randn(8, 6, 16))
    turned = g.reshape(g.transpose(x, (2, 0, 1)), (16, 48))
    yield along(g, turned, 1)
    yield along(g, turned, 0)
    yield along(g, g.reshape(g.transpose(x, (1, 0, 2)), (768,)), 0)
    yield g.sum(g.transpose(x, (1, 0, 2)), (0, 1, 2))


for _name, _shape in (("", (3, 70)), (" too long for one block", (3, 1500)), (", in pieces", (2, 480))):

    @case(f"sums in order from the end{_name}")
    def _backwards(g: Graph, shape: tuple[int, int] = _shape) -> Iterator[Any]:
        """What is turned, added up and turned again, with loops around it; sums that go on from the beginning beside them."""
        x, y = g.input(torch.randn(shape)), g.input(torch.randn(min(shape[1], 300), 20))
        for a, dim in ((x, 1), (y, 0)):
            yield g.mul(g.flip(along(g, g.flip(g.exp(a), (dim,)), dim), (dim,)), a)
            yield along(g, g.exp(a), dim)
            yield g.flip(along(g, a, dim), (dim,))
            yield g.flip(along(g, a, dim), (1 - dim,))
            yield g.flip(along(g, a, dim), (0, 1))


def _extrema(g: Graph, x: Any, dim: int, op: Any) -> Iterator[Any]:
    found = g.call(op, x, dim)
    yield from (g.call(operator.getitem, found, n) for n in range(2))


@case("extrema in order, and their places", 0)
def _extrema_in_order(g: Graph) -> Iterator[Any]:
    """Of equal elements the last one's place, of NaN the last NaN's."""
    special = torch.randint(-3, 4, (5, 100)).float()
    special[1, 3], special[1, 90], special[2, 65], special[3, 20] = float("nan"), float("nan"), float("inf"), -float("inf")
    for x in (
        torch.randint(-3, 4, (3, 70)).float(),
        special,
        torch.full((4, 33), -float("inf")),
        torch.randn(2, 3, 4, 5),
        torch.randn(20, 10).t(),
        torch.randint(-9, 9, (3, 50)),
        torch.randn(3, 50).half(),
    ):
        a = g.input(x)
        for dim in range(x.ndim):
            yield from _extrema(g, a, dim, aten.cummax.default)
            yield from _extrema(g, a, dim, aten.cummin.default)
    b = g.exp(g.input(torch.randn(3, 40)))
    values, _ = _extrema(g, b, 1, aten.cummin.default)
    yield g.mul(values, 2.0)
    yield from _extrema(g, g.input(torch.randn(1056, 4)), 0, aten.cummin.default)


@case("logarithms of sums in order")
def _logarithms_of_sums(g: Graph) -> Iterator[Any]:
    special = torch.randn(6, 80) * 20
    special[1, 3], special[2, 65], special[3, 20], special[4] = float("nan"), float("inf"), -float("inf"), -float("inf")
    for x in (
        torch.randn(3, 70),
        special,
        torch.randn(2, 3, 4, 5),
        torch.randn(300, 40),
        torch.randn(2, 500),
        torch.randn(3, 30).double(),
    ):
        a = g.input(x)
        for dim in range(x.ndim):
            yield g.call(aten.logcumsumexp.default, a, dim)
    turned = g.flip(g.input(torch.randn(7, 50)), (1,))
    yield g.flip(g.call(aten.logcumsumexp.default, turned, 1), (1,))
    yield g.flip(g.call(aten.logcumsumexp.default, g.flip(g.input(torch.randn(300, 4)), (0,)), 0), (0,))
