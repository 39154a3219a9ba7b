"""Rows whose elements lie in few places side by side: the channels of a group at each pixel of an image, channels last.

A vector along such a row is short, and one row skips what lies between. So neighbouring rows are walked together: each of their elements side by side has accumulators of its own (`cpp_nest`, mode *outer*), and those of a
row are joined when it has been walked. What depends on rows alone is computed once for each of these elements (`hoisted`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from magneto.base.dataclass import dataclass, replace
from magneto.inductor.codegen.cpp_ops import HEAVY
from magneto.inductor.loops.ir import Buffer, IndexValue, Indirect, Load, Masked, Op, Value, walk_values
from magneto.inductor.loops.span import symbols_of
from magneto.inductor.schedule.crossed import KINDS
from magneto.inductor.schedule.domain import fresh_symbol
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member
from magneto.symbolic import ONE, ZERO, Expr, FloorDiv, Mod, Sym, add, coefficient, floordiv, mod, mul, walk

MOST = 64  # elements of a row side by side: more are vectors of their own
LEAST = 16  # elements of all rows that are walked together, and places of each row
WIDEST = 256
NARROWEST = 64
PORTIONS = 16  # for threads to share
NEAR = 256 << 10  # bytes of what is walked again
HELD = 64 << 10  # bytes of what is computed ahead
WORTH = 4  # additions


@dataclass(frozen=True, slots=True)
class Beside:
    """`kernel` over `vector`, the elements side by side of all rows; `lanes` of them are one row's, 0: each is a row of its own. `width`: how many are walked together."""

    kernel: FusedKernel
    vector: Dim
    lanes: int
    width: int


def beside(kernel: FusedKernel, linear: Mapping[Sym, int]) -> Beside | None:
    """Of a reduction. `linear`: how the memory that is walked most moves with each symbol."""
    short = next((d for d in (*kernel.cols, *kernel.rows) if linear.get(d.sym) == 1 and d.size <= MOST), None)
    row = short and next((d for d in kernel.rows if linear.get(d.sym) == short.size), None)
    if short is None or row is None or any(m.down or m.kind not in KINDS for m in kernel.members):
        return None
    cols = tuple(d for d in kernel.cols if d is not short)
    size = short.size * row.size
    if size < LEAST or prod(d.size for d in cols) < LEAST:
        return None
    apart, vector = _together(kernel, row, short)
    made = hoisted(apart, {d.sym for d in cols})
    for index in (index for m in made.members for index in (m.store, *_indices(m.body))):
        step = coefficient(index, vector.sym) if vector.sym in index.free else ZERO
        if _divides(index, cols) or (step not in (ONE, ZERO) and not _free_of(index, cols)):
            return None
    lanes = short.size if short in kernel.cols else 0
    return Beside(made, vector, lanes, _width(made, vector, short.size, row.size))


def _together(kernel: FusedKernel, row: Dim, short: Dim) -> tuple[FusedKernel, Dim]:
    """The kernel with two dimensions as one row dimension, which is its last."""
    vector = Dim(fresh_symbol(row.size * short.size), row.size * short.size)
    mapping: dict[Expr, Expr] = {row.sym: floordiv(vector.sym, short.size), short.sym: mod(vector.sym, short.size)}
    memo: dict[Value, Value] = {}
    members = tuple(m.mapped(mapping, memo) for m in kernel.members)
    rows = (*(d for d in kernel.rows if d not in (row, short)), vector)
    return replace(kernel, rows=rows, cols=tuple(d for d in kernel.cols if d is not short), members=members), vector


def repeated(kernel: FusedKernel, linear: Mapping[Sym, int]) -> tuple[FusedKernel, int] | None:
    """A pointwise kernel with what its last dimensions but one do not change as members of their own, and how many dimensions stand before those; None where that spares little."""
    if len(kernel.rows) < 2 or linear.get(kernel.rows[-1].sym) != 1 or any(m.kind != POINT for m in kernel.members):
        return None
    row, short = kernel.rows[-2:]
    indices = [index.free for m in kernel.members for index in _indices(m.body)]
    forms = [kernel] if any(short.sym in free and row.sym not in free for free in indices) else []
    gathers = any(isinstance(s, Indirect) and row.sym in symbols_of(s.value) for free in indices for s in free)
    if (
        not gathers
        and linear.get(row.sym) == short.size <= MOST
        and any(not free.isdisjoint((row.sym, short.sym)) and not free.issuperset(d.sym for d in kernel.rows[-3:-2]) for free in indices)
    ):
        forms.append(_together(kernel, row, short)[0])
    best: tuple[int, FusedKernel, int] | None = None
    for form, first in ((f, first) for f in forms for first in range(len(f.rows) - 1)):
        *others, vector = form.rows
        if vector.size < LEAST or prod(d.size for d in others[first:]) < LEAST:
            continue
        made = hoisted(form, {d.sym for d in others[first:]})
        before = [m for m in made.members if not m.full]
        gain = sum(_cost(m.body) for m in before)
        if len(before) * vector.size * 8 <= HELD and gain >= WORTH and (best is None or gain > best[0]):
            best = gain, made, first
    return best and best[1:]


def _cost(body: Value) -> int:
    """Of computing a value for each element, an addition being 1."""
    return sum(
        sum(8 for part in walk(v.index) if isinstance(part, FloorDiv | Mod))
        if isinstance(v, Load)
        else 8
        if isinstance(v, Op) and v.name in HEAVY
        else isinstance(v, Op | Masked)
        for v in walk_values(body)
    )


def _width(kernel: FusedKernel, vector: Dim, lanes: int, count: int) -> int:
    """`count` rows of `lanes`. Of the loop over elements side by side: whole rows, and few enough that the cache holds what is walked again."""
    widths = [w for n in range(1, count + 1) if count % n == 0 and (w := n * lanes) <= WIDEST] or [lanes]
    wide = [w for w in widths if w >= NARROWEST] or widths[-1:]
    rows, cols = prod(d.size for d in kernel.rows) // vector.size, prod(d.size for d in kernel.cols)
    each = max((m.acc_dtype.itemsize for m in kernel.members if m.full), default=4)
    fitting = [w for w in wide if w * cols * each <= NEAR and rows * vector.size // w >= PORTIONS]
    return max(fitting, default=wide[0])


def _indices(body: Value) -> Iterator[Expr]:
    for value in walk_values(body):
        if isinstance(value, Load):
            yield value.index
        elif isinstance(value, IndexValue):
            yield value.expr


def _divides(index: Expr, cols: Sequence[Dim]) -> bool:
    """Does an index of what is computed for every element divide, or is it computed?"""
    parts = [part for part in walk(index) if isinstance(part, FloorDiv | Mod | Indirect)]
    return bool(parts) and (not _free_of(index, cols) or any(isinstance(part, Indirect) for part in parts))


def _free_of(index: Expr, cols: Sequence[Dim]) -> bool:
    return index.free.isdisjoint([d.sym for d in cols])


def hoisted(kernel: FusedKernel, cols: Collection[Sym]) -> FusedKernel:
    """The kernel with members over what is left without `cols` for what its bodies compute of that alone."""
    rows = [d for d in kernel.rows if d.sym not in cols]
    along, shape = rows[-1].sym, tuple(d.size for d in rows)
    strides = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
    place = add(0, 0, *(mul(d.sym, s) for d, s in zip(rows, strides, strict=True)))
    names = {m.name for m in kernel.members}
    made: dict[Value, Member] = {}
    memo: dict[Value, Value] = {}

    def rowwise(value: Value) -> bool:
        """Of the rows alone, and not the same for all that lie side by side?"""
        free = {s for index in _indices(value) for s in index.free}
        return along in free and free.isdisjoint(cols)

    def costly(value: Value) -> bool:
        if isinstance(value, Load):
            return value.buffer not in names and any(isinstance(part, FloorDiv | Mod) for part in walk(value.index))
        return isinstance(value, Op | Masked | IndexValue)

    def taken(value: Value, member: Member) -> Value:
        found = memo.get(value)
        if found is None:
            found = memo[value] = _taken(value, member)
        return found

    def _taken(value: Value, member: Member) -> Value:
        if rowwise(value):
            if not costly(value):
                return value
            if value not in made:
                buffer = Buffer(f"{member.name}.row{len(made)}", shape, strides, value.dtype, member.buffer.device)
                made[value] = Member(POINT, buffer, value, place, False, value.dtype)
                before.append(made[value])
            return Load(made[value].name, place, value.dtype)
        if isinstance(value, Op):
            return Op(value.name, tuple(taken(a, member) for a in value.args), value.dtype)
        if isinstance(value, Masked):  # what is guarded must not be read elsewhere
            return Masked(taken(value.cond, member), value.value, taken(value.other, member))
        return value

    members: list[Member] = []
    for member in kernel.members:
        before: list[Member] = []
        body = taken(member.body, member) if member.full else member.body
        members += [*before, replace(member, body=body)]
    return replace(kernel, members=tuple(members))
