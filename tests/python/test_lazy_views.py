"""Views whose conjugation or negation torch puts off: made, asked, written to, given to a region, taken apart. Programs run plain and traced (see programs.py)."""

# ruff: noqa

from __future__ import annotations

from typing import Any

import pytest
import torch

import magneto
from tests.compare import same
from tests.python.programs import Programs, check

programs = Programs()
C = torch.complex(torch.arange(6.0).reshape(2, 3), torch.linspace(-1, 1, 6).reshape(2, 3))


@programs.add(C)
def conjugates(x):
    y = x.conj()
    asked = (
        y.is_conj(),
        y.imag.is_neg(),
        y.real.is_neg(),
        y.resolve_conj().is_conj(),
        y.conj().is_conj(),
        torch.is_conj(y),
        x.resolve_conj() is x,
    )
    return y * 2, y.imag * 2, y.real, y.resolve_conj(), asked


@programs.add(C)
def written_through(x):
    y = x.conj()
    y.mul_(1j)
    z = x.conj().resolve_conj()
    z.add_(1)
    w = y.imag
    w.add_(3)
    return x, y.resolve_conj(), z, w.resolve_neg()


@programs.add(C)
def views_of_conjugates(x):
    y = x.conj()
    a, b, c = y.unbind(1)
    d = y.split(1, 1)
    return (
        a.is_conj(),
        d[0].is_conj(),
        y.t().is_conj(),
        y.reshape(-1).is_conj(),
        y.clone().is_conj(),
        a + b,
        y[0] * 1,
        x.mH @ x,
        torch.cat([y, y]),
    )


@programs.add(C)
def negative_views(x):
    n = torch._neg_view(x.real)
    n.add_(1)
    return n.resolve_neg(), x, n.is_neg(), n.detach().is_neg(), n.resolve_neg().is_neg()


@programs.add(C)
def transforms(x):
    return (
        torch.fft.ifft(x),
        torch.fft.ifft(x.real),
        torch.fft.hfft(x),
        torch.fft.irfft(torch.fft.rfft(x.real) * 2),
        torch.linalg.vecdot(x, x),
    )


@programs.add(C.clone().requires_grad_())
def gradients(x):
    return (x.conj() * x).real.sum() + x.conj().imag.sum()


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Any) -> None:
    check(program)


def through_a_break(x: torch.Tensor) -> Any:
    y, n = x.conj(), x.conj().imag
    magneto.graph_break()
    z = y * 2 + n
    y.add_(1)
    return z, y.is_conj(), n.is_neg(), y[0] * 1, n * 1


@pytest.mark.filterwarnings("ignore::magneto.base.errors.MagnetoWarning")  # compilers leave the second graph to eager (W104)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inputs_keep_their_bits(backend: str) -> None:
    compiled = magneto.optimize(backend)(through_a_break)
    for _ in range(2):
        same(through_a_break, compiled, C)
    assert magneto.stats()["breaks"] == 1


def test_the_bits_are_guarded() -> None:
    compiled = magneto.optimize("eager", nopython=True)(lambda x: (x.is_conj(), x * 2))
    for x, bit in ((C, False), (C.conj(), True), (C.clone(), False), (C.conj(), True)):
        asked, doubled = compiled(x)
        assert asked is bit
        torch.testing.assert_close(doubled, x * 2)
    assert magneto.stats()["recompiles"] == 1


def test_what_is_not_resolved_cannot_be_seen_as_real() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.conj())

    same(wrong, magneto.optimize("eager")(wrong), C)


def test_the_bits_are_known_where_sizes_vary() -> None:
    def program(x: torch.Tensor) -> object:
        y = x.mH
        return y.is_conj(), y.imag.is_neg(), y @ x

    compiled = magneto.optimize("eager", nopython=True, dynamic=True)(program)
    for n in (2, 3, 4):
        same(program, compiled, torch.randn(n, n, dtype=torch.complex64))
    assert magneto.stats()["graphs"] == 1
