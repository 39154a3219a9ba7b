"""Dimensions that an index divides are several loops: no division per element where a vector loop of some length is left."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import magneto

Function = Callable[..., torch.Tensor]
LAST = torch.channels_last


def close(function: Function, *inputs: torch.Tensor) -> str:
    """The kernels' text."""
    torch.manual_seed(0)
    call = magneto.optimize("inductor", nopython=True)(function)
    with torch.no_grad():
        ours, eager = call(*inputs), function(*inputs)
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-5)
    assert ours.stride() == eager.stride()
    return "".join(magneto.inspect(call).kernels)


PROGRAMS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "expanded rows": (lambda x: x[:, None].expand(9, 8, 33).reshape(9, -1).to(torch.bfloat16), (torch.randn(9, 33),)),
    "repeated": (lambda x: x.repeat(4).half(), (torch.randn(300),)),
    "each repeated": (lambda x: x.repeat_interleave(4, 1).half(), (torch.randn(6, 300),)),
    "twice as large": (lambda x: F.interpolate(x, scale_factor=2) + 1, (torch.randn(2, 3, 20, 20),)),
    "repeated twice": (lambda x: x.repeat(3, 5) * 2, (torch.randn(20, 40),)),
    "rolled": (lambda x: torch.roll(x, (3, 5), (1, 2)).double(), (torch.randn(2, 24, 24, 32),)),
    "windows": (lambda x: x.view(2, 4, 8, 4, 8, 32).permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, 32).sin(), (torch.randn(2, 32, 32, 32),)),
    "norm of one group": (lambda x: F.group_norm(x, 1), (torch.randn(3, 24, 20, 20).to(memory_format=LAST),)),
    "norm of two groups": (lambda x: F.group_norm(x, 2), (torch.randn(3, 40, 20, 20).to(memory_format=LAST),)),
    "largest of groups": (lambda x: x.reshape(3, 2, -1).amax(2), (torch.randn(3, 40, 20, 20).to(memory_format=LAST),)),
    "product of groups": (lambda x: (1 + x / 1e4).reshape(3, 2, -1).prod(2), (torch.randn(3, 40, 20, 20).to(memory_format=LAST),)),
    "large": (lambda x: x.reshape(2, -1).logsumexp(1), (torch.randn(2, 64, 96, 96).to(memory_format=LAST),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_division_per_element(name: str) -> None:
    function, inputs = PROGRAMS[name]
    text = close(function, *inputs)
    ahead = re.compile(r"for \(i64 j0 = (lo|0); j0 < \w+; j0\+\+\) \{[^}]*\bv\d+\[j0[^}]*\}")  # computed once for many elements
    assert "(i32)j" not in ahead.sub("", text)


def test_short_parts_stay_one_loop() -> None:
    """Of nine elements each no vectors are made, and they are not written out: there indices are divided."""
    assert "(i32)j" in close(lambda x: x.repeat_interleave(9, 1).half(), torch.randn(6, 300))


def test_places_are_found_in_their_order() -> None:
    x = torch.randint(0, 9, (3, 40, 20, 20)).float().to(memory_format=LAST)
    close(lambda x: x.reshape(3, 2, -1).argmax(2), x)


def test_gradients_of_a_norm_of_one_group() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (F.group_norm(x, 1, w, b) * x.sin()).sum()

    grads = []
    for call in (loss, magneto.optimize("inductor", nopython=True)(loss)):
        torch.manual_seed(0)
        x = torch.randn(3, 24, 20, 20).to(memory_format=LAST).requires_grad_()
        w, b = torch.rand(24, requires_grad=True), torch.rand(24, requires_grad=True)
        call(x, w, b).backward()
        grads.append((x.grad, w.grad, b.grad))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
