"""Kernels against eager and the interpreter: dtype x shape x layout, special values, reductions of every kind."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import magneto
from tests.inductor.codegen.compiled import check_compiled, float64_of
from tests.inductor.codegen.test_golden import kernel_texts
from tests.inductor.lower.prim_graphs import Graph

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, 1e-30, 1.0, -1.0, 2.5, -2.5, 0.5, 3.5, -0.75]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same shape in memory in different ways."""
    base = torch.randn(shape).mul(3).to(dtype)
    found = {"contiguous": base, "sliced": torch.randn(*shape[:-1], shape[-1] * 2).to(dtype)[..., ::2], "expanded": base[:1].expand(shape)}
    if len(shape) >= 2:
        found["transposed"] = torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)
    if len(shape) == 4:
        found["channels_last"] = base.to(memory_format=torch.channels_last)
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5,), (3, 70), (2, 3, 5, 7)])
def test_pointwise_on_every_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    g = Graph()
    outputs = []
    for x, y in itertools.islice(itertools.permutations(layouts(shape, dtype).values(), 2), 6):
        a, b = g.input(x), g.input(y)
        outputs.append(g.maximum(g.mul(a, 0.5), g.sub(b, a)))
    g.output(*outputs)
    check_compiled(g, TOLERANCE[dtype])


UNARY = [
    "neg", "abs", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "floor", "ceil", "round", "trunc", "sign", "isnan", "isinf", "lgamma",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unary_functions(dtype: torch.dtype) -> None:
    """Special values, and errors at most twice eager's (plus one unit: eager's vector and scalar loops differ by that much themselves)."""
    g = Graph()
    x = g.input(torch.cat([torch.tensor(SPECIAL, dtype=dtype), torch.randn(800, dtype=dtype) * 3, torch.rand(200, dtype=dtype)]))
    g.output(*[getattr(g, name)(x) for name in UNARY])
    check_compiled(g, 4e-6 if dtype is torch.float32 else 1e-13, interpreter=False)  # numpy's sign of NaN is NaN
    if dtype is torch.float32:
        compare_errors(g)


def test_nan_of_any_bits_stays() -> None:
    bits = [0x7FC00000, 0x7FC00001, 0x7FC001FF, 0x7F800001, -0x3FFFFF, -1]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32).repeat(7)
    names = [name for name in UNARY if getattr(torch, name)(x).is_floating_point() and name != "sign"]
    for name, found in zip(names, magneto.compile(lambda x: [getattr(torch, n)(x) for n in names])(x), strict=True):
        assert found.isnan().all(), name


def compare_errors(g: Graph) -> None:
    from magneto.inductor.compile import compile_program
    from magneto.inductor.lower import lower_graph

    found = compile_program(lower_graph(g.fx))(*g.inputs)
    for name, ours, eager, exact in zip(UNARY, found, g.expected, float64_of(g), strict=True):
        if not eager.is_floating_point():
            continue
        ok = exact.isfinite() & (exact.abs() < 1e38) & (exact.abs() > 1e-37)
        unit = torch.finfo(torch.float32).eps * exact[ok].abs()
        mine, theirs = ((t.double()[ok] - exact[ok]).abs().div(unit).max().item() for t in (ours, eager))
        assert mine <= 2 * theirs + 0.6, (name, mine, theirs)


def test_zero_signs_survive() -> None:
    g = Graph()
    x = g.input(torch.tensor([0.0, -0.0, 1e-45, -1e-45]))
    row = g.input(torch.tensor([[3.0], [1e38], [1e-41], [float("inf")]]))
    wide = [g.broadcast_in_dim(x, (4, 4), (1,)), g.broadcast_in_dim(row, (4, 4), (0, 1))]
    g.output(g.neg(x), g.sqrt(x), g.tanh(x), g.erf(x), g.round(x), g.div(*wide), g.abs(x))
    from magneto.inductor.compile import compile_program
    from magneto.inductor.lower import lower_graph

    for ours, eager in zip(compile_program(lower_graph(g.fx))(*g.inputs), g.expected, strict=True):
        number = ~eager.isnan()  # the sign of NaN means nothing
        assert torch.equal(ours.signbit()[number], eager.signbit()[number]) and torch.equal(ours[number], eager[number])


def test_quotients_by_row_values_are_rounded_as_eager_does() -> None:
    g = Graph()
    x = torch.cat([torch.randn(40, 500), torch.randn(40, 500) * 1e-38, torch.randn(40, 500) * 1e37])
    s = torch.cat([torch.rand(100), torch.tensor(SPECIAL), torch.tensor([1e-38, 1e38, 7e-41, 3.0])])[: x.shape[0], None]
    a, b = g.input(x), g.input(s)
    g.output(g.div(a, g.broadcast_in_dim(b, (120, 500), (0, 1))), g.div(a, 3.0), g.div(a, 8.0))
    from magneto.inductor.compile import compile_program
    from magneto.inductor.lower import lower_graph

    for ours, eager in zip(compile_program(lower_graph(g.fx))(*g.inputs), g.expected, strict=True):
        normal = (eager.abs() > 2e-38) | (eager == 0) | eager.isnan()
        torch.testing.assert_close(ours[normal], eager[normal], rtol=1.2e-7, atol=0, equal_nan=True)
        assert (ours[normal] != eager[normal]).float().mean() < 0.06 + eager[normal].isnan().float().mean()
        assert (ours - eager)[~normal].abs().nan_to_num(0.0).max() < 1e-43  # subnormal results are rounded twice


@pytest.mark.parametrize("dtype", INTS)
def test_integers_wrap_and_divide_as_eager(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    g = Graph()
    values = torch.randint(info.min, info.max, (300,), dtype=dtype)
    others = torch.randint(1, 12, (300,), dtype=dtype)
    values[:2], others[:2] = info.min, (1 if dtype is torch.uint8 else -1)
    x, y = g.input(values), g.input(others)
    g.output(
        g.add(x, x),
        g.mul(x, x),
        g.sub(y, x),
        g.neg(x),
        g.abs(x),
        g.maximum(x, y),
        g.bitwise_and(x, y),
        g.bitwise_xor(x, y),
        g.bitwise_not(x),
        g.sign(x),
    )
    check_compiled(g, 0)
    g = Graph()
    x, y = g.input(values), g.input(torch.randint(0, info.bits + 2, (300,), dtype=dtype))
    g.output(g.shift_left(x, y), g.shift_right(x, y))
    check_compiled(g, 0)
    g = Graph()
    x, y = g.input(values[2:]), g.input(others[2:])
    g.output(g.floordiv(x, y), g.remainder(x, y), g.fmod(x, y))
    check_compiled(g, 0)


def test_floor_division_and_remainder_of_floats() -> None:
    g = Graph()
    pairs = torch.tensor(list(itertools.product([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 7.0, -7.0, 0.1, float("inf"), float("nan")], repeat=2)))
    x, y = g.input(pairs[:, 0].contiguous()), g.input(pairs[:, 1].contiguous())
    g.output(
        g.floordiv(x, y),
        g.remainder(x, y),
        g.fmod(x, y),
        g.pow(x, y),
        g.maximum(x, y),
        g.minimum(x, y),
        g.eq(x, y),
        g.lt(x, y),
        g.ge(x, y),
        g.ne(x, y),
    )
    check_compiled(g, 1e-6)


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.bfloat16])
def test_conversions(source: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 100.7, -100.7, 255.0, 127.0, 3.99, float("nan")] * 3)
    if not source.is_floating_point:
        values = values.nan_to_num(5.0)
    g = Graph()
    x = g.input(values.abs().to(source) if source is torch.uint8 else values.to(source))
    targets = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool]
    if not source.is_floating_point:
        targets += INTS
    g.output(*[g.convert_element_type(x, t) for t in targets if t is not source])
    check_compiled(g, 0)
    if source.is_floating_point:  # NaN to integers differs between eager's own loops
        g = Graph()
        x = g.input(values.nan_to_num(4.0).to(source))
        g.output(*[g.convert_element_type(x, t) for t in INTS])
        check_compiled(g, 0)


REDUCED = [
    ((300,), (0,)),
    ((7, 300), (1,)),
    ((300, 70), (0,)),
    ((4, 5, 6, 70), (1, 3)),
    ((4, 50, 6, 7), (0, 2, 3)),
    ((3, 5000), (0, 1)),
    ((130, 9), (1,)),
]


@pytest.mark.parametrize("shape, dims", REDUCED)
def test_reductions(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    for x in layouts(shape, torch.float32).values():
        g = Graph()
        a = g.input(x)
        v = g.var(a, dims, 1.0)
        g.output(g.sum(a, dims), g.amax(a, dims), g.amin(a, dims), g.prod(g.mul(a, 0.01), dims), g.item(v, 0), g.item(v, 1))
        check_compiled(g, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_reductions_of_other_types(dtype: torch.dtype) -> None:
    g = Graph()
    x = g.input((torch.randn(9, 333) * 3).abs().to(dtype))
    outputs = [g.any(x, (1,)), g.all(x, (0,)), g.amax(x, (1,)), g.amin(x, (0,)), g.sum(x, (1,)), g.sum(x, (0,))]
    g.output(*outputs)
    check_compiled(g, TOLERANCE.get(dtype, 0))


def test_nan_goes_through_extrema_and_the_first_one_wins() -> None:
    x = torch.randn(6, 400)
    x[0, 7] = x[0, 9] = x[3, 399] = float("nan")
    x[1, 5] = x[1, 50] = 99.0
    g = Graph()
    a = g.input(x)
    g.output(g.amax(a, (1,)), g.amin(a, (0,)), g.argmax(a, 1), g.argmin(a, 0), g.argmax(a, 0))
    check_compiled(g, 0)


def test_long_sums_are_as_good_as_eagers() -> None:
    for x in (torch.rand(3_000_000), torch.rand(20, 200_000), torch.rand(200_000, 20), torch.randn(64, 3000) + 100):
        for dims in [tuple(range(x.dim())), *((d,) for d in range(x.dim()))]:
            g = Graph()
            g.output(g.sum(g.input(x), dims))
            from magneto.inductor.compile import compile_program
            from magneto.inductor.lower import lower_graph

            ours = compile_program(lower_graph(g.fx))(x)[0].double()
            exact = x.double().sum(dims)
            error, eager = ((t - exact).abs().max().item() for t in (ours, g.expected[0].double()))
            assert error <= 2 * eager + 2e-7 * exact.abs().max().item(), (x.shape, dims, error, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_through_integers_and_back(dtype: torch.dtype) -> None:
    """No truncation of the float: integers have neither -0.0 nor NaN, and they end."""
    x = torch.tensor([-0.3, 0.3, -0.0, -1.5, math.nan, math.inf, -math.inf, 3e9, -3e9, 1e19]).to(dtype).repeat(4)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.int().to(x.dtype), x.long().to(x.dtype), x.short().to(x.dtype), (x * 1).int().double()

    for got, expected in zip(magneto.compile(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert torch.equal(got.signbit(), expected.signbit())


def test_mean_beside_the_variance_of_infinities() -> None:
    x = torch.randn(6, 9)
    x[0, 0], x[1, 3], x[2], x[3, 4] = math.inf, -math.inf, math.inf, math.nan
    for fn in (torch.var_mean, torch.std_mean):
        for y, named in ((x, {}), (x, {"correction": 9}), (x[:, :1], {"correction": 0})):
            got = magneto.compile(lambda x, fn=fn, named=named: fn(x, 1, **named))(y)
            for a, b in zip(got, fn(y, 1, **named), strict=True):
                torch.testing.assert_close(a, b, equal_nan=True)
            magneto.reset()


def test_variance_with_a_large_mean() -> None:
    for shape, dims in (((40, 1000), (1,)), ((1000, 40), (0,)), ((3, 40_000), (1,))):
        x = torch.randn(shape) + 1000
        g = Graph()
        v = g.var(g.input(x), dims, 1.0)
        g.output(g.item(v, 0))
        program = check_compiled(g, 1e-3)
        assert program.nodes


def test_wrong_index_and_zero_divisor_raise() -> None:
    from magneto.inductor.compile import compile_program
    from magneto.inductor.lower import lower_graph

    g = Graph()
    table, index = g.input(torch.randn(10, 64)), g.input(torch.tensor([1, 2]))
    g.output(g.mul(g.index_select(table, 0, index), 2.0))
    plan = compile_program(lower_graph(g.fx))
    torch.testing.assert_close(plan(*g.inputs)[0], g.expected[0])
    with pytest.raises(IndexError, match="out of range"):
        plan(g.inputs[0], torch.tensor([1, 10]))
    torch.testing.assert_close(plan(*g.inputs)[0], g.expected[0])
    g = Graph()
    x, y = g.input(torch.tensor([4, 5])), g.input(torch.tensor([2, 3]))
    g.output(g.floordiv(x, y))
    program = lower_graph(g.fx)
    plan = compile_program(program)
    assert plan(*g.inputs)[0].tolist() == [2, 1]
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        plan(g.inputs[0], torch.tensor([1, 0]))


def test_an_index_behind_a_condition_is_checked_where_it_holds() -> None:
    """The gradient of padding in circles, cut at one side: places computed from loop variables alone, wanted in a part of the loop."""

    def run(call: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(12.0).view(1, 3, 4).requires_grad_()
        y = call(x)
        return y, *torch.autograd.grad(y.sin().sum(), x)

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (-1, 1), mode="circular")

    torch.testing.assert_close(run(magneto.compile(program)), run(program))


def test_tiled_transposition() -> None:
    for shape, perm in (((131, 253), (1, 0)), ((5, 131, 67), (0, 2, 1)), ((40, 3, 50), (2, 1, 0))):
        g = Graph()
        x = g.input(torch.randn(shape))
        y = g.transpose(x, perm)
        g.output(g.add(y, g.full(tuple(shape[p] for p in perm), 1.0, torch.float32, torch.device("cpu"))))
        check_compiled(g, 0)


def test_one_plus_erf_is_exact_far_out_and_gelu_as_good_as_eagers() -> None:
    """1 + erf(x) has a form of its own: 0 and 2 must come out exactly, since gelu multiplies by x; NaN stays."""
    g = Graph()
    x = g.input(torch.cat([torch.tensor([*SPECIAL, -1e4, 1e4, -3.8, 3.8]), torch.linspace(-9, 9, 20001)]))
    g.output(g.add(g.erf(x), 1.0), g.mul(g.mul(x, 0.5), g.add(1.0, g.erf(g.mul(x, 0.5**0.5)))))
    check_compiled(g, 1e-6, interpreter=False)


def test_exp_of_masks_is_zero_and_short_rows_keep_nan() -> None:
    g = Graph()
    rows = torch.randn(60, 40)
    rows[3, 17], rows[5], rows[6, 39], rows[7, :20] = float("nan"), -float("inf"), float("inf"), -1e4
    x = g.input(rows)
    g.output(g.exp(x), g.exp(g.mul(x, 40.0)), g.amax(x, (1,)), g.amin(x, (1,)))
    check_compiled(g, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("length", [256, 300, 1025])
def test_searches_of_long_rows(dtype: torch.dtype, length: int) -> None:
    """Lanes search side by side: ties across lanes and blocks, rows of infinities, NaN anywhere."""
    rows = (torch.randn(12, length) * 3).to(dtype)
    if dtype.is_floating_point:
        rows[0], rows[1], rows[2] = -float("inf"), float("inf"), float("nan")
        rows[3, length // 2], rows[4, length - 1], rows[5, 1:] = float("nan"), float("nan"), -float("inf")
        rows[6], rows[6, ::3] = 0.0, -0.0
    g = Graph()
    x = g.input(rows)
    g.output(g.argmax(x, 1), g.argmin(x, 1))
    check_compiled(g, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions_plus_one_are_as_close_as_eagers(dtype: torch.dtype) -> None:
    """gelu, its gradient, silu and sigmoid over all magnitudes: at most twice eager's error, element by element where numbers are not tiny."""
    x = torch.cat(
        [torch.tensor([*SPECIAL, 88.5, -88.5, 89.0, -104.0, -200.0]), torch.linspace(-12, 12, 30011), torch.linspace(-110, 110, 5001)]
    ).to(dtype)

    def all_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = torch.ones_like(x)
        one = torch.ops.aten.gelu_backward(ones, x), torch.ops.aten.gelu_backward(ones, x, approximate="tanh")
        return F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), torch.sigmoid(x), 1 + torch.tanh(x), 1 + torch.exp(x), *one

    for ours, plain, exact in zip(magneto.compile(all_of)(x), all_of(x), all_of(x.double()), strict=True):
        known = exact.isfinite() & plain.isfinite()
        assert (
            (ours.isnan() == plain.isnan()) | (ours.isnan() == exact.isnan())
        ).all()  # eager's own gelu gives NaN or infinity by the number's place
        error, theirs = ((t.double() - exact)[known].abs() / (exact[known].abs() + 0.1) for t in (ours, plain))
        assert error.max() <= 2 * theirs.max() + 1e-7


@pytest.mark.parametrize("last", range(2, 8))
def test_rows_of_few_elements_under_a_condition(last: int) -> None:
    """gcc 12 takes the mask of the first lanes for all lanes of neighbouring loads under one condition (written out, a short last dimension)."""
    made = torch.arange(2 * 17 * last).view(2, 17, last)
    for x in (made.float(), made.double(), made, made.short()):
        for program in (
            lambda x: torch.cat([x, x + 1], 1),
            lambda x: F.pad(x, (0, 0, 1, 2), value=3),
            lambda x: torch.cat([x, x[:, :3], x], 1) * 2,
            lambda x: torch.cat([x, x], 2) + 1,
        ):
            assert torch.equal(magneto.compile(program)(x), program(x))


def test_turned_squares_beside_a_written_out_dimension() -> None:
    """Gradients of attention over transposed heads: memory that is read turned, at places that the dimension that is written out moves."""

    def products(heads, weights, given):
        q, k, v = heads.unbind(0)
        q, k, v = (
            q.contiguous().reshape(8, 32, 64),
            (k.transpose(-1, -2) * 1).contiguous().reshape(8, 64, 32),
            v.contiguous().reshape(8, 32, 64),
        )
        moved = given @ v.transpose(1, 2)
        moved = (moved - (moved * weights).sum(-1, keepdim=True)) * weights
        return q.transpose(1, 2) @ moved, moved @ k.transpose(1, 2)

    args = (torch.randn(2, 64, 3, 4, 32).permute(2, 0, 3, 4, 1), torch.randn(8, 32, 32), torch.randn(8, 32, 64))
    torch.testing.assert_close(magneto.compile(products)(*args), products(*args), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [31, 32, 33, 47, 100, 255])
def test_places_in_short_rows(size: int, dtype: torch.dtype) -> None:
    """The first of equal ones, NaN before all."""
    torch.manual_seed(size)
    x = torch.randint(0, 12, (40, size)).to(dtype)
    if dtype.is_floating_point:
        x[::3, size // 2] = torch.nan
        x[::5, size - 1] = torch.nan
        x[1] = -torch.inf
    call = magneto.compile(lambda x: (x.argmax(1), x.argmin(1), x.amax(1)), fullgraph=True)
    for ours, eager in zip(call(x), (x.argmax(1), x.argmin(1), x.amax(1)), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)
    assert ("s[16]" in "".join(magneto.inspect(call).kernels)) == (size >= 32)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5001), (40, 2100), (70_003,)])
def test_lanes_of_extrema_run_through_whole_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Only sums of floats are joined at the ends of blocks of a row."""
    g = Graph()
    base = torch.randint(0, 250, shape).to(dtype)
    if dtype.is_floating_point:
        base.view(-1)[[7, -1]] = torch.tensor([float("nan"), float("-inf")], dtype=dtype)
    x, last = g.input(base), (len(shape) - 1,)
    g.output(g.amax(x, last), g.amin(x, last))
    text = kernel_texts(g)
    assert f"g += {256 if dtype is torch.uint8 else 64}" in text and "i64 b =" not in text
    check_compiled(g, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_lanes_of_short_rows(dtype: torch.dtype) -> None:
    """Products, and folds of integers, in vectors that are joined in steps."""
    g = Graph()
    x = g.input(torch.randint(1, 4, (40, 100)).to(dtype) * (1 - 2 * torch.randint(0, 2, (40, 100))).to(dtype))
    g.output(g.prod(x, (1,)), g.amax(x, (1,)), g.amin(x, (1,)), g.sum(x, (1,)))
    text = kernel_texts(g)
    assert all(f"mg_lanes_{name}_" in text for name in ("prod", "maximum", "minimum", "sum"))
    check_compiled(g, 1e-6)


def test_truth_becomes_a_number_by_choice() -> None:
    """Where a _Bool is converted gcc goes by vectors of bytes, and what stands beside it (exp, log) is scalar code: a tenth of the speed."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(x, (x > 0).float()) + (x > 1).to(x.dtype).sum()

    compiled = magneto.compile(fn)
    x = torch.linspace(-4, 4, 3000)
    torch.testing.assert_close(compiled(x), fn(x))
    (entry,) = magneto.inspect(compiled)
    text = "".join(map(str, entry.kernels))
    assert "? 1.0f : 0.0f" in text
    truths = set(re.findall(r"_Bool (\w+) =", text))
    assert truths and not any(f"(f32)({name})" in text for name in truths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lgamma_is_the_librarys(dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(SPECIAL, dtype=dtype), torch.linspace(-20, 40, 500, dtype=dtype)])
    call = magneto.compile(lambda x: torch.lgamma(x + 1) * 2, fullgraph=True)
    torch.testing.assert_close(call(x), torch.lgamma(x + 1) * 2, rtol=0, atol=0, equal_nan=True)
    assert not any("lgamma(" in kernel for kernel in magneto.inspect(call).kernels)


def test_atan_beyond_one_has_what_its_quotient_lacks() -> None:
    """Near 1 a rounded quotient alone errs by another half of a unit."""
    x = torch.cat([torch.linspace(0.9, 1.6, 20_001), -torch.logspace(-44, 38, 5001)])
    found, exact = magneto.compile(torch.atan)(x), x.double().atan()
    assert ((found.double() - exact).abs() / exact.abs()).max() < 1.02 * 2.0**-23
