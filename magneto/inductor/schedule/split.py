"""Reductions with too few rows for a GPU become two: partial results, then one of those. `split_reductions(program)`.

What is cut is the front of the reduced dimensions, the outermost in memory first: whole dimensions where they suffice, then a divisor of the next one; where it has none, chunks of which the last is not full.
A variance becomes sum, mean and sum of squared deviations first; in equal parts the first and the last are one walk. Searches stay whole: their results are indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod

import torch

from magneto.base.dataclass import dataclass, replace
from magneto.inductor.loops.ir import (
    Buffer,
    Const,
    IndexValue,
    Load,
    Masked,
    Node,
    Op,
    Pointwise,
    Program,
    Reduction,
    Size,
    Value,
    index_symbol,
    index_symbols,
    loads,
    reach,
    reduce_symbol,
    reduce_symbols,
    weight,
)
from magneto.inductor.loops.span import span_of
from magneto.inductor.schedule.columns import COLUMNS, rows_beside
from magneto.inductor.schedule.domain import chain, divided
from magneto.inductor.schedule.kernel import map_value
from magneto.inductor.schedule.pairs import SHARING, kinds_of_rows
from magneto.symbolic import ONE, Add, Expr, Mod, Sym, add, coefficient, compare, evaluate, mul
from magneto.symbolic import Const as IntConst

ENOUGH = 132  # blocks: one for each multiprocessor of a large GPU
WANTED = 528
ONE_EACH = ENOUGH
LONG_ROW = 4096  # elements that keep a multiprocessor busy
FEWEST = 8  # rows that a program walks
SHORTEST = 128  # elements of a partial result, at least
SECTOR = 8  # elements that are read at once
LONG_ACROSS = 512  # elements that are added up one after the other where there are blocks enough
WANTED_ACROSS = 1056  # where memory is contiguous along the rows: fewer, larger loads are under way in a block
SHORTEST_ACROSS = 64
MOST_ACROSS = 512  # partial results that a block adds up at once
ACROSS = 128  # bytes of a row of a block where memory is contiguous along the rows
PIECE = 16  # elements that lie side by side, where an index divides
ALIGNED = 8  # elements: chunks begin where rows of vectors do
SMALL = 1 << 15  # elements in all
MOST_ROWS = 1 << 16  # partial results that one program adds up
LINE = 64  # bytes that are read at once, or so
HELD, HELD_ACROSS = 16384, 512  # elements of a row that a block may hold; where memory is contiguous along the rows
KINDS: dict[str, float] = {"sum": 0, "prod": 1, "any": False, "all": True}
"""Kinds that are cut with chunks of unequal size; the neutral element. Maxima are where they are cut with the sums that belong to them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`parts`: sizes of the dimensions of the partial results; `rest`: what each of them reduces; `mapping`: of the reduced symbols; `inside`: whether an element exists; `name`: how those of the partial results end."""

    parts: tuple[int, ...]
    rest: tuple[int, ...]
    mapping: dict[Expr, Expr]
    inside: Expr | None
    name: str = ".parts"
    beside: bool = False

    def buffer(self, node: Reduction, rows: tuple[int, ...]) -> Buffer:
        """Where a reduction's partial results are: the rows fastest, but for the first part where that lies inside the rows (`beside`)."""
        shape = (*rows, *self.parts)
        strides, step = [0] * len(shape), 1
        first = len(rows) + self.beside
        for d in reversed((*range(first, len(shape)), *range(first))):
            strides[d] = step
            step *= shape[d]
        return Buffer(f"{node.name}{self.name}", shape, tuple(strides), node.acc_dtype, node.device, True)


def split_reductions(program: Program) -> Program:
    """The program with its long reductions of few rows in two steps."""
    beside, rows_read = rows_beside(program, across), _rows_read(program)
    searched = {
        (node.body, node.reduce_ranges) for node in program.nodes if isinstance(node, Reduction) and node.kind in ("argmax", "argmin")
    }

    def made(node: Node) -> Iterator[Node]:
        if not isinstance(node, Reduction) or span_of(node.body) is not None:
            yield node
        elif node.kind in ("max", "min") and (node.body, node.reduce_ranges) in searched:
            yield node  # in the walk that finds the place
        elif node.name in beside and (cut := _columns(node, beside[node.name])) is not None:
            yield from halves(node, cut)
        else:
            yield from _of(node, rows_read.get(node.name, 0))

    nodes = tuple(one for node in program.nodes for one in made(node))
    return replace(program, nodes=nodes)


def _rows_read(program: Program) -> dict[str, int]:
    """Sums of everything that read what is made of the results of rows (a divergence of softmaxes): how many rows. Partial results of these rows are made where the rows are."""
    reduced: dict[str, tuple[int, int]] = {}
    rows: dict[str, tuple[int, int]] = {}  # of what is computed at every point: rows, elements
    wanted: dict[str, int] = {}
    for node in program.nodes:
        if not isinstance(node, Pointwise | Reduction):
            continue
        count = _count(node.ranges) * (_count(node.reduce_ranges) if isinstance(node, Reduction) else 1)
        read = [load.buffer for load in loads(node.body)]
        found = {reduced[name][0] for name in read if name in reduced and reduced[name][1] == count} | {
            rows[name][0] for name in read if name in rows and rows[name][1] == count
        }
        number = next(iter(found)) if len(found) == 1 else 0
        if isinstance(node, Pointwise):
            rows |= {node.name: (number, count)} if number else {}
        elif _count(node.ranges) > 1:
            reduced |= {b.name: (_count(node.ranges), count) for b in node.buffers}
        elif ENOUGH <= number <= MOST_ROWS and SHORTEST <= count // number <= HELD:
            wanted[node.name] = number
    return wanted


def _of(node: Reduction, wanted: int = 0) -> Iterator[Node]:
    """`wanted`: as many partial results."""
    whole, ints = node, all(isinstance(s, int) for s in (*node.ranges, *node.reduce_ranges))
    if not ints or node.kind in ("argmax", "argmin"):
        yield whole
    elif (cut := _side_by_side(node := _refined(node))) is not None and node.kind != "welford":
        yield from halves(node, cut)
    elif (wanted := wanted or pieces(node)) < 2 and cut is None:
        yield from _in_one_walk(whole) if node.kind == "welford" else (whole,)
    elif node.kind == "welford":
        yield from _variance(node)
    else:
        cut = _cut(node, wanted)
        if cut is None:
            yield whole
        else:
            yield from halves(node, cut)


def _refined(node: Reduction) -> Reduction:
    """With reduced dimensions that indices divide as several: group norm's channels of a group and places of an image lie far apart."""
    symbols, sizes = reduce_symbols(node.reduce_ranges), [int(s) for s in node.reduce_ranges]  # type: ignore[arg-type]
    divisors = divided([load.index for load in loads(node.body)])
    ranges: list[int] = []
    steps = [chain(n, divisors.get(s, set())) if isinstance(s, Sym) else [1] for s, n in zip(symbols, sizes, strict=True)]
    for size, own in zip(sizes, steps, strict=True):
        ranges += [large // small for large, small in zip((size, *own), own, strict=False)]
    if len(ranges) == len(sizes):
        return node
    made = iter(reduce_symbols(tuple(ranges)))
    mapping = {s: add(0, 0, *(mul(next(made), step) for step in own)) for s, own in zip(symbols, steps, strict=True)}
    mapping = {s: e for s, e in mapping.items() if isinstance(s, Sym) and s is not e}
    return replace(node, reduce_ranges=tuple(ranges), body=map_value(node.body, mapping, {}))


def _columns(node: Reduction, length: int) -> Cut | None:
    """Sums of columns, one partial sum for each of the programs that walk the rows (columns.py); None where rows cannot be shared out equally."""
    programs = ONE_EACH * max(1, min(4, LONG_ROW // length))
    cut = _cut(node, programs) if _count(node.reduce_ranges) >= FEWEST * programs else None
    return replace(cut, name=COLUMNS) if cut is not None and cut.inside is None and 4 * prod(cut.parts) >= 3 * programs else None


def pieces(node: Reduction) -> int:
    """How many partial results each row should have."""
    rows, length = _count(node.ranges), _count(node.reduce_ranges)
    if rows * length < SMALL or not rows:
        return 1
    if not across(node) and not _also_across(node):
        rows = -(-rows // _side_rows(node))
        return 1 if rows >= ENOUGH else min(-(-WANTED // rows), length // SHORTEST)
    blocks = -(-rows * _width(node) // ACROSS)
    return min(-(-WANTED_ACROSS // blocks), MOST_ACROSS, length // (SHORTEST_ACROSS if blocks < ENOUGH else LONG_ACROSS))


def _side_rows(node: Reduction) -> int:
    """How many rows a program folds side by side because they read the same (codegen/triton_pairs.py)."""
    rows = {s: n for s, n in zip(index_symbols(node.ranges), node.ranges, strict=True) if isinstance(s, Sym)}
    reads = [reach(load.index) for load in loads(node.body)]
    kinds = kinds_of_rows(reads, rows, frozenset(s for s in reduce_symbols(node.reduce_ranges) if isinstance(s, Sym)))
    if kinds is None or _count([rows[s] for one in kinds.apart for s in one]) < SHARING:
        return 1
    return SHARING if len(kinds.apart) == 1 else SHARING * SHARING


def _width(node: Reduction) -> int:
    """Bytes of the widest elements that are read."""
    return max((load.dtype.itemsize for load in loads(node.body)), default=4)


def _count(sizes: Sequence[Size]) -> int:
    """The product of sizes that are known."""
    return prod([int(s) if isinstance(s, int) else 0 for s in sizes])


def across(node: Reduction) -> bool:
    """Is memory contiguous along the rows, and not along what is reduced?"""
    last = [s for s in reduce_symbols(node.reduce_ranges) if isinstance(s, Sym)]
    rows = [s for s in index_symbols(node.ranges) if isinstance(s, Sym)]
    indices = _walked(node)
    along = any(_contiguous(index, s) for index in indices for s in last)
    return not along and any(_contiguous(index, s) for index in indices for s in rows)


def _walked(node: Reduction) -> list[Expr]:
    """Indices of what is walked as a whole, not of the numbers of a row."""
    indices = [load.index for load in loads(node.body)]
    most = max(map(weight, indices), default=0)
    return [index for index in indices if weight(index) == most]


def _also_across(node: Reduction) -> bool:
    """Is some memory contiguous along the rows, a sector of it at least, of which there are few?"""
    if _count(node.ranges) >= SECTOR * ENOUGH:
        return False  # a program holds the rows of a sector
    rows = [s for s, n in zip(index_symbols(node.ranges), node.ranges, strict=True) if isinstance(s, Sym) and int(n) >= SECTOR]  # type: ignore[arg-type]
    return any(_contiguous(index, s) for index in _walked(node) for s in rows)


def _contiguous(index: Expr, symbol: Sym) -> bool:
    """Do neighbours along the symbol lie side by side, in pieces of some length at least?"""
    if symbol not in index.free:
        return False
    terms = index.terms if isinstance(index, Add) else ((index, 1),)
    pieces = (t for t, step in terms if step == 1 and isinstance(t, Mod) and t.a is symbol)
    return coefficient(index, symbol) is ONE or any(isinstance(t.b, IntConst) and t.b.value >= PIECE for t in pieces)


def _side_by_side(node: Reduction) -> Cut | None:
    """Where what lies side by side is cut into short rows (group norm of channels-last memory): partial results of each element of these rows, so that programs read whole pieces of memory."""
    if _count(node.ranges) * _count(node.reduce_ranges) < SMALL or not (indices := [load.index for load in loads(node.body)]):
        return None
    width = _width(node)
    index, order = max(indices, key=weight), _outermost_first(node)
    symbol, size = reduce_symbols(node.reduce_ranges)[order[-1]], int(node.reduce_ranges[order[-1]])  # type: ignore[arg-type]
    if not isinstance(symbol, Sym) or coefficient(index, symbol) is not ONE or not 1 < size * width < LINE:
        return None
    if not any(isinstance(s, Sym) and coefficient(index, s) == IntConst(size) for s in index_symbols(node.ranges)):
        return None
    rest, across = _count(node.reduce_ranges) // size, _count(node.ranges) * size
    pieces = min(-(-WANTED_ACROSS * ACROSS // (across * width)), MOST_ACROSS // size, rest // SHORTEST_ACROSS)
    cut = _cut(node, size * pieces, [order[-1], *order[:-1]]) if pieces > 0 and across >= LINE else None
    return None if cut is None or cut.inside is not None or cut.parts[0] != size or cut.rest == () else replace(cut, beside=True)


def _cut(node: Reduction, wanted: int, order: Sequence[int] = ()) -> Cut | None:
    order = order or _outermost_first(node)
    sizes = [int(node.reduce_ranges[d]) for d in order]  # type: ignore[arg-type]
    symbols, rank = [reduce_symbols(node.reduce_ranges)[d] for d in order], len(node.ranges)
    parts: list[int] = []
    mapping: dict[Expr, Expr] = {}
    inside: Expr | None = None
    rest: list[int] = []
    for d, size in enumerate(sizes):
        have = prod(parts)
        if have * size <= wanted:
            if size != 1:
                mapping[symbols[d]] = index_symbol(rank + len(parts), size)
                parts.append(size)
            continue
        pieces = next((p for p in range(min(wanted // have, size), 1, -1) if size % p == 0), 1)
        if 2 * have * pieces < min(wanted, 8 * have) and node.kind in KINDS:
            pieces = wanted // have
        length = -(-size // pieces)
        if pieces > 1:
            position = add(mul(index_symbol(rank + len(parts), pieces), length), reduce_symbol(0, length))
            mapping[symbols[d]] = position
            parts.append(pieces)
            rest.append(length)
            if size % pieces:
                inside = compare("lt", position, size)
        else:
            rest.append(size)
            mapping[symbols[d]] = reduce_symbol(0, size)
        for later in range(d + 1, len(sizes)):
            mapping[symbols[later]] = reduce_symbol(len(rest), sizes[later])
            rest.append(sizes[later])
        break
    mapping = {s: e for s, e in mapping.items() if isinstance(s, Sym) and s is not e}
    return Cut(tuple(parts), tuple(rest), mapping, inside) if prod(parts) > 1 and rest else None


def _outermost_first(node: Reduction) -> list[int]:
    """The reduced dimensions by how far apart neighbours lie in memory: what lies together stays in one part."""
    symbols, sizes = reduce_symbols(node.reduce_ranges), [int(s) for s in node.reduce_ranges]  # type: ignore[arg-type]
    indices = [load.index for load in loads(node.body)]

    def distance(d: int) -> float:
        symbol, found = symbols[d], 0.0
        for index in indices:
            if isinstance(symbol, Sym) and symbol in index.free:
                first = dict.fromkeys(index.free, 0)
                found = max(found, (evaluate(index, {**first, symbol: sizes[d] - 1}) - evaluate(index, first)) / (sizes[d] - 1))
        return found

    return sorted(range(len(sizes)), key=lambda d: -distance(d))


def chunks(node: Reduction, wanted: int) -> Cut:
    """The one reduced dimension in at least so many chunks: of equal size where a number of them near that allows it, of an aligned size with a shorter last one otherwise."""
    (size,) = (int(s) for s in node.reduce_ranges)  # type: ignore[arg-type]
    count = next((n for n in range(wanted, wanted + wanted // 4 + 1) if size % (n * ALIGNED) == 0), 0)
    length = size // count if count else -(-size // (wanted * ALIGNED)) * ALIGNED
    count = -(-size // length)
    ((walked,), rank) = reduce_symbols(node.reduce_ranges), len(node.ranges)
    position = add(mul(index_symbol(rank, count), length), reduce_symbol(0, length))
    return Cut((count,), (length,), {walked: position}, compare("lt", position, size) if size % length else None)


def halves(node: Reduction, cut: Cut) -> Iterator[Node]:
    rows = tuple(int(s) for s in node.ranges)  # type: ignore[arg-type]
    part = cut.buffer(node, rows)
    body = map_value(node.body, cut.mapping, {})
    if cut.inside is not None:
        body = Masked(IndexValue(cut.inside, torch.bool), body, Const(-inf if node.kind == "max" else KINDS[node.kind], body.dtype))
    yield Reduction(node.kind, (part,), cut.rest, body, node.acc_dtype, node.origins)
    place = part.offset((*index_symbols(rows), *reduce_symbols(cut.parts)))
    yield replace(node, reduce_ranges=cut.parts, body=Load(part.name, place, node.acc_dtype))


def _in_one_walk(node: Reduction) -> Iterator[Node]:
    """A variance of rows that no block holds gives its sum and its deviations together."""
    if _count(node.reduce_ranges) <= (HELD_ACROSS if across(node) else HELD):
        yield node
    else:
        yield from _variance(node, True)


def _variance(node: Reduction, whole: bool = False) -> Iterator[Node]:
    """sum -> mean -> sum of squared deviations, each cut on its own; where the parts are equal, each of them gives its sum and its deviations from its own mean in one walk. `whole`: not cut."""
    mean, m2 = node.buffers
    acc, at = node.acc_dtype, index_symbols(node.ranges)

    def buffer(suffix: str) -> Buffer:
        return replace(mean, name=f"{mean.name}.{suffix}", dtype=acc, flexible=True)

    def loaded(b: Buffer) -> Value:
        return Load(b.name, b.offset(at), b.dtype)

    body = node.body if node.body.dtype is acc else Op("convert_element_type", (node.body,), acc)
    total, exact = buffer("total"), mean if mean.dtype is acc else buffer("exact")
    sums = Reduction("sum", (total,), node.reduce_ranges, body, acc, node.origins)
    cut = None if whole else _equal(node)
    yield from (sums,) if whole else _of(sums) if cut is None else halves(sums, cut)
    count = Const(float(_count(node.reduce_ranges)), acc)
    yield Pointwise(exact, Op("div", (loaded(total), count), acc), node.origins)
    if exact is not mean:
        yield Pointwise(mean, Op("convert_element_type", (loaded(exact),), mean.dtype), node.origins)
    if whole:
        yield replace(sums, kind="m2", buffers=(m2,))
    elif cut is None:
        away = Op("sub", (body, loaded(exact)), acc)
        yield from _of(Reduction("sum", (m2,), node.reduce_ranges, Op("mul", (away, away), acc), acc, node.origins))
    else:
        yield from _deviations(replace(sums, kind="m2", buffers=(m2,)), sums, loaded(exact), cut)


def _equal(node: Reduction) -> Cut | None:
    """The cut of a variance into parts of one size, which must be enough."""
    if (cut := _side_by_side(node)) is not None:
        return cut
    wanted = pieces(node)
    cut = _cut(node, wanted)  # of this kind never into unequal ones
    return cut if cut is not None and 2 * prod(cut.parts) >= wanted else None


def _deviations(node: Reduction, sums: Reduction, mean: Value, cut: Cut) -> Iterator[Node]:
    """Squared deviations from `mean`, of those from each part's own mean and of these means."""
    rows, acc = tuple(int(s) for s in node.ranges), node.acc_dtype  # type: ignore[arg-type]
    part, total = cut.buffer(node, rows), cut.buffer(sums, rows)
    yield replace(node, buffers=(part,), reduce_ranges=cut.rest, body=map_value(node.body, cut.mapping, {}))
    place, size = part.offset((*index_symbols(rows), *reduce_symbols(cut.parts))), Const(float(prod(cut.rest)), acc)
    away = Op("sub", (Op("div", (Load(total.name, place, acc), size), acc), mean), acc)
    between = Op("mul", (Op("mul", (away, away), acc), size), acc)
    yield replace(node, kind="sum", reduce_ranges=cut.parts, body=Op("add", (Load(part.name, place, acc), between), acc))
