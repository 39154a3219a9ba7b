"""Cumulative sums and additions at computed places: eager's numbers to the bit (along memory within its error), with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.base import events
from magneto.base.events import recording
from tests.inductor.codegen.test_crossed import numbers, with_threads

aten = torch.ops.aten


def library_calls(fn: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What the compiled function returns, and how many library calls its plan has."""
    with recording("artifact") as found:
        result = magneto.optimize("inductor")(fn)(*args)
    return result, sum(event.library_calls for event in found if event.artifact == "plan")


def equal(ours: Any, eager: Any) -> None:
    for a, b in zip(ours if isinstance(ours, tuple) else (ours,), eager if isinstance(eager, tuple) else (eager,), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("shape", "dim"), [((7, 9), 0), ((70, 1030), 0), ((3, 50, 40), 1), ((5, 4, 3, 16), -3), ((200, 130), 0), ((1, 20), 0)]
)
def test_cumulative_sums(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = numbers(shape, dtype)
    if dtype.is_floating_point:
        x[-1, ..., 1], x[0, ..., 2], x[-1, ..., 2] = float("nan"), float("inf"), -float("inf")

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2).cumsum(dim) + 1, x.cumsum(dim)

    ours, calls = library_calls(fn, x)
    equal(ours, fn(x))
    assert calls == 0 or shape[dim] == 1


def test_cumulative_sums_of_other_layouts_and_types() -> None:
    turned = numbers((40, 30)).t()
    for x, dim, dtype in (
        (turned, 1, None),
        (turned, 0, None),
        (numbers((30, 40)), 1, None),
        (numbers((30, 40), torch.int32), 0, torch.float64),
        (numbers((30, 40)) > 0, 0, None),
    ):

        def fn(x: torch.Tensor, dim: int = dim, dtype: torch.dtype | None = dtype) -> torch.Tensor:
            return x.cumsum(dim, dtype=dtype) * 2

        magneto.reset()
        equal(magneto.optimize("inductor")(fn)(x), fn(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(7, 1000), (3, 5, 17), (5000,)])
def test_cumulative_sums_along_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Scans: as close as eager's, which go one by one; what is not finite is so from the same element on."""
    x = numbers(shape, torch.float32).to(dtype)
    if dtype.is_floating_point and len(shape) > 1:
        x[0, ..., 5], x[1, ..., 3], x[1, ..., -2], x[2, ..., :] = float("nan"), float("inf"), -float("inf"), -0.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1)

    ours, calls = library_calls(fn, x)
    eager, exact = fn(x), fn(x.double())
    assert calls == 0 and (ours.dtype, ours.stride()) == (eager.dtype, eager.stride())
    if not dtype.is_floating_point:
        return equal(ours, eager)
    known = eager.isfinite()
    equal(ours.double().masked_fill(known, 1.0), eager.double().masked_fill(known, 1.0))
    error, eagers = ((t.double() - exact)[known].abs().max().item() for t in (ours, eager))
    assert error <= 2 * eagers + 1e-12
    assert torch.equal(ours.signbit() & (ours == 0), eager.signbit() & (eager == 0))


def test_cumulative_sums_of_what_is_looked_up() -> None:
    fn = lambda t, i: t[i].exp().cumsum(-1)  # noqa: E731
    compiled = magneto.compile(fn)
    t, i = numbers((50,)), indices(50, 6, 33)
    torch.testing.assert_close(compiled(t, i), fn(t, i))
    with pytest.raises(IndexError, match="index 99 is out of bounds"):
        compiled(t, torch.full((6, 33), 99))


def indices(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, limit, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "shape", "width"), [(5, (3, 7), 16), (50, (400,), 100), (300, (9, 11), 257), (3, (1,), 8)])
@pytest.mark.parametrize("padding", [None, 2])
def test_gradient_of_an_embedding(dtype: torch.dtype, rows: int, shape: tuple[int, ...], width: int, padding: int | None) -> None:
    w, i = numbers((rows, width), dtype).requires_grad_(), indices(rows, *shape)

    def fn(w: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(F.embedding(i, w, padding), w, g * 2)[0]

    g = numbers((*shape, width), dtype, 3)
    ours, calls = library_calls(fn, w, i, g)
    assert calls == 0
    equal(ours, fn(w, i, g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "shape", "width"), [(50, (3, 7), 16), (400, (400,), 100), (300, (9, 11), 257), (7, (1, 1), 8), (2000, (64, 8), 700)]
)
@pytest.mark.parametrize("padding", [-1, 2])
def test_gradient_of_an_embedding_is_added_to_another(
    dtype: torch.dtype, rows: int, shape: tuple[int, ...], width: int, padding: int
) -> None:
    """In the other's memory, rounded as by eager: what belongs to one row is added up first."""
    i = indices(rows, *shape)
    i[..., ::2] = i.flatten()[0]
    g, a, b = numbers((*shape, width), dtype, 3), numbers((rows, 5), dtype), numbers((5, width), dtype) * 1e4

    def fn(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor, other: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = aten.embedding_dense_backward(g * 2, i, rows, padding, False)
        return a @ b + sums, aten.embedding_dense_backward(g, i.int(), rows, padding, False) + other

    ours, calls = library_calls(fn, g, a, b, b[0] + a[:, :1], i)
    assert calls == 1
    equal(ours, fn(g, a, b, b[0] + a[:, :1], i))
    one, two = (with_threads(n, lambda: magneto.optimize("inductor")(fn)(g, a, b, b[0] + a[:, :1], i)) for n in (1, 2))
    equal(one, two)


def test_tied_tables_have_one_gradient_in_memory() -> None:
    """A step holds one table of gradients; what is read twice is added as it is written; an index out of range raises."""
    table, i = numbers((4000, 256)).requires_grad_(), indices(4000, 2, 30)

    def fn(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (F.embedding(i, table).tanh() @ table.t()).square().mean()

    step = magneto.optimize("inductor")(fn)
    expected = torch.autograd.grad(fn(table, i), table)[0]
    with recording("artifact") as found:
        for _ in range(2):
            torch.testing.assert_close(torch.autograd.grad(step(table, i), table)[0], expected)
    assert [e.peak_bytes for e in found if e.artifact == "plan"][-1] < 1.5 * table.nbytes

    def others(a: torch.Tensor, b: torch.Tensor, g: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = aten.embedding_dense_backward(g, i, 4000, -1, False)
        return a @ b + sums, sums.exp(), (a @ b) * 2 + aten.embedding_dense_backward(g + 1, i, 4000, -1, False)

    args = numbers((4000, 3)), numbers((3, 64)), numbers((2, 30, 64)), i
    torch.testing.assert_close(magneto.optimize("inductor")(others)(*args), others(*args))

    def by_index(a: torch.Tensor, b: torch.Tensor, g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return a @ b + torch.zeros(4000, 64).index_add(0, i.flatten(), g.flatten(0, 1))

    compiled = magneto.optimize("inductor")(by_index)
    equal(compiled(*args), by_index(*args))
    with pytest.raises(RuntimeError, match="is out of bounds for dimension 0 with size 4000"):
        compiled(*args[:3], i + 4000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(30, 64), (4, 9, 33), (500, 40)])
@pytest.mark.parametrize("dim", [0, 1])
def test_additions_by_index(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    if dim == 1 and len(shape) == 2:
        shape = (*shape, 8)
    target = list(shape)
    target[dim] = 6
    x, source = numbers(tuple(target), dtype), numbers(shape, dtype, 1)
    full, one = indices(6, *shape), indices(6, shape[dim])

    def fn(x: torch.Tensor, source: torch.Tensor, full: torch.Tensor, one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.scatter_add(dim, full, source + 1), (x * 2).index_add(dim, one, source), torch.zeros_like(x).index_add(dim, one, source)

    ours, calls = library_calls(fn, x, source, full, one)
    assert calls == 0
    equal(ours, fn(x, source, full, one))


def test_rows_added_by_index_put() -> None:
    x, i = numbers((300, 128)), indices(20, 300)

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.zeros(20, 128).index_put((i,), x.exp(), accumulate=True)

    ours, calls = library_calls(fn, x, i)
    assert calls == 0
    torch.testing.assert_close(ours, fn(x, i), rtol=1e-6, atol=1e-6)


def test_few_elements_side_by_side_are_the_librarys() -> None:
    x, i = numbers((50,)), indices(9, 50)
    ours, calls = library_calls(lambda x, i: torch.zeros(9).scatter_add(0, i, x), x, i)
    assert calls == 1
    equal(ours, torch.zeros(9).scatter_add(0, i, x))


def test_an_index_out_of_range_raises_as_in_eager() -> None:
    i = indices(9, 50)
    i[20] = 9

    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.zeros(9, 16).index_add(0, i, x)

    with pytest.raises(Exception) as eager:
        fn(numbers((50, 16)), i)
    with pytest.raises(type(eager.value)) as ours:
        magneto.optimize("inductor")(fn)(numbers((50, 16)), i)
    assert str(ours.value) == str(eager.value)


def test_empty() -> None:
    before = events.count("fallback")

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.index_add(0, i, s), s.cumsum(0), x[:0].cumsum(0)

    args = (numbers((4, 16)), torch.zeros(0, dtype=torch.int64), numbers((0, 16)))
    equal(magneto.optimize("inductor")(fn)(*args), fn(*args))
    assert events.count("fallback") == before


def test_the_same_bits_with_any_number_of_threads() -> None:
    x, i = numbers((2000, 96)), indices(40, 2000)

    @magneto.optimize("inductor")
    def fn(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros(40, 96).index_add(0, i, x), x.cumsum(0), torch.zeros(40, 96).scatter_add(0, i[:, None].expand_as(x), x)

    one, *others = [with_threads(n, lambda: fn(x, i)) for n in (1, 2, 3, 2)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_one_addition_to_each_row_is_a_choice(dtype: torch.dtype, dim: int) -> None:
    x, source = numbers((5, 4, 6), dtype), numbers((5, 4, 6), dtype)
    if dtype.is_floating_point:
        x[0], source[0, :2], source[1, 0, 0] = -0.0, -0.0, float("nan")
    index = torch.randint(0, 4, (5, 4, 6))
    index, source = (t.narrow(dim, 0, 1) for t in (index, source))

    def fn(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.scatter_add(dim, index, source), (x * 2).scatter_add(dim, index, source + 1) * 3

    ours, calls = library_calls(fn, x, index, source)
    eager = fn(x, index, source)
    equal(ours, eager)
    assert calls == 0 and all(torch.equal(a.signbit() & (a == a), b.signbit() & (b == b)) for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize("wrong", [-1, 40])
def test_the_gradient_of_a_chosen_element_is_part_of_what_follows(wrong: int) -> None:
    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return -x.log_softmax(-1).gather(1, t[:, None]).mean()

    compiled = magneto.optimize("inductor")(loss)
    x, t = torch.randn(30, 40), torch.randint(0, 40, (30,))
    grads = []
    for fn in (loss, compiled):
        leaf = x.clone().requires_grad_()
        fn(leaf, t).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    with recording("artifact") as found:
        magneto.optimize("inductor")(loss)(x.clone().requires_grad_(), t).backward()
    assert [event.library_calls for event in found if event.artifact == "plan"] == [0, 0]
    add = magneto.optimize("inductor")(lambda x, t: x.scatter_add(1, t[:, None], x[:, :1]) * 2)
    add(x, t)
    t[7] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        add(x, t)


@pytest.mark.parametrize("shape", [(4, 16), (3, 4, 16), (16,)])
def test_dimensions_that_run_in_any_order_are_one(shape: tuple[int, ...]) -> None:
    """Heads and their channels: rows of what is added are walked as they lie."""
    torch.manual_seed(0)
    at, x = torch.randint(50, (700,)), torch.randn(700, *shape)
    for source, one in ((x, True), (x.transpose(0, 1).contiguous().transpose(0, 1), len(shape) == 1)):
        call = magneto.optimize("inductor", nopython=True)(lambda i, x: torch.ones(50, *shape).index_add(0, i, x * 2))
        torch.testing.assert_close(call(at, source), torch.ones(50, *shape).index_add(0, at, source * 2))
        text = "".join(magneto.inspect(call).kernels)
        assert "mg_min(lo + chunk" in text and ("row < 1 * portions" in text) == one
