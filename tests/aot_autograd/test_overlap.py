"""Writes that read a part of what they write: eager's error, or eager's result, never another one."""

from __future__ import annotations

import warnings
from typing import Any

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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", [((2, 2), (1, 1), 1), ((5, 4), (2, 1)), ((3, 4), (0, 1))])
def test_tensors_that_overlap_themselves_are_written_as_in_eager(backend: str, layout: Any) -> None:
    """A functional scatter copies the whole storage: what shares memory with what it writes changes too."""

    def written(x):
        x[0].mul_(2)
        return x + 1, x.sum()

    def selected(x):
        return torch.select_scatter(x, x[0] * 2, 0, 1) + 1, torch.slice_scatter(x, x[:1] * 3, 0, 0, 1)

    def others(x):
        return torch.diagonal_scatter(x, x.diagonal() * 2).sum(0), torch.as_strided_scatter(x, x[0, :2] * 3, (2,), (1,)).sum(0)

    for fn in (written, selected, others):
        x, own = (torch.arange(1.0, 16.0).as_strided(*layout) for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", magneto.MagnetoWarning)
            results = magneto.optimize(backend)(fn)(own)
        for expected, found in zip((*fn(x), x), (*results, own), strict=True):
            assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_gradients_of_a_scatter_into_what_overlaps_itself() -> None:
    def step(fn):
        x = torch.arange(1.0, 9.0).as_strided((2, 2), (1, 1), 1).requires_grad_()
        (fn(x) * torch.arange(1.0, 5.0).view(2, 2)).sum().backward()
        return x.grad

    def fn(x):
        return torch.select_scatter(x, x[0] * 2, 0, 1)

    with pytest.warns(magneto.MagnetoWarning, match="overlaps itself"):
        assert torch.equal(step(magneto.optimize("aot_eager")(fn)), step(fn))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_nothing_is_written_twice_where_an_expanded_input_cannot_be(backend: str) -> None:
    """The write to the one raises (eager's `index_put_` does not), when the other has been written."""

    def f(t, rows, i):
        t *= 2
        rows[i] = t
        return rows.sum()

    results = []
    for fn in (f, magneto.optimize(backend)(f)):
        t, rows = torch.arange(3.0), torch.zeros(1, 3).expand(4, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append((fn(t, rows, torch.tensor([1])), t, rows))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("write", ["x.data.fill_(3)", "x.data[0].add_(1)", "x.data.add_(1)", "x.detach().t().zero_()"])
def test_an_expanded_input_that_requires_grad_is_written_through_its_data(backend: str, write: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def f(x):\n    {write}\n    return x * 2", names)
    results = []
    for fn in (names["f"], magneto.optimize(backend)(names["f"])):
        w = torch.nn.Parameter(torch.arange(3.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", magneto.MagnetoWarning)
            try:
                results.append((fn(w.expand(2, 3)), w))
            except RuntimeError as error:
                results.append((str(error), w))
    assert str(results[0]) == str(results[1])
