"""Parts of a tensor written one after the other, then a softmax: what is known at every point is computed once, and what is long is kept for the next walk over the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import magneto
from magneto.base.events import recording


def scores(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As sliding windows of attention are put together and masked at both ends."""
    out = x.new_zeros(x.shape)
    out[:, :-1, 20:] = x[:, 1:, 20:]
    out[:, -1, 20:] = y[:, 0, 20:]
    out[:, 1:, :20] = y[:, :-1, 20:40]
    first, last = out[:, :8, :21], out[:, -8:, -21:]
    out[:, :8, :21] = torch.where(first > 1, -first, first)
    out[:, -8:, -21:] = torch.where(last > 1, -last, last)
    return (out + y).softmax(-1)


def kernels_of_softmax(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[str]:
    with recording("kernel") as found:
        ours = magneto.compile(function)(*inputs)
    torch.testing.assert_close(ours, function(*inputs), rtol=2e-6, atol=1e-6)
    return [event.source for event in found if "amax" in event.fields.get("source", "")]


def test_parts_are_read_once() -> None:
    torch.manual_seed(0)
    (source,) = kernels_of_softmax(scores, torch.randn(12, 32, 80), torch.randn(12, 32, 80))
    assert source.count("? p") <= 5  # 9 where each condition reads its own


@pytest.mark.parametrize(("steps", "kept"), [(4, 0), (12, 1)])
def test_long_rows_of_arithmetic_are_kept(steps: int, kept: int) -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        y = x
        for k in range(steps):
            y = (y - 0.25 * k) * x
        return y.clamp(-9, 9).softmax(-1)

    (source,) = kernels_of_softmax(long, torch.rand(64, 80))
    assert source.count("[80];") == 1 + kept  # the exponentials are always
