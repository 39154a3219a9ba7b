"""Sums along the rows and sums down the columns of the same memory become one walk: gradients of norms read their two inputs once.

The group that folds along the rows is the host; reductions of the other one become members that go *down*: they fold over the rows, once for each column. Their results are known
behind the loop only, so nobody in the kernel may read them. Each portion of rows has accumulators of its own for all columns, which must stay in a processor's own cache
(codegen/cpp_crossed.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from magneto.inductor.loops.ir import Buffer, Indirect
from magneto.inductor.schedule.group import Group
from magneto.inductor.schedule.kernel import POINT
from magneto.symbolic import Add, Expr

KINDS = frozenset((POINT, "sum", "prod", "max", "min", "any", "all"))
ACCUMULATORS = 256 << 10  # bytes of a portion's accumulators for all columns
WIDTH = 12  # bytes of one accumulator: a float for few rows, and a double


def crossing(a: Group, b: Group) -> tuple[Group, Group] | None:
    """(the group that folds along contiguous memory, the one that folds across it), where both walk memory of one shape; None elsewhere."""
    if not (a.rows and a.cols and b.rows and b.cols) or (a.row_numel, a.col_numel) != (b.col_numel, b.row_numel):
        return None
    along = _along(a)
    if along == _along(b) or any(m.buffer.device.type != "cpu" for m in a.members):
        return None
    host, guest = (a, b) if along else (b, a)
    if not all(m.full and not m.down and m.kind in KINDS for m in guest.members):
        return None
    return host, guest


def _along(group: Group) -> bool:
    """Is memory contiguous along what the group reduces?"""
    cols = {d.sym for d in group.cols}
    indices = [load.index for loads in group.reads.values() for load in loads]
    most = max((len(index.free) for index in indices), default=0)
    return any(_contiguous(index, cols) for index in indices if len(index.free) == most)


def _contiguous(index: Expr, symbols: Collection[Expr]) -> bool:
    terms = index.terms if isinstance(index, Add) else ((index, 1),)
    return any(step == 1 and not isinstance(term, Indirect) and term in symbols for term, step in terms)


def meet(a: Group, b: Group, fused: Group, names: Collection[str], buffers: Mapping[str, Buffer]) -> bool:
    """Is some memory of the size of the whole read once instead of twice?"""
    for name in names:
        buffer = buffers.get(name)
        if buffer is None or buffer.numel != fused.numel:
            continue
        if name in fused.writes or len(fused.reads[name]) < len(a.reads.get(name, ())) + len(b.reads.get(name, ())):
            return True
    return False


def held(fused: Group) -> int:
    """Bytes of the accumulators of all columns."""
    return fused.col_numel * WIDTH * sum(m.down for m in fused.members)
