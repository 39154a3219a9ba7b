"""Functions that take another way under a dispatch mode than in eager, laid out as eager's way lays out its result.

`max_pool1d` without a gradient has a kernel of its own, which answers contiguously; under a mode it is `max_pool2d_with_indices` of one row more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _contiguous_unless_recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        x = args[0] if args else kwargs.get("input", kwargs.get("self"))
        if not isinstance(result, torch.Tensor) or not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return result
        if (x.requires_grad and torch.is_grad_enabled()) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return result
        return result.contiguous()

    return called


WAYS: dict[Callable[..., Any], Callable[..., Any]] = {
    call: _contiguous_unless_recorded(call)
    for call in (torch.max_pool1d, torch.nn.functional.max_pool1d, torch.ops.aten.max_pool1d.default)
}
BY_ID = {id(call): way for call, way in WAYS.items()}

__all__ = ["BY_ID", "WAYS"]
