"""Sums of columns beside a walk over rows: joined where rows are many, in a time that grows with the graph."""

from __future__ import annotations

import pytest
import torch

from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.columns import join_columns
from magneto.inductor.schedule.kernel import COLUMN, FusedKernel, TableKernel
from magneto.inductor.schedule.schedule import Schedule, schedule
from magneto.inductor.schedule.split import split_reductions
from magneto.inductor.schedule.table import gather
from tests.inductor.codegen.triton_cases import as_on_a_gpu, norm_backward, sizes_for
from tests.inductor.loops.interp import run_program
from tests.inductor.loops.verify import verify_program
from tests.inductor.lower.prim_graphs import Graph


def planned(layers: int, shape: tuple[int, int] = (32, 48)) -> Schedule:
    torch.manual_seed(0)
    g = Graph()
    g.output(*(result for _ in range(layers) for result in norm_backward(g, shape)))
    with as_on_a_gpu():
        return schedule(split_reductions(lower_graph(g.fx)), training=True)


def walks(plan: Schedule) -> int:
    return sum(isinstance(step, FusedKernel) and any(m.kind == COLUMN for m in step.members) for step in plan.steps)


def test_every_layer_is_joined_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often steps are asked what they read: as often for each layer, however many there are."""
    asked = [0]
    reads = FusedKernel.reads

    def counting(kernel: FusedKernel) -> tuple[str, ...]:
        asked[0] += 1
        return reads(kernel)

    counts = []
    with sizes_for("in parts"):
        for layers in (4, 16):
            plan = planned(layers)
            monkeypatch.setattr(FusedKernel, "reads", counting)
            asked[0] = 0
            joined = join_columns(plan)
            assert walks(joined) == layers and len(joined.steps) == len(plan.steps) - layers
            gather(joined, 16, False)
            counts.append(asked[0])
            monkeypatch.setattr(FusedKernel, "reads", reads)
    assert counts[1] <= 4 * counts[0]


def test_few_rows_are_walked_apart() -> None:
    """What few programs would walk one row after another: kernels over all rows at once, and sums of their own."""
    for shape in ((1970, 768), (2048, 768)):
        plan = join_columns(planned(1, shape))
        assert not walks(plan) and not any(isinstance(step, TableKernel) for step in plan.steps)


def test_many_rows_are_walked_by_few_programs() -> None:
    assert walks(join_columns(planned(1, (4224, 1024)))) == 1


@pytest.mark.parametrize("shape", [(70_000,), (64, 20, 30, 9), (1_031, 37), (8, 33_333)])
def test_variances_are_cut(shape: tuple[int, ...]) -> None:
    """Each part gives its sum and its deviations in one walk; parts that cannot be equal are cut as two sums. The mean is far from 0."""
    torch.manual_seed(0)
    g = Graph()
    x = g.input(torch.randn(shape, dtype=torch.float64) + 1000)
    v = g.var(x, (0, *range(2, len(shape))) if len(shape) > 1 else (0,), 1.0)
    w = g.var(x, (len(shape) - 1,), 0.0)
    g.output(g.item(v, 0), g.item(v, 1), g.item(w, 0), g.item(w, 1))
    program = split_reductions(lower_graph(g.fx))
    verify_program(program)
    for found, wanted in zip(run_program(program, *g.inputs), g.expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
