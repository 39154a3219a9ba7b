"""Fast callables for library calls: torch's own C functions where one takes the operation's arguments as they are.

An OpOverload called through Python costs 1.2-1.7 us, the C function of the public namespace 0.7-0.9 us. A row is right only if positional order,
keyword names and meaning are the same; the test calls both for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from magneto.graph.attention import ATTENTION, attention
from magneto.graph.rules_attention import seeded
from magneto.graph.rules_recurrent import call_of, keeping_workspace
from magneto.prims import PRIMS, Prim

if TYPE_CHECKING:
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
    ATTENTION: attention,
}


_names: dict[int, tuple[Callable[..., Any], str]] = {}  # by id: what has been handed out, and what it is called in any process


def fast_callable(step: LibraryCall) -> Callable[..., Any]:
    """What a plan calls for a library call; with `out_op`, it takes the out= arguments by keyword."""
    target = step.op if step.out_op is None else step.out_op
    if call_of(step.op, step.outputs) is keeping_workspace:
        function, name = keeping_workspace, f"keeping {step.op}"
    elif (again := seeded(step.op)) is not None:
        function, name = again, f"seeded {step.op}"
    elif step.op in FAST and (step.out_op is None or len(step.buffers) == 1):
        function, name = FAST[step.op], f"fast {step.op}"
    elif isinstance(target, torch._ops.OpOverload):
        function, name = _direct(target), f"direct {target}"
    else:
        return target
    _names[id(function)] = function, name
    return function


@cache
def _direct(op: Any) -> Callable[..., Any]:
    """The operation behind an OpOverload, without its Python layer."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def name_of_call(function: Any) -> str | None:
    """The name of what `fast_callable` has given; None for anything else."""
    if isinstance(function, Prim):
        return f"prim {function.name}"
    return _names[id(function)][1] if id(function) in _names else None


def call_named(name: str) -> Callable[..., Any]:
    """What has that name here. Raises where there is no such operation."""
    kind, _, path = name.partition(" ")
    if kind == "prim":
        return PRIMS[path]
    target: Any = torch.ops
    for part in path.split("."):
        target = getattr(target, part)
    if not isinstance(target, torch._ops.OpOverload):
        raise LookupError(name)
    kinds: dict[str, Callable[..., Any] | None] = {"keeping": keeping_workspace, "fast": FAST.get(target), "seeded": seeded(target)}
    function = kinds.get(kind, _direct(target))
    if function is None:
        raise LookupError(name)
    _names[id(function)] = function, name
    return function
