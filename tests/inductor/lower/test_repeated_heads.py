"""Keys and values repeated for the heads of a group are read where they lie by the library's attention on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magneto
import magneto.inductor.compile as compiling
from magneto.inductor.loops.ir import LibraryCall
from magneto.inductor.lower.graph import FLASH


def _by_hand(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, 3, length, width).reshape(batch, heads * 3, length, width)


WAYS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    # how they are repeated, and how many heads of keys the library is given
    "by hand": (_by_hand, 2),
    "interleaved": (lambda x: x.repeat_interleave(3, dim=1), 2),
    "one behind the other": (lambda x: x.repeat(1, 3, 1, 1), 6),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("length", (1, 9))
def test_repeated_heads(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    repeated, heads = WAYS[name]
    plans: list[Any] = []
    write = compiling.write_inputs
    monkeypatch.setattr(compiling, "write_inputs", lambda plan, wanted: plans.append(write(plan, wanted)) or plans[-1])

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)

    optimised = magneto.optimize("inductor")(fn)
    with torch.no_grad():
        for _ in range(2):
            args = torch.randn(2, 6, length, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 1, length, 9)
            found, wanted = optimised(*args), fn(*args)
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found, wanted)
    calls = [step for plan in plans for step in plan.steps if isinstance(step, LibraryCall) and step.op is FLASH]
    assert calls and all([view.shape[1] for view in call.views[1:3]] == [heads, heads] for call in calls)
