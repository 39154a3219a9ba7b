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


TEMPERED: dict[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (True, lambda x: torch.softmax(x / 0.04, -1)),
    "of its negative": (True, lambda x: torch.softmax(-x * 30, -1)),
    "a loss": (True, lambda x: torch.softmax(x / 0.04, -1) * torch.log_softmax(x, -1)),
    "other sums": (False, lambda x: torch.exp(x * 25 - (x * 25).amax(-1, keepdim=True)) / (x.abs().sum(-1, keepdim=True) * 1e-3)),
    "other sums of it": (
        False,
        lambda x: (lambda e: e / (e * 0.1).sum(-1, keepdim=True))(torch.exp(x * 25 - (x * 25).amax(-1, keepdim=True))),
    ),
}


@pytest.mark.parametrize("way", TEMPERED)
def test_subnormal_probabilities_are_divided_by_their_bits(way: str) -> None:
    """Each product of one would take the processor a hundred times as long."""
    by_bits, function = TEMPERED[way]
    torch.manual_seed(0)
    x = torch.randn(40, 700)
    x[1, 3], x[2] = torch.nan, -torch.inf
    call = magneto.optimize("inductor", nopython=True)(function)
    ours, eager, exact = call(x), function(x), function(x.double())
    assert ("mg_div_sum(" in "".join(magneto.inspect(call).kernels)) == by_bits
    assert ((0 < eager.abs()) & (eager.abs() < 2e-38)).sum() > 300
    few = 3e-45 if "softmax" in way or "negative" in way else 2e-44  # units of what is multiplied afterwards
    torch.testing.assert_close(ours, eager, rtol=3e-6, atol=few, equal_nan=True)
    small = exact.abs() < 1e-38
    assert (ours - exact)[small].abs().max() <= 2 * (eager - exact)[small].abs().max() + few
