"""Decomposition of `F.grid_sample` of images on a GPU: per element of the result, the element at its place or the four around it, looked up and weighted. The gradient is the library's."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions import pooling
from magneto.prims.decompositions.rows import FLOATS, LIBRARY
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

BILINEAR, NEAREST = 0, 1
ZEROS, BORDER = 0, 1  # what lies beyond the edges
MOST = 1 << 31  # elements of an image: places have 32 bits

Neighbour = tuple[Value, Value, Value | None]
"""Along one dimension: which element, whether it is one of the image, and its weight (None: 1)."""


def _place(place: Value, size: int, padding: int, corners: bool) -> Value:
    """In elements, counted from the first; what is no number lies at the border or, with zeros there, nowhere."""
    place = place.to(compute_type(place.dtype)) + 1.0
    place = place * 0.5 * float(size - 1) if corners else (place * float(size) - 1.0) * 0.5
    return place if padding == ZEROS else (place > 0.0).where(place, 0.0).minimum(float(size - 1))


def _neighbours(place: Value, size: int, nearest: bool) -> list[Neighbour]:
    first = place.unary("round" if nearest else "floor")
    inside = (first >= 0.0) & (first <= float(size - 1))
    if nearest:
        return [(inside.where(first, 0.0).to(torch.int32), inside, None)]
    second = first + 1.0
    within = (first >= -1.0) & (first <= float(size - 2))
    return [
        (inside.where(first, 0.0).to(torch.int32), inside, second - place),
        (within.where(second, 0.0).to(torch.int32), within, place - first),
    ]


@row("grid_sampler_2d.default")
def _grid_sampler(b: Builder, x: Value, grid: Value, mode: int, padding: int, corners: bool) -> Any:
    if not pooling.on_gpu(x) or x.dtype not in FLOATS or grid.dtype is not x.dtype:
        return LIBRARY
    if mode not in (BILINEAR, NEAREST) or padding not in (ZEROS, BORDER):
        return LIBRARY
    (count, channels, height, width), (rows, columns) = x.shape, grid.shape[1:3]
    if not x.numel() or not grid.numel() or height * width >= MOST:
        return LIBRARY
    pixels, shape = x.reshape((count, channels, height * width)), (count, channels, rows * columns)

    def neighbours(along: int, size: int) -> list[Neighbour]:
        """For each channel anew, so that all is one loop."""
        place = grid.narrow(3, along, along + 1).reshape((count, rows * columns)).along(shape, (0, 2))
        return _neighbours(_place(place, size, padding, corners), size, mode == NEAREST)

    total: Value | None = None
    for (y, beside_y, weight_y), (x_, beside_x, weight_x) in itertools.product(neighbours(1, height), neighbours(0, width)):
        part = b.emit("gather", pixels, 2, y * width + x_).to(compute_type(x.dtype))
        part = part if weight_x is None or weight_y is None else part * (weight_x * weight_y)
        part = (beside_x & beside_y).where(part, 0.0)
        total = part if total is None else total + part
    assert total is not None
    return total.to(x.dtype).reshape((count, channels, rows, columns))
