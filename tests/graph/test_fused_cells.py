"""CUDA's fused recurrent cells: the rules against torch's own meta kernels. No device is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magneto.graph import TensorMeta
from magneto.graph.rules import propagate

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta.contiguous(shape, dtype, CUDA)


def facts(value: Any) -> Any:
    return (
        None
        if value is None
        else (tuple(value.shape), tuple(value.stride() if isinstance(value, torch.Tensor) else value.strides), value.dtype)
    )


def plain(value: Any) -> Any:
    return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="meta") if isinstance(value, TensorMeta) else value


CELLS = {
    aten._thnn_fused_gru_cell.default: (meta(4, 15), meta(4, 15), meta(4, 5), meta(15), meta(15)),
    aten._thnn_fused_lstm_cell.default: (meta(4, 20), meta(4, 20), meta(4, 5), meta(20), meta(20)),
    aten._thnn_fused_lstm_cell_backward_impl.default: (meta(4, 5), meta(4, 5), meta(4, 5), meta(4, 5), meta(4, 20), True),
}


@pytest.mark.parametrize("op", CELLS, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_as_torch_says(op: Any, biased: bool) -> None:
    args = CELLS[op]
    if not biased:
        args = (*args[:-1], False) if args[-1] is True else args[:3]
    found = propagate(op, args, {})
    assert all(m is None or m.device == CUDA for m in found)
    try:
        expected = op(*map(plain, args if args[-1] is False else CELLS[op]))  # torch's meta kernels of cells want biases
    except NotImplementedError:
        pytest.skip("this torch has no meta kernel for it")
    assert [facts(m) for m in found] == [facts(t) for t in expected]


def test_backward_of_gru() -> None:
    """torch has no meta kernel for it; CUDA's makes three gates of the workspace's five."""
    found = propagate(aten._thnn_fused_gru_cell_backward.default, (meta(4, 5), meta(4, 25), True), {})
    assert [tuple(m.shape) for m in found] == [(4, 15), (4, 15), (4, 5), (15,), (15,)]
    assert propagate(aten._thnn_fused_gru_cell_backward.default, (meta(4, 5), meta(4, 25), False), {})[3:] == (None, None)
