"""Maxima of small windows and which element they are, written out: one load and two choices for each element of a window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch

from magneto.inductor.loops.ir import Const, Value
from magneto.inductor.lower.box import Box, Computed, Index, cost_of
from magneto.inductor.lower.context import Lowering, merge_origins
from magneto.inductor.lower.values import constant, convert, index_value, make_masked, make_op
from magneto.symbolic import ZERO, Expr, add, compare, conj, floordiv, maximum, mul

Shape = Sequence[int]


def lower_window(which: int, low: Lowering, val: Any, x: Box, size: Shape, step: Shape, pad: Shape, dilation: Shape, count: Shape) -> Box:
    """The maximum (`which` 0), or its place among the elements of the window (1). What is computed ahead for the windows alone is computed for each of their elements where that reads no more than the
    result (`settle` has put anything else into memory). Both bodies share their parts and go to memory at once, so that one kernel computes both."""
    lead = len(x.shape) - len(size)
    lowest = constant(-inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min, x.dtype)

    def fn(index: Index) -> Value:
        before = tuple(index[:lead])
        begin = [add(mul(i, s), -p) for i, s, p in zip(index[lead:], step, pad, strict=True)]
        best: Value = lowest
        place: Value = Const(0, torch.int32)
        for number, at in enumerate(itertools.product(*map(range, size))):
            where = tuple([add(b, k * d) for b, k, d in zip(begin, at, dilation, strict=True)])
            inside = [c for i, s in zip(where, x.shape[lead:], strict=True) for c in (compare("ge", i, 0), compare("lt", i, s))]
            tap = make_masked(conj(*inside), lambda at=(*before, *where): x.load(at), lambda: lowest)  # type: ignore[misc]
            if number == 0:
                best, place = tap, convert(index_value(_first_inside(begin, size, dilation), torch.int64), torch.int32)
                continue
            taken = make_op("gt", (tap, best), torch.bool)
            if x.dtype.is_floating_point:
                taken = make_op("bitwise_or", (taken, make_op("isnan", (tap,), torch.bool)), torch.bool)
            best = make_op("where", (taken, tap, best), x.dtype)
            place = make_op("where", (taken, Const(number, torch.int32), place), torch.int32)
        return (best, convert(place, torch.int8))[which]

    ops, heavy, origins = cost_of(x)
    taps = 1
    for k in size:
        taps *= k
    made = Computed(
        fn, val.shape, val.strides, val.dtype, x.device, x.reads, merge_origins(origins, low.origins), taps * (ops + 3), taps * heavy
    )
    return low.realise(made)


def _first_inside(begin: Sequence[Expr], size: Shape, dilation: Shape) -> Expr:
    """Which element of the window is the first that lies in the input: what is taken where all are -inf."""
    place: Expr = ZERO
    for b, k, d in zip(begin, size, dilation, strict=True):
        place = add(mul(place, k), maximum(floordiv(add(mul(b, -1), d - 1), d), 0))
    return place


ROWS: dict[str, Callable[..., Any]] = {"window_max": partial(lower_window, 0), "window_argmax": partial(lower_window, 1)}
