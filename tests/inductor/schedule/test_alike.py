"""Kernels that are alike have one text, and kernels with one text are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from magneto.inductor.codegen.cpp import kernel_text
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.alike import likeness
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.lower.prim_graphs import Graph
from tests.inductor.schedule.test_fuse import layer_norm, softmax

aten = torch.ops.aten


def norm(g: Graph, x: Any, scale: float) -> Any:
    return layer_norm(g, g.add(x, g.mul(g.erf(x), scale)))


def rows(g: Graph, x: Any, scale: float) -> Any:
    return softmax(g, g.mul(x, scale))


def turned(g: Graph, x: Any, scale: float) -> Any:
    return g.call(aten.clone.default, g.transpose(g.mul(x, scale), (1, 0)), memory_format=torch.contiguous_format)


def picked(g: Graph, x: Any, scale: float) -> Any:
    return g.mul(g.index_select(x, 0, g.input(torch.tensor([3, 1, 0]))), scale)


def joined(g: Graph, x: Any, scale: float) -> Any:
    return g.cat([x, g.exp(g.mul(x, scale))], 1)


@pytest.mark.parametrize("layer", [norm, rows, turned, picked, joined], ids=lambda f: f.__name__)
def test_alike_where_the_text_is_one(layer: Callable[[Graph, Any, float], Any]) -> None:
    g = Graph()
    shapes = [(40, 96)] * 4 + [(40, 97), (96, 40)]
    scales = [2.0, 2.0, 3.0, 2.0, 2.0, 2.0]
    g.output(*(layer(g, g.input(torch.randn(shape)), scale) for shape, scale in zip(shapes, scales, strict=True)))
    steps = [step for step in schedule(lower_graph(g.fx)).steps if isinstance(step, FusedKernel)]
    assert len(steps) >= len(shapes)
    texts: dict[object, set[str]] = {}
    for step in steps:
        texts.setdefault(likeness(step), set()).add(kernel_text(step))
    assert all(len(found) == 1 for found in texts.values())
    assert len(texts) == len({kernel_text(step) for step in steps}) < len(steps)
