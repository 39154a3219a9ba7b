"""Recurrent networks that are loops of PyTorch's own: one kernel per step, none of them over more than its gates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import magneto
from magneto.base.flags import config
from magneto.inductor.runtime import build as building


@pytest.mark.parametrize("training", [False, True])
def test_gates_are_read_where_they_were_computed(training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    config.cache_dir = str(tmp_path)
    units = building._units
    monkeypatch.setattr(building, "_addresses", {})
    monkeypatch.setattr(building, "_units", lambda kernels, seen: texts.extend(k.body for k in kernels) or units(kernels, seen))
    torch.manual_seed(0)
    net = torch.nn.GRU(24, 40, num_layers=2, batch_first=True)
    x = torch.randn(3, 5, 24, requires_grad=training)
    with torch.set_grad_enabled(training):
        got, state = magneto.optimize("inductor", nopython=True)(net)(x)
        want, last = net(x)
    torch.testing.assert_close((got, state), (want, last))
    if training:
        weights = (x, *net.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(got.sum() + state.square().sum(), weights), torch.autograd.grad(want.sum() + last.square().sum(), weights)
        )
    else:
        assert texts and max(text.count("mg_exp1_f32") for text in texts) == 2, "gates are computed again under masks"
