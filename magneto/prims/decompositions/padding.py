"""Decompositions of pads that repeat or mirror elements of the edge: each element is looked up at a place computed of its index. Gradients are sums of what comes back from the few
elements that one became. (Circular pads arrive as concatenations, `graph/ways.py`.)"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import FLOATS, INTEGERS, LIBRARY
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

MOST_IMAGES = {"cuda": 27, "cpu": 9}  # of one element: the library is faster than longer sums

Pair = tuple[int, int]
Image = tuple[int, int, bool, int]
"""Elements first, ..., last - 1 of a padded dimension are elements of the input from there on, mirrored or not."""


def _reflected(place: Value, size: int, pad: Pair) -> Value:
    before, after = pad
    place = place.unary("abs") if before > 0 else place
    return (size - 1) - ((size - 1) - place).unary("abs") if after > 0 else place


def _replicated(place: Value, size: int, pad: Pair) -> Value:
    before, after = pad
    place = place.maximum(0) if before > 0 else place
    return place.minimum(size - 1) if after > 0 else place


def _mirrors(size: int, before: int, after: int) -> list[Image]:
    return [(0, before, True, 1), (before + size, before + size + after, True, size - 1 - after)]


def _copies(size: int, before: int, after: int) -> list[Image]:
    last = before + size
    return [(k, k + 1, False, 0) for k in range(before)] + [(k, k + 1, False, size - 1) for k in range(last, last + after)]


def _pairs(pad: Sequence[int]) -> list[Pair]:
    """What stands before and after, from the first of the padded dimensions on."""
    return [(pad[k], pad[k + 1]) for k in range(len(pad) - 2, -1, -2)]


def _padded(places: Callable[[Value, int, Pair], Value]) -> Any:
    def forward(b: Builder, x: Value, pad: Sequence[int]) -> Any:
        pairs = _pairs(pad)
        if not x.numel() or not pays(x):
            return LIBRARY
        for dim, pair in enumerate(pairs, x.ndim - len(pairs)):
            size, (before, after) = x.shape[dim], pair
            if before or after:
                place = b.iota(size + before + after, torch.int64, x.device)
                x = b.emit("index_select", x, dim, places(place - before if before else place, size, pair))
        return x

    return forward


def _returned(images: Callable[[int, int, int], list[Image]]) -> Any:
    def backward(b: Builder, grad: Value, x: Value, pad: Sequence[int]) -> Any:
        pairs = _pairs(pad)
        lead = x.ndim - len(pairs)
        if not x.numel() or x.dtype not in FLOATS or min(pad) < 0 or not pays(x):
            return LIBRARY
        along = [
            [(before, before + size, False, 0)] + [image for image in images(size, before, after) if image[0] < image[1]]
            for size, (before, after) in zip(x.shape[lead:], pairs, strict=True)
        ]
        if math.prod(map(len, along)) > MOST_IMAGES.get(x.device.type, 0):
            return LIBRARY
        wide = grad.to(compute_type(grad.dtype))
        total: Value | None = None
        for image in itertools.product(*along):
            part = _part(b, wide, x.shape, image, lead)
            total = part if total is None else total + part
        assert total is not None
        return total.to(grad.dtype)

    return backward


def _part(b: Builder, grad: Value, shape: Sequence[int], image: Sequence[Image], lead: int) -> Value:
    """What comes back from one image, in its place between zeros."""
    low, high = [0] * len(shape), [0] * len(shape)
    for dim, (first, last, _, at) in enumerate(image, lead):
        grad = grad.narrow(dim, first, last)
        low[dim], high[dim] = at, shape[dim] - at - (last - first)
    mirrored = tuple(dim for dim, (_, _, mirrored, _) in enumerate(image, lead) if mirrored)
    grad = b.emit("flip", grad, mirrored) if mirrored else grad
    return b.emit("pad", grad, tuple(low), tuple(high), 0.0) if any(low) or any(high) else grad


def pays(x: Value) -> bool:
    """On a CPU: vectors of numbers of less than 32 bits lie side by side."""
    if x.device.type == "cuda":
        return x.dtype in FLOATS
    return x.dtype in FLOATS | INTEGERS and (x.dtype.itemsize >= 4 or x.meta.strides[-1] != 1)


for _dims in (1, 2, 3):
    for _name, _places, _images in (("reflection", _reflected, _mirrors), ("replication", _replicated, _copies)):
        ROWS[f"aten.{_name}_pad{_dims}d.default"] = _padded(_places)
        ROWS[f"aten.{_name}_pad{_dims}d_backward.default"] = _returned(_images)

SUMS = frozenset(name for name in ROWS if "backward" in name)
