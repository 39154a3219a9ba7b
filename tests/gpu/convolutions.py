"""Convolutional networks with TF32, where they are laid out channels-last and norms become part of convolutions: not much further from float64
than eager (whose kernels may be float32 where ours are TF32: in training a mask that flips is a percent)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import magneto
from magneto.base import events

DEVICE = "cuda"


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.a, self.an = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.b, self.bn = nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer)
        self.short = nn.Sequential(nn.Conv2d(inner, outer, 1, stride), nn.BatchNorm2d(outer)) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn(self.b(torch.relu(self.an(self.a(x)))))
        return torch.relu(y + self.short(x))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Residual(32, 32),
        Residual(32, 64, 2),
        Residual(64, 64),
    )


def mobile() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.BatchNorm2d(32), nn.Hardswish(),
        nn.Conv2d(32, 64, 1), nn.GELU(), nn.Conv2d(64, 64, 3, 1, 1, groups=4), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def decoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(32, 32, 3, padding=1), nn.Sigmoid(),
        nn.ConvTranspose2d(32, 8, 2, 2), nn.Tanh(),
    )  # fmt: skip


def run(make: Callable[[], nn.Module], train: bool, dtype: torch.dtype) -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = True, False
    try:
        _run(make, train, dtype)
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before


def _run(make: Callable[[], nn.Module], train: bool, dtype: torch.dtype) -> None:
    magneto.reset()
    events.reset()
    torch.manual_seed(0)
    model = make()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            assert m.running_mean is not None and m.running_var is not None
            nn.init.normal_(m.running_mean, std=0.3), nn.init.uniform_(m.running_var, 0.5, 2), nn.init.uniform_(m.weight, -1.5, 1.5)
    exact = model.to(DEVICE).double().train(train)
    plain, ours = (copy.deepcopy(exact).to(dtype) for _ in range(2))
    compiled = magneto.optimize("inductor")(ours)
    far: dict[int, float] = {}
    near: dict[int, float] = {}
    for call in range(4):
        x = torch.randn(8, 3, 64, 64).to(DEVICE).double()
        found: list[list[torch.Tensor]] = []
        for net, fn, kind in ((exact, exact, torch.float64), (plain, plain, dtype), (ours, compiled, dtype)):
            given = x.to(kind).clone().requires_grad_(train)
            with torch.enable_grad() if train else torch.no_grad():
                out = fn(given)
            if train:
                net.zero_grad()
                (out * torch.linspace(0.5, 1.5, out.numel(), device=DEVICE, dtype=kind).view(out.shape)).sum().backward()
            found.append([out.detach(), *([given.grad, *(p.grad for p in net.parameters())] if train else []), *net.buffers()])  # type: ignore[list-item]
        for n, (e, p, o) in enumerate(zip(*found, strict=True)):
            assert (o.shape, o.stride(), o.dtype) == (p.shape, p.stride(), p.dtype), (
                f"call {call}, tensor {n}: {o.stride()} for {p.stride()}"
            )
            if e.double().norm() >= 1e-6 * e.numel() ** 0.5:  # the gradient of a bias before a norm is nothing but noise
                far[n], near[n] = max(far.get(n, 0.0), distance(o, e)), max(near.get(n, 0.0), distance(p, e))
    for n in far:  # of all calls: a gradient that nearly vanishes is noise in some of them
        assert far[n] <= 4 * near[n] + (0.05 if train else 1e-3), f"tensor {n}: {far[n]} from float64, eager {near[n]}"
    if not train:
        x = torch.randn(8, 3, 64, 64).to(DEVICE, dtype)
        x[0, 0, 3, 3] = float("nan")
        with torch.no_grad():
            assert torch.equal(compiled(x).isnan(), plain(x).isnan()), "a NaN is lost"
    reasons = [e.fields.get("reason") for e in events.events("fallback")]
    assert not reasons, f"ran in eager: {reasons}"


def distance(a: torch.Tensor, exact: torch.Tensor) -> float:
    return float((a.double() - exact.double()).norm() / (exact.double().norm() + 1e-12))


CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    f"convolutions: {make.__name__}{' trains' if train else ''} in {dtype}": partial(run, make, train, dtype)
    for make in (residual, mobile, decoder)
    for train in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
}
