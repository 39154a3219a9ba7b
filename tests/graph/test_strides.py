"""Strides that the rules promise, against those of eager's kernels: operands of other types, rows repeated, convolutions in any layout."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from magneto.graph.fake import fake_call
from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate

aten = torch.ops.aten
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "stepped": lambda x: torch.stack([x, x], 2)[..., 0],
    "rows alike": lambda x: x[:1].expand(3, 4),
    "columns alike": lambda x: x[:, :1].expand(3, 4),
    "a row": lambda x: x[0],
    "a column": lambda x: x[:, :1],
}
OPERATORS = [aten.add.Tensor, aten.div.Tensor, aten.eq.Tensor, aten.copysign.Tensor, aten.clamp.Tensor, aten.where.self, aten.addr.default]
DTYPES = (torch.int64, torch.float32, torch.bfloat16)


def described(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors as their descriptions, also in lists."""
    return tuple(
        TensorMeta.of(arg) if isinstance(arg, torch.Tensor) else list(described(tuple(arg))) if isinstance(arg, list) else arg
        for arg in args
    )


def steps(meta: TensorMeta) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one element."""
    return tuple(step for size, step in zip(meta.shape, meta.strides, strict=True) if size > 1)


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_elementwise(op: Any) -> None:
    values = torch.arange(1.0, 13.0).reshape(3, 4)
    wrong = []
    for one, two in itertools.product(DTYPES, DTYPES):
        for first, second in itertools.product(LAYOUTS, LAYOUTS):
            x, y = LAYOUTS[first](values.to(one)), LAYOUTS[second](values.to(two))
            args: tuple[Any, ...] = (x > 2, x, y) if op is aten.where.self else (x, y, None) if op is aten.clamp.Tensor else (x, y)
            if op is aten.addr.default:
                args = (x.to(two), y.reshape(-1)[:3], values.to(two)[1])
            expected = op(*args)
            if (found := propagate(op, described(args), {})).strides != expected.stride():
                wrong.append(f"{one} {first}, {two} {second}: {found.strides} for {expected.stride()}")
    assert not wrong


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolutions(dims: int, transposed: bool, dtype: torch.dtype) -> None:
    last = (0, *range(2, dims + 2), 1)
    back = (0, dims + 1, *range(1, dims + 1))
    wrong = []
    for groups, x_last, w_last, batch, size in itertools.product((1, 2), (False, True), (False, True), (1, 2, 16), (1, 2, 4)):
        x = torch.ones(batch, 4, *[4] * dims, dtype=dtype)
        w = torch.ones(*((4, 6 // groups) if transposed else (6, 4 // groups)), *[size] * dims, dtype=dtype)
        x = x.permute(last).contiguous().permute(back) if x_last else x
        w = w.permute(last).contiguous().permute(back) if w_last else w
        options = ([1] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, groups)
        forward = (x, w, None, *options)
        result = aten.convolution.default(*forward)
        backward = (torch.ones_like(result), x, w, [6], *options, [True, True, True])
        expected = [steps(TensorMeta.of(t)) for t in (result, *aten.convolution_backward.default(*backward))]
        metas = [
            propagate(aten.convolution.default, described(forward), {}),
            *propagate(aten.convolution_backward.default, described(backward), {}),
        ]
        if (found := [steps(meta) for meta in metas]) != expected:
            wrong.append(f"groups {groups}, {x_last}, {w_last}, {batch}, {size}: {found} for {expected}")
    assert not wrong


def test_gradients_of_convolutions_in_single_channels() -> None:
    """The strides of dimensions of one element too: a sum of such gradients takes them over."""
    wrong = []
    for cin, cout, groups in ((8, 8, 1), (8, 8, 8), (1, 8, 1), (8, 1, 1), (1, 1, 1), (4, 8, 4)):
        for size, batch, x_last, w_last in itertools.product((1, 3), (1, 2, 20), (False, True), (False, True)):
            x, w = torch.ones(batch, cin, 6, 6), torch.ones(cout, cin // groups, size, size)
            x = x.to(memory_format=torch.channels_last) if x_last else x
            w = w.to(memory_format=torch.channels_last) if w_last else w
            options = ([1, 1], [size // 2] * 2, [1, 1], False, [0, 0], groups)
            backward = (torch.ones_like(aten.convolution.default(x, w, None, *options)), x, w, [cout], *options, [True, True, True])
            expected = [t.stride() for t in aten.convolution_backward.default(*backward)]
            found = [meta.strides for meta in propagate(aten.convolution_backward.default, described(backward), {})]
            if found != expected:
                wrong.append(f"{cin}, {cout}, {groups}, {size}, {batch}, {x_last}, {w_last}: {found} for {expected}")
    assert not wrong


def laid_out(shape: list[int], rng: random.Random) -> torch.Tensor:
    """A tensor whose dimensions lie in any order, some with gaps, some repeated."""
    order = rng.sample(range(len(shape)), len(shape))
    base = torch.ones([shape[d] * rng.choice((1, 1, 1, 2)) for d in order])
    x = base.permute([order.index(d) for d in range(len(shape))])[tuple(slice(n) for n in shape)]
    return x[:1].expand(shape) if rng.random() < 0.1 else x


def test_sizes_of_one() -> None:
    """Dimensions of one element have strides too, and ATen's kernels look at them in ways of their own."""
    rng, wrong = random.Random(0), []
    for _ in range(1500):
        x = laid_out([rng.choice((1, 1, 2, 3, 4)) for _ in range(rng.choice((2, 4, 4, 5)))], rng)
        dims = [rng.randrange(-x.dim(), x.dim()) for _ in range(rng.randint(0, 3))]
        index = [rng.choice((None, torch.zeros(rng.choice(((1,), (3,), (2, 1), (2, 3), ())), dtype=torch.int64))) for _ in x.shape]
        parameter = torch.ones(x.shape[1])
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (aten.roll.default, (x, [rng.randint(-5, 5) for _ in dims] or [3], dims)),
            (aten.angle.default, (torch.complex(x, x),)),
            (aten.log_sigmoid_backward.default, (x.bfloat16()[:1].expand_as(x), x.bfloat16(), torch.ones_like(x).bfloat16())),
            (aten._native_batch_norm_legit.no_stats, (x, parameter, parameter, True, 0.1, 1e-5)),
            (aten.index.Tensor, (x, [*index[:-1], torch.zeros(2, 1, dtype=torch.int64)])),
        ]
        for op, args in calls:
            expected, found = op(*args), propagate(op, described(args), {})
            expected, found = (expected[0], found[0]) if isinstance(expected, tuple) else (expected, found)
            steps = [(a, b) for a, b, n in zip(found.strides, expected.stride(), expected.shape, strict=True) if n > 1]
            if any(a != b for a, b in steps):
                wrong.append(f"{op} {tuple(x.shape)} {x.stride()}: {found.strides} for {expected.stride()}")
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("shape", [(1, 8, 5, 8), (2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 4), (2, 0, 3, 4)], ids=str)
def test_stack(shape: tuple[int, ...]) -> None:
    wrong = []
    for order in itertools.permutations(range(len(shape))):
        back = [order.index(d) for d in range(len(shape))]
        x = torch.ones([shape[d] for d in order]).permute(back)
        for dim in range(-len(shape) - 1, len(shape) + 1):
            expected = torch.stack([x, x, x], dim).stride()
            if (found := propagate(aten.stack.default, described(([x, x, x], dim)), {}).strides) != expected:
                wrong.append(f"{x.stride()} along {dim}: {found} for {expected}")
    assert not wrong


def test_equal_layouts_are_asked_for_once() -> None:
    from magneto.graph.layout import _iterator_strides, iterator_strides

    before = _iterator_strides.cache_info().misses
    assert {iterator_strides((7, 11, 13), [((7, 11, 13), (1, 7, 77)), ((13,), (1,))]) for _ in range(5)} == {(1, 7, 77)}
    assert _iterator_strides.cache_info().misses == before + 1


ON_CUDA: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "irfft of rfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x), n=1), (8, 5, 2, 1), (10, 1, 5, 5), (10, 2, 1)),
    "rfft2": (torch.fft.rfft2, (4096, 7), (7, 1), (1, 4096)),
    "fftn": (torch.fft.fftn, (9, 3, 3, 1), (9, 3, 1, 1), (1, 27, 9)),
    **{
        mode: (partial(torch.nn.functional.pad, pad=(1, 1, 1, 1), mode=mode), (2, 3, 4, 5), (60, 1, 15, 3), (126, 42, 7, 1))
        for mode in ("reflect", "replicate")
    },
    "roll": (lambda x: x.roll(1, 1), (2, 3, 4, 5), (60, 1, 15, 3), (60, 20, 5, 1)),
    "nonzero_static": (lambda x: torch.nonzero_static(x, size=3), (4, 5), (5, 1), (1, 3)),
    "logsigmoid": (torch.nn.functional.logsigmoid, (5, 8), (1, 5), (1, 5)),
    "pixel_shuffle": (lambda x: torch.nn.functional.pixel_shuffle(x, 2), (2, 8, 6, 4), (192, 1, 32, 8), (192, 96, 8, 1)),
    "pixel_unshuffle": (lambda x: torch.nn.functional.pixel_unshuffle(x, 2), (2, 8, 6, 4), (192, 1, 32, 8), (192, 6, 2, 1)),
    "a norm of ATen's": (
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        (5, 2, 3, 9),
        (54, 1, 18, 2),
        (54, 1, 18, 2),
    ),
}


@pytest.mark.parametrize("name", ON_CUDA)
def test_layouts_of_cuda(name: str) -> None:
    """What an H200 gave."""
    call, shape, strides, expected = ON_CUDA[name]
    found = fake_call(call, (TensorMeta(shape, strides, torch.float32, torch.device("cuda", 0)),)).value
    assert steps(found) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_statistics_of_a_layer_norm_on_cuda(dtype: torch.dtype) -> None:
    """They have the type in which they are computed: a gradient computed of rounded ones is a thousand times as far off where it cancels."""
    x = TensorMeta.contiguous((3, 4), dtype, torch.device("cuda", 0))
    found = propagate(aten.native_layer_norm.default, (x, [4], None, None, 1e-5), {})
    assert [one.dtype for one in found] == [dtype, *[torch.promote_types(dtype, torch.float32)] * 2]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float64, (36, 9, 3, 1)), (torch.float32, (36, 1, 12, 4))])
def test_convolutions_in_double_of_cuda(dtype: torch.dtype, expected: tuple[int, ...]) -> None:
    cuda = torch.device("cuda", 0)
    x, w = TensorMeta((2, 3, 4, 5), (60, 1, 15, 3), dtype, cuda), TensorMeta((4, 3, 2, 2), (12, 1, 6, 3), dtype, cuda)
    found = propagate(aten.convolution.default, (x, w, None, [1, 2], [0, 1], [1, 1], False, [0, 0], 1), {})
    assert found.strides == expected


@pytest.mark.parametrize(("groups", "shares"), [(1, True), (2, False), (4, True)])
def test_channels_that_stay_where_they_are_are_shuffled_in_place_on_cuda(groups: int, shares: bool) -> None:
    meta = TensorMeta.contiguous((2, 4, 3), torch.float32, torch.device("cuda", 0))
    found = fake_call(torch.nn.functional.channel_shuffle, (meta, groups))
    assert found.value.shape == meta.shape and bool(found.aliases) == shares


@pytest.mark.parametrize("op", [aten.bernoulli.default, aten.poisson.default], ids=str)
def test_draws_lie_in_rows(op: Any) -> None:
    x = torch.rand(3, 4).t()
    assert propagate(op, described((x,)), {}).strides == op(x).stride()
