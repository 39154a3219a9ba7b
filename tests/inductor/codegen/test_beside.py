"""Rows whose elements lie in few places side by side are walked together, and what depends on rows alone is computed ahead."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import magneto

Function = Callable[..., torch.Tensor]


def images(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size).to(dtype).to(memory_format=torch.channels_last)


def compiled(function: Function, *inputs: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The result and the kernels' text; strides and dtype are eager's."""
    call = magneto.optimize("inductor", nopython=True)(function)
    with torch.no_grad():
        ours, eager = call(*inputs), function(*inputs)
    assert ours.stride() == eager.stride() and ours.dtype is eager.dtype
    return ours, "".join(magneto.inspect(call).kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("channels", "groups", "side"), [(128, 32, 16), (320, 32, 9), (96, 32, 5), (24, 8, 33), (64, 2, 12), (40, 4, 6)])
def test_group_norms(channels: int, groups: int, side: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = images(2, channels, side, side, dtype=dtype) * 3 + 1, torch.rand(channels).to(dtype), torch.randn(channels).to(dtype)

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(x, groups, w, b))

    ours, text = compiled(norm, x, w, b)
    exact = norm(x.double(), w.double(), b.double())
    error, allowed = ((t.double() - exact).abs().max() for t in (ours, norm(x, w, b)))
    assert error <= 2 * allowed + (1e-13 if dtype is torch.float64 else 1e-6)
    if (channels // groups) < 16:
        assert f"j1 < {channels // groups};" not in text, "a loop over the channels of one group"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "groups"), [(128, 32), (320, 32), (64, 2), (30, 10)])
def test_gradients_of_group_norms(channels: int, groups: int, dtype: torch.dtype) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return (F.group_norm(x, groups, w, b) * g).sum()

    torch.manual_seed(0)
    values = [images(2, channels, 9, 9), torch.rand(channels), torch.randn(channels), images(2, channels, 9, 9)]
    grads = []
    for call, kind in ((loss, torch.float64), (loss, dtype), (magneto.optimize("inductor", nopython=True)(loss), dtype)):
        x, w, b, g = (v.to(dtype).to(kind).requires_grad_() for v in values)
        call(x, w, b, g).backward()
        assert x.grad is not None and x.grad.stride() == x.stride()
        grads.append((x.grad, w.grad, b.grad))
    for exact, eager, ours in zip(*grads, strict=True):
        assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-5  # type: ignore[operator,union-attr]


GROUPED: dict[str, Function] = {
    "sum": lambda x: x.sum(2),
    "amax": lambda x: x.amax(2) - x.amin(2),
    "any": lambda x: (x > 2).any(2),
    "all": lambda x: (x > -3).all(2),
    "log of sums": lambda x: x.float().logsumexp(2),
    "softmax": lambda x: x.float().softmax(2),
    "integers": lambda x: (x * 4).to(torch.int64).sum(2),
    "against the mean": lambda x: (x - x.float().mean(2, True)).abs().amax(2),
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("channels", [2, 3, 4, 10, 33])
def test_reductions_of_few_channels_each(name: str, channels: int) -> None:
    def grouped(x: torch.Tensor) -> torch.Tensor:
        return GROUPED[name](x.reshape(2, 12, -1))

    torch.manual_seed(0)
    x = images(2, 12 * channels, 7, 7)
    torch.testing.assert_close(compiled(grouped, x)[0], grouped(x), rtol=1e-5, atol=1e-5)
    x[1, 3, 2, 5] = torch.nan
    if name != "integers":
        torch.testing.assert_close(compiled(grouped, x)[0], grouped(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_sums_of_each_channel_with_a_number_of_its_group() -> None:
    def sums(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (x.view(3, 16, 5, 8, 8) - m.view(3, 16, 1, 1, 1)).abs().sum((3, 4))

    x, m = images(3, 80, 8, 8), torch.randn(3, 16)
    ours, text = compiled(sums, x, m)
    torch.testing.assert_close(ours, sums(x, m))
    assert "/ 5" in text and not re.search(r"\(i32\)j1 / 5", text), "divided for every element"


def scaled(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return x * (m * 2 - m.abs() + m * m - 0.5)


POINTWISE: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "groups": (lambda x, m: x.view(2, 8, 6, 20, 20) * m.view(2, 8, 1, 1, 1), (images(2, 48, 20, 20), torch.randn(2, 8))),
    "groups of 32": (lambda x, m: scaled(x.view(2, 2, 32, 9, 9), m.view(2, 2, 1, 1, 1)), (images(2, 64, 9, 9), torch.randn(2, 2))),
    "gates": (lambda x, m: scaled(x, m[:, None]), (torch.randn(4, 70, 33), torch.randn(4, 33))),
    "short gates": (lambda x, m: scaled(x, m[:, None]), (torch.randn(4, 70, 17), torch.randn(4, 17))),
    "halves": (lambda x, m: scaled(x, m[:, None]), (torch.randn(4, 70, 33).half(), torch.randn(4, 33).half())),
    "places": (lambda x, p: x ^ ((p * 3 + 1 & 5 | p) - 2)[:, None], (torch.randint(9, (4, 70, 33)), torch.randint(1, 99, (4, 33)))),
    "twice": (lambda x, m: scaled(x, m) + scaled(x + 1, m), (torch.randn(50, 5, 64), torch.randn(64))),
    "large": (lambda x, m: scaled(x, m[:, None]), (torch.randn(2, 3000, 512), torch.randn(2, 512))),
    "large bfloat16": (lambda x, m: scaled(x, m[:, None]), (torch.randn(2, 3000, 1000).bfloat16(), torch.randn(2, 1000).bfloat16())),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_what_is_repeated_is_computed_once(name: str) -> None:
    function, inputs = POINTWISE[name]
    call = magneto.optimize("inductor", nopython=True)(function)
    with torch.no_grad():
        ours, eager = call(*inputs), function(*inputs)
    torch.testing.assert_close(ours, eager)
    text = "".join(magneto.inspect(call).kernels)
    assert re.search(r"\bv\d+\[j0\] = ", text), "nothing is computed ahead"
