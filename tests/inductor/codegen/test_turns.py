"""Sines, cosines and tangents: the short form where a piece of the arguments is near, the long one where a single one of them is far, with eager's errors at any argument."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import pytest
import torch

import magneto

STEP = 9_973  # of the bit patterns of float32
TURNS = {"sin": torch.sin, "cos": torch.cos, "tan": torch.tan}


def sampled() -> torch.Tensor:
    """Patterns in their order: nearly all pieces are near or far as a whole; a few far ones are put among near ones."""
    x = torch.arange(-(2**31), 2**31, STEP).to(torch.int32).view(torch.float32).clone()
    x[::50_003] = torch.tensor((math.inf, 1e30, -math.inf, math.nan, -0.0, 131072.0, -131080.0, 3e5, 1.0)).repeat(1 + len(x) // 450_027)[
        : len(x[::50_003])
    ]
    return x


@pytest.mark.parametrize("name", TURNS)
def test_every_argument(name: str) -> None:
    x = sampled()
    turn = TURNS[name]
    call = magneto.optimize("inductor", nopython=True)(lambda x: turn(x))
    want, got, exact = turn(x), call(x), turn(x.double())
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isnan(), ~x.isfinite())
    normal = exact.isfinite() & (exact.abs() > 2e-38)
    unit = exact[normal].abs() * torch.finfo(torch.float32).eps
    mine, theirs = (((t.double()[normal] - exact[normal]).abs() / unit).max().item() for t in (got, want))
    assert mine <= 2 * theirs + 0.6
    small = exact.abs() <= 2e-38
    assert (got - want)[small].abs().max() < 1e-44 if small.any() else name == "cos"
    assert torch.equal(got[x == 0].signbit(), want[x == 0].signbit())
    assert f"mg_near_{name}_f32(" in "".join(magneto.inspect(call).kernels)


def test_tangents_near_their_zeros_and_poles() -> None:
    """Quotients with what they and both sums lack, within twice eager's error (0.543 units): dense samples, and the numbers next to multiples of pi / 2."""
    turns = (torch.arange(-80_000, 80_000).double() * (math.pi / 2)).float()
    x = torch.cat(
        [turns, turns.nextafter(torch.tensor(math.inf)), turns.nextafter(torch.tensor(-math.inf)), torch.linspace(-20, 20, 1_000_001)]
        + [torch.linspace(2.3575, 2.3585, 4_000)]  # all numbers around the worst one there is (found by trying all from 0.1 to 4.8)
    )
    call = magneto.optimize("inductor", nopython=True)(lambda x: x.tan())
    exact = torch.tan(x.double())
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126))) - 23)
    assert ((call(x).double() - exact).abs() / unit).max() < 1.08 and torch.equal(call(x).signbit(), torch.tan(x).signbit())


def mixed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One argument in 700 is far."""
    torch.manual_seed(0)
    x = torch.randn(shape) * 40
    x.view(-1)[::700] *= 1e4
    return x.to(dtype)


PROGRAMS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "both": (lambda x: (x.sin(), x.cos()), (mixed(9, 1111),)),
    "one of a sine": (lambda x: (x.sin() * 3).cos() + (x * x).tan().clamp(-2, 2), (mixed(3, 800),)),
    "conditions": (lambda x, y: torch.where(y > 0, x.sin(), (x + 1).cos()), (mixed(40, 70), torch.randn(40, 70))),
    "sums along": (lambda x: (x.sin().sum(-1), x.cos().amax(-1)), (mixed(20, 3000),)),
    "sums across": (lambda x: (x.sin().sum(0), x.cos().argmax(0)), (mixed(300, 90),)),
    "one sum": (lambda x: x.sin().mean(), (mixed(70_000),)),
    "turned": (lambda x, y: x.sin() + y.t().cos(), (mixed(130, 90), mixed(90, 130))),
    "in place": (lambda x: x.clone().sin_().mul_(2).cos_(), (mixed(5000),)),
    "three colours": (lambda x: (x.permute(0, 3, 1, 2) * 2).sin().contiguous(), (mixed(2, 40, 40, 3),)),
    "looked up": (lambda x, i: (x[i] * 0.5).sin(), (mixed(100, 64), torch.randint(0, 100, (77,)))),
    "concatenated": (lambda x, y: torch.cat([(x[:, None] * y).cos(), (x[:, None] * y).sin()], -1), (mixed(60), torch.rand(70))),
    "past the caches": (lambda x: x.cos(), (mixed(2200, 1024),)),
    "double": (lambda x: (x.sin(), x.cos()), (mixed(9, 1111, dtype=torch.float64),)),
    "bfloat16": (lambda x: (x.sin(), x.cos()), (mixed(9, 1111, dtype=torch.bfloat16),)),
    "float16": (lambda x: (x.sin().sum(-1), (x * 0.5).cos()), (mixed(9, 1111, dtype=torch.float16).clamp(-6e4, 6e4),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_far_arguments(name: str) -> None:
    function, inputs = PROGRAMS[name]
    call = magneto.optimize("inductor", nopython=True)(function)
    rtol, atol = {2: (1e-2, 2e-3), 4: (1e-5, 2e-5), 8: (1e-9, 1e-9)}[inputs[0].element_size()]
    with torch.no_grad():
        torch.testing.assert_close(call(*inputs), function(*inputs), rtol=rtol, atol=atol, equal_nan=True)


def test_gradients_of_turns() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.cos() + x.tan().clamp(-1, 1)).sum()

    grads = []
    for call in (function, magneto.optimize("inductor", nopython=True)(function)):
        x = mixed(4000).requires_grad_()
        call(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


def test_any_size() -> None:
    call = magneto.compile(lambda x: (x * 2).sin().sum(-1), dynamic=True)
    for size in (50, 333, 700, 701, 1500):
        x = mixed(7, size)
        with torch.no_grad():
            torch.testing.assert_close(call(x), (x * 2).sin().sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_remainders_are_exact(dtype: torch.dtype) -> None:
    """For any two numbers, bit for bit, beside pieces whose quotients are too large for the short form; the kernel has both forms."""
    special = torch.tensor(
        [0.0, -0.0, 1.0, -3.0, 0.5, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4], dtype=dtype
    )
    bits = torch.randint(-(2**31), 2**31, (2, 3000), dtype=torch.int64) << (32 if dtype is torch.float64 else 0)
    anything = bits.view(dtype) if dtype is torch.float64 else bits.to(torch.int32).view(dtype)
    a = torch.cat(
        [
            torch.cartesian_prod(special, special)[:, 0],
            torch.randn(5000, dtype=dtype) * 1e6,
            -torch.arange(1.0, 999, dtype=dtype),
            anything[0],
        ]
    )
    b = torch.cat(
        [torch.cartesian_prod(special, special)[:, 1], torch.randn(5000, dtype=dtype), torch.full((998,), 3, dtype=dtype), anything[1]]
    )
    call = magneto.optimize("inductor", nopython=True)(lambda a, b: (torch.fmod(a, b), torch.remainder(a, b), a // b))
    fmod, remainder, floored = call(a, b)
    with numpy.errstate(all="ignore"):
        exact = torch.from_numpy(numpy.fmod(a.numpy(), b.numpy()))
    signed = torch.where((exact != 0) & ((exact < 0) != (b < 0)), exact + b, exact)
    for result, expected in ((fmod, exact), (remainder, signed)):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(result.signbit()[~result.isnan()], expected.signbit()[~result.isnan()])
    usual = ~torch.fmod(a, b).isnan()
    torch.testing.assert_close(floored[usual], (a // b)[usual], rtol=0, atol=0, equal_nan=True)
    kernel = "".join(magneto.inspect(call).kernels)
    assert "if (far)" in kernel and "mg_near_remainder_" in kernel
