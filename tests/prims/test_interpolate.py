"""Linear and cubic interpolation as loops: eager's results within rounding, for all ways to say how large the result is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto

MODES = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
WAYS: list[dict[str, Any]] = [
    {"scale_factor": 2}, {"scale_factor": 0.5}, {"scale_factor": 1.7}, {"scale_factor": 1.7, "recompute_scale_factor": True}, {"scale_factor": 1.1}, {"size": 5}, {"size": 12}, {"size": 1}, {"size": 23},
]  # fmt: skip


@pytest.mark.parametrize(("mode", "corners"), itertools.product(MODES, (False, True)), ids=str)
def test_results(mode: str, corners: bool) -> None:
    x = torch.randn(2, 3, *(12, 7, 5)[: MODES[mode]])
    for way, memory in itertools.product(WAYS, (torch.contiguous_format, torch.channels_last)):
        if memory is torch.channels_last and x.ndim != 4:
            continue
        given = (
            x.repeat(1, 1 if memory is torch.contiguous_format else 4, 1, 1)[: x.shape[0]].to(memory_format=memory) if x.ndim == 4 else x
        )

        def fn(x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x * 2, mode=mode, align_corners=corners, **way) + 1  # noqa: B023

        magneto.reset()
        found, expected, exact = magneto.compile(fn)(given), fn(given), fn(given.double())
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        error, eagers = ((t.double() - exact).abs().max().item() for t in (found, expected))
        assert error <= 2 * eagers + 1e-6, (way, error, eagers)
        assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 6, 9, dtype=dtype)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.5, mode="bilinear")

    found, expected, exact = magneto.compile(fn)(x), fn(x), fn(x.double())
    assert found.dtype is dtype
    error, eagers = ((t.double() - exact).abs().max().item() for t in (found, expected))
    assert error <= 2 * eagers + 16 * torch.finfo(torch.float64).eps


def test_gradients_and_what_is_around_are_one_graph() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(torch.relu(x), scale_factor=2, mode="bilinear", align_corners=False)
        return (F.interpolate(y, size=(5, 5), mode="bicubic") * y[..., :5, :5]).sum()

    plain, ours = (torch.linspace(-1, 2, 2 * 3 * 4 * 6).reshape(2, 3, 4, 6).requires_grad_() for _ in range(2))
    fn(plain).backward()
    magneto.compile(fn)(ours).backward()
    assert torch.allclose(ours.grad, plain.grad, 1e-5, 1e-6)  # type: ignore[arg-type]
    assert magneto.stats()["graphs"] == 1


def test_infinite_numbers_spread_as_in_eager() -> None:
    x = torch.randn(1, 1, 6, 6)
    x[0, 0, 2, 3], x[0, 0, 5, 0], x[0, 0, 1, 1] = torch.inf, torch.nan, -torch.inf
    for way in (
        {"scale_factor": 2},
        {"scale_factor": 4},
        {"size": (6, 12)},
        {"size": (6, 6)},
        {"size": (11, 11), "align_corners": True},
        {"size": (3, 3)},
    ):

        def fn(x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x, mode="bilinear", **way)  # type: ignore[arg-type]  # noqa: B023

        magneto.reset()
        found, expected = magneto.compile(fn)(x), fn(x)
        assert torch.equal(found.isnan(), expected.isnan()), way
        assert torch.allclose(found, expected, 1e-5, 1e-6, equal_nan=True), way


@pytest.mark.parametrize("corners", [False, True])
def test_places_beyond_32_bits(corners: bool) -> None:
    """99,991 elements and 200,000 have no factor in common: places in 32 bits would be others."""
    x = torch.randn(1, 1, 99_991)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=200_000, mode="linear", align_corners=corners)

    found, expected, exact = magneto.compile(fn)(x), fn(x), fn(x.double())
    error, eagers = ((t.double() - exact).abs().max().item() for t in (found, expected))
    assert error <= 2 * eagers + 1e-6


def test_channels_side_by_side_stay_so() -> None:
    """Vectors run along channels, no index is divided by them, and nothing goes through memory between the two dimensions."""
    x = torch.randn(2, 16, 20, 20).to(memory_format=torch.channels_last)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    compiled = magneto.compile(fn)
    assert torch.allclose(compiled(x), fn(x), 1e-5, 1e-6)
    kernels = "\n".join(magneto.inspect(compiled).kernels)
    assert kernels.count("index_select mul add") == 1
    assert "% 16" not in kernels
    assert "/ 16)" not in kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("corners", [False, True])
def test_images_of_half_types_are_loops_where_rows_lie_together(dtype: torch.dtype, corners: bool) -> None:
    """The library's kernel stays where channels lie side by side."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=corners)

    for memory, loops in ((torch.contiguous_format, True), (torch.channels_last, False)):
        magneto.reset()
        x = torch.randn(2, 16, 9, 11).to(dtype).to(memory_format=memory)
        compiled = magneto.compile(fn)
        found, expected, exact = compiled(x), fn(x), fn(x.double())
        assert found.stride() == expected.stride()
        assert (found - exact).abs().max() <= 1.5 * (expected - exact).abs().max()
        assert ("index_select" in "\n".join(magneto.inspect(compiled).kernels)) == loops
