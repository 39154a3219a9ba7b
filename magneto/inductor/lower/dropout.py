"""Dropout whose numbers our own kernels draw: an operation of ours, its meaning, and its loops."""

from __future__ import annotations

from typing import Any

import torch

from magneto.inductor.loops.ir import Const, Op, Value
from magneto.inductor.loops.philox import word_of
from magneto.inductor.lower.box import Box, Computed, Index
from magneto.inductor.lower.context import Lowering, dense_strides
from magneto.inductor.lower.elementwise import lower_convert, pointwise
from magneto.inductor.lower.values import convert, index_value
from magneto.symbolic import ONE, ZERO, add, mul

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("dropout(Tensor self, Tensor state, float p, int threads, int vector) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]


def _dropout(x: torch.Tensor, state: torch.Tensor, p: float, threads: int, vector: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed, offset = state.tolist()
    places = torch.arange(x.numel(), device=x.device)
    return dropped(x, word_of(seed, offset, places, threads, vector).view(x.shape), p)


def dropped(x: torch.Tensor, words: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout makes of `x` where it draws these words, and its mask."""
    keep, scale, wide = numbers(p, x.dtype)
    mask = (words.float() * 2**-32 + 2**-33).to(wide) < keep
    return (x.to(wide) * mask * scale).to(x.dtype), mask


def numbers(p: float, dtype: torch.dtype) -> tuple[float, float, torch.dtype]:
    """(what a number must be below for an element to stay, by what it is then multiplied, the type in which that is done)"""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    keep = torch.tensor(1.0 - p, dtype=wide, device="cpu").item()
    return keep, torch.tensor(1.0 / keep, dtype=wide, device="cpu").item(), wide


_LIBRARY.impl("dropout", _dropout, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
DROPOUT: Any = torch.ops.magneto.dropout.default
DRAWN = 24  # operations of a number


def lower_dropout(low: Lowering, val: Any, x: Box, state: Box, p: float, threads: int, vector: int) -> Any:
    """The mask is a buffer, which stays in registers where nothing but the loop beside it reads it; numbers are drawn once."""
    keep, scale, wide = numbers(p, x.dtype)
    shape, strides = tuple(val[0].shape), tuple(val[0].strides)
    steps = dense_strides(shape)

    def drawn(index: Index) -> Value:
        place = index_value(add(0, 0, *(mul(i, step) for i, step in zip(index, steps, strict=True))), torch.int64)
        grid = Const(threads, torch.int64), Const(vector, torch.int64)
        number = Op("uniform", (state.load((ZERO,)), state.load((ONE,)), place, *grid), torch.float32)
        return Op("lt", (convert(number, wide), Const(keep, wide)), torch.bool)

    mask = low.realise(low.computed(Computed(drawn, shape, strides, torch.bool, x.device, state.reads, low.origins, DRAWN, 1)))
    factor = pointwise(low, "where", (mask, Const(scale, wide), Const(0.0, wide)), wide, shape, strides)  # x * 1 * scale, or x * 0 * scale
    scaled = pointwise(low, "mul", (lower_convert(low, val[0].with_(dtype=wide), x, wide), factor), wide, shape, strides)
    return lower_convert(low, val[0], scaled, x.dtype), mask
