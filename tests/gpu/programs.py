"""Programs for the GPU: each is run in eager and compiled, and results, gradients and what was written must agree.

A row is `program(name, tolerance)(make)`, where `make()` gives (function or module, arguments). `train` rows also compare the gradients of all leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"


@dataclass(frozen=True)
class Program:
    name: str
    make: Callable[[], tuple[Any, tuple[Any, ...]]]
    tolerance: float
    train: bool
    broken: bool  # may run in eager (its name says why)
    rounded: bool  # eager's own rounding is large: what counts is the distance of both to float64


PROGRAMS: dict[str, Program] = {}


def program(tolerance: float = 1e-5, train: bool = False, broken: bool = False, rounded: bool = False) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        PROGRAMS[make.__name__] = Program(make.__name__, make, tolerance, train, broken, rounded)
        return make

    return add


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype).requires_grad_(grad)


# ---- functions -----------------------------------------------------------------------------------------------------------


@program()
def pointwise() -> Any:
    return lambda x, y: torch.sin(x) * y + x.relu() - torch.tanh(y) / 3, (randn(1000, 33), randn(33))


@program()
def transposed() -> Any:
    return lambda x, y: (x.t() + y).sigmoid(), (randn(300, 200), randn(200, 300))


@program(1e-5, train=True)
def softmax_rows() -> Any:
    return lambda x: F.softmax(x * 2, -1), (randn(64, 1000, grad=True),)


@program(1e-5, train=True)
def softmax_long_rows() -> Any:
    return lambda x: F.log_softmax(x, -1), (randn(16, 50000, grad=True),)


@program(1e-5, train=True)
def softmax_of_longer_rows() -> Any:
    """Twice, so that it is recorded; a row of nothing but -inf, and one with NaN."""
    x = randn(64, 131072)
    x[3], x[5, 70000] = -float("inf"), float("nan")
    return lambda x: F.softmax(F.softmax(x, -1) * 1000, -1), (x.requires_grad_(),)


@program(1e-5)
def log_softmax_of_vocabularies() -> Any:
    """16-bit rows in parts; numbers of rows leave."""
    return lambda x: (F.log_softmax(x.float(), -1), torch.logsumexp(x.float(), -1)), (randn(128, 128256, dtype=torch.bfloat16),)


@program(1e-5, train=True)
def bags_of_one_size() -> Any:
    """Taken apart: a lookup and a sum, weighted and not; gradients are added in no order."""

    def run(w: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> Any:
        return F.embedding_bag(i, w, mode="sum"), F.embedding_bag(i, w), F.embedding_bag(i, w, mode="sum", per_sample_weights=s)

    return run, (randn(500, 48, grad=True), torch.randint(0, 500, (300, 20)).to(DEVICE), randn(300, 20, grad=True))


@program(1e-5, train=True)
def bags_of_any_size() -> Any:
    """Loops of ours walk the spans, and gradients are additions; maxima are the library's."""

    def run(w: torch.Tensor, i: torch.Tensor, o: torch.Tensor, s: torch.Tensor) -> Any:
        sums = F.embedding_bag(i, w, o, mode="sum"), F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s, padding_idx=7)
        means = F.embedding_bag(i, w, o) * 2, F.embedding_bag(i, w, o, padding_idx=3, include_last_offset=True)
        return *sums, *means, F.embedding_bag(i, w, o, mode="max")

    offsets = torch.tensor([0, 4, 4, 90, 300]).to(DEVICE)
    return run, (randn(500, 48, grad=True), torch.randint(0, 500, (300,)).to(DEVICE), offsets, randn(300, grad=True))


@program(1e-5)
def bags_without_gradients() -> Any:
    """More than a grid has places along its second axis, of any width and type."""

    def run(w: torch.Tensor, i: torch.Tensor, o: torch.Tensor) -> Any:
        narrow = F.embedding_bag(i, w[:, :3], o, mode="sum"), F.embedding_bag(i, w[:, 5:6], o)
        return *narrow, F.embedding_bag(i, w, o).tanh(), F.embedding_bag(i.int(), w.double(), o.int(), mode="sum")

    offsets = torch.randint(0, 100_000, (70_000,)).sort().values
    offsets[0] = 0
    return run, (randn(500, 150), torch.randint(0, 500, (100_000,)).to(DEVICE), offsets.to(DEVICE))


@program(1e-4, train=True)
def norms() -> Any:
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 30), nn.Softplus())
    return model.to(DEVICE), (randn(77, 64, grad=True),)


@program(1e-4, train=True)
def group_norm() -> Any:
    return nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU()).to(DEVICE), (randn(4, 32, 9, 11, grad=True),)


@program(1e-4, train=True)
def group_norm_of_channels_last() -> Any:
    return nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU()).to(DEVICE), (
        randn(2, 64, 65, 67).to(memory_format=torch.channels_last).requires_grad_(),
    )


@program(1e-5, train=True)
def interpolated() -> Any:
    """Exact places and others, both layouts."""

    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        wide = [F.interpolate(t, scale_factor=2, mode="bilinear") for t in (x, y)]
        return (
            *wide,
            F.interpolate(x, size=(7, 90), mode="bicubic", align_corners=True),
            F.interpolate(y, scale_factor=1.7, mode="bilinear"),
        )

    return run, (randn(2, 5, 31, 40, grad=True), randn(2, 16, 33, 20).to(memory_format=torch.channels_last).requires_grad_())


@program(1e-5)
def statistics_of_columns() -> Any:
    """Variances of long columns in one walk, far from zero; softmax of what a block holds across memory."""
    return lambda x, y: (x.var(0), x.std(0, unbiased=False), y.softmax(1), y.var(1), x.argmax(0), x.sum(0)), (
        randn(8200, 300) + 40,
        randn(8, 200, 2100),
    )


@program(2e-2)
def products_with_one_vector() -> Any:
    """In inference: a matrix of one row, scaled integers, a vector."""
    whole = torch.randint(-90, 90, (2048, 1024), dtype=torch.int8, device=DEVICE)

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        return (
            F.silu(F.linear(F.rms_norm(x, (1024,)), w, b)),
            F.linear(x, whole.to(torch.bfloat16) * 0.01),
            w @ x[0],
            w.float() @ x[0].float(),
        )

    return run, (randn(1, 1024, dtype=torch.bfloat16), randn(2048, 1024, dtype=torch.bfloat16), randn(2048, dtype=torch.bfloat16))


@program(1e-4, train=True)
def divergence_of_rows() -> Any:
    """The sum of everything is made where the rows are."""
    return lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), (
        randn(300, 700, grad=True),
        randn(300, 700, grad=True),
    )


@program(1e-4, train=True)
def cross_entropy_of_images() -> Any:
    target, weight = torch.randint(0, 21, (3, 40, 50)).to(DEVICE), randn(21).abs()
    return lambda x: (F.cross_entropy(x, target, weight=weight, ignore_index=4), F.cross_entropy(x, target, reduction="none")), (
        randn(3, 21, 40, 50, grad=True),
    )


@program(2e-2, train=True)
def gates_of_halves() -> Any:
    """Functions such as exp are computed again, rather than kept."""

    def run(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b + F.gelu(b) * a

    return run, (randn(130, 2000, dtype=torch.bfloat16, grad=True),)


@program(1e-4, train=True)
def convolution_and_batch_norm() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3, stride=2), nn.BatchNorm2d(8)
    )
    return model.to(DEVICE), (randn(4, 3, 32, 32, grad=True),)


@program(1e-4, train=True)
def pools_and_enlargement() -> Any:
    """Their gradients are loops, and so is that of the convolution's bias."""

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(F.max_pool2d(x, 3, 2, 1), weight, bias, padding=1)
        return F.interpolate(F.avg_pool2d(y, 2) + F.avg_pool2d(y, 3, 2, 1)[:, :, :-1, :-1], scale_factor=2.0) * y[:, :, :-1, :-1]

    return run, (randn(4, 8, 33, 41, grad=True), randn(16, 8, 3, 3, grad=True), randn(16, grad=True))


@program(1e-4, train=True)
def edges_and_windows() -> Any:
    """Pads that mirror, repeat and wrap, windows side by side and their sums, places between elements, classes: loops, and so are their gradients (but one)."""

    def run(x: torch.Tensor, grid: torch.Tensor, classes: torch.Tensor) -> Any:
        padded = [F.pad(x.tanh(), (1, 2, 2, 1), mode=mode).relu() for mode in ("reflect", "replicate", "circular")]
        sums = F.fold(F.unfold(x, 3, padding=1, stride=2) * 2, x.shape[2:], 3, padding=1, stride=2)
        ways = [("bilinear", "zeros", False), ("nearest", "border", False), ("bilinear", "border", True)]
        return *padded, sums, *(F.grid_sample(x, grid, *way) * 2 for way in ways), F.one_hot(classes, 9).float().sum(0)

    x, grid = randn(4, 8, 17, 20), torch.rand(4, 9, 30, 2, device=DEVICE) * 2.4 - 1.2
    return run, (x.to(memory_format=torch.channels_last).requires_grad_(), grid, torch.randint(0, 9, (500,), device=DEVICE))


@program(1e-5, train=True)
def maxima_of_windows() -> Any:
    """Of equal numbers the first counts; padded, dilated, with indices that are seen, in both layouts."""

    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        top, place = F.max_pool2d(x, 3, 2, 1, return_indices=True)
        return (
            top * 2,
            place,
            F.max_pool2d(y.relu() - 1, 3, 2, 1, ceil_mode=True),
            F.max_pool2d(y, 2, 2, 1, 2),
            F.adaptive_avg_pool2d(y, (8, 5)).square(),
        )

    x = torch.randint(-3, 4, (4, 8, 32, 40), device=DEVICE).float()
    return run, (x.requires_grad_(), x.detach().to(memory_format=torch.channels_last).requires_grad_())


@program(1e-4, train=True)
def pools_beside_convolutions() -> Any:
    """Channels-last: elements are looked up by pairs of places, which LLVM makes pairs of small integers of. (Gradients of averages over windows that overlap are wrong there in eager, torch 2.11.)"""

    def run(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> Any:
        y, z = F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2)
        return y + F.conv2d(y, one), y * 2, z + F.conv2d(z, other, padding=1, groups=8)

    x = randn(2, 8, 8, 8).to(memory_format=torch.channels_last)
    return run, (x.requires_grad_(), randn(8, 8, 1, 1, grad=True), randn(8, 1, 3, 3, grad=True))


@program(1e-5, train=True, rounded=True)
def statistics_far_from_zero() -> Any:
    """Parts of a channel are joined exactly, in either layout, along rows and across them."""
    x = randn(16, 24, 40, 40) + 100
    batch, group = (
        nn.BatchNorm2d(24).to(DEVICE),
        nn.GroupNorm(3, 24).to(DEVICE),
    )  # one behind the other the first one's gradients would nearly vanish
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    return lambda a, b: (batch(a), group(a), batch(b), group(b)), (x.requires_grad_(), last)


@program(2e-4, train=True)
def layer_norms_of_few_and_many_rows() -> Any:
    first, second = nn.LayerNorm(768).to(DEVICE), nn.LayerNorm(1024).to(DEVICE)
    return lambda x, y: (first(x), second(y)), (randn(10, 197, 768, grad=True), randn(8448, 1024, grad=True))


@program(1e-3, train=True)
def layer_norms_of_halves_in_short_rows() -> Any:
    """Gradients nearly cancel there: the statistics must not be rounded between the directions."""
    return lambda x, w: F.layer_norm(x, (2,), w), (randn(500, 2, dtype=torch.float16, grad=True), randn(2, dtype=torch.float16, grad=True))


@program(1e-6, train=True)
def single_elements_of_tensors() -> Any:
    return lambda x, y: torch.stack([x[:, 0] * y[:, 1], x[:, 1] - y[:, 0]], -1), (randn(1, 6, grad=True), randn(1, 6, grad=True))


@program(1e-6, train=True)
def averages_of_single_elements() -> Any:
    return lambda x: F.avg_pool1d(x, 1) * 2, (randn(3, 5).t().requires_grad_(),)


@program(1e-4, train=True)
def attention_with_one_projection() -> Any:
    """The gradient of the projection's bias sums rows that lie in three tensors by heads."""
    model = nn.MultiheadAttention(96, 3, batch_first=True).to(DEVICE)
    return lambda x: model(x, x, x, need_weights=False)[0], (randn(10, 197, 96, grad=True),)


@program(1e-4)
def batch_norm_in_evaluation() -> Any:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).to(DEVICE).eval(), (randn(4, 3, 32, 32),)


@program(1e-4, train=True)
def cross_entropy() -> Any:
    target = torch.randint(0, 500, (64,)).to(DEVICE)
    return lambda x: F.cross_entropy(x * 1.5, target), (randn(64, 500, grad=True),)


@program(1e-4, train=True)
def cross_entropy_of_many_classes() -> Any:
    target = torch.randint(0, 32768, (160,)).to(DEVICE)
    return lambda x: F.cross_entropy(x * 1.5, target), (randn(160, 32768, grad=True),)


@program(1e-5)
def exponentials_of_long_rows() -> Any:
    rows = randn(8, 40000) * 20
    rows[0, :20000], rows[1], rows[2, 7] = -float("inf"), -float("inf"), float("inf")
    return lambda x: (F.softmax(x, -1), F.log_softmax(x, -1), x.logsumexp(-1)), (rows,)


@program(1e-5, train=True)
def embedding_bag_of_words() -> Any:
    table, index = randn(100, 32, grad=True), torch.randint(0, 100, (8, 12)).to(DEVICE)
    return lambda t, i: F.embedding(i, t).mean(1).tanh(), (table, index)


@program(1e-4, train=True)
def attention() -> Any:
    q, k, v = (randn(2, 4, 64, 32, grad=True) for _ in range(3))
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2, (q, k, v)


@program(2e-2, train=True)
def attention_in_bfloat16() -> Any:
    q, k, v = (randn(2, 4, 64, 32, dtype=torch.bfloat16, grad=True) for _ in range(3))
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 2, (q, k, v)


@program(1e-5)
def rows_far_apart_and_signs_of_zeros() -> Any:
    """Quotients of dividends that are nearly nothing, of zeros and by negative divisors; zeros are seen by their inverses."""
    far = torch.arange(1024, device=DEVICE)

    def run(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        rows = (x - (far[:, None] - far).abs()).softmax(-1)
        return rows, 1 / (y / y.sum(-1, keepdim=True)), 1 / -z, 1 / (z // -3.0), 1 / torch.floor_divide(z, 7.0)

    y = randn(64, 1024).relu() - 2
    y[:, ::7], y[:, 1::7] = 0.0, -0.0
    return run, (randn(8, 1024, 1024), y, torch.tensor([0.0, -0.0, 1.0, -5.0, 20.0], device=DEVICE))


@program(1e-4)
def operands_read_element_by_element() -> Any:
    """Stencils, windows, records, patches, joined look-ups, large windows apart, coordinates; sizes from which blocks are large."""

    def run(x: torch.Tensor, b: torch.Tensor, i: torch.Tensor, p: torch.Tensor, t: torch.Tensor) -> Any:
        ring = sum(x.roll((a, c), (-2, -1)) for a in (-1, 0, 1) for c in (-1, 0, 1))
        a, c = p[i], p[i.flip(0)]
        angles = torch.stack([(k * p[:, 0]).sin() * p[:, 1].cos() for k in range(1, 10)], 1)
        pools = F.max_pool2d(x, (1, 64)), F.avg_pool2d(x, 32), F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 1, 1), F.max_pool2d(x, 3, 1, 1)
        more = (
            F.unfold(x[:, :1], 16, stride=16).transpose(1, 2),
            F.local_response_norm(x, 5),
            F.affine_grid(t, [2, 3, 64, 96], align_corners=False),
        )
        return (
            ring,
            torch.cat([a, c, a - c], 1),
            angles,
            *pools,
            *more,
            (p * p).sum(1).sqrt(),
            (b & 15) | (b << 4),
            (x.abs() + 1) ** -6,
            x**4,
        )

    x, b = randn(4, 3, 512, 512), torch.randint(0, 256, (1 << 20,), device=DEVICE, dtype=torch.uint8)
    return run, (x, b, torch.randint(-300000, 300000, (1 << 17,), device=DEVICE), randn(300000, 3), randn(2, 2, 3))


@program(1e-4, train=True)
def attention_written_out() -> Any:
    """Of a query that sees no key NaN is what eager makes NaN; where all that it sees is low, weights are alike."""
    kept = torch.rand(2, 1, 37, 50, device=DEVICE) > 0.3
    kept[0, 0, 5] = False
    infinite, least = (
        torch.zeros(kept.shape, device=DEVICE).masked_fill(~kept, low) for low in (-torch.inf, torch.finfo(torch.float32).min)
    )

    def run(kept: torch.Tensor, infinite: torch.Tensor, least: torch.Tensor, *given: torch.Tensor) -> Any:
        scores = [q @ k.mT * 0.2 for q, k in zip(given[::3], given[1::3], strict=True)]
        masked = scores[0].masked_fill(~kept, -torch.inf), scores[1].masked_fill(~kept, -1e9), scores[2] + infinite, scores[3] + least
        return tuple(x.softmax(-1) @ v for x, v in zip(masked, given[2::3], strict=True))

    return run, (kept, infinite, least, *(randn(2, 4, n, 32, grad=True) for n in (37, 50, 50) * 4))


@program(2e-2, train=True)
def under_autocast() -> Any:
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x)

    return run, (randn(32, 64, grad=True),)


@program(2e-3)
def float16() -> Any:
    return lambda x, y: (x * 3 + y).exp().sum(-1) / 7, (randn(50, 70, dtype=torch.float16), randn(70, dtype=torch.float16))


@program()
def reductions() -> Any:
    def run(x: torch.Tensor) -> Any:
        return (
            x.sum(0),
            x.mean((0, 2)),
            x.amax(1),
            x.argmax(2),
            x.var(1),
            x.std(0),
            x.prod(2),
            x.argmin(0),
            (x > 1).any(1),
            (x < 9).all(0),
            x.logsumexp(1),
        )

    return run, (randn(20, 30, 40),)


@program(1e-4)
def sums_of_everything() -> Any:
    return lambda x: (x.sum(), x.max(), x.norm(), x.argmax(), x.mean()), (randn(1234, 567),)


@program()
def few_long_columns() -> Any:
    return lambda x: (x.sum(0), x.amax(0)), (randn(20000, 24),)


@program(0)
def integers() -> Any:
    x, y = torch.randint(-99, 99, (1000,)), torch.randint(1, 9, (1000,))
    y[::2] *= -1
    return lambda x, y: (x // y, x % y, torch.fmod(x, y), x << 3, x >> 1, x * y, torch.div(x, y, rounding_mode="trunc"), x / y), (
        x.to(DEVICE),
        y.to(DEVICE),
    )


@program(0)
def conversions() -> Any:
    x = (torch.randn(1000) * 50).to(DEVICE)
    return lambda x: (
        x.int(),
        x.long(),
        x.to(torch.int8),
        x.abs().to(torch.uint8),
        x.half(),
        x.bfloat16(),
        x.bool(),
        x.double(),
        x.round(),
        x.trunc(),
    ), (x,)


@program(0)
def not_a_number() -> Any:
    x = torch.randn(40, 50)
    x[3, 4] = x[5] = float("nan")
    x[7, 7], x[8, 8] = float("inf"), -float("inf")
    return lambda x: (x.amax(1), x.amin(0), x.argmax(1), torch.maximum(x, x.t()[:40, :40].sum()), x.isnan(), x.clamp(-1, 1), x.relu()), (
        x.to(DEVICE),
    )


@program()
def number_of_the_cpu() -> Any:
    return lambda x, s: x * s + 1, (randn(10, 10), torch.tensor(2.5))


@program()
def unaligned() -> Any:
    return lambda x: x * 2 + 1, (randn(1025)[1:],)


@program()
def strided() -> Any:
    return lambda x: x.flip(1).cumsum(1) * 2, (randn(40, 60)[:, ::2],)


@program(1e-5, train=True, rounded=True)
def sums_in_order() -> Any:
    """Along rows and down columns, held whole, in loops and in pieces, with gradients, which go backwards; products too."""

    def run(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> Any:
        rows = x.exp().cumsum(-1) * 2, (x.sigmoid().cumsum(0) + x).tanh(), x.softmax(-1).cumsum(-1) - x.softmax(-1)
        long = y.cumsum(1), y.sigmoid().cumsum(0), (y[:3, :65537] * 1e-3).cumsum(1)
        return *rows, *long, z.cumsum(0), z[:, :3].cumsum(0), z[None, :, :1].cumsum(1), w.cumsum(1), w.cumsum(2), (w * 1e-3 + 1).cumprod(1)

    return run, (randn(300, 1000, grad=True), randn(200, 65540, grad=True), randn(1 << 16, 8, grad=True), randn(9, 700, 70, grad=True))


@program(2e-2, rounded=True)
def sums_in_order_of_halves() -> Any:
    run = lambda x, y: (x.cumsum(0), x.cumsum(1), (x + 1).float().cumsum(0), y.cumsum(1), y.cumsum(0, dtype=torch.float64))  # noqa: E731
    return run, (randn(700, 300, dtype=torch.bfloat16), randn(5, 20000, dtype=torch.float16))


@program(0)
def positions() -> Any:
    """Of tokens that are no padding, of tokens among those of their expert, of few long rows and columns."""

    def run(ids: torch.Tensor, experts: torch.Tensor, x: torch.Tensor) -> Any:
        mask = ids.ne(1).int()
        chosen = F.one_hot(experts, 24)
        places = (chosen.cumsum(0) * chosen - 1).amax(-1)
        return (mask.cumsum(1).type_as(mask) * mask).long() + 1, places, x.gt(3).cumsum(1), x.t().cumsum(0, dtype=torch.int32), x.cumprod(1)

    return run, tuple(torch.randint(0, n, size).to(DEVICE) for n, size in ((5, (64, 512)), (24, (12000,)), (9, (6, 1 << 16))))


@program()
def written_in_place() -> Any:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(y)
        y[1:3] = 7
        return x.sum() + y.mean()

    return run, (randn(30, 40), randn(30, 40))


@program()
def views_leave() -> Any:
    return lambda x: ((x * 2).t(), x[1:], (x + 1).view(-1)), (randn(30, 40),)


@program()
def concatenation() -> Any:
    return lambda x, y: (torch.cat([x * 2, y.exp()], 1), torch.stack([x, x + 1]), F.pad(x, (1, 2))), (randn(30, 40), randn(30, 20))


@program()
def gathered() -> Any:
    index = torch.randint(0, 40, (30, 5)).to(DEVICE)
    return lambda x: (x.gather(1, index) * 2, x[index[:, 0]] + 1, x.index_select(1, index[0]).exp()), (randn(40, 40),)


@program()
def scattered() -> Any:
    index = torch.randint(0, 40, (30, 5)).to(DEVICE)
    return lambda x, s: (torch.zeros_like(x).scatter_add(1, index, s) * 2, x.index_add(0, index[:, 0] % 30, x)), (
        randn(30, 40),
        randn(30, 5),
    )


@program()
def stored_at_places() -> Any:
    """Rows, elements, halves, flags and largest elements of windows are stored by kernels of ours, into what is computed and into copies."""
    rows, columns = torch.randperm(300)[:128].to(DEVICE), torch.randperm(40)[:7].to(DEVICE)
    each = torch.rand(300, 40).argsort(0)[:9].to(DEVICE)

    def stored(x: torch.Tensor, s: torch.Tensor, image: torch.Tensor) -> Any:
        y, flags, half = x * 2, x > 0, x.bfloat16()
        y[rows, 3] = s[:, 0].tanh()
        flags[:, columns] = False
        half.index_copy_(0, rows, s.bfloat16() * 3)
        pooled = F.max_unpool2d(*F.max_pool2d(image, 2, return_indices=True), 2)
        return y, flags, half, x.index_put((rows, columns[:1] - 40), s.new_tensor(5.0)), x.scatter(0, each, s[:9] * 2), pooled + 1

    return stored, (randn(300, 40), randn(128, 40), randn(2, 3, 34, 66))


@program(1e-5, train=True)
def extrema_in_order() -> Any:
    """Extrema, their places, and logarithms of sums up to each element: of long rows, columns, few rows; with their gradients."""

    def ordered(x: torch.Tensor, y: torch.Tensor) -> Any:
        most, least = torch.cummax(x, 1), torch.cummin(x.round(), 0)
        sums = [torch.logcumsumexp(y, dim) for dim in (0, 1)]
        return most.values * 2, most.indices, least.values, least.indices, *sums, torch.cummax(y.flatten()[:60000].view(2, -1), 1).values

    return ordered, (randn(70, 3000, grad=True), randn(3, 20001, grad=True))


@program(1e-4, train=True)
def bags_of_many_tables() -> Any:
    """Twenty lookups of four rows each, and their gradients: one launch each way."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(200, 16, padding_idx=3 if k % 2 else None) for k in range(40)])

        def forward(self, lists: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x, *(table(lists[:, k]).sum(1) for k, table in enumerate(self.tables))], 1).tanh()

    return Bags().to(DEVICE), (torch.randint(0, 200, (64, 40, 4)).to(DEVICE), randn(64, 16, grad=True))


@program(1e-4, train=True)
def places_of_pairs() -> Any:
    rows, columns = (t.to(DEVICE) for t in torch.triu_indices(9, 9, 1))

    def pairs(x: torch.Tensor) -> Any:
        products = torch.bmm(x, x.transpose(1, 2))
        return torch.cat([x[:, 0], products[:, rows, columns - 9]], 1) * 2

    return pairs, (randn(32, 9, 16, grad=True),)


@program(1e-4)
def pairs_of_places_by_name() -> Any:
    """Kernels alike but for which of two index tensors comes first by name."""
    places = [torch.randint(0, 90, (3000,)).to(DEVICE) for _ in range(12)]

    def run(*tables: torch.Tensor) -> Any:
        pairs = zip([0, 3, 10, 9, 4, 11], [1, 2, 9, 8, 11, 5], strict=True)
        return [(x[places[a], places[b]] * x[0, 0]).sum() for x, (a, b) in zip(tables, pairs, strict=True)]

    return run, tuple(randn(90, 90) for _ in range(6))


@program(1e-4, train=True)
def gradients_of_looked_up_rows() -> Any:
    """Rows that are looked up by one, two and scattered indices, some of them often."""
    index = torch.randint(0, 30, (500,)).to(DEVICE)
    places = torch.randint(0, 40, (30, 5)).to(DEVICE)

    def looked_up(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            x[index].sum(1),
            x[index, index].exp(),
            y.gather(1, places),
            x.index_add(0, index[:30], y),
            F.embedding(index, x, padding_idx=2),
        )

    return looked_up, (randn(30, 40, grad=True), randn(30, 40, grad=True))


@program(3e-2, train=True)
def rms_norms_of_bfloat16() -> Any:
    model = nn.Sequential(nn.RMSNorm(256), nn.Linear(256, 256, bias=False), nn.SiLU(), nn.RMSNorm(256, eps=1e-3))
    return model.to(DEVICE, torch.bfloat16), (randn(4, 33, 256, dtype=torch.bfloat16, grad=True),)


@program(1e-4, train=True)
def rms_norms() -> Any:
    model = nn.Sequential(nn.RMSNorm((3, 96)), nn.Tanh(), nn.RMSNorm(96, elementwise_affine=False))
    return model.to(DEVICE), (randn(700, 3, 96, grad=True),)


@program(1e-4, train=True)
def recurrent() -> Any:
    lstm = nn.LSTM(16, 24, batch_first=True).to(DEVICE)
    return lambda x: lstm(x)[0] * 2, (randn(3, 7, 16, grad=True),)


@program(1e-4, train=True)
def recurrent_flattened() -> Any:
    class Flattened(nn.GRU):
        def forward(self, x: torch.Tensor) -> Any:
            self.flatten_parameters()
            return super().forward(x)[0] * 2

    return Flattened(16, 24, num_layers=2).to(DEVICE), (randn(3, 7, 16, grad=True),)


@program(0)
def dropout_draws_as_eager() -> Any:
    return lambda x: F.dropout(x, 0.3) * 2 + torch.rand_like(x), (randn(100, 100),)


@program(1e-5, train=True)
def two_devices() -> Any:
    return lambda x: (x * 2).cpu() + 1, (randn(30, grad=True),)


@program(1e-5, train=True)
def results_on_the_cpu() -> Any:
    """A recorded part, what the CPU makes of it with numbers of its own, and gradients that go there and back."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        y = F.softmax(F.layer_norm(F.relu(F.relu(x @ w) @ w) @ w, (64,)) @ w, -1)
        there = y.to("cpu", torch.float64)
        return y, (there * b).sum(-1), there.argmax(-1), y.max().cpu() * b, b * 3

    return run, (randn(32, 64, grad=True), randn(64, 64, grad=True), torch.randn(64, requires_grad=True))


@program(1e-5)
def old_numbers_of_a_written_input() -> Any:
    """What is read behind must be what was there before the kernels wrote."""

    def run(x: torch.Tensor, steps: torch.Tensor) -> Any:
        old = x.cpu()
        x.mul_(0.5).add_(steps)
        steps += 1
        return old, x.sum().cpu(), (old + steps).cpu()

    return run, (randn(100), torch.zeros(()))


@program(0, broken=True)
def there_and_back() -> Any:
    return lambda x: (x * 2).cpu().sort().values.to(DEVICE) + 1, (randn(30),)


# ---- models --------------------------------------------------------------------------------------------------------------


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=1000)).to(
        DEVICE
    )


@program(1e-3)
def resnet18() -> Any:
    import torchvision

    return torchvision.models.resnet18().to(DEVICE).eval(), (randn(4, 3, 64, 64),)


@program(1e-7, train=True)
def resnet18_trains() -> Any:
    """In float64: a last bit of float32 may turn a rectifier on, and with it the gradients of a whole channel."""
    import torchvision

    return torchvision.models.resnet18().to(DEVICE).double(), (randn(8, 3, 64, 64, dtype=torch.float64),)


@program(1e-3)
def bert() -> Any:
    model = _bert().eval()
    return lambda ids: model(ids).last_hidden_state, (torch.randint(0, 1000, (2, 48)).to(DEVICE),)


@program(5e-3, train=True)
def bert_trains() -> Any:
    model = _bert().eval()
    return model, (torch.randint(0, 1000, (2, 48)).to(DEVICE),)


@program(1e-5, train=True)
def chosen_rows() -> Any:
    """Rows that a mask selects, reduced and in losses, are never gathered; none selected gives eager's NaN."""

    def run(x: torch.Tensor, target: torch.Tensor, w: torch.Tensor) -> Any:
        few, none = target > 2, target > 90
        return F.cross_entropy(x[few], target[few]), x[few].mean(0), x[none].mean(), x[~few].sum() * w, x[few].square().mean(1).mean()

    return run, (randn(400, 20, grad=True), torch.randint(0, 20, (400,)).to(DEVICE), randn(1, grad=True))


@program(1e-5, train=True)
def chosen_and_written() -> Any:
    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x * 1
        y[y < 0] *= w
        y[y > 1] = 0.5
        return y, y[y > 0].sum()

    return run, (randn(300, 33, grad=True), randn(1, grad=True))


def _flex(score: Any, mask: Any, dtype: torch.dtype = torch.float32, heads: int = 4) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(mask, None, None, 80, 80, device=DEVICE) if mask else None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=heads != 4) * 2

    return run, (randn(2, 4, 80, 32, dtype=dtype, grad=True), *(randn(2, heads, 80, 32, dtype=dtype, grad=True) for _ in "kv"))


@program(1e-4, train=True)
def flex_attention_of_windows() -> Any:
    return _flex(lambda s, b, h, q, k: s + (k - q) * 0.1 * (h + 1), lambda b, h, q, k: (q >= k) & (q - k < 20))


@program(2e-2, train=True, rounded=True)
def flex_attention_of_halves() -> Any:
    """Capped scores, keys and values of half the heads."""
    return _flex(lambda s, b, h, q, k: torch.tanh(s / 5) * 5, lambda b, h, q, k: (q >= k) | (k < 7), torch.bfloat16, 2)


@program(1e-5, train=True)
def control_flow() -> Any:
    from functorch.experimental.control_flow import map as over

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = torch.cond(x.shape[0] > 3, lambda a: a * w, lambda a: a - w, (x,))
        return torch.cond(y.sum() > 0, lambda a: (a + w).sin(), lambda a: (a * w).cos(), (y * 2,)), over(lambda a, b: a.exp() * b, x, w)

    return run, (randn(8, 33, grad=True), randn(33, grad=True))


@program(1e-6)
def caches_take_tokens() -> Any:
    """Few elements of inputs are written, by the library and by kernels, at places that change too."""
    turn = iter(range(100))

    def run(c: torch.Tensor, d: torch.Tensor, e: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> Any:
        return update(c, d, e, k, p, next(turn) % 7)

    def update(c: torch.Tensor, d: torch.Tensor, e: torch.Tensor, k: torch.Tensor, p: torch.Tensor, n: int) -> Any:
        c.index_copy_(1, p, k)
        d[:, 3:4] = k * 2
        d[2, -1] += 1
        e[:, n] = k[:, 0]
        e[1, ::2].mul_(0.5)
        return (c[:, :4] * k).sum(1), d[:, 3] + e[:, n]

    return run, (*(randn(4, 64, 33) for _ in range(3)), randn(4, 1, 33), torch.tensor([5]).to(DEVICE))


@program(1e-5, train=True)
def products_of_boxes() -> Any:
    """Gradients of products, of few factors and many and in order, look at no data."""

    def run(x: torch.Tensor) -> Any:
        y = x.clamp(min=0)
        return (
            F.logsigmoid(x),
            torch.diag_embed(x[:, :5]),
            y[:, :2].prod(-1),
            x[:, :40].prod(1, keepdim=True),
            x.sigmoid().cumprod(1),
            y.cumprod(1),
            y.prod(0),
            F.glu(x, 1),
        )

    return run, (randn(300, 64, grad=True),)


@program(1e-5, train=True)
def a_place_in_each_row() -> Any:
    """One element a row is picked, and takes the whole gradient."""

    def run(x: torch.Tensor, i: torch.Tensor) -> Any:
        return -F.log_softmax(x, -1).gather(-1, i[:, None]).mean(), x.gather(0, i[None, :50] % 7)

    return run, (randn(700, 50, grad=True), torch.randint(0, 50, (700,)).to(DEVICE))


@program(1e-4)
def whole_training_step() -> Any:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> Any:
        optimiser.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimiser.step()
        return loss.detach(), *(p.detach().clone() for p in model.parameters())

    step.state = (model, optimiser)  # type: ignore[attr-defined]
    return step, (randn(16, 32),)


# ---- comparing -----------------------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def leaves(fn: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    models = [fn] if isinstance(fn, nn.Module) else [c.cell_contents for c in (getattr(fn, "__closure__", None) or ())]
    found = [p for m in models if isinstance(m, nn.Module) for p in (*m.parameters(), *m.buffers())]
    return [*found, *(a for a in args if isinstance(a, torch.Tensor))]


def outcome(row: Program, wrap: Callable[[Any], Any], calls: int = 5, double: bool = False) -> list[list[torch.Tensor]]:
    """Per call: results, gradients, and all arguments, parameters and buffers afterwards."""
    torch.manual_seed(0)
    fn, args = row.make()
    if double:
        args = tuple(a.detach().double().requires_grad_(a.requires_grad) for a in args)
        for t in leaves(fn, ()):
            t.data = t.data.double() if t.is_floating_point() else t.data
    run = wrap(fn)
    found = []
    for n in range(calls):
        given = [
            a.detach().clone().requires_grad_(a.requires_grad)
            if isinstance(a, torch.Tensor) and a.is_contiguous() and row.name != "unaligned"
            else a
            for a in args
        ]
        torch.manual_seed(n)
        if row.train:
            results = tensors(run(*given))
            weights = [
                torch.linspace(0.5, 1.5, r.numel(), device=r.device, dtype=r.dtype).view(r.shape) if r.is_floating_point() else None
                for r in results
            ]
            sum((r * w).sum() for r, w in zip(results, weights, strict=True) if w is not None and r.requires_grad).backward()
        else:
            with torch.no_grad() if row.name != "whole_training_step" else torch.enable_grad():
                results = tensors(run(*given))
        every = leaves(fn, tuple(given))
        gradients = [t.grad for t in every if t.grad is not None] if row.train else []
        found.append([copy.deepcopy(t.detach()) for t in (*results, *gradients, *every)])
        for t in every:
            t.grad = None
    return found


def check(name: str, **options: Any) -> dict[str, int]:
    """Raises where compiled and eager differ; returns the counters of the compilation."""
    import magneto
    from magneto.base import events

    row = PROGRAMS[name]
    expected = outcome(row, lambda fn: fn)
    magneto.reset()
    events.reset()
    ours = outcome(row, lambda fn: magneto.optimize("inductor", **options)(fn))
    exact = outcome(row, lambda fn: fn, double=True) if row.rounded else []
    for call, (found, wanted) in enumerate(zip(ours, expected, strict=True)):
        assert len(found) == len(wanted), f"call {call}: {len(found)} tensors for {len(wanted)}"
        for n, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.device == b.device and a.stride() == b.stride(), (
                f"call {call}, tensor {n}: {a.device} {a.stride()} for {b.device} {b.stride()}"
            )
            if exact and b.is_floating_point():
                true = exact[call][n]
                error, eager, most = ((t - true).abs().max().item() for t in (a, b, torch.zeros_like(true)))
                assert error <= 2 * eager + row.tolerance * most, f"call {call}, tensor {n}: {error} from float64, eager {eager}"
                continue
            scale = max(1.0, b.abs().max().item()) if b.is_floating_point() and b.numel() and b.isfinite().all() else 1.0
            torch.testing.assert_close(
                a, b, rtol=row.tolerance, atol=row.tolerance * scale, equal_nan=True, msg=lambda m: f"call {call}, tensor {n}: {m}"
            )  # noqa: B023
    fallbacks = [str(e.fields.get("reason")) for e in events.events("fallback")]
    assert row.broken or not fallbacks, f"ran in eager: {fallbacks}"
    stats = magneto.stats()
    return {
        "recordings": events.counters().get("cuda_graphs", 0),
        "kernels": stats.get("kernels", 0),
        "graphs": stats.get("graphs", 0),
        "breaks": stats.get("breaks", 0),
    }
