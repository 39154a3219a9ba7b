"""On a GPU the gradient of a convolution's bias is a sum in loops; the library computes the other two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magneto.graph.meta import TensorMeta
from magneto.inductor.loops.ir import LibraryCall, Program, Reduction
from magneto.inductor.lower import lower_graph
from tests.inductor.loops.interp import run_program
from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten


def program(device: str, mask: tuple[bool, bool, bool], groups: int = 1) -> tuple[Program, Graph]:
    torch.manual_seed(0)
    g = Graph()
    x, w = g.input(torch.randn(2, 4, 5, 6)), g.input(torch.randn(8, 4 // groups, 3, 3))
    grad = g.input(torch.randn(2, 8, 5, 6).to(memory_format=torch.channels_last))
    found = g.call(aten.convolution_backward.default, grad, x, w, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, list(mask))
    g.output(*[g.item(found, k) for k in range(3) if mask[k]])

    def there(val: Any) -> Any:
        return (
            tuple(map(there, val))
            if isinstance(val, tuple)
            else val.with_(device=torch.device(device))
            if isinstance(val, TensorMeta)
            else val
        )

    for node in g.fx.nodes:
        if node.op != "output":
            node.meta["val"] = there(node.meta["val"])
    return lower_graph(g.fx), g


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (False, False, True), (True, True, False)], ids=str)
def test_a_sum_in_loops(mask: tuple[bool, bool, bool]) -> None:
    made, g = program("cuda:0", mask, 2)
    calls = [node for node in made.nodes if isinstance(node, LibraryCall)]
    assert [tuple(call.args[-1]) for call in calls] == ([(mask[0], mask[1], False)] if mask[0] or mask[1] else [])
    assert sum(isinstance(node, Reduction) for node in made.nodes) == mask[2]
    for found, wanted in zip(run_program(made, *g.inputs), g.expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_on_the_cpu_it_stays_one_call() -> None:
    made, _ = program("cpu", (True, True, True))
    (call,) = made.nodes
    assert isinstance(call, LibraryCall) and tuple(call.args[-1]) == (True, True, True)
