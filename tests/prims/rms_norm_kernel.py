"""`python -m tests.prims.rms_norm_kernel`: rms norm where eager has a kernel for it, as on CUDA, although there is none: kernels for the CPU are registered, which changes what autograd and the
dispatcher do with the operation in the whole process. Fails where results differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

import magneto
from magneto.base import events


def wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def forward(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, inner = wide(x), tuple(range(x.ndim - len(shape), x.ndim))
    source = x.to(dtype)
    scale = torch.rsqrt((source * source).mean(inner, keepdim=True) + (torch.finfo(dtype).eps if eps is None else eps))
    result = source * scale if weight is None else source * scale * weight.to(dtype)
    return result.to(x.dtype).contiguous(), scale


def backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], scale: torch.Tensor, weight: torch.Tensor | None, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dtype, inner, outer = wide(x), tuple(range(x.ndim - len(shape), x.ndim)), tuple(range(x.ndim - len(shape)))
    assert scale.dtype is dtype
    g, normal = grad.to(dtype), x.to(dtype) * scale
    weighted = g if weight is None else g * weight.to(dtype)
    dx = (weighted - normal * (weighted * normal).mean(inner, keepdim=True)) * scale
    dweight = (g * normal).sum(outer) if outer else g * normal
    return dx.to(x.dtype) if mask[0] else None, dweight.to(weight.dtype) if mask[1] and weight is not None else None


def check(dtype: torch.dtype, affine: bool, eps: float | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = nn.RMSNorm(shape, eps=eps, elementwise_affine=affine).to(dtype)
    if affine:
        nn.init.normal_(norm.weight)
    x = torch.randn(5, 6, 48).to(dtype).requires_grad_()

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(norm(x * 2))

    def results(fn: object) -> list[torch.Tensor]:
        x.grad = None
        norm.zero_grad()
        y = fn(x)  # type: ignore[operator]
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in norm.parameters())]  # type: ignore[list-item]

    wanted = results(model)
    magneto.reset()
    compiled = magneto.optimize("inductor", nopython=True)(model)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    for _ in range(3):
        torch.testing.assert_close(results(compiled), wanted, rtol=tolerance, atol=tolerance)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x.detach()), wanted[0], rtol=tolerance, atol=tolerance)
    assert magneto.stats()["fallbacks"] == 0, events.events("fallback")


def below_autograd() -> None:
    """Where autograd is switched off, composite operations arrive as they are: `to` may copy."""
    x = torch.randn(4, 6).bfloat16()
    magneto.reset()
    compiled = magneto.optimize("inductor", nopython=True)(lambda x: (x.to(torch.float32) * 2).reshape(3, 8).flatten())
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), (x.float() * 2).flatten())
    assert magneto.stats()["fallbacks"] == 0, events.events("fallback")


if __name__ == "__main__":
    torch.set_num_threads(1)
    below_autograd()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", forward, "CPU")
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    for dtype, affine, eps in itertools.product((torch.float32, torch.bfloat16), (True, False), (None, 1e-2)):
        check(dtype, affine, eps, (48,))
    check(torch.float64, True, None, (6, 48))
    check(torch.float32, True, 1e-6, (5, 6, 48))
