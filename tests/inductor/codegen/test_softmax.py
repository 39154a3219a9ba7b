"""Exponentials below the largest number of a row have a cheaper form: NaN, infinities, zeros and subnormal numbers are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import magneto
from tests.inductor.codegen.compiled import check_compiled
from tests.inductor.codegen.test_stream import texts
from tests.inductor.lower.prim_graphs import Graph

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax down": lambda x: torch.softmax(x, 0),
    "below": lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
    "below all": lambda x: torch.exp(x - x.max()),
    "above": lambda x: torch.exp(x - x.amin(-1, keepdim=True)),
    "twice": lambda x: torch.exp(x * 2 - x.amax(-1, keepdim=True)),
    "causal": lambda x: torch.softmax(x.masked_fill(torch.ones(x.shape).triu(1).bool(), -torch.inf), -1),
}


def extremes(width: int) -> torch.Tensor:
    torch.manual_seed(width)
    x = torch.randn(9, width) * 30
    x[1], x[2, 0], x[3, -1], x[8] = -torch.inf, torch.inf, torch.nan, 3e38
    x[4] -= 1e4
    x[6, 1:] = -88.0
    x[6, 0] = 0.0
    x[7] = torch.linspace(-110, 0, width)
    return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [2, 33, 128, 1000])
def test_extremes(way: str, width: int) -> None:
    x = extremes(width)
    torch.testing.assert_close(magneto.compile(WAYS[way])(x), WAYS[way](x), rtol=3e-6, atol=1e-44, equal_nan=True)


@pytest.mark.parametrize(("factor", "least", "cheaper"), [(1.0, False, True), (2.0, False, False), (1.0, True, False)])
def test_only_below_the_maximum(factor: float, least: bool, cheaper: bool) -> None:
    g = Graph()
    x = g.input(torch.randn(40, 300))
    below = g.sub(g.mul(x, factor), g.broadcast_in_dim((g.amin if least else g.amax)(x, (1,)), (40, 300), (0,)))
    g.output(g.exp(below))
    assert ("mg_exp_down_f32" in texts(g)) == cheaper
    check_compiled(g, 1e-5)
