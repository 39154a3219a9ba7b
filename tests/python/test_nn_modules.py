"""Modules of torch.nn, and modules as users write them: captured as one graph, in evaluation and in training, with eager's results and buffers."""

# ruff: noqa

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations

import magneto
from tests.compare import assert_equal

V, X, IMG = (
    torch.linspace(-1, 1, 48).reshape(3, 16),
    torch.linspace(-2, 2, 256).reshape(2, 8, 16),
    torch.linspace(-1, 1, 512).reshape(2, 4, 8, 8),
)
IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])


class WithProperties(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self._k = 3

    @property
    def k(self):
        return self._k + self.linear.weight.shape[0]

    @torch.no_grad()
    def statistic(self, x):
        return x.mean()

    def forward(self, x):
        y = self.linear(x) * self.k
        return y + self.statistic(y)


class WithCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = {}
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        key = (x.shape, str(x.dtype))
        if key not in self.cache:
            self.cache[key] = torch.arange(x.shape[-1])
        return self.linear(x) + self.cache[key]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


class KeyValueCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 4, 16))
        self.position = 0

    def forward(self, x):
        self.keys[:, self.position : self.position + 1] = x[:, :1]
        self.position += 1
        return self.keys.sum(1)


class Delegating(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x):
        return self.inner(x) + self.weight.sum()


class MakesModules(nn.Module):
    def forward(self, x):
        return nn.Sequential(nn.Softmax(dim=-1), nn.ReLU())(x) + sum(m(x) for m in nn.ModuleList([nn.Tanh(), nn.Sigmoid()])[:1])


MODULES = {
    "MultiheadAttention": (lambda: nn.MultiheadAttention(16, 4, batch_first=True), (X, X, X)),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2), (X,)),
    "Transformer": (lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True), (X, X)),
    "LSTM": (lambda: nn.LSTM(16, 8, batch_first=True), (X,)),
    "GRU": (lambda: nn.GRU(16, 8, 2, bidirectional=True), (X,)),
    "LSTMCell": (lambda: nn.LSTMCell(16, 8), (V,)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), (IDS,)),
    "Embedding with a maximal norm": (lambda: nn.Embedding(10, 4, max_norm=1.0), (IDS,)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (IMG,)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding="same"), nn.ConvTranspose2d(4, 2, 3), nn.ReflectionPad2d(1)), (IMG,)),
    "norms": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4), nn.LocalResponseNorm(2)),
        (IMG,),
    ),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveMaxPool2d(1)), (IMG,)),
    "MaxPool2d with indices": (lambda: nn.MaxPool2d(2, return_indices=True), (IMG,)),
    "activations": (
        lambda: nn.Sequential(
            nn.Hardswish(), nn.GELU("tanh"), nn.PReLU(), nn.GLU(), nn.SELU(), nn.Mish(), nn.Softplus(), nn.Threshold(0.1, 0.0)
        ),
        (V,),
    ),
    "dropouts": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.2)), (IMG,)),
    "losses": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), (V, torch.tensor([1, 2, 3]))),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(16, 4)), (V,)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(16, 4)), (V,)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(16, 4)), (V,)),
    "properties": (WithProperties, (V,)),
    "a cache in a dictionary": (WithCache, (V,)),
    "checkpoint": (Checkpointed, (V,)),
    "a key-value cache": (KeyValueCache, (X,)),
    "delegating attributes": (lambda: Delegating(nn.Linear(16, 4)), (V,)),
    "modules made in forward": (MakesModules, (V,)),
    "containers": (
        lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 64)), nn.Identity(), nn.PixelShuffle(1) if False else nn.Linear(64, 2)),
        (IMG,),
    ),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, training: bool) -> None:
    make, args = MODULES[name]
    torch.manual_seed(0)
    plain = make().train(training)
    ours = copy.deepcopy(plain)
    breaks = name == "checkpoint" and training  # what is kept for backward stays eager's choice
    compiled = magneto.optimize("eager", nopython=not breaks)(ours)
    with contextlib.nullcontext() if training else torch.no_grad():
        for _ in range(2):
            torch.manual_seed(1)
            expected = plain(*args)
            torch.manual_seed(1)
            assert_equal(compiled(*args), expected)
    assert_equal(dict(ours.named_buffers()), dict(plain.named_buffers()))
    if training:
        loss_of(expected).backward() if loss_of(expected).requires_grad else None
        torch.manual_seed(1)
        loss = loss_of(compiled(*args))
        if loss.requires_grad and not dict(plain.named_buffers()):
            loss.backward()
            for (key, p), q in zip(plain.named_parameters(), ours.parameters()):
                assert (p.grad is None) == (q.grad is None), key


def loss_of(value):
    if isinstance(value, torch.Tensor):
        return value.float().sum()
    return sum(loss_of(item) for item in value if item is not None)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_results_written_to_out(backend: str) -> None:
    def fn(x, y, z):
        w = torch.empty(3, 4)
        torch.add(x, y, out=w)
        torch.mul(w, 2, out=z)
        torch.sin(z[0], out=z[1])
        return w + 1, z

    args = [torch.ones(3, 4), torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)]
    copies = copy.deepcopy(args)
    assert_equal(magneto.optimize(backend, nopython=True)(fn)(*args), fn(*copies), 1e-6)
    assert_equal(args, copies, 1e-6)
