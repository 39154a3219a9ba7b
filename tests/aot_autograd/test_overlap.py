"""Writes that read a part of what they write: eager's error, or eager's result, never another one."""

from __future__ import annotations

import pytest
import torch

import magneto
from magneto.aot_autograd.storage import overlap_in_part


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_shifted_copy_raises_as_in_eager(backend: str) -> None:
    def f(a):
        a[1:].copy_(a[:-1])
        return a * 2

    a = torch.arange(6.0)
    with pytest.raises(RuntimeError, match="single memory location"):
        f(a.clone())
    with pytest.warns(magneto.MagnetoWarning, match="overlaps"), pytest.raises(RuntimeError, match="single memory location"):
        magneto.optimize(backend)(f)(a)
    assert torch.equal(a, torch.arange(6.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_halves_and_interleaved_parts_stay_compiled(backend: str) -> None:
    def f(a):
        a[:, :3].add_(a[:, 3:])
        a[::2].mul_(a[1::2])
        a[0].sub_(a[1])
        a.add_(a)
        return a

    a = torch.randn(4, 6)
    expected = f(a.clone())
    assert torch.allclose(magneto.optimize(backend)(f)(a), expected)
    assert magneto.stats()["fallbacks"] == 0


def test_overlap_against_sets_of_elements() -> None:
    base = torch.arange(48).reshape(6, 8)
    views = [base[i : i + n, j : j + m] for i in range(3) for j in range(4) for n in (1, 2, 3) for m in (1, 3, 4)]
    for a in views:
        for b in views:
            shares = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
            same = a.shape == b.shape and a.storage_offset() == b.storage_offset()
            if a.shape == b.shape:
                assert overlap_in_part(a, b) == (shares and not same)
            elif shares:
                assert overlap_in_part(a, b)
