"""Random graphs (the lowering's generator) compiled and run against eager and the interpreter, twice on one workspace."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.inductor.codegen.compiled import check_compiled
from tests.inductor.lower.prim_graphs import Graph
from tests.inductor.lower.test_fuzz import matrix, pointwise, reduce, view

EXAMPLES = int(os.environ.get("MAGNETO_FUZZ_EXAMPLES", "15"))


def random_graph(draw: Any, largest: int) -> Graph:
    torch.manual_seed(0)
    g = Graph()
    shape = tuple(draw(st.lists(st.integers(1, largest), min_size=1, max_size=4)))
    t = torch.randn(shape) / math.sqrt(max(1, math.prod(shape)))
    pool = [g.input(t.permute(*draw(st.permutations(range(len(shape))))))]
    for _ in range(draw(st.integers(2, 12))):
        x = draw(st.sampled_from([pool[-1], pool[-1], draw(st.sampled_from(pool))]))
        kind = draw(st.sampled_from("vvppppprrm"))
        made = {
            "v": lambda: view(draw, g, x),
            "p": lambda: pointwise(draw, g, x, pool),
            "r": lambda: reduce(draw, g, x),
            "m": lambda: matrix(draw, g, x),
        }[kind]()  # noqa: B023
        value = g.values[made]
        if value.dim() <= 5 and value.numel() <= 60_000 and (not value.numel() or value.abs().max().nan_to_num() < 1e4):
            pool.append(made)
    g.output(pool[-1], *draw(st.lists(st.sampled_from([p for p in pool[1:]] or pool), min_size=1, max_size=3, unique=True)))
    return g


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.data())
def test_small(data: Any) -> None:
    check_compiled(random_graph(data.draw, 5), 1e-3)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.data())
def test_larger(data: Any) -> None:
    check_compiled(random_graph(data.draw, 24), 1e-3)
