"""Decompositions of linear and cubic interpolation (`F.interpolate`): per element of the result, the few elements of the input around its place, looked up and weighted.

Places and weights are those of the library's kernels, computed in the loops. Gradients are the library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto.graph.promotion import compute_type
from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

_A = -0.75  # of the cubic convolution, as in the library
MOST = 1 << 31  # of whole numbers in places: loops may count with 32 bits
VECTOR = 8  # channels side by side, at least, for which the sums of one dimension are not put into memory, on a CPU
Tap = tuple[Value, Value]
"""Which elements along a dimension, and their weights."""


class _Dimension:
    """One dimension that is interpolated: results lie at places of the input, counted from its first element."""

    def __init__(self, b: Builder, x: Value, inputs: int, outputs: int, corners: bool, factor: float | None) -> None:
        self.b, self.inputs, self.outputs, self.corners, self.factor = b, inputs, outputs, corners, factor
        self.dtype, self.device = compute_type(x.dtype), x.device
        self.exact = (corners or not factor or inputs * factor == outputs) and 2 * inputs * outputs < MOST

    def _steps(self) -> Value:
        return self.b.iota(self.outputs, torch.int64, self.device)

    def places(self, least: int | None) -> Tap:
        """The elements at or ahead of the places (which are not less than `least`), and how far behind these they lie."""
        if not self.exact:
            place = self._steps().to(self.dtype)
            if self.corners:
                place = place * ((self.inputs - 1) / max(self.outputs - 1, 1))
            else:
                place = (place + 0.5) * (1.0 / self.factor if self.factor else self.inputs / self.outputs) - 0.5
            place = place if least is None else place.maximum(float(least))
            below = place.unary("floor")
            return below.to(torch.int64), place - below
        # quotients of whole numbers: no number of the run says which elements these are, so the loops know that they are there
        if self.corners:
            times, plus, divisor = (self.inputs - 1, 0, self.outputs - 1) if self.outputs > 1 else (0, 0, 1)
        else:
            times, plus, divisor = 2 * self.inputs, self.inputs - self.outputs, 2 * self.outputs
        shared = math.gcd(times, plus, divisor)
        times, plus, divisor = times // shared, plus // shared, divisor // shared
        place = self._steps() * times + plus
        place = place if least is None else place.maximum(least)
        index = self.b.emit("floordiv", place, divisor)
        return index, (place - index * divisor).to(self.dtype) * (1.0 / divisor)

    def inside(self, index: Value) -> Value:
        return index.maximum(0).minimum(self.inputs - 1)

    def linear(self) -> list[Tap]:
        if self.inputs == self.outputs and self.device.type == "cpu":  # as they are, whatever the factor
            one = self.b.full((self.outputs,), 1.0, self.dtype, self.device)
            return [(self._steps(), one), (self._steps(), one * 0.0)]
        index, part = self.places(0)
        return [(self.inside(index), 1.0 - part), (self.inside(index + 1), part)]

    def cubic(self) -> list[Tap]:
        index, part = self.places(None)
        rest = 1.0 - part
        weights = (_outer(part + 1.0), _inner(part), _inner(rest), _outer(rest + 1.0))
        return [(self.inside(index + (k - 1)), weight) for k, weight in enumerate(weights)]


def _inner(t: Value) -> Value:
    return ((_A + 2) * t - (_A + 3)) * t * t + 1.0


def _outer(t: Value) -> Value:
    return ((_A * t - 5 * _A) * t + 8 * _A) * t - 4 * _A


def _weighted(x: Value, axis: int, taps: Sequence[Tap], then: Sequence[Sequence[Tap]] = ()) -> Value:
    """`then`: the taps of the dimensions behind it, which are weighted first, for each of these taps anew."""
    total = None
    for index, weight in taps:
        value = x.b.emit("index_select", x, axis, index)
        if then:
            value = _weighted(value, axis + 1, then[0], then[1:])
        part = value * weight.along(value.shape, (axis,))
        total = part if total is None else total + part
    assert total is not None
    return total


def _pays(x: Value, dims: int) -> bool:
    """On a CPU: the library's kernel for half types that lie channels-last is the faster one."""
    return dims != 2 or x.dtype in (torch.float32, torch.float64) or not _channels_last(x)


def _channels_last(x: Value) -> bool:
    """On a CPU: what stands between two dimensions lies as `x` does, channels side by side."""
    strides = x.meta.strides
    return x.device.type == "cpu" and x.ndim > 2 and x.shape[1] > 1 and strides[1] == 1 and strides[-1] == x.shape[1]


def _at_once(x: Value) -> bool:
    """On a GPU: one loop over all dimensions. What is read again comes from the cache, while the sums of one dimension would go through memory."""
    return x.device.type == "cuda"


def _interpolated(dims: int, taps: Callable[[_Dimension], list[Tap]]) -> tuple[Any, Any]:
    def made(b: Builder, x: Value, size: Sequence[int], corners: bool, factors: Sequence[float | None]) -> Any:
        if not x.numel() or not x.dtype.is_floating_point or min(size) <= 0:
            return LIBRARY
        lead = x.ndim - dims
        if x.device.type == "cuda" and x.shape[lead:] == tuple(size):  # copied there
            return LIBRARY
        result, along = (
            x.to(compute_type(x.dtype)),
            [_Dimension(b, x, x.shape[lead + d], size[d], corners, factors[d]) for d in range(dims)],
        )
        if x.device.type == "cpu" and taps is _Dimension.linear and not (all(one.exact for one in along) and _pays(x, dims)):
            return LIBRARY
        found = [taps(one) for one in along]
        if _at_once(x):
            return _weighted(result, lead, found[0], found[1:]).to(x.dtype)
        order = (0, *range(2, x.ndim), 1) if _channels_last(x) else tuple(range(x.ndim))
        result = result.transpose(order)
        if _channels_last(x) and len(found) == 2 and taps is _Dimension.linear and x.shape[1] >= VECTOR:
            return _weighted(result, 1, found[0], found[1:]).transpose([order.index(d) for d in range(x.ndim)]).to(x.dtype)
        for d, these in enumerate(found):
            result = _weighted(result, order.index(lead + d), these)
        return result.transpose([order.index(d) for d in range(x.ndim)]).to(x.dtype)

    def with_size(b: Builder, x: Value, size: Sequence[int], corners: bool, *factors: float | None) -> Any:
        return made(b, x, size, corners, [*factors, *[None] * (dims - len(factors))])

    def with_factors(b: Builder, x: Value, size: Sequence[int] | None, corners: bool, factors: Sequence[float] | None) -> Any:
        if size is None:
            assert factors is not None
            size = [int(s * f) for s, f in zip(x.shape[-dims:], factors, strict=True)]
        return made(b, x, size, corners, factors or [None] * dims)

    return with_size, with_factors


for _dims, _name, _taps in (
    (1, "upsample_linear1d", _Dimension.linear),
    (2, "upsample_bilinear2d", _Dimension.linear),
    (3, "upsample_trilinear3d", _Dimension.linear),
    (2, "upsample_bicubic2d", _Dimension.cubic),
):
    ROWS[f"aten.{_name}.default"], ROWS[f"aten.{_name}.vec"] = _interpolated(_dims, _taps)
