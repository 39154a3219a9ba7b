"""Groups: kernels in the making. One node of the loops IR becomes one group; fusion joins groups.

Here Welford reductions become sums, reductions over one element become pointwise, and reductions over nothing become constants, so that what
follows knows pointwise members and plain folds only.
"""

from __future__ import annotations

from math import prod

import torch

from magneto.base.dataclass import dataclass, field, replace
from magneto.inductor.loops.ir import (
    Buffer,
    Const,
    IndexValue,
    Load,
    Op,
    Ordered,
    Origin,
    Pointwise,
    Reduction,
    Size,
    Value,
    index_symbols,
    reduce_symbols,
)
from magneto.inductor.loops.scans import SCANS
from magneto.inductor.schedule.kernel import POINT, Dim, Member, member_loads
from magneto.symbolic import Expr, Sym, add, mul


class CannotSchedule(Exception):
    """The program holds something the scheduler has no plan for; says what."""


@dataclass(slots=True, eq=False)
class Group:
    """`nodes`: positions in the program of what was fused. `reads`: buffer -> its loads. `writes`: buffer -> its member."""

    rows: tuple[Dim, ...]
    cols: tuple[Dim, ...]
    members: list[Member]
    nodes: list[int]
    origins: tuple[Origin, ...] = ()
    why: list[str] = field(default_factory=list)
    reads: dict[str, list[Load]] = field(default_factory=dict)
    writes: dict[str, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members.sort(key=lambda m: m.position)  # the program's order respects data flow; stable for the members of one node
        self.writes = {m.name: m for m in self.members}
        for member in self.members:
            for load in member_loads(member.body):
                found = self.reads.setdefault(load.buffer, [])
                if load not in found:
                    found.append(load)

    @property
    def numel(self) -> int:
        return prod(d.size for d in (*self.rows, *self.cols))

    @property
    def row_numel(self) -> int:
        return prod(d.size for d in self.rows)

    @property
    def col_numel(self) -> int:
        return prod(d.size for d in self.cols)

    @property
    def sizes(self) -> dict[Sym, int]:
        return {d.sym: d.size for d in (*self.rows, *self.cols)}


def static_sizes(sizes: tuple[Size, ...]) -> tuple[int, ...]:
    """The sizes as ints. CannotSchedule where one is symbolic."""
    for size in sizes:
        if not isinstance(size, int):
            raise CannotSchedule(f"symbolic size {size}")
    return sizes  # type: ignore[return-value]


def dims_of(symbols: tuple[Expr, ...], sizes: tuple[int, ...]) -> tuple[Dim, ...]:
    """The dimensions with more than one element."""
    return tuple(Dim(s, n) for s, n in zip(symbols, sizes, strict=True) if isinstance(s, Sym) and n != 1)


def group_of(node: Pointwise | Reduction | Ordered, position: int) -> Group:
    """The group of one node."""
    group = _scan(node, position) if isinstance(node, Ordered) else _group(node, position)
    group.members = [replace(m, position=position) for m in group.members]
    group.writes = {m.name: m for m in group.members}
    return group


def _group(node: Pointwise | Reduction, position: int) -> Group:
    ranges = static_sizes(node.ranges)
    symbols = index_symbols(node.ranges)
    rows = dims_of(symbols, ranges)
    if isinstance(node, Pointwise):
        member = Member(POINT, node.buffer, node.body, node.store_index, True, node.dtype)
        return Group(rows, (), [member], [position], node.origins)
    sizes = static_sizes(node.reduce_ranges)
    count = prod(sizes)
    if count == 0:
        return Group(rows, (), [_empty(node)], [position], node.origins)
    reduce_syms = reduce_symbols(node.reduce_ranges)
    if count == 1:
        return Group(rows, (), _over_one(node), [position], node.origins)
    cols = dims_of(reduce_syms, sizes)
    if node.kind == "welford":
        return Group(rows, cols, _welford(node, count), [position], node.origins)
    flat = flat_index(reduce_syms, sizes) if node.kind in ("argmax", "argmin") else None
    member = Member(node.kind, node.buffer, _converted(node.body, node.acc_dtype), node.store_index, True, node.acc_dtype, flat)
    return Group(rows, cols, [member], [position], node.origins)


def _scan(node: Ordered, position: int) -> Group:
    """Cumulative sums or products, of halves in float32."""
    symbols, ranges = index_symbols(node.ranges), static_sizes(node.ranges)
    (along,) = node.serial
    rows = dims_of((*symbols[:along], *symbols[along + 1 :]), (*ranges[:along], *ranges[along + 1 :]))
    cols = dims_of(symbols[along : along + 1], ranges[along : along + 1])
    dtype = node.buffer.dtype
    acc = torch.float32 if dtype.itemsize == 2 else dtype
    value: Value = Op(node.kind, (_converted(node.body, acc),), acc)
    value = value if node.init is None else Op(SCANS[node.kind], (value, node.init), acc)
    store = node.place.expr if isinstance(node.place, IndexValue) else node.buffer.offset(symbols)
    return Group(
        rows, cols, [Member(node.kind, node.buffer, _converted(value, dtype), store, True, acc, symbols[along])], [position], node.origins
    )


def flat_index(symbols: tuple[Expr, ...], sizes: tuple[int, ...]) -> Expr:
    """The index that walks them in row-major order."""
    terms, step = [], 1
    for symbol, size in zip(reversed(symbols), reversed(sizes), strict=True):
        terms.append(mul(symbol, step))
        step *= size
    return add(0, 0, *terms)


def _converted(body: Value, dtype: torch.dtype) -> Value:
    return body if body.dtype is dtype else Op("convert_element_type", (body,), dtype)


_EMPTY = {"sum": 0, "prod": 1, "any": False, "all": True}


def _empty(node: Reduction) -> Member:
    """A reduction over nothing: its neutral element."""
    return Member(POINT, node.buffer, Const(_EMPTY[node.kind], node.dtype), node.store_index, True, node.dtype)


def _over_one(node: Reduction) -> list[Member]:
    """A reduction over one element: the element itself."""
    body = _converted(node.body, node.acc_dtype)
    values: tuple[Value, ...]
    if node.kind in ("argmax", "argmin"):
        values = (Const(0, node.dtype),)
    elif node.kind == "welford":
        difference = Op("sub", (body, body), node.acc_dtype)  # NaN for NaN and infinities, as the sum of squares would be
        values = (body, Op("mul", (difference, difference), node.acc_dtype))
    else:
        values = (body,)
    index = node.store_index
    return [Member(POINT, b, _converted(v, b.dtype), index, True, b.dtype) for b, v in zip(node.buffers, values, strict=True)]


def _welford(node: Reduction, count: int) -> list[Member]:
    """sum -> mean -> sum of squared deviations; what no buffer of the program holds gets names of its own."""
    mean, m2 = node.buffers
    acc, index = node.acc_dtype, node.store_index

    def internal(suffix: str) -> Buffer:
        return Buffer(f"{mean.name}.{suffix}", mean.shape, mean.strides, acc, mean.device)

    body = _converted(node.body, acc)
    total, exact = internal("sum"), mean if mean.dtype is acc else internal("mean")
    average = Op("div", (Load(total.name, index, acc), Const(float(count), acc)), acc)
    members = [Member("sum", total, body, index, True, acc), Member(POINT, exact, average, index, False, acc)]
    if exact is not mean:
        members.append(Member(POINT, mean, _converted(Load(exact.name, index, acc), mean.dtype), index, False, mean.dtype))
    deviation = Op("sub", (body, Load(exact.name, index, acc)), acc)
    members.append(Member("sum", m2, Op("mul", (deviation, deviation), acc), index, True, acc))
    return members
