"""After capture, compilation and a training step no tensor is left but the gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import magneto


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(2, 5, 2, 8).transpose(1, 2) for part in self.heads(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 16)


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mul_(2).view(-1, 4).exp_().softmax(0).cumsum(1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
    "norms": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4), nn.Dropout(0.1), nn.GELU(), nn.Softmax(-1)),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.MaxPool1d(2)),
    "written": Written,
}


def tensors() -> dict[int, torch.Tensor]:
    gc.collect()
    return {id(one): one for one in gc.get_objects() if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_tensors_are_gone_after_a_step(layer: str, whole: bool) -> None:
    torch.manual_seed(0)
    net = LAYERS[layer]()
    x = torch.randn(2, 5, 16)

    def loss() -> torch.Tensor:
        return net(x).square().sum()  # type: ignore[no-any-return]

    def step() -> None:
        loss().backward()

    optimized: Any = magneto.optimize("aot_eager")(step if whole else loss)

    def run() -> None:
        if whole:
            optimized()
        else:
            optimized().backward()

    step()
    kept = [p.grad for p in net.parameters()]
    before = tensors()
    for _ in range(3):
        run()
    left = [one for key, one in tensors().items() if key not in before and all(one is not grad for grad in kept)]
    assert [(type(one).__name__, tuple(one.shape)) for one in left] == []
