"""Tensors of many layouts and dtypes for tables of operations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
BOOL = (torch.bool,)


def values(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, special: bool = True) -> torch.Tensor:
    """Contiguous reproducible values; floats contain nan, infinities and both zeros where there is room."""
    generator = torch.Generator().manual_seed(seed + 17 * len(shape) + math.prod(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if not dtype.is_floating_point:
        low = 0 if dtype is torch.uint8 else -7
        return torch.randint(low, 8, tuple(shape), generator=generator).to(dtype)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * 2
    if special and x.numel() >= 12:
        x.view(-1)[:6] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0], dtype=torch.float64)
    return x.to(dtype)


def permuted(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The same values, with dimension order[-1] innermost in memory."""
    return x.permute(*order).contiguous().permute(*[list(order).index(d) for d in range(x.ndim)])


def spaced(x: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between the elements."""
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] * 2), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def single_layouts(dtype: torch.dtype, special: bool = True) -> list[torch.Tensor]:
    """One operand in many layouts."""
    base = values((2, 3, 4, 5), dtype, 1, special)
    return [
        values((7, 3), dtype, 2, special),
        values((), dtype, 3),
        values((0, 3), dtype, 4),
        values((1,), dtype, 5),
        permuted(base, (0, 2, 3, 1)),
        permuted(base, (3, 1, 0, 2)),
        spaced(values((4, 6), dtype, 6, special)),
        values((3, 1), dtype, 7, special).expand(3, 4),
        values((5, 4), dtype, 8, special).t(),
        values((6, 5), dtype, 9, special)[1:4, 2:],
    ]


def pair_layouts(dtype: torch.dtype, other: torch.dtype, special: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two operands that broadcast, in many layouts."""

    def a(*shape: int) -> torch.Tensor:
        return values(shape, dtype, 11, special)

    def b(*shape: int) -> torch.Tensor:
        return values(shape, other, 12, special)

    return [
        (a(4, 5), b(4, 5)),
        (a(4, 5), b(5)),
        (a(3, 1, 5), b(4, 1)),
        (a(4, 5), b()),
        (a(), b(4, 5)),
        (a(0, 5), b(1, 5)),
        (permuted(a(2, 3, 4, 5), (0, 2, 3, 1)), b(2, 3, 4, 5)),
        (a(2, 3, 4, 5), permuted(b(2, 3, 4, 5), (0, 2, 3, 1))),
        (permuted(a(2, 3, 4, 5), (0, 2, 3, 1)), permuted(b(2, 3, 4, 5), (0, 2, 3, 1))),
        (permuted(a(2, 3, 4, 5), (0, 2, 3, 1)), b(3, 1, 1)),
        (a(5, 4).t(), b(4, 5)),
        (a(5, 4).t(), b(5, 4).t()),
        (spaced(a(4, 6)), b(4, 6)),
        (a(1, 5).expand(4, 5), b(4, 1).expand(4, 5)),
        (a(), b()),
    ]
