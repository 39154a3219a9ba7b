"""Bags of one size as lookups and sums: eager's results and gradients, on any device that the way is open for; all else goes eager's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.graph import ways


def calls(fn: Any) -> list[str]:
    """What aten is asked for."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        fn()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_bags_of_one_size(dtype: torch.dtype, mode: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "BAGS_ON", "cpu")

    def bags(i: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if mode == "weighted":
            return F.embedding_bag(i, w, mode="sum", per_sample_weights=s) * 2
        return F.embedding_bag(i, w, mode=mode) * 2

    torch.manual_seed(0)
    w, i = torch.randn(30, 8, dtype=dtype), torch.randint(0, 30, (7, 5), dtype=kind)
    s = torch.randn(7, 5, dtype=dtype)
    found = []
    for fn in (bags, magneto.optimize("inductor")(bags)):
        leaves = [w.clone().requires_grad_(), s.clone().requires_grad_()]
        out = fn(i, *leaves)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out))
        found.append([out, leaves[0].grad, *([leaves[1].grad] if mode == "weighted" else [])])
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert (ours.dtype, ours.stride()) == (wanted.dtype, wanted.stride())
        torch.testing.assert_close(ours, wanted)
    assert not any("embedding_bag" in name for name in calls(lambda: ways.WAYS[F.embedding_bag](i, w, mode="sum")))


KEPT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "offsets": ((10,), {"offsets": torch.tensor([0, 4, 4])}),
    "largest": ((3, 4), {"mode": "max"}),
    "padding": ((3, 4), {"padding_idx": 2}),
    "padding by the first": ((3, 4), {"padding_idx": 0}),
    "by frequency": ((3, 4), {"scale_grad_by_freq": True}),
    "no bag": ((0, 4), {"mode": "mean"}),
    "sparse": ((3, 4), {"sparse": True}),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_bags_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "BAGS_ON", "cpu")
    (shape, options), w = KEPT[name], torch.randn(9, 4)
    i = torch.randint(0, 9, shape)
    found = []
    assert any("embedding_bag" in call for call in calls(lambda: found.append(ways.WAYS[F.embedding_bag](i, w, **options))))
    torch.testing.assert_close(found[0], F.embedding_bag(i, w, **options))


def test_refusals_are_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "BAGS_ON", "cpu")
    w, i = torch.randn(9, 4), torch.randint(0, 9, (2, 3))
    for given, options in (
        ((i, w), {"mode": "most"}),
        ((i, w), {"mode": "mean", "per_sample_weights": torch.ones(2, 3)}),
        ((i.float(), w), {}),
    ):
        with pytest.raises(Exception) as wanted:  # noqa: PT011
            F.embedding_bag(*given, **options)
        with pytest.raises(type(wanted.value)) as found:
            magneto.optimize("inductor")(F.embedding_bag)(*given, **options)
        assert str(found.value) == str(wanted.value)


def test_nothing_changes_on_the_cpu() -> None:
    w, i = torch.randn(9, 4), torch.randint(0, 9, (2, 3))
    assert any("embedding_bag" in call for call in calls(lambda: ways.WAYS[F.embedding_bag](i, w)))
