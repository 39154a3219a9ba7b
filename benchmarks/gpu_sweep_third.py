"""Still more rows of `benchmarks.gpu_sweep`: signals, image filters, state spaces, norms and gates of newer models, geometry, optimisers, statistics, bits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.gpu_sweep_more import ints, normal, rand
from benchmarks.gpu_sweep_rows import BF16, CL, lab, row

T = torch.Tensor

# ---- norms, gates, activations ---------------------------------------------------------------------------------------------
row("grn", lambda x, g, b: (lambda n: g * (x * (n / (n.mean(-1, keepdim=True) + 1e-6))) + b + x)(x.norm(dim=(1, 2), keepdim=True)), (32, 28, 28, 384), (384,), (384,))  # fmt: skip
row("rms_gated_bf16", lambda x, z, w: F.rms_norm(x * F.silu(z), (2048,), w), (8192, 2048), (8192, 2048), (2048,), dtype=BF16)
row("rms_gated_train", lambda x, z, w: F.rms_norm(x * F.silu(z), (1024,), w), (8192, 1024), (8192, 1024), (1024,), train=True)
row("qk_norm_rope", lambda q, c, s: (lambda n: torch.cat([n[..., :32] * c - n[..., 32:] * s, n[..., 32:] * c + n[..., :32] * s], -1))(F.normalize(q, dim=-1)), (8, 16, 1024, 64), (1024, 32), (1024, 32))  # fmt: skip
row("lrn", lambda x: F.local_response_norm(x, 5), (32, 64, 56, 56))
row("hardswish_train", F.hardswish, (32, 128, 56, 56), train=True)
row("squareplus", lambda x: (x + (x * x + 4).sqrt()) / 2, (1 << 25,))
row("snake_train", lambda x, a: x + torch.sin(a[:, None] * x) ** 2 / (a[:, None] + 1e-9), (16, 256, 8192), (256,), train=True)
row("quick_gelu_bf16_train", lambda x: x * torch.sigmoid(1.702 * x), (8192, 4096), dtype=BF16, train=True)
row("relu_squared_bf16", lambda x: F.relu(x).square(), (8192, 8192), dtype=BF16)
row("soft_cap", lambda x: 30 * torch.tanh(x / 30), (64, 128256), dtype=BF16)
row("dyt_train", lambda x, a, w, b: torch.tanh(a * x) * w + b, (8192, 1024), (1,), (1024,), (1024,), train=True)
row("batch_norm_cl_eval_relu", lambda x, m, v, w, b: F.relu(F.batch_norm(x, m, v.abs(), w, b)), (32, 256, 56, 56), (256,), (256,), (256,), (256,), memory=CL)  # fmt: skip
row("group_norm_1_train", lambda x, w, b: F.group_norm(x, 1, w, b), (16, 96, 64, 64), (96,), (96,), train=True)
row(
    "layer_norm_bias_dropout_free",
    lambda x, y, w, b: F.layer_norm(x + y, (512,), w, b),
    (16, 2048, 512),
    (512,),
    (512,),
    (512,),
    dtype=BF16,
)
row("channel_shuffle_gate", lambda x: torch.cat([x[:, ::2] * torch.sigmoid(x[:, 1::2]), x[:, 1::2]], 1), (32, 128, 56, 56))
row("cosine_head", lambda x, w: 16 * F.normalize(x, dim=-1) @ F.normalize(w, dim=-1).t(), (4096, 256), (1000, 256))


# ---- sequences, attention, state spaces ------------------------------------------------------------------------------------
def _retention(q: T, k: T, v: T, g: T) -> T:
    n = torch.arange(q.shape[2], device=q.device)
    decay = torch.where(n[:, None] >= n, g.sigmoid()[:, None, None] ** (n[:, None] - n).clamp(min=0), 0.0)
    return (q @ k.transpose(-1, -2) * decay) @ v


def _delta(x: T, a: T) -> T:
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.sigmoid(a[:, t]) * state + x[:, t]
        found.append(state)
    return torch.stack(found, 1)


row("retention", _retention, (4, 8, 512, 64), (4, 8, 512, 64), (4, 8, 512, 64), (8,))
row("linear_attention", lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).transpose(-1, -2) @ v), (8, 16, 2048, 64), (8, 16, 2048, 64), (8, 16, 2048, 64))  # fmt: skip
row("decay_scan_16", _delta, (512, 16, 1024), (512, 16, 1024))
row("local_window_softmax", lambda x: x.masked_fill((torch.arange(1024, device=x.device)[:, None] - torch.arange(1024, device=x.device)).abs() > 64, float("-inf")).softmax(-1), (64, 1024, 1024))  # fmt: skip
row("segment_ids_softmax", lambda x, s: x.masked_fill(s[:, :, None] != s[:, None], -1e9).softmax(-1), make=lambda: [normal(64, 512, 512), ints(4, 64, 512)])  # fmt: skip
row("log_softmax_gather_train", lambda x, i: F.log_softmax(x, -1).gather(-1, i[..., None])[..., 0].sum(), make=lambda: [normal(4096, 32000), ints(32000, 4096)], train=True)  # fmt: skip
row(
    "sink_softmax",
    lambda x, s: torch.cat([x, s.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2], 1)], -1).softmax(-1)[..., :-1],
    (4, 16, 512, 512),
    (16,),
)
row("softmax_off_by_one", lambda x: (lambda e: e / (1 + e.sum(-1, keepdim=True)))(torch.exp(x - x.amax(-1, keepdim=True))), (8192, 2048))
row("entmax_like", lambda x: (lambda y: y / y.sum(-1, keepdim=True))(F.relu(x - x.mean(-1, keepdim=True)) ** 2 + 1e-9), (8192, 2048))
row("token_drop", lambda x, m: x * m[:, :, None] / m.float().mean(), make=lambda: [normal(64, 512, 1024), rand(64, 512) > 0.1])
row("pack_heads", lambda x: x.view(8, 1024, 3, 16, 64).permute(2, 0, 3, 1, 4).contiguous(), (8, 1024, 3072), dtype=BF16)
row("alibi_add_bf16", lambda x, s: x + s[:, None, None] * -(torch.arange(1024, device=x.device) - torch.arange(1024, device=x.device)[:, None]).abs(), (8, 16, 1024, 1024), (16,), dtype=BF16)  # fmt: skip
row(
    "cross_entropy_pixels_bf16_train",
    lambda x, t: F.cross_entropy(x, t),
    make=lambda: [normal(8, 19, 256, 512, dtype=BF16), ints(19, 8, 256, 512)],
    train=True,
)
row(
    "focal_softmax_train",
    lambda x, t: (lambda lp: -(((1 - lp.exp()) ** 2 * lp).gather(1, t[:, None])).mean())(F.log_softmax(x, 1)),
    make=lab(16384, 1000),
    train=True,
)
row(
    "poly_loss_train",
    lambda x, t: (F.cross_entropy(x, t, reduction="none") + 1 - x.softmax(-1).gather(1, t[:, None])[:, 0]).mean(),
    make=lab(8192, 4096),
    train=True,
)
row(
    "arcface_train",
    lambda x, t: F.cross_entropy(torch.where(F.one_hot(t, x.shape[1]).bool(), x - 0.5, x) * 30, t),
    make=lab(4096, 8192),
    train=True,
)
row("ctc_like_logits", lambda x: F.log_softmax(x.float().transpose(0, 1), 2), (32, 500, 1024), dtype=BF16)


# ---- images ----------------------------------------------------------------------------------------------------------------
def _median3(x: T) -> T:
    p = F.pad(x, (1, 1, 1, 1), mode="replicate")
    return torch.stack([p[:, :, i : i + x.shape[2], j : j + x.shape[3]] for i in range(3) for j in range(3)]).median(0).values


def _unsharp(x: T) -> T:
    p = F.pad(x, (1, 1, 1, 1), mode="reflect")
    blur = sum(p[..., i : i + x.shape[2], j : j + x.shape[3]] * (1 / 9) for i in range(3) for j in range(3))
    return (x + 1.5 * (x - blur)).clamp(0, 1)


def _hue(x: T, h: float = 0.3) -> T:
    c, s = math.cos(h), math.sin(h)
    m = torch.tensor([[0.6 + 0.4 * c, 0.4 - 0.4 * c, s], [0.3 - 0.3 * c, 0.7 + 0.3 * c, -s], [s, -s, c]], device=x.device)
    return torch.einsum("ij,njhw->nihw", m, x)


def _affine(x: T, t: T) -> T:
    return F.grid_sample(x, F.affine_grid(t, list(x.shape), align_corners=False), align_corners=False)


row("dilate3", lambda x: F.max_pool2d(x, 3, 1, 1), (64, 3, 256, 256))
row("erode5", lambda x: -F.max_pool2d(-x, 5, 1, 2), (16, 3, 256, 256))
row("unsharp", _unsharp, make=lambda: [rand(16, 3, 512, 512)])
row("hue", _hue, make=lambda: [rand(16, 3, 512, 512)])
row("yuv", lambda x: torch.stack([0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2], 0.5 * x[:, 2] - 0.25 * x[:, 0], 0.5 * x[:, 0] - 0.3 * x[:, 1]], 1), (32, 3, 512, 512))  # fmt: skip
row("gamma_uint8", lambda x: ((x.float() / 255) ** 2.2 * 255).round().byte(), make=lambda: [ints(256, 64, 3, 512, 512, dtype=torch.uint8)])
row("affine_warp", _affine, (16, 16, 128, 128), (16, 2, 3))
row("cutout", lambda x, a, b: x * ~((torch.arange(224, device=x.device) - a[:, None]).abs()[:, None, :, None].lt(16) & (torch.arange(224, device=x.device) - b[:, None]).abs()[:, None, None].lt(16)), make=lambda: [normal(64, 3, 224, 224), ints(224, 64), ints(224, 64)])  # fmt: skip
row("psnr", lambda a, b: -10 * torch.log10(((a - b) ** 2).mean((1, 2, 3))), (64, 3, 256, 256), (64, 3, 256, 256))
row(
    "ssim_parts",
    lambda a, b: (lambda p: (2 * p(a) * p(b) + 1e-4) / (p(a) ** 2 + p(b) ** 2 + 1e-4))(lambda x: F.avg_pool2d(x, 7, 1)),
    (8, 3, 256, 256),
    (8, 3, 256, 256),
)
row("haar", lambda x: (lambda a, b, c, d: torch.cat([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1) / 2)(x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]), (32, 16, 256, 256))  # fmt: skip
row("blur_pool_train", lambda x: F.avg_pool2d(F.pad(x, (1, 0, 1, 0), mode="reflect"), 2, 2), (32, 64, 112, 112), train=True)
row("tile_shuffle", lambda x: x.view(16, 64, 8, 16, 8, 16).permute(0, 2, 4, 1, 3, 5).reshape(1024, 64, 16, 16), (16, 64, 128, 128))
row("upsample_concat_cl", lambda x, y: torch.cat([F.interpolate(x, scale_factor=2), y], 1), (16, 64, 64, 64), (16, 32, 128, 128), memory=CL)
row(
    "max_unpool_like",
    lambda x, g: F.interpolate(g, scale_factor=2) * (x == F.interpolate(F.max_pool2d(x, 2), scale_factor=2)),
    (16, 64, 128, 128),
    (16, 64, 64, 64),
)
row("depth_to_points", lambda d, k: torch.stack([(torch.arange(640, device=d.device) - k[2]) * d / k[0], (torch.arange(480, device=d.device)[:, None] - k[3]) * d / k[1], d], -1), make=lambda: [rand(16, 480, 640) + 1, rand(4) + 1])  # fmt: skip
row("normals", lambda d: F.normalize(torch.stack([d[:, 1:-1, 2:] - d[:, 1:-1, :-2], d[:, 2:, 1:-1] - d[:, :-2, 1:-1], torch.full_like(d[:, 1:-1, 1:-1], 2.0)], 1), dim=1), (16, 512, 512))  # fmt: skip
row("conv3d_pad_norm", lambda x: F.instance_norm(F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate")), (4, 16, 32, 64, 64))
row(
    "roi_mean",
    lambda x, m: (x[:, None] * m[:, :, None]).sum((-1, -2)) / m.sum((-1, -2))[..., None].clamp(min=1),
    (4, 64, 64, 64),
    (4, 16, 64, 64),
)

# ---- signals ---------------------------------------------------------------------------------------------------------------
row("frames_window", lambda x, w: x.unfold(-1, 1024, 256) * w, (16, 262144), (1024,))
row("log_mel_tail", lambda x: torch.log10(x.clamp(min=1e-10)).maximum(torch.log10(x.clamp(min=1e-10)).amax((-1, -2), keepdim=True) - 8), make=lambda: [rand(64, 80, 3000)])  # fmt: skip
row(
    "mu_law",
    lambda x: (((x.sign() * torch.log1p(255 * x.abs()) / math.log1p(255)) + 1) / 2 * 255 + 0.5).long(),
    make=lambda: [rand(64, 160000) * 2 - 1],
)
row("pre_emphasis", lambda x: torch.cat([x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]], 1), (256, 65536))
row("spec_augment", lambda x, a, b: x.masked_fill((torch.arange(3000, device=x.device) >= a[:, None, None]) & (torch.arange(3000, device=x.device) < b[:, None, None]), 0.0), make=lambda: [normal(64, 80, 3000), ints(1500, 64), ints(3000, 64)])  # fmt: skip
row("envelope", lambda x: F.max_pool1d(x.abs()[:, None], 64, 64)[:, 0], (256, 65536))
row("complex_mask", lambda m, p, k: torch.stack([m * k * p.cos(), m * k * p.sin()], -1), (32, 257, 1000), (32, 257, 1000), (32, 257, 1000))

# ---- geometry, physics, finance --------------------------------------------------------------------------------------------
row("quaternion_multiply", lambda a, b: (lambda w, x, y, z, e, f, g, h: torch.stack([w * e - x * f - y * g - z * h, w * f + x * e + y * h - z * g, w * g - x * h + y * e + z * f, w * h + x * g - y * f + z * e], -1))(*a.unbind(-1), *b.unbind(-1)), (1 << 20, 4), (1 << 20, 4))  # fmt: skip
row("euler_to_matrix", lambda e: (lambda c, s: torch.stack([c[:, 1] * c[:, 2], -c[:, 1] * s[:, 2], s[:, 1], c[:, 0] * s[:, 2] + s[:, 0] * s[:, 1] * c[:, 2], c[:, 0] * c[:, 2] - s[:, 0] * s[:, 1] * s[:, 2], -s[:, 0] * c[:, 1], s[:, 0] * s[:, 2] - c[:, 0] * s[:, 1] * c[:, 2], s[:, 0] * c[:, 2] + c[:, 0] * s[:, 1] * s[:, 2], c[:, 0] * c[:, 1]], 1).view(-1, 3, 3))(e.cos(), e.sin()), (1 << 20, 3))  # fmt: skip
row("ray_sphere", lambda o, d, c, r: (lambda b, q: torch.where(b * b - q >= 0, -b - (b * b - q).clamp(min=0).sqrt(), float("inf")).amin(1))(((o[:, None] - c) * d[:, None]).sum(-1), ((o[:, None] - c) ** 2).sum(-1) - r * r), (65536, 3), (65536, 3), (64, 3), (64,))  # fmt: skip
row("lennard_jones", lambda x: (lambda d: (4 * (d**-6 - d**-3)).triu(1).sum())(((x[:, None] - x) ** 2).sum(-1) + 1), (2048, 3))
row("face_areas", lambda v, f: (lambda a, b, c: torch.linalg.cross(b - a, c - a).norm(dim=-1) / 2)(*v[f].unbind(1)), make=lambda: [normal(200000, 3), ints(200000, 400000, 3)])  # fmt: skip
row("black_scholes", lambda s, k, t: (lambda d: s * torch.special.ndtr(d) - k * torch.exp(-0.03 * t) * torch.special.ndtr(d - 0.2 * t.sqrt()))((torch.log(s / k) + 0.05 * t) / (0.2 * t.sqrt())), make=lambda: [rand(1 << 23) + 1, rand(1 << 23) + 1, rand(1 << 23) + 0.1])  # fmt: skip
row("leapfrog", lambda x, v: (lambda h: (x + 0.01 * h, h - 0.005 * (x + 0.01 * h)))(v - 0.005 * x), (1 << 24,), (1 << 24,))
row(
    "mandelbrot_8",
    lambda c: (lambda f: f(f(f(f(f(f(f(f(c)))))))))(lambda z: torch.stack([z[0] ** 2 - z[1] ** 2 + c[0], 2 * z[0] * z[1] + c[1]])),
    (2, 1 << 22),
)
row("haversine", lambda a, b: (lambda d: 12742 * torch.asin((torch.sin(d[:, 0] / 2) ** 2 + a[:, 0].cos() * b[:, 0].cos() * torch.sin(d[:, 1] / 2) ** 2).clamp(0, 1).sqrt()))(a - b), (1 << 22, 2), (1 << 22, 2))  # fmt: skip
row(
    "sdf_blend",
    lambda p: torch.minimum(p.norm(dim=-1) - 1, (p.abs() - 0.7).clamp(min=0).norm(dim=-1) + (p.abs() - 0.7).amax(-1).clamp(max=0)),
    (1 << 21, 3),
)

# ---- statistics, losses, optimisers ----------------------------------------------------------------------------------------
row("covariance", lambda x: (lambda c: c.t() @ c / (x.shape[0] - 1))(x - x.mean(0)), (65536, 256))
row("correlation_rows", lambda a, b: (lambda c, d: (c * d).sum(-1) / (c.norm(dim=-1) * d.norm(dim=-1)))(a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)), (16384, 1024), (16384, 1024))  # fmt: skip
row("zscore_cols", lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6), (65536, 512))
row(
    "skew_kurtosis",
    lambda x: (lambda z: torch.stack([(z**3).mean(1), (z**4).mean(1) - 3]))((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)),
    (16384, 2048),
)
row(
    "winsorise",
    lambda x, q: torch.maximum(torch.minimum(x, q[1]), q[0]).mean(0),
    make=lambda: [normal(65536, 512), torch.stack([-rand(512), rand(512)])],
)
row("rank_loss_train", lambda a, b: F.margin_ranking_loss(a, b, torch.ones_like(a), margin=0.2), (1 << 23,), (1 << 23,), train=True)
row("cauchy_train", lambda x, y: torch.log1p((x - y) ** 2 / 2).mean(), (1 << 23,), (1 << 23,), train=True)
row(
    "quantile_loss_train",
    lambda x, y: (lambda e: torch.maximum(0.9 * e, -0.1 * e).mean())(y[:, None] - x),
    (1 << 20, 9),
    (1 << 20,),
    train=True,
)
row("supcon_train", lambda z, t: (lambda s, m: -((s.log_softmax(1) * m).sum(1) / m.sum(1)).mean())(F.normalize(z, dim=1) @ F.normalize(z, dim=1).t() / 0.1, (t[:, None] == t).float()), make=lambda: [normal(4096, 128), ints(100, 4096)], train=True)  # fmt: skip
row(
    "dino_train",
    lambda s, t, c: -(F.softmax((t - c) / 0.04, -1).detach() * F.log_softmax(s / 0.1, -1)).sum(-1).mean(),
    (1024, 16384),
    (1024, 16384),
    (16384,),
    train=True,
)
row("sgd_nesterov", lambda p, g, m: (lambda n: (p - 0.1 * (g + 0.9 * n), n))(0.9 * m + g), (1 << 25,), (1 << 25,), (1 << 25,))
row(
    "adafactor_factors",
    lambda g: (lambda s: g * (s.mean(1, keepdim=True) / s.mean()).rsqrt() * s.mean(0, keepdim=True).rsqrt())(g * g + 1e-30),
    (4096, 4096),
)
row(
    "lamb_ratio",
    lambda p, m, v: (lambda u: p - 0.01 * (p.norm() / u.norm()) * u)(m / (v.abs().sqrt() + 1e-6)),
    (1 << 24,),
    (1 << 24,),
    (1 << 24,),
)
row("grad_clip_value_norm", lambda g: (lambda c: c * (1 / (c.norm() + 1e-6)).clamp(max=1.0))(g.clamp(-1, 1)), (1 << 25,))
row("swa_bf16", lambda a, p: torch.lerp(a, p.float(), 0.01), make=lambda: [normal(1 << 25), normal(1 << 25, dtype=BF16)])
row("confusion", lambda p, t: torch.bincount(t * 10 + p, minlength=100), make=lambda: [ints(10, 1 << 22), ints(10, 1 << 22)])
row("accuracy_topk", lambda x, t: (x.topk(5, 1).indices == t[:, None]).any(1).float().mean(), make=lab(16384, 1000))
row("ece_bins", lambda x, t: (lambda c, p: torch.zeros(15, device=x.device).index_add(0, (c * 15).long().clamp(max=14), (p == t).float() - c))(*x.softmax(1).max(1)), make=lab(32768, 100))  # fmt: skip

# ---- integers, bits, quantities of bytes -----------------------------------------------------------------------------------
row("popcount", lambda x: (lambda a: (lambda b: ((b + (b >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24 & 255)((a & 0x33333333) + (a >> 2 & 0x33333333)))(x - (x >> 1 & 0x55555555)), make=lambda: [ints(1 << 30, 1 << 24, dtype=torch.int32)])  # fmt: skip
row("morton", lambda x, y: (lambda s: s(x) | s(y) << 1)(lambda v: (lambda a: (a | a << 2) & 0x33333333)((v | v << 4) & 0x0F0F0F0F)), make=lambda: [ints(256, 1 << 23), ints(256, 1 << 23)])  # fmt: skip
row(
    "unpack_bits",
    lambda x: (x[:, None] >> torch.arange(8, device=x.device, dtype=torch.uint8) & 1).bool(),
    make=lambda: [ints(256, 1 << 22, dtype=torch.uint8)],
)
row("pack_int4", lambda x: ((x[:, ::2] & 15) | (x[:, 1::2] << 4)).byte(), make=lambda: [ints(16, 4096, 8192, dtype=torch.uint8)])
row("int8_rows_dequant_add", lambda q, s, x: q.to(BF16) * s[:, None] + x, make=lambda: [ints(127, 8192, 4096, dtype=torch.int8), rand(8192, dtype=BF16), normal(8192, 4096, dtype=BF16)])  # fmt: skip
row("fp8_blocks", lambda x: (lambda b: (b / b.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) * 448).to(torch.float8_e4m3fn))(x.view(32, 128, 32, 128)), (4096, 4096), dtype=BF16)  # fmt: skip
row("int_mean_rows", lambda x: x.float().mean(1), make=lambda: [ints(1000, 8192, 4096, dtype=torch.int32)])
row("vocab_mask", lambda x, b: torch.where((b[:, torch.arange(32000, device=x.device) // 32] >> (torch.arange(32000, device=x.device) % 32) & 1).bool(), x, float("-inf")), make=lambda: [normal(256, 32000), ints(1 << 30, 256, 1000, dtype=torch.int32)])  # fmt: skip
row("ngram_hash", lambda t: (t[:, :-2] * 1000003 ^ t[:, 1:-1] * 10007 ^ t[:, 2:]) % 65536, make=lambda: [ints(50000, 1024, 4096)])
row("run_starts", lambda t: F.pad(t[:, 1:] != t[:, :-1], (1, 0), value=True).cumsum(1), make=lambda: [ints(3, 1024, 8192)])
