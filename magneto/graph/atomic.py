"""A captured graph run in program order, which leaves no trace when it fails half-way: the interpreter then runs the frame again from the region's start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def atomic(gm: fx.GraphModule, compiled: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`compiled`, by default `gm.forward`; where it writes to inputs, with their values and histories put back before an error leaves it.

    What autograd has recorded for a write to a view, or to a tensor that retains its gradient, cannot be taken back: such an error is marked `magneto_applied`, and passes through the region to the program.
    """
    forward: Callable[..., Any] = compiled or _forward(gm)
    written = gm.meta.get("magneto", {}).get("mutated_inputs", ()) if hasattr(gm, "meta") else ()
    if not written:
        return forward

    def run(*inputs: Any) -> Any:
        saved = [Before(inputs[index]) for index in written]
        try:
            return forward(*inputs)
        except Exception as error:
            if not all(before.can_be_put_back() for before in saved):
                error.magneto_applied = True  # type: ignore[attr-defined]
                raise
            for before in saved:
                before.put_back()
            raise

    return run


def _forward(gm: fx.GraphModule) -> Callable[..., Any]:
    """`gm.forward`, whose code is written at the first call. (torch would then call the module: hooks on all modules, and an error printed.)"""
    lazy: Any = gm
    return (lambda *inputs: (lazy.real_recompile(), lazy.forward(*inputs))[1]) if isinstance(gm, _LazyGraphModule) else gm.forward


class Before:
    """A tensor that a graph writes, as it was before. The copy has the history of the tensor, so that one copied back has its gradients."""

    __slots__ = ("copy", "grad_fn", "owner", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.owner = tensor._base if tensor._is_view() else tensor  # a view finds a new node after each write, recorded or not
        self.grad_fn = self.owner.grad_fn  # type: ignore[union-attr]
        self.version = None if tensor.is_inference() else tensor._version
        with torch.set_grad_enabled(self.grad_fn is not None):
            self.copy = tensor.clone()

    def can_be_put_back(self) -> bool:
        return not self.recorded() or (self.owner is self.tensor and not self.tensor.retains_grad)  # type: ignore[attr-defined]

    def recorded(self) -> bool:
        return self.owner.grad_fn is not self.grad_fn  # type: ignore[union-attr]

    def put_back(self) -> None:
        tensor, recorded = self.tensor, self.recorded()
        if recorded:
            tensor.detach_()
        if recorded and self.grad_fn is not None:
            with torch.enable_grad():
                tensor.copy_(self.copy)
        elif self.copy.shape == tensor.shape and not torch.equal(self.copy, tensor):
            with torch.no_grad():
                tensor.copy_(self.copy)
        if self.version is not None:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (self.version,))
