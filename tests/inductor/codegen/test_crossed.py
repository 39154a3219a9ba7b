"""Sums along rows and down columns in one walk: what is fused and what not, every size, types, extreme numbers, and the same bits with any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import magneto
from magneto.inductor.compile import compile_program
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.codegen.compiled import check_compiled
from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten


def kernels(g: Graph) -> list[FusedKernel]:
    return [s for s in schedule(lower_graph(g.fx)).steps if isinstance(s, FusedKernel)]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def norm_gradient(g: Graph, shape: tuple[int, ...], dims: int = 1) -> None:
    """What layer norm's backward computes: the input's gradient from sums along the rows, the weight's and the bias's from sums down the columns."""
    rows, cols = tuple(range(len(shape) - dims)), tuple(range(len(shape) - dims, len(shape)))
    grad, x = g.input(numbers(shape)), g.input(numbers(shape, seed=1))
    wide = g.broadcast_in_dim(g.input(numbers(tuple(shape[d] for d in cols), seed=2)), shape, cols)
    scaled = g.mul(grad, wide)
    first = g.broadcast_in_dim(g.sum(scaled, cols), shape, rows)
    second = g.broadcast_in_dim(g.sum(g.mul(scaled, x), cols), shape, rows)
    dx = g.sub(g.sub(scaled, g.mul(first, 0.01)), g.mul(g.mul(x, second), 0.01))
    g.output(dx, g.sum(g.mul(grad, x), rows), g.sum(grad, rows))


@pytest.mark.parametrize(
    "shape", [(2, 3), (5, 7), (16, 64), (17, 65), (33, 768), (300, 129), (70, 1030), (8, 5000), (1000, 33), (4, 5, 6), (3, 50, 200)]
)
def test_gradients_of_norms_are_one_kernel(shape: tuple[int, ...]) -> None:
    g = Graph()
    norm_gradient(g, shape)
    (kernel,) = kernels(g)
    assert [m.down for m in kernel.members if m.is_reduction].count(True) == 2
    check_compiled(g, 2e-4 if shape[-1] > 1000 or shape[0] > 500 else 5e-5)


@pytest.mark.parametrize("shape", [(20, 6, 8), (9, 10, 3, 5)])
def test_rows_of_several_dimensions(shape: tuple[int, ...]) -> None:
    g = Graph()
    norm_gradient(g, shape, 2)
    assert len(kernels(g)) == 1
    check_compiled(g, 5e-5)


def test_a_square_is_not_read_turned() -> None:
    g = Graph()
    x = g.input(numbers((40, 40)))
    g.output(g.sum(x, (0,)), g.sum(x, (1,)), g.amax(g.exp(x), (1,)))
    (kernel,) = kernels(g)
    assert len({load for load in kernel.members[0].body.children()} | {m.body for m in kernel.members if m.down}) >= 1
    check_compiled(g, 1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(37, 70), (150, 129)])
def test_kinds_and_types(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g = Graph()
    x = g.input(numbers(shape, dtype) if dtype is not torch.uint8 else numbers(shape, torch.int64).abs().to(dtype))
    found = [g.amax(x, (0,)), g.amin(x, (0,)), g.any(x, (0,)), g.all(x, (0,)), g.amax(x, (1,))]
    if dtype in (torch.float32, torch.float64, torch.int64):
        found += [g.sum(x, (0,)), g.sum(x, (1,))]
    g.output(*found)
    assert len(kernels(g)) == 1
    check_compiled(g, 1e-5)


def test_halves_are_added_in_float() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        g = Graph()
        x, y = g.input(numbers((130, 200), dtype)), g.input(numbers((130, 200), dtype, 1))
        a, b = g.convert_element_type(x, torch.float32), g.convert_element_type(y, torch.float32)
        total = g.broadcast_in_dim(g.sum(g.mul(a, b), (1,)), (130, 200), (0,))
        g.output(g.convert_element_type(g.mul(a, total), dtype), g.convert_element_type(g.sum(g.mul(a, b), (0,)), dtype), g.sum(b, (0,)))
        assert sum(any(m.down for m in k.members) for k in kernels(g)) == 1
        check_compiled(g, 1e-2)


def test_nan_and_infinities_stay_in_their_columns() -> None:
    x = numbers((50, 40))
    x[3, 5], x[20, 6], x[21, 6], x[7, 7] = float("nan"), float("inf"), -float("inf"), float("inf")
    g = Graph()
    v = g.input(x)
    g.output(g.sum(v, (0,)), g.amax(v, (0,)), g.amin(v, (0,)), g.sum(v, (1,)), g.prod(v, (0,)))
    assert len(kernels(g)) == 1
    check_compiled(g, 1e-4)


def test_sums_of_what_the_rows_have_given() -> None:
    """The column sums read values that depend on the row's own sums, and results of the kernel."""
    g = Graph()
    x = g.input(numbers((60, 96)))
    scale = g.rsqrt(g.add(g.mul(g.sum(g.mul(x, x), (1,)), 1 / 96), 1e-6))
    y = g.mul(x, g.broadcast_in_dim(scale, (60, 96), (0,)))
    g.output(y, g.sum(y, (0,)), g.sum(g.mul(y, x), (0,)), scale)
    (kernel,) = kernels(g)
    assert sum(m.down for m in kernel.members) == 2
    check_compiled(g, 2e-5)


def test_nobody_reads_a_column_before_its_end() -> None:
    g = Graph()
    x = g.input(numbers((60, 96)))
    total, rows = g.sum(x, (0,)), g.sum(x, (1,))
    g.output(g.mul(x, g.broadcast_in_dim(total, (60, 96), (1,))), g.mul(total, 0.5), rows)
    assert len(kernels(g)) >= 2
    check_compiled(g, 1e-4)


def test_accumulators_stay_in_the_cache() -> None:
    """Too many columns, or too few rows for several threads: two kernels."""
    for shape in ((4, 30_000), (16, 60_000)):
        g = Graph()
        x = g.input(numbers(shape))
        g.output(g.sum(x, (0,)), g.sum(x, (1,)))
        assert not any(m.down for k in kernels(g) for m in k.members)
        check_compiled(g, 1e-2)


@pytest.mark.parametrize("layout", ["turned", "apart", "every other"])
def test_other_layouts(layout: str) -> None:
    base = numbers((48, 80))
    x = {
        "turned": base.t().contiguous().t(),
        "apart": torch.cat([base, base], 1)[:, :80],
        "every other": base.repeat_interleave(2, 1)[:, ::2],
    }[layout]
    g = Graph()
    v = g.input(x)
    g.output(g.sum(v, (0,)), g.sum(v, (1,)), g.exp(v))
    check_compiled(g, 1e-4)


def with_threads(count: int, call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return tuple(t.clone() for t in call())
    finally:
        torch.set_num_threads(before)


def test_the_same_bits_with_any_number_of_threads() -> None:
    g = Graph()
    norm_gradient(g, (900, 100))
    plan = compile_program(lower_graph(g.fx))
    one, *others = [with_threads(n, lambda: plan(*g.inputs)) for n in (1, 2, 3, 2)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [(40, 64), (3, 100, 48), (1, 16), (700, 96)])
def test_layer_norm_backward(shape: tuple[int, ...]) -> None:
    x, w, b = numbers(shape).requires_grad_(), numbers(shape[-1:], seed=1).requires_grad_(), numbers(shape[-1:], seed=2).requires_grad_()

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(torch.nn.functional.layer_norm(x, shape[-1:], w, b), (x, w, b), grad)

    grad = numbers(shape, seed=3)
    exact = step(*(t.detach().double().requires_grad_() for t in (x, w, b)), grad.double())
    eager, ours = step(x, w, b, grad), magneto.optimize("inductor")(step)(x, w, b, grad)
    for found, plain, true in zip(ours, eager, exact, strict=True):
        assert (found - true).abs().max() <= 2 * (plain - true).abs().max() + 1e-6 * true.abs().max()
