"""Which groups become one kernel: `may_fuse(a, b) -> Yes | No(reason)`, and the greedy search over the program.

They fuse when one domain can serve both: the symbols of one are expressed in the other's by
aligning the memory they share (domain.py), and then every load of a shared buffer must be at the very point where it is computed.
Vertical fusion saves writing and reading a buffer, horizontal fusion saves reading one twice; the score is the bytes saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from magneto.base.dataclass import dataclass, replace
from magneto.base.varying import any_size
from magneto.inductor.loops.ir import Buffer, Load, Value
from magneto.inductor.schedule.crossed import ACCUMULATORS, crossing, held, meet
from magneto.inductor.schedule.domain import Alignment, Form, align, fresh_symbol, replaced, row_major, strided_terms
from magneto.inductor.schedule.group import Group, flat_index
from magneto.inductor.schedule.kernel import Dim, Member, member_loads
from magneto.symbolic import Expr, Sym, coefficient, substitute

ROW_CACHE = 512 << 10  # bytes: a row that is walked again after a reduction must stay in a processor's own cache
FEW_ROWS = 8  # with fewer rows a long reduction is split over threads, and nothing may be computed over its elements afterwards
SMALL = 16384  # elements: below, one thread does it all and none of this matters


@dataclass(frozen=True, slots=True)
class Yes:
    """`fused` is the kernel, `score` the bytes it saves."""

    score: int
    fused: Group


@dataclass(frozen=True, slots=True)
class No:
    reason: str


@dataclass(slots=True)
class _Side:
    """One group's dimensions while they are being refined; `mapping` takes its original symbols to the common ones."""

    rows: tuple[Dim, ...]
    cols: tuple[Dim, ...]
    mapping: dict[Expr, Expr]
    matched: set[Sym]

    def refine(self, alignment: Alignment, side: int) -> None:
        """Apply an alignment (side 1: as host, 2: as guest)."""
        changes = alignment.host if side == 1 else alignment.guest
        self.rows, self.cols = (tuple(replaced(dims, alignment, side)) for dims in (self.rows, self.cols))
        if changes:
            self.mapping = {
                **{s: substitute(e, changes) for s, e in self.mapping.items()},
                **{s: e for s, e in changes.items() if s not in self.mapping},
            }
        self.matched.update(piece[0].sym for piece in alignment.pieces)

    def open(self, dims: Sequence[Dim]) -> tuple[Dim, ...]:
        return tuple(d for d in dims if d.sym not in self.matched)


def may_fuse(a: Group, b: Group, buffers: Mapping[str, Buffer], limit: int = 64) -> Yes | No:
    """Whether groups a and b can be one kernel. Data may flow both ways: a group holds nodes from different places of the program."""
    if len(a.members) + len(b.members) > limit:
        return No("too many buffers in one kernel")
    flow = [name for name in a.writes if name in b.reads] + [name for name in b.writes if name in a.reads]
    shared = [name for name in a.reads if name in b.reads]
    if not flow and not shared:
        return No("nothing in common")
    if not flow and a.numel > 1 and all(buffers[name].numel == 1 for name in shared if name in buffers):
        return No("nothing in common but single numbers")
    saved = sum(2 * _bytes(buffers[n]) for n in flow if n in buffers) + sum(_bytes(buffers[n]) for n in shared if n in buffers)
    if (pair := crossing(a, b)) is not None:
        return _cross(a, b, pair, _index_pairs(a, b, pair[0] is a, flow, shared), buffers, saved)
    host, guest = (b, a) if b.cols and not a.cols else (a, b)
    if not guest.cols and guest.numel not in (host.numel, host.row_numel) or (guest.cols and guest.numel != host.numel):
        return No("different sizes")
    sides = _unify(host, guest, _index_pairs(a, b, host is a, flow, shared))
    if isinstance(sides, No):
        return sides
    fused = _joined(a, b, host, guest, *sides)
    if isinstance(fused, No):
        return fused
    refused = _unsound(fused) or (None if flow else _apart(a, b, fused, shared, buffers)) or _unprofitable(fused, buffers)
    if refused is not None:
        return refused
    return Yes(saved, fused)


def _cross(
    a: Group, b: Group, pair: tuple[Group, Group], pairs: list[tuple[Expr, Expr]], buffers: Mapping[str, Buffer], saved: int
) -> Yes | No:
    """Reductions along the rows with reductions down the columns (crossed.py)."""
    host, guest = pair
    sides = _unify(host, guest, sorted(pairs, key=lambda p: -len(p[0].free)), True)
    if isinstance(sides, No):
        return sides
    fused = _joined(a, b, host, guest, *sides, True)
    if isinstance(fused, No):
        return fused
    if not meet(a, b, fused, {*a.reads, *b.reads}, buffers):
        return No("they read what they share at different places")
    return _unsound(fused) or _unprofitable(fused, buffers) or Yes(saved, fused)


def _bytes(buffer: Buffer) -> int:
    return int(buffer.nbytes)  # type: ignore[arg-type]


def _index_pairs(a: Group, b: Group, host_is_a: bool, flow: Sequence[str], shared: Sequence[str]) -> list[tuple[Expr, Expr]]:
    """(host's index, guest's index) of memory that both walk, the most telling first."""
    pairs = [(a.writes[n].store, b.reads[n][0].index) if n in a.writes else (a.reads[n][0].index, b.writes[n].store) for n in flow]
    pairs.sort(key=lambda p: -len(p[0].free))
    common = [(a.reads[n][0].index, b.reads[n][0].index) for n in shared]
    common.sort(key=lambda p: -len(p[0].free))
    return [p if host_is_a else (p[1], p[0]) for p in pairs + common]


def _unify(host: Group, guest: Group, pairs: Sequence[tuple[Expr, Expr]], crossed: bool = False) -> tuple[_Side, _Side] | No:
    """Both domains over common symbols. `crossed`: rows of the one are cols of the other."""
    h, g = _Side(host.rows, host.cols, {}, set()), _Side(guest.rows, guest.cols, {}, set())
    for host_index, guest_index in pairs:
        forms = strided_terms(host_index, host.sizes), strided_terms(guest_index, guest.sizes)
        if forms[0] is None or forms[1] is None or not forms[0][0]:
            continue
        guest_form = forms[1][0]
        if crossed or len(guest_form) < len(guest.sizes):  # more will be aligned later: the guest's symbols must not look like the host's
            guest_form = tuple(
                (stride, size, renamed) for (stride, size, sym), renamed in zip(guest_form, _rename(g, guest_form), strict=True)
            )
        alignment = align(forms[0][0], guest_form)
        if alignment is not None and _fitting_roles(h, g, alignment, crossed):
            _refine(h, g, alignment)
            break
    if crossed and not g.matched:
        return No("they walk memory in different ways")
    parts = _remaining(h, g, crossed)
    if not g.matched and len(parts) > 1:
        _rename(g, ())
        parts = _remaining(h, g, crossed)
    for host_dims, guest_dims in parts:
        if not guest_dims:
            continue
        alignment = align(row_major(host_dims), row_major(guest_dims))
        if alignment is None:
            return No("the dimensions cannot be cut into common pieces")
        _refine(h, g, alignment)
    return h, g


def _rename(side: _Side, form: Form) -> list[Sym]:
    """Give a side symbols that occur nowhere else; returns those of the form's terms."""
    names: dict[Expr, Expr] = {d.sym: fresh_symbol(d.size) for d in (*side.rows, *side.cols)} if not side.mapping else {}
    if names:
        side.rows, side.cols = (tuple(Dim(names[d.sym], d.size) for d in dims) for dims in (side.rows, side.cols))  # type: ignore[arg-type]
        side.mapping = {**names}
    return [side.mapping[sym] for _, _, sym in form]  # type: ignore[misc]


def _refine(h: _Side, g: _Side, alignment: Alignment) -> None:
    h.refine(alignment, 1)
    g.refine(alignment, 2)


def _fitting_roles(h: _Side, g: _Side, alignment: Alignment, crossed: bool) -> bool:
    """Between two reductions rows meet rows and cols meet cols; or, `crossed`, rows cols."""
    if not g.cols:
        return True
    h_rows, g_rows = {d.sym for d in h.rows}, {d.sym for d in g.rows}
    return all(((origin_h in h_rows) == (origin_g in g_rows)) is not crossed for _, origin_h, origin_g in alignment.pieces)


def _remaining(h: _Side, g: _Side, crossed: bool) -> list[tuple[tuple[Dim, ...], tuple[Dim, ...]]]:
    """What is still to be aligned, in row-major order."""
    if g.cols:
        rows, cols = (g.cols, g.rows) if crossed else (g.rows, g.cols)
        return [(h.open(h.rows), g.open(rows)), (h.open(h.cols), g.open(cols))]
    rest = g.open(g.rows)
    if not h.cols or not rest:
        return [(h.open(h.rows), rest)]
    size, rows, cols = _count(rest), h.open(h.rows), h.open(h.cols)
    if size == _count(cols) and _count(rows) == 1:
        return [(cols, rest)]
    if size == _count(rows) and (len(cols) == len(h.cols)):
        return [(rows, rest)]
    return [((*rows, *cols), rest)]


def _count(dims: Sequence[Dim]) -> int:
    return prod(d.size for d in dims)


def _joined(a: Group, b: Group, host: Group, guest: Group, h: _Side, g: _Side, crossed: bool = False) -> Group | No:
    """The fused group over the common symbols; members in the program's order."""
    rows, cols = {d.sym for d in h.rows}, {d.sym for d in h.cols}
    guest_dims = {d.sym for d in (*g.rows, *g.cols)}
    if guest_dims != (rows | cols) and (guest.cols or guest_dims != rows):
        return No("one walks a part of the other's domain only")
    if crossed and {d.sym for d in g.cols} != rows:
        return No("what the one reduces is a part of the other's rows only")
    guest_full = guest_dims == rows | cols
    memos: dict[int, dict[Value, Value]] = {id(host): {}, id(guest): {}}

    def members(group: Group) -> list[Member]:
        side = h if group is host else g
        if group is guest and not guest.cols:
            return [m.mapped(side.mapping, memos[id(group)], guest_full or not host.cols) for m in group.members]
        mapped = [m.mapped(side.mapping, memos[id(group)]) for m in group.members]
        return [replace(m, down=m.is_reduction) for m in mapped] if crossed and group is guest else mapped

    return Group(
        h.rows, h.cols, members(a) + members(b), sorted(a.nodes + b.nodes), tuple(dict.fromkeys(a.origins + b.origins)), a.why + b.why
    )


def _unsound(fused: Group) -> No | None:
    """Every load of a buffer computed here must be at the point where it is computed."""
    for name, member in fused.writes.items():
        found = fused.reads.get(name, ())
        if found and member.down:
            return No(f"{name} is known behind the loop only")
        if any(load.index is not member.store for load in found):
            return No(f"{name} is read at other places than it is written")
    if any(m.is_scan for m in fused.members):
        walk = flat_index(tuple(d.sym for d in fused.cols), tuple(d.size for d in fused.cols))
        ways = {m.kind.endswith("back") for m in fused.members if m.is_scan}
        counts = any(m.kind == "m2" for m in fused.members)  # what each place of a block has met
        if len(ways) > 1 or counts or any(m.is_scan and m.flat is not walk for m in fused.members):
            return No("what is added up in order is walked in another one")
    full = {m.name: m.full and not m.is_reduction for m in fused.members}
    for member in fused.members:
        if not member.full and any(full.get(load.buffer, False) for load in _loads(member)):
            return No("a value per row would need a value per element")
    return None


def _apart(a: Group, b: Group, fused: Group, shared: Sequence[str], buffers: Mapping[str, Buffer]) -> No | None:
    """On a GPU nothing is gained, and walks across memory are made, where two groups read the same buffers at different places; on a CPU where two reductions walk them in different directions."""
    large = [name for name in shared if name in buffers and buffers[name].numel != 1]
    if not large:
        return None
    if buffers[large[0]].device.type == "cuda":
        apart = all(len(fused.reads[name]) == len(a.reads[name]) + len(b.reads[name]) for name in large)
    else:
        dims, before = (*fused.rows, *fused.cols), {m.name for m in a.members}
        apart = bool(a.cols and b.cols)
        for name in large if apart else ():
            ways: tuple[set[object], set[object]] = (set(), set())
            for member in fused.members:
                loads = (load for load in _loads(member) if load.buffer == name)
                ways[member.name in before].update(tuple(coefficient(load.index, d.sym) for d in dims) for load in loads)
            apart = apart and ways[0].isdisjoint(ways[1])
    return No("they read what they share at different places") if apart else None


def _loads(member: Member) -> list[Load]:
    return member_loads(member.body)


def _unprofitable(fused: Group, buffers: Mapping[str, Buffer]) -> No | None:
    """Elements walked again after a reduction: the row must stay in cache, and rows must be enough to keep the threads busy."""
    if (size := held(fused)) > ACCUMULATORS:
        return No("the accumulators of all columns do not fit the cache")
    if not fused.cols or (fused.numel <= SMALL and not any_size()):
        return None
    stages = member_stages(fused.members)
    again = [m for m in fused.members if m.full and stages[m.name] > 0]
    if not again and not size:
        return None
    if fused.row_numel < FEW_ROWS and not (any_size() and fused.row_numel > 1):
        return No("too few rows to be walked again by one thread each")
    if not again:
        return None
    width = max(m.acc_dtype.itemsize for m in fused.members if m.full)
    if fused.col_numel * width > ROW_CACHE:
        return No("a row does not fit the cache")
    return None


def member_stages(members: Sequence[Member]) -> dict[str, int]:
    """The pass over the row in which each member can be computed; a reduction's result is there for the next pass."""
    stages: dict[str, int] = {}
    after = {m.name: int(m.is_reduction) for m in members}
    for member in members:
        stages[member.name] = max((stages[n] + after[n] for n in _read_names(member) if n in stages), default=0)
    return stages


def _read_names(member: Member) -> list[str]:
    return [load.buffer for load in member_loads(member.body)]
