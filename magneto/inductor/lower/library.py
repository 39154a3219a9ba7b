"""Library calls: ATen operations (and prims without a loop form) that run as they are on strided buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from magneto.graph.rules_view import slice_bounds
from magneto.inductor.loops.ir import Buffer, LibraryCall, Reduction, Size, ViewOf
from magneto.inductor.lower.box import Box, Stored, View
from magneto.inductor.lower.context import (
    UNSUPPORTED_DTYPES,
    CannotLower,
    Lowering,
    compact_strides,
    dense_strides,
    is_dense,
    point_count,
    same_layout,
    stored_once,
)
from magneto.symbolic import add, mul

aten = torch.ops.aten

OUT_OPS: dict[Any, Any] = {
    aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out, aten.bmm.default: aten.bmm.out,
    aten.baddbmm.default: aten.baddbmm.out, aten.mv.default: aten.mv.out, aten.addmv.default: aten.addmv.out,
    aten.dot.default: aten.dot.out, aten.cat.default: aten.cat.out, aten.index_select.default: aten.index_select.out,
    aten.gather.default: aten.gather.out, aten.cumsum.default: aten.cumsum.out, aten.topk.default: aten.topk.values,
    aten.avg_pool2d.default: aten.avg_pool2d.out, aten.lgamma.default: aten.lgamma.out,
}  # fmt: skip
"""Operations whose out= overload computes straight into a tensor of the right size and any strides (no hidden copy)."""

ANY_STRIDES = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default, aten.addmv.default,
    aten.dot.default, aten.cat.default, aten.index_select.default, aten.gather.default, aten.embedding.default,
    aten.scaled_dot_product_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
})  # fmt: skip
"""Operations whose result (its strides included) does not depend on the strides of their arguments, or whose output the plan lays out.
For all others the arguments get exactly the strides that eager would give them."""

MATRIX_ARGS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}
"""Positions of the arguments that BLAS reads: one of the last two strides must be 1."""


FRESH_RESULTS = frozenset({
    aten.scaled_dot_product_attention.default, aten.matmul.default, aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.batch_norm.default, aten.layer_norm.default, aten.group_norm.default, aten.einsum.default, aten.max_pool2d.default,
    aten.softmax.int, aten.log_softmax.int,
})  # fmt: skip
"""Composites that never return an argument."""

IN_PLACE: dict[Any, Any] = {
    aten.scatter.src: aten.scatter_.src, aten.scatter.value: aten.scatter_.value, aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two, aten.index_add.default: aten.index_add_.default, aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default, aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar, aten.masked_scatter.default: aten.masked_scatter_.default,
}  # fmt: skip
"""Operations that write into a copy of their first argument: the copy is a loop, which what is copied fuses with."""

REPEATABLE = frozenset(
    {aten.copy_.default, *IN_PLACE.values()} - {aten.scatter_add_.default, aten.scatter_reduce_.two, aten.index_add_.default}
)
"""Those that leave what they have left before where they write again (`index_put_` where it does not add)."""

FILLS: dict[Any, Any] = {
    aten.exponential.default: aten.exponential_.default, aten.uniform.default: aten.uniform_.default, aten.normal_functional.default: aten.normal_.default,
    aten.geometric.default: aten.geometric_.default, aten.cauchy.default: aten.cauchy_.default, aten.log_normal.default: aten.log_normal_.default,
}  # fmt: skip
"""Draws that read nothing of their first argument."""

ALIASING_PRIMS = frozenset({"broadcast_in_dim", "reshape", "transpose", "slice", "flip", "convert_element_type"})


@cache
def may_alias(op: Any) -> bool:
    """May a result share memory with an argument? By the schema, and for every composite (it may return its argument)."""
    if not isinstance(op, torch._ops.OpOverload):
        return op.name in ALIASING_PRIMS
    if op in FRESH_RESULTS:
        return False
    if any(r.alias_info is not None for r in op._schema.returns):
        return True
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


@cache
def mutated_args(op: Any) -> tuple[str, ...]:
    """Names of the arguments an operation writes."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return ()
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _blas_ready(shape: tuple[Size, ...], strides: tuple[Size, ...]) -> bool:
    """Do the last two dimensions form a matrix that BLAS takes without a copy?"""
    (m, n), (s, t) = shape[-2:], strides[-2:]
    if not all(isinstance(x, int) for x in (m, n, s, t)):
        return True
    return (t == 1 and (s >= max(1, n) or m == 1)) or (s == 1 and (t >= max(1, m) or n == 1))  # type: ignore[operator,type-var]


def tensor_arg(low: Lowering, box: Box, exact: bool, matrix: bool) -> ViewOf:
    """The box as a strided argument: a view where that will do, otherwise a copy of it in eager's layout."""
    form = low.strided_form_of(box)
    if form is not None and _good(box, form[0], exact, matrix):
        view = low.strided(box)
        assert view is not None
        return view
    strides = tuple(box.strides) if exact and _has_no_gaps(box) else compact_strides(box.shape, box.strides)
    if matrix and not _blas_ready(box.shape, strides):
        strides = dense_strides(box.shape)
    if not isinstance(box, View):
        stored = low.realise(box)
        if same_layout(box.shape, stored.strides, strides):
            return ViewOf(stored.buffer.name, box.shape, stored.strides, 0, box.dtype)
    stored = low.copy(box, strides)
    return ViewOf(stored.buffer.name, box.shape, strides, 0, box.dtype)


def _good(box: Box, strides: tuple[Size, ...], exact: bool, matrix: bool) -> bool:
    if exact and not same_layout(box.shape, strides, box.strides) and _has_no_gaps(box):
        return False
    return not matrix or _blas_ready(box.shape, strides)


def _has_no_gaps(box: Box) -> bool:
    """In eager. Elements may be repeated: a kernel of attention wants the rows of a mask dense that all samples share."""
    return is_dense(stored_once(box.shape, box.strides), box.strides)


def _convert_args(low: Lowering, op: Any, x: Any, exact: bool, position: int | None = None) -> Any:
    if isinstance(x, Box):
        return tensor_arg(low, x, exact, position is not None and position in MATRIX_ARGS.get(op, ()))
    if isinstance(x, list | tuple):
        return tuple(_convert_args(low, op, y, exact) for y in x)
    return x


def _outputs(low: Lowering, val: Any) -> tuple[tuple[Buffer | None, ...], bool, tuple[int, ...]]:
    """Buffers for what the operation returns, with eager's strides; whether it returns one tensor rather than a tuple; and, where lists of
    tensors are among its results, the length of each (-1 for a result that is no list)."""
    single = not isinstance(val, list | tuple)
    results = (val,) if single else val
    lists = tuple(len(v) if isinstance(v, list | tuple) else -1 for v in results)
    made: list[Buffer | None] = []
    for result in results:
        for v in result if isinstance(result, list | tuple) else (result,):
            made.append(low.new_buffer(v.shape, v.strides, v.dtype, v.device) if hasattr(v, "strides") else None)
    return tuple(made), single, lists if any(n >= 0 for n in lists) else ()


def _grouped(flat: tuple[Any, ...], lists: tuple[int, ...]) -> tuple[Any, ...]:
    """The results in the form in which the operation returns them."""
    rest = iter(flat)
    return tuple(next(rest) if n < 0 else tuple(next(rest) for _ in range(n)) for n in lists) if lists else flat


def emit_call(low: Lowering, op: Any, args: Sequence[Any], kwargs: dict[str, Any], val: Any) -> Any:
    """Appends a LibraryCall; returns the box of its output, a tuple of them, or None where an output is no tensor."""
    if (found := _in_place(low, op, args, kwargs, val)) is not None:
        return found
    mutated = mutated_args(op)
    exact = bool(mutated) or op not in ANY_STRIDES
    call_args = tuple(_convert_args(low, op, a, exact, n) for n, a in enumerate(args))
    call_kwargs = tuple(sorted((k, _convert_args(low, op, v, exact)) for k, v in kwargs.items()))
    if op is aten.native_dropout.default and low.on_gpu and not kwargs:
        call_args = (_beginning_a_memory(low, args[0], call_args[0]), *call_args[1:])
    mutates: tuple[str, ...] = ()
    if mutated:
        mutates = _prepare_mutation(low, op, mutated, args, call_args, kwargs, dict(call_kwargs))
    outputs, single, lists = _outputs(low, val)
    name = next((b.name for b in outputs if b is not None), None) or low.fresh_name()
    out_op = OUT_OPS.get(op) if all(b is not None for b in outputs) else None
    call = LibraryCall(name, op, call_args, call_kwargs, outputs, single, out_op, mutates, may_alias(op), low.origins, lists)
    low.nodes.append(call)
    if all(view.buffer in low.steady for view in call.views):
        low.steady.update(b.name for b in outputs if b is not None)
    boxes = tuple(None if b is None else Stored(b) for b in outputs)
    return boxes[0] if single else _grouped(boxes, lists)


def _in_place(low: Lowering, op: Any, args: Sequence[Any], kwargs: dict[str, Any], val: Any) -> Stored | None:
    """An operation of the tables above, in memory that nothing else uses."""
    if op is aten.slice_scatter.default:
        return _into_slice(low, val, *args, **kwargs)
    if not (op in IN_PLACE or op in FILLS) or not is_dense(val.shape, val.strides) or args[0].dtype is not val.dtype:
        return None
    if op in FILLS:
        options = {"dtype": val.dtype, "device": val.device}
        held = emit_call(low, aten.empty_strided.default, (tuple(val.shape), tuple(val.strides)), options, val)
    elif val.dtype in UNSUPPORTED_DTYPES:
        return None
    else:
        held = _own(low, args[0], val, [*args[1:], *kwargs.values()])
    low.steady.discard(held.buffer.name)
    emit_call(low, IN_PLACE.get(op) or FILLS[op], (held, *args[1:]), kwargs, None)
    return held  # type: ignore[no-any-return]


def _own(low: Lowering, box: Box, val: Any, others: Sequence[Any]) -> Stored:
    """A copy of the box that nothing else uses; itself where it is one that only this operation reads, and only there."""
    alone = isinstance(box, Stored) and low.own.get(box.buffer.name) == 1 and same_layout(box.shape, box.strides, val.strides)
    beside = [one for other in others for one in (other if isinstance(other, list | tuple) else (other,)) if isinstance(one, Box)]
    if not alone or any(box.buffer.name in one.reads for one in beside):  # type: ignore[attr-defined]
        box = low.copy(box, tuple(val.strides), fresh=True)
    assert isinstance(box, Stored)
    low.own[box.buffer.name] = low.uses
    return box


def _into_slice(
    low: Lowering, val: Any, x: Box, source: Box, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Stored | None:
    if x.dtype is not source.dtype or x.dtype in UNSUPPORTED_DTYPES or not is_dense(val.shape, val.strides):
        return None
    d = dim % len(x.shape)
    first, last, step = slice_bounds(x.shape[d], start, end, step)  # type: ignore[arg-type]
    held = _own(low, x, val, [source])
    low.steady.discard(held.buffer.name)
    shape, strides = list(val.shape), list(val.strides)
    shape[d], strides[d] = -(-(last - first) // step), val.strides[d] * step
    if shape[d]:
        part = View(held, lambda i: (*i[:d], add(0, first, mul(i[d], step)), *i[d + 1 :]), tuple(shape), tuple(strides))
        emit_call(low, aten.copy_.default, (part, source), {}, None)
    return held


def _beginning_a_memory(low: Lowering, box: Box, view: ViewOf) -> ViewOf:
    """An argument whose numbers depend on where its memory begins: at a multiple of 16 bytes, as in eager (aot_autograd/special.py), though it be a part of something or an input here."""
    made = {b.name: n for n in low.nodes for b in (n.buffers if isinstance(n, (LibraryCall, Reduction)) else (n.buffer,)) if b is not None}
    maker = made.get(view.buffer)
    indifferent = point_count(view.shape) % 2 or not is_dense(box.shape, box.strides)  # one element at a time
    if not point_count(view.shape) % 2 and indifferent and is_dense(view.shape, view.strides):
        raise CannotLower("dropout of memory without the gaps that eager's has")
    if indifferent or view.offset == 0 and maker is not None and not (isinstance(maker, LibraryCall) and maker.may_alias):
        return view
    return ViewOf(low.copy(box, view.strides, fresh=True).buffer.name, view.shape, view.strides, 0, view.dtype)


def _prepare_mutation(
    low: Lowering, op: Any, names: Sequence[str], args: Sequence[Any], call_args: Sequence[Any], kwargs: dict[str, Any],
    call_kwargs: dict[str, Any],
) -> tuple[str, ...]:  # fmt: skip
    """The buffers that the call writes. What reads them lazily is realised before. An argument that could only be passed as a copy
    cannot be written."""
    formal = [a.name for a in op._schema.arguments]
    boxes = dict(zip(formal, args, strict=False)) | kwargs
    views = dict(zip(formal, call_args, strict=False)) | call_kwargs
    written: list[str] = []
    for name in names:
        box, view = boxes.get(name), views.get(name)
        if not isinstance(box, Box) or not isinstance(view, ViewOf):
            continue
        root = box.root
        if not isinstance(root, Stored) or root.buffer.name != view.buffer:
            raise CannotLower(f"{op} writes an argument that is no strided view")
        low.before_mutation(view.buffer)
        written.append(view.buffer)
    return tuple(dict.fromkeys(written))
