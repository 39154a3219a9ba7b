"""Programs that once gave another result than eager."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import magneto

BACKENDS = ("eager", "inductor")


@pytest.fixture(autouse=True)
def fresh() -> None:
    magneto.reset()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_slot_is_guarded(backend: str) -> None:
    def program(a: torch.Tensor, drop: bool) -> object:
        b = a * 2
        magneto.graph_break()
        if drop:
            del b
        magneto.graph_break()
        try:
            return b + a
        except NameError as error:
            return str(error)

    optimized = magneto.optimize(backend)(program)
    x = torch.ones(2)
    for drop in (True, False, True):
        expected, actual = program(x, drop), optimized(x, drop)
        assert type(expected) is type(actual)
        assert torch.equal(expected, actual) if isinstance(expected, torch.Tensor) else expected == actual


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failing_graph_leaves_no_trace(backend: str) -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        noise = torch.nn.functional.dropout(a, 0.5)
        return torch.nn.functional.embedding(torch.tensor([50]), noise)

    results = []
    for fn in (program, magneto.optimize(backend)(program)):
        torch.manual_seed(3)
        a = torch.zeros(3, 4)
        with pytest.raises(IndexError, match="index out of range in self"):
            fn(a)
        results.append((a, torch.rand(2)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_capture_draws_no_random_numbers(backend: str) -> None:
    def program(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.bernoulli(a), torch.multinomial(a, 2), torch.randn(2, generator=torch.Generator().manual_seed(1)), torch.rand(2)

    torch.manual_seed(1)
    expected = program(torch.full((3, 4), 0.5))
    torch.manual_seed(1)
    actual = magneto.optimize(backend)(program)(torch.full((3, 4), 0.5))
    assert all(torch.equal(p, q) for p, q in zip(expected, actual, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazily_negated_views(backend: str) -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.stack([a, a], -1)).conj().imag * 2

    x = torch.arange(4.0)
    assert torch.equal(magneto.optimize(backend)(program)(x), program(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_generator_left_half_way_is_closed(backend: str) -> None:
    log: list[str] = []

    def items(a: torch.Tensor) -> object:
        try:
            yield a
            yield a + 1
        finally:
            log.append("closed")

    def program(a: torch.Tensor) -> torch.Tensor:
        for item in items(a):  # type: ignore[attr-defined]
            return item * 2
        return a

    assert torch.equal(magneto.optimize(backend)(program)(torch.ones(2)), torch.full((2,), 2.0))
    gc.collect()
    assert log == ["closed"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_break_keeps_no_tensor(backend: str) -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        magneto.graph_break()
        return b + 1

    optimized = magneto.optimize(backend)(program)
    a = torch.ones(3)
    optimized(a)
    kept = weakref.ref(a)
    del a
    gc.collect()
    assert kept() is None
