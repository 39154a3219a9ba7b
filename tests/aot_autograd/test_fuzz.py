"""Random programs of views, in-place operations and copies against eager, with and without gradients."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.aot_autograd import test_training
from tests.aot_autograd.differential import check

COUNT = int(os.environ.get("TEST_FUZZ", "60"))

VIEWS: list[Callable[[torch.Tensor, random.Random], torch.Tensor]] = [
    lambda t, r: t.transpose(r.randrange(t.dim()), r.randrange(t.dim())) if t.dim() else t.unsqueeze(0),
    lambda t, r: t.select(d := r.randrange(t.dim()), r.randrange(t.shape[d])) if t.dim() > 1 else t.view(t.shape),
    lambda t, r: t.narrow(d := r.randrange(t.dim()), 0, max(1, t.shape[d] - 1)) if t.dim() else t,
    lambda t, r: t[..., ::2] if t.dim() else t,
    lambda t, r: t.unsqueeze(r.randrange(t.dim() + 1)) if t.dim() < 4 else t,
    lambda t, r: t.squeeze(),
    lambda t, r: t.flatten() if t.is_contiguous() else t.unflatten(0, (1, -1)) if t.dim() else t,
    lambda t, r: t.split(1, 0)[-1] if t.dim() else t,
    lambda t, r: t.diagonal() if t.dim() == 2 else t.permute(*reversed(range(t.dim()))),
    lambda t, r: t.reshape(-1),
]
PURE: list[Callable[[torch.Tensor, torch.Tensor, random.Random], torch.Tensor]] = [
    lambda t, o, r: t * 2 + 1,
    lambda t, o, r: t.clone(),
    lambda t, o, r: torch.sin(t),
    lambda t, o, r: t + o.sum(),
    lambda t, o, r: t.sum(0, keepdim=True) if t.dim() else t.exp(),
    lambda t, o, r: t.contiguous() * 1,
    lambda t, o, r: torch.cat([t, t]) if t.dim() else t + t,
]
WRITES: list[Callable[[torch.Tensor, torch.Tensor, random.Random], Any]] = [
    lambda t, o, r: t.add_(1),
    lambda t, o, r: t.mul_(o.mean()),
    lambda t, o, r: t.zero_(),
    lambda t, o, r: t.copy_(o.sum() * torch.ones_like(t)),
    lambda t, o, r: t.fill_(2.0),
    lambda t, o, r: t.tanh_(),
    lambda t, o, r: t.masked_fill_(t > 0.5, 0.25),
]


def program(seed: int, grad: bool) -> Callable[..., Any]:
    """A function of two tensors, the same for the same seed."""

    def run(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        r = random.Random(seed)
        pool = [x, y]
        for _ in range(r.randrange(2, 9)):
            t, other = r.choice(pool), r.choice(pool)
            kind = r.random()
            if kind < 0.4:
                pool.append(r.choice(VIEWS)(t, r))
            elif kind < 0.65:
                pool.append(r.choice(PURE)(t, other, r))
            elif kind < 0.92:
                pool.append(r.choice(WRITES)(t, other, r))
            else:
                pool.append(t.detach())
        return tuple(r.sample(pool, r.randrange(1, min(4, len(pool)) + 1)))

    run.__name__ = f"program_{seed}"
    return run


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_program(seed: int) -> None:
    check(program(seed, False), torch.randn(3, 4), torch.randn(4, 2, 3), falls_back=None)


@pytest.mark.parametrize("seed", range(1000, 1000 + COUNT))
def test_random_program_with_gradients(seed: int) -> None:
    specs = (("inner", 3, 4), ("inner" if seed % 2 else "fixed", 4, 2, 3))
    inputs, _ = test_training.build(specs, 3)
    try:
        out = program(seed, True)(*inputs)
        roots = [t for t in dict.fromkeys([*out, *inputs]) if t.grad_fn is not None]
        sum((t * 1.5).sum() for t in roots).backward()  # type: ignore[union-attr]
    except RuntimeError:
        pytest.skip("not a program that autograd accepts")
    test_training.check(program(seed, True), specs, falls_back=None)
