"""Rules of embedding bags and paddings against eager's kernels, over all flags."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from magneto.base.events import counters
from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate

aten = torch.ops.aten


def described(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(TensorMeta.of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def facts(x: Any) -> Any:
    strides = x.strides if isinstance(x, TensorMeta) else x.stride()
    return tuple(x.shape), tuple(strides), x.dtype


def agrees(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether the rule says what eager does; nothing is asked of it where eager raises."""
    try:
        expected = op(*args)
    except (RuntimeError, IndexError):
        return True
    before = counters().get("fake_fallback", 0)
    found = propagate(op, described(args), {})
    assert counters().get("fake_fallback", 0) == before, f"run for real: {op} {args[3:]}"
    several = isinstance(expected, tuple)
    return [facts(x) for x in (found if several else [found])] == [facts(x) for x in (expected if several else [expected])]


@pytest.mark.parametrize("op", [aten._embedding_bag.default, aten._embedding_bag_forward_only.default], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_embedding_bag(op: Any, dtype: torch.dtype) -> None:
    table = torch.ones(5, 3, dtype=dtype)
    wrong = []
    for mode, last, padding, kinds, turned, weighted, scale, sparse in itertools.product(
        (0, 1, 2), (False, True), (-1, 2), ((torch.int64, torch.int64), (torch.int32, torch.int64)), (False, True), (0, 1, 2), (False, True), (False, True)
    ):  # fmt: skip
        weight = table.t().contiguous().t() if turned else table
        indices, offsets = torch.tensor([0, 1, 2, 4], dtype=kinds[0]), torch.tensor([0, 1, 4] if last else [0, 1, 3], dtype=kinds[1])
        samples = None if not weighted else torch.ones(4 * weighted, dtype=dtype)[::weighted]
        args = (weight, indices, offsets, scale, mode, sparse, samples, last, padding)
        if not agrees(op, args):
            wrong.append(args[3:])
    assert not wrong


def test_embedding_bag_of_little() -> None:
    weight, none, one = torch.ones(5, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for mode, indices, offsets in itertools.product((0, 1, 2), (none, one), (one, torch.zeros(2, dtype=torch.int64))):
        assert agrees(aten._embedding_bag.default, (weight, indices, offsets, False, mode, False, None, False, -1))
        assert agrees(aten._embedding_bag.default, (weight[:, :0], indices, offsets, False, mode, False, None, False, -1))


def test_padding() -> None:
    dense = torch.arange(120.0).view(2, 3, 4, 5)
    inputs = [
        dense,
        dense.permute(0, 2, 3, 1),
        dense.to(memory_format=torch.channels_last),
        dense[..., ::2],
        dense[:1, :, :1],
        dense.transpose(0, 1),
    ]
    pads = [
        (0, 0),
        (0, 0, 0, 0),
        (0,) * 8,
        (-1, 0),
        (0, -1, -1, 0),
        (-1, 1),
        (1, -1, 0, 2),
        (-1, -1, 0, 0),
        (2, 0, 0, 0, 1, 1),
        (0, 0, -1, -1),
    ]
    wrong = [(n, pad) for n, x in enumerate(inputs) for pad in pads if not agrees(aten.constant_pad_nd.default, (x, list(pad), 0.5))]
    assert not wrong
