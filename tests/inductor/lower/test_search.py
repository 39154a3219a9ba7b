"""`bucketize` and `searchsorted` are loops: eager's places for every type, NaN, unsorted and empty boundaries, and what is computed around them fused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch

import magneto
from magneto.inductor.loops.ir import Const, IndexValue, Load, Op, bounds_of
from magneto.inductor.lower import search
from magneto.symbolic import Sym

NAN, INF = float("nan"), float("inf")
FLOATS, INTEGERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16), (torch.int64, torch.int32, torch.int16, torch.uint8)


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randint(0 if dtype is torch.uint8 else -40, 40, shape, generator=torch.Generator().manual_seed(sum(shape)))
    if not dtype.is_floating_point:
        return x.to(dtype)
    x = (x / 4).to(dtype)
    x.view(-1)[::11], x.view(-1)[3::17], x.view(-1)[5::23], x.view(-1)[7::29] = NAN, INF, -0.0, -INF
    return x


def kernels_of(call: Callable[..., object], *inputs: torch.Tensor) -> str:
    compiled = magneto.optimize("inductor", nopython=True)(call)
    found, expected = compiled(*inputs), call(*inputs)
    for ours, theirs in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True):
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride() and torch.equal(ours, theirs)
    return "".join(magneto.inspect(compiled).kernels)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 31, 64, 100, 1000])
def test_places(count: int, dtype: torch.dtype) -> None:
    warnings.filterwarnings("ignore", "torch.searchsorted.*non-contiguous")
    x, boundaries = numbers(dtype, 7, 45), numbers(dtype, max(count, 1))[:count]
    for inputs in ((x, boundaries.sort().values), (x.t(), boundaries), (x[0, 0], boundaries.sort().values)):
        text = kernels_of(lambda x, b: (torch.bucketize(x, b), torch.searchsorted(b, x, side="right", out_int32=True)), *inputs)
        assert "status |=" not in text and (count < 2 or text)


def test_rows_of_boundaries() -> None:
    warnings.filterwarnings("ignore", "torch.searchsorted.*non-contiguous")
    x, boundaries = numbers(torch.float32, 3, 4, 50), numbers(torch.float32, 3, 4, 21).sort(-1).values
    text = kernels_of(lambda b, x: (torch.searchsorted(b, x * 2, right=True) + 1, torch.searchsorted(b[1, 2], x)), boundaries, x)
    assert text and "searchsorted" not in re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    kernels_of(lambda b, x: torch.searchsorted(b.transpose(0, 1), x.transpose(0, 1)), boundaries, x)


def test_a_sorter_and_a_number_stay_the_librarys() -> None:
    x, boundaries = numbers(torch.float32, 40), torch.randn(9)
    kernels_of(lambda b, x: torch.searchsorted(b, x, sorter=b.argsort()), boundaries, x)
    kernels_of(lambda b: torch.bucketize(0.25, b), boundaries.sort().values)


def test_the_text_grows_with_the_steps_and_joins_what_is_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, boundaries = torch.randn(300), torch.randn(1024).sort().values
    text = kernels_of(lambda x, b: torch.bucketize(b[torch.bucketize(x * 2, b).clamp(max=1023)], b) * 2, x, boundaries)
    assert text.count("int k_") == 1 and len(text) < 16000
    monkeypatch.setattr(search, "MOST", 1023)
    assert not kernels_of(lambda x, b: torch.bucketize(x, b), x, boundaries)


def test_bounds_of_whole_numbers() -> None:
    def op(name: str, *args: Op | Const | Load | IndexValue, dtype: torch.dtype = torch.int32) -> Op:
        return Op(name, args, dtype)

    def number(n: int, dtype: torch.dtype = torch.int32) -> Const:
        return Const(n, dtype)

    byte, any_number = Load("b", 0, torch.uint8), Load("a", 0, torch.int32)
    wide = op("convert_element_type", byte)
    all_of_them = (-(2**31), 2**31 - 1)
    cases = {
        byte: (0, 255),
        op("add", byte, byte, dtype=torch.uint8): (0, 255),  # it wraps
        op("add", wide, number(3)): (3, 258),
        op("sub", wide, wide): (-255, 255),
        op("add", any_number, number(1)): all_of_them,
        op("minimum", any_number, number(7)): (-(2**31), 7),
        op("maximum", op("minimum", any_number, number(7)), number(0)): (0, 7),
        op("remainder", any_number, number(5)): (0, 4),
        op("remainder", any_number, number(-5)): all_of_them,
        op("shift_right", wide, number(1)): (0, 127),
        op("where", Load("c", 0, torch.bool), wide, number(-4)): (-4, 255),
        op("convert_element_type", Load("f", 0, torch.float32)): all_of_them,
        op("convert_element_type", Op("mul", (any_number, any_number), torch.int32), dtype=torch.uint8): (0, 255),
        IndexValue(Sym("i0", 0, 9), torch.int32): (0, 9),
    }
    assert {value: bounds_of(value) for value in cases} == cases


def test_places_that_are_clamped_need_no_check() -> None:
    table, index = torch.randn(50), torch.randint(-100, 100, (300,))
    assert "status |=" not in kernels_of(lambda t, i: t[i.clamp(0, 49)] * 2, table, index)
    assert "status |=" in kernels_of(lambda t, i: t[i.clamp(-1, 49)] * 2, table, index)
