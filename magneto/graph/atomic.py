"""A captured graph run in program order, which leaves no trace when it fails half-way: the interpreter then runs the frame again from the region's start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def atomic(gm: fx.GraphModule, compiled: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`compiled`, by default `gm.forward`; where it writes to inputs, with their values put back before an error leaves it.

    What autograd has recorded for a write cannot be taken back: such an error is marked `magneto_applied`, and passes through the region to the program.
    """
    forward: Callable[..., Any] = compiled or gm.forward
    written = gm.meta.get("magneto", {}).get("mutated_inputs", ()) if hasattr(gm, "meta") else ()
    if not written:
        return forward

    def run(*inputs: Any) -> Any:
        with torch.no_grad():
            saved = [(t, t.clone(), t.grad_fn, None if t.is_inference() else t._version) for t in map(inputs.__getitem__, written)]
        try:
            return forward(*inputs)
        except Exception as error:
            with torch.no_grad():
                for tensor, _before, grad_fn, _version in saved:
                    if tensor.grad_fn is not grad_fn:
                        error.magneto_applied = True  # type: ignore[attr-defined]
                        break
                else:
                    for tensor, before, _, version in saved:
                        if before.shape == tensor.shape and not torch.equal(before, tensor):
                            tensor.copy_(before)
                        if version is not None:
                            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
            raise

    return run
