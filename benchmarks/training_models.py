"""Models and batches of the training benchmarks, in train mode and without dropout: a float64 run draws other masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import torchvision, transformers

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class Recommendation(nn.Module):
    """Two embedding bags and a network on numbers, as in DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(1000, 16, mode="sum"), nn.EmbeddingBag(200, 16, mode="mean")])
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, :8].abs() * 1000).long()
        parts = [self.bottom(x), self.bags[0](ids % 1000), self.bags[1](ids % 200)]
        return self.top(torch.cat(parts, 1))


class Recurrent(nn.Module):
    """An LSTM over a sequence, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def mask_words(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = model(input_ids=x).last_hidden_state
    return F.cross_entropy(hidden.mean(1)[:, :10], y)


def next_word(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=x).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def _bert(small: bool) -> nn.Module:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 500} if small else {}
    layers = 2 if small else 4
    config = transformers().BertConfig(num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size)
    return transformers().BertModel(config, add_pooling_layer=False)  # type: ignore[no-any-return]


def _gpt2(small: bool) -> nn.Module:
    size = {"n_embd": 64, "n_head": 4, "vocab_size": 500} if small else {}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers().GPT2LMHeadModel(transformers().GPT2Config(n_layer=2 if small else 4, use_cache=False, **size, **dropout))  # type: ignore[no-any-return]


def _vit(small: bool) -> nn.Module:
    size = (
        {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
        if small
        else {"image_size": 224, "patch_size": 16, "num_layers": 4, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}
    )
    model = torchvision().models.VisionTransformer(num_classes=10, **size)
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[bool], nn.Module], Loss]] = {
    "resnet18": (lambda small: torchvision().models.resnet18(num_classes=10), classify),
    "resnet50": (lambda small: torchvision().models.resnet50(num_classes=10), classify),
    "bert": (_bert, mask_words),
    "gpt2": (_gpt2, next_word),
    "vit": (_vit, classify),
    "recommendation": (lambda small: Recommendation(), classify),
    "recurrent": (lambda small: Recurrent(), classify),
}
SHAPES = {  # small, and as large as memory is measured
    "resnet18": ((8, 3, 32, 32), (16, 3, 128, 128)),
    "resnet50": ((4, 3, 32, 32), (8, 3, 128, 128)),
    "vit": ((8, 3, 32, 32), (8, 3, 224, 224)),
    "recommendation": ((64, 8), (1024, 8)),
    "recurrent": ((16, 12, 16), (64, 50, 16)),
    "bert": ((8, 16), (4, 128)),
    "gpt2": ((8, 16), (4, 128)),
}


def build(name: str, small: bool) -> tuple[nn.Module, Loss, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A model with the same weights in each process, its loss, and four batches."""
    torch.manual_seed(0)
    make, loss = MODELS[name]
    model = make(small).train()
    shape = SHAPES[name][0 if small else 1]
    words = name in ("bert", "gpt2")
    batches = []
    for _ in range(4):
        x = torch.randint(500, shape) if words else torch.randn(shape)
        batches.append((x, torch.randint(10, (shape[0],))))
    return model, loss, batches


def training_step(loss: Loss) -> Callable[..., torch.Tensor]:
    def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimiser.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimiser.step()
        return value.detach()

    return step


def as_float64(model: nn.Module, batches: list[Any]) -> list[Any]:
    model.double()
    return [(x.double() if x.is_floating_point() else x, y) for x, y in batches]
