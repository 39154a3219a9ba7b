"""The native parts of launching: addresses compared, small values packed, and what a launcher does where it cannot launch. No device is needed."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from magneto import _C


def addresses(tensors: list[torch.Tensor]) -> bytes:
    return array("q", [t.data_ptr() for t in tensors]).tobytes()


def test_the_first_input_that_moved_is_found() -> None:
    inputs = tuple(torch.randn(4) for _ in range(5))
    positions = [4, 0, 2]
    lie = array("i", positions).tobytes(), addresses([inputs[p] for p in positions])
    assert _C.moved(inputs, *lie) == -1
    assert _C.moved((*inputs[:2], inputs[2][1:], *inputs[3:]), *lie) == 2
    assert _C.moved((torch.randn(4), torch.randn(4), *inputs[2:]), *lie) == 0  # 1 is not asked about
    assert _C.moved((), b"", b"") == -1
    with pytest.raises(IndexError):
        _C.moved(inputs[:3], *lie)


def test_values_are_packed() -> None:
    values = (torch.tensor(2.5, dtype=torch.float64), torch.tensor([1, 2, 3], dtype=torch.int16), torch.tensor(True))
    memory = torch.zeros(40, dtype=torch.uint8)
    places = array("q", [0, 16, 8, 1, 0, 6, 2, 32, 1]).tobytes()
    _C.pack(values, memory.data_ptr(), places)
    assert (
        memory[16:24].view(torch.float64).item() == 2.5
        and memory[:6].view(torch.int16).tolist() == [1, 2, 3]
        and memory[32:].tolist() == [1] + [0] * 7
    )
    with pytest.raises(IndexError, match="no tensor 2"):
        _C.pack(values[:2], memory.data_ptr(), places)
    others = (torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.int16), torch.tensor(False))
    _C.unpack(others, memory.data_ptr(), places)
    assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def test_addresses() -> None:
    tensors = (torch.randn(3), torch.randn(4)[1:], torch.nn.Parameter(torch.randn(2)))
    assert _C.addresses(tensors) == addresses(list(tensors)) and _C.addresses(()) == b""
    with pytest.raises(TypeError):
        _C.addresses(list(tensors))


@pytest.mark.parametrize("table", [False, True])
def test_what_cannot_be_launched_goes_to_the_other(table: bool) -> None:
    calls: list[Any] = []
    launch = _C.Launch(0, (1, 1, 1), 32, 0, 0, 2, lambda *args: calls.append(args), table)
    x, y = torch.randn(3), torch.randn(3)
    assert launch(x, y) is None
    assert len(calls) == 1 and calls[0][0] is x and calls[0][1] is y
    launch(x)
    assert len(calls) == 2


def test_a_table_remembers_as_many_addresses_as_it_has_tensors() -> None:
    launch = _C.Launch(0, (1, 1, 1), 32, 0, 0, 2, lambda *args: None, True)
    launch.remember(addresses([torch.randn(1), torch.randn(1)]), 1, 0, 2, 3)
    with pytest.raises(ValueError, match="addresses"):
        launch.remember(b"", 1, 0, 2, 3)


def test_what_the_other_raises_is_raised() -> None:
    def other(*args: Any) -> None:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        _C.Launch(0, (1, 1, 1), 32, 0, 0, 1, other)(torch.randn(2))
