"""Graphs for the Triton code generator, and the process that executes them by Triton's interpreter, whose switch must be set before Triton is imported.

`python -m tests.inductor.codegen.triton_cases` prints a JSON object: case -> "" or what was wrong. Sizes are small: the interpreter is slow.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from magneto.prims.decompose import decompose
from magneto.prims.decompositions import activations, pooling, rearranging, reductions, views
from tests.aot_autograd.test_partition import relu_behind_a_norm
from tests.inductor.codegen.triton_convolutions import CONVOLUTIONS, TILES
from tests.inductor.codegen.triton_draws import DRAWS
from tests.inductor.codegen.triton_gathers import GATHERS
from tests.inductor.codegen.triton_pairs import PAIRS
from tests.inductor.codegen.triton_scans import SCANS
from tests.inductor.lower.prim_graphs import Graph
from tests.prims.test_decompose import Recorder

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-30, 3e38, 1.0, -1.0, 2.5, -2.5, 0.5, 3.5, -0.75]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
UNARY = (
    "neg abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf floor ceil "
    "round trunc sign isnan isinf lgamma"
).split()
BINARY = "add sub mul div floordiv remainder fmod pow atan2 maximum minimum eq ne lt le gt ge".split()
HALF = {torch.float16: 2e-3, torch.bfloat16: 2e-2}

CASES: dict[str, tuple[Callable[[Graph], Any], float]] = {}


def case(name: str, tolerance: float = 2e-6) -> Callable[[Callable[[Graph], Any]], Callable[[Graph], Any]]:
    def add(build: Callable[[Graph], Any]) -> Callable[[Graph], Any]:
        CASES[name] = build, tolerance
        return build

    return add


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """The same shape in memory in different ways."""
    base = torch.randn(shape).mul(3).to(dtype)
    found = [base, torch.randn(*shape[:-1], shape[-1] * 2).to(dtype)[..., ::2], base[:1].expand(shape)]
    if len(shape) >= 2:
        found.append(torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2))
    if len(shape) == 4:
        found.append(base.to(memory_format=torch.channels_last))
    return found


for _dtype, _shape in itertools.product(FLOATS, [(5,), (3, 70), (2, 3, 5, 7)]):

    @case(f"pointwise {_dtype} {_shape}", HALF.get(_dtype, 2e-6))
    def _pointwise(g: Graph, dtype: torch.dtype = _dtype, shape: tuple[int, ...] = _shape) -> None:
        pairs = itertools.islice(itertools.permutations(layouts(shape, dtype), 2), 5)
        g.output(*[g.maximum(g.mul(a, 0.5), g.sub(b, a)) for x, y in pairs for a, b in [(g.input(x), g.input(y))]])


for _dtype in (torch.float32, torch.float64):

    @case(f"unary functions {_dtype}", 4e-6 if _dtype is torch.float32 else 1e-13)
    def _unary(g: Graph, dtype: torch.dtype = _dtype) -> None:
        x = g.input(torch.cat([torch.tensor(SPECIAL, dtype=dtype), torch.randn(80, dtype=dtype) * 3, torch.rand(20, dtype=dtype)]))
        g.output(*[getattr(g, name)(x) for name in UNARY])

    @case(f"binary functions {_dtype}")
    def _binary(g: Graph, dtype: torch.dtype = _dtype) -> None:
        numbers = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 7.0, -7.0, 0.1, float("inf"), float("nan")]
        pairs = torch.tensor(list(itertools.product(numbers, repeat=2)), dtype=dtype)
        x, y = g.input(pairs[:, 0].contiguous()), g.input(pairs[:, 1].contiguous())
        g.output(*[getattr(g, name)(x, y) for name in BINARY])


for _dtype in INTS:

    @case(f"integers {_dtype}", 0)
    def _integers(g: Graph, dtype: torch.dtype = _dtype) -> None:
        info = torch.iinfo(dtype)
        values, others = torch.randint(info.min, info.max, (100,), dtype=dtype), torch.randint(1, 12, (100,), dtype=dtype)
        if dtype is not torch.uint8:
            others[::3] *= -1
            others[5] = -1
        shifts = torch.randint(0, info.bits + 2, (100,), dtype=dtype)
        x, y, s = g.input(values), g.input(others), g.input(shifts)
        two = "add mul sub maximum minimum bitwise_and bitwise_or bitwise_xor floordiv remainder fmod eq lt ge".split()
        found = [getattr(g, name)(x, y) for name in two] + [getattr(g, name)(x) for name in "neg abs sign bitwise_not".split()]
        g.output(*found, g.shift_left(x, s), g.shift_right(x, s), g.pow(x, g.abs(y)))

    @case(f"numbers beyond {_dtype}", 0)
    def _beyond(g: Graph, dtype: torch.dtype = _dtype) -> None:
        """They wrap, as eager's kernels take them."""
        limit = 1 << torch.iinfo(dtype).bits
        x = g.input(torch.tensor([0, 1, 2, 7, 44, 100, 127, 3], dtype=dtype))
        numbers = [n for n in (limit // 2, limit - 56, -1, -limit // 2 - 7, limit + 3) if -(2**63) <= n < 2**63]
        two = "add sub mul floordiv remainder fmod eq lt ge bitwise_and bitwise_or bitwise_xor".split()
        g.output(*[getattr(g, name)(x, n) for n in numbers for name in two], *[g.sub(n, x) for n in numbers])


for _dtype in [*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool]:

    @case(f"conversions of {_dtype}", 0)
    def _conversions(g: Graph, source: torch.dtype = _dtype) -> None:
        values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 100.7, -100.7, 127.0, 3.99])
        x = g.input(values.abs().to(source) if source is torch.uint8 else values.to(source))
        targets = [t for t in [*FLOATS, torch.bool, *INTS] if t is not source]
        g.output(*[g.convert_element_type(x, t) for t in targets])


@case("comparisons with numbers", 0)
def _compared(g: Graph) -> None:
    """Numbers between those of narrower types."""
    single = torch.tensor([0.9, 0.1, 1 / 3, 16777216.0]).double()
    x, i = (
        g.input(torch.cat([single, torch.tensor([0.9, 0.1, 1 / 3, 16777217.0]).double()])),
        g.input(torch.tensor([2**40, 2**40 + 1, -(2**40)])),
    )
    found = [getattr(g, name)(x, n) for name in ("lt", "le", "gt", "ge", "eq", "ne") for n in (0.9, 0.1, 1 / 3, 16777217.0)]
    g.output(*found, *[getattr(g, name)(i, 2**40) for name in ("lt", "le", "gt", "ge", "eq", "ne")])


@case("bools", 0)
def _bools(g: Graph) -> None:
    x, y = g.input(torch.randn(50) > 0), g.input(torch.randn(50) > 0)
    two = "add mul maximum minimum bitwise_and bitwise_or bitwise_xor eq ne lt ge".split()
    g.output(
        *[getattr(g, name)(x, y) for name in two],
        g.logical_not(x),
        g.bitwise_not(x),
        g.where(x, 1.5, g.convert_element_type(y, torch.float32)),
    )


for _shape, _dims in [
    ((30,), (0,)),
    ((7, 30), (1,)),
    ((30, 17), (0,)),
    ((4, 5, 6, 7), (1, 3)),
    ((4, 5, 6, 7), (0, 2, 3)),
    ((3, 50), (0, 1)),
]:

    @case(f"reductions {_shape} over {_dims}", 2e-5)
    def _reductions(g: Graph, shape: tuple[int, ...] = _shape, dims: tuple[int, ...] = _dims) -> None:
        found = []
        for x in layouts(shape, torch.float32):
            a = g.input(x)
            v = g.var(a, dims, 1.0)
            found += [g.sum(a, dims), g.amax(a, dims), g.amin(a, dims), g.prod(g.mul(a, 0.3), dims), g.item(v, 0), g.item(v, 1)]
        g.output(*found)


for _dtype in [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]:

    @case(f"reductions of {_dtype}", HALF.get(_dtype, 1e-12))
    def _of_type(g: Graph, dtype: torch.dtype = _dtype) -> None:
        x = g.input((torch.randn(9, 33) * 3).abs().to(dtype))
        g.output(g.any(x, (1,)), g.all(x, (0,)), g.amax(x, (1,)), g.amin(x, (0,)), g.sum(x, (1,)), g.sum(x, (0,)))


@case("rows too long for one block", 2e-5)
def _looped(g: Graph) -> None:
    """Three walks over the row, the values computed anew in each."""
    x = g.input(torch.randn(2, 5000))
    wide = lambda v: g.broadcast_in_dim(v, (2, 5000), (0,))  # noqa: E731
    e = g.exp(g.sub(x, wide(g.amax(x, (1,)))))
    total = g.sum(e, (1,))
    g.output(g.div(e, wide(total)), g.log(total), g.any(g.gt(x, 9.0), (1,)))


@case("softmax of long rows, in parts", 2e-5)
def _long_softmax(g: Graph) -> None:
    """Softmax, and log-softmax of halves; a row of nothing but -inf, one with NaN, and chunks that are not full."""
    found = []
    for shape, dtype in (((2, 3, 24576), torch.float32), ((5, 20000), torch.bfloat16)):
        values = torch.randn(shape).mul(3).to(dtype)
        values.view(-1, shape[-1])[1], values.view(-1, shape[-1])[4, 7] = -float("inf"), float("nan")
        x = g.convert_element_type(g.input(values), torch.float32)
        last = len(shape) - 1
        wide = lambda v, shape=shape: g.broadcast_in_dim(v, shape, tuple(range(len(shape) - 1)))  # noqa: E731
        shifted = g.sub(x, wide(g.amax(x, (last,))))
        e = g.exp(shifted)
        total = g.sum(e, (last,))
        found.append(g.div(e, wide(total)) if dtype is torch.float32 else g.sub(shifted, wide(g.log(total))))
    g.output(*found)


@case("few long rows, in two steps", 3e-5)
def _split(g: Graph) -> None:
    """Whole dimensions, divisors, chunks of which the last is not full, and rows side by side."""
    x, y, z = g.input(torch.randn(40000)), g.input(torch.randn(12, 1031)), g.input(torch.randn(2, 3, 64, 100))
    v, w = g.var(z, (0, 2, 3), 1.0), g.var(y, (0,), 0.0)
    g.output(
        g.sum(x, (0,)),
        g.sum(y, (0, 1)),
        g.amax(y, (0, 1)),
        g.item(v, 0),
        g.item(v, 1),
        g.item(w, 0),
        g.any(g.gt(x, 9.0), (0,)),
        g.sum(y, (0,)),
    )


def exponentials(g: Graph, x: Any, shape: tuple[int, ...], dim: int) -> None:
    """softmax, log-softmax and logsumexp over one dimension."""
    kept = tuple(d for d in range(len(shape)) if d != dim)
    wide = lambda v: g.broadcast_in_dim(v, shape, kept)  # noqa: E731
    most = g.amax(x, (dim,))
    away = g.sub(x, wide(most))
    e = g.exp(away)
    safe = g.where(g.isinf(most), 0.0, most)
    g.output(
        g.div(e, wide(g.sum(e, (dim,)))),
        g.sub(away, wide(g.log(g.sum(e, (dim,))))),
        g.add(g.log(g.sum(g.exp(g.sub(x, wide(safe))), (dim,))), safe),
        g.sum(x, (dim,)),
    )


def long_rows(rows: int, length: int) -> torch.Tensor:
    """The first rows hold infinities and NaN, in a few places, in whole chunks, everywhere."""
    x = torch.randn(rows, length) * 20
    inf = float("inf")
    x[0, : length // 2], x[1], x[2, 7], x[3, length - 3], x[4, 5] = -inf, -inf, inf, float("nan"), -inf
    x[5, : length // 2], x[5, length - 1], x[6] = -inf, inf, inf
    return x


for _length, _dtype in ((4099, torch.bfloat16),):

    @case(f"exponentials of few long rows, of {_length}", 3e-5)
    def _online(g: Graph, length: int = _length, dtype: torch.dtype = _dtype) -> None:
        """Chunks of equal size, and a last one that is shorter."""
        x = g.input(long_rows(8, length).to(dtype))
        exponentials(g, x if dtype is torch.float32 else g.convert_element_type(x, torch.float32), (8, length), 1)


@case("long rows across memory", 3e-5)
def _across(g: Graph) -> None:
    """A variance in one walk, whose last turn is not full; a softmax of rows that a block holds, and one of rows that it does not."""
    x, y, z = g.input(torch.randn(1030, 20) * 3 + 50), g.input(torch.randn(2, 200, 20)), g.input(torch.randn(1, 600, 20))
    v = g.var(x, (0,), 1.0)
    found = [g.item(v, 0), g.item(v, 1)]
    for rows in (y, z):
        shape = tuple(rows.meta["val"].shape)
        wide = lambda v, shape=shape: g.broadcast_in_dim(v, shape, (0, 2))  # noqa: E731
        e = g.exp(g.sub(rows, wide(g.amax(rows, (1,)))))
        found.append(g.div(e, wide(g.sum(e, (1,)))))
    g.output(*found)


@case("channels side by side, their groups in parts", 3e-5)
def _groups(g: Graph) -> None:
    x = g.reshape(g.transpose(g.input(torch.randn(2, 256, 32) * 2 + 7), (0, 2, 1)), (2, 8, 4, 256))
    v = g.var(x, (2, 3), 0.0)
    g.output(g.item(v, 0), g.item(v, 1), g.sum(x, (2, 3)), g.amax(x, (2, 3)))


@case("a sum of everything that rows make, in parts", 3e-5)
def _rows_read(g: Graph) -> None:
    x = g.input(torch.randn(150, 130))
    wide = lambda v: g.broadcast_in_dim(v, (150, 130), (0,))  # noqa: E731
    e = g.exp(g.sub(x, wide(g.amax(x, (1,)))))
    p = g.div(e, wide(g.sum(e, (1,))))
    g.output(p, g.sum(g.mul(p, x), (0, 1)))


@case("products with one vector", 4e-2)
def _vectors(g: Graph) -> None:
    """As a matrix of one row, with a bias; of integers with scales."""
    w, x = g.input(torch.randn(530, 512).bfloat16()), g.input(torch.randn(1, 512).bfloat16())
    scaled = g.mul(g.convert_element_type(g.input(torch.randint(-9, 9, (530, 512), dtype=torch.int8)), torch.bfloat16), 0.125)
    mm, addmm, mv = (getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "mv"))
    bias = g.input(torch.randn(530).bfloat16())
    g.output(
        g.call(addmm, bias, g.abs(g.mul(x, 0.5)), g.transpose(w, (1, 0))),
        g.call(mm, x, g.transpose(scaled, (1, 0))),
        g.call(mv, w, g.reshape(x, (512,))),
    )


@case("long rows of integers", 0)
def _looped_search(g: Graph) -> None:
    x = g.input(torch.randint(-50, 50, (1, 20000)))
    g.output(g.sum(x, (1,)), g.amax(x, (1,)))


for _dtype in (torch.float32, torch.int64, torch.bfloat16):

    @case(f"searches {_dtype}", 0)
    def _searches(g: Graph, dtype: torch.dtype = _dtype) -> None:
        rows = (torch.randn(8, 40) * 3).to(dtype)
        if dtype.is_floating_point:
            rows[0], rows[1], rows[2] = -float("inf"), float("inf"), float("nan")
            rows[3, 20], rows[4, 39], rows[5, 1:] = float("nan"), float("nan"), -float("inf")
            rows[6], rows[6, ::3] = 0.0, -0.0
        x = g.input(rows)
        g.output(g.argmax(x, 1), g.argmin(x, 1), g.argmax(x, 0), g.argmin(x, 0), g.amax(x, (1,)), g.amin(x, (0,)))


@case("softmax and layer norm", 1e-5)
def _norms(g: Graph) -> None:
    x = g.input(torch.randn(6, 48))
    wide = lambda v: g.broadcast_in_dim(v, (6, 48), (0,))  # noqa: E731
    e = g.exp(g.sub(x, wide(g.amax(x, (1,)))))
    v = g.var(x, (1,), 0.0)
    n = g.mul(g.sub(x, wide(g.item(v, 1))), wide(g.rsqrt(g.add(g.item(v, 0), 1e-5))))
    g.output(g.div(e, wide(g.sum(e, (1,)))), g.add(n, x), g.sum(n, (0,)))


def converted(g: Graph, x: Any, dtype: torch.dtype) -> Any:
    return x if x.meta["val"].dtype is dtype else g.convert_element_type(x, dtype)


def norm_backward(g: Graph, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Rows are reduced, and summed up for the weight and the bias."""
    rows, length = shape
    x, grad, weight = (converted(g, g.input(torch.randn(size).to(dtype)), torch.float32) for size in (shape, shape, (length,)))
    along = lambda v: g.broadcast_in_dim(v, shape, (0,))  # noqa: E731
    mean, scale = g.input(torch.randn(rows)), g.input(torch.rand(rows))
    n = g.mul(g.sub(x, along(mean)), along(scale))
    weighted = g.mul(grad, g.broadcast_in_dim(weight, shape, (1,)))
    a, b = g.sum(g.mul(weighted, n), (1,)), g.sum(weighted, (1,))
    dx = g.mul(g.sub(weighted, g.mul(g.add(g.mul(n, along(a)), along(b)), 1 / length)), along(scale))
    dw, db = g.sum(g.mul(grad, n), (0,)), g.sum(grad, (0,))
    return converted(g, dx, dtype), converted(g, dw, dtype), converted(g, db, dtype)


@case("sums of columns beside sums of rows", 2e-5)
def _columns(g: Graph) -> None:
    g.output(*norm_backward(g, (32, 48)))


for _dtype, _shape in itertools.product([torch.float32, torch.bfloat16], [(1, 48), (197, 33), (2 * 5 * 19, 100)]):

    @case(f"norm backward {_dtype} {_shape}", HALF.get(_dtype, 2e-5))
    def _backward(g: Graph, shape: tuple[int, int] = _shape, dtype: torch.dtype = _dtype) -> None:
        g.output(*norm_backward(g, shape, dtype))


def heads(g: Graph, batch: int = 2, length: int = 7, count: int = 3, size: int = 16) -> Any:
    """Gradients of three projections by (batch, head, place, channel), as rows of all their channels."""
    parts = [g.transpose(g.input(torch.randn(batch, count, length, size)), (2, 0, 1, 3)) for _ in range(3)]
    return g.cat([g.reshape(part, (length, batch, count * size)) for part in parts], 2)


@case("sums over rows of three tensors by heads, in parts", 2e-5)
def _heads(g: Graph) -> None:
    rows = heads(g, 5, 31)
    g.output(g.sum(rows, (0, 1)), g.sum(g.exp(rows), (0,)), rows)


@case("sums of many operands", 2e-5)
def _operands(g: Graph) -> None:
    parts = [g.input(torch.randn(150, 70)) for _ in range(14)]
    total = parts[0]
    for part in parts[1:]:
        total = g.mul(g.add(total, part), 0.5)
    g.output(g.sum(total, (0,)), g.sum(g.mul(total, parts[3]), (0,)))


for _dtype in (torch.float32, torch.float64, torch.bfloat16):

    @case(f"variances in parts of {_dtype}", 2e-5)
    def _variances(g: Graph, dtype: torch.dtype = _dtype) -> None:
        """Along contiguous memory and across it; rows that a block holds and rows that it walks; the last one has no equal parts."""
        found = []
        for shape, dims in (
            ((4, 600, 20), (0, 1)),
            ((4, 60, 20), (0, 1)),
            ((3, 40_000), (1,)),
            ((2, 30, 300), (1, 2)),
            ((2, 20_011), (1,)),
        ):
            x = converted(g, g.input((torch.randn(shape) + 10).to(dtype)), torch.float64 if dtype is torch.float64 else torch.float32)
            v = g.var(x, dims, 1.0)
            found += [g.item(v, 0), g.item(v, 1)]
        g.output(*found)


@case("rows and columns told apart", 0)
def _by_rows(g: Graph) -> None:
    shape = (350, 768)
    rows, columns = g.broadcast_in_dim(g.input(torch.randn(350)), shape, (0,)), g.broadcast_in_dim(g.input(torch.randn(768)), shape, (1,))
    g.output(g.add(g.mul(g.input(torch.randn(shape)), rows), columns))


for _dtype in (torch.float16, torch.bfloat16):

    @case(f"functions of {_dtype}", HALF[_dtype])
    def _of_halves(g: Graph, dtype: torch.dtype = _dtype) -> None:
        numbers = torch.cat(
            [
                torch.tensor([0.0, -0.0, 1e-4, -1e-4, float("inf"), -float("inf"), float("nan"), 4.0, -4.0, 10.0, -10.0, 80.0, -80.0]),
                torch.randn(100) * 2,
            ]
        )
        x = g.input(numbers.to(dtype))
        g.output(g.exp(x), g.erf(x), g.mul(g.mul(x, 0.5), g.add(g.erf(g.mul(x, 0.7071)), 1.0)))


@case("transposed operands", 0)
def _transposed(g: Graph) -> None:
    x, y = g.input(torch.randn(40, 33)), g.input(torch.randn(2, 30, 35))
    g.output(g.add(g.transpose(x, (1, 0)), 1.0), g.mul(g.transpose(y, (0, 2, 1)), g.input(torch.randn(2, 35, 30))))


@case("cut, turned, joined and padded", 0)
def _views(g: Graph) -> None:
    x, y = g.input(torch.randn(6, 10)), g.input(torch.randn(6, 3))
    joined = g.cat([g.exp(x), y], 1)
    g.output(
        g.mul(g.slice(x, (1, 0), (5, 9), (2, 3)), 2.0),
        g.flip(x, (0, 1)),
        joined,
        g.pad(g.add(x, 1.0), (1, 2), (0, 3), 5.0),
        g.reshape(joined, (13, 6)),
    )


@case("single elements among zeros", 0)
def _alone(g: Graph) -> None:
    """Read once for all places, where another result reads the same element too: the zeros stay."""
    grad, x = g.input(torch.randn(1, 2)), g.input(torch.randn(1, 6))
    first, second = (g.broadcast_in_dim(g.reshape(g.slice(grad, (0, k), (1, k + 1), (1, 1)), ()), (1, 1), ()) for k in (0, 1))
    other = g.mul(first, g.slice(x, (0, 1), (1, 2), (1, 1)))
    g.output(
        g.add(g.pad(second, (0, 1), (0, 4), 0.0), g.pad(other, (0, 0), (0, 5), 0.0)),
        g.add(g.pad(g.neg(second), (0, 0), (0, 5), 0.0), g.pad(first, (0, 3), (0, 2), 0.0)),
    )


def pooled(g: Graph, args: tuple[Any, ...], x: torch.Tensor, seen: bool) -> None:
    """Maxima and their gradient, which reads places in the windows; `seen`: what somebody sees of the indices. As decomposed for a GPU."""
    aten = torch.ops.aten
    r = Recorder(x, torch.randint(-4, 5, aten.max_pool2d_with_indices(x, *args)[0].shape).to(x.dtype))
    of, grad = r.nodes
    pair = r(aten.max_pool2d_with_indices.default, r(aten.mul.Tensor, of, 2.0), *args)
    top, place = (r(operator.getitem, pair, k) for k in (0, 1))
    with mock.patch.object(pooling, "on_gpu", lambda x: True):
        back = r(aten.max_pool2d_with_indices_backward.default, grad, of, *args, place)
        g.fx = decompose(r.output(top, back, *([place] if seen else [])))
    g.inputs, g.expected = r.inputs, tuple(r.values[n] for n in r.graph.output_node().args[0])


@case("gradients of averages of single elements", 0)
def _single(g: Graph) -> None:
    """What is looked up lies at a place that is no loop variable."""
    aten, last = torch.ops.aten, torch.channels_last
    r = Recorder(torch.randn(1, 3, 1, 3), torch.randn(1, 3, 1, 3).to(memory_format=last), torch.randn(2, 3, 4, 1))
    args = [1, 1], [1, 1], [0, 0], False, True, None
    with mock.patch.object(pooling, "on_gpu", lambda x: True):
        back = (r(aten.avg_pool2d_backward.default, grad, grad, *args) for grad in r.nodes)
        g.fx = decompose(r.output(*back))
    g.inputs, g.expected = r.inputs, tuple(r.values[n] for n in r.graph.output_node().args[0])


@case("memory along rows and along what is reduced", 5e-5)
def _permuted(g: Graph) -> None:
    """A norm of permuted images: rows walk sectors of both, sums of columns are cut; maxima beside their places are not."""
    x, grad = g.input(torch.randn(2, 24, 9, 40)), g.input(torch.randn(2, 9, 40, 24))
    along = g.transpose(x, (0, 2, 3, 1))
    product = g.mul(grad, along)
    total = g.broadcast_in_dim(g.sum(product, (3,)), (2, 9, 40, 24), (0, 1, 2))
    wide = g.input(torch.randn(64, 2100))
    tall = g.input(torch.randn(2100, 64))
    beside = g.mul(wide, g.transpose(tall, (1, 0)))
    rows = g.broadcast_in_dim(g.sum(beside, (1,)), (64, 2100), (0,))
    m = g.input(torch.randn(3, 700, 16))
    g.output(g.sub(product, total), g.sum(product, (0, 1, 2)), g.sub(beside, rows), g.argmax(m, 1), g.amax(m, (1,)))


@case("sums of small integers", 0)
def _small(g: Graph) -> None:
    x, found = g.input(torch.randn(300, 70)), []
    for t in (g.gt(x, 0), *(g.input(torch.randint(0, 100, (300, 70), dtype=dtype)) for dtype in (torch.int8, torch.uint8, torch.int16))):
        whole = g.convert_element_type(t, torch.int64)
        found += [g.sum(whole, (0,)), g.sum(whole, (0, 1))]
    g.output(*found)


@case("steps", 0)
def _steps(g: Graph) -> None:
    """Gradients of slices with steps and writes into them; one element of each row is written."""
    aten = torch.ops.aten
    r = Recorder(torch.randn(4, 6, 5), torch.randn(9, 12, 11), torch.randint(0, 12, (9, 1, 11)))
    grad, x, at = r.nodes
    found = [r(aten.slice_backward.default, grad, [4, 6, 10 + k], 2, k, 10 + k, 2) for k in (0, 1)]
    found += [r(aten.slice_scatter.default, x, r(aten.slice.Tensor, x, d, 1, 9, 3), d, k, 8 + k, 3) for d in (0, 1, 2) for k in (0, 1)]
    found.append(r(aten.scatter.src, x, 1, at, r(aten.slice.Tensor, x, 1, 3, 4)))
    with mock.patch.object(views, "on_gpu", lambda x: True):
        g.fx = decompose(r.output(*found))
    assert not any("slice" in str(node.target) for node in g.fx.nodes if isinstance(node.target, torch._ops.OpOverload))
    g.inputs, g.expected = r.inputs, tuple(r.values[n] for n in found)


@case("diagonals, and the gradient of a sigmoid's logarithm", 1e-5)
def _diagonals(g: Graph) -> None:
    aten = torch.ops.aten
    y = torch.randn(40) * 30
    r = Recorder(torch.randn(3, 6), y, torch.exp(-y.abs()))
    x = r.nodes[0]
    found = [r(aten.diag_embed.default, x, *args) for args in ((), (2,), (-1,), (1, 0, 2), (-2, -1, 0))]
    found += [
        r(aten.diagonal_backward.default, x, sizes, *args)
        for sizes, args in (([3, 6, 6], (0, 1, 2)), ([7, 3, 6], (1, 2, 0)), ([6, 3, 9], (-2, 2, 0)))
    ]
    found.append(r(aten.log_sigmoid_backward.default, r.nodes[1], *r.nodes[1:]))
    with ExitStack() as stack:
        for module in (views, rearranging, activations):
            stack.enter_context(mock.patch.object(module, "on_gpu", lambda x: True))
        g.fx = decompose(r.output(*found))
    assert not any("dia" in str(node.target) or "sig" in str(node.target) for node in g.fx.nodes)
    g.inputs, g.expected = r.inputs, tuple(r.values[n] for n in found)


@case("gradients of products", 1e-5)
def _products(g: Graph) -> None:
    """Of few and of many factors, in order; with zeros, and with none."""
    aten, found = torch.ops.aten, []
    some = torch.rand(6, 30) + 0.5
    holed = some.clone()
    holed[1, 3] = holed[2, 4] = holed[2, 29] = holed[4, 0] = 0
    r = Recorder(some, holed, torch.rand(6, 30))
    for x in r.nodes[:2]:
        for name, op, args in (
            ("prod", aten.prod.dim_int, (1, False)),
            ("prod", aten.prod.dim_int, (0, True)),
            ("cumprod", aten.cumprod.default, (1,)),
        ):
            result, dims = r(op, x, *args), (*args, False)[:2]
            grad = r.nodes[2] if name == "cumprod" else r(aten.mul.Tensor, result, 2.0)
            found.append(r(torch.ops.magneto.looking_backward.default, grad, name, x, result, *dims, None))
    with mock.patch.object(reductions, "on_gpu", lambda x: True):
        g.fx = decompose(r.output(*found))
    assert not any("looking" in str(node.target) for node in g.fx.nodes)
    g.inputs, g.expected = r.inputs, tuple(r.values[n] for n in found)


for _dtype, _seen in ((torch.float32, True), (torch.float32, False), (torch.bfloat16, False)):

    @case(f"maxima of windows of {_dtype}{', seen' if _seen else ''}", 0)
    def _windows(g: Graph, dtype: torch.dtype = _dtype, seen: bool = _seen) -> None:
        x = torch.randint(-3, 4, (2, 4, 9, 12)).to(dtype)
        x.view(-1)[::7], x.view(-1)[5::40], x[0, 0] = -float("inf"), float("nan"), -float("inf")
        pooled(
            g, ([3, 3], [2, 2], [1, 1], [1, 1], seen), x.to(memory_format=torch.contiguous_format if seen else torch.channels_last), seen
        )


@case("gradients of a norm in front of a relu", 2e-3)
def _relu_behind_a_norm(g: Graph) -> None:
    cut, g.inputs, _ = relu_behind_a_norm(20)
    g.fx = cut.backward
    g.expected = torch.fx.Interpreter(torch.fx.GraphModule({}, g.fx)).run(*g.inputs)


@case("maxima of windows with gaps", 0)
def _dilated(g: Graph) -> None:
    x = g.input(torch.randint(-3, 4, (3, 9, 12)).float())
    args = (x, (2, 3), (2, 1), (1, 1), (3, 2), (4, 10))
    g.output(g.window_max(*args), g.window_argmax(*args))


@case("looked up", 0)
def _lookups(g: Graph) -> None:
    table, index, rows = g.input(torch.randn(10, 16)), g.input(torch.tensor([1, 2, 9, 0])), g.input(torch.randint(0, 10, (4, 16)))
    g.output(g.mul(g.index_select(table, 0, index), 2.0), g.add(g.gather(table, 0, rows), 1.0))


@case("numbers of indices", 0)
def _indices(g: Graph) -> None:
    i = g.iota(60, torch.int64, torch.device("cpu"))
    x = g.input(torch.randn(60))
    g.output(g.mul(g.convert_element_type(g.remainder(g.sub(g.mul(i, 7), 100), 13), torch.float32), x), g.where(g.lt(i, 30), x, 0.0))


@case("products beside loops", 1e-5)
def _library(g: Graph) -> None:
    x, w = g.input(torch.randn(12, 16)), g.input(torch.randn(16, 8))
    y = g.call(torch.ops.aten.mm.default, g.tanh(x), w)
    g.output(g.mul(y, g.broadcast_in_dim(g.sum(y, (1,)), (12, 8), (0,))), g.transpose(y, (1, 0)))


for _dtype in (torch.float32, torch.bfloat16):

    @case(f"a table of {_dtype}", HALF.get(_dtype, 2e-6))
    def _table(g: Graph, dtype: torch.dtype = _dtype) -> None:
        """Sizes around a block, a scale of its own for each, and two memories that begin anywhere."""
        found = []
        for n, size in enumerate([1, 2, 7, 1023, 1024, 1025, 2048, 3000, *range(40, 49)]):
            x, y = torch.randn(size + 3).to(dtype)[n % 4 :][:size], torch.randn(size).to(dtype)
            scale = g.broadcast_in_dim(g.input(torch.tensor(0.5 + n, dtype=dtype)), (size,), ())
            found.append(g.add(g.mul(g.input(x), scale), g.tanh(g.input(y))))
        g.output(*found)


@case("a table of quotients by a number")
def _quotients(g: Graph) -> None:
    found = []
    for n, size in enumerate([1, 7, 1024, 3000, *range(40, 56)]):
        by = g.broadcast_in_dim(g.sqrt(g.input(torch.tensor(0.5 + n))), (size,), ())
        found.append(g.div(g.input(torch.randn(size)), by))
    g.output(*found)


@case("a table of single numbers")
def _numbers(g: Graph) -> None:
    g.output(*[g.add(g.sqrt(g.input(torch.tensor(float(n)))), 1.0) for n in range(20)])


for _dtype, _tolerance in HALF.items():

    @case(f"gelu of {_dtype}", _tolerance)
    def _gelu(g: Graph, dtype: torch.dtype = _dtype) -> None:
        """1 + erf(x) is short here; a thousand times of it shows an error of 2e-6."""
        edges = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e4, -3e4])
        v = g.convert_element_type(g.input(torch.cat([torch.linspace(-6, 6, 3001), edges]).to(dtype)), torch.float32)
        y = g.add(g.erf(g.mul(v, 0.7071067811865476)), 1.0)
        g.output(*[g.convert_element_type(r, dtype) for r in (g.mul(y, 1000.0), g.mul(g.mul(v, 0.5), y))])


FLOATS_OF_A_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2)
for _small in FLOATS_OF_A_BYTE:

    @case(f"from and to {_small}", 0.0)
    def _bytes(g: Graph, small: torch.dtype = _small) -> None:
        """Every byte, every rounding near each of them, what is too large, and types in between; a view of what is converted, and a reduction in front of it."""
        every = torch.arange(256, dtype=torch.uint8).view(small)
        near = every.float().nan_to_num(1.0, 5e4, -5e4)
        between = torch.cat(
            [
                near,
                (near + near.roll(-1)) / 2,
                near * 1.03,
                near * 0.97,
                near * 0.5,
                torch.tensor([464.0, 464.1, 480.0, 1e9, float("inf"), -float("inf"), float("nan"), 1e-30]),
            ]
        )
        to = lambda x, dtype: g.convert_element_type(x, dtype)  # noqa: E731
        byte, wide = (
            g.input(every),
            g.input(torch.cat([between, torch.nextafter(between, torch.zeros(())), torch.nextafter(between, between * 2)])),
        )
        narrow = to(wide, small)
        scaled = g.mul(to(g.reshape(byte, (16, 16)), torch.float32), 3.0)
        rows = g.div(scaled, g.broadcast_in_dim(g.amax(g.abs(g.where(g.isnan(scaled), g.mul(scaled, 0.0), scaled)), (1,)), (16, 16), (0,)))
        found = [
            narrow,
            to(scaled, small),
            to(rows, small),
            to(g.input(between.bfloat16()), small),
            to(g.input(between.double()), small),
            to(g.input(torch.arange(600)), small),
        ]
        plain = [to(byte, torch.float32), to(byte, torch.bfloat16), to(byte, torch.float64), g.add(to(narrow, torch.float32), 1.0)]
        turned = g.transpose(to(g.input(torch.randn(6, 40)), small), (1, 0))
        g.output(*found, *plain, to(turned, torch.float32))


@case("windows side by side, and their sums")
def _windows(g: Graph) -> None:
    r, found = Recorder(torch.randn(2, 3, 9, 8)), []
    for way in (([3, 3], [1, 1], [1, 1], [1, 1]), ([3, 2], [1, 1], [1, 0], [2, 3]), ([2, 2], [3, 2], [2, 1], [1, 1])):
        columns = r(torch.ops.aten.im2col.default, r.nodes[0], *way)
        found += [columns, r(torch.ops.aten.col2im.default, columns, [9, 8], *way)]
    g.fx, g.inputs, g.expected = decompose(r.output(*found)), r.inputs, tuple(r.values[n] for n in found)


@case("places between elements", 1e-5)
def _sampled(g: Graph) -> None:
    r = Recorder(torch.randn(2, 3, 9, 8), torch.rand(2, 5, 7, 2) * 2.4 - 1.2)
    found = [r(torch.ops.aten.grid_sampler_2d.default, *r.nodes, 0, padding, corners) for padding, corners in ((0, False), (1, True))]
    with mock.patch.object(pooling, "on_gpu", lambda x: True):
        g.fx, g.inputs, g.expected = decompose(r.output(*found)), r.inputs, tuple(r.values[n] for n in found)


CASES.update(GATHERS)
CASES.update(PAIRS)
CASES.update(DRAWS)
CASES.update(SCANS)
CASES.update(CONVOLUTIONS)

PRODUCTS: dict[str, Any] = dict(TILES)
"""Cases in which kernels of ours compute products too: tiles."""


def product(name: str, *tiles: int) -> Callable[[Any], Any]:
    PRODUCTS[name] = tiles
    return case(name, 2e-3)


@product("a product with bias and residual", 32, 32, 32, 4, 3)
def _product(g: Graph) -> None:
    x, w, bias = torch.randn(80, 100).half(), (torch.randn(72, 100) * 0.2).half(), torch.randn(72).half()
    y = g.call(torch.ops.aten.addmm.default, g.input(bias), g.input(x), g.input(w.t()))
    g.output(g.add(g.tanh(y), g.input(torch.randn(80, 72).half())))


@product("a product seen in three dimensions", 32, 32, 32, 4, 3)
def _product_of_a_view(g: Graph) -> None:
    y = g.call(torch.ops.aten.mm.default, g.input(torch.randn(80, 64).half()), g.input((torch.randn(64, 128) * 0.2).half()))
    wide = g.reshape(y, (4, 20, 128))
    g.output(g.mul(g.tanh(wide), g.broadcast_in_dim(g.input(torch.randn(4, 128).half()), (4, 20, 128), (0, 2))))


@product("products whose loops are alike", 32, 32, 32, 4, 3)
def _products_of_like_loops(g: Graph) -> None:
    """Terms, and which factor lies turned, are all that differs; the same loops stand alone too."""
    made = [torch.randn(64, 72).half()]
    for terms, turned in ((64, False), (64, True), (96, False), (64, False)):
        w = (torch.randn(terms, 72) * 0.2).half()
        y = g.call(torch.ops.aten.mm.default, g.input(torch.randn(64, terms).half()), g.input(w.t().contiguous().t() if turned else w))
        made.append(y)
    g.output(*(g.tanh(y if k else g.input(y)) for k, y in enumerate(made)))


def _batched(g: Graph) -> None:
    """The second factors lie turned and apart, the bias is spread over rows, the result is read with heads and a batch of its own."""
    a, b = torch.randn(6, 80, 72).half(), (torch.randn(6, 90, 80) * 0.2).half()[:, :, :72].mT
    bias = torch.randn(6, 1, 90).half()
    y = g.call(torch.ops.aten.baddbmm.default, g.input(bias), g.input(a), g.input(b))
    heads = g.reshape(y, (2, 3, 80, 90))
    g.output(g.mul(g.tanh(heads), g.broadcast_in_dim(g.input(torch.randn(2, 80).half()), (2, 3, 80, 90), (0, 2))))


product("batched products", 32, 32, 32, 4, 3)(_batched)
product("batched products, few programs", 32, 64, 16, 4, 3, 0, 4)(_batched)


def _described(g: Graph, turned: bool) -> None:
    """Rows, columns and terms end within a block, and operands begin inside their memory; one of them is read behind the product too."""
    x, w = torch.randn(100, 96).half()[16:, :72], (torch.randn(80, 72) * 0.2).half()
    left, right = g.input(x), g.input(w.t() if not turned else w.t().contiguous())
    if turned:
        left = g.input(torch.randn(72, 96).half()[:, 8:].t())
    y = g.call(torch.ops.aten.mm.default, left, right)
    g.output(g.tanh(y) if turned else g.add(g.tanh(y), g.broadcast_in_dim(g.slice(left, (0, 0), (84, 1), (1, 1)), (84, 80), (0, 1))))


product("a product by descriptors", 32, 16, 32, 4, 3, 1)(lambda g: _described(g, False))
product("a product by descriptors of turned memory, few programs", 32, 16, 32, 4, 3, 1, 5)(lambda g: _described(g, True))


product("a product by descriptors, in parts", 32, 32, 32, 4, 3, 1, 5, 2)(lambda g: _described(g, False))


@product("a product by descriptors, in parts, stored turned", 32, 64, 32, 4, 3, 1, 0, 2)
def _stored_turned(g: Graph) -> None:
    """Halves of the last blocks lie beyond the matrix. The result does not lie as the product does, and there are two."""
    y = g.call(torch.ops.aten.addmm.default, *(g.input(torch.randn(n).mul(0.3).half()) for n in ((80,), (72, 64), (64, 80))))
    g.output(g.transpose(g.tanh(y), (1, 0)), g.exp(y))


to = lambda g, x, dtype: g.convert_element_type(x, dtype)  # noqa: E731


@product("products of float32", 32, 32, 32, 4, 3)
def _products_of_floats(g: Graph) -> None:
    """In full: one with bias and residual, whose terms end within a block; one with nothing behind it."""
    x, w, y = g.input(torch.randn(70, 72)), g.input(torch.randn(80, 72) * 0.2), g.input(torch.randn(3, 66, 70))
    first = g.call(torch.ops.aten.addmm.default, g.input(torch.randn(80)), x, g.transpose(w, (1, 0)))
    g.output(g.add(g.tanh(first), g.input(torch.randn(70, 80))), g.call(torch.ops.aten.bmm.default, y, g.input(torch.randn(3, 70, 64))))


@product("a product of what a gelu makes", 32, 32, 32, 4, 3, 0, 0, 1, 1)
def _product_of_a_gelu(g: Graph) -> None:
    """Rows, terms and columns end within a block; what is made is rounded before it is multiplied."""
    x = to(g, g.input(torch.randn(70, 72).half()), torch.float32)
    half = to(g, g.mul(g.mul(x, 0.5), g.add(g.erf(g.mul(x, 0.7071067811865476)), 1.0)), torch.float16)
    g.output(g.call(torch.ops.aten.mm.default, half, g.input((torch.randn(72, 80) * 0.2).half())))


@product("a product with integers as weights, turned", 32, 32, 32, 4, 3, 1, 5, 1, 2)
def _product_of_integers(g: Graph) -> None:
    """The scale of each column is read once, ahead of the loop; loops follow the product."""
    w, scale = g.input(torch.randint(-128, 128, (96, 72), dtype=torch.int8)), g.input((torch.rand(96) / 64).half())
    wide = g.mul(to(g, w, torch.float16), g.broadcast_in_dim(scale, (96, 72), (0,)))
    g.output(g.tanh(g.call(torch.ops.aten.mm.default, g.input(torch.randn(80, 72).half()), g.transpose(wide, (1, 0)))))


@product("a product of two that are computed, in a batch", 32, 32, 32, 4, 3, 0, 4, 1, 3)
def _product_of_computed(g: Graph) -> None:
    """The rows of the first are two dimensions where it is computed; the second is masked by its terms."""
    x, mask = g.input(torch.randn(3, 5, 16, 64)), g.input(torch.rand(64) < 0.5)
    first = g.reshape(to(g, g.mul(x, g.broadcast_in_dim(g.input(torch.randn(3, 5)), (3, 5, 16, 64), (0, 1))), torch.float16), (3, 80, 64))
    w = g.where(g.broadcast_in_dim(mask, (3, 64, 80), (1,)), g.input(torch.randn(3, 64, 80)), 0.0)
    y = g.call(torch.ops.aten.bmm.default, first, to(g, w, torch.float16))
    g.output(g.mul(y, g.broadcast_in_dim(g.input(torch.randn(80).half()), (3, 80, 80), (2,))))


@product("a product of floats of a byte", 32, 32, 32, 4, 3, 0, 0, 1, 3)
def _product_of_bytes(g: Graph) -> None:
    x, w = g.input(torch.randn(96, 64).to(torch.float8_e4m3fn)), g.input(torch.randn(64, 64).to(torch.float8_e5m2))
    y = g.call(torch.ops.aten.addmm.default, g.input(torch.randn(64).half()), to(g, x, torch.float16), to(g, w, torch.float16))
    g.output(g.reshape(y, (2, 48, 64)))


def joining(*tiles: int) -> Callable[..., Any]:
    """In place of `gather`: every product that can be joined is."""
    from magneto.inductor.schedule.product import Tiles, joined, matches

    def join(plan: Any, *_: Any) -> Any:
        found = matches(plan)
        assert found, "no product was found"
        return joined(plan, {match: Tiles(*tiles) for match in found})

    return join


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The scheduler takes what only kernels of the CPU can do (schedule/crossed.py) for impossible, although tensors are there."""
    from magneto.inductor.schedule import fuse

    with mock.patch.object(fuse, "crossing", lambda a, b: None):
        yield


@contextmanager
def sizes_for(name: str) -> Iterator[None]:
    """What decides by sizes decides so for small ones, where a case's name says it: rows are walked by few programs, however few and short they
    are; rows are too long for one block; long rows are cut into few parts; blocks take several rows."""
    from magneto.inductor.codegen import triton_nest
    from magneto.inductor.lower import ordered
    from magneto.inductor.schedule import columns, split

    few = (
        (split, "ONE_EACH", 4),
        (split, "LONG_ROW", 1),
        (split, "WANTED", 4),
        (split, "SMALL", 1),
        (columns, "SHARED", 1),
        (columns, "SHORTEST", 16),
    )
    with ExitStack() as stack:
        for module, limit, number in few if "columns beside" in name or "in parts" in name else ():
            stack.enter_context(mock.patch.object(module, limit, number))
        if "too long" in name:
            stack.enter_context(mock.patch.object(triton_nest, "PERSISTENT", 1024))
        for limit in ("HELD", "HELD_ACROSS", "LEAST", "LEAST_ACROSS") if "in pieces" in name else ():
            stack.enter_context(mock.patch.object(ordered, limit, 480 if limit == "HELD" else 60))
        if "few long rows" in name:
            stack.enter_context(mock.patch.object(split, "WANTED", 48))
        if "side by side" in name:
            stack.enter_context(mock.patch.object(triton_nest, "WANTED", 26))
        yield


def execute(name: str) -> str:
    """What is wrong with a case; empty: nothing."""
    with as_on_a_gpu(), sizes_for(name):
        return _execute(name)


def _execute(name: str) -> str:
    from magneto.inductor import cuda
    from magneto.inductor.made import loaded
    from tests.inductor.codegen.triton_interpreted import interpreted

    gather = cuda.gather
    build, tolerance = CASES[name]
    torch.manual_seed(0)
    g = Graph()
    build(g)
    kept = [t.clone() for t in g.inputs]
    try:
        cuda.gather = joining(*PRODUCTS[name]) if name in PRODUCTS else gather
        cuda.WORTH_RECORDING = 1
        run, parts = loaded(cuda._planned(g.fx, "case", {}, torch.device("cpu"), len(g.expected)), interpreted)
        call = run if parts is None else in_two(parts)
        for found, wanted in zip(call(*g.inputs), g.expected, strict=True):
            assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
            if wanted.dtype in (torch.float32, torch.float64) and not name.startswith(
                ("few elements where", "searches")
            ):  # maxima of zeros of both signs: eager's depend on the machine
                assert torch.equal(found.signbit() & (wanted == 0), wanted.signbit() & (wanted == 0)), "signs of zeros"
        assert all(_same(a, b) for a, b in zip(kept, g.inputs, strict=True)), "an input was written"
    except Exception:
        return traceback.format_exc()[-1500:]
    finally:
        cuda.gather = gather
    return ""


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype in FLOATS_OF_A_BYTE:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def in_two(parts: Any) -> Callable[..., list[Any]]:
    """What is recorded, then what runs behind a replay. The memory of the first is gone before its results are looked at."""

    def call(*inputs: Any) -> list[Any]:
        outs = list(parts.head(*inputs))
        n = parts.places.count(-1)
        ends = parts.tail(*inputs, *outs[n:])
        first = [t.clone(memory_format=torch.preserve_format) if isinstance(t, torch.Tensor) else t for t in outs[:n]]
        for t in outs:
            if all(t is not x for x in inputs):
                t.zero_()
        heads = iter(first)
        return [ends[place] if place >= 0 else next(heads) for place in parts.places]

    return call


def faster_reductions() -> None:
    """The interpreter folds and scans with functions of ours element by element: numpy does the same at once."""
    import numpy as np
    from triton.runtime.interpreter import ReduceOps, ScanOps

    from magneto.inductor.codegen import triton_library as lib

    slow = ReduceOps.generic_reduce
    folds = {lib.maximum: np.max, lib.minimum: np.min, lib.product: np.prod}

    def reduce(self: Any, given: Any) -> Any:
        fold = folds.get(self.combine_fn)
        if fold is None:
            return slow(self, given)
        (x,) = given
        return (self.to_tensor(fold(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype),)

    ReduceOps.generic_reduce = reduce
    slow_scan = ScanOps.generic_scan
    scans = {lib.maximum: np.maximum, lib.minimum: np.minimum, lib.logaddexp: np.logaddexp}

    def scan(self: Any, given: Any) -> Any:
        join = scans.get(self.combine_fn)
        if join is None:
            return slow_scan(self, given)
        (x,) = given
        return (self.to_tensor(join.accumulate(x.handle.data, axis=self.axis), x.dtype),)

    ScanOps.generic_scan = scan


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    faster_reductions()
    print(json.dumps({name: execute(name) for name in sys.argv[1:] or CASES}))
