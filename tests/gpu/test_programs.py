"""The GPU's programs under pytest; `python -m tests.gpu.run` records the same verdicts."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.convolutions import CONVOLUTIONS
from tests.gpu.kernels import KERNELS
from tests.gpu.optimisers import CHECKS as OPTIMISERS
from tests.gpu.programs import PROGRAMS, check
from tests.gpu.recordings import CHECKS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", CHECKS)
def test_recording(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimiser(name: str) -> None:
    OPTIMISERS[name]()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    KERNELS[name]()


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    CONVOLUTIONS[name]()
