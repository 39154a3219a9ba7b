"""float8 tensors: what is converted to and from them, views and copies, and the error where torch computes with none. On the CPU conversions are the library's."""

from __future__ import annotations

import pytest
import torch

from magneto import optimize
from magneto.base.events import events
from tests.inductor.codegen.triton_cases import FLOATS_OF_A_BYTE


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype in FLOATS_OF_A_BYTE else x


@pytest.mark.parametrize("small", FLOATS_OF_A_BYTE)
def test_bits_are_eagers(small: torch.dtype) -> None:
    def run(x: torch.Tensor, scale: torch.Tensor, stored: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = (x / scale).to(small)
        return (
            q,
            q.float() * scale,
            (x * 2).to(small).t(),
            torch.cat([q, q])[1:],
            stored.to(torch.bfloat16) + 1,
            stored.reshape(4, 64),
            stored.t().contiguous(),
        )

    x, scale, stored = torch.randn(64, 32), torch.tensor(0.003), torch.arange(256, dtype=torch.uint8).view(small).view(16, 16)
    for found, wanted in zip(optimize("inductor")(run)(x, scale, stored), run(x, scale, stored), strict=True):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        torch.testing.assert_close(bits(found), bits(wanted), rtol=0, atol=0, equal_nan=True)
    assert not events("break") and not events("fallback")


def test_what_torch_refuses_is_refused() -> None:
    x = torch.randn(4).to(torch.float8_e4m3fn)
    for run in (lambda x: x + 1, optimize("inductor")(lambda x: x + 1)):
        with pytest.raises(NotImplementedError, match="Float8_e4m3fn"):
            run(x)
