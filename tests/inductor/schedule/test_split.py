"""Reductions of few rows in two steps: the same values, and enough rows in the first."""

from __future__ import annotations

import pytest
import torch

from magneto.inductor.loops.ir import Pointwise, Reduction, loads, reduce_symbols
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.split import ENOUGH, split_reductions
from magneto.symbolic import coefficient
from tests.inductor.loops.interp import run_program
from tests.inductor.loops.verify import verify_program
from tests.inductor.lower.prim_graphs import Graph


@pytest.mark.parametrize(
    ("shape", "dims"), [((70000,), (0,)), ((1031, 37), (0,)), ((7, 11, 509), (0, 1, 2)), ((3, 20011), (1,)), ((8, 16, 30, 20), (0, 2, 3))]
)
def test_the_same_values(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    g = Graph()
    x = g.input(torch.randn(shape, dtype=torch.float64))
    v = g.var(x, dims, 1.0)
    g.output(g.sum(x, dims), g.amax(x, dims), g.item(v, 0), g.item(v, 1), g.any(g.gt(x, 3.9), dims))
    program = split_reductions(lower_graph(g.fx))
    verify_program(program)
    assert any(n.buffer.name.endswith(".parts") for n in program.nodes if isinstance(n, Reduction))
    for found, wanted in zip(run_program(program, *g.inputs), g.expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_many_rows_and_searches_stay() -> None:
    g = Graph()
    x = g.input(torch.randn(ENOUGH * 2, 300))
    y = g.input(torch.randn(70000))
    g.output(g.sum(x, (1,)), g.argmax(y, 0))
    program = lower_graph(g.fx)
    assert split_reductions(program) == program


def test_a_variance_is_cut_once() -> None:
    g = Graph()
    v = g.var(g.input(torch.randn(70000)), (0,), 1.0)
    g.output(g.item(v, 0), g.item(v, 1))
    nodes = split_reductions(lower_graph(g.fx)).nodes
    assert [n.kind for n in nodes if isinstance(n, Reduction)] == ["sum", "sum", "m2", "sum"]
    assert any(isinstance(n, Pointwise) for n in nodes)


def test_what_lies_together_stays_in_one_part() -> None:
    """Group norm of a channels-last image: a part is some rows of the image, with all channels of the group."""
    torch.manual_seed(0)
    g = Graph()
    x = g.input(torch.randn(2, 16, 64, 48, dtype=torch.float64).to(memory_format=torch.channels_last))
    g.output(g.sum(g.reshape(x, (2, 4, 4 * 64 * 48)), (2,)))
    program = split_reductions(lower_graph(g.fx))
    verify_program(program)
    parts = program.nodes[0]
    assert isinstance(parts, Reduction) and parts.buffer.shape == (2, 4, 64)
    (load,) = loads(parts.body)
    assert {str(coefficient(load.index, s)) for s in reduce_symbols(parts.reduce_ranges)} == {"1", "16"}
    torch.testing.assert_close(run_program(program, *g.inputs)[0], g.expected[0])
