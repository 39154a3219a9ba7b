"""Types that a kernel was not written for are refused while the program is captured, with PyTorch's own error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import magneto
from magneto.graph import TensorMeta, fake_call, kernel_types

REFUSED = [
    (F.gelu, torch.complex64),
    (F.gelu, torch.int64),
    (torch.relu, torch.bool),
    (torch.sort, torch.complex64),
    (torch.neg, torch.bool),
    (torch.bitwise_not, torch.float32),
    (torch.Tensor.argmax, torch.bool),
    (lambda x: x & x, torch.float64),
    (lambda x: x < x, torch.complex64),
    (lambda x: x.floor_(), torch.complex64),
]
TAKEN = [
    (lambda x: F.embedding(x, torch.ones(5, 2)), torch.int64),
    (lambda x: torch.ones(2, 3).gather(1, x), torch.int64),
    (lambda x: torch.ones(4)[x], torch.int64),
    (lambda x: x // 2, torch.int32),
    (lambda x: x | x, torch.bool),
    (lambda x: x.sin(), torch.complex64),
    (lambda x: F.linear(x, x), torch.bfloat16),
]


@pytest.mark.parametrize(("fn", "dtype"), REFUSED)
def test_refused(fn, dtype):
    x = torch.ones(2, 3).to(dtype)
    with pytest.raises(Exception) as said:
        fn(x)
    with pytest.raises(type(said.value)) as ours:
        fake_call(fn, [TensorMeta.of(x)], {})
    assert str(ours.value) == str(said.value)


@pytest.mark.parametrize(("fn", "dtype"), TAKEN)
def test_taken(fn, dtype):
    x = torch.ones(2, 3).to(dtype)
    assert fake_call(fn, [TensorMeta.of(x)], {}).value.shape == fn(x).shape


def test_a_division_by_zero_refuses_no_other():
    meta = TensorMeta.of(torch.ones(2, 3, dtype=torch.int16))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        fake_call(lambda x: x // 0, [meta], {})
    assert fake_call(lambda x: x // 2, [meta], {}).value.shape == (2, 3)


def test_an_operation_whose_result_nobody_uses_raises():
    def program(x, log):
        log.append(1)
        if F.gelu(x) in []:
            return 1
        return 2

    log = []
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="Gelu"):
            magneto.optimize("eager")(program)(torch.ones(2, dtype=torch.complex64), log)
    assert log == [1, 1]


def test_operations_that_trust_their_size_arguments_are_not_tried():
    """A trial on tensors of one element with the program's sizes wrote beyond them (LSTM in bfloat16)."""
    cells = torch.nn.LSTM(32, 64, batch_first=True).bfloat16().eval()
    x = torch.randn(2, 3, 32).bfloat16()
    with torch.no_grad():
        wanted, got = cells(x)[0], magneto.optimize("eager")(cells)(x)[0]
    assert torch.equal(wanted, got)
    assert not [key for key in kernel_types._refused if "rnn_layer" in str(key[0])]
