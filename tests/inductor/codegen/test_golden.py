"""The text of representative kernels, kept in tests/golden/kernels. MAGNETO_UPDATE_GOLDEN=1 writes them anew: read the diff before committing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from magneto.inductor.codegen.cpp import kernel_text
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from tests.inductor.lower.prim_graphs import Graph
from tests.inductor.schedule.test_fuse import layer_norm, softmax

GOLDEN = Path(__file__).parents[2] / "golden" / "kernels"


def kernel_texts(g: Graph) -> str:
    """The kernels of a graph, in order."""
    texts = [kernel_text(step) for step in schedule(lower_graph(g.fx)).steps if isinstance(step, FusedKernel)]
    return "\n".join(texts)


def batch_norm(g: Graph) -> None:
    x = g.input(torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last))
    mean, scale = g.input(torch.randn(8)), g.input(torch.randn(8))
    wide = [g.broadcast_in_dim(v, (2, 8, 6, 6), (1,)) for v in (mean, scale)]
    y = g.mul(g.sub(x, wide[0]), wide[1])
    g.output(g.where(g.lt(y, 0.0), 0.0, y))


def embedding(g: Graph) -> None:
    g.output(g.mul(g.index_select(g.input(torch.randn(10, 64)), 0, g.input(torch.tensor([1, 2, 3]))), 2.0))


def reductions(g: Graph) -> None:
    x = g.input(torch.randn(50, 300))
    g.output(g.sum(x, (1,)), g.argmax(x, 1))


CASES: dict[str, Callable[[Graph], object]] = {
    "pointwise": lambda g: g.output(g.tanh(g.add(g.input(torch.randn(5, 7)), 1.0))),
    "pointwise_parallel": lambda g: g.output(g.exp(g.input(torch.randn(1000, 300)))),
    "softmax": lambda g: g.output(softmax(g, g.input(torch.randn(40, 512)))),
    "layer_norm_residual": lambda g: g.output(layer_norm(g, g.add(g.input(torch.randn(40, 96)), g.erf(g.input(torch.randn(40, 96)))))),
    "batch_norm_relu_channels_last": batch_norm,
    "transpose": lambda g: g.output(
        g.call(torch.ops.aten.clone.default, g.transpose(g.input(torch.randn(70, 90)), (1, 0)), memory_format=torch.contiguous_format)
    ),
    "sum_of_rows": lambda g: g.output(g.sum(g.input(torch.randn(300, 70)), (0,))),
    "sum_split": lambda g: g.output(g.sum(g.input(torch.randn(50_000)), (0,))),
    "sum_and_argmax": reductions,
    "bfloat16": lambda g: g.output(g.mul(g.input(torch.randn(9).bfloat16()), 0.5)),
    "embedding": embedding,
    "cat": lambda g: g.output(g.cat([g.input(torch.randn(3, 4)), g.exp(g.input(torch.randn(3, 5)))], 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    g = Graph()
    CASES[name](g)
    text, path = kernel_texts(g), GOLDEN / f"{name}.c"
    if os.environ.get("MAGNETO_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"the text of {name} changed; MAGNETO_UPDATE_GOLDEN=1 keeps the new one"


def test_layers_of_equal_shape_have_equal_text() -> None:
    g = Graph()
    x = g.input(torch.randn(12, 16))
    for _ in range(3):
        x = layer_norm(g, g.call(torch.ops.aten.mm.default, x, g.input(torch.randn(16, 16))))
    g.output(x)
    steps = [s for s in schedule(lower_graph(g.fx)).steps if isinstance(s, FusedKernel)]
    assert len(steps) == 3 and len({kernel_text(s) for s in steps}) == 1


def test_no_golden_without_a_case() -> None:
    assert {p.stem for p in GOLDEN.glob("*.c")} == set(CASES)
