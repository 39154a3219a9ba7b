"""The table of view operations: how to write through each, and how each reads as a method call.

A view is described by a `ViewStep` applied to its parent. Writing a new value `v` through a view gives the parent's new value:
`parent' = inverse(parent, v)`. Operations that return several views are recorded as the single slice or select of each result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from magneto.aot_autograd.refusal import Refusal
from magneto.base.dataclass import dataclass
from magneto.graph.layout import overlaps
from magneto.graph.meta import TensorMeta

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ViewStep:
    """`op(parent, *args)`; args are constants. `among`: the operation with several results that gave it first, its arguments and which result it is."""

    op: Any
    args: tuple[Any, ...]
    among: tuple[Any, tuple[Any, ...], int] | None = None


class Emitter(Protocol):
    """What an inverse needs to build nodes."""

    def emit(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node: ...

    def reshape(self, value: fx.Node, shape: tuple[int, ...]) -> fx.Node: ...

    def flatten(self, value: fx.Node) -> fx.Node: ...

    def unflatten(self, flat: fx.Node, meta: TensorMeta) -> fx.Node: ...


# (emitter, step, function giving the parent's present value, parent's meta, new value) -> the parent's new value
Inverse = Callable[[Emitter, ViewStep, Callable[[], fx.Node], TensorMeta, fx.Node], fx.Node]


def _to_parent_shape(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.reshape(value, meta.shape)


def _permute(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    n = len(meta.shape)
    order = [d % n for d in step.args[0]]
    return e.emit(aten.permute.default, (value, [order.index(d) for d in range(n)]))


def _same_again(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.emit(step.op, (value, *step.args))


def _select(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.emit(aten.select_scatter.default, (present(), value, *step.args))


def _slice(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.emit(aten.slice_scatter.default, (present(), value, *step.args))


def _diagonal(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.emit(aten.diagonal_scatter.default, (present(), value, *step.args))


def _as_strided(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    size, stride, _ = step.args
    if overlaps(size, stride):
        raise Refusal("a write through a view that overlaps itself")
    if not meta.is_dense():
        raise Refusal("as_strided of a tensor with gaps")
    flat = e.flatten(present())
    tail = e.emit(aten.as_strided_scatter.default, (_tail(e, flat, step), value, size, stride))
    first = step.args[2]
    return e.unflatten(e.emit(aten.slice_scatter.default, (flat, tail, 0, first, meta.numel)) if first else tail, meta)


def _tail(e: Emitter, flat: fx.Node, step: ViewStep) -> fx.Node:
    """The elements from the step's offset on. An explicit offset would count from where the storage begins, which `flat` may share with others."""
    numel = flat.meta["val"].numel
    return e.emit(aten.slice.Tensor, (flat, 0, step.args[2], numel)) if step.args[2] else flat


def strided(e: Emitter, flat: fx.Node, step: ViewStep) -> fx.Node:
    """`as_strided` of a value's elements in the order of its memory."""
    return e.emit(step.op, (_tail(e, flat, step), *step.args[:2]))


def _retype(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.emit(aten.view.dtype, (value, meta.dtype))


def _real_to_complex(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.emit(aten.view_as_complex.default, (value,))


def _complex_to_real(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    return e.emit(aten.view_as_real.default, (value,))


INVERSES: dict[Any, Inverse] = {
    aten.view.default: _to_parent_shape, aten.squeeze.default: _to_parent_shape, aten.squeeze.dim: _to_parent_shape,
    aten.squeeze.dims: _to_parent_shape, aten.unsqueeze.default: _to_parent_shape, aten.permute.default: _permute,
    aten.transpose.int: _same_again, aten.t.default: _same_again, aten.select.int: _select, aten.slice.Tensor: _slice,
    aten.diagonal.default: _diagonal, aten.as_strided.default: _as_strided, aten.view.dtype: _retype,
    aten.view_as_real.default: _real_to_complex, aten.view_as_complex.default: _complex_to_real, aten._conj.default: _same_again,
    aten._neg_view.default: _same_again,
}  # fmt: skip


def write_through(e: Emitter, step: ViewStep, present: Callable[[], fx.Node], meta: TensorMeta, value: fx.Node) -> fx.Node:
    """The parent's new value after `value` was written to its view `step`. `present` gives the parent's value before; it is called only when
    some of it survives."""
    inverse = INVERSES.get(step.op)
    if inverse is None:
        raise Refusal(f"a write through {step.op}")
    return inverse(e, step, present, meta, value)


# How a step reads on a real tensor; `{0}`, `{1}`: its arguments. Others are called through torch.ops.
METHODS: dict[Any, str] = {
    aten.view.default: ".view({0})", aten.view.dtype: ".view({0})", aten.squeeze.default: ".squeeze()", aten.squeeze.dim: ".squeeze({0})",
    aten.squeeze.dims: ".squeeze({0})", aten.unsqueeze.default: ".unsqueeze({0})", aten.permute.default: ".permute({0})",
    aten.transpose.int: ".transpose({0}, {1})", aten.t.default: ".t()", aten.select.int: ".select({0}, {1})",
    aten.expand.default: ".expand({0})", aten.unfold.default: ".unfold({0}, {1}, {2})", aten.detach.default: ".detach()",
}  # fmt: skip


def normalised(op: Any, args: tuple[Any, ...], result_index: int | None, parent: TensorMeta, result: torch.Tensor) -> ViewStep:
    """The step of one result of `op(parent, *args)`."""
    if result_index is None:
        if op is aten._unsafe_view.default or op is aten._reshape_alias.default:
            return ViewStep(aten.view.default, (list(result.shape),))
        return ViewStep(op, args)
    n = len(parent.shape)
    if op is aten.unbind.int:
        dim = (args[0] if args else 0) % n
        return ViewStep(aten.select.int, (dim, result_index), (op, args, result_index))
    unsafe = op is aten.unsafe_split.Tensor or op is aten.unsafe_split_with_sizes.default  # each result is, for autograd, no view
    if unsafe or op is aten.split.Tensor or op is aten.split_with_sizes.default:
        sizes = args[0]
        dim = (args[1] if len(args) > 1 else 0) % n
        start = result_index * sizes if isinstance(sizes, int) else sum(sizes[:result_index])
        return ViewStep(aten.slice.Tensor, (dim, start, start + result.shape[dim]), None if unsafe else (op, args, result_index))
    raise Refusal(f"a view operation with several results, {op}")


# Their results share memory, and so the version counter, with their argument.
VIEWS = frozenset(
    """view t transpose permute expand squeeze unsqueeze select slice alias detach diagonal unfold split split_with_sizes unbind
    as_strided view_as_real view_as_complex _reshape_alias getitem""".split()
)


def packet_of(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    return str(getattr(node.target, "_schema", None) and node.target._schema.name.split("::")[1])  # type: ignore[union-attr]


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view is."""
    while node.op == "call_function" and packet_of(node) in VIEWS:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and packet_of(source) not in VIEWS:
            break
        node = source
    return node
