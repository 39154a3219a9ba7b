"""Kernels that write an input's memory walk only the part of it that changes. `narrowed(kernel, into)`.

`cache[:, n] = token` is a choice for each element of the cache between the token and what is there. Along each dimension, elements whose choice is known to be what is there are left out at both ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from magneto.inductor.loops.ir import IndexValue, Load, Masked, Op, Value
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member
from magneto.symbolic import Const, Expr, Sym, add, evaluate

LONGEST = 1 << 16  # elements of a dimension that are looked at one by one, and
MOST = 64  # choices


def narrowed(kernel: FusedKernel, into: Mapping[str, str]) -> FusedKernel:
    """The kernel, all of whose members are written `into` inputs, over what changes; others as they are."""
    if not all(m.kind == POINT and m.full and m.name in into and m.name in kernel.stored for m in kernel.members):
        return kernel
    dims = (*kernel.rows, *kernel.cols)
    mapping: dict[Expr, Expr] = {}
    made: dict[Sym, Dim] = {}
    for dim in dims:
        hulls = [_changed(m, into[m.name], dim) for m in kernel.members]
        first, end = min(low for low, _ in hulls), max(high for _, high in hulls)
        if 0 <= first < end and 2 * (end - first) <= dim.size:
            symbol = Sym(f"n{len(made)}_{dim.sym.name}", 0, end - first - 1)
            mapping[dim.sym], made[dim.sym] = add(0, first, symbol), Dim(symbol, end - first)
    if not made:
        return kernel
    members = tuple(replace(m, body=_folded(m.body)) for m in (m.mapped(mapping, {}) for m in kernel.members))
    rows, cols = (tuple(made.get(d.sym, d) for d in side) for side in (kernel.rows, kernel.cols))
    return replace(kernel, rows=rows, cols=cols, members=members, why="; ".join(filter(None, (kernel.why, "only what changes is walked"))))


def _changed(member: Member, target: str, dim: Dim) -> tuple[int, int]:
    """First element along the dimension that may change, and the one behind the last."""
    if dim.size > LONGEST or not _has_choices(member.body):
        return 0, dim.size
    may = [k for k in range(dim.size) if not _stays(member, target, dim.sym, k)]
    return (may[0], may[-1] + 1) if may else (0, dim.size)


def _has_choices(body: Value) -> bool:
    count = 0
    while count <= MOST:
        if isinstance(body, Masked):
            body = body.other
        elif isinstance(body, Op) and body.name == "where":
            body = body.args[2]
        else:
            return count > 0
        count += 1
    return False


def _stays(member: Member, target: str, symbol: Sym, place: int) -> bool:
    """Whether every element at this place of the dimension is known to be what is there."""
    stack = [member.body]
    while stack:
        value = stack.pop()
        if isinstance(value, Masked):
            condition, sides = value.cond, (value.value, value.other)
        elif isinstance(value, Op) and value.name == "where":
            condition, sides = value.args[0], (value.args[1], value.args[2])
        elif isinstance(value, Load) and value.buffer == target and value.index is member.store:
            continue
        else:
            return False
        if isinstance(condition, IndexValue) and condition.expr.free <= {symbol}:
            sides = (sides[0] if evaluate(condition.expr, {symbol: place}) else sides[1],) * 2
        stack += set(sides)
    return True


def _folded(value: Value) -> Value:
    """Without choices that are decided."""
    if isinstance(value, Masked):
        if isinstance(value.cond, IndexValue) and isinstance(value.cond.expr, Const):
            return _folded(value.value if value.cond.expr.value else value.other)
        return Masked(value.cond, _folded(value.value), _folded(value.other))
    return value
