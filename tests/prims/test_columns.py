"""`F.unfold` and `F.fold` are loops, and each is the other's gradient: eager's numbers for all windows, layouts and types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.prims.decompose import decompose
from tests.compare import same
from tests.prims.test_decompose import Recorder, targets

aten = torch.ops.aten
WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1}, {"kernel_size": 2, "stride": 2}, {"kernel_size": (2, 3), "stride": (3, 2), "padding": (1, 0)}, {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "dilation": (2, 3), "padding": (0, 2)}, {"kernel_size": 2, "stride": 3, "padding": 1}, {"kernel_size": (5, 1), "stride": (2, 1), "padding": (4, 0)}, {"kernel_size": 1},
    {"kernel_size": 2, "dilation": 2, "stride": 2, "padding": 1}, {"kernel_size": (1, 4), "stride": (4, 1), "padding": 3},
]  # fmt: skip


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """In rows, channels-last, with gaps, and without a batch; with a zero of either sign."""
    x = torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, :2] = torch.tensor([[0.0], [-0.0]], dtype=dtype)
    return [x, x.to(memory_format=torch.channels_last), torch.stack([x, x], -1)[..., 0], x[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_windows_side_by_side(dtype: torch.dtype) -> None:
    for x in inputs(dtype):
        magneto.reset()
        same(fn := lambda x: [F.unfold(x, **way) for way in WINDOWS], magneto.compile(fn), x)
        assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_of_windows_and_gradients(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.fold(F.unfold(x.sin(), **way) * 2, (8, 7), **way) for way in WINDOWS]

    for x in inputs(dtype)[1::2]:
        magneto.reset()
        given = [x.detach().to(t).requires_grad_() for t in (dtype, dtype, torch.float64)]
        results = []
        for f, one in zip((fn, magneto.compile(fn), fn), given, strict=True):
            sums = f(one)
            results.append([*sums, *(torch.autograd.grad(y.square().sum(), one, retain_graph=True)[0] for y in sums)])
        for n, (plain, ours, exact) in enumerate(zip(*results, strict=True)):
            assert ours.dtype is plain.dtype and ours.stride() == plain.stride()
            error, eagers = ((t.double() - exact).abs().max().item() for t in (ours, plain))
            slack = {torch.float64: 1e-14, torch.float32: 2e-7}.get(dtype, 2e-3) * (1 + exact.abs().max().item())
            assert error <= 2 * eagers + slack, (WINDOWS[n % len(WINDOWS)], x.stride(), error, eagers)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
@pytest.mark.filterwarnings("ignore:.W104")
def test_other_types(dtype: torch.dtype) -> None:
    x = inputs(torch.float32)[0].to(dtype)
    for fn in (lambda x: F.unfold(x, 2), lambda x: F.fold(x.flatten(2)[:, :2, :9].repeat(1, 2, 1), (4, 4), 2)):
        same(fn, magneto.compile(fn), x)


@pytest.mark.parametrize(
    ("way", "loops"),
    [(([3, 3], [1, 1], [1, 1], [1, 1]), True), (([7, 5], [1, 1], [3, 2], [1, 1]), False), (([2, 2], [2, 2], [1, 1], [2, 2]), False)],
)
def test_only_short_sums_are_loops(way: tuple[Any, ...], loops: bool) -> None:
    r = Recorder(aten.im2col(inputs(torch.float32)[0], *way))
    graph = decompose(r.output(r(aten.col2im.default, r.nodes[0], [8, 7], *way)))
    r.check(graph)
    assert ("aten.col2im.default" not in targets(graph)) == loops


def test_what_is_costly_is_computed_once() -> None:
    """Not for each window that an element lies in."""
    compiled = magneto.compile(fn := lambda x: F.unfold(F.gelu(x), 3, padding=1) * 2)
    x = inputs(torch.float32)[0]
    same(fn, compiled, x, tolerance=1e-6)
    texts = "".join(kernel for entry in magneto.inspect(compiled).entries for kernel in entry.kernels)
    assert texts.count("p0[") >= 1 and len([k for entry in magneto.inspect(compiled).entries for k in entry.kernels]) == 2


WRONG = {
    "no window": lambda x: F.unfold(x, 20),
    "of size 0": lambda x: F.unfold(x, 0),
    "another number of windows": lambda x: F.fold(x.flatten(2), (5, 5), 3),
    "channels": lambda x: F.fold(x.flatten(2), (9, 8), 2),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:.W104")
def test_eagers_errors(name: str) -> None:
    same(WRONG[name], magneto.compile(WRONG[name]), inputs(torch.float32)[0])
