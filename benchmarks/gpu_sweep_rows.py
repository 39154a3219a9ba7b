"""What `benchmarks.gpu_sweep` runs: small programs of one or a few operations, as users write them, each with the shapes of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

DEVICE, BF16, CL = "cuda", torch.bfloat16, torch.channels_last
IMAGES = (16, 64, 128, 128)
Program = tuple[Callable[..., Any], Callable[[], list[Any]], bool]
"""Function, what makes its arguments, whether its backward runs too."""

ROWS: dict[str, Program] = {}


def row(
    name: str, fn: Callable[..., Any], *shapes: Sequence[int], train: bool = False, dtype: torch.dtype = torch.float32,
    make: Callable[[], list[Any]] | None = None, memory: Any = None,
) -> None:  # fmt: skip
    """`make`: the arguments, where they are no random numbers of these shapes."""

    def arguments() -> list[Any]:
        torch.manual_seed(0)
        made = make() if make is not None else [torch.randn(*s, device=DEVICE, dtype=dtype) for s in shapes]
        if memory is not None:
            made = [a.to(memory_format=memory) if isinstance(a, torch.Tensor) and a.ndim == 4 else a for a in made]
        if train:
            made = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in made]
        return made

    ROWS[name] = fn, arguments, train


def lab(n: int, c: int) -> Callable[[], list[Any]]:
    """Scores and labels."""
    return lambda: [torch.randn(n, c, device=DEVICE), torch.randint(c, (n,), device=DEVICE)]


for mem, tag in ((None, ""), (CL, "_cl")):
    for dt, t2 in ((torch.float32, ""), (BF16, "_bf16")):
        row(f"bilinear2x{tag}{t2}", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (16, 64, 96, 96), dtype=dt, memory=mem)
        row(f"nearest2x{tag}{t2}", lambda x: F.interpolate(x, scale_factor=2), (16, 64, 96, 96), dtype=dt, memory=mem)
        row(f"maxpool3s2{tag}{t2}", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES, dtype=dt, memory=mem)
        row(f"maxpool3s2{tag}{t2}_train", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES, dtype=dt, memory=mem, train=True)
        row(f"avgpool2{tag}{t2}_train", lambda x: F.avg_pool2d(x, 2), IMAGES, dtype=dt, memory=mem, train=True)
        row(
            f"group_norm{tag}{t2}",
            lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
            (16, 256, 64, 64),
            (256,),
            (256,),
            dtype=dt,
            memory=mem,
        )
        row(
            f"group_norm{tag}{t2}_train",
            lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
            (16, 256, 64, 64),
            (256,),
            (256,),
            dtype=dt,
            memory=mem,
            train=True,
        )
        row(
            f"batch_norm{tag}{t2}_train",
            lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)),
            (32, 128, 64, 64),
            (128,),
            (128,),
            dtype=dt,
            memory=mem,
            train=True,
        )
    row(f"bicubic{tag}", lambda x: F.interpolate(x, size=(160, 160), mode="bicubic"), (16, 64, 96, 96), memory=mem)
    row(f"bilinear_down{tag}", lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), (16, 64, 192, 192), memory=mem)
    row(
        f"bilinear_then{tag}",
        lambda x, y: F.relu(F.interpolate(x, scale_factor=2, mode="bilinear") + y),
        (16, 64, 96, 96),
        (16, 64, 192, 192),
        memory=mem,
    )
    row(f"bilinear2x{tag}_train", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (16, 64, 96, 96), memory=mem, train=True)
    row(f"reflect{tag}", lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), IMAGES, memory=mem)
    row(f"circular{tag}", lambda x: F.pad(x, (3, 3, 3, 3), mode="circular"), IMAGES, memory=mem)
    row(f"pixel_shuffle{tag}", lambda x: F.pixel_shuffle(x, 2) * 2, IMAGES, memory=mem)
    row(f"mean_hw{tag}", lambda x: x.mean((2, 3)), (64, 256, 64, 64), memory=mem)
    row(f"se_scale{tag}", lambda x, s: x * torch.sigmoid(s)[:, :, None, None], (64, 256, 64, 64), (64, 256), memory=mem)
    row(
        f"layer_norm2d{tag}",
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (256,), w, b).permute(0, 3, 1, 2),
        (32, 256, 64, 64),
        (256,),
        (256,),
        memory=mem,
    )
    row(f"instance_norm{tag}", lambda x: F.relu(F.instance_norm(x)), (32, 128, 64, 64), memory=mem)
row("cumsum_rows", lambda x: x.cumsum(-1), (8192, 4096))
row("cumsum_cols", lambda x: x.cumsum(0), (4096, 8192))
row("logsumexp", lambda x: x.logsumexp(-1), (8192, 4096))
row("argmax_rows", lambda x: x.argmax(-1), (8192, 8192))
row("argmax_cols", lambda x: x.argmax(0), (8192, 8192))
row("max_rows", lambda x: x.max(-1), (8192, 8192))
row("topk", lambda x: x.topk(8, -1), (8192, 1024))
row("sort", lambda x: x.sort(-1), (4096, 1024))
row("var_rows", lambda x: x.var(-1), (8192, 8192))
row("var_cols", lambda x: x.var(0), (8192, 8192))
row("std_mid", lambda x: x.std(1), (64, 512, 2048))
row("norm_rows", lambda x: F.normalize(x, dim=-1), (65536, 512))
row("norm_rows_train", lambda x: F.normalize(x, dim=-1), (65536, 512), train=True)
row("sum_mid", lambda x: x.sum(1), (64, 1024, 1024))
row("sum_all_sq", lambda x: (x * x).sum(), (8192, 8192))
row("mse", lambda x, y: F.mse_loss(x, y), (8192, 8192), (8192, 8192))
row("mse_train", lambda x, y: F.mse_loss(x, y), (8192, 4096), (8192, 4096), train=True)
row("huber_train", lambda x, y: F.smooth_l1_loss(x, y), (8192, 4096), (8192, 4096), train=True)
row("bce_train", lambda x, y: F.binary_cross_entropy_with_logits(x, y), (8192, 4096), (8192, 4096), train=True)
row(
    "kl_train", lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean"), (8192, 4096), (8192, 4096), train=True
)
row("ce_smooth_train", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), make=lab(16384, 2048), train=True)
row("ce_ignore_train", lambda x, t: F.cross_entropy(x, t, ignore_index=0), make=lab(16384, 2048), train=True)
row(
    "ce_bf16_train",
    lambda x, t: F.cross_entropy(x.float(), t),
    make=lambda: [torch.randn(8192, 32000, device=DEVICE, dtype=BF16), torch.randint(32000, (8192,), device=DEVICE)],
    train=True,
)
row(
    "ce_pixels_train",
    lambda x, t: F.cross_entropy(x, t),
    make=lambda: [torch.randn(16, 21, 256, 256, device=DEVICE), torch.randint(21, (16, 256, 256), device=DEVICE)],
    train=True,
)
row(
    "nll_focal_train",
    lambda x, t: ((1 - (p := torch.sigmoid(x) * t + (1 - torch.sigmoid(x)) * (1 - t))) ** 2 * -torch.log(p.clamp_min(1e-6))).mean(),
    (8192, 4096),
    (8192, 4096),
    train=True,
)
row(
    "masked_softmax",
    lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1),
    make=lambda: [torch.randn(16, 16, 512, 512, device=DEVICE), torch.rand(16, 1, 512, 512, device=DEVICE) > 0.9],
)
row(
    "causal_softmax_train",
    lambda x: (x + torch.full((1024, 1024), float("-inf"), device=x.device).triu(1)).softmax(-1),
    (8, 8, 1024, 1024),
    dtype=BF16,
    train=True,
)
row("swiglu_bf16", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (8192, 22016), dtype=BF16)
row("swiglu_bf16_train", lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (8192, 11008), dtype=BF16, train=True)
row("geglu_train", lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (8192, 8192), train=True)


def rope(q, cos, sin):
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat((-b, a), -1) * sin


row("rope_bf16", rope, (8, 32, 2048, 128), (2048, 128), (2048, 128), dtype=BF16)
row("rope_bf16_train", rope, (4, 32, 2048, 128), (2048, 128), (2048, 128), dtype=BF16, train=True)
row(
    "rope_complex",
    lambda x, f: torch.view_as_real(torch.view_as_complex(x.reshape(8, 2048, 16, 64, 2)) * torch.view_as_complex(f)[None, :, None]).flatten(
        3
    ),
    (8, 2048, 16, 128),
    (2048, 64, 2),
)
row("qkv_split_heads", lambda x: [t.contiguous() for t in x.view(8, 2048, 3, 16, 64).permute(2, 0, 3, 1, 4)], (8, 2048, 3072), dtype=BF16)
row("merge_heads", lambda x: x.transpose(1, 2).reshape(8, 2048, 1024), (8, 16, 2048, 64), dtype=BF16)
row("transpose_add", lambda x, y: x.t() + y, (8192, 8192), (8192, 8192))
row("cat_rows", lambda x, y: torch.cat((x, y), -1) * 2, (8192, 3000), (8192, 1000))
row("stack_last", lambda x, y: torch.stack((x, y), -1), (8192, 4096), (8192, 4096))
row("roll2", lambda x: torch.roll(x, (3, 3), (1, 2)), (32, 56, 56, 384))
row(
    "window_part",
    lambda x: torch.roll(x, (-3, -3), (1, 2)).view(32, 8, 7, 8, 7, 192).transpose(2, 3).reshape(-1, 49, 192),
    (32, 56, 56, 192),
)
row("unfold_patches", lambda x: x.view(64, 3, 14, 16, 14, 16).permute(0, 2, 4, 1, 3, 5).reshape(64, 196, 768) * 2, (64, 3, 224, 224))
row("F_unfold", lambda x: F.unfold(x, 3, padding=1), (16, 64, 64, 64))
row("F_fold", lambda x: F.fold(x, (64, 64), 3, padding=1), (16, 576, 4096))
row(
    "gather_rows",
    lambda x, i: x.gather(1, i),
    make=lambda: [torch.randn(8192, 4096, device=DEVICE), torch.randint(4096, (8192, 2048), device=DEVICE)],
)
row(
    "index_rows",
    lambda x, i: x[i] * 2,
    make=lambda: [torch.randn(65536, 512, device=DEVICE), torch.randint(65536, (65536,), device=DEVICE)],
)
row(
    "index_add",
    lambda x, i: torch.zeros(10000, 256, device=DEVICE).index_add(0, i, x),
    make=lambda: [torch.randn(200000, 256, device=DEVICE), torch.randint(10000, (200000,), device=DEVICE)],
)
row(
    "scatter_mean",
    lambda x, i: (
        torch.zeros(10000, 128, device=DEVICE).index_add(0, i, x)
        / torch.zeros(10000, device=DEVICE).index_add(0, i, torch.ones_like(x[:, 0])).clamp_min(1)[:, None]
    ),
    make=lambda: [torch.randn(200000, 128, device=DEVICE), torch.randint(10000, (200000,), device=DEVICE)],
)
row(
    "gcn_step",
    lambda x, s, d: torch.relu(torch.zeros_like(x).index_add(0, d, x[s])),
    make=lambda: [
        torch.randn(50000, 128, device=DEVICE),
        torch.randint(50000, (400000,), device=DEVICE),
        torch.randint(50000, (400000,), device=DEVICE),
    ],
)
row(
    "gcn_step_train",
    lambda x, s, d: torch.relu(torch.zeros_like(x).index_add(0, d, x[s])),
    make=lambda: [
        torch.randn(50000, 128, device=DEVICE),
        torch.randint(50000, (400000,), device=DEVICE),
        torch.randint(50000, (400000,), device=DEVICE),
    ],
    train=True,
)
row(
    "embedding_train",
    lambda w, i: F.embedding(i, w),
    make=lambda: [torch.randn(32000, 1024, device=DEVICE), torch.randint(32000, (8, 2048), device=DEVICE)],
    train=True,
)
row("cdist", lambda x, y: ((x[:, None] - y[None]) ** 2).sum(-1), (2048, 64), (2048, 64))
row("pairwise_l1", lambda x, y: (x[:, None] - y[None]).abs().sum(-1), (1024, 256), (1024, 256))
row("outer_bmm_small", lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), (64, 8, 32, 32), (64, 8, 32, 32))
row("matvec", lambda w, x: w @ x, (16384, 8192), (8192,))
row("matvec_bf16", lambda w, x: w @ x, (16384, 8192), (8192,), dtype=BF16)
row("linear_one_bf16", lambda x, w: F.silu(F.linear(x, w)), (1, 8192), (16384, 8192), dtype=BF16)
row("linear_8_bf16", lambda x, w: F.silu(F.linear(x, w)), (8, 8192), (16384, 8192), dtype=BF16)
row(
    "int8_dequant_linear",
    lambda x, w, s: F.linear(x, w.to(BF16) * s[:, None]),
    make=lambda: [
        torch.randn(1, 8192, device=DEVICE, dtype=BF16),
        torch.randint(-127, 127, (16384, 8192), device=DEVICE, dtype=torch.int8),
        torch.rand(16384, device=DEVICE, dtype=BF16),
    ],
)
row(
    "quant_rows",
    lambda x: ((x / (s := x.abs().amax(-1, keepdim=True) / 127)).round().clamp(-127, 127).to(torch.int8), s),
    (8192, 8192),
    dtype=BF16,
)
row(
    "fp8_rows",
    lambda x: ((x.float() / (s := x.abs().amax(-1, keepdim=True).float() / 448)).to(torch.float8_e4m3fn), s),
    (8192, 8192),
    dtype=BF16,
)
row("dropout_train", lambda x: F.dropout(x, 0.1), (8192, 8192), train=True)
row("dropout_bf16_train", lambda x, r: F.dropout(F.gelu(x), 0.1) + r, (8192, 8192), (8192, 8192), dtype=BF16, train=True)
row("rms_norm_train", lambda x, w: F.rms_norm(x, (4096,), w), (16384, 4096), (4096,), dtype=BF16, train=True)
row("layer_norm_768_train", lambda x, w, b: F.layer_norm(x, (768,), w, b), (65536, 768), (768,), (768,), train=True)
row("softmax_small_rows", lambda x: x.softmax(-1), (1 << 20, 49))
row("softmax_dim1", lambda x: x.softmax(1), (64, 256, 4096))
row("depthwise_conv", lambda x, w: F.conv2d(x, w, None, 1, 3, 1, 96), (32, 96, 56, 56), (96, 1, 7, 7))
row("conv1d_gelu_bf16", lambda x, w, b: F.gelu(F.conv1d(x, w, b, padding=1)), (16, 80, 3000), (512, 80, 3), (512,), dtype=BF16)
row("causal_conv1d_bf16", lambda x, w: F.silu(F.conv1d(F.pad(x, (3, 0)), w, None, groups=2048)), (8, 2048, 2048), (2048, 1, 4), dtype=BF16)
row(
    "causal_conv1d_bf16_train",
    lambda x, w: F.silu(F.conv1d(F.pad(x, (3, 0)), w, None, groups=2048)),
    (8, 2048, 2048),
    (2048, 1, 4),
    dtype=BF16,
    train=True,
)
row(
    "ema_update",
    lambda p, q: [a.lerp_(b, 0.01) for a, b in zip(p, q)],
    make=lambda: [[torch.randn(1024, 1024, device=DEVICE) for _ in range(30)], [torch.randn(1024, 1024, device=DEVICE) for _ in range(30)]],
)
row(
    "clip_norm",
    lambda g: [t * (1.0 / (torch.stack([u.norm() for u in g]).norm() + 1e-6)).clamp(max=1.0) for t in g],
    make=lambda: [[torch.randn(1024, 1024, device=DEVICE) for _ in range(30)]],
)
row("one_hot_sum", lambda t: F.one_hot(t, 256).float().sum(0), make=lambda: [torch.randint(256, (200000,), device=DEVICE)])
row(
    "histogram_mask",
    lambda x: torch.stack([((x > i) & (x <= i + 1)).sum() for i in range(8)]),
    make=lambda: [torch.rand(1 << 25, device=DEVICE) * 8],
)
row(
    "where_index_put",
    lambda x, m: torch.where(m, x, x.mean()),
    make=lambda: [torch.randn(8192, 8192, device=DEVICE), torch.rand(8192, 8192, device=DEVICE) > 0.5],
)
row(
    "masked_assign",
    lambda x, m: x.clone().masked_fill_(m, 0.0).sum(-1),
    make=lambda: [torch.randn(8192, 8192, device=DEVICE), torch.rand(8192, 8192, device=DEVICE) > 0.5],
)
row(
    "grid_sample",
    lambda x, g: F.grid_sample(x, g, align_corners=False),
    make=lambda: [torch.randn(16, 64, 128, 128, device=DEVICE), torch.rand(16, 128, 128, 2, device=DEVICE) * 2 - 1],
)
row(
    "grid_sample_train",
    lambda x, g: F.grid_sample(x, g, align_corners=False),
    make=lambda: [torch.randn(16, 64, 128, 128, device=DEVICE), torch.rand(16, 128, 128, 2, device=DEVICE) * 2 - 1],
    train=True,
)
row(
    "alibi_softmax_bf16",
    lambda x: (
        x
        + -(torch.arange(1024, device=DEVICE)[:, None] - torch.arange(1024, device=DEVICE)[None]).abs()
        * torch.arange(1, 17, device=DEVICE)[:, None, None]
        / 16
    ).softmax(-1),
    (4, 16, 1024, 1024),
    dtype=BF16,
)
row("logits_scale_topk_mask", lambda x: torch.where(x < x.topk(50, -1).values[:, -1:], float("-inf"), x).softmax(-1), (256, 32000))
row("gae_scan", lambda d: torch.stack([d[:, i:].sum(1) for i in range(4)], 1), (4096, 2048))
row("fft_mul", lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w)), (8192, 4096), (4096,))
row(
    "conv_bn_relu_bf16",
    lambda x, w, m, v, g, b: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v, g, b)),
    make=lambda: [
        torch.randn(32, 128, 56, 56, device=DEVICE, dtype=BF16),
        torch.randn(128, 128, 3, 3, device=DEVICE, dtype=BF16) * 0.05,
        *(torch.rand(128, device=DEVICE, dtype=BF16) + 0.5 for _ in range(4)),
    ],
)
row(
    "attn_f32_manual",
    lambda q, k, v: (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v,
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    dtype=BF16,
)
row(
    "attn_bias_bf16",
    lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b),
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    (1, 16, 512, 512),
    dtype=BF16,
)
row("minmax_norm", lambda x: (x - x.amin((1, 2, 3), True)) / (x.amax((1, 2, 3), True) - x.amin((1, 2, 3), True)), (64, 3, 512, 512))
row(
    "rgb_norm_cl",
    lambda x: ((x.permute(0, 3, 1, 2).float() / 255 - 0.45) / 0.225).contiguous(),
    make=lambda: [torch.randint(255, (64, 512, 512, 3), device=DEVICE, dtype=torch.uint8)],
)
row("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n), (65536, 256), (65536, 256), (65536, 256), train=True)
row("cosine_sim", lambda a, b: F.cosine_similarity(a, b), (65536, 512), (65536, 512), train=True)

row("sum_cols", lambda x: x.sum(0), (8192, 8192))
row("sum_cols_bf16", lambda x: x.sum(0), (16384, 8192), dtype=BF16)
row("amax_cols", lambda x: x.amax(0), (8192, 8192))
row(
    "rms_linear_one_bf16",
    lambda x, g, w, b: F.linear(F.rms_norm(x, (4096,), g), w, b),
    (1, 1, 4096),
    (4096,),
    (14336, 4096),
    (14336,),
    dtype=BF16,
)
row(
    "int8_linear_8",
    lambda x, w, s: F.linear(x, w.to(BF16)) * s,
    make=lambda: [
        torch.randn(8, 8192, device=DEVICE, dtype=BF16),
        torch.randint(-127, 127, (16384, 8192), device=DEVICE, dtype=torch.int8),
        torch.rand(16384, device=DEVICE, dtype=BF16),
    ],
)
row(
    "ce_weighted_pixels_train",
    lambda x, t: F.cross_entropy(x, t, weight=torch.linspace(0.5, 1.5, 21, device=x.device), ignore_index=0),
    make=lambda: [torch.randn(16, 21, 256, 256, device=DEVICE), torch.randint(21, (16, 256, 256), device=DEVICE)],
    train=True,
)
row("entropy", lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(), (8192, 4096))
row(
    "info_nce_train",
    lambda a, b: F.cross_entropy(F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() / 0.07, torch.arange(4096, device=a.device)),
    (4096, 512),
    (4096, 512),
    train=True,
)
row(
    "byol_train",
    lambda a, b: (2 - 2 * (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(-1)).mean(),
    (16384, 2048),
    (16384, 2048),
    train=True,
)
row("vae_kl_train", lambda m, s: (-0.5 * (1 + s - m.pow(2) - s.exp()).sum(-1)).mean(), (16384, 2048), (16384, 2048), train=True)
row("pool_global_then_fc", lambda x, w: x.mean((2, 3)) @ w, (256, 512, 14, 14), (512, 1000))
row("adaln", lambda x, s, b: F.layer_norm(x, (1152,)) * (1 + s[:, None]) + b[:, None], (32, 1024, 1152), (32, 1152), (32, 1152), dtype=BF16)
row(
    "adaln_train",
    lambda x, s, b: F.layer_norm(x, (1152,)) * (1 + s[:, None]) + b[:, None],
    (32, 1024, 1152),
    (32, 1152),
    (32, 1152),
    dtype=BF16,
    train=True,
)
row("residual_scale_train", lambda x, y, g: x + y * g, (32, 1024, 1152), (32, 1024, 1152), (1152,), dtype=BF16, train=True)
row("gelu_tanh_train", lambda x: F.gelu(x, approximate="tanh"), (8192, 8192), dtype=BF16, train=True)
row("mish_train", lambda x: F.mish(x), (8192, 8192), train=True)
row("softplus_train", lambda x: F.softplus(x), (8192, 8192), train=True)
row("prelu_train", lambda x, a: F.prelu(x, a), (64, 256, 64, 64), (256,), train=True)
row("bias_relu_nchw_train", lambda x, b: F.relu(x + b[None, :, None, None]), (64, 256, 64, 64), (256,), train=True)
row("instance_norm_train", lambda x: F.instance_norm(x), (32, 128, 64, 64), train=True)
row("group_norm_cl_train2", lambda x, w, b: F.group_norm(x, 8, w, b), (16, 320, 64, 64), (320,), (320,), dtype=BF16, train=True, memory=CL)
row("weight_norm", lambda v, g: v * (g / v.norm(dim=1, keepdim=True)), (8192, 4096), (8192, 1))
row("spectral_power", lambda w, u: F.normalize(w.t() @ u, dim=0), (8192, 4096), (8192,))
row(
    "softmax_masked_len",
    lambda x, n: x.masked_fill(torch.arange(1024, device=x.device)[None, None] >= n[:, None, None], -1e9).softmax(-1),
    make=lambda: [torch.randn(64, 512, 1024, device=DEVICE), torch.randint(1, 1024, (64,), device=DEVICE)],
)
row("tril_mask_mul", lambda x: x * torch.ones(2048, 2048, device=x.device).tril(), (16, 2048, 2048))
row("diff", lambda x: x[:, 1:] - x[:, :-1], (8192, 8193))
row("sobel", lambda x: (x[:, :, 2:] - x[:, :, :-2]).abs(), (64, 64, 130, 128))
row("avg_pool1d_ma", lambda x: F.avg_pool1d(x, 25, 1, 12), (64, 64, 4096))
row(
    "pos_enc",
    lambda x: x + torch.sin(torch.arange(2048, device=x.device)[:, None] / 10000 ** (torch.arange(1024, device=x.device) / 1024)),
    (16, 2048, 1024),
)
row("topk_gate", lambda x: F.softmax(x.topk(2, -1).values, -1), (65536, 64))
row("moe_combine", lambda y, w: (y * w[..., None]).sum(1), (16384, 2, 2048), (16384, 2), dtype=BF16)
row("moe_combine_train", lambda y, w: (y * w[..., None]).sum(1), (16384, 2, 2048), (16384, 2), dtype=BF16, train=True)
row("kv_append", lambda c, n: torch.cat((c[:, :, 1:], n), 2), (16, 32, 1024, 128), (16, 32, 1, 128), dtype=BF16)
row("repeat_kv", lambda x: x[:, :, None].expand(-1, -1, 4, -1, -1).reshape(8, 32, 2048, 128), (8, 8, 2048, 128), dtype=BF16)
row("patch_merge", lambda x: torch.cat((x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]), -1), (64, 56, 56, 192))
row("channel_shuffle", lambda x: x.view(64, 4, 64, 56, 56).transpose(1, 2).reshape(64, 256, 56, 56) * 2, (64, 256, 56, 56))
row("space_to_depth", lambda x: F.pixel_unshuffle(x, 2), (64, 64, 112, 112))
row(
    "lerp_mix",
    lambda x, i, part: x * part + x[i] * (1 - part),
    make=lambda: [
        torch.randn(256, 3, 224, 224, device=DEVICE),
        torch.randperm(256, device=DEVICE),
        torch.rand(256, 1, 1, 1, device=DEVICE),
    ],
)
row(
    "random_flip",
    lambda x, m: torch.where(m[:, None, None, None], x.flip(3), x),
    make=lambda: [torch.randn(256, 3, 224, 224, device=DEVICE), torch.rand(256, device=DEVICE) > 0.5],
)
row("std_mean_norm", lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5), (65536, 1024))
row("pairwise_cos", lambda x: F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).t(), (4096, 512))
row(
    "lstm_cell",
    lambda g, c: torch.sigmoid(g[:, 2048:4096]) * c + torch.sigmoid(g[:, :2048]) * torch.tanh(g[:, 4096:6144]),
    (8192, 8192),
    (8192, 2048),
)
row(
    "lstm_cell_train",
    lambda g, c: torch.sigmoid(g[:, 2048:4096]) * c + torch.sigmoid(g[:, :2048]) * torch.tanh(g[:, 4096:6144]),
    (8192, 8192),
    (8192, 2048),
    train=True,
)

row("cumsum_rows_bf16", lambda x: x.cumsum(-1), (8192, 4096), dtype=BF16)
row("cumsum_cols_bf16", lambda x: x.cumsum(0), (4096, 8192), dtype=BF16)
row("cumsum_rows_long", lambda x: x.cumsum(-1), (512, 65536))
row("cumsum_rows_16384", lambda x: x.cumsum(-1), (2048, 16384))
row("cumsum_rows_short", lambda x: x.cumsum(-1), (1 << 18, 128))
row("cumsum_mid", lambda x: x.cumsum(1), (64, 512, 1024))
row("cumsum_mid_narrow", lambda x: x.cumsum(1), (256, 4096, 16))
row("cumsum_few_long", lambda x: x.cumsum(-1), (8, 1 << 20))
row("cumsum_few_cols", lambda x: x.cumsum(0), (1 << 20, 8))
row("cumsum_tall_3", lambda x: x.cumsum(0), (1 << 20, 3))
row("cumsum_1d", lambda x: x.cumsum(0), (1 << 24,))
row("cumsum_1d_4096", lambda x: (x * 2).cumsum(0), (4096,))
row("cumprod_rows", lambda x: (1 - x.sigmoid()).cumprod(-1), (8192, 4096))
row(
    "position_ids",
    lambda i: ((m := i.ne(1).int()).cumsum(1).type_as(m) * m).long() + 1,
    make=lambda: [torch.randint(5, (64, 512), device=DEVICE)],
)
row(
    "position_ids_long",
    lambda m: m.long().cumsum(-1).sub(1).masked_fill(m == 0, 1),
    make=lambda: [torch.randint(2, (256, 8192), device=DEVICE)],
)
row("moe_positions", lambda e: F.one_hot(e, 64).cumsum(0), make=lambda: [torch.randint(64, (16384,), device=DEVICE)])
row(
    "moe_capacity",
    lambda e: ((h := F.one_hot(e, 64)).cumsum(0) * h - 1).amax(-1),
    make=lambda: [torch.randint(64, (16384,), device=DEVICE)],
)
row("top_p", lambda x: x.softmax(-1).cumsum(-1), make=lambda: [torch.randn(256, 32000, device=DEVICE).sort(-1, descending=True).values])
row(
    "top_p_mask",
    lambda x: (p := x.softmax(-1)).cumsum(-1) - p > 0.9,
    make=lambda: [torch.randn(64, 128256, device=DEVICE).sort(-1, descending=True).values],
)
row("top_p_one", lambda x: x.softmax(-1).cumsum(-1), make=lambda: [torch.randn(1, 128256, device=DEVICE).sort(-1, descending=True).values])
row("top_p_sort", lambda x: x.sort(-1, descending=True).values.softmax(-1).cumsum(-1), (64, 32000))
row("cumsum_rows_train", lambda x: x.cumsum(-1), (8192, 4096), train=True)
row("cumsum_cols_train", lambda x: (x.sigmoid()).cumsum(0), (4096, 8192), train=True)
row("cumsum_then_exp", lambda x: torch.exp(-F.softplus(x).cumsum(1)), (64, 512, 1024))

row("circular2", lambda x: F.relu(F.pad(x, (2, 2, 2, 2), mode="circular")), IMAGES)
row("replicate_bf16", lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate") * 2, IMAGES, dtype=BF16)
row("reflect_train", lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), IMAGES, train=True)
row("unfold_patches16", lambda x: F.unfold(x, 16, stride=16).transpose(1, 2), (64, 3, 224, 224))
row("unfold_train", lambda x: F.unfold(x, 3, padding=1), (16, 64, 64, 64), train=True)
row(
    "attn_causal",
    lambda q, k, v: (
        (q @ k.transpose(-1, -2) / 8)
        .masked_fill(torch.ones(512, 512, device=q.device, dtype=torch.bool).tril() == 0, float("-inf"))
        .softmax(-1)
        @ v
    ),
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    dtype=BF16,
)
row("attn_f32", lambda q, k, v: (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v, (8, 16, 512, 64), (8, 16, 512, 64), (8, 16, 512, 64))
row(
    "attn_train_bf16",
    lambda q, k, v: (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v,
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    (8, 16, 512, 64),
    dtype=BF16,
    train=True,
)
