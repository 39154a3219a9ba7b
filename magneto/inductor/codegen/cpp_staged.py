"""Large results that loops write in short runs of memory: a block of them is put together in the first cache and written past the caches as a whole.

Parts of what is concatenated, padded or rotated (cpp_parts) take turns in each block, so that no line of memory is written by two walks; so do rows too short to be written past the caches
one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from magneto.base.dataclass import dataclass, replace
from magneto.base.varying import any_size, sizes_vary
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.cpp_nest import ROWS_WANTED, Nest, nest_of, order_within, stride_along
from magneto.inductor.codegen.cpp_types import memory_type
from magneto.inductor.loops.ir import Indirect, Value
from magneto.inductor.schedule.domain import fresh_symbol
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member
from magneto.symbolic import Expr, add, evaluate, mul, to_c

if TYPE_CHECKING:
    from magneto.inductor.codegen.cpp import Writer

BLOCK = 1 << 10, 32 << 10  # bytes of a block
WHOLE_LINES = 256  # bytes, at least, of one that begins and ends with lines of memory
LINE = 64


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels that fill a block for each point of the dimensions `shared`; `blocks`: per result where it begins at the first point, and of how many elements it is."""

    kernels: tuple[FusedKernel, ...]
    shared: tuple[Dim, ...]
    blocks: dict[str, tuple[int, int]]

    @property
    def bytes(self) -> int:
        return max(_results(self.kernels[0])[name].buffer.dtype.itemsize * count for name, (_, count) in self.blocks.items())


def staged(whole: Writer, pieces: Sequence[FusedKernel]) -> list[str] | None:
    """The statements of the kernel `whole`, which the loops of `pieces` do one after the other; None where a result is small, or no block fits."""
    results = _results(pieces[0]).values()
    if any_size() or sizes_vary() or any(m.kind != POINT for m in pieces[0].members) or not all(whole.is_large(m) for m in results):
        return None
    groups = _groups(tuple(pieces)) or _groups(_cut_shared(tuple(pieces)))
    return None if groups is None else _text(whole, groups)


def _groups(kernels: tuple[FusedKernel, ...]) -> list[Group] | None:
    """Neighbours that fill blocks together, small blocks first."""
    found = [group for n in range(1, len(kernels) + 1) if (group := _group(kernels[:n])) is not None]
    for group in sorted(found, key=lambda group: (group.bytes, -len(group.kernels))):
        if (rest := _groups(kernels[len(group.kernels) :])) is not None:
            return [group, *rest]
    return None if kernels else []


def _cut_shared(kernels: tuple[FusedKernel, ...]) -> tuple[FusedKernel, ...]:
    """The kernels with a shared dimension as two, at a point of which too little is written for a block, and for all of which too much."""
    member = next(iter(_results(kernels[0]).values()))
    common = [d for d in kernels[0].rows if all(d in k.rows for k in kernels)]
    common.sort(key=lambda d: -(stride_along(member.store, d.sym) or 0))
    for n, dim in enumerate(common):
        inner, outer = _block(kernels, member.name, common[: n + 1]), _block(kernels, member.name, common[:n])
        if inner is None or outer is None:
            continue
        least, most = inner[1] * member.buffer.dtype.itemsize, outer[1] * member.buffer.dtype.itemsize
        few = next((k for k in range(2, dim.size) if dim.size % k == 0 and BLOCK[0] <= k * least <= BLOCK[1]), 0)
        if least < BLOCK[0] and most > BLOCK[1] and few:
            apart = Dim(fresh_symbol(dim.size // few), dim.size // few), Dim(fresh_symbol(few), few)
            mapping: dict[Expr, Expr] = {dim.sym: add(mul(apart[0].sym, few), apart[1].sym)}
            memo: dict[Value, Value] = {}
            rows = [tuple(piece for d in k.rows for piece in (apart if d is dim else (d,))) for k in kernels]
            members = [tuple(m.mapped(mapping, memo) for m in k.members) for k in kernels]
            return tuple(replace(k, rows=r, members=m) for k, r, m in zip(kernels, rows, members, strict=True))
    return kernels


def _results(kernel: FusedKernel) -> dict[str, Member]:
    return {m.name: m for m in kernel.members if m.name in kernel.stored}


def _group(kernels: tuple[FusedKernel, ...]) -> Group | None:
    """The smallest blocks that the kernels fill together."""
    store = next(iter(_results(kernels[0]).values())).store
    common = [d for d in kernels[0].rows if all(d in k.rows for k in kernels)]
    common.sort(key=lambda d: -(stride_along(store, d.sym) or 0))
    for n in range(len(common), 0, -1):
        blocks = {name: _block(kernels, name, common[:n]) for name in _results(kernels[0])}
        if None in blocks.values():
            continue
        group = Group(kernels, tuple(common[:n]), blocks)  # type: ignore[arg-type]
        if group.bytes > BLOCK[1]:
            return None
        if all(_fits(_results(kernels[0])[name], *block, common[:n]) for name, block in group.blocks.items()):
            return None if any(_nest(group, k) is None for k in kernels) else group
    return None


def _fits(member: Member, first: int, count: int, shared: Sequence[Dim]) -> bool:
    return count * member.buffer.dtype.itemsize >= (WHOLE_LINES if whole_lines(member, count, shared, first) else BLOCK[0])


def whole_lines(member: Member, count: int, dims: Sequence[Dim], first: int = 0) -> bool:
    """Do `count` elements of a result begin and end with lines of memory, wherever they are along `dims`?"""
    steps = (first, count, *(stride_along(member.store, d.sym) for d in dims))
    return all(step is not None and step * member.buffer.dtype.itemsize % LINE == 0 for step in steps)


def _block(kernels: Sequence[FusedKernel], name: str, shared: Sequence[Dim]) -> tuple[int, int] | None:
    """(first element, how many) that are written at the first point of `shared`; None where they do not lie side by side."""
    first, last, count = [], [], 0
    for kernel in kernels:
        store = _results(kernel)[name].store
        steps = {d: stride_along(store, d.sym) for d in kernel.rows}
        if any(isinstance(s, Indirect) for s in store.free) or not all(step is not None and step > 0 for step in steps.values()):
            return None
        rest = [d for d in kernel.rows if d not in shared]
        first.append(evaluate(store, {d.sym: 0 for d in kernel.rows}))
        last.append(first[-1] + sum((steps[d] or 0) * (d.size - 1) for d in rest))
        count += prod(d.size for d in rest)
    return (min(first), count) if max(last) - min(first) + 1 == count else None


def _nest(group: Group, kernel: FusedKernel) -> Nest | None:
    """The loops of a kernel inside a block, where its results begin at 0; None where they are not plain ones."""
    usual = nest_of(kernel)
    if usual.mode != "point" or usual.tiled or usual.short is not None or usual.beside:
        return None
    members = []
    for m in kernel.members:
        first = _place(m, group) if m.name in group.blocks else m.store
        members.append(replace(m, store=add(m.store, -first)))
    kernel, n = order_within(replace(kernel, members=tuple(members)), group.shared)
    return Nest(kernel, "point", kernel.rows[:n], kernel.rows[n:], 0, True)


def _place(member: Member, group: Group) -> Expr:
    """Where a block begins."""
    return add(group.blocks[member.name][0], *(mul(d.sym, stride_along(member.store, d.sym) or 0) for d in group.shared))


def _text(whole: Writer, groups: Sequence[Group]) -> list[str]:
    """One loop over what all groups share, if that is enough for all threads; else one loop each."""
    outer = tuple(d for d in groups[0].shared if all(d in g.shared for g in groups))
    outer = next((outer[:n] for n in range(len(outer), -1, -1) if all(g.shared[:n] == outer[:n] for g in groups)), ())
    together = prod(d.size for d in outer) >= ROWS_WANTED
    loops = []
    for some, dims in [(groups, outer)] if together else [([g], g.shared) for g in groups]:
        head, _ = whole.decode_rows(Nest(whole.kernel, "point", dims, (), 0, True))
        inside = [line for group in some for line in _blocks(whole, group, dims)]
        count = prod(d.size for d in dims)
        loops += ["#pragma omp for schedule(static) nowait", f"for (i64 row = 0; row < {count}; row++) {{", *indent([*head, *inside]), "}"]
    whole.streaming.update(groups[0].blocks)
    return [*whole.past_flags(), "#pragma omp parallel reduction(|:status)", "{", *indent([*loops, "MG_FENCE"]), "}"]


def _blocks(whole: Writer, group: Group, outer: Sequence[Dim]) -> list[str]:
    """The blocks of a group at one point of `outer`."""
    names = [f"i{n}" if n < len(outer) else f"k{n}" for n in range(len(group.shared))]
    variables = {d.sym: name for d, name in zip(group.shared, names, strict=True)}
    lines, after = [], []
    for name, (_, count) in group.blocks.items():
        member, pointer = _results(group.kernels[0])[name], whole.pointers[name]
        kind = memory_type(member.buffer.dtype)
        place = to_c(_place(member, group), lambda s: variables[s])
        lines.append(f"{kind} {pointer}s[{count}] __attribute__((aligned({LINE})));")
        after.append(f"mg_stream({pointer} + {place}, {pointer}s, {count} * sizeof({kind}), {pointer}_past);")
    for kernel in group.kernels:
        nest = _nest(group, kernel)
        assert nest is not None
        lines += ["{", *indent(type(whole)(kernel, nest, tuple(whole.pointers)).inside_block(names)), "}"]
    lines += after
    for d, name in reversed([*zip(group.shared, names, strict=True)][len(outer) :]):
        lines = [f"for (i64 {name} = 0; {name} < {d.size}; {name}++) {{", *indent(lines), "}"]
    return lines if len(group.shared) > len(outer) else ["{", *indent(lines), "}"]
