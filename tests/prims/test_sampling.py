"""`F.grid_sample` as on a GPU: a loop, with eager's numbers. Places that are no numbers lie nowhere, as for CUDA's kernels (the CPU's say nan)."""

from __future__ import annotations

import itertools

import pytest
import torch

from magneto.prims.decompose import decompose
from magneto.prims.decompositions import pooling
from tests.ops.checking import run_graph
from tests.prims.test_decompose import Recorder, targets

aten = torch.ops.aten
SPECIAL = torch.tensor([-1.0, 1.0, 0.0, 1.2, -1.2, 1e4, -6e4, 0.999, -1.0001, 0.5])


def sampled(x: torch.Tensor, grid: torch.Tensor, *way: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, eager's)"""
    r = Recorder(x, grid)
    node = r(aten.grid_sampler_2d.default, *r.nodes, *way)
    graph = decompose(r.output(node))
    assert not [name for name in targets(graph) if name.startswith("aten.")]
    (found,) = run_graph(graph, r.inputs)
    assert graph.output_node().args[0][0].meta["val"].strides == r.values[node].stride()  # type: ignore[index, union-attr]
    return found, r.values[node]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "on_gpu", lambda x: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("mode", "padding", "corners"), itertools.product((0, 1), (0, 1), (False, True)))
def test_as_on_a_gpu(mode: int, padding: int, corners: bool, dtype: torch.dtype, gpu: None) -> None:
    generator = torch.Generator().manual_seed(3)
    for size in ((7, 10), (1, 5)):
        x = torch.randn(2, 3, *size, generator=generator).to(dtype)
        grid = (torch.rand(2, 6, 11, 2, generator=generator) * 2.6 - 1.3).to(dtype)
        if mode == 0:  # (the nearest of two that are equally near is decided by the last bit)
            grid[0, :, :2] = torch.cartesian_prod(SPECIAL, SPECIAL)[:24:2].reshape(6, 2, 2).to(dtype)
            x[0, 0, 0, 0] = torch.inf
        for given in (x, x.to(memory_format=torch.channels_last)):
            ours, eagers = sampled(given, grid, mode, padding, corners)
            exact = aten.grid_sampler_2d(given.double(), grid.double(), mode, padding, corners)
            assert ours.dtype is dtype and torch.equal(ours.isfinite(), exact.isfinite())
            kept = exact.isfinite() & eagers.isfinite()
            error, theirs = ((t.double() - exact)[kept].abs().max().item() for t in (ours, eagers))
            assert error <= 2 * theirs + {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 0), (size, error, theirs)


def test_places_that_are_no_numbers(gpu: None) -> None:
    x = torch.randn(1, 1, 4, 4)
    grid = torch.tensor([[torch.nan, 0.1], [torch.inf, 0.1], [-torch.inf, 0.1], [0.1, torch.nan]]).view(1, 1, 4, 2)
    for mode in (0, 1):
        assert torch.equal(sampled(x, grid, mode, 0, False)[0], torch.zeros(1, 1, 1, 4))
        torch.testing.assert_close(*sampled(x, grid, mode, 1, False))  # at the border


def test_what_stays_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    x, grid = torch.randn(1, 2, 4, 4), torch.rand(1, 3, 3, 2)
    for ours, way in ((True, (2, 0, False)), (True, (0, 2, True)), (False, (0, 0, False))):
        monkeypatch.setattr(pooling, "on_gpu", lambda x, ours=ours: ours)
        r = Recorder(x, grid)
        assert targets(decompose(r.output(r(aten.grid_sampler_2d.default, *r.nodes, *way)))) == ["aten.grid_sampler_2d.default"]
