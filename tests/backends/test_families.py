"""Graphs whose sizes vary have families of plans: what the compiler makes of them at some sizes gives the plans of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.backends.families import Families
from magneto.base.events import recording
from tests.backends.test_sized import check, compiled, counted

COUNTS = ("families", "sizes_of_families", "sizes_compiled", "sizes_in_eager", "families_refused", "sizes_of_no_family")


class Since:
    """Counters from here on."""

    def __init__(self) -> None:
        self.before = {name: counted(name) for name in COUNTS}

    def __getattr__(self, name: str) -> float:
        return counted(name) - self.before[name]


def attention(x: Any, w: Any, g: Any) -> Any:
    b, n, d = x.size(0), x.size(1), x.size(2)
    for _ in range(2):
        h = F.layer_norm(x, (32,), g)
        q, k, v = F.linear(h, w).view(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.transpose(1, 2).reshape(b, n, d)
    return x, x.transpose(0, 1), n * b


def grows(k: Any, v: Any, x: Any, w: Any) -> Any:
    """A step of decoding with a cache."""
    q, a, b = F.linear(x, w).chunk(3, -1)
    k, v = torch.cat((k, a.view(1, 1, 1, 16).expand(1, 4, 1, 16)), 2), torch.cat((v, b.view(1, 1, 1, 16).expand(1, 4, 1, 16)), 2)
    return F.scaled_dot_product_attention(q.view(1, 1, 1, 16).expand(1, 4, 1, 16), k, v).flatten(1) / k.size(2), k, v


def writes(x: Any, y: Any) -> Any:
    x.mul_(2)
    y.add_(x.sum(1))
    return x.t(), x[1:], y * y.size(0)


def test_one_family_answers_many_sizes() -> None:
    w, g = torch.randn(96, 32) / 8, torch.randn(32)
    since = Since()
    with torch.no_grad():
        ours = compiled(attention, [torch.randn(3, 48, 32), w, g], (0, 0, 0), (0, 1, 1))
        assert (since.families, since.sizes_compiled) == (1, 0)
        for b, n in ((3, 48), (4, 48), (3, 49), (7, 53), (8, 60), (13, 64), (4, 50), (5, 91)):
            for _ in range(2):
                check(attention, ours, lambda: (torch.randn(b, n, 32), w.clone(), g.clone()), 1e-4)
    assert (since.families, since.sizes_of_families, since.sizes_compiled, since.sizes_in_eager) == (1, 8, 0, 0)


def test_a_growing_cache_is_never_compiled_again() -> None:
    w = torch.randn(48, 8)
    k, v = torch.randn(1, 4, 20, 16), torch.randn(1, 4, 20, 16)
    since = Since()
    with torch.no_grad():
        ours = compiled(grows, [k, v, torch.randn(1, 8), w], (0, 2, 0), (1, 2, 0))
        for _ in range(100):
            x = torch.randn(1, 8)
            check(grows, ours, lambda: (k.clone(), v.clone(), x.clone(), w.clone()), 1e-4)
            _, k, v = grows(k, v, x, w)
    assert since.families <= 3 and since.sizes_compiled == since.sizes_in_eager == 0


def test_writes_and_views() -> None:
    since = Since()
    with torch.no_grad():
        ours = compiled(writes, [torch.randn(40, 24), torch.randn(40)], (0, 0, 0), (1, 0, 0), mutated_inputs=(0, 1))
        for n in range(33, 64, 3):
            check(writes, ours, lambda: (torch.randn(n, 24), torch.randn(n)), 1e-4)  # sums may cancel
    assert since.families == 1 and since.sizes_of_families == 12 and since.sizes_compiled == 0


def test_what_is_no_expression_of_the_sizes_has_no_family() -> None:
    def halves(x: Any) -> Any:
        n = x.size(0)
        return x[: n // 2] * 2, x.sum() + n % 7, torch.arange(n) * (n % 50 == 0)

    since = Since()
    with torch.no_grad():
        ours = compiled(halves, [torch.randn(40)], (0, 0, 0))
        for n in (40, 41, 50, 52, 100, 50, 41):
            check(halves, ours, lambda: (torch.randn(n),))
    assert since.sizes_of_families == 0 and since.families_refused


def test_decisions_between_samples_are_seen() -> None:
    """A number that all samples agree on, and one size does not."""

    def rare(x: Any) -> Any:
        return (x * (x.size(0) % 53 == 0),)

    since = Since()
    with torch.no_grad():
        ours = compiled(rare, [torch.randn(40)], (0, 0, 0))
        for n in range(34, 64):
            check(rare, ours, lambda: (torch.randn(n),))
    assert since.families == 1 and since.sizes_of_no_family == 1


def test_aliases_that_a_size_makes_are_seen() -> None:
    def cut(x: Any) -> Any:
        return (x[:, :45].contiguous() + 0, x[:, :45].contiguous())

    with torch.no_grad():
        ours = compiled(cut, [torch.randn(3, 60)], (0, 1, 0))
        for n in range(45, 64):
            check(cut, ours, lambda: (torch.randn(3, n),))


def test_why_there_is_no_family_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(x: Any) -> Any:
        return (x.cumsum(0), x.size(0) ** 2 // 3 + x)

    with torch.no_grad(), recording("artifact") as found:
        compiled(lengths, [torch.randn(40)], (0, 0, 0))
    assert any("refused" in event.fields or "domain" in event.fields for event in found)


@pytest.mark.parametrize("records", [False, True])
def test_loops_over_time_are_told_from_few_short_samples(records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    example = Families.example
    monkeypatch.setattr(Families, "example", lambda self, key, inputs: seen.append(key) or example(self, key, inputs))
    layer = torch.nn.GRU(3, 3)
    compiled = magneto.compile(layer, dynamic=True)
    for n in (5, 7, 9):
        x = torch.randn(n, 1, 3)
        with torch.set_grad_enabled(records):
            torch.testing.assert_close(compiled(x)[0], layer(x)[0])
    assert len(seen) <= 5 and max(map(max, seen)) < 10
