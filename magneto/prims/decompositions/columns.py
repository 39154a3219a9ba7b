"""Decompositions of `F.unfold` (windows side by side: each element is looked up) and `F.fold` (per element the sum of what the few windows around it have there). Each is the other's
gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import FLOATS, LIBRARY, stored_number
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

MOST_OPERATIONS = 60  # per element: longer sums than this do not fit one loop


def _count(inputs: int, size: int, dilation: int, pad: int, step: int) -> int:
    """How many windows there are along a dimension."""
    return (inputs + 2 * pad - dilation * (size - 1) - 1) // step + 1


@row("im2col.default")
def _unfold(b: Builder, x: Value, size: Sequence[int], dilation: Sequence[int], pad: Sequence[int], step: Sequence[int]) -> Any:
    if not x.numel() or not (x.dtype in FLOATS or x.dtype is torch.bool):
        return LIBRARY
    lead, both = x.ndim - 2, range(2)
    counts = [_count(x.shape[lead + d], size[d], dilation[d], pad[d], step[d]) for d in both]
    around = (*[0] * lead, *pad)
    x = b.emit("pad", x, around, around, stored_number(0, x.dtype)) if any(pad) else x
    for d in both:
        shape = (size[d], counts[d])
        first, tap = b.iota(counts[d], device=x.device) * step[d], b.iota(size[d], device=x.device) * dilation[d]
        x = b.emit("index_select", x, lead + 2 * d, first.along(shape, (1,)) + tap.along(shape, (0,)))
    x = x.transpose((*range(lead), lead, lead + 2, lead + 1, lead + 3))
    return x.reshape((*x.shape[: lead - 1], x.shape[lead - 1] * math.prod(size), math.prod(counts)))


@row("col2im.default")
def _fold(
    b: Builder, x: Value, inputs: Sequence[int], size: Sequence[int], dilation: Sequence[int], pad: Sequence[int], step: Sequence[int]
) -> Any:
    both = range(2)
    terms, dtype = [-(-k // s) for k, s in zip(size, step, strict=True)], compute_type(x.dtype)
    uneven = [t * s - k for t, s, k in zip(terms, step, size, strict=True)]
    if not x.numel() or x.dtype not in FLOATS or any(dilation[d] > 1 and step[d] > 1 for d in both):
        return LIBRARY
    if math.prod(terms) * (2 + any(uneven) + (dtype is not x.dtype)) > MOST_OPERATIONS:
        return LIBRARY
    counts = [_count(inputs[d], size[d], dilation[d], pad[d], step[d]) for d in both]
    apart = x.to(dtype).reshape((*x.shape[:-2], x.shape[-2] // math.prod(size), *size, *counts))
    lead = x.ndim - 1  # dimensions in front of the windows'
    apart = _padded(b, apart, [0] * apart.ndim, [0] * lead + uneven + [0, 0])
    steps = [-(-(inputs[d] + pad[d]) // step[d]) for d in both]
    total: Value | None = None
    for turn in itertools.product(*map(range, terms)):
        part, at = apart, [turn[d] * dilation[d] for d in both]
        for d in both:
            part = part.narrow(lead + d, turn[d] * step[d], (turn[d] + 1) * step[d]).narrow(lead + 2 + d, 0, max(steps[d] - at[d], 0))
        part = part.transpose((*range(lead), lead + 2, lead, lead + 3, lead + 1))
        after = [max(steps[d] - at[d] - part.shape[lead + 2 * d], 0) for d in both]
        before = [steps[d] - after[d] - part.shape[lead + 2 * d] for d in both]
        part = _padded(b, part, [0] * lead + [before[0], 0, before[1], 0], [0] * lead + [after[0], 0, after[1], 0])
        part = part.reshape((*part.shape[:lead], steps[0] * step[0], steps[1] * step[1]))
        for d in both:
            part = part.narrow(lead + d, pad[d], pad[d] + inputs[d])
        total = part + 0.0 if total is None else total + part
    assert total is not None
    return total.to(x.dtype)


def _padded(b: Builder, x: Value, low: Sequence[int], high: Sequence[int]) -> Value:
    return b.emit("pad", x, tuple(low), tuple(high), 0.0) if any(low) or any(high) else x
