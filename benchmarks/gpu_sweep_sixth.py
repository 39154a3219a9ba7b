"""Rows of `benchmarks.gpu_sweep`: operations that are often left to the library, and whole small modules in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu_sweep_more import ints, normal, rand
from benchmarks.gpu_sweep_rows import BF16, CL, row

# fmt: off

# ---- operations -----------------------------------------------------------------------------------------------------------------
row("take_along_train", lambda x, i: torch.take_along_dim(x, i, 1).square(), make=lambda: [normal(2048, 512), ints(512, 2048, 128)], train=True)
row("index_put_rows", lambda x, i, v: x.index_put((i,), v * 2) + 1, make=lambda: [normal(20000, 128), torch.randperm(20000, device="cuda")[:4096], normal(4096, 128)])
row("masked_scatter_rows", lambda x, m, v: x.masked_scatter(m, v), make=lambda: [normal(4096, 512), ints(2, 4096, 512).bool(), normal(4096, 512)])
row("masked_fill_causal_train", lambda x: x.masked_fill(torch.ones(512, 512, device=x.device, dtype=torch.bool).triu(1), 0.0), (64, 512, 512), train=True)
row("repeat_interleave_train", lambda x: x.repeat_interleave(4, 1) * 0.5, (4096, 256), train=True)
row("tile_add_train", lambda x, y: x.repeat(1, 4) + y, (4096, 256), (4096, 1024), train=True)
row("diag_embed_scale_train", lambda x, m: torch.diag_embed(x) + m, (512, 64), (512, 64, 64), train=True)
row("trace_of_products_train", lambda a, b: (a @ b).diagonal(dim1=-2, dim2=-1).sum(-1), (512, 64, 64), (512, 64, 64), train=True)
row("cross_train", lambda a, b: torch.linalg.cross(a, b), (500000, 3), (500000, 3), train=True)
row("kron_train", torch.kron, (64, 64), (32, 32), train=True)
row("logdet_small_train", lambda x: torch.logdet(x @ x.transpose(-1, -2) + torch.eye(8, device=x.device)), (2048, 8, 8), train=True)
row("solve_small_train", lambda a, b: torch.linalg.solve(a @ a.transpose(-1, -2) + 4 * torch.eye(8, device=a.device), b), (1024, 8, 8), (1024, 8, 4), train=True)
row("bincount_like", lambda x: F.one_hot(x, 32).sum(0), make=lambda: [ints(32, 1 << 18)])
row("histogram_soft_train", lambda x, c: torch.exp(-((x[:, None] - c) ** 2) * 50).sum(0), (100000,), (64,), train=True)
row("cumprod_rows_train", lambda x: torch.cumprod(torch.sigmoid(x), -1), (4096, 512), train=True)
row("flip_cumsum_train", lambda x: x.flip(-1).cumsum(-1).flip(-1), (4096, 1000), train=True)
row("renorm_rows_train", lambda x: x * (1.0 / x.norm(dim=-1, keepdim=True).clamp(min=1)), (20000, 100), train=True)
row("pnorm_distance_train", lambda a, b: F.pairwise_distance(a, b, p=3), (16384, 128), (16384, 128), train=True)
row("cdist_train", lambda a, b: torch.cdist(a, b), (512, 64), (512, 64), train=True)
row("lerp_train", lambda a, b, w: torch.lerp(a, b, torch.sigmoid(w)), (8192, 1000), (8192, 1000), (8192, 1), train=True)
row("addcdiv_chain", lambda p, m, v: p.addcdiv(m, v.abs().sqrt().add(1e-8), value=-1e-3), (1 << 24,), (1 << 24,), (1 << 24,))
row("fake_quant_train", lambda x: x + ((x / 0.1).round().clamp(-128, 127) * 0.1 - x).detach(), (8192, 2048), train=True)
row("nan_to_num_mean_train", lambda x: x.nan_to_num(0.0).mean(0), (8192, 1000), train=True)
row("mode_switch_train", lambda x: torch.where(x.abs() < 1, 0.5 * x * x, x.abs() - 0.5).mean(), (1 << 22,), train=True)

# ---- images -----------------------------------------------------------------------------------------------------------------------
row("adaptive_avg_odd_train", lambda x: F.adaptive_avg_pool2d(x, (5, 7)), (32, 64, 56, 56), train=True)
row("adaptive_max_train", lambda x: F.adaptive_max_pool2d(x, 4), (32, 64, 56, 56), train=True)
row("lp_pool_train", lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 3, 2), (16, 64, 64, 64), train=True)
row("avg_pool3d_train", lambda x: F.avg_pool3d(x, 2), (4, 32, 16, 64, 64), train=True)
row("max_unpool", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (16, 64, 64, 64))
row("bicubic_train", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (8, 16, 64, 64), train=True)
row("area_down_train", lambda x: F.interpolate(x, size=(48, 48), mode="area"), (16, 32, 96, 96), train=True)
row("antialias_down", lambda x: F.interpolate(x, size=(100, 100), mode="bilinear", antialias=True), (16, 3, 256, 256))
row("trilinear_train", lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (2, 16, 16, 32, 32), train=True)
row("bilinear_cl_bf16_train", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (16, 64, 48, 48), dtype=BF16, memory=CL, train=True)
row("grid_sample_train", lambda x, g: F.grid_sample(x, torch.tanh(g), align_corners=False), (8, 32, 64, 64), (8, 64, 64, 2), train=True)
row("fold_overlap_train", lambda x: F.fold(x, (64, 64), 3, padding=1), (8, 288, 4096), train=True)
row("depthwise_7_gelu_bf16_train", lambda x, w: F.gelu(F.conv2d(x, w, padding=3, groups=96)), (16, 96, 56, 56), (96, 1, 7, 7), dtype=BF16, memory=CL, train=True)
row("conv_bn_relu_train", lambda x, w, g, b: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), None, None, g, b, training=True)), (16, 64, 56, 56), (64, 64, 3, 3), (64,), (64,), train=True)
row("deconv_tanh_train", lambda x, w: torch.tanh(F.conv_transpose2d(x, w, stride=2, padding=1)), (16, 64, 32, 32), (64, 32, 4, 4), train=True)
row("coord_conv_cat_train", lambda x: torch.cat([x, torch.linspace(-1, 1, 64, device=x.device)[None, None, :, None].expand(16, 1, 64, 64), torch.linspace(-1, 1, 64, device=x.device).expand(16, 1, 64, 64)], 1) * 2, (16, 30, 64, 64), train=True)
row("spatial_attention_train", lambda x: x * torch.sigmoid(x.mean(1, keepdim=True) + x.amax(1, keepdim=True)), (16, 64, 56, 56), train=True)
row("soft_argmax_train", lambda h: (lambda p: torch.stack([(p.sum(-2) * torch.arange(64, device=h.device)).sum(-1), (p.sum(-1) * torch.arange(64, device=h.device)).sum(-1)], -1))(F.softmax(h.flatten(2), -1).view(h.shape)), (16, 17, 64, 64), train=True)
row("dice_of_logits_train", lambda x, y: (lambda p, t: 1 - (2 * (p * t).sum((0, 2, 3)) + 1) / ((p + t).sum((0, 2, 3)) + 1))(F.softmax(x, 1), F.one_hot(y, 4).permute(0, 3, 1, 2).float()).mean(), make=lambda: [normal(8, 4, 128, 128), ints(4, 8, 128, 128)], train=True)

# ---- losses and modules ---------------------------------------------------------------------------------------------------------
row("gaussian_nll_train", lambda m, t, v: F.gaussian_nll_loss(m, t.detach(), F.softplus(v)), (1 << 20,), (1 << 20,), (1 << 20,), train=True)
row("cosine_embedding_train", lambda a, b, y: F.cosine_embedding_loss(a, b, y), make=lambda: [normal(16384, 128), normal(16384, 128), ints(2, 16384) * 2 - 1], train=True)
row("multilabel_margin_train", lambda x, y: F.multilabel_soft_margin_loss(x, y.detach().sigmoid().round()), (8192, 80), (8192, 80), train=True)
row("ctc_train", lambda x, y: F.ctc_loss(F.log_softmax(x, -1), y, torch.full((16,), 200), torch.full((16,), 30)), make=lambda: [normal(200, 16, 64), ints(63, 16, 30) + 1], train=True)
row("focal_multi_train", lambda x, y: (lambda p: (-((1 - p.exp()) ** 2) * p).mean())(F.log_softmax(x, -1).gather(-1, y[:, None])[:, 0]), make=lambda: [normal(16384, 100), ints(100, 16384)], train=True)
row("arcface_train", lambda f, w, y: (lambda c: F.cross_entropy(32 * torch.where(F.one_hot(y, 1000).bool(), c - 0.3, c), y))(F.normalize(f, dim=-1) @ F.normalize(w, dim=-1).t()), make=lambda: [normal(512, 256), normal(1000, 256), ints(1000, 512)], train=True)
row("sdpa_mask_train", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), make=lambda: [*(normal(8, 8, 256, 64, dtype=BF16) for _ in "qkv"), ints(2, 8, 1, 256, 256).bool() | torch.eye(256, device="cuda").bool()], train=True)
row("moe_dense_bf16_train", lambda x, w, g: (torch.einsum("td,edh->teh", x, w) * F.softmax(x @ g, -1)[..., None]).sum(1), (1024, 256), (8, 256, 256), (256, 8), dtype=BF16, train=True)
row("mamba_gates_train", lambda x, z, d: F.silu(z) * (x * F.softplus(d)), (8, 1024, 1024), (8, 1024, 1024), (8, 1024, 1024), train=True)
row("rwkv_mix_train", lambda x, m: (lambda p: x * m + p * (1 - m))(F.pad(x, (0, 0, 1, -1))), (16, 512, 768), (768,), train=True)
row("gru_gates_train", lambda i, h, s: (lambda r, z, n: (1 - z) * n + z * s)(*(lambda a, b: (torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1]), torch.tanh(a[2] + torch.sigmoid(a[0] + b[0]) * b[2])))(i.chunk(3, 1), h.chunk(3, 1))), (4096, 1536), (4096, 1536), (4096, 512), train=True)
row("kan_silu_train", lambda x, w: (F.silu(x)[..., None] * w).sum(-2), (8192, 64), (64, 32), train=True)
row("positional_mlp_train", lambda p, w: torch.sin(p @ w * 30), (262144, 3), (3, 256), train=True)
row("hash_grid_train", lambda t, x: (lambda i: (t[(i[..., 0] * 73856093 ^ i[..., 1] * 19349663) % 16384] * (1 - (x * 64 - i).abs()).prod(-1, keepdim=True)).sum(-1))((x.detach() * 64).floor().long()), make=lambda: [normal(16384, 2), rand(262144, 2)], train=True)
row("adamw_step", lambda p, g, m, v: (lambda a, b: (p * (1 - 1e-4) - 1e-3 * (a / 0.1) / ((b / 0.001).sqrt() + 1e-8), a, b))(m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001), (1 << 23,), (1 << 23,), (1 << 23,), (1 << 23,))
row("clip_by_norm", lambda *g: [x * (1.0 / (torch.stack([y.norm() for y in g]).norm() + 1e-6)).clamp(max=1) for x in g], *[(1 << 18,)] * 12)
row("ema_of_many", lambda *p: [a * 0.99 + b * 0.01 for a, b in zip(p[:16], p[16:], strict=True)], *[(1 << 16,)] * 32)


def _module(name: str, build, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    """Gradients of the parameters too."""
    def make():
        module = build().cuda().to(dtype)
        return [normal(*shape, dtype=dtype), *module.parameters(), module]

    def run(x, *rest):
        return rest[-1](x)
    row(name, run, make=make, train=True)


_module("encoder_layer_train", lambda: nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True), 16, 128, 256)
_module("encoder_layer_bf16_train", lambda: nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True), 16, 256, 512, dtype=BF16)
_module("residual_block_train", lambda: nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)), 16, 64, 32, 32)
_module("mlp_norms_train", lambda: nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1)))), 2048, 512)
_module("lstm_train", lambda: nn.Sequential(nn.LSTM(128, 256, batch_first=True), _First()), 32, 64, 128)


class _First(nn.Module):
    def forward(self, x):
        return x[0]
