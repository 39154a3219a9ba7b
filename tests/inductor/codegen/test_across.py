"""Memory that is contiguous along another dimension than the results: squares turned in registers, searches of several rows side by side."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.inductor.codegen.cpp import kernel_text
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.codegen.compiled import check_compiled
from tests.inductor.lower.prim_graphs import Graph

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]


def texts(g: Graph) -> str:
    return "\n".join(kernel_text(s) for s in schedule(lower_graph(g.fx)).steps if isinstance(s, FusedKernel))


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 90, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "perm"), [((131, 253), (1, 0)), ((8, 8), (1, 0)), ((33, 9), (1, 0)), ((5, 131, 67), (0, 2, 1)), ((40, 3, 50), (2, 1, 0))]
)
def test_squares_are_turned(dtype: torch.dtype, shape: tuple[int, ...], perm: tuple[int, ...]) -> None:
    g = Graph()
    x = g.transpose(g.input(numbers(shape, dtype)), perm)
    y = g.input(numbers(tuple(shape[p] for p in perm), dtype))
    g.output(g.eq(x, y) if dtype is torch.bool else g.add(x, y))
    text = texts(g)
    assert text.count("mg_tile_") == 1 and f"mg_tile_u{dtype.itemsize * 8}(" in text
    vector = re.findall(r"#pragma omp simd\n(?:.*\n){4}", text)[0]
    assert "w1[" in vector and not re.search(r"\d+ \* j1", vector)  # nothing jumps along the vector loop
    check_compiled(g, 0)


def test_two_transposed_operands_have_a_square_each() -> None:
    g = Graph()
    x, y = g.input(torch.randn(70, 45)), g.input(torch.randn(70, 90)[:, ::2])
    a, b = g.transpose(x, (1, 0)), g.transpose(y, (1, 0))
    g.output(g.mul(g.add(g.input(torch.randn(45, 70)), b), a))
    check_compiled(g, 0)
    assert texts(g).count("mg_tile_u32(") == 1  # the other one is contiguous along no dimension


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize(
    ("shape", "perm", "dims"),
    [
        ((131, 253), (1, 0), (0,)),
        ((9, 300), (1, 0), (0,)),
        ((5, 131, 67), (0, 2, 1), (1,)),
        ((3, 16, 17, 19), (0, 2, 3, 1), (0, 2)),
        ((3, 70, 9, 8), (0, 2, 3, 1), (0, 1, 2)),
        ((40, 3, 50), (2, 1, 0), (0, 1)),  # the second operand is contiguous along the slower of the two
    ],
)
def test_squares_are_turned_for_sums(dtype: torch.dtype, shape: tuple[int, ...], perm: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Sums lie side by side in the first operand's memory; the second one is contiguous along what is added up. The second walk reads both again."""
    g = Graph()
    x = g.input(numbers(tuple(shape[p] for p in perm), torch.int64).fmod(5).to(dtype))
    z = g.mul(x, g.transpose(g.input(numbers(shape, torch.int64).fmod(7).to(dtype)), perm))
    most = g.amax(z, dims)
    kept = [d for d in range(len(perm)) if d not in dims]
    near = g.sub(z, g.broadcast_in_dim(most, [g.inputs[0].shape[d] for d in range(len(perm))], kept))
    g.output(most, g.sum(near, dims), *([g.argmax(z, dims[0])] if len(dims) == 1 else []))
    text = texts(g)
    assert text.count("mg_tile_") >= 2 and not re.search(r"p1\[[^]]*\d \* j", text)  # nothing jumps along the vector loop
    check_compiled(g, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(300, 5), (7, 1025), (3, 40, 70)])
def test_searches_of_rows_side_by_side(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Ties, columns of infinities, NaN anywhere, several searched dimensions at once."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    if dtype.is_floating_point:
        x[..., 0], x[..., 1], x[..., 2] = -float("inf"), float("inf"), float("nan")
        x[1, ..., 3] = x[-1, ..., 3] = float("nan")
    g = Graph()
    a = g.input(x)
    found = [g.argmax(a, 0), g.argmin(a, 0), g.amax(a, (0,))]
    if len(shape) == 3:
        found += [g.argmax(g.transpose(a, (0, 2, 1)), 2), g.argmin(g.reshape(a, (shape[0] * shape[1], shape[2])), 0)]
    g.output(*found)
    assert "if (a" not in texts(g)
    check_compiled(g, 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.float32])
@pytest.mark.parametrize("shape", [(1, 3), (70, 33), (5, 1025), (300, 260), (3, 20000)])
def test_any_and_all_of_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Bytes are gathered in bytes: along rows, across them and over everything, with single elements that decide."""
    g = Graph()
    rare, most = torch.zeros(shape), torch.ones(shape)
    rare[-1, shape[1] // 2], most[0, -1] = 1, 0
    a, b = g.input(rare.to(dtype)), g.input(most.to(dtype))
    for dims in ((0,), (1,), (0, 1)):
        g.output(g.any(a, dims), g.all(a, dims), g.any(b, dims), g.all(b, dims))
    text = texts(g)
    assert ("int a" in text) == (dtype is torch.float32)
    check_compiled(g, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(64, 300), (1000, 17), (5000, 5), (333, 3000), (71, 9000)])
def test_rows_of_a_matrix_are_walked_as_they_lie(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In portions with accumulators for all columns, where these are not too wide; numbers that follow from the sums are computed behind."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).round().to(dtype)
    x[shape[0] // 2 :, 4] = x[3, 4] = 100  # equal ones in several portions
    if dtype.is_floating_point:
        x[:, 0], x[:, 1], x[-1, 2], x[7, 2] = -float("inf"), float("inf"), float("nan"), float("nan")
    g = Graph()
    first = g.input(x)
    found = [g.argmax(first, 0), g.argmin(first, 0), g.amax(first, (0,)), g.any(g.gt(first, 2), (0,))]
    if dtype.is_floating_point:
        total = g.sum(g.mul(first, 2.0), (0,))
        found += [total, g.add(g.div(total, float(shape[0])), g.input(torch.randn(shape[1]).to(dtype)))]
    g.output(*found)
    assert ("for (i64 portion" in texts(g)) == (shape[1] < 3000)  # all of them together, in one kernel
    check_compiled(g, 2e-3 if dtype is torch.float16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 12, 700), (5, 70, 33), (2, 9, 4)])
def test_costly_row_values_are_computed_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The logarithm under a log-softmax stands in a loop over the rows, not in one over all elements."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.log_softmax(1), F.normalize(x, dim=1), (x - x.float().mean(1, keepdim=True)) * x.float().var(1, keepdim=True).rsqrt()

    call = magneto.optimize("inductor", nopython=True)(fn)
    for ours, eager in zip(call(x), fn(x), strict=True):
        torch.testing.assert_close(
            ours, eager, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2 if dtype is torch.bfloat16 else 1e-5
        )
    (text,) = [text for text in magneto.inspect(call).kernels if "mg_log_f32(" in text]
    assert text.count("mg_log_f32(") == 1 and re.search(r"mg_log_f32\(.*\);\n\s*(v\d+)\[j0 - lo\] = ", text)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_places_in_bytes_are_found_in_vectors_of_one_width(dtype: torch.dtype) -> None:
    g = Graph()
    found = [g.input(torch.randint(0, 120, (9, columns)).to(dtype)) for columns in (24, 100, 700)]
    g.output(*(g.argmax(x, 1) for x in found), *(g.argmin(x, 1) for x in found), g.argmax(found[2], 0))
    assert not re.search(r"\b[ui](8|16) a\d+(s\[|\b)", texts(g))
    check_compiled(g, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 130, 70), (3, 64, 9), (1, 20, 100)])
def test_squares_of_results_are_turned_behind_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A layer norm of a transposed tensor: no store jumps along the vector loop, and what rows alone say is computed ahead of it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.layer_norm(x.transpose(1, 2), (shape[1],)), x * 2

    compiled = magneto.compile(fn, fullgraph=True)
    for ours, eager, exact in zip(compiled(x), fn(x), fn(x.double()), strict=True):
        assert ours.stride() == eager.stride()
        error, eagers = ((t.double() - exact).abs().max().item() for t in (ours, eager))
        assert error <= 2 * eagers + (1e-12 if dtype is torch.float64 else 1e-6)
    text = next(t for t in magneto.inspect(compiled).kernels if "sqrt" in t)
    assert f"mg_tile_u{dtype.itemsize * 8}(q" in text
    assert text.rindex("sqrt") < text.rindex("mg_tile_u")
    assert not re.search(r"p\d\[[^]]*\d \* j1[^]]*\] = ", text)
