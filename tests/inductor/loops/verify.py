"""Well-formedness of Programs: names, data flow, dtypes, symbols, bounds. A broken program raises InvalidProgram with the node's text."""

from __future__ import annotations

from typing import Any

import torch

from magneto.inductor.loops.ir import (
    Buffer,
    Const,
    IndexValue,
    Indirect,
    LibraryCall,
    Load,
    Masked,
    Node,
    Op,
    Ordered,
    Pointwise,
    Program,
    Reduction,
    Value,
    ViewOf,
    index_symbols,
    iter_views,
    reduce_symbols,
    walk_values,
)
from magneto.inductor.loops.show import show_node, show_value
from magneto.symbolic import Expr, Sym

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
TO_BOOL = COMPARISONS | {"isnan", "isinf", "logical_not"}

REDUCTION_KINDS: dict[str, int] = {
    "sum": 1, "prod": 1, "max": 1, "min": 1, "any": 1, "all": 1, "argmax": 1, "argmin": 1, "welford": 2, "m2": 1,
}  # fmt: skip
"""Reduction kind -> number of output buffers."""


class InvalidProgram(Exception):
    """An invariant of the loops IR does not hold."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidProgram(message)


def _check_buffer(b: Buffer) -> None:
    _require(len(b.shape) == len(b.strides), f"{b.name}: {len(b.shape)} sizes, {len(b.strides)} strides")
    for s in (*b.shape, *b.strides):
        _require(not isinstance(s, int) or s >= 0, f"{b.name}: negative size or stride {s}")


def _check_op(v: Op) -> None:
    dtypes = [a.dtype for a in v.args]
    where = show_value(v)
    if v.name == "where":
        _require(len(v.args) == 3 and dtypes[0] is torch.bool and dtypes[1] is dtypes[2] is v.dtype, f"where: {where}")
    elif v.name == "convert_element_type":
        _require(len(v.args) == 1, f"convert_element_type takes one value: {where}")
    elif v.name == "uniform":
        good = len(v.args) == 5 and set(dtypes) == {torch.int64} and v.dtype is torch.float32
        _require(good and all(isinstance(a, Const) for a in v.args[3:]), f"uniform: {where}")
    else:
        _require(len(v.args) in (1, 2) and len(set(dtypes)) == 1, f"operands of several dtypes: {where}")
        _require(v.dtype is (torch.bool if v.name in TO_BOOL else dtypes[0]), f"result dtype: {where}")


def _check_symbols(e: Expr, allowed: frozenset[Sym], where: str) -> None:
    for s in e.free:
        if isinstance(s, Indirect):
            _require(not s.value.dtype.is_floating_point, f"indirect index of dtype {s.value.dtype}: {where}")
        else:
            _require(s in allowed or s.name[0] not in "ir" or not s.name[1:].isdigit(), f"{s.name} is no symbol of this node: {where}")


def _check_body(body: Value, allowed: frozenset[Sym], table: dict[str, Buffer]) -> None:
    masked: set[Value] = set()
    values = walk_values(body)
    for v in reversed(values):  # parents first: what stands only below a mask may be out of bounds
        if isinstance(v, Masked):
            masked.update(walk_values(v.value))
    for v in values:
        if isinstance(v, Op):
            _check_op(v)
        elif isinstance(v, Masked):
            _require(v.cond.dtype is torch.bool and v.value.dtype is v.other.dtype, f"masked: {show_value(v)}")
        elif isinstance(v, IndexValue):
            _check_symbols(v.expr, allowed, show_value(v))
        elif isinstance(v, Load):
            _check_load(v, allowed, table, v in masked)
        else:
            _require(isinstance(v, Const), f"not a value: {type(v)}")


def _check_load(v: Load, allowed: frozenset[Sym], table: dict[str, Buffer], may_be_outside: bool) -> None:
    where = show_value(v)
    _check_symbols(v.index, allowed, where)
    buffer = table.get(v.buffer)
    _require(buffer is not None, f"{v.buffer} is not defined before: {where}")
    assert buffer is not None
    _require(buffer.dtype is v.dtype, f"{v.buffer} is {buffer.dtype}: {where}")
    numel = buffer.storage_numel
    if not may_be_outside and isinstance(numel, int) and numel > 0:
        low, high = v.index.lo, v.index.hi
        _require(low is not None and low >= 0, f"index may be negative: {where}")
        _require(high is not None and high < numel, f"index up to {high} into {numel} elements: {where}")


def _check_view(v: ViewOf, table: dict[str, Buffer]) -> None:
    buffer = table.get(v.buffer)
    _require(buffer is not None, f"view of {v.buffer}, which is not defined before")
    assert buffer is not None
    _require(buffer.dtype is v.dtype and len(v.shape) == len(v.strides), f"view of {v.buffer}: dtype or rank")
    last: Any = v.offset
    for s, t in zip(v.shape, v.strides, strict=True):
        if isinstance(s, int) and s == 0:
            return
        last = last + (s - 1) * t
    if isinstance(last, int) and isinstance(buffer.storage_numel, int):
        _require(last < buffer.storage_numel, f"view reaches element {last} of {v.buffer}, which has {buffer.storage_numel}")


def _check_node(node: Node, table: dict[str, Buffer]) -> None:
    if isinstance(node, LibraryCall):
        for view in node.views:
            _check_view(view, table)
        _require(all(name in table for name in node.mutates), f"mutates {node.mutates}")
        _require(node.out_op is None or len(node.out_names) == len(node.buffers), "out_op and outputs differ in number")
        return
    if isinstance(node, Ordered):
        for value, ranges in ((node.body, node.ranges), (node.place, node.ranges), (node.init, node.buffer.shape)):
            if value is not None:
                _check_body(value, frozenset(s for s in index_symbols(ranges) if isinstance(s, Sym)), table)
        _require(node.body.dtype is node.buffer.dtype, f"body of {node.body.dtype} for a buffer of {node.buffer.dtype}")
        return
    allowed = [*index_symbols(node.ranges)]
    if isinstance(node, Reduction):
        allowed += reduce_symbols(node.reduce_ranges)
        _require(REDUCTION_KINDS.get(node.kind) == len(node.buffers), f"kind {node.kind} with {len(node.buffers)} outputs")
        _require(bool(node.reduce_ranges) and all(s != 1 for s in node.reduce_ranges), f"reduce ranges {node.reduce_ranges}")
        _require(node.body.dtype is node.acc_dtype, f"body of {node.body.dtype}, accumulated in {node.acc_dtype}")
        _require(all(b.shape == node.ranges for b in node.buffers), "outputs of different shapes")
    else:
        assert isinstance(node, Pointwise)
        _require(node.body.dtype is node.buffer.dtype, f"body of {node.body.dtype} for a buffer of {node.buffer.dtype}")
    if 0 not in (*node.ranges, *node.reduce_ranges):  # an empty loop evaluates nothing
        _check_body(node.body, frozenset(s for s in allowed if isinstance(s, Sym)), table)


def verify_program(program: Program) -> None:
    """Raises InvalidProgram where an invariant is broken."""
    table: dict[str, Buffer] = {}

    def define(b: Buffer) -> None:
        _require(b.name not in table, f"{b.name} is defined twice")
        _check_buffer(b)
        table[b.name] = b

    for buffer in program.inputs:
        if buffer is not None:
            define(buffer)
    for constant in program.constants:
        define(constant.buffer)
    for node in program.nodes:
        try:
            _check_node(node, table)
            for buffer in node.buffers:
                define(buffer)
        except InvalidProgram as e:
            raise InvalidProgram(f"{e}\nin\n{show_node(node)}") from None
    for view in iter_views(tuple(program.outputs)):
        _check_view(view, table)
