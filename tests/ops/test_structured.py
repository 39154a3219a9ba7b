"""Views, reductions, indexing, products, convolutions, pooling, norms, losses: rules and decompositions against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops.layouts import permuted, spaced, values
from tests.ops.test_pointwise import check

aten = torch.ops.aten
FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def x4(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return values((2, 3, 4, 5), dtype, 21, special=False)


def four(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Four-dimensional tensors: contiguous, channels-last, otherwise permuted, with gaps."""
    base = x4(dtype)
    return [base, permuted(base, (0, 2, 3, 1)), permuted(base, (1, 0, 3, 2)), spaced(base), base[:, :, 1:3], base[:, :1].expand(2, 3, 4, 5)]


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x.contiguous().view(6, -1),
    "view_flat": lambda x: x.reshape(-1),
    "reshape": lambda x: x.reshape(x.shape[0] * x.shape[1], -1),
    "unsafe_view": lambda x: aten._unsafe_view(x.contiguous(), [x.numel()]),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(1, (3, 1)),
    "permute": lambda x: x.permute(3, 0, -2, 1),
    "transpose": lambda x: x.transpose(1, -1),
    "transpose_same": lambda x: x.transpose(2, 2),
    "t": lambda x: x[0, 0].t(),
    "T": lambda x: x[0, 0].T,
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, 2),
    "expand": lambda x: x[:, :, :1].expand(2, -1, 7, x.shape[3]),
    "expand_new": lambda x: x.expand(3, 1, *x.shape),
    "slice": lambda x: x[:, 1:, ::2],
    "slice_negative": lambda x: x[..., -3:-1],
    "slice_empty": lambda x: x[:, 2:1],
    "slice_far": lambda x: x[:, -10:100],
    "select": lambda x: x[1],
    "select_last": lambda x: x.select(-1, -2),
    "squeeze": lambda x: x[:1, :, :1].squeeze(),
    "squeeze_dim": lambda x: x[:1].squeeze(0),
    "squeeze_not": lambda x: x.squeeze(1),
    "squeeze_dims": lambda x: x[:1, :1].squeeze((0, 1)),
    "unsqueeze": lambda x: x.unsqueeze(2),
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "none": lambda x: x[None, :, None],
    "split": lambda x: x.split(2, 3),
    "split_sizes": lambda x: x.split([1, 2], 1),
    "chunk": lambda x: x.chunk(3, -1),
    "tensor_split": lambda x: x.tensor_split(2, 3),
    "unbind": lambda x: x.unbind(1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 3), 1),
    "diagonal": lambda x: x.diagonal(1, 2, 3),
    "diagonal_negative": lambda x: x.diagonal(-1, 0, 1),
    "unfold": lambda x: x.unfold(3, 2, 2) if x.shape[3] > 2 else None,
    "detach": lambda x: x.detach(),
    "view_as_complex": lambda x: torch.view_as_complex(x.float().contiguous()[..., :2].contiguous()),
    "view_as_real": lambda x: torch.view_as_real(x.to(torch.complex64)),
    "view_dtype": lambda x: x.float().view(torch.int32),
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "to_channels_last": lambda x: x.to(torch.float64, memory_format=torch.channels_last),
    "clone": lambda x: x.clone(),
    "clone_contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "flip": lambda x: x.flip(1, -1),
    "roll": lambda x: x.roll((1, -2), (0, 3)),
    "roll_flat": lambda x: x.roll(3),
    "repeat": lambda x: x.repeat(2, 1, 3, 1),
    "repeat_more": lambda x: x.repeat(2, 1, 1, 1, 2),
    "tile": lambda x: x.tile(2, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "cat_empty": lambda x: torch.cat([torch.empty(0), x.float()], 0),
    "cat_promote": lambda x: torch.cat([x, x.double()], -1),
    "stack": lambda x: torch.stack([x, x], 2),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pad_value": lambda x: F.pad(x, (1, -1), value=2.5),
    "pad_reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "pad_replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "slice_scatter": lambda x: aten.slice_scatter(x, x[:, 1:] * 2, 1, 1, 3),
    "slice_scatter_step": lambda x: aten.slice_scatter(x, x[:, ::2] * 2, 1, 0, 3, 2),
    "slice_scatter_steps": lambda x: aten.slice_scatter(x, x[1::2] * 2, 0, 1, None, 2) + aten.slice_scatter(x, x[:, 1:3:3] * 2, 1, 1, 3, 3),
    "select_scatter": lambda x: aten.select_scatter(x, x[:, 0] * 2, 1, -1),
    "slice_backward": lambda x: aten.slice_backward(x, [2, 9, *x.shape[2:]], 1, 2, 5, 1),
    "slice_backward_step": lambda x: aten.slice_backward(x, [2, 3 * x.shape[1] + 1, *x.shape[2:]], 1, 2, 3 * x.shape[1] + 1, 3),
    "select_backward": lambda x: aten.select_backward(x, [2, *x.shape], 0, 1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.new_ones(2, 8, 3, 3), 2),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, *x.shape)),
    "setitem": lambda x: x.clone().__setitem__((slice(None), 1), 2.0),
    "slice_dim_of_1d": lambda x: x.flatten()[3:20:4],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    check(VIEWS[name], [(x,) for dtype in (torch.float32, torch.int64) for x in four(dtype)], numpy_too=True)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {}
for _name in ("sum", "mean", "amax", "amin", "prod", "var", "std", "any", "all", "logsumexp", "nansum"):
    _fn = getattr(torch, _name)
    if _name not in ("logsumexp",):
        REDUCTIONS[f"{_name}_all"] = lambda x, fn=_fn: fn(x)
    REDUCTIONS[f"{_name}_dim"] = lambda x, fn=_fn: fn(x, -1) if x.ndim else fn(x, 0)
    REDUCTIONS[f"{_name}_keep"] = lambda x, fn=_fn: fn(x, 0, keepdim=True)
    if _name not in ("prod",):
        REDUCTIONS[f"{_name}_dims"] = lambda x, fn=_fn: fn(x, (0, -1)) if x.ndim > 1 else None
REDUCTIONS |= {
    "max": torch.max,
    "min": torch.min,
    "max_dim": lambda x: torch.max(x, -1),
    "min_dim": lambda x: torch.min(x, 0, keepdim=True),
    "argmax": torch.argmax,
    "argmax_dim": lambda x: torch.argmax(x, 0),
    "argmin_keep": lambda x: torch.argmin(x, -1, keepdim=True),
    "argmax_all_keep": lambda x: torch.argmax(x, None, True),
    "sum_dtype": lambda x: torch.sum(x, -1, dtype=torch.float64),
    "sum_int": lambda x: torch.sum(x, dtype=torch.int64) if not x.dtype.is_floating_point else None,
    "mean_dtype": lambda x: torch.mean(x, 0, dtype=torch.float32),
    "var_population": lambda x: torch.var(x, -1, correction=0),
    "var_mean": lambda x: torch.var_mean(x, 0, correction=0, keepdim=True),
    "std_mean": lambda x: torch.std_mean(x, -1),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm_dim": lambda x: torch.linalg.vector_norm(x, 2, -1, keepdim=True),
    "norm_one": lambda x: torch.linalg.vector_norm(x, 1, 0),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf"), -1),
    "norm_zero": lambda x: torch.linalg.vector_norm(x, 0),
    "norm_three": lambda x: torch.linalg.vector_norm(x, 3, -1),
    "norm_method": lambda x: x.norm(),
    "normalize": lambda x: F.normalize(x, dim=0),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax_first": lambda x: F.softmax(x, 0),
    "softmax_dtype": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax_first": lambda x: F.log_softmax(x, 0),
    "safe_softmax": lambda x: aten._safe_softmax(x.masked_fill(x > 0, float("-inf")), -1),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "cumprod": lambda x: torch.cumprod(x, 0),
    "cummax": lambda x: torch.cummax(x, 0),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "sort": lambda x: torch.sort(x, -1),
    "sort_first": lambda x: torch.sort(x, 0, descending=True),
    "argsort": lambda x: torch.argsort(x, 0),
    "topk": lambda x: torch.topk(x, 2, 0),
    "median": lambda x: torch.median(x),
    "median_dim": lambda x: torch.median(x, 0),
    "mode": lambda x: torch.mode(x, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 1, -1),
    "count_nonzero": lambda x: torch.count_nonzero(x),
}


def reduction_cases(dtype: torch.dtype) -> list[Any]:
    base = values((3, 4, 5), dtype, 31, special=False)
    big = values((7, 33), dtype, 33, special=False)
    empty = values((0, 3), dtype, 1)
    return [
        (t,) for t in (base, permuted(base, (2, 0, 1)), spaced(base), big, big.t(), values((), dtype, 32), values((1,), dtype, 5), empty)
    ]


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, torch.int64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    check(REDUCTIONS[name], reduction_cases(dtype), dtype in (torch.float32, torch.int64))


def test_nan_in_reductions() -> None:
    x = values((4, 5), torch.float32, 3)
    for name in ("sum_dim", "mean_dim", "amax_dim", "amin_dim", "max_dim", "argmax", "argmax_dim", "min_dim", "softmax", "log_softmax"):
        check(REDUCTIONS[name], [(x,), (x.t(),)])


def index(*entries: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    t = torch.tensor(entries)
    return t if shape is None else t.reshape(shape)


INDEXING: dict[str, Callable[[torch.Tensor], Any]] = {
    "index_first": lambda x: x[index(1, 0, -1)],
    "index_middle": lambda x: x[:, :, index(0, -1, 1)],
    "index_matrix": lambda x: x[index(1, 0, 1, 0, shape=(2, 2))],
    "index_two": lambda x: x[index(1, 0), index(0, 2)],
    "index_broadcast": lambda x: x[index(1, 0, shape=(2, 1)), :, index(0, 1)],
    "index_apart": lambda x: x[index(1, 0), :, index(0, 1)],
    "index_middle_pair": lambda x: x[:, index(1, 0), index(0, 1)],
    "index_int32": lambda x: x[index(1, 0).int()],
    "index_select": lambda x: torch.index_select(x, 2, index(0, 1, 1)),
    "gather": lambda x: torch.gather(x, 1, torch.zeros(x.shape, dtype=torch.int64)),
    "gather_small": lambda x: torch.gather(x, 3, torch.ones((1, 2, 2, 3), dtype=torch.int64)),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.zeros((2, 3, 1, 5), dtype=torch.int64)[..., : x.shape[3]], 2),
    "scatter": lambda x: x.scatter(1, torch.zeros(x.shape, dtype=torch.int64), 2),
    "scatter_src": lambda x: x.scatter(1, torch.zeros(x.shape, dtype=torch.int64), x),
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros(x.shape, dtype=torch.int64), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, torch.zeros(x.shape, dtype=torch.int64), x, "amax"),
    "index_add": lambda x: x.index_add(0, index(0, 1), x),
    "index_copy": lambda x: x.index_copy(0, index(1, 0), x),
    "index_fill": lambda x: x.index_fill(0, index(1), 3),
    "index_put": lambda x: x.index_put((index(1, 0),), x),
    "index_put_mask": lambda x: x.index_put((x > 0,), x.new_ones(())),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x),
    "embedding": lambda x: F.embedding(index(1, 0, 1, 1, shape=(2, 2)), x.reshape(2, -1)),
    "embedding_padding": lambda x: F.embedding(index(1, 0), x.reshape(2, -1), padding_idx=0),
    "embedding_dense_backward": lambda x: aten.embedding_dense_backward(x.reshape(2, -1), index(1, 0), 4, -1, False),
    "one_hot": lambda x: F.one_hot(index(1, 0, 2), 4),
    "where_broadcast": lambda x: torch.where(x[:, :1] > 0, x, x[0]),
    "isin": lambda x: torch.isin(x, x[0, 0, 0]),
    "bucketize": lambda x: torch.bucketize(x, x.new_tensor([0, 1, 2])),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str) -> None:
    check(INDEXING[name], [(x,) for x in four()[:5]] + [(x,) for x in four(torch.int64)[:2]])


def matrices(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    def r(*shape: int) -> torch.Tensor:
        return values(shape, dtype, 41, special=False)

    return {
        "mm": (torch.mm, [(r(3, 4), r(4, 5)), (r(4, 3).t(), r(5, 4).t()), (r(0, 4), r(4, 5)), (r(3, 0), r(0, 5))]),
        "bmm": (torch.bmm, [(r(2, 3, 4), r(2, 4, 5)), (r(2, 4, 3).mT, r(2, 4, 5))]),
        "addmm": (torch.addmm, [(r(5), r(3, 4), r(4, 5)), (r(3, 5), r(3, 4), r(5, 4).t()), (r(), r(3, 4), r(4, 5))]),
        "baddbmm": (torch.baddbmm, [(r(5), r(2, 3, 4), r(2, 4, 5)), (r(2, 1, 5), r(2, 3, 4), r(2, 4, 5))]),
        "mv": (torch.mv, [(r(3, 4), r(4))]),
        "addmv": (torch.addmv, [(r(3), r(3, 4), r(4))]),
        "dot": (torch.dot, [(r(4), r(4))]),
        "matmul": (
            torch.matmul,
            [(r(2, 3, 4), r(4, 5)), (r(2, 1, 3, 4), r(3, 4, 5)), (r(4), r(4, 5)), (r(3, 4), r(4)), (r(2, 3, 4), r(4)), (r(4), r(4))],
        ),
        "linear": (F.linear, [(r(2, 3, 4), r(5, 4), r(5)), (r(3, 4), r(5, 4)), (r(4), r(5, 4), r(5)), (r(2, 4, 3).mT, r(5, 4), r(5))]),
        "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(r(2, 3, 4), r(2, 5, 4))]),
        "outer": (torch.outer, [(r(3), r(4))]),
        "addr": (torch.addr, [(r(3, 4), r(3), r(4))]),
        "addbmm": (torch.addbmm, [(r(3, 5), r(2, 3, 4), r(2, 4, 5))]),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", list(matrices(torch.float32)))
def test_products(name: str, dtype: torch.dtype) -> None:
    fn, cases = matrices(dtype)[name]
    check(fn, cases)


FACTORISATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "svd": lambda x: [torch.linalg.svd(x, full_matrices=False), torch.linalg.svd(x), torch.linalg.svdvals(x)],
    "qr": lambda x: [torch.linalg.qr(x), torch.linalg.qr(x, "complete"), torch.linalg.qr(x, "r")],
    "pinv": lambda x: [torch.linalg.pinv(x), torch.linalg.pinv(x, rtol=1e-3)],
    "lu_factor": torch.linalg.lu_factor_ex,
}
OF_SQUARE: dict[str, Callable[[torch.Tensor], Any]] = {
    "eigh": lambda x: [torch.linalg.eigh(x), torch.linalg.eigvalsh(x)],
    "eig": lambda x: [torch.linalg.eig(x), torch.linalg.eigvals(x)],
    "inverse": torch.linalg.inv_ex,
    "cholesky": lambda x: [torch.linalg.cholesky_ex(x), torch.linalg.cholesky_ex(x, upper=True)],
    "determinant": lambda x: [torch.linalg.det(x), torch.linalg.slogdet(x)],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_factorisations(dtype: torch.dtype) -> None:
    shapes = [(5, 4), (4, 5), (2, 3, 4, 3), (1, 4), (0, 3), (3, 0), (0, 3, 2)]
    for fn in FACTORISATIONS.values():
        check(fn, [(torch.randn(shape, dtype=dtype),) for shape in shapes])
    square = [torch.randn(shape, dtype=dtype) for shape in [(4, 4), (2, 3, 4, 4), (1, 1), (0, 0), (0, 3, 3)]]
    for fn in OF_SQUARE.values():
        check(fn, [(x @ x.mH + torch.eye(x.shape[-1]),) for x in square] + [((square[0] @ square[0].mH).mT,)])


def images(dtype: torch.dtype = torch.float32, channels: int = 4) -> list[torch.Tensor]:
    base = values((2, channels, 8, 9), dtype, 51, special=False)
    return [base, permuted(base, (0, 2, 3, 1)), base[:1], spaced(base), base[:, :, :1, :1]]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return values(shape, dtype, 52, special=False)


def conv_cases(dtype: torch.dtype) -> list[Any]:
    w = weight(6, 4, 3, 3, dtype=dtype)
    cases: list[Any] = []
    for x in images(dtype)[:4]:
        for kernel in (w, permuted(w, (0, 2, 3, 1)), weight(6, 4, 1, 1, dtype=dtype)):
            cases += [(x, kernel, None), (x, kernel, weight(6, dtype=dtype), 2, 1), (x, kernel, None, 1, (0, 2), 1)]
        cases += [(x, weight(4, 1, 3, 3, dtype=dtype), None, 1, 1, 1, 4), (x, weight(6, 2, 3, 3, dtype=dtype), None, 1, "same", 2, 2)]
    return cases


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_conv2d(dtype: torch.dtype) -> None:
    check(F.conv2d, conv_cases(dtype))


def test_other_convolutions() -> None:
    x1 = values((2, 4, 9), torch.float32, 1, special=False)
    check(
        F.conv1d,
        [(x1, weight(6, 4, 3)), (x1, weight(6, 4, 3), weight(6), 2, 1), (x1.mT.contiguous().mT, weight(6, 4, 3)), (x1[0], weight(6, 4, 3))],
    )
    check(F.conv3d, [(values((1, 2, 4, 5, 6), torch.float32, 2, special=False), weight(3, 2, 2, 2, 2))])
    check(F.conv_transpose2d, [(x, weight(4, 3, 3, 3), None, 2, 1, 1) for x in images()[:2]])
    check(F.conv_transpose1d, [(x1, weight(4, 3, 3), None, 2)])


POOLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d_pad": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d_ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max_pool2d_dilated": lambda x: F.max_pool2d(x, 2, 1, 0, 2),
    "max_pool1d": lambda x: F.max_pool1d(x[0], 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool2d_pad": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive_avg_pool2d_one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (3, 2)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest_size": lambda x: F.interpolate(x, size=(5, 7)),
    "bilinear": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(10, 10), mode="bicubic", align_corners=True),
    "linear": lambda x: F.interpolate(x[0], scale_factor=2.0, mode="linear"),
    "grid_sample": lambda x: F.grid_sample(x, x.new_zeros(x.shape[0], 3, 3, 2), align_corners=False),
    "unfold": lambda x: F.unfold(x, 3),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str) -> None:
    check(POOLS[name], [(x,) for x in images()[:4]])


def norms(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    w, b, ones = weight(4, dtype=dtype), weight(4, dtype=dtype), torch.ones(4, dtype=dtype)
    rows = values((3, 5, 4), dtype, 61, special=False)
    pictures = images(dtype)[:4]
    layer = [(rows, (4,), w, b), (rows, (4,)), (rows, (5, 4)), (permuted(rows, (2, 0, 1)), (4,), w, None), (rows[0, 0], (4,), w, b)]
    stats = [(x, ones * 0.3, ones * 2, w, b, False) for x in pictures] + [
        (x, ones * 0.3, ones * 2, None, None, False) for x in pictures[:2]
    ]
    legit = [(x, w, b, ones * 0.3, ones * 2, True, 0.1, 1e-5) for x in pictures] + [
        (rows.mT.contiguous(), w, b, ones, ones, True, 0.3, 1e-5)
    ]
    no_stats = [(x, None, None, w, b, True) for x in pictures]
    return {
        "layer_norm": (F.layer_norm, layer),
        "group_norm": (F.group_norm, [(x, 2, w, b) for x in pictures] + [(pictures[0], 4), (rows.mT.contiguous(), 2, w, b)]),
        "batch_norm": (F.batch_norm, stats),
        "batch_norm_batch": (F.batch_norm, no_stats),
        "batch_norm_training": (aten._native_batch_norm_legit_functional, legit),
        "instance_norm": (F.instance_norm, [(x,) for x in pictures]),
        "rms_norm": (F.rms_norm, [(rows, (4,), w), (rows, (5, 4))]),
        "local_response_norm": (lambda x: F.local_response_norm(x, 2), [(x,) for x in pictures[:2]]),
    }


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("name", list(norms(torch.float32)))
def test_norms(name: str, dtype: torch.dtype) -> None:
    fn, cases = norms(dtype)[name]
    check(fn, cases)


def losses() -> dict[str, Callable[[str], Any]]:
    a, b = values((6, 5), torch.float32, 71, special=False), values((6, 5), torch.float32, 72, special=False)
    target = torch.tensor([0, 4, 2, -100, 1, 1])
    picture = values((2, 5, 3, 4), torch.float32, 73, special=False)
    labels = torch.randint(0, 5, (2, 3, 4), generator=torch.Generator().manual_seed(1))
    return {
        "mse": lambda r: F.mse_loss(a, b, reduction=r),
        "l1": lambda r: F.l1_loss(a, b, reduction=r),
        "smooth_l1": lambda r: F.smooth_l1_loss(a, b, reduction=r, beta=0.7),
        "huber": lambda r: F.huber_loss(a, b, reduction=r, delta=0.7),
        "bce": lambda r: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), reduction=r),
        "bce_logits": lambda r: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction=r),
        "nll": lambda r: F.nll_loss(F.log_softmax(a, -1), target, reduction=r),
        "cross_entropy": lambda r: F.cross_entropy(a, target, reduction=r),
        "cross_entropy_weight": lambda r: F.cross_entropy(a, target, a[0].abs(), reduction=r),
        "cross_entropy_smooth": lambda r: F.cross_entropy(a, target, reduction=r, label_smoothing=0.1),
        "cross_entropy_2d": lambda r: F.cross_entropy(picture, labels, reduction=r),
        "kl_div": lambda r: F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction=r),
        "cosine": lambda r: F.cosine_similarity(a, b),
    }


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", list(losses()))
def test_losses(name: str, reduction: str) -> None:
    check(lambda: losses()[name](reduction), [()])


FACTORIES: dict[str, Callable[[], Any]] = {
    "zeros": lambda: torch.zeros(2, 3),
    "zeros_int": lambda: torch.zeros(2, dtype=torch.int32),
    "ones_bool": lambda: torch.ones(3, dtype=torch.bool),
    "full": lambda: torch.full((2, 3), 2.5),
    "full_int": lambda: torch.full((2,), 3),
    "full_bool": lambda: torch.full((2,), True),
    "full_cast": lambda: torch.full((2,), 1.5, dtype=torch.float16),
    "arange": lambda: torch.arange(5),
    "arange_step": lambda: torch.arange(10, 1, -3),
    "arange_float": lambda: torch.arange(0.0, 1.0, 0.3),
    "arange_dtype": lambda: torch.arange(2, 9, 2, dtype=torch.float32),
    "linspace": lambda: torch.linspace(0, 1, 5),
    "eye": lambda: torch.eye(3, 4),
    "empty": lambda: torch.empty(2, 3),
    "empty_channels_last": lambda: torch.empty(2, 3, 4, 4, memory_format=torch.channels_last),
    "scalar_tensor": lambda: torch.scalar_tensor(2.0),
    "tri_indices": lambda: torch.tril_indices(3, 4),
    "empty_strided": lambda: torch.empty_strided((2, 3), (1, 2)),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "hann": lambda: torch.hann_window(5),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str) -> None:
    check(FACTORIES[name], [()], numpy_too=True)


def attention_inputs(order: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q = values((2, 4, 8, 16), dtype, 81, special=False)
    return permuted(q, order), permuted(q * 0.5, order), permuted(q * 2, order)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(order: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = attention_inputs(order, dtype)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    check(F.scaled_dot_product_attention, [(q, k, v), (q, k, v, mask), (q, k, v, None, 0.0, True)])
    check(lambda *a: F.scaled_dot_product_attention(*a, enable_gqa=True), [(q, k[:, :2], v[:, :2])])


GRADIENTS: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], x[0, 0, 0], x[0, 0, 0] * 2),
    "layer_norm_plain": lambda x: F.layer_norm(x, x.shape[-2:]),
    "group_norm": lambda x: F.group_norm(x, 2, x[0, :, 0, 0], x[1, :, 0, 0]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, x[0, :, 0, 0], x[1, :, 0, 0], True),
    "batch_norm_eval": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), x[0, :, 0, 0], None, False),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "conv": lambda x: F.conv2d(x, x[:, :, :3, :3], None, 1, 1),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "adaptive_one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "std": lambda x: x.std(1),
    "amax": lambda x: x.amax(-1),
    "max_dim": lambda x: x.max(-1)[0],
    "index": lambda x: x[:, torch.tensor([0, 0, 1])],
    "gather": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.int64)),
    "select": lambda x: x[:, 1] * x[:, :, 1:3].sum((2, 3))[:, :1, None],
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "mse": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 0.5),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(1), torch.tensor([1, 3])),
    "norm": lambda x: x.norm(),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate_bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "prod": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(1),
    "pow": lambda x: x.abs() ** 1.5,
    "sort": lambda x: x.sort(-1)[0],
    "glu": lambda x: F.glu(x[..., :8], -1),
    "var": lambda x: x.var((2, 3), keepdim=True),
    "leaky": lambda x: F.leaky_relu(x, 0.1) + F.elu(x) + F.softplus(x) + F.hardswish(x) + F.mish(x) + F.hardsigmoid(x) + F.hardtanh(x),
    "matmul": lambda x: x @ x.mT,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_backward(name: str) -> None:
    def both(x: torch.Tensor) -> None:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = GRADIENTS[name](leaf)
            (out * torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape)).sum().backward()

    check(both, [(x,) for x in images()[:4] if x.shape[0] == 2])


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", ["huber_loss", "smooth_l1_loss", "mse_loss", "l1_loss"])
def test_losses_of_broadcast_operands_in_other_layouts(name: str) -> None:
    """A loss may be laid out as its input alone, or as both."""
    row, turned = values((3,), torch.float32, 4, special=False), values((3, 2, 2), torch.float32, 5, special=False).permute(2, 1, 0)
    for x, y in ((row, turned), (turned, row), (row, turned[..., :1]), (turned[..., :1], row), (turned, turned.contiguous())):
        check(lambda x, y: getattr(F, name)(x, y, reduction="none"), [(x, y)])
