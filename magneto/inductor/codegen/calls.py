"""Fast callables for library calls: torch's own C functions where one takes the operation's arguments as they are.

An OpOverload called through Python costs 1.2-1.7 us, the C function of the public namespace 0.7-0.9 us. A row is right only if positional order,
keyword names and meaning are the same; the test calls both for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from magneto.inductor.loops.ir import LibraryCall

aten = torch.ops.aten

FAST: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.mv.default: torch.mv,
    aten.dot.default: torch.dot,
    aten.cat.default: torch.cat,
    aten.convolution.default: torch.convolution,
    aten.index_select.default: torch.index_select,
    aten.gather.default: torch.gather,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.max_pool2d_with_indices.default: torch._C._nn.max_pool2d_with_indices,
    aten.avg_pool2d.default: torch._C._nn.avg_pool2d,
    aten._adaptive_avg_pool2d.default: torch._C._nn.adaptive_avg_pool2d,
    aten.scaled_dot_product_attention.default: torch._C._nn.scaled_dot_product_attention,
    aten._scaled_dot_product_flash_attention_for_cpu.default: getattr(
        torch, "_scaled_dot_product_flash_attention_for_cpu", aten._scaled_dot_product_flash_attention_for_cpu.default
    ),
}


def fast_callable(step: LibraryCall) -> Callable[..., Any]:
    """What a plan calls for a library call; with `out_op`, it takes the out= arguments by keyword."""
    function = FAST.get(step.op)
    if function is None:
        return _direct(step.out_op if step.out_op is not None else step.op)
    return function if step.out_op is None or len(step.buffers) == 1 else _direct(step.out_op)


@cache
def _direct(op: Any) -> Callable[..., Any]:
    """The operation behind an OpOverload, without its Python layer."""
    return op if not isinstance(op, torch._ops.OpOverload) else getattr(op, "_op", op)
