"""Strides that the rules promise, against those of eager's kernels: operands of other types, rows repeated, convolutions in any layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate

aten = torch.ops.aten
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "stepped": lambda x: torch.stack([x, x], 2)[..., 0],
    "rows alike": lambda x: x[:1].expand(3, 4),
    "columns alike": lambda x: x[:, :1].expand(3, 4),
    "a row": lambda x: x[0],
    "a column": lambda x: x[:, :1],
}
OPERATORS = [aten.add.Tensor, aten.div.Tensor, aten.eq.Tensor, aten.copysign.Tensor, aten.clamp.Tensor, aten.where.self, aten.addr.default]
DTYPES = (torch.int64, torch.float32, torch.bfloat16)


def described(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(TensorMeta.of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


@pytest.mark.parametrize("op", OPERATORS, ids=str)
def test_elementwise(op: Any) -> None:
    values = torch.arange(1.0, 13.0).reshape(3, 4)
    wrong = []
    for one, two in itertools.product(DTYPES, DTYPES):
        for first, second in itertools.product(LAYOUTS, LAYOUTS):
            x, y = LAYOUTS[first](values.to(one)), LAYOUTS[second](values.to(two))
            args: tuple[Any, ...] = (x > 2, x, y) if op is aten.where.self else (x, y, None) if op is aten.clamp.Tensor else (x, y)
            if op is aten.addr.default:
                args = (x.to(two), y.reshape(-1)[:3], values.to(two)[1])
            expected = op(*args)
            if (found := propagate(op, described(args), {})).strides != expected.stride():
                wrong.append(f"{one} {first}, {two} {second}: {found.strides} for {expected.stride()}")
    assert not wrong


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolutions(dims: int, transposed: bool, dtype: torch.dtype) -> None:
    last = (0, *range(2, dims + 2), 1)
    back = (0, dims + 1, *range(1, dims + 1))
    wrong = []
    for groups, x_last, w_last in itertools.product((1, 2), (False, True), (False, True)):
        x = torch.ones(2, 4, *[4] * dims, dtype=dtype)
        w = torch.ones(*((4, 6 // groups) if transposed else (6, 4 // groups)), *[2] * dims, dtype=dtype)
        x = x.permute(last).contiguous().permute(back) if x_last else x
        w = w.permute(last).contiguous().permute(back) if w_last else w
        options = ([1] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, groups)
        forward = (x, w, None, *options)
        result = aten.convolution.default(*forward)
        backward = (torch.ones_like(result), x, w, [6], *options, [True, True, True])
        expected = [result.stride(), *(g.stride() for g in aten.convolution_backward.default(*backward))]
        metas = [
            propagate(aten.convolution.default, described(forward), {}),
            *propagate(aten.convolution_backward.default, described(backward), {}),
        ]
        if [meta.strides for meta in metas] != expected:
            wrong.append(f"groups {groups}, {x_last}, {w_last}: {[meta.strides for meta in metas]} for {expected}")
    assert not wrong
