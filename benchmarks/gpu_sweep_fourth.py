"""Rows of `benchmarks.gpu_sweep` with gradients: parts of models in training, losses, sizes that are no powers of two, half types."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.gpu_sweep_more import ints, normal, rand
from benchmarks.gpu_sweep_rows import BF16, CL, lab, row

T = torch.Tensor
HALF = torch.float16

# fmt: off

# ---- norms and residuals -----------------------------------------------------------------------------------------------------
row("pre_norm_residual_train", lambda x, y, w, b: (lambda h: F.layer_norm(h, (1000,), w, b) + h)(x + y), (6000, 1000), (6000, 1000), (1000,), (1000,), train=True)
row("post_norm_bf16_train", lambda x, y, w, b: F.layer_norm(x + y, (1024,), w, b), (16384, 1024), (16384, 1024), (1024,), (1024,), dtype=BF16, train=True)
row("rms_residual_bf16_train", lambda x, y, w: F.rms_norm(x + y, (2048,), w) + x, (8192, 2048), (8192, 2048), (2048,), dtype=BF16, train=True)
row("layer_norm_96_train", lambda x, w, b: F.layer_norm(x, (96,), w, b), (64, 3136, 96), (96,), (96,), train=True)
row("layer_norm_nchw_train", lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (96,), w, b).permute(0, 3, 1, 2), (64, 96, 56, 56), (96,), (96,), train=True)
row("layer_scale_train", lambda x, y, g: x + g * y, (64, 3136, 96), (64, 3136, 96), (96,), train=True)
row("adaln_train", lambda x, c: (lambda s, t, g: x + g[:, None] * (F.layer_norm(x, (768,)) * (1 + s[:, None]) + t[:, None]))(*c.chunk(3, -1)), (32, 256, 768), (32, 2304), train=True)
row("film_train", lambda x, g, b: F.relu(x * (1 + g[:, :, None, None]) + b[:, :, None, None]), (32, 128, 56, 56), (32, 128), (32, 128), train=True)
row("batch_norm_1d_train", lambda x, w, b: F.gelu(F.batch_norm(x, None, None, w, b, training=True)), (8192, 777), (777,), (777,), train=True)
row("batch_norm_add_relu_cl_bf16_train", lambda x, y, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True) + y), (64, 256, 28, 28), (64, 256, 28, 28), (256,), (256,), dtype=BF16, memory=CL, train=True)
row("group_norm_silu_half_train", lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)), (8, 320, 64, 64), (320,), (320,), dtype=HALF, train=True)
row("scale_norm_train", lambda x, g: g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5), (8192, 1000), (1,), train=True)
row("weight_norm_linear_train", lambda x, v, g: x @ (g[:, None] * v / v.norm(dim=1, keepdim=True)).t(), (2048, 768), (1024, 768), (1024,), train=True)

# ---- gates and activations ---------------------------------------------------------------------------------------------------
row("glu_train", lambda x: F.glu(x, -1), (8192, 3000), train=True)
row("glu_channels_train", lambda x: F.glu(x, 1), (32, 256, 1500), train=True)
row("swiglu_joined_bf16_train", lambda x: (lambda a, b: F.silu(a) * b)(*x.chunk(2, -1)), (8192, 5632), dtype=BF16, train=True)
row("squeeze_excite_gate_train", lambda x, a, b: x * torch.sigmoid(F.relu(x.mean((2, 3)) @ a) @ b)[:, :, None, None], (32, 128, 56, 56), (128, 32), (32, 128), train=True)
row("highway_train", lambda x, h, t: (lambda g: g * torch.tanh(h) + (1 - g) * x)(torch.sigmoid(t)), (8192, 1000), (8192, 1000), (8192, 1000), train=True)
row("lstm_cell_train", lambda g, c: (lambda i, f, o, u: torch.sigmoid(o) * torch.tanh(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)))(*g.chunk(4, 1)), (4096, 2048), (4096, 512), train=True)
row("celu_dropout_train", lambda x: F.dropout(F.celu(x), 0.2), (8192, 2048), train=True)
row("maxout_train", lambda x: x.view(4096, 512, 4).amax(-1), (4096, 2048), train=True)
row("pow_clamp_train", lambda x: x.clamp(min=1e-6).pow(3).mean((-2, -1)).pow(1 / 3), (64, 512, 14, 14), train=True)

# ---- attention ----------------------------------------------------------------------------------------------------------------
row("rope_joined_bf16_train", lambda q, c, s: q * c + torch.cat([-q[..., 64:], q[..., :64]], -1) * s, make=lambda: [normal(4, 16, 1000, 128, dtype=BF16), normal(1000, 128, dtype=BF16), normal(1000, 128, dtype=BF16)], train=True)
row("masked_softmax_train", lambda s, m: F.softmax(s.masked_fill(m[:, None, None], -1e9), -1), make=lambda: [normal(16, 8, 300, 300), ints(2, 16, 300).bool()], train=True)
row("causal_softmax_bf16_train", lambda s, m: F.softmax(s / 8 + m, -1), make=lambda: [normal(8, 16, 512, 512, dtype=BF16), torch.full((512, 512), -math.inf, device="cuda", dtype=BF16).triu(1)], train=True)
row("relative_bias_softmax_train", lambda s, t, i: F.softmax(s + t[:, i], -1), make=lambda: [normal(64, 12, 197, 197), normal(12, 729), ints(729, 197, 197)], train=True)
row("window_softmax_49_train", lambda s, b: F.softmax(s + b, -1), (2048, 4, 49, 49), (4, 49, 49), train=True)
row("softmax_dropout_train", lambda s: F.dropout(F.softmax(s, -1), 0.1), (16, 12, 384, 384), train=True)
row("split_heads_norm_train", lambda x, w: F.rms_norm(x.view(16, 512, 12, 64).transpose(1, 2), (64,), w) * 0.125, (16, 512, 768), (64,), train=True)
row("talking_heads_train", lambda s, w: torch.einsum("bhqk,hg->bgqk", F.softmax(s, -1), w), (8, 12, 256, 256), (12, 12), train=True)
row("linear_attention_train", lambda q, k, v: F.softmax(q, -1) @ (F.softmax(k, -2).transpose(-1, -2) @ v), (8, 8, 1024, 64), (8, 8, 1024, 64), (8, 8, 1024, 64), train=True)

# ---- losses -------------------------------------------------------------------------------------------------------------------
row("ce_8000_bf16_train", lambda x, y: F.cross_entropy(x.float(), y), make=lambda: [normal(8192, 8000, dtype=BF16), ints(8000, 8192)], train=True)
row("ce_pixels_train", F.cross_entropy, make=lambda: [normal(8, 21, 256, 256), ints(21, 8, 256, 256)], train=True)
row("ce_weights_train", lambda x, y, w: F.cross_entropy(x, y, w.detach(), ignore_index=3), make=lambda: [normal(32768, 100), ints(100, 32768), rand(100)], train=True)
row("distillation_train", lambda s, t: F.kl_div(F.log_softmax(s / 4, -1), F.softmax(t.detach() / 4, -1), reduction="batchmean") * 16, (4096, 1000), (4096, 1000), train=True)
row("info_nce_train", lambda a, b: F.cross_entropy(F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() / 0.07, torch.arange(2048, device=a.device)), (2048, 256), (2048, 256), train=True)
row("bce_logits_weighted_train", lambda x, y, w: F.binary_cross_entropy_with_logits(x, y.detach().sigmoid(), pos_weight=w.detach().abs()), (8192, 527), (8192, 527), (527,), train=True)
row("giou_train", lambda a, b: _giou(a, b.detach()), make=lambda: [rand(200000, 4), rand(200000, 4)], train=True)
row("ppo_train", lambda n, o, a: -torch.min((n - o.detach()).exp() * a.detach(), ((n - o.detach()).exp()).clamp(0.8, 1.2) * a.detach()).mean(), (1 << 22,), (1 << 22,), (1 << 22,), train=True)
row("quantile_huber_train", lambda q, t: (lambda d: (torch.where(d.abs() < 1, d * d / 2, d.abs() - 0.5) * ((torch.arange(64, device=q.device) + 0.5) / 64 - (d.detach() < 0).float()).abs()).sum(-1).mean())(t.detach()[:, :, None] - q[:, None]), (1024, 64), (1024, 64), train=True)
row("vae_whole_loss_train", lambda x, r, m, s: F.mse_loss(r, x.detach(), reduction="sum") / 64 - 0.5 * (1 + s - m * m - s.exp()).sum(1).mean(), (64, 3, 128, 128), (64, 3, 128, 128), (64, 512), (64, 512), train=True)
row("total_variation_train", lambda x: (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean(), (32, 3, 256, 256), train=True)
row("gradient_penalty_norm_train", lambda x: ((x.flatten(1).norm(2, dim=1) - 1) ** 2).mean(), (64, 3, 128, 128), train=True)
row("gram_train", lambda x: (lambda f: f @ f.transpose(1, 2) / f.shape[-1])(x.flatten(2)), (16, 128, 64, 64), train=True)
row("sinkhorn_train", lambda c: _sinkhorn(c), (64, 128, 128), train=True)
row("margin_rank_train", lambda a, b: F.relu(1 - (a[:, None] - b[None])).mean(), (3000,), (3000,), train=True)
row("label_smooth_log_prob_train", lambda x, y: _smooth(x, y), make=lab(8192, 1000), train=True)
row("ssim_train", lambda a, b: _ssim(a, b), (16, 3, 192, 192), (16, 3, 192, 192), train=True)


def _giou(a: T, b: T) -> T:
    corners = [(torch.min(x[:, :2], x[:, 2:]), torch.max(x[:, :2], x[:, 2:])) for x in (a, b)]
    areas = [(high - low).prod(-1) for low, high in corners]
    inner = (torch.min(corners[0][1], corners[1][1]) - torch.max(corners[0][0], corners[1][0])).clamp(min=0).prod(-1)
    outer = (torch.max(corners[0][1], corners[1][1]) - torch.min(corners[0][0], corners[1][0])).prod(-1)
    union = areas[0] + areas[1] - inner
    return (1 - inner / (union + 1e-7) + (outer - union) / (outer + 1e-7)).mean()


def _sinkhorn(c: T) -> T:
    log = -c / 0.1
    for _ in range(4):
        log = log - log.logsumexp(-1, keepdim=True)
        log = log - log.logsumexp(-2, keepdim=True)
    return (log.exp() * c).sum((-2, -1)).mean()


def _smooth(x: T, y: T) -> T:
    log = F.log_softmax(x, -1)
    return (-0.9 * log.gather(-1, y[:, None])[:, 0] - 0.1 * log.mean(-1)).mean()


def _ssim(a: T, b: T) -> T:
    means = [F.avg_pool2d(x, 7, 1) for x in (a, b)]
    spread = [F.avg_pool2d(x * y, 7, 1) - m * n for x, y, m, n in ((a, a, means[0], means[0]), (b, b, means[1], means[1]), (a, b, *means))]
    return (
        (2 * means[0] * means[1] + 1e-4)
        * (2 * spread[2] + 9e-4)
        / ((means[0] ** 2 + means[1] ** 2 + 1e-4) * (spread[0] + spread[1] + 9e-4))
    ).mean()


# ---- images, graphs, lookups --------------------------------------------------------------------------------------------------
row("bilinear_up_add_train", lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear") + y, (16, 64, 48, 48), (16, 64, 96, 96), train=True)
row("nearest_up_cat_train", lambda x, y: torch.cat([F.interpolate(x, scale_factor=2), y], 1), (16, 64, 48, 48), (16, 32, 96, 96), train=True)
row("max_pool_relu_train", lambda x: F.max_pool2d(F.relu(x), 2), (32, 64, 112, 112), train=True)
row("global_pool_concat_train", lambda x: torch.cat([x.amax((2, 3)), x.mean((2, 3))], 1), (64, 512, 14, 14), train=True)
row("patch_embed_train", lambda x, w: x.view(32, 3, 14, 16, 14, 16).permute(0, 2, 4, 3, 5, 1).reshape(32, 196, 768) @ w, (32, 3, 224, 224), (768, 384), train=True)
row("reflect_blur_train", lambda x: F.avg_pool2d(F.pad(x, (1, 1, 1, 1), "reflect"), 3, 1), (16, 32, 128, 128), train=True)
row("shift_window_train", lambda x: torch.roll(x, (-3, -3), (1, 2)).view(16, 8, 7, 8, 7, 96).transpose(2, 3).reshape(-1, 49, 96) * 1.0, (16, 56, 56, 96), train=True)
row("embed_position_norm_train", lambda w, p, g, b, i: F.layer_norm(w[i] + p, (512,), g, b), make=lambda: [normal(30000, 512), normal(128, 512), normal(512), normal(512), ints(30000, 64, 128)], train=True)
row("gcn_mean_train", lambda x, s, d: torch.zeros_like(x).index_add(0, d, x[s]) / 8, make=lambda: [normal(20000, 64), ints(20000, 160000), ints(20000, 160000)], train=True)
row("edge_mlp_train", lambda x, s, d, w: F.relu(torch.cat([x[s], x[d]], -1) @ w), make=lambda: [normal(10000, 64), ints(10000, 100000), ints(10000, 100000), normal(128, 64)], train=True)
row("scatter_max_train", lambda x, d: torch.full((5000, 32), -1e9, device=x.device).scatter_reduce(0, d[:, None].expand(-1, 32), x, "amax"), make=lambda: [normal(100000, 32), ints(5000, 100000)], train=True)
row("expert_gate_train", lambda x, w: (lambda p: (lambda v, i: torch.zeros_like(p).scatter(-1, i, v / v.sum(-1, keepdim=True)))(*p.topk(2, -1)))(F.softmax(x @ w, -1)), (8192, 512), (512, 16), train=True)
row("selective_scan_step_train", lambda h, dt, a, b, x, c: ((h * (dt[..., None] * -a.exp()).exp() + (dt * x)[..., None] * b[:, None]) * c[:, None]).sum(-1), (512, 1024, 16), (512, 1024), (1024, 16), (512, 16), (512, 1024), (512, 16), train=True)
row("depthwise_1d_gate_train", lambda x, w: (lambda a, b: F.conv1d(F.pad(a, (3, 0)), w, groups=384) * F.silu(b))(*x.chunk(2, 1)), (8, 768, 1024), (384, 1, 4), train=True)
row("straight_through_train", lambda x, c: (lambda q: x + (q - x).detach())(c[(x[:, None] - c).square().sum(-1).argmin(1)]), (4096, 16), (256, 16), train=True)
row("gumbel_softmax_train", lambda x: F.gumbel_softmax(x, tau=0.7), (16384, 320), train=True)
row("spline_basis_train", lambda x, w: (torch.relu(1 - (x[..., None] - torch.linspace(-1, 1, 8, device=x.device)).abs() * 3.5) * w).sum((-2, -1)), (65536, 16), (16, 8), train=True)
