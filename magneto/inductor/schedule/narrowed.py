"""Kernels that write an input's memory walk only the part of it that changes. `narrowed(kernel, into)`.

`cache[:, n] = token` is a choice for each element of the cache between the token and what is there. Along each dimension, elements whose choice is known to be what is there are left out at both ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from magneto.inductor.loops.ir import Const as ValueConst
from magneto.inductor.loops.ir import IndexValue, Indirect, Load, Masked, Op, Value
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member, member_loads
from magneto.symbolic import Const, Expr, Sym, add, evaluate, substitute

LONGEST = 1 << 16  # elements of a dimension that are looked at one by one, and
MOST = 64  # choices


def narrowed(kernel: FusedKernel, into: Mapping[str, str]) -> FusedKernel:
    """The kernel, all of whose members are written `into` inputs, over what changes; others as they are."""
    if not all(m.kind == POINT and m.full and m.name in into and m.name in kernel.stored for m in kernel.members):
        return kernel
    for _ in (*kernel.rows, *kernel.cols):
        smaller = _over_what_changes(kernel, into)
        if smaller is kernel:
            break
        kernel = smaller
    return _at_a_number(kernel, into)


def _over_what_changes(kernel: FusedKernel, into: Mapping[str, str]) -> FusedKernel:
    """Where one place along a dimension is left, others may be seen to be what is there: asked again."""
    mapping: dict[Expr, Expr] = {}
    made: dict[Sym, Dim] = {}
    for dim in (*kernel.rows, *kernel.cols):
        hulls = [_changed(m, into[m.name], dim) for m in kernel.members]
        first, end = min(low for low, _ in hulls), max(high for _, high in hulls)
        if 0 <= first < end and 2 * (end - first) <= dim.size:
            symbol = Sym(f"n{first}_{dim.sym.name}", 0, end - first - 1)
            mapping[dim.sym], made[dim.sym] = add(0, first, symbol) if end - first > 1 else add(0, first), Dim(symbol, end - first)
    if not made:
        return kernel
    members = tuple(replace(m, body=_folded(m.body)) for m in (m.mapped(mapping, {}) for m in kernel.members))
    rows, cols = (tuple(made.get(d.sym, d) for d in side) for side in (kernel.rows, kernel.cols))
    return replace(kernel, rows=rows, cols=cols, members=members, why="; ".join(filter(None, (kernel.why, "only what changes is walked"))))


def _at_a_number(kernel: FusedKernel, into: Mapping[str, str]) -> FusedKernel:
    """`cache[:, n] = token` of a number that changes from call to call: the one place is looked up."""
    dims = (*kernel.rows, *kernel.cols)
    found = [_place(m, into[m.name], dims) for m in kernel.members]
    if found[0] is None or any(one is None or one != found[0] for one in found):
        return kernel
    dim, number = found[0]
    at = Indirect(number, dim.size)
    only = Dim(Sym(f"one_{dim.sym.name}", 0, 0), 1)
    members = tuple(replace(m, body=m.body.args[1]).mapped({dim.sym: at}, {}) for m in kernel.members)  # type: ignore[attr-defined]
    rows, cols = (tuple(only if d is dim else d for d in side) for side in (kernel.rows, kernel.cols))
    return replace(kernel, rows=rows, cols=cols, members=members)


def _place(member: Member, target: str, dims: tuple[Dim, ...]) -> tuple[Dim, Value] | None:
    """The dimension along which one place is written, and the number that says which; None for other bodies."""
    body = member.body
    if not (isinstance(body, Op) and body.name == "where" and isinstance(body.args[2], Load)):
        return None
    there, condition = body.args[2], body.args[0]
    if there.buffer != target or there.index is not member.store or not (isinstance(condition, Op) and condition.name == "eq"):
        return None
    left, right = condition.args
    if isinstance(left, Op) and left.name == "sub" and isinstance(right, ValueConst) and right.value == 0:
        left, right = left.args
    if not isinstance(left, IndexValue) or not isinstance(right, Load) or right.index.free or right.dtype is not torch.int64:
        return None
    dim = next((d for d in dims if d.sym is left.expr), None)
    return None if dim is None else (dim, right)


def _changed(member: Member, target: str, dim: Dim) -> tuple[int, int]:
    """First element along the dimension that may change, and the one behind the last."""
    if dim.size > LONGEST or not _decides(member.body, dim.sym):
        return 0, dim.size
    may = [k for k in range(dim.size) if not _stays(member, target, dim.sym, k)]
    return (may[0], may[-1] + 1) if may else (0, 1)


def _decides(body: Value, symbol: Sym) -> bool:
    """Does the place along this dimension decide one of a few choices at least?"""
    stack, count = [body], 0
    while stack and count <= MOST:
        value = stack.pop()
        if isinstance(value, Masked):
            condition, sides = value.cond, [value.value, value.other]
        elif isinstance(value, Op) and value.name == "where":
            condition, sides = value.args[0], [*value.args[1:]]
        else:
            continue
        if isinstance(condition, IndexValue) and condition.expr.free == {symbol}:
            return True
        count += 1
        stack += sides
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


def reads_its_place(member: Member, target: str) -> bool:
    """Does every element read the target where it is itself stored, if at all? (`x[0, -1] += 1`: where both places are known to be these.)"""
    stack: list[tuple[Value, Mapping[Expr, Expr]]] = [(member.body, {})]
    for _ in range(4 * MOST):
        if not stack:
            return True
        value, known = stack.pop()
        if isinstance(value, Masked):
            stack += [(value.value, {**known, **_decided(value.cond)}), (value.other, known)]
            continue
        place = substitute(member.store, known)
        if any(load.buffer == target and substitute(load.index, known) is not place for load in member_loads(value)):
            return False
    return False


def _decided(condition: Value) -> dict[Expr, Expr]:
    """The symbol that a condition allows one value only."""
    if not isinstance(condition, IndexValue) or len(condition.expr.free) != 1:
        return {}
    (symbol,) = condition.expr.free
    if isinstance(symbol, Indirect) or symbol.lo is None or symbol.hi is None or symbol.hi - symbol.lo > LONGEST:
        return {}
    places = [k for k in range(symbol.lo, symbol.hi + 1) if evaluate(condition.expr, {symbol: k})]
    return {symbol: add(0, places[0])} if len(places) == 1 else {}


def _folded(value: Value) -> Value:
    """Without choices that are decided."""
    if isinstance(value, Masked):
        if isinstance(value.cond, IndexValue) and isinstance(value.cond.expr, Const):
            return _folded(value.value if value.cond.expr.value else value.other)
        return Masked(value.cond, _folded(value.value), _folded(value.other))
    return value
