"""Rows of `benchmarks.gpu_sweep` whose memory is contiguous along other dimensions than their operations: permuted images and sequences, norms of channels, heads, transposed results."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.gpu_sweep_more import ints, normal, rand
from benchmarks.gpu_sweep_rows import BF16, CL, row

T = torch.Tensor

# fmt: off

# ---- norms and softmax along other dimensions --------------------------------------------------------------------------------
row("rms_channels_train", lambda x, w: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * w[:, None, None], (16, 128, 64, 64), (128,), train=True)
row("layer_norm_channels_by_hand_train", lambda x, w, b: (lambda d: d / (d.square().mean(1, keepdim=True) + 1e-6).sqrt() * w[:, None, None] + b[:, None, None])(x - x.mean(1, keepdim=True)), (16, 128, 64, 64), (128,), (128,), train=True)
row("layer_norm_tokens_of_nchw_train", lambda x, w, b: F.layer_norm(x.flatten(2).transpose(1, 2), (256,), w, b), (32, 256, 28, 28), (256,), (256,), train=True)
row("layer_norm_tokens_of_nchw_bf16", lambda x, w, b: F.layer_norm(x.flatten(2).transpose(1, 2), (256,), w, b), (32, 256, 28, 28), (256,), (256,), dtype=BF16)
row("layer_norm_time_train", lambda x, w, b: F.layer_norm(x.transpose(1, 2), (384,), w, b).transpose(1, 2), (16, 384, 1000), (384,), (384,), train=True)
row("group_norm_of_sequence_train", lambda x, w, b: F.group_norm(x.transpose(1, 2), 8, w, b), (16, 1000, 256), (256,), (256,), train=True)
row("batch_norm_of_sequence_train", lambda x, w, b: F.batch_norm(x.transpose(1, 2), None, None, w, b, training=True).transpose(1, 2), (32, 400, 256), (256,), (256,), train=True)
row("softmax_channels_train", lambda x: F.softmax(x, 1), (8, 21, 256, 256), train=True)
row("softmax_queries_train", lambda s: F.softmax(s, -2), (64, 512, 512), train=True)
row("softmax_both_train", lambda s: F.softmax(s, -1) * F.softmax(s, -2), (64, 512, 512), train=True)
row("log_softmax_time_train", lambda x: F.log_softmax(x.transpose(0, 1), -1), (64, 500, 128), train=True)
row("ce_of_sequence_train", lambda x, y: F.cross_entropy(x.transpose(1, 2), y), make=lambda: [normal(32, 512, 1000), ints(1000, 32, 512)], train=True)
row("ce_channels_last_train", F.cross_entropy, make=lambda: [normal(8, 21, 256, 256).to(memory_format=CL), ints(21, 8, 256, 256)], train=True)
row("normalize_channels_train", lambda x: F.normalize(x, dim=1), (16, 128, 64, 64), train=True)
row("argmax_channels", lambda x: x.argmax(1), (8, 21, 512, 512))
row("max_over_points_train", lambda x: x.max(1).values, (32, 1024, 256), train=True)
row("max_over_points_of_channels_train", lambda x: x.max(-1)[0], (32, 256, 1024), train=True)
row("mean_std_pool_train", lambda x: torch.cat([x.mean(-1), x.std(-1)], 1), (32, 512, 1000), train=True)
row("attentive_pool_train", lambda x, w: (F.softmax(x @ w, 1) * x).sum(1), (64, 512, 256), (256, 1), train=True)
row("masked_mean_pool_train", lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True), make=lambda: [normal(64, 512, 384), ints(2, 64, 512).float()], train=True)
row("var_middle_train", lambda x: x.var(1), (64, 300, 300), train=True)
row("sum_two_of_four_train", lambda x, y: (x * y).sum((1, 3)), (16, 64, 64, 64), (16, 64, 64, 64), train=True)
row("sum_outer_two_train", lambda x, b: F.relu(x + b), (64, 196, 768), (196, 768), train=True)
row("bias_of_heads_train", lambda x, b: torch.tanh(x + b[:, None, None]), (16, 12, 256, 64), (12,), train=True)
row("bias_of_positions_train", lambda x, b: torch.tanh(x + b[:, None]), (64, 512, 256), (512,), train=True)

# ---- heads and rearranging ----------------------------------------------------------------------------------------------------
row("qkv_to_heads_train", lambda x: (lambda q, k, v: torch.sigmoid(q) * k + v)(*x.view(16, 512, 3, 12, 64).permute(2, 0, 3, 1, 4).unbind(0)), (16, 512, 2304), train=True)
row("merge_heads_gelu_train", lambda x: F.gelu(x.transpose(1, 2).reshape(16, 512, 768)), (16, 12, 512, 64), train=True)
row("rope_of_heads_train", lambda q, c, s: (lambda h: torch.stack([h[..., 0] * c - h[..., 1] * s, h[..., 0] * s + h[..., 1] * c], -1).flatten(-2))(q.view(8, 512, 16, 32, 2)), (8, 512, 1024), (512, 1, 32), (512, 1, 32), train=True)
row("scaled_keys_transposed_train", lambda k: (k * 0.125).transpose(-1, -2).contiguous(), (16, 12, 512, 64), train=True)
row("permute_nhwc_gelu_bf16_train", lambda x: F.gelu(x.permute(0, 2, 3, 1)), (32, 96, 56, 56), dtype=BF16, train=True)
row("nhwc_to_nchw_scale_train", lambda x, g: (g * x).permute(0, 3, 1, 2) + 0.0, (32, 56, 56, 96), (96,), train=True)
row("convnext_tail_train", lambda r, x, g: r + (g * x).permute(0, 3, 1, 2), (32, 96, 56, 56), (32, 56, 56, 96), (96,), train=True)
row("window_partition_norm_train", lambda x, w, b: F.layer_norm(x, (96,), w, b).view(16, 8, 7, 8, 7, 96).transpose(2, 3).reshape(-1, 49, 96), (16, 56, 56, 96), (96,), (96,), train=True)
row("patch_merge_norm_train", lambda x, w, b: F.layer_norm(torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1), (384,), w, b), (16, 56, 56, 96), (384,), (384,), train=True)
row("pixel_shuffle_relu_train", lambda x: F.relu(F.pixel_shuffle(x, 2)), (16, 256, 64, 64), train=True)
row("channel_shuffle_train", lambda x: x.view(32, 4, 32, 28, 28).transpose(1, 2).reshape(32, 128, 28, 28) * 1.5, (32, 128, 28, 28), train=True)
row("space_to_depth_train", lambda x: F.relu(x.view(16, 32, 64, 2, 64, 2).permute(0, 3, 5, 1, 2, 4).reshape(16, 128, 64, 64)), (16, 32, 128, 128), train=True)
row("outer_product_pool_train", lambda a, b: (a[:, :, None] * b[:, None]).mean(-1), (16, 32, 1024), (16, 32, 1024), train=True)
row("bilinear_form_train", lambda x, w, y: (x @ w * y).sum(-1), (8192, 256), (256, 256), (8192, 256), train=True)
row("einsum_batched_train", lambda a, b: torch.einsum("bnhd,bmhd->bhnm", a, b), (8, 256, 12, 64), (8, 256, 12, 64), train=True)
row("triangle_mul_train", lambda a, b: torch.einsum("bikc,bjkc->bijc", a, b), (1, 128, 128, 64), (1, 128, 128, 64), train=True)
row("lstm_gates_of_time", lambda x, h: torch.stack([torch.sigmoid(x[:, t] + h) * torch.tanh(x[:, t] - h) for t in range(8)], 1), (256, 8, 512), (256, 512))
row("delta_features", lambda x: torch.cat([x, x[..., 1:].sub(x[..., :-1]).pow(2).sum(-1, keepdim=True).expand_as(x)], 1), (32, 80, 1000))

# ---- other things users do ------------------------------------------------------------------------------------------------------
row("anchors_to_boxes_train", lambda d, a: torch.stack([a[:, 0] + d[..., 0] * a[:, 2], a[:, 1] + d[..., 1] * a[:, 3], a[:, 2] * d[..., 2].clamp(max=4).exp(), a[:, 3] * d[..., 3].clamp(max=4).exp()], -1), (8, 20000, 4), (20000, 4), train=True)
row("diou_train", lambda a, b: _diou(a, b), make=lambda: [rand(100000, 4), rand(100000, 4)], train=True)
row("volumes_train", lambda b: (b[:, 3:] - b[:, :3]).clamp(min=0).prod(-1), (200000, 6), train=True)
row("transmittance_train", lambda d, c: (lambda a: ((a * torch.cumprod(1 - a + 1e-10, -1) / (1 - a + 1e-10))[..., None] * c).sum(-2))(1 - torch.exp(-F.relu(d))), (8192, 64), (8192, 64, 3), train=True)
row("log_det_products_train", lambda x: x.exp().prod(1).log().mean(), (8192, 24), train=True)
row("cumsum_of_durations_train", lambda d: (torch.cumsum(F.softplus(d), -1)[:, None] - torch.arange(200, device=d.device)[:, None]).abs().neg().exp().sum(1), (64, 128), train=True)
row("soft_dtw_row_train", lambda x: torch.cummax(x, -1)[0].sum(-1), (512, 1000), train=True)
row("logcumsumexp_train", lambda x: torch.logcumsumexp(x, -1), (512, 1000), train=True)
row("sorted_loss_train", lambda x: x.sort(-1)[0][..., :100].mean(), (1024, 1000), train=True)
row("topk_loss_train", lambda x: x.topk(50, -1)[0].mean(), (1024, 4000), train=True)
row("median_filter", lambda x: F.pad(x, (1, 1, 1, 1), "reflect").unfold(2, 3, 1).unfold(3, 3, 1).reshape(4, 3, 128, 128, 9).median(-1)[0], (4, 3, 128, 128))
row("kth_value_train", lambda x: x.kthvalue(5, -1)[0].sum(), (1024, 1000), train=True)
row("embedding_padding_train", lambda w, i: F.embedding(i, w, padding_idx=0).mean(1), make=lambda: [normal(20000, 128), ints(20000, 256, 64)], train=True)
row("embedding_sum_fields_train", lambda w, i: w[i + torch.arange(26, device=w.device) * 1000].sum(1), make=lambda: [normal(26000, 16), ints(1000, 4096, 26)], train=True)
row("index_rows_twice_train", lambda x, i, j: (x[i] * x[j]).sum(-1), make=lambda: [normal(10000, 128), ints(10000, 65536), ints(10000, 65536)], train=True)
row("index_select_columns_train", lambda x, i: x[:, i] * 2, make=lambda: [normal(8192, 512), ints(512, 256)], train=True)
row("gather_time_train", lambda x, i: x.gather(1, i[:, None, None].expand(-1, 1, 256))[:, 0], make=lambda: [normal(512, 100, 256), ints(100, 512)], train=True)
row("scatter_mean_train", lambda x, d: (lambda n: torch.zeros(5000, 64, device=x.device).index_add(0, d, x) / n.clamp(min=1)[:, None])(torch.zeros(5000, device=x.device).index_add(0, d, torch.ones_like(d, dtype=torch.float32))), make=lambda: [normal(100000, 64), ints(5000, 100000)], train=True)
row("segment_softmax_train", lambda s, d: (lambda e: e / torch.zeros(5000, 8, device=s.device).index_add(0, d, e)[d])(torch.exp(s - s.max().detach())), make=lambda: [normal(100000, 8), ints(5000, 100000)], train=True)
row("complex_modulate_train", lambda x, p: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones_like(p), p)), (64, 4096, 2), (64, 4096), train=True)
row("stft_magnitude", lambda x: torch.stft(x, 512, 128, window=torch.hann_window(512, device=x.device), return_complex=True).abs().clamp(min=1e-5).log(), (16, 32000))
row("int_hist", lambda x: torch.zeros(256, device=x.device, dtype=torch.int64).scatter_add(0, x, torch.ones_like(x)), make=lambda: [ints(256, 1 << 20)])
row("bits_sum", lambda x: ((x[..., None] >> torch.arange(8, device=x.device)) & 1).sum(-1), make=lambda: [ints(256, 1 << 20)])
row("sum_int8_rows", lambda x: x.sum(-1), make=lambda: [ints(127, 16384, 1024, dtype=torch.int8)])
row("half_sum_all", lambda x: x.float().square().sum().sqrt(), make=lambda: [normal(1 << 24, dtype=torch.float16)])
row("where_nan_mean_train", lambda x: torch.where(x > 0, x, 0.0).sum(0) / (x > 0).sum(0).clamp(min=1), (4096, 1000), train=True)


def _diou(a: T, b: T) -> T:
    low, high = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    inner = (high - low).clamp(min=0)
    inter = inner[:, 0] * inner[:, 1]
    union = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1]) + (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) - inter
    centres = ((a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2).square().sum(-1)
    diagonal = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).square().sum(-1)
    return (1 - inter / (union + 1e-7) + centres / (diagonal + 1e-7)).mean()
