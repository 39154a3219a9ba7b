"""Graphs in which our own kernels draw, for `triton_cases`: the grids are small, so that threads have several turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magneto.inductor.loops.philox import vector_of
from magneto.inductor.lower.dropout import DROPOUT
from tests.inductor.lower.prim_graphs import Graph

DRAWS: dict[str, tuple[Callable[[Graph], Any], float]] = {}
SEED = -(1 << 62) + 987654321  # both halves of it and of the offset matter


def dropout(g: Graph, x: Any, threads: int = 256, p: float = 0.3, offset: int = (5 << 34) - 4) -> tuple[Any, Any]:
    meta = x.meta["val"]
    state = g.input(torch.tensor([SEED, offset]))
    both = g.call(DROPOUT, x, state, p, threads, vector_of(meta.numel, meta.dtype.itemsize))
    return g.item(both, 0), g.item(both, 1)


def draws(name: str, tolerance: float = 0) -> Callable[[Callable[[Graph], Any]], Callable[[Graph], Any]]:
    def add(build: Callable[[Graph], Any]) -> Callable[[Graph], Any]:
        DRAWS[f"drawn: {name}"] = build, tolerance
        return build

    return add


ROUNDED = {torch.bfloat16: 1e-2}  # the interpreter cuts bfloat16 off
for _dtype, *_sizes in (
    (torch.float32, 1, 1002, 4100, 5003),
    (torch.float64, 1003, 4096),
    (torch.float16, 4100, 8192),
    (torch.bfloat16, 5003, 9000),
):
    for _n in _sizes:

        @draws(f"{_n} of {_dtype}", ROUNDED.get(_dtype, 0))
        def _flat(g: Graph, dtype: torch.dtype = _dtype, n: int = _n) -> None:
            g.output(*dropout(g, g.input(torch.randn(n).to(dtype))))


@draws("one turn", 1e-2)
def _one(g: Graph) -> None:
    g.output(*dropout(g, g.input(torch.randn(40, 64).bfloat16()), 2560, 0.1))


@draws("zeros, infinities and nan")
def _special(g: Graph) -> None:
    g.output(*dropout(g, g.input(torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")] * 40)), p=0.5))


@draws("residual and layer norm", 1e-5)
def _norm(g: Graph, shape: tuple[int, int] = (12, 96)) -> None:
    x, skip = g.input(torch.randn(shape)), g.input(torch.randn(shape))
    y, mask = dropout(g, g.tanh(x))
    z = g.add(y, skip)
    v = g.var(z, (1,), 0.0)
    wide = lambda t: g.broadcast_in_dim(t, shape, (0,))  # noqa: E731
    g.output(g.mul(g.sub(z, wide(g.item(v, 1))), wide(g.rsqrt(g.add(g.item(v, 0), 1e-5)))), z, mask)


@draws("rows of halves, side by side, that threads' turns divide, or do not", 1e-2)
def _halves(g: Graph) -> None:
    """Threads take eight elements at a time, of which a row may begin in the middle."""
    found = []
    for shape, threads in (((12, 64), 64), ((4, 512), 256), ((6, 96), 64), ((52, 12), 64)):
        y, mask = dropout(g, g.input(torch.randn(shape).half()), threads, offset=(1 << 34) - 4)
        found += [g.sum(g.convert_element_type(y, torch.float32), (1,)), mask]
    g.output(*found)


@draws("rows that are no groups of four", 1e-5)
def _rows(g: Graph) -> None:
    y, mask = dropout(g, g.input(torch.randn(8, 70)))
    g.output(g.sum(y, (1,)), mask)


@draws("rows too long for one block", 1e-5)
@draws("long rows, in parts", 1e-5)
def _long(g: Graph) -> None:
    y, _ = dropout(g, g.input(torch.randn(2, 5_000)), 512)
    g.output(g.amax(y, (1,)))


@draws("read across")
def _across(g: Graph) -> None:
    y, _ = dropout(g, g.input(torch.randn(48, 64)))
    g.output(g.add(g.transpose(y, (1, 0)), g.input(torch.randn(64, 48))))


@draws("columns", 1e-5)
def _columns(g: Graph) -> None:
    y, _ = dropout(g, g.input(torch.randn(70, 48)))
    g.output(g.sum(y, (0,)))


@draws("one behind the other")
def _two(g: Graph) -> None:
    y, one = dropout(g, g.input(torch.randn(3, 5, 16)))
    z, other = dropout(g, g.mul(y, 2.0), offset=8)
    g.output(z, one, other)


@draws("a table")
def _table(g: Graph) -> None:
    g.output(*[y for n in (64, *[128] * 17) for y in dropout(g, g.input(torch.randn(n)), offset=4 * n)])


@draws("many equal kernels", 1e-5)
def _many(g: Graph) -> None:
    g.output(*[g.sum(dropout(g, g.input(torch.randn(4, 48)), offset=4 * n)[0], (1,)) for n in range(17)])
