"""Blocks of reductions over pairs: distances of all pairs of points, additive attention, sums over a one-hot encoding.

What such a kernel reads along what it reduces varies along some of its rows only. A block has several rows of the one kind and several of the other, `y` and `x`, so that each element it reads serves
all rows of the other kind; where all rows read the same, it has several of these. Elements are folded where they are, in accumulators of the whole block, which are folded along `r` behind the loop.
The numbers are measured on an H100.
"""

from __future__ import annotations

from math import prod

from magneto.inductor.codegen.cpp_nest import cut_dims, normal_form
from magneto.inductor.codegen.cpp_ops import HEAVY
from magneto.inductor.codegen.triton_nest import MOST_BLOCKS, SHORTEST, Axis, Blocks, power_above
from magneto.inductor.loops.ir import Op, reach, walk_values
from magneto.inductor.loops.span import span_of
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.kernel import COLUMN, SCATTER, Dim, FusedKernel, member_loads
from magneto.inductor.schedule.pairs import SHARING, kinds_of_rows
from magneto.symbolic import Const, Expr, Sym, coefficient

TILE, TURN = (8, 32), 32  # rows of both kinds, and elements of a turn
TURN_HEAVY = 8  # elements where each one takes a function such as exp, so that a thread's code stays short
TILE_SHORT, TURN_SHORT, SHORT = (16, 64), 4, 32  # where that many are reduced, or fewer
TURN_SHARED = 256  # where all rows read the same
LEAST = 4096  # results


def pairs_of(kernel: FusedKernel) -> Blocks | None:
    """The blocks of a kernel, if it is one of these and large enough."""
    if not any(m.is_reduction for m in kernel.members) or any(m.is_scan or span_of(m.body) is not None for m in kernel.members):
        return None
    kernel = normal_form(cut_dims(kernel, SHORTEST))
    rows, length = prod(d.size for d in kernel.rows), prod(d.size for d in kernel.cols)
    stages = member_stages(kernel.members)
    if rows < SHARING or rows * length < LEAST * SHARING or any(stages[m.name] for m in kernel.members if m.full or m.is_reduction):
        return None
    for member in kernel.members:
        if (
            member.kind in (COLUMN, SCATTER, "m2")
            or member.down
            or (member.full and not member.is_reduction and member.name in kernel.stored)
        ):
            return None
    store = next((m.store for m in kernel.members if m.name in kernel.stored), None)
    cols = frozenset(d.sym for d in kernel.cols)
    reads = [reach(load.index) for m in kernel.members for load in member_loads(m.body) if load.buffer not in kernel.computed]
    kinds = kinds_of_rows(reads, [d.sym for d in kernel.rows], cols)
    along = max(kernel.rows, key=lambda d: -_step(store, d.sym)).sym if store is not None else None
    if store is None or kinds is None or along in kinds.common:
        return None

    def dims(symbols: frozenset[Sym]) -> tuple[Dim, ...]:
        return tuple(sorted((d for d in kernel.rows if d.sym in symbols), key=lambda d: -_step(store, d.sym)))

    of_x = next((kind for kind in kinds.apart if along in kind), kinds.apart[-1])
    outer, x, y = dims(kinds.common), dims(of_x), dims(frozenset().union(*kinds.apart) - of_x)
    if not y:
        if prod(d.size for d in x) < SHARING or length < SHARING:
            return None
        axes = (Axis("x", x, SHARING), Axis("r", kernel.cols, min(TURN_SHARED, power_above(length))))
    else:
        tile, turn = (TILE, TURN) if length > SHORT else (TILE_SHORT, TURN_SHORT)
        if turn == TURN and any(isinstance(v, Op) and v.name in HEAVY for m in kernel.members if m.full for v in walk_values(m.body)):
            turn = TURN_HEAVY
        if any(prod(d.size for d in some) < size for some, size in zip((y, x), tile, strict=True)):
            return None
        axes = (*(Axis(name, some, size) for name, some, size in zip("yx", (y, x), tile, strict=True)), Axis("r", kernel.cols, turn))  # type: ignore[assignment]
    if max(prod(d.size for d in outer), axes[0].blocks if y else 0) > MOST_BLOCKS:
        return None
    return Blocks(kernel, axes, axes[-1].blocks > 1, 4, outer)


def _step(index: Expr, symbol: Sym) -> int:
    """How far apart neighbours along the symbol lie."""
    step = coefficient(index, symbol)
    return step.value if isinstance(step, Const) else 1 << 62
