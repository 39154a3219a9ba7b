"""Cheap results that several kernels read are computed anew, where that reads no more memory than the result itself would take."""

from __future__ import annotations

import operator

import pytest
import torch

import magneto
from magneto.inductor.lower import lower_graph
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.inductor.schedule.schedule import schedule
from magneto.prims.decompose import decompose
from tests.inductor.codegen.compiled import check_compiled
from tests.inductor.lower.prim_graphs import Graph
from tests.ops.checking import run_graph
from tests.prims.test_decompose import Recorder, targets

aten = torch.ops.aten


def stored(graph: torch.fx.Graph) -> list[tuple[str, ...]]:
    return [s.stored for s in schedule(lower_graph(graph)).steps if isinstance(s, FusedKernel)]


def test_normalised_values_are_not_written() -> None:
    """(x - mean) * rstd is needed along rows and across them; x is read twice instead."""
    g = Graph()
    x, mean, rstd = g.input(torch.randn(400, 96)), g.input(torch.randn(400)), g.input(torch.rand(400))
    wide = [g.broadcast_in_dim(v, (400, 96), (0,)) for v in (mean, rstd)]
    normal = g.mul(g.sub(x, wide[0]), wide[1])
    g.output(g.sum(normal, (0,)), g.sum(g.mul(normal, normal), (1,)))
    check_compiled(g, 1e-4)
    assert sum(map(len, stored(g.fx))) == 2


def test_costly_and_wide_results_are_computed_once() -> None:
    g = Graph()
    x, y = g.input(torch.randn(400, 96)), g.input(torch.randn(400, 96))
    heavy, wide = g.exp(x), g.sub(g.mul(g.add(x, y), y), x)
    g.output(*[g.sum(v, (d,)) for v in (heavy, wide) for d in (0, 1)])
    check_compiled(g, 1e-3)
    assert [len(names) for names in stored(g.fx)] == [4]  # sums along rows and down columns are one walk, which computes both once


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("n", "c", "group", "size"), [(2, 8, 4, (5, 7)), (1, 6, 1, (40,)), (3, 6, 6, (1, 3)), (2, 12, 3, (16, 20))])
def test_gradient_of_group_norm(n: int, c: int, group: int, size: tuple[int, ...], affine: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn((n, c, *size), generator=generator) + 3 for _ in range(2))
    w = torch.randn(c, generator=generator) if affine else None
    pixels = x[0, 0].numel()
    _, mean, rstd = aten.native_group_norm(x, w, w, n, c, pixels, group, 1e-5)
    r = Recorder(grad, x, mean, rstd, *([w] if w is not None else []))
    mask = [True, affine, affine]
    weight = r.nodes[4] if affine else None
    found = r(aten.native_group_norm_backward.default, *r.nodes[:4], weight, n, c, pixels, group, mask)
    graph = decompose(r.output(*[r(operator.getitem, found, k) for k in range(3) if mask[k]]))
    assert "aten.native_group_norm_backward.default" not in targets(graph)
    exact = aten.native_group_norm_backward(
        *[t.double() for t in r.inputs[:4]], None if w is None else w.double(), n, c, pixels, group, mask
    )
    eager = r.values[found]
    for ours, theirs, true in zip(
        run_graph(graph, r.inputs), *[[t for t in found if t is not None] for found in (eager, exact)], strict=True
    ):
        scale = float(true.abs().max())
        assert float((ours - true).abs().max()) <= 2 * float((theirs - true).abs().max()) + 1e-6 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize(("width", "accumulate"), [(64, True), (3, True), (64, False)])
def test_rows_are_added_by_index_add(dtype: torch.dtype, width: int, accumulate: bool) -> None:
    x, values = torch.arange(5 * width).reshape(5, width).to(dtype), torch.arange(7 * width).reshape(7, width).to(dtype)
    index = torch.tensor([0, 4, -1, 2, -5, 4, 0]) if accumulate else torch.arange(-3, 4)[:5].clamp(-5, 4)
    values = values[: len(index)]
    r = Recorder(x, index, values)
    graph = decompose(r.output(r(aten.index_put.default, r.nodes[0], [r.nodes[1]], r.nodes[2], accumulate)))
    r.check(graph)
    assert ("aten.index_add.default" in targets(graph)) == (accumulate and width == 64 and dtype.is_floating_point)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 70, 300])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_few_looked_up_elements_are_computed(dtype: torch.dtype, width: int, reduction: str) -> None:
    generator = torch.Generator().manual_seed(width)
    x, target = torch.randn(33, width, generator=generator).to(dtype), torch.randint(0, width, (33,), generator=generator)
    target[::5] = -100
    x[3] = float("-inf")
    x[4, 0] = float("nan")
    entropy = torch.nn.functional.cross_entropy
    found = magneto.optimize("inductor", nopython=True)(entropy)(x, target, reduction=reduction)
    torch.testing.assert_close(found, entropy(x, target, reduction=reduction), equal_nan=True)


def test_the_logarithms_of_a_loss_are_not_written() -> None:
    r = Recorder(torch.randn(64, 300), torch.arange(64)[:, None])
    found = r(aten.gather.default, r(aten._log_softmax.default, r.nodes[0], 1, False), 1, r.nodes[1])
    graph = decompose(r.output(r(aten.mul.Tensor, found, 2.0)))
    kernels = [step for step in schedule(lower_graph(graph)).steps if isinstance(step, FusedKernel)]
    assert all(m.buffer.shape[-1] != 300 for kernel in kernels for m in kernel.members if m.name in kernel.stored)


def test_few_elements_of_a_padded_and_turned_result() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.pad(x * 2.0 + 1.0, (3, 4, 1, 2), value=-1.0).t()
        return torch.gather(wide, 0, i) + torch.cat([x, x.exp()], 0)[i, 0]

    x, i = torch.randn(20, 40), torch.randint(0, 40, (1, 23))
    magneto.reset()
    torch.testing.assert_close(magneto.optimize("inductor", nopython=True)(fn)(x, i), fn(x, i))
    with pytest.raises(RuntimeError, match="out of bounds"):
        magneto.optimize("inductor")(fn)(x, i + 30)
