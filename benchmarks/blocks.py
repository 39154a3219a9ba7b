"""Models of the suite that no installed library offers, written with torch.nn as users write them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Sequential):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths: int) -> None:
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        super().__init__(*layers[:-1])


class Mixer(nn.Module):
    """MLP-Mixer: patches, then blocks that mix over tokens and over channels."""

    def __init__(self, patches: int = 196, width: int = 384, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.ModuleList([_MixerBlock(patches, width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


class _MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))  # type: ignore[no-any-return]


class Recommender(nn.Module):
    """DLRM: dense features through an MLP, bags of sparse ones through embeddings, dot products between all of them."""

    def __init__(self, tables: int = 8, rows: int = 20000, width: int = 64) -> None:
        super().__init__()
        self.bottom = Mlp(13, 512, 256, width)
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)])
        pairs = (tables + 1) * tables // 2
        self.top = Mlp(pairs + width, 512, 256, 1)
        self.register_buffer("upper", torch.triu_indices(tables + 1, tables + 1, 1), persistent=False)
        self.upper: torch.Tensor

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *[table(sparse[:, i]) for i, table in enumerate(self.tables)]], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        return torch.sigmoid(self.top(torch.cat([x, products[:, self.upper[0], self.upper[1]]], 1)))


class FactorizationMachine(nn.Module):
    """DeepFM: first and second order terms of embedded fields beside an MLP."""

    def __init__(self, fields: int = 26, rows: int = 50000, width: int = 16) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        self.deep = nn.Sequential(
            nn.Linear(fields * width, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        factors = self.factors(ids)
        second = 0.5 * (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.linear(ids).sum(1) + second + self.deep(factors.flatten(1)))


class Recurrent(nn.Module):
    """Embedding, a recurrent network of two layers, a classifier at each step."""

    def __init__(self, kind: type[nn.RNNBase], words: int = 2000, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.cells = kind(width, width, num_layers=2, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.embedding(ids))[0])  # type: ignore[no-any-return]


class CellLoop(nn.Module):
    """A GRU cell called step by step from Python."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
        return self.head(h)  # type: ignore[no-any-return]


class _Residual(nn.Module):
    """Group norm, SiLU, convolution, the time's embedding added between, twice."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(32, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """Attention over the pixels, or from the pixels to a text."""

    def __init__(self, channels: int, context: int | None = None, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(channels)
        self.q = nn.Linear(channels, channels, bias=False)
        self.k, self.v = (nn.Linear(context or channels, channels, bias=False) for _ in range(2))
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        h = self.norm(x)
        other = h if context is None else context
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(h), self.k(other), self.v(other)))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DiffusionUnet(nn.Module):
    """One level down and up of a latent diffusion network: residual blocks with a time embedding, self and cross attention, a gated MLP."""

    def __init__(self, channels: int = 64, context: int = 128) -> None:
        super().__init__()
        time, wide = 4 * channels, 2 * channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.stem, self.channels = nn.Conv2d(4, channels, 3, padding=1), channels
        self.down1, self.down = _Residual(channels, channels, time), nn.Conv2d(channels, channels, 3, 2, 1)
        self.middle1, self.middle2 = _Residual(channels, wide, time), _Residual(wide, wide, time)
        self.self_attention, self.cross_attention = _Attention(wide), _Attention(wide, context)
        self.norm, self.gate, self.mlp = nn.LayerNorm(wide), nn.Linear(wide, 8 * wide), nn.Linear(4 * wide, wide)
        self.up, self.up1 = nn.Conv2d(wide, channels, 3, padding=1), _Residual(2 * channels, channels, time)
        self.norm_out, self.out = nn.GroupNorm(32, channels), nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, step: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        half = self.channels // 2
        angles = step[:, None] * torch.exp(-9.2 * torch.arange(half, device=x.device) / half).to(x.dtype)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        first = self.down1(self.stem(x), time)
        h = self.middle1(self.down(first), time)
        pixels = h.flatten(2).transpose(1, 2)
        pixels = self.cross_attention(self.self_attention(pixels), text)
        value, gate = self.gate(self.norm(pixels)).chunk(2, -1)
        pixels = pixels + self.mlp(value * F.gelu(gate))
        h = self.middle2(pixels.transpose(1, 2).unflatten(2, h.shape[2:]), time)
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.up1(torch.cat([h, first], 1), time)
        return self.out(F.silu(self.norm_out(h)))  # type: ignore[no-any-return]


class Temporal(nn.Module):
    """Dilated causal convolutions over a sequence."""

    def __init__(self, channels: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv1d(16, channels, 1)
        self.layers = nn.ModuleList([nn.Conv1d(channels, 2 * channels, 3, dilation=2**i) for i in range(depth)])
        self.mix = nn.ModuleList([nn.Conv1d(channels, channels, 1) for _ in range(depth)])
        self.head = nn.Conv1d(channels, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer, mix in zip(self.layers, self.mix, strict=True):
            value, gate = layer(F.pad(x, (2 * layer.dilation[0], 0))).chunk(2, 1)  # type: ignore[operator,index]
            x = x + mix(torch.tanh(value) * torch.sigmoid(gate))
        return self.head(F.relu(x))  # type: ignore[no-any-return]


def generator(width: int = 64) -> nn.Module:
    """The generator of a small adversarial network: transposed convolutions and batch norms."""
    layers: list[Any] = []
    for a, b in ((100, 8), (8, 4), (4, 2), (2, 1)):
        first = a == 100
        layers += [
            nn.ConvTranspose2d(100 if first else a * width, b * width, 4, 1 if first else 2, 0 if first else 1, bias=False),
            nn.BatchNorm2d(b * width),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
