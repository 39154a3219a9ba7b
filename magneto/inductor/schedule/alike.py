"""Kernels of repeated layers differ in the names of buffers and symbols only: `likeness(kernel)` is equal for such kernels, so that their text is written once.

Writing the text of a kernel costs several times as much as renaming what it is written from.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from magneto.inductor.loops.ir import IndexValue, Indirect, Load, Masked, Op, Value
from magneto.inductor.schedule.kernel import FusedKernel
from magneto.symbolic import Expr, Sym, add, substitute


def likeness(kernel: FusedKernel) -> Hashable:
    """All on which a kernel's text depends, over names that count from 0 in the order in which they occur. The order of its pointers is a part of that: several places that one index is computed from
    are read in the order of what they are called."""
    dims = (*kernel.rows, *kernel.cols)
    to = Renaming({dim.sym: Sym(f"q{i}", 0, dim.size - 1) for i, dim in enumerate(dims)})
    members = tuple(
        (
            to.name(m.name), m.kind, m.full, m.down, m.acc_dtype, m.buffer.dtype, m.buffer.nbytes,
            to.value(m.body), to.index(m.store), None if m.flat is None else to.index(m.flat),
        )
        for m in kernel.members
    )  # fmt: skip
    return (
        tuple(d.size for d in kernel.rows),
        tuple(d.size for d in kernel.cols),
        members,
        tuple(map(to.name, (*kernel.reads(), *kernel.stored))),
    )


class Renaming:
    """`offsets`: buffer -> the element at which its memory is taken to begin."""

    def __init__(self, symbols: dict[Expr, Expr], offsets: Mapping[str, int] | None = None) -> None:
        self.symbols, self.offsets = symbols, offsets or {}
        self.names: dict[str, str] = {}
        self.values: dict[Value, Value] = {}
        self.indices: dict[Expr, Expr] = {}

    def name(self, buffer: str) -> str:
        found = self.names.get(buffer)
        if found is None:
            found = self.names[buffer] = f"b{len(self.names)}"
        return found

    def index(self, index: Expr) -> Expr:
        found = self.indices.get(index)
        if found is None:
            places = sorted([s for s in index.free if isinstance(s, Indirect)], key=lambda s: s.key)
            computed: dict[Expr, Expr] = {s: Indirect(self.value(s.value), s.extent) for s in places}
            found = self.indices[index] = substitute(index, {**self.symbols, **computed} if computed else self.symbols)
        return found

    def value(self, value: Value) -> Value:
        found = self.values.get(value)
        if found is not None:
            return found
        result = value
        if isinstance(value, Load):
            offset = self.offsets.get(value.buffer, 0)
            result = Load(self.name(value.buffer), self.index(add(value.index, -offset) if offset else value.index), value.dtype)
        elif isinstance(value, IndexValue):
            result = IndexValue(self.index(value.expr), value.dtype)
        elif isinstance(value, Op):
            result = Op(value.name, tuple([self.value(a) for a in value.args]), value.dtype)
        elif isinstance(value, Masked):
            result = Masked(self.value(value.cond), self.value(value.value), self.value(value.other))
        self.values[value] = result
        return result
