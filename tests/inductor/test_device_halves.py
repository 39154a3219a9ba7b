"""Graphs with tensors of the CPU and of a CUDA device are cut in two. No device is needed: metadata says where tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from magneto.graph import TensorMeta
from magneto.inductor.devices import Joined, split
from magneto.inductor.lower.context import CannotLower
from magneto.prims import prims

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten


def meta(
    *shape: int, device: torch.device = CUDA, strides: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
) -> TensorMeta:
    return TensorMeta(shape, strides or TensorMeta.contiguous_strides(shape), dtype, device)


class Building:
    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, val: TensorMeta) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = val
        return node

    def call(self, target: Any, val: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = val
        return node


def targets(graph: fx.Graph) -> list[str]:
    return [getattr(n.target, "name", str(n.target)) for n in graph.nodes if n.op == "call_function"]


def scaled() -> tuple[fx.Graph, Building]:
    """x * (s + 1): s is a number of the CPU, x a tensor of the device; s + 1 is also returned."""
    b = Building()
    x, s = b.input("x", meta(4)), b.input("s", meta(device=CPU))
    more = b.call(prims.add, meta(device=CPU), s, 1.0)
    wide = b.call(prims.broadcast_in_dim, meta(4, device=CPU, strides=(0,)), more, (4,), ())
    b.graph.output((b.call(prims.mul, meta(4), x, wide), None, more))
    return b.graph, b


def test_single_numbers_are_sent_and_spread_on_the_device() -> None:
    device, halves = split(scaled()[0])
    assert device == CUDA and halves.places == ((False, 0), None, (True, 1)) and halves.sent == (True,)
    assert halves.host is not None
    assert targets(halves.host) == ["add"] and targets(halves.device) == ["broadcast_in_dim", "mul"]
    assert [n.meta["val"].device for n in halves.device.nodes if n.name == "sent_0"] == [CUDA]


def test_written_outputs_are_counted_in_the_half_that_runs_last() -> None:
    _, halves = split(scaled()[0])
    assert halves.written({0: 0, 2: 1}) == {0: 0}
    assert halves.whole(frozenset([0])) == frozenset([0])


def test_both_halves_are_one_callable() -> None:
    _, halves = split(scaled()[0])

    def host(x: torch.Tensor, s: torch.Tensor) -> Sequence[torch.Tensor]:
        return s + 1, s + 1

    def device(x: torch.Tensor, s: torch.Tensor, sent: torch.Tensor) -> Sequence[torch.Tensor]:
        return (x * sent,)

    found = Joined(host, device, halves, CPU)(torch.ones(4), torch.tensor(2.0))
    assert found[0].tolist() == [3.0] * 4 and found[1] is None and found[2].item() == 3.0


def test_indices_made_of_no_input_belong_to_their_reader() -> None:
    b = Building()
    x = b.input("x", meta(4))
    index = b.call(prims.iota, meta(4, device=CPU, dtype=torch.int64), 4, torch.int64, CPU)
    b.graph.output((b.call(prims.index_select, meta(4), x, 0, index),))
    _, halves = split(b.graph)
    assert halves.host is None and targets(halves.device) == ["iota", "index_select"]


def test_what_the_cpu_draws_is_sent_dense() -> None:
    b = Building()
    x, y = b.input("x", meta(3, 4)), b.input("y", meta(3, 4, device=CPU, strides=(8, 2)))
    there = b.call(aten._to_copy.default, meta(3, 4), y)
    b.graph.output((b.call(prims.mul, meta(3, 4), x, there),))
    _, halves = split(b.graph)
    assert halves.sent == (False,)
    assert [n.meta["val"].strides for n in halves.device.nodes if n.name == "sent_0"] == [(4, 1)]


@pytest.mark.parametrize("way", ["back", "two", "constant"])
def test_refused(way: str) -> None:
    b = Building()
    x = b.input("x", meta(4))
    if way == "back":
        b.graph.output((b.call(aten._to_copy.default, meta(4, device=CPU), x),))
    elif way == "two":
        y = b.input("y", meta(4, device=torch.device("cuda", 1)))
        b.graph.output((x, y))
    else:
        b.graph.output((b.call(prims.neg, meta(4), x), b.call(prims.iota, meta(4, device=CPU, dtype=torch.int64), 4, torch.int64, CPU)))
    with pytest.raises(CannotLower):
        split(b.graph)
