"""The gradients that a compiled backward is called with: laid out as its graph expects them, and given up when nobody else has them.

Autograd's engine holds the arguments of a backward until it returns. A graph of many layers reads them first and would keep them to its end, where eager's first node has let them go.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.meta import TensorMeta

_NOBODY = (0, 0)
_LARGE = 1 << 16  # bytes from which a gradient is worth giving up


def laid_out(gradient: torch.Tensor, meta: TensorMeta, any_layout: bool) -> torch.Tensor:
    """The gradient laid out as the backward graph expects it."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if (gradient.stride() != meta.strides and not any_layout) or gradient.is_conj() or gradient.is_neg():
        return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device).copy_(gradient)
    return gradient


def given_up(gradients: Sequence[Any]) -> Sequence[Any]:
    """The gradients, of which large ones that the engine alone has are other tensors on the same memory; the engine's are left without any. To be called by `backward` with its `*gradients`."""
    large = [_is_large(gradient) for gradient in gradients]
    if True not in large:
        return gradients
    alone = _counts_alone()
    counts = _counts(gradients)  # one reference more is somebody else's
    return [_taken(gradients[i]) if large[i] and counts[i] == alone else gradients[i] for i in range(len(counts))]


def _is_large(gradient: Any) -> bool:
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided or gradient.nbytes < _LARGE:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(gradient)


def _taken(gradient: torch.Tensor) -> torch.Tensor:
    taken = gradient.detach()
    gradient.data = _nothing(gradient.dtype, gradient.device)
    return taken


@functools.cache
def _counts_alone() -> tuple[int, int]:
    """The counts of a gradient that only the engine has, in this version of Python and of torch."""
    with torch.enable_grad():
        x = torch.zeros(2, device="cpu", requires_grad=True)
        torch.autograd.grad(2 * _Probe.apply(x), x, torch.ones(2, device="cpu"))  # type: ignore[no-untyped-call]
    return _Probe.found


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _counts(gradients: Sequence[Any]) -> list[tuple[int, int]]:
    """References to each gradient, from Python and from elsewhere."""
    return [_NOBODY if gradient is None else (sys.getrefcount(gradient), gradient._use_count()) for gradient in gradients]


class _Probe(torch.autograd.Function):
    """A backward whose gradient nobody else has."""

    found = _NOBODY

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _Probe.found = _counts(gradients)[0]
        return gradients
