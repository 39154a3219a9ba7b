"""`as_strided` counts from where a value's memory begins, wherever the plan has put the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import magneto
from tests.compare import same


def test_of_an_input_that_begins_inside_its_storage() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2, 3), (3, 1)) + 1

    same(fn, magneto.compile(fn), torch.randn(100)[5:30].view(5, 5))


def test_of_values_inside_an_arena() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2 + 1
        z = torch.sin(x) @ x.t()
        return (z @ z).as_strided((3, 3), (1, 2), 1).sum(0) + y.as_strided((3,), (2,)), z

    same(fn, magneto.compile(fn), torch.randn(5, 5), tolerance=1e-5)


def test_adaptive_pooling_of_a_channels_last_value() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.conv2d(x, w))
        return y * torch.sigmoid(F.adaptive_avg_pool2d(y, 1)) + 1

    same(
        fn,
        magneto.compile(fn),
        torch.randn(2, 8, 9, 9).contiguous(memory_format=torch.channels_last),
        torch.randn(8, 8, 3, 3),
        tolerance=1e-4,
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.filterwarnings("ignore:.W104")
def test_from_a_place_in_the_storage(backend: str, place: int) -> None:
    """Which counts from where the storage begins, whatever of it the input is."""

    def fn(x: torch.Tensor) -> Any:
        return (
            torch.as_strided(x, (2, 2), (2, 1), place) * 2,
            x.as_strided((2,), (1,), storage_offset=place) + 1,
            x[1:].as_strided((2,), (1,), place),
        )

    compiled = magneto.optimize(backend)(fn)
    memory = torch.arange(40.0)
    for begin in (0, 7, 0):
        same(fn, compiled, memory[begin : begin + 20])
