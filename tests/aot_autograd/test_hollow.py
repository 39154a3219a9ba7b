"""Tensors without data while a graph is traced: on a GPU they have no memory at all, and a read of one is a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import magneto
from magneto.aot_autograd import joint, mode, trace
from magneto.base import events
from magneto.graph.meta import TensorMeta


@pytest.mark.parametrize("shape, strides", [((64, 3), (3, 1)), ((2, 3, 4), (1, 8, 2)), ((), ()), ((0, 5), (5, 1)), ((4, 6), (0, 1))])
def test_geometry_and_views(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    meta = TensorMeta(shape, strides, torch.float16)
    t, real = mode.without_memory(meta), torch.empty_strided(shape, strides, dtype=torch.float16)
    assert TensorMeta.of(t) == TensorMeta.of(real) == meta
    assert t.untyped_storage().nbytes() == real.untyped_storage().nbytes() or not t.numel()
    if t.numel():
        assert t.as_strided((1,), (1,), 0)._base is t
        with pytest.raises(RuntimeError, match="out of bounds"):
            t.as_strided((1000,), (1,))


def test_each_is_somewhere_else() -> None:
    meta = TensorMeta((1 << 20,), (1,), torch.float32)
    found = [mode.without_memory(meta) for _ in range(1000)]  # 4 GB, if there were memory
    assert len({t.untyped_storage().data_ptr() for t in found}) == len({t.untyped_storage()._cdata for t in found}) == 1000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.cell = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        h, _ = self.cell(h)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h[:, 0] += 1
        return torch.stack([part.softmax(-1).cumsum(1) for part in h.chunk(2, 1)]).pow(2).mean()


def test_nothing_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for module in (mode, trace, joint):
        monkeypatch.setattr(module, "hollow", lambda meta: made.append(meta) or mode.without_memory(meta))
    torch.manual_seed(0)
    m, x = Model(), torch.randn(2, 3, 8, 8)
    run = magneto.optimize("aot_eager")(m)
    expected, gradients = m(x), torch.autograd.grad(m(x), list(m.parameters()))
    found = run(x)
    found.backward()
    torch.testing.assert_close(found, expected)
    for p, g in zip(m.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g)
    assert len(made) > 30


def test_an_input_with_gaps_that_autograd_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode does not see how its stand-in is made."""
    for module in (mode, trace, joint):
        monkeypatch.setattr(module, "hollow", mode.without_memory)
    x = torch.randn(4, 6, requires_grad=True)
    run = magneto.optimize("aot_eager", nopython=True)(lambda part: (part * part).sum())
    run((x * 2)[:, ::2]).backward()
    assert x.grad is not None and torch.allclose(x.grad[:, ::2], 8 * x[:, ::2]) and not x.grad[:, 1::2].any()
    assert not [e for e in events.events("fallback") if "set_" in str(e.fields)]
