"""The suite of GPU models: each row is a model with its input, called as inference and, in `<name>_training`, forward and backward; and whole steps with an optimiser.

A row is a function that makes (function, arguments, trains?, 0). A *step* is made once for each contender, since it changes its parameters: it gets what optimises a callable, and
returns one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"
Made = tuple[Callable[..., Any], tuple[Any, ...], bool, int]
Wrap = Callable[[Any], Any]

MODELS: dict[str, Callable[[], Made]] = {}
STEPS: dict[str, Callable[[Wrap], Callable[[], Any]]] = {}
SUITE: list[str] = []
"""Rows that enter the geometric means."""


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def ids(highest: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, highest, shape, device=DEVICE)


def only(make: Callable[[], Made]) -> Callable[[], Made]:
    """A row outside the suite."""
    MODELS[make.__name__] = make
    return make


def model(make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]) -> None:
    """Two rows of a model and its input: inference in eval mode, and training."""

    def inference() -> Made:
        module, args = make()
        return module.eval(), args, False, 0

    def training() -> Made:
        module, args = make()
        return module.train(), args, True, 0

    for name, fn in ((make.__name__, inference), (f"{make.__name__}_training", training)):
        MODELS[name] = fn
        SUITE.append(name)


def step(make: Callable[[Wrap], Callable[[], Any]]) -> Callable[[Wrap], Callable[[], Any]]:
    STEPS[make.__name__] = make
    return make


class Output(nn.Module):
    """One tensor of what a model of transformers returns."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, *args: Any) -> Any:
        return getattr(self.inner(*args), self.name)


# ---- vision --------------------------------------------------------------------------------------------------------------


def _vision(name: str) -> nn.Module:
    import torchvision

    made: nn.Module = getattr(torchvision.models, name)().to(DEVICE)
    return made


@model
def resnet18() -> tuple[nn.Module, tuple[Any, ...]]:
    return _vision("resnet18"), (randn(16, 3, 128, 128),)


@model
def resnet50() -> tuple[nn.Module, tuple[Any, ...]]:
    return _vision("resnet50"), (randn(32, 3, 224, 224),)


@model
def mobilenet_v3() -> tuple[nn.Module, tuple[Any, ...]]:
    return _vision("mobilenet_v3_large"), (randn(32, 3, 224, 224),)


@model
def convnext_tiny() -> tuple[nn.Module, tuple[Any, ...]]:
    module = _vision("convnext_tiny")
    for block in module.modules():
        if type(block).__name__ == "StochasticDepth":
            block.p = 0.0
    return module, (randn(16, 3, 224, 224),)


@model
def vit_b_16() -> tuple[nn.Module, tuple[Any, ...]]:
    return _vision("vit_b_16"), (randn(10, 3, 224, 224),)


class Residual(nn.Module):
    """A block of a diffusion model's U-Net: two convolutions with group norm, the time added between them."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.time = nn.Linear(time, outside)
        self.second = nn.Sequential(nn.GroupNorm(8, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + self.time(F.silu(t))[:, :, None, None]
        return self.second(h) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width: int = 64, time: int = 256) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, time), Residual(width, 2 * width, time), Residual(2 * width, 4 * width, time)])
        self.up = nn.ModuleList([Residual(8 * width, 2 * width, time), Residual(4 * width, width, time), Residual(2 * width, width, time)])
        self.norm, self.mix = nn.GroupNorm(8, 4 * width), nn.MultiheadAttention(4 * width, 4, batch_first=True)
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t, h, kept = self.embed(t), self.start(x), []
        for block in self.down:
            h = block(h, t)
            kept.append(h)
            h = F.avg_pool2d(h, 2)
        flat = self.norm(h).flatten(2).transpose(1, 2)
        h = h + self.mix(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(h.shape)
        for block in self.up:
            h = block(torch.cat([F.interpolate(h, scale_factor=2.0), kept.pop()], 1), t)
        return self.end(F.silu(h))


@model
def unet_diffusion() -> tuple[nn.Module, tuple[Any, ...]]:
    return UNet().to(DEVICE), (randn(8, 3, 64, 64), randn(8, 256))


# ---- language ------------------------------------------------------------------------------------------------------------


@model
def bert_base() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Output(BertModel(config), "last_hidden_state").to(DEVICE), (ids(30000, 8, 128),)


@model
def gpt2() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(attn_implementation="sdpa", use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return Output(GPT2LMHeadModel(config), "logits").to(DEVICE), (ids(50000, 4, 512),)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(vocab_size=32128, d_model=512, d_ff=2048, num_layers=6, num_heads=8, dropout_rate=0.0, use_cache=False)
        config.decoder_start_token_id = 0
        self.inner = T5ForConditionalGeneration(config)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        return self.inner(input_ids=source, decoder_input_ids=target).logits


@model
def t5_small() -> tuple[nn.Module, tuple[Any, ...]]:
    return Seq2Seq().to(DEVICE), (ids(32000, 8, 128), ids(32000, 8, 128))


class LlamaBlock(nn.Module):
    """Norm, rotary attention with grouped heads, gated feed-forward."""

    def __init__(self, width: int = 1024, heads: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query = nn.Linear(width, width, bias=False)
        self.pair = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norms[0](x)
        q = self.query(h).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.pair(h).view(batch, length, 2, self.groups, self.size).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(a)
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Llama(nn.Module):
    def __init__(self, blocks: int = 6, width: int = 1024, length: int = 512) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LlamaBlock(width) for _ in range(blocks)])
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, 64, 2) / 64))
        self.register_buffer("cos", torch.cat([angles, angles], 1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], 1).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


@model
def llama_blocks_bf16() -> tuple[nn.Module, tuple[Any, ...]]:
    return Llama().to(DEVICE, torch.bfloat16), (randn(4, 512, 1024, dtype=torch.bfloat16),)


# ---- others --------------------------------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """DLRM: embedding bags of 26 features, their products with each other and with the dense features."""

    def __init__(self, features: int = 26, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(features)])
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (features + 1) * features // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("places", torch.triu_indices(features + 1, features + 1, 1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        d = self.dense(dense)
        vectors = torch.stack([d, *(table(sparse[:, k]).sum(1) for k, table in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([d, products[:, self.places[0], self.places[1]]], 1))


@model
def dlrm() -> tuple[nn.Module, tuple[Any, ...]]:
    return Recommender().to(DEVICE), (randn(2048, 13), ids(100_000, 2048, 26, 4))


class Recurrent(nn.Module):
    """A recurrent cell written out, over 32 steps."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[:, 0])
        found = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            found.append(h)
        return self.out(torch.stack(found, 1))


@model
def gru_cell() -> tuple[nn.Module, tuple[Any, ...]]:
    return Recurrent().to(DEVICE), (randn(64, 32, 512),)


@only
def lstm() -> Made:
    return nn.LSTM(256, 256, 2, batch_first=True).to(DEVICE).eval(), (randn(32, 64, 256),), False, 0


@only
def tiny_function() -> Made:
    return lambda x: x + 1, (randn(8),), False, 0


@only
def mlp() -> Made:
    layers = [m for _ in range(6) for m in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers).to(DEVICE), (randn(32, 256),), False, 0


class LinearGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


@only
def linear_gelu_bf16() -> Made:
    """8192 x 1024 x 4096; reported as a share of the rate of a large product, too."""
    return LinearGelu().to(DEVICE, torch.bfloat16).eval(), (randn(8192, 1024, dtype=torch.bfloat16),), False, 0


FLOPS = {"linear_gelu_bf16": 2 * 8192 * 1024 * 4096}


# ---- whole steps ---------------------------------------------------------------------------------------------------------


@step
def resnet50_adam_256(wrap: Wrap) -> Callable[[], Any]:
    torch.manual_seed(0)
    module = _vision("resnet50")
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-4)
    x, y = randn(256, 3, 224, 224), ids(1000, 256)
    forward, update = wrap(module), wrap(optimiser.step)

    def call() -> Any:
        loss = F.cross_entropy(forward(x), y)
        loss.backward()
        update()
        optimiser.zero_grad()
        return loss

    return call


def _adam(wrap: Wrap, hidden: int, **options: Any) -> Callable[[], Any]:
    from benchmarks.adam_step import shapes

    torch.manual_seed(0)
    parameters = [nn.Parameter(randn(*shape) * 0.02) for shape in shapes(hidden)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 0.01
    optimiser = torch.optim.Adam(parameters, lr=1e-3, **options)

    def update() -> None:
        optimiser.step()

    call: Callable[[], Any] = wrap(update)
    return call


@step
def adam_300_parameters(wrap: Wrap) -> Callable[[], Any]:
    """About 17 million elements, as benchmarks/adam_step.py has them; eager is foreach."""
    return _adam(wrap, 256)


@step
def adam_300_parameters_large(wrap: Wrap) -> Callable[[], Any]:
    """About 230 million elements."""
    return _adam(wrap, 1024)


BYTES = {"adam_300_parameters": 256, "adam_300_parameters_large": 1024}
"""Steps of Adam and their hidden sizes: 28 bytes are moved for an element."""


def moved_by(name: str) -> int:
    """Bytes that a perfect step moves; 0 where that is not asked."""
    if name not in BYTES:
        return 0
    from math import prod

    from benchmarks.adam_step import shapes

    return 28 * sum(map(prod, shapes(BYTES[name])))
