"""The kernels that `benchmarks.kernels` measures: one row each, with inputs of any size.

`make(n)` gives inputs whose largest tensor has about n elements. `streams`: the kernel needs little arithmetic, so that copying memory is its bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten
f32, f16, bf16, i64 = torch.float32, torch.float16, torch.bfloat16, torch.int64


@dataclass(frozen=True)
class Kernel:
    family: str
    call: Callable[..., Any]
    make: Callable[[int], tuple[Any, ...]]
    streams: bool = False


def first(n: int, *rest: int) -> tuple[int, ...]:
    """A shape of about n elements: the first dimension is what `rest` leaves."""
    return (max(2, n // prod(rest)), *rest)


def noise(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def below(limit: int, *shape: int, seed: int = 9) -> torch.Tensor:
    """Indices."""
    return torch.randint(0, limit, shape, generator=torch.Generator().manual_seed(seed))


def flat(dtype: torch.dtype = f32, count: int = 1) -> Callable[[int], tuple[Any, ...]]:
    return lambda n: tuple(noise(n // 64, 64, dtype=dtype, seed=k) for k in range(count))


def rows(*rest: int, dtype: torch.dtype = f32, count: int = 1) -> Callable[[int], tuple[Any, ...]]:
    return lambda n: tuple(noise(*first(n, *rest), dtype=dtype, seed=k) for k in range(count))


def images(channels: int, size: int, count: int = 1) -> Callable[[int], tuple[Any, ...]]:
    return rows(channels, size, size, count=count)


def with_vectors(make: Callable[[int], tuple[Any, ...]], width: int, count: int) -> Callable[[int], tuple[Any, ...]]:
    """The tensors of `make` and `count` vectors: weight, bias."""
    return lambda n: (*make(n), *(noise(width, seed=20 + k) for k in range(count)))


def norm_gradient(inner: int) -> Callable[[int], tuple[Any, ...]]:
    def make(n: int) -> tuple[Any, ...]:
        g, x, w, b = noise(*first(n, inner), seed=1), noise(*first(n, inner)), noise(inner, seed=2), noise(inner, seed=3)
        _, mean, rstd = aten.native_layer_norm(x, [inner], w, b, 1e-5)
        return g, x, mean, rstd, w, b

    return make


def group_gradient(n: int) -> tuple[Any, ...]:
    (x,) = images(64, 32)(n)
    w, b = noise(64, seed=2), noise(64, seed=3)
    _, mean, rstd = aten.native_group_norm(x, w, b, x.shape[0], 64, 1024, 8, 1e-5)
    return torch.randn_like(x), x, mean, rstd, w


def batch_gradient(n: int) -> tuple[Any, ...]:
    (x,) = images(64, 32)(n)
    w, b = noise(64, seed=2), noise(64, seed=3)
    _, mean, invstd = aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
    return torch.randn_like(x), x, w, mean, invstd


def entropy_gradient(n: int) -> tuple[Any, ...]:
    (x,) = rows(8192)(n)
    return torch.log_softmax(x, 1), below(8192, x.shape[0])


def softmax_gradient(n: int) -> tuple[Any, ...]:
    g, x = rows(1024, count=2)(n)
    return g, torch.softmax(x, 1)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def rms_norm_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    scaled = g * w
    return (scaled - x * (scaled * x).mean(-1, keepdim=True) * r * r) * r, (g * x * r).sum(0)


def entropy_backward(logp: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), dtype=logp.dtype)
    total = torch.full((), float(logp.shape[0]))
    g = aten.nll_loss_backward(one, logp, target, None, 1, -100, total)
    return aten._log_softmax_backward_data(g, logp, 1, logp.dtype)


def causal(x: torch.Tensor) -> torch.Tensor:
    s = x.shape[-1]
    mask = torch.ones(s, s, dtype=torch.bool).tril()
    return torch.softmax(x.masked_fill(~mask, float("-inf")), -1)


def scattered(n: int) -> tuple[Any, ...]:
    (source,) = rows(64)(n)
    count = source.shape[0] // 4
    return torch.zeros(count, 64), below(count, source.shape[0])[:, None].expand_as(source).contiguous(), source


def looked_up(n: int) -> tuple[Any, ...]:
    (table,) = rows(256)(n)
    return table, below(table.shape[0], table.shape[0])


def embedding_gradient(n: int) -> tuple[Any, ...]:
    (g,) = rows(256)(n)
    return g, below(g.shape[0] // 2, g.shape[0])


def embedding_backward(g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return aten.embedding_dense_backward(g * 2.0, i, g.shape[0] // 2, -1, False)


def index_put(g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.zeros(g.shape[0] // 2, g.shape[1]).index_put((i,), g, accumulate=True)


def gathered(n: int) -> tuple[Any, ...]:
    (x,) = rows(1024)(n)
    return x, below(1024, *x.shape)


KERNELS: dict[str, Kernel] = {
    # pointwise
    "exp": Kernel("pointwise", torch.exp, flat(), True),
    "tanh": Kernel("pointwise", torch.tanh, flat(), True),
    "erf": Kernel("pointwise", torch.erf, flat(), True),
    "silu": Kernel("pointwise", F.silu, flat(), True),
    "gelu": Kernel("pointwise", F.gelu, flat(), True),
    "gelu_tanh": Kernel("pointwise", lambda x: F.gelu(x, approximate="tanh"), flat(), True),
    "add_mul_relu": Kernel("pointwise", lambda a, b, c: torch.relu((a + b) * c), flat(count=3), True),
    "bias_gelu_residual": Kernel("pointwise", lambda x, r, b: F.gelu(x + b) + r, with_vectors(rows(1024, count=2), 1024, 1), True),
    "gelu_backward": Kernel("pointwise", lambda g, x: aten.gelu_backward(g, x), flat(count=2), True),
    "bf16_gelu": Kernel("half", F.gelu, flat(bf16), True),
    "bf16_add_mul": Kernel("half", lambda a, b: torch.relu(a + b) * 0.5, flat(bf16, 2), True),
    "f16_silu_mul": Kernel("half", lambda a, b: F.silu(a) * b, flat(f16, 2), True),
    "bf16_to_f32": Kernel("half", lambda a: a.float() * 2, flat(bf16), True),
    "where_compare": Kernel("pointwise", lambda a, b: torch.where((a > b) & (a < 1.0), a, b * 0.1), flat(count=2), True),
    # integers
    "int8_add": Kernel("integers", lambda a, b: (a + b) ^ b, flat(torch.int8, 2), True),
    "int32_arithmetic": Kernel("integers", lambda a, b: (a * 3 + b) >> 2, flat(torch.int32, 2), True),
    "int64_arithmetic": Kernel("integers", lambda a, b: torch.where(a > b, a * 3, b - a), flat(i64, 2), True),
    "uint8_to_f32": Kernel("integers", lambda a: (a.to(torch.uint8).float() - 127.0) * (1 / 64), flat(torch.int8), True),
    # reductions
    "sum_all": Kernel("reduction", lambda x: x.sum(), flat(), True),
    "sum_inner": Kernel("reduction", lambda x: x.sum(-1), rows(1024), True),
    "sum_outer": Kernel("reduction", lambda x: x.sum(0), rows(1024), True),
    "sum_middle": Kernel("reduction", lambda x: x.sum(1), rows(256, 64), True),
    "mean_inner": Kernel("reduction", lambda x: x.mean(-1), rows(100), True),
    "bf16_sum_inner": Kernel("reduction", lambda x: x.sum(-1), rows(1024, dtype=bf16), True),
    "var_inner": Kernel("reduction", lambda x: x.var(-1), rows(1024), True),
    "var_outer": Kernel("reduction", lambda x: x.var(0), rows(1024)),
    "amax_middle": Kernel("reduction", lambda x: x.amax(1), rows(256, 64), True),
    "argmax_inner": Kernel("reduction", lambda x: x.argmax(-1), rows(1024), True),
    "argmax_outer": Kernel("reduction", lambda x: x.argmax(0), rows(1024), True),
    "prod_inner": Kernel("reduction", lambda x: x.prod(-1), rows(1024), True),
    "any_inner": Kernel("reduction", lambda x: (x > 6).any(-1), rows(1024), True),
    "all_bool": Kernel("reduction", lambda x: x.all(0), rows(1024, dtype=torch.bool), True),
    # softmax
    **{f"softmax_{w}": Kernel("softmax", lambda x: torch.softmax(x, -1), rows(w), True) for w in (128, 4096, 50257)},
    **{f"log_softmax_{w}": Kernel("softmax", lambda x: torch.log_softmax(x, -1), rows(w), True) for w in (128, 4096, 50257)},
    "softmax_backward": Kernel("softmax", lambda g, y: aten._softmax_backward_data(g, y, 1, y.dtype), softmax_gradient, True),
    "causal_softmax": Kernel("masks", causal, lambda n: (noise(max(2, n >> 16), 256, 256),), True),
    "tril": Kernel("masks", lambda x: x.tril() + 1.0, lambda n: (noise(max(2, n >> 16), 256, 256),), True),
    # norms
    "layer_norm": Kernel("norm", lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), with_vectors(rows(768), 768, 2), True),
    "layer_norm_backward": Kernel(
        "norm",
        lambda g, x, mean, rstd, w, b: aten.native_layer_norm_backward(g, x, [768], mean, rstd, w, b, [True] * 3),
        norm_gradient(768),
        True,
    ),
    "rms_norm": Kernel("norm", rms_norm, with_vectors(rows(1024), 1024, 1), True),
    "rms_norm_backward": Kernel("norm", rms_norm_backward, with_vectors(rows(1024, count=2), 1024, 1), True),
    "group_norm": Kernel("norm", lambda x, w, b: F.group_norm(x, 8, w, b), with_vectors(images(64, 32), 64, 2), True),
    "group_norm_backward": Kernel(
        "norm",
        lambda g, x, mean, rstd, w: aten.native_group_norm_backward(g, x, mean, rstd, w, x.shape[0], 64, 1024, 8, [True] * 3),
        group_gradient,
    ),
    "batch_norm": Kernel("norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), with_vectors(images(64, 32), 64, 2)),
    "batch_norm_backward": Kernel(
        "norm",
        lambda g, x, w, mean, invstd: aten.native_batch_norm_backward(g, x, w, None, None, mean, invstd, True, 1e-5, [True] * 3),
        batch_gradient,
    ),
    # losses
    "cross_entropy": Kernel("loss", F.cross_entropy, lambda n: (x := rows(8192)(n)[0], below(8192, x.shape[0])), True),
    "cross_entropy_backward": Kernel("loss", entropy_backward, entropy_gradient, True),
    # cumulative
    "cumsum_inner": Kernel("cumulative", lambda x: x.cumsum(-1) * 2.0, rows(1024)),
    "cumsum_outer": Kernel("cumulative", lambda x: x.cumsum(0) * 2.0, rows(1024)),
    # rearranging
    "cat": Kernel("rearranging", lambda a, b: torch.cat([a, b * 2.0], -1), rows(256, count=2), True),
    "stack": Kernel("rearranging", lambda a, b: torch.stack([a, b * 2.0], 1), rows(256, count=2), True),
    "pad": Kernel("rearranging", lambda x: F.pad(x, (1, 1, 1, 1)) * 2.0, images(16, 62), True),
    "roll": Kernel("rearranging", lambda x: x.roll((3, 5), (-2, -1)) * 2.0, images(16, 64), True),
    "flip": Kernel("rearranging", lambda x: x.flip(-1) * 2.0, rows(1024), True),
    "transpose": Kernel("rearranging", lambda x: x.t().contiguous() * 2.0, rows(1024), True),
    "permute_heads": Kernel("rearranging", lambda x: x.permute(0, 2, 1, 3).contiguous() + 1.0, rows(128, 12, 64), True),
    "channels_last": Kernel("rearranging", lambda x: (x * 2.0).contiguous(memory_format=torch.channels_last), images(64, 32), True),
    # pooling
    "max_pool2d": Kernel("pooling", lambda x: F.max_pool2d(x, 2), images(32, 64), True),
    "max_pool2d_3": Kernel("pooling", lambda x: F.max_pool2d(x, 3, 2, 1), images(32, 64)),
    "avg_pool2d": Kernel("pooling", lambda x: F.avg_pool2d(x, 3, 1, 1), images(32, 64)),
    "upsample_bilinear": Kernel("pooling", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), images(16, 32)),
    "upsample_nearest": Kernel("pooling", lambda x: F.interpolate(x, scale_factor=2) + 1.0, images(16, 32), True),
    # indexing
    "gather": Kernel("indexing", lambda x, i: x.gather(1, i) * 2.0, gathered),
    "embedding": Kernel("indexing", lambda w, i: F.embedding(i, w) * 2.0, looked_up),
    "embedding_backward": Kernel("indexing", embedding_backward, embedding_gradient),
    "index_put": Kernel("indexing", index_put, embedding_gradient),
    "scatter_add": Kernel("indexing", lambda x, i, s: x.scatter_add(0, i, s), scattered),
}
