"""More rows of `benchmarks.gpu_sweep`: programs of images, losses, graphs, diffusion, reinforcement learning, physics, quantisation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.gpu_sweep_rows import BF16, CL, DEVICE, lab, row


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, device=DEVICE).to(dtype)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(high, shape, device=DEVICE, dtype=dtype)


# ---- images ----------------------------------------------------------------------------------------------------------------
row(
    "uint8_to_nchw",
    lambda x, m, s: (x.permute(0, 3, 1, 2).float() / 255 - m.view(1, 3, 1, 1)) / s.view(1, 3, 1, 1),
    make=lambda: [ints(256, 64, 512, 512, 3, dtype=torch.uint8), rand(3), rand(3) + 1],
)
row("float_to_uint8", lambda x: (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous(), (32, 3, 512, 512))
row("gray", lambda x: 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2], (32, 3, 512, 512))
row("contrast", lambda x: (x - x.mean((1, 2, 3), keepdim=True)) * 1.5 + x.mean((1, 2, 3), keepdim=True), (64, 3, 256, 256))


def _hsv(x: torch.Tensor) -> torch.Tensor:
    high, where = x.max(1)
    low = x.min(1).values
    delta = high - low
    r, g, b = x.unbind(1)
    d = delta.clamp(min=1e-8)
    h = torch.stack([(g - b) / d % 6, (b - r) / d + 2, (r - g) / d + 4], 1).gather(1, where[:, None])[:, 0] / 6
    return torch.stack([h, delta / high.clamp(min=1e-8), high], 1)


row("rgb_to_hsv", _hsv, make=lambda: [rand(16, 3, 512, 512)])
row("palette", lambda p, i: p[i.long()], make=lambda: [rand(256, 4), ints(256, 16, 512, 512, dtype=torch.uint8)])
row("blur", lambda x, w: F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), w, groups=16), (16, 16, 256, 256), (16, 1, 5, 5))
row("laplacian", lambda x: F.pad(x, (1, 1, 1, 1))[..., 2:, 1:-1] + F.pad(x, (1, 1, 1, 1))[..., :-2, 1:-1] - 2 * x, (64, 512, 512))
row("flip_lr", lambda x: x.flip(-1) * 2 - 1, (64, 3, 512, 512))
row("rot90", lambda x: torch.rot90(x, 1, (-2, -1)) * 2, (64, 3, 512, 512))
row("crop_normalise", lambda x: (x[:, :, 16:240, 16:240] - 0.5) / 0.25, (64, 3, 256, 256))
row(
    "mixup",
    lambda x, i, a: a.view(-1, 1, 1, 1) * x + (1 - a.view(-1, 1, 1, 1)) * x[i],
    make=lambda: [normal(128, 3, 224, 224), ints(128, 128), rand(128)],
)
row("onehot_maps", lambda t: F.one_hot(t, 21).permute(0, 3, 1, 2).float(), make=lambda: [ints(21, 8, 256, 256)])
row("segment_argmax", lambda x: F.softmax(x, 1).max(1), (8, 21, 512, 512))


def _dice(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p = x.softmax(1)
    y = F.one_hot(t, 4).permute(0, 3, 1, 2)
    return 1 - (2 * (p * y).sum((2, 3)) / (p.sum((2, 3)) + y.sum((2, 3)) + 1e-6)).mean()


row("dice_train", _dice, make=lambda: [normal(16, 4, 256, 256), ints(4, 16, 256, 256)], train=True)


def _focal(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p = x.sigmoid()
    ce = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    pt = p * t + (1 - p) * (1 - t)
    return ((0.25 * t + 0.75 * (1 - t)) * ce * (1 - pt) ** 2).sum()


row("sigmoid_focal_train", lambda x, t: _focal(x, t.detach()), (64, 20000, 8), (64, 20000, 8), train=True)
row("adaptive_avg7", lambda x: F.adaptive_avg_pool2d(x, 7), (32, 512, 28, 28))
row("adaptive_max1", lambda x: F.adaptive_max_pool2d(x, 1).flatten(1), (64, 512, 28, 28))
row("avgpool3_same", lambda x: F.avg_pool2d(x, 3, 1, 1), (32, 64, 112, 112))
row("avgpool3_same_cl", lambda x: F.avg_pool2d(x, 3, 1, 1), (32, 64, 112, 112), memory=CL)
row("maxpool1d", lambda x: F.max_pool1d(F.relu(x), 4), (64, 128, 8192))
row("group_norm_video", lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), (2, 128, 16, 64, 64), (128,), (128,), dtype=BF16)
row("weight_standard", lambda w: (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5), (2048, 1024, 3, 3))
row(
    "se_block", lambda x, a, b: x * torch.sigmoid(F.relu(x.mean((2, 3)) @ a) @ b)[:, :, None, None], (64, 256, 56, 56), (256, 16), (16, 256)
)
row("channel_attention", lambda x: x * torch.sigmoid(x.mean(1, keepdim=True) + x.amax(1, keepdim=True)), (32, 256, 56, 56))
row("global_max_avg", lambda x: torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1), (64, 1024, 28, 28))
row("deconv_shuffle_cl", lambda x: F.gelu(F.pixel_unshuffle(x, 2)), (16, 64, 128, 128), memory=CL)
row("patchify", lambda x: x.reshape(64, 3, 14, 16, 14, 16).permute(0, 2, 4, 3, 5, 1).reshape(64, 196, 768), (64, 3, 224, 224))
row(
    "mae_mask", lambda x, i: x.gather(1, i[..., None].expand(-1, -1, x.shape[-1])), make=lambda: [normal(128, 196, 768), ints(196, 128, 49)]
)
row("warp_flow", lambda x, f: F.grid_sample(x, torch.stack(torch.meshgrid(torch.linspace(-1, 1, 256, device=x.device), torch.linspace(-1, 1, 256, device=x.device), indexing="xy"), -1) + f * 0.05, align_corners=True), (8, 32, 256, 256), (8, 256, 256, 2))  # fmt: skip
row("iou_matrix", lambda a, b: _iou(a, b), make=lambda: [rand(4096, 4), rand(2048, 4)])


def _iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = torch.cat([a[:, :2], a[:, :2] + a[:, 2:]], 1), torch.cat([b[:, :2], b[:, :2] + b[:, 2:]], 1)
    low, high = torch.maximum(a[:, None, :2], b[:, :2]), torch.minimum(a[:, None, 2:], b[:, 2:])
    both = (high - low).clamp(min=0).prod(2)
    area = (a[:, 2:] - a[:, :2]).prod(1)[:, None] + (b[:, 2:] - b[:, :2]).prod(1)
    return both / (area - both)


# ---- sequences -------------------------------------------------------------------------------------------------------------
row(
    "masked_mean",
    lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True),
    make=lambda: [normal(256, 512, 768, dtype=BF16), (rand(256, 512) > 0.3).to(BF16)],
)
row("pool_normalise", lambda x: F.normalize(x.mean(1), dim=-1), (256, 512, 768), dtype=BF16)
row("attention_pool", lambda x, w: ((x @ w).softmax(1) * x).sum(1), (64, 1024, 512), (512, 1))
row("last_token", lambda x, n: x[torch.arange(x.shape[0], device=x.device), n], make=lambda: [normal(256, 512, 1024), ints(512, 256)])
row("additive_attention", lambda q, k, v: torch.tanh(q[:, :, None] + k[:, None]) @ v, (16, 128, 256), (16, 128, 256), (256,))
row(
    "rel_pos_bias",
    lambda a, t, i: (a + t[i].permute(2, 0, 1)).softmax(-1),
    make=lambda: [normal(256, 8, 49, 49), normal(169, 8), ints(169, 49, 49)],
)
row("rel_shift", lambda x: F.pad(x, (1, 0)).view(*x.shape[:2], x.shape[3] + 1, x.shape[2])[:, :, 1:].reshape_as(x), (8, 8, 1024, 1024))
row("beam_step", lambda x, s: (F.log_softmax(x, -1) + s[:, None]).view(16, -1).topk(8, -1), (64, 32000), (64,))
row(
    "repetition_penalty",
    lambda x, i: x.scatter(1, i, torch.where(x.gather(1, i) > 0, x.gather(1, i) / 1.2, x.gather(1, i) * 1.2)),
    make=lambda: [normal(64, 32000), ints(32000, 64, 256)],
)
row("gumbel", lambda x, u: (x - (-u.log()).log()).softmax(-1), make=lambda: [normal(4096, 1024), rand(4096, 1024) * 0.98 + 0.01])
row("residual_rms_bf16", lambda x, r, w: _rms(x, r, w), (8192, 4096), (8192, 4096), (4096,), dtype=BF16)
row("layer_norm_two_dims", lambda x: F.layer_norm(x, x.shape[1:]), (4096, 32, 64))
row("token_shift", lambda x, m: x * m + F.pad(x, (0, 0, 1, -1)) * (1 - m), (32, 1024, 1024), (1024,), dtype=BF16)
row("split_gate_train", lambda x: torch.tanh(x.chunk(2, -1)[0]) * torch.sigmoid(x.chunk(2, -1)[1]), (8192, 4096), train=True)
row("interleave", lambda a, b: torch.stack([a, b], -1).flatten(-2), (4096, 4096), (4096, 4096))
row("fourier_features", lambda x, b: torch.cat([(2 * math.pi * x @ b).sin(), (2 * math.pi * x @ b).cos()], -1), (65536, 3), (3, 256))
row("timestep_embedding", lambda t: torch.cat([(t[:, None] * torch.exp(-math.log(10000) * torch.arange(160, device=t.device) / 160)).cos(), (t[:, None] * torch.exp(-math.log(10000) * torch.arange(160, device=t.device) / 160)).sin()], -1), make=lambda: [rand(4096) * 1000])  # fmt: skip
row(
    "embed_sum3",
    lambda a, b, c, i, j: F.embedding(i, a) + F.embedding(j, b) + c,
    make=lambda: [normal(30522, 768), normal(2, 768), normal(512, 768), ints(30522, 64, 512), ints(2, 64, 512)],
)
row(
    "vocab_nll",
    lambda x, t: -F.log_softmax(x.float(), -1).gather(-1, t[:, None]).mean(),
    make=lambda: [normal(2048, 50257, dtype=BF16), ints(50257, 2048)],
)


def _rms(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + r
    f = h.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w, h


# ---- losses and learning ---------------------------------------------------------------------------------------------------
row("ce_1000_train", lambda x, t: F.cross_entropy(x, t), make=lab(16384, 1000), train=True)
row(
    "bce_pos_weight_train",
    lambda x, t, w: F.binary_cross_entropy_with_logits(x, t.detach().sigmoid(), pos_weight=w.detach().exp()),
    (65536, 80),
    (65536, 80),
    (80,),
    train=True,
)
row("hinge_train", lambda x, t: (1 - x * t.detach().sign()).clamp(min=0).mean(), (4096, 4096), (4096, 4096), train=True)
row("charbonnier_train", lambda x, y: torch.sqrt((x - y) ** 2 + 1e-6).mean(), (16, 3, 512, 512), (16, 3, 512, 512), train=True)
row(
    "tv_train",
    lambda x: (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean(),
    (16, 3, 512, 512),
    train=True,
)
row(
    "ppo_train",
    lambda n, o, a: -torch.min((n - o.detach()).exp() * a.detach(), ((n - o.detach()).exp()).clamp(0.8, 1.2) * a.detach()).mean(),
    (1 << 22,),
    (1 << 22,),
    (1 << 22,),
    train=True,
)
row(
    "sac_logprob",
    lambda m, s, e: (-0.5 * e**2 - s - 0.919 - torch.log(1 - torch.tanh(m + s.exp() * e) ** 2 + 1e-6)).sum(-1),
    (1 << 18, 16),
    (1 << 18, 16),
    (1 << 18, 16),
)
row("q_target", lambda q, r, d: r + 0.99 * (1 - d) * q.max(1).values, (1 << 20, 18), (1 << 20,), (1 << 20,))
row(
    "distill_train",
    lambda x, t: F.kl_div(F.log_softmax(x / 4, -1), F.softmax(t.detach() / 4, -1), reduction="batchmean") * 16,
    (8192, 1000),
    (8192, 1000),
    train=True,
)
row(
    "gaussian_nll_train",
    lambda m, y, v: F.gaussian_nll_loss(m, y.detach(), F.softplus(v)),
    (4096, 2048),
    (4096, 2048),
    (4096, 2048),
    train=True,
)
row(
    "mdn_train",
    lambda p, m, s, y: -torch.logsumexp(F.log_softmax(p, -1) - 0.5 * ((y.detach()[:, None] - m) / s.exp()) ** 2 - s, -1).mean(),
    (65536, 32),
    (65536, 32),
    (65536, 32),
    (65536,),
    train=True,
)
row("barlow_train", lambda a, b: _barlow(a, b), (4096, 1024), (4096, 1024), train=True)
row("vicreg_var_train", lambda x: F.relu(1 - torch.sqrt(x.var(0) + 1e-4)).mean(), (4096, 8192), train=True)
row("lion_step", lambda p, g, m: (p * 0.999 - 1e-4 * (m * 0.9 + g * 0.1).sign(), m * 0.99 + g * 0.01), (1 << 25,), (1 << 25,), (1 << 25,))
row(
    "adam_step_manual",
    lambda p, g, m, v: (
        p - 1e-3 * (0.9 * m + 0.1 * g) / ((0.999 * v.abs() + 0.001 * g * g).sqrt() + 1e-8),
        0.9 * m + 0.1 * g,
        0.999 * v.abs() + 0.001 * g * g,
    ),
    *[(1 << 24,)] * 4,
)
row(
    "drop_path_train",
    lambda x, r, u: r + x * (u[:, None, None] > 0.1).float() / 0.9,
    make=lambda: [normal(128, 197, 768), normal(128, 197, 768), rand(128)],
    train=True,
)


def _barlow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.T @ b / a.shape[0]
    on = (torch.diagonal(c) - 1).pow(2).sum()
    return on + 0.005 * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())


# ---- distances, graphs, physics --------------------------------------------------------------------------------------------
row("vq_assign", lambda x, e: (x.pow(2).sum(1, keepdim=True) + e.pow(2).sum(1) - 2 * x @ e.T).argmin(1), (65536, 64), (1024, 64))
row(
    "chamfer",
    lambda a, b: (
        ((a[:, :, None] - b[:, None]) ** 2).sum(-1).min(2).values.mean() + ((a[:, :, None] - b[:, None]) ** 2).sum(-1).min(1).values.mean()
    ),
    (8, 2048, 3),
    (8, 2048, 3),
)
row("rbf_kernel", lambda x, y: torch.exp(-((x[:, None] - y[None]) ** 2).sum(-1) / 2), (4096, 16), (4096, 16))
row("kmeans_assign", lambda x, c: ((x[:, None] - c[None]) ** 2).sum(-1).argmin(1), (65536, 32), (64, 32))
row(
    "nbody",
    lambda p, m: ((p[None] - p[:, None]) * (m[None, :, None] / (((p[None] - p[:, None]) ** 2).sum(-1, keepdim=True) + 1e-3) ** 1.5)).sum(1),
    (4096, 3),
    (4096,),
)
row("kernel_sum", lambda x, y, w: (torch.exp(-(x[:, None] - y[None]).abs()) * w).sum(1), (16384,), (4096,), (4096,))
row("edge_softmax", lambda s, i: _edge_softmax(s, i), make=lambda: [normal(1 << 20, 8), ints(65536, 1 << 20)])
row(
    "edge_mlp_in",
    lambda x, i, j: torch.cat([x[i], x[j], x[i] - x[j]], -1),
    make=lambda: [normal(16384, 64), ints(16384, 1 << 18), ints(16384, 1 << 18)],
)
row(
    "segment_max",
    lambda x, i: torch.full((16384, 64), -1e9, device=x.device).scatter_reduce(0, i[:, None].expand_as(x), x, "amax"),
    make=lambda: [normal(1 << 18, 64), ints(16384, 1 << 18)],
)
row("heat_step", lambda u: u + 0.1 * (u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1) - 4 * u), (8192, 4096))
row("life", lambda x: _life(x), make=lambda: [(rand(4096, 4096) > 0.5).to(torch.int32)])
row(
    "wave_step",
    lambda u, v: (
        2 * u[:, 1:-1, 1:-1]
        - v[:, 1:-1, 1:-1]
        + 0.1 * (u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2] - 4 * u[:, 1:-1, 1:-1])
    ),
    (16, 1024, 1024),
    (16, 1024, 1024),
)
row("nerf_render", lambda s, c, d: _render(s, c, d), make=lambda: [rand(16384, 128), rand(16384, 128, 3), rand(16384, 128)])
row("horner", lambda x: ((((((0.1 * x + 0.2) * x + 0.3) * x + 0.4) * x + 0.5) * x + 0.6) * x + 0.7) * x + 0.8, (1 << 25,))
row("pointwise_double", lambda x, y: torch.sqrt(x * x + y * y).log1p(), (1 << 23,), (1 << 23,), dtype=torch.float64)
row("sum_double", lambda x: (x * 2).sum(-1), (4096, 4096), dtype=torch.float64)
row(
    "quaternion_rotate",
    lambda q, v: v + 2 * torch.linalg.cross(q[:, 1:], torch.linalg.cross(q[:, 1:], v) + q[:, :1] * v),
    (1 << 20, 4),
    (1 << 20, 3),
)
row("rotation6d", lambda x: _rotation(x), (1 << 20, 6))
row("transform_points", lambda r, p, t: torch.einsum("bij,bnj->bni", r, p) + t[:, None], (256, 3, 3), (256, 8192, 3), (256, 3))


def _edge_softmax(s: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    index = i[:, None].expand_as(s)
    top = torch.full((65536, 8), -1e9, device=s.device).scatter_reduce(0, index, s, "amax")
    e = (s - top[i]).exp()
    return e / torch.zeros(65536, 8, device=s.device).index_add(0, i, e)[i]


def _life(x: torch.Tensor) -> torch.Tensor:
    n = sum(x.roll((a, b), (0, 1)) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b)
    return ((n == 3) | ((x == 1) & (n == 2))).to(x.dtype)


def _render(s: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    alpha = 1 - torch.exp(-s * d)
    light = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    return ((alpha * light)[..., None] * c).sum(1)


def _rotation(x: torch.Tensor) -> torch.Tensor:
    a, b = x[:, :3], x[:, 3:]
    a = F.normalize(a, dim=-1)
    b = F.normalize(b - (a * b).sum(-1, keepdim=True) * a, dim=-1)
    return torch.stack([a, b, torch.linalg.cross(a, b)], -2)


# ---- diffusion, quantisation, numbers --------------------------------------------------------------------------------------
row(
    "q_sample",
    lambda x, e, t, a: a[t].sqrt().view(-1, 1, 1, 1) * x + (1 - a[t]).sqrt().view(-1, 1, 1, 1) * e,
    make=lambda: [normal(64, 4, 128, 128), normal(64, 4, 128, 128), ints(1000, 64), rand(1000)],
)
row("guidance", lambda x: x.chunk(2)[0] + 7.5 * (x.chunk(2)[1] - x.chunk(2)[0]), (64, 4, 256, 256), dtype=BF16)
row(
    "ddim_step",
    lambda x, e, a, b: b.sqrt() * ((x - (1 - a).sqrt() * e) / a.sqrt()).clamp(-1, 1) + (1 - b).sqrt() * e,
    make=lambda: [normal(64, 3, 256, 256), normal(64, 3, 256, 256), rand(()), rand(())],
)
row(
    "int4_unpack",
    lambda w, s: (torch.stack([w & 15, w >> 4], -1).flatten(1).to(BF16) - 8) * s,
    make=lambda: [ints(256, 4096, 4096, dtype=torch.uint8), rand(4096, 1, dtype=BF16)],
)
row("int8_groups", lambda w: _groups(w), (4096, 4096), dtype=BF16)
row(
    "fp8_tensor",
    lambda x: ((x * (448 / x.abs().amax().float().clamp(min=1e-12))).clamp(-448, 448).to(torch.float8_e4m3fn), x.abs().amax()),
    (8192, 4096),
    dtype=BF16,
)
row(
    "fake_quant_train",
    lambda x, s: x + ((x / s.detach().abs()).round().clamp(-128, 127) * s.detach().abs() - x).detach(),
    (4096, 4096),
    (1, 4096),
    train=True,
)
row("lora_merge", lambda w, a, b: w + 0.5 * (b @ a), (4096, 4096), (16, 4096), (4096, 16), dtype=BF16)
row("nan_stats", lambda x: (torch.nan_to_num(x).mean(-1), x.isfinite().all(), x.isnan().sum()), (8192, 4096))
row("any_rows", lambda x: ((x > 4).any(-1), (x > -9).all(-1), torch.count_nonzero(x > 0, -1)), (8192, 4096))
row("min_max_all", lambda x: (x - x.min()) / (x.max() - x.min()), (8192, 4096))
row("row_stats", lambda x: torch.stack([x.mean(-1), x.std(-1), x.amax(-1), x.amin(-1)], -1), (16384, 2048))
row("hash_ints", lambda x: ((x * 2654435761) ^ (x >> 15)) & 1023, make=lambda: [ints(1 << 30, 1 << 24)])
row("hash_embedding", lambda t, x: t[(x * 2654435761) % 65536].sum(1), make=lambda: [normal(65536, 64), ints(1 << 30, 65536, 8)])
row("lut_lerp", lambda t, x: torch.lerp(t[x.long()], t[x.long() + 1], x - x.floor()), make=lambda: [normal(1025), rand(1 << 24) * 1023])
row("bucketize", lambda x, b: torch.bucketize(x, b), make=lambda: [normal(1 << 23), torch.linspace(-3, 3, 65, device=DEVICE)])
row(
    "stft_power",
    lambda x, w: torch.log10(torch.stft(x, 1024, 256, window=w, return_complex=True).abs().pow(2).clamp(min=1e-10)),
    make=lambda: [normal(16, 160000), torch.hann_window(1024, device=DEVICE)],
)
row(
    "spectral_conv",
    lambda x, w: torch.fft.irfft2(torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x)[..., :16, :16], w), s=(128, 128)),
    make=lambda: [normal(16, 32, 128, 128), torch.randn(32, 32, 16, 16, device=DEVICE, dtype=torch.complex64)],
)
row("cat_many", lambda *x: torch.cat(x, 1).relu(), *[(8192, 256)] * 8)
row("repeat_heads_rows", lambda x: x.repeat_interleave(4, 1) * 0.5, (64, 8, 1024, 64), dtype=BF16)
row("triu_masked_sum", lambda x: torch.triu(x, 1).sum(-1), (64, 1024, 1024))
row("outer_add", lambda a, b: torch.relu(a[:, :, None] + b[:, None]), (32, 1024), (32, 1024))
row("small_bmm_chain", lambda a, b: torch.softmax(a @ b, -1) @ b.mT, (16384, 16, 16), (16384, 16, 16))
row("diag_quadratic", lambda x, w: torch.einsum("bi,ij,bj->b", x, w, x), (8192, 256), (256, 256))


def _groups(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    g = w.view(4096, 32, 128).float()
    scale = g.abs().amax(-1, keepdim=True) / 127
    return (g / scale).round().clamp(-128, 127).to(torch.int8).view_as(w), scale
