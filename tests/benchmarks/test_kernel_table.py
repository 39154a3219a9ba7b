"""The table of kernels that is measured: every row runs, and working sets have the size that is asked for."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernel_table import KERNELS
from benchmarks.kernels import difference, inputs_for, nbytes, summary


@pytest.mark.parametrize("name", KERNELS)
def test_row_runs_and_is_deterministic(name: str) -> None:
    kernel = KERNELS[name]
    inputs = kernel.make(1 << 14)
    with torch.no_grad():
        assert difference(kernel.call(*inputs), kernel.call(*inputs)) < 1e-5


def test_families_of_the_suite() -> None:
    families = {kernel.family for kernel in KERNELS.values()}
    assert len(KERNELS) >= 25
    assert families >= {
        "pointwise",
        "half",
        "integers",
        "reduction",
        "softmax",
        "norm",
        "loss",
        "cumulative",
        "rearranging",
        "pooling",
        "indexing",
        "masks",
    }


@pytest.mark.parametrize("name", ["gelu", "sum_inner", "embedding", "bf16_add_mul", "layer_norm_backward"])
def test_working_set(name: str) -> None:
    kernel = KERNELS[name]
    with torch.no_grad():
        inputs = inputs_for(kernel, 4 << 20)
        assert abs(nbytes(*inputs, kernel.call(*inputs)) / (4 << 20) - 1) < 0.1


def test_difference() -> None:
    a = torch.tensor([1.0, 2.0])
    assert difference(a, a.clone()) == 0.0
    assert difference(torch.tensor([1.0, 3.0]), a) == 0.5
    assert difference(a.double(), a) == float("inf")
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5


def test_summary() -> None:
    found = summary([{"to_eager": 2.0, "of_copy": 0.9}, {"to_eager": 0.5}])
    assert found["to_eager"] == {"geometric_mean": 1.0, "least": 0.5}
    assert found["at_85_percent"] == "1 of 1"
