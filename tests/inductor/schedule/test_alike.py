"""Kernels that are alike have one text, and kernels with one text are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from magneto.inductor import cuda
from magneto.inductor.codegen import triton
from magneto.inductor.codegen.cpp import kernel_text
from magneto.inductor.codegen.triton import triton_kernel
from magneto.inductor.lower import lower_graph
from magneto.inductor.runtime.triton_launch import Launched
from magneto.inductor.schedule.alike import likeness
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.codegen.triton_cases import as_on_a_gpu
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


LAYERS = [norm, rows, turned, picked, joined]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
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


def test_places_of_several_tensors_are_read_in_one_order() -> None:
    """`x[i, j]` and `y[k, l]`: pointers stand in the order of names, of which `l` may be the first and `i` too. Of both kinds of kernels there are some here."""
    g, orders = Graph(), [(0, 1), (3, 2), (4, 5), (7, 6), (8, 9), (11, 10)]
    places = [g.input(torch.randint(0, 30, (50,))) for _ in range(12)]
    g.output(*(g.sum(g.call(aten.index.Tensor, g.input(torch.randn(30, 30)), [places[a], places[b]]), (0,)) for a, b in orders))
    steps = [step for step in schedule(lower_graph(g.fx)).steps if isinstance(step, FusedKernel)]
    texts: dict[object, set[str]] = {}
    for step in steps:
        texts.setdefault(likeness(step), set()).add(kernel_text(step))
    assert len(steps) == len(orders) and all(len(found) == 1 for found in texts.values()) and len(texts) == 2


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_of_a_gpu_each_is_written_once_and_begun_at_once(
    layer: Callable[[Graph, Any, float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    g = Graph()
    g.output(*(layer(g, g.input(torch.randn(40, 96)), scale) for scale in (2.0, 2.0, 3.0, 2.0)))
    with as_on_a_gpu():
        plan = schedule(lower_graph(g.fx), training=True)
    steps = [step for step in plan.steps if isinstance(step, FusedKernel)]
    texts = {step: triton_kernel(step, plan.buffers) for step in steps}
    writing: list[object] = []
    monkeypatch.setattr(cuda, "triton_kernel", lambda step, buffers: writing.append(step) or texts[step])
    begun: list[Launched] = []
    found = cuda._texts(plan, begun.append)
    assert {step: found[step] for step in steps} == texts
    assert len(writing) == len(begun) == len({*texts.values()}) < len(steps)


def test_memory_beyond_32_bits_makes_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader looks like that of a part of a small one."""
    monkeypatch.setattr(triton, "NARROW", 1000)
    g = Graph()
    g.output(*(g.exp(g.slice(g.input(torch.randn(rows, 8)), (0, 0), (1, 8), (1, 1))) for rows in (2, 3, 500)))
    plan = schedule(lower_graph(g.fx), training=True)
    steps = [step for step in plan.steps if isinstance(step, FusedKernel)]
    found = cuda._texts(plan, None)
    assert len({likeness(step) for step in steps}) == 1 and len(steps) == 3
    assert all(found[step] == triton_kernel(step, plan.buffers) for step in steps)
    assert len({*found.values()}) == 2
