"""float16 is converted in whole pieces of a row: every number, every length, rows and folds, next to other types."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.base.events import recording
from tests.inductor.codegen.compiled import check_compiled
from tests.inductor.codegen.test_across import texts
from tests.inductor.lower.prim_graphs import Graph
from tests.inductor.schedule.test_fuse import softmax


def everything() -> torch.Tensor:
    """All float16 numbers: subnormal ones, infinities, NaN."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)


def test_every_number() -> None:
    g = Graph()
    x = g.input(everything())
    wide = g.convert_element_type(x, torch.float32)
    rounded = g.convert_element_type(g.mul(g.input(torch.linspace(-70000, 70000, 1 << 16)), 1.0), torch.float16)
    tiny = g.convert_element_type(g.mul(g.input(torch.linspace(-1e-4, 1e-4, 1 << 16)), 1.0), torch.float16)
    g.output(g.neg(x), wide, rounded, tiny, g.convert_element_type(g.mul(wide, 1.5), torch.float16))
    text = texts(g)
    assert (
        text.count("mg_widen_f16(") == 1 and text.count("mg_narrow_f16(") == 4 and "mg_store_f16" not in text and "mg_load_f16" not in text
    )
    check_compiled(g, 0)


@pytest.mark.parametrize("shape", [(64,), (65,), (1023,), (1025,), (20000,), (5, 70), (3, 2050), (2, 3, 129)])
def test_every_length(shape: tuple[int, ...]) -> None:
    g = Graph()
    x = g.input(torch.randn(shape).half())
    y = g.input(torch.randn(*shape[:-1], 2 * shape[-1]).half()[..., ::2])
    z = g.input(torch.randn(*shape[:-1], shape[-1] + 1).half()[..., 1:])
    g.output(g.add(g.mul(x, 3.0), z), g.maximum(y, x), g.sum(x, (len(shape) - 1,)), g.amax(z, (0,)))
    assert "mg_widen_f16(" in texts(g)
    check_compiled(g, 2e-3)


@pytest.mark.parametrize("width", [63, 64, 300, 3000])
def test_rows_walked_several_times(width: int) -> None:
    g = Graph()
    x = g.input(torch.randn(20, width).half())
    g.output(softmax(g, x), g.argmax(x, 1), g.argmax(x, 0))
    check_compiled(g, 2e-3)


def test_transposed_and_padded() -> None:
    g = Graph()
    x = g.input(torch.randn(90, 130).half())
    turned = g.add(g.transpose(x, (1, 0)), g.input(torch.randn(130, 90).half()))
    g.output(turned, g.mul(g.pad(x, (1, 2), (0, 1), 1.0), 2.0))
    check_compiled(g, 2e-3)


def test_rounding_of_large_numbers_within_a_kernel() -> None:
    """Numbers far beyond float16 become infinite also where the result of the rounding stays in registers."""
    g = Graph()
    x = g.input(
        torch.cat(
            [
                torch.logspace(0, 38, 5000),
                -torch.logspace(0, 38, 5000),
                torch.tensor([65503.9, 65519.9, 65520.0, float("inf"), float("nan")]),
            ]
        )
    )
    rounded = g.convert_element_type(g.convert_element_type(x, torch.float16), torch.float32)
    g.output(g.add(rounded, 1.0), g.convert_element_type(g.neg(g.convert_element_type(x, torch.float16)), torch.float16))
    check_compiled(g, 0)


@pytest.mark.parametrize("chosen", [False, True])
def test_rounding_in_registers(chosen: bool) -> None:
    """By the machine's conversion; by arithmetic where a condition chooses. Numbers of every magnitude, those in the middle of two float16 numbers and their neighbours, infinities, NaN."""
    bits = torch.arange(-(1 << 31), 1 << 31, (1 << 12) - 1, dtype=torch.int64).to(torch.int32)
    halves = torch.arange(0, 1 << 15, dtype=torch.int32) << 13
    middle = torch.cat([halves + 0x38001000 + step for step in (-1, 0, 1)])  # from 2^-15 on
    x = torch.cat([bits, middle, middle | -(1 << 31)]).view(torch.float32)
    g = Graph()
    v = g.input(x)
    rounded = g.convert_element_type(g.convert_element_type(v, torch.float16), torch.float32)
    g.output(g.where(g.ne(v, 7.0), rounded, 3.0) if chosen else g.mul(rounded, 2.0))
    text = texts(g)
    assert ("mg_round_f16(" if chosen else "mg_machine_f16(") in text
    check_compiled(g, 0, interpreter=False)


SHORT = {"gelu": "mg_cdf_half(", "silu": "mg_silu_half(", "sigmoid": "mg_exp1_half(", "gelu_tanh": "mg_tanh1_half("}


def in_order(x: torch.Tensor) -> torch.Tensor:
    """The place of each number among all of its type, both zeros being one."""
    n = x.view(torch.int16).int()
    return torch.where(n < 0, -(n & 0x7FFF), n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHORT)
def test_short_forms(name: str, dtype: torch.dtype) -> None:
    """Of every number: as near to the exact result as eager's, or its neighbour; seldom the neighbour; eager's infinities, zeros and NaN, where it has those of the exact result (its AVX-512 gelu overflows from 1.7e38)."""
    f = {"gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[name]
    x = everything().view(dtype)
    with recording("kernel") as found:
        ours = magneto.compile(f)(x)
    assert any(SHORT[name] in event.source for event in found if "source" in event.fields)
    plain, wide = f(x), x.double()
    exact = {
        "gelu": wide * 0.5 * torch.special.erfc(-wide / 2**0.5),
        "gelu_tanh": wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)),
    }.get(name, f(wide))
    rounded = exact.to(dtype)
    usual = (plain.isnan() == rounded.isnan()) & (plain.isinf() == rounded.isinf()) | plain.isfinite()
    for special in (torch.isnan, torch.isinf):
        assert torch.equal(special(ours), torch.where(usual, special(plain), special(rounded)))
    known = ~ours.isnan() & ~exact.isnan() & ~plain.isnan()
    assert torch.equal(torch.signbit(ours)[known], torch.signbit(plain)[known])
    away, eagers = ((in_order(y) - in_order(rounded)).abs()[known] for y in (ours, plain))
    assert bool((away <= eagers.clamp(min=1)).all()) and int((away > 0).sum()) < 400


def test_wide_results_keep_the_long_forms() -> None:
    x = torch.randn(1000).bfloat16()
    with recording("kernel") as found:
        ours = magneto.compile(lambda x: F.silu(x.float()))(x)
    assert not any("mg_silu_half(" in event.source for event in found if "source" in event.fields)
    torch.testing.assert_close(ours, F.silu(x.double()).float(), rtol=3e-7, atol=0)


def test_maxima_behind_rounding_are_vectors() -> None:
    """gcc branches after comparisons that it can tell from an earlier one. All numbers of bfloat16, with every NaN; how many loops became vectors is asked of gcc itself."""
    from magneto.inductor.codegen.cpp_preamble import preamble
    from magneto.inductor.runtime.compiler import Compiler, find_compiler

    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    def fn(x: torch.Tensor, y: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.maximum((x / s).to(torch.bfloat16), y) * z

    call = magneto.optimize("inductor", nopython=True)(fn)
    arguments = x.float(), x.flip(0), torch.tensor([3.0]), x.roll(99)
    want, got = fn(*arguments), call(*arguments)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):  # its conversion keeps what a NaN carries
        assert set(got.view(torch.int16)[got.isnan()].tolist()) == {0x7FC0}
    compiler = find_compiler()
    if not isinstance(compiler, Compiler) or compiler.kind != "gcc":
        pytest.skip("gcc says which loops it has made vectors")
    (kernel,) = magneto.inspect(call).kernels
    command = [compiler.path, *compiler.flags(), "-", "-o", "/dev/null", "-fopt-info-vec-optimized"]
    said = subprocess.run(command, input=preamble(0) + kernel, capture_output=True, text=True, check=True).stderr
    begin = preamble(0).count("\n")
    assert any(int(line) > begin for line in re.findall(r":(\d+):\d+: optimized: loop vectorized", said)), said


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_become_int64_as_the_machine_does_it(dtype: torch.dtype) -> None:
    """In vectors, of which AVX2 has none for this: every exponent, both signs, what no int64 holds."""
    x = torch.cat(
        [torch.randn(200) * 2.0**e for e in range(-3, 70)]
        + [torch.tensor((math.inf, -math.inf, math.nan, -0.0, 2.0**63, -(2.0**63), 2.0**31))]
    )
    x = torch.cat([x, -x]).to(dtype)
    fn = magneto.optimize("inductor", nopython=True)(lambda x: (x * 1).to(torch.int64))
    assert torch.equal(fn(x), (x * 1).to(torch.int64))
    assert f"mg_f{16 if dtype is torch.float16 else 32}_i64(" in "".join(magneto.inspect(fn).kernels)


@pytest.mark.parametrize("dim", [0, 1])
def test_float16_across_rows_is_converted_in_pieces(dim: int) -> None:
    x = torch.randn(70, 90, 300).half()
    fn = magneto.optimize("inductor", nopython=True)(lambda x: (x.softmax(dim), x.amax(dim), (x * 2).sum(dim)))
    for ours, eager in zip(fn(x), (x.softmax(dim), x.amax(dim), (x * 2).sum(dim)), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-3, atol=1e-3)
    assert "mg_widen_f16(" in "".join(magneto.inspect(fn).kernels) and "= mg_load_f16(" not in "".join(magneto.inspect(fn).kernels)


@pytest.mark.parametrize("number", [0.0, -0.0, 2.0, -3.0, math.inf, math.nan])
def test_extremes_with_numbers(number: float) -> None:
    x = torch.tensor((math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0, -3.0, 1e-40, 5.0)).repeat(9)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.maximum(x, torch.full_like(x, number)),
            torch.minimum(x, torch.full_like(x, number)),
            x.clamp(number, 4.0),
            F.hardswish(x),
        )

    for ours, eager in zip(magneto.optimize("inductor", nopython=True)(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quotients_that_are_rounded_at_once(dtype: torch.dtype) -> None:
    """They are products with the reciprocal: for every number eager's result, or one as near to the exact one. What is read in float32 is divided."""
    x = everything().view(dtype)
    for function in (F.hardswish, F.hardsigmoid, lambda x: x / 3, lambda x: x / 1e-6, lambda x: (x / 7).floor()):
        call = magneto.optimize("inductor", nopython=True)(function)
        ours, eager, exact = call(x), function(x), function(x.double())
        different = (ours != eager) & ~(ours.isnan() & eager.isnan())
        assert ((ours.double() - exact).abs() <= 2 * (eager.double() - exact).abs())[different].all()
        assert "mg_div_by(" not in "".join(magneto.inspect(call).kernels)
    kept = magneto.optimize("inductor", nopython=True)(lambda x: (x.float() / 7).floor().to(dtype))
    assert torch.equal(kept(x).nan_to_num(), (x.float() / 7).floor().to(dtype).nan_to_num())
    assert "mg_div_by(" in "".join(magneto.inspect(kept).kernels)


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "clamp": lambda x: x.clamp(-1, 1.5),
    "abs": lambda x: -x.abs(),
    "where": lambda x: torch.where(x > 1, x, 0.5),
    "turned": lambda x: x.view(256, 256).t().contiguous(),
    "parts": lambda x: torch.cat([x.view(256, 256), -x.view(256, 256).flip(1)], 1),
    "largest": lambda x: torch.maximum(x, x.flip(0)).minimum(x.new_ones(())),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_bfloat16_holds_is_not_rounded(name: str) -> None:
    """Every number, to the bit but for which NaN it is."""
    x = everything().view(torch.bfloat16)
    call = magneto.optimize("inductor", nopython=True)(EXACT[name])
    ours, eager = call(x), EXACT[name](x)
    assert ours.isnan().equal(eager.isnan()) and ours.stride() == eager.stride()
    assert torch.where(ours.isnan(), 0, ours.view(torch.int16)).equal(torch.where(eager.isnan(), 0, eager.view(torch.int16)))
    text = "".join(magneto.inspect(call).kernels)
    assert ("mg_cut_bf16(" in text or "i16 *" in text) and "mg_narrow_bf16(" not in text and "mg_round_bf16(" not in text


def test_what_bfloat16_does_not_hold_is_rounded() -> None:
    x = everything().view(torch.bfloat16)
    for function in (
        lambda x: x.clamp(-0.1, 0.1) + 1,
        lambda x: torch.where(x > 1, x, x.float() * 1.1).bfloat16(),
        lambda x: x.float().clamp(max=0.3).bfloat16(),
    ):
        call = magneto.optimize("inductor", nopython=True)(function)
        torch.testing.assert_close(call(x), function(x), rtol=0, atol=0, equal_nan=True)
        assert "mg_cut_bf16(" not in "".join(magneto.inspect(call).kernels)


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2), value=0.1),
    "rotated": lambda x: torch.cat([-x[:, 32:], x[:, :32].abs()], -1),
    "rolled": lambda x: x.roll(3, 0),
    "shuffled": lambda x: x.view(-1, 4, 16).transpose(1, 2).reshape(-1, 64),
    "looked up": lambda x: x[torch.tensor([1, 3, 3, 2])].tril(),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MOVES)
def test_what_is_moved_keeps_its_bits(name: str, dtype: torch.dtype) -> None:
    """NaN of every payload too; nothing is converted."""
    call = magneto.optimize("inductor", nopython=True)(MOVES[name])
    x = everything().view(dtype).view(-1, 64)
    assert torch.equal(call(x).view(torch.int16), MOVES[name](x).view(torch.int16))
    assert "16(" not in "".join(magneto.inspect(call).kernels)


def test_what_is_compared_is_not_bits() -> None:
    call = magneto.optimize("inductor", nopython=True)(lambda x, y: (torch.where(x > 0, x, -y), x.float(), x.flip(0)))
    x, y = everything().view(-1, 64), everything().flip(0).view(-1, 64)
    torch.testing.assert_close(call(x, y), (torch.where(x > 0, x, -y), x.float(), x.flip(0)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(64,), (1040,), (1023,), (20003,), (5, 70), (3, 2050)])
def test_float16_is_converted_in_registers(shape: tuple[int, ...]) -> None:
    """Sixteen elements at once, in place and between types, whether or not something is left behind the last sixteen."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2).add_(y)
        return torch.relu(x), (x + z), x * 0.5 + y, y.float() * 3, z.half()

    call = magneto.optimize("inductor", nopython=True)(function)
    x, y, z = torch.randn(shape).half(), torch.randn(shape).half(), torch.randn(shape)
    ours, theirs = x.clone(), x.clone()
    torch.testing.assert_close(call(ours, y, z), function(theirs, y, z), rtol=0, atol=0)
    assert torch.equal(ours, theirs)
    text = "".join(magneto.inspect(call).kernels)
    assert "g += 16" in text and ("if (g < " in text) == (shape[-1] % 16 > 0)


@pytest.mark.parametrize("columns", [512, 700])
def test_sums_of_float16_are_converted_in_registers(columns: int) -> None:
    call = magneto.optimize("inductor", nopython=True)(lambda x: (x.sum(-1), F.layer_norm(x, (columns,))))
    x = torch.randn(9, columns).half()
    torch.testing.assert_close(call(x), (x.sum(-1), F.layer_norm(x, (columns,))), rtol=2e-3, atol=2e-3)
    text = "".join(magneto.inspect(call).kernels)
    assert re.search(r"mg_widen_f16\(h\d+, p0 .*, 64\);", text) and not re.search(r"mg_widen_f16\(.*- b\);", text)


@pytest.mark.parametrize(("width", "whole"), [(64, True), (80, False), (96, True), (16, False), (128, True)])
def test_short_rows_of_float16_are_converted_in_vectors(width: int, whole: bool) -> None:
    """Rotary embeddings of halves of a row: 0.53 of eager's speed when each number was converted by itself. Rows that fill no vectors stay so."""
    half = width // 2

    def rotated(q: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return q * c + torch.cat([-q[..., half:], q[..., :half]], -1) * s

    torch.manual_seed(0)
    given = [torch.randn(shape).half() for shape in ((2, 3, 50, width), (50, width), (50, width))]
    for x in given:
        x[..., 0] = torch.tensor([float("inf"), -0.0, 6e-8, 65504.0, float("nan")]).repeat(10)
    with torch.no_grad(), recording("kernel") as found:
        ours = magneto.compile(rotated)(*given)
    assert torch.equal(ours.view(torch.int16)[~ours.isnan()], rotated(*given).view(torch.int16)[~ours.isnan()])
    assert torch.equal(ours.isnan(), rotated(*given).isnan())
    text = "".join(event.source for event in found if "source" in event.fields)
    assert ("= mg_load_f16(" not in text.split("int SYMBOL")[-1]) == whole
