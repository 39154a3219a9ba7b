"""Which loops a kernel has: dimensions merged where all indices allow it, ordered by stride, and shared out to threads.

A `Nest` is: one parallel loop over `outer` (flattened), inside it the `inner` loops, the last of which is vectorised. For reductions:

- *inner* mode: outer = rows, inner = cols. The vector walks along the row.
- *outer* mode: the dimension with stride 1 is a row dimension (sums over the slow dimension). It becomes the vectorised loop inside the
  cols, in blocks of `block` accumulators; with the last col loop in squares where other memory is contiguous along that.
- *split* mode: few, long rows. The first col loop is cut into chunks, which threads fold on their own; the partial results are folded last.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from magneto.base.dataclass import dataclass, replace
from magneto.base.varying import any_size, chosen
from magneto.inductor.codegen.cpp_beside import LEAST, beside, hoisted, repeated
from magneto.inductor.codegen.cpp_ops import HEAVY
from magneto.inductor.codegen.cpp_types import HALVES
from magneto.inductor.loops.ir import IndexValue, Indirect, Load, Masked, Op, Value, walk_values, weight
from magneto.inductor.loops.span import decided, symbols_of
from magneto.inductor.schedule.crossed import KINDS, WIDTH
from magneto.inductor.schedule.domain import chain, divided, fresh_symbol
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.kernel import SCATTER, Dim, FusedKernel, Member, member_loads
from magneto.symbolic import ZERO, Add, Expr, Sym, add, floordiv, mod, mul, substitute

PARALLEL = 16384  # elements: below, starting threads costs more than it gains
CHUNK = 8192  # elements of one thread's portion of a long vector loop
BLOCK = 256  # accumulators held side by side in outer mode
ROWS_WANTED = 64
DOWN_FROM = 64  # rows that are added up, at least, to be walked as they lie
DOWN_BYTES = 96 << 10  # of accumulators for all columns, at most
SHORT = 7  # elements of a last dimension, at most, that is written out inside the vector loop over the one before
TOLD = 9  # the same where conditions tell its elements apart
LONG = 16  # of that one, at least
WRITTEN_OUT = 256  # operations, at most
FEW_LANES = 16  # accumulators side by side of a row of few elements
TILE = 64
STRIP = (
    256  # of the vector loop of squares: few enough pages of memory are walked along the other loop to be walked again for its next squares
)


@dataclass(frozen=True, slots=True)
class Nest:
    """`mode`: point, inner, outer or split. `chunk`: how much of the loop that is cut (see `cut`) one portion covers, 0: all.
    Portions of a row are iterations of the parallel loop of their own. `tiled`: the last two inner loops run in squares, because some
    memory is contiguous along the one and some along the other (transposition). The text of kernels for any size computes the portions itself, and asks for threads by the number of points."""

    kernel: FusedKernel
    mode: str
    outer: tuple[Dim, ...]
    inner: tuple[Dim, ...]
    chunk: int
    parallel: bool
    tiled: bool = False
    after: tuple[Member, ...] = ()  # computed of what the kernel's members have found down the columns
    any: str = ""  # of kernels for any size: `chunk` as an expression in C, 0 where there are no portions

    beside: bool = False  # members over the rows alone are computed ahead for the elements side by side
    lanes: int = 0  # of the vector loop that are one row's: its elements side by side (cpp_beside)
    short: Dim | None = None  # written out inside the vector loop: some memory has its few elements side by side (three colours)

    @property
    def points(self) -> int:
        return prod(d.size for d in (*self.kernel.rows, *self.kernel.cols))

    @property
    def vector(self) -> Dim | None:
        return self.inner[-1] if self.inner else None

    @property
    def portions(self) -> int:
        return -(-self.cut.size // self.chunk) if self.chunk and self.cut is not None else 1

    @property
    def cut(self) -> Dim | None:
        """The loop that portions are cut from."""
        if not self.inner:
            return None
        return self.inner[-1 if self.mode == "outer" or (self.tiled and self.inner[-1].size > STRIP and not self.any) else 0]

    def runs(self, index: Expr) -> tuple[int, int] | None:
        """(how many runs of memory, of how many elements at each of its steps) the vector loop passes through; None where elements do not lie side by side."""
        assert self.vector is not None
        along, count = stride_along(index, self.vector.sym), self.short.size if self.short is not None else 1
        aside = 0 if self.short is None else stride_along(index, self.short.sym)
        if any(isinstance(s, Indirect) for s in index.free) or aside is None:
            return None
        if along == 1:
            return (count if aside else 1), 1
        return (1, count) if aside == 1 and along == count else None

    @property
    def iterations(self) -> int:
        """Of the parallel loop."""
        return self.rows * self.portions

    @property
    def rows(self) -> int:
        return prod(d.size for d in self.outer)

    # ---- in the text ----

    @property
    def cut_in(self) -> tuple[str, str, str, str]:
        """`chunk`, `portions`, `portions` as a divisor of the row's number, `iterations`."""
        if not self.chunk or not self.any:
            return str(self.chunk), str(self.portions), str(self.portions), str(self.iterations)
        return "chunk", "portions", "(u32)portions" if self.iterations < 1 << 31 else "portions", f"{self.rows} * portions"

    @property
    def constants(self) -> list[str]:
        """What the text of a kernel for any size computes first."""
        if not self.any:
            return []
        lines = [f"const i64 points = {self.points};"]
        if self.chunk and self.cut is not None:
            lines.append(f"const i64 chunk = {self.any}, portions = ({self.cut.size} + chunk - 1) / chunk;")
        return lines

    @property
    def threads(self) -> str:
        """When threads share the work, as a clause."""
        return f" if (points >= {PARALLEL})" if self.any else ""


def nest_of(kernel: FusedKernel) -> Nest:
    """The loops of a kernel. Dimensions that indices divide are several where a vector loop of some length is left."""
    ordered = any_size() or any(m.kind in ("argmax", "argmin") for m in kernel.members)
    if not ordered and (apart := cut_dims(kernel)) is not kernel:
        nest = _nest(normal_form(apart))
        if nest.vector is not None and nest.vector.size >= LONG:
            return nest
    return _nest(normal_form(kernel))


def cut_dims(kernel: FusedKernel, shortest: int = 2) -> FusedKernel:
    """The kernel with every dimension that indices divide by a number as several. `shortest`: elements of a piece.

    A bias' gradient of an attention is a sum over (batch, sequence) of one row of 2,304 channels, whose memory is that of three tensors by (heads, 64): every index divides the row's symbol by 64. Cut into
    pieces the row is contiguous memory along 64 channels, and nothing is divided."""
    divisors = divided(kernel_indices(kernel))
    mapping: dict[Expr, Expr] = {}

    def pieces(dim: Dim) -> list[Dim]:
        steps = chain(dim.size, {d for d in divisors.get(dim.sym, ()) if d >= shortest})
        if len(steps) < 2:
            return [dim]
        made = [Dim(fresh_symbol(n), n) for n in (large // small for large, small in zip((dim.size, *steps), steps, strict=False))]
        mapping[dim.sym] = add(0, 0, *(mul(d.sym, step) for d, step in zip(made, steps, strict=True)))
        return made

    rows, cols = (tuple(piece for dim in dims for piece in pieces(dim)) for dims in (kernel.rows, kernel.cols))
    if not mapping:
        return kernel
    memo: dict[Value, Value] = {}
    return replace(kernel, rows=rows, cols=cols, members=tuple(m.mapped(mapping, memo) for m in kernel.members))


def _nest(kernel: FusedKernel) -> Nest:
    """The loops of a kernel in its normal form."""
    total = prod(d.size for d in (*kernel.rows, *kernel.cols))
    parallel = total >= PARALLEL or any_size()
    if not any(m.is_reduction for m in kernel.members):
        return _point_nest(kernel, (*kernel.rows, *kernel.cols), parallel)
    rows = prod(d.size for d in kernel.rows)
    if any(m.down for m in kernel.members):
        return Nest(kernel, "inner", kernel.rows, kernel.cols, 0, parallel and rows > 1, any=_any("0"))
    vector_row = _vector_row(kernel)
    if not any_size() and (apart := beside(kernel, main_terms(kernel))) is not None:
        kernel = _canonical(apart.kernel)
        return Nest(
            kernel, "outer", kernel.rows[:-1], (*kernel.cols, kernel.rows[-1]), apart.width, parallel, lanes=apart.lanes, beside=True
        )
    few = None if vector_row is not None or any_size() else _few_side_by_side(kernel)
    if vector_row is not None or (vector_row := few) is not None:
        turned = kernel.cols[-1] if few is not None else _turned_col(kernel, vector_row)
        if turned is None and parallel and (down := _downwards(kernel)) is not None:
            return down
        made = hoisted(kernel, {d.sym for d in kernel.cols}) if kernel.rows[-1] is vector_row else kernel
        ahead = _costs_ahead(kernel, made)
        kernel = made if ahead else kernel
        others = tuple(d for d in kernel.rows if d is not vector_row)
        cols = kernel.cols if turned is None else (*(d for d in kernel.cols if d is not turned), turned)
        wide = BLOCK if turned is None else TILE
        block = _any(f"mg_min({wide}, {vector_row.size})")
        return Nest(
            kernel, "outer", others, (*cols, vector_row), min(wide, vector_row.size), parallel, turned is not None, any=block, beside=ahead
        )
    if parallel and (rows < 8 if not any_size() else rows == 1) and _can_split(kernel):
        first = kernel.cols[0]
        rest = prod(d.size for d in kernel.cols[1:])
        chunk = max(1, min(first.size, max(CHUNK // rest, -(-first.size // 256))))
        text = f"mg_max(1, mg_min({first.size}, mg_max({CHUNK} / {rest}, ({first.size} + 255) / 256)))"
        return Nest(kernel, "split", kernel.rows, kernel.cols, chunk, True, any=_any(text))
    return Nest(kernel, "inner", kernel.rows, kernel.cols, 0, parallel and rows > 1, any=_any("0"))


def _costs_ahead(kernel: FusedKernel, made: FusedKernel) -> bool:
    """Are there costly operations among the members over rows alone that `made` has ahead of the kernel's own?"""
    known = {m.name for m in kernel.members}
    return any(isinstance(v, Op) and v.name in HEAVY for m in made.members if m.name not in known for v in walk_values(m.body))


def _any(chunk: str) -> str:
    return chunk if any_size() else ""


def _downwards(kernel: FusedKernel) -> Nest | None:
    """Sums across the rows of a matrix that is not too wide, walked as it lies in memory: portions of its rows have accumulators for all columns (cpp_crossed), so that there is work for
    every thread. None for what needs a second walk."""
    stages = member_stages(kernel.members)
    folds = [m for m in kernel.members if m.is_reduction]
    whole = [m for m in kernel.members if m.full]
    if (
        len(kernel.rows) != 1
        or chosen(lambda: prod(d.size for d in kernel.cols) < DOWN_FROM)
        or kernel.rows[0].size * WIDTH * len(folds) > DOWN_BYTES
    ):
        return None
    if any(stages[m.name] or m.kind not in (KINDS if len(kernel.cols) > 1 else (*KINDS, "argmax", "argmin")) for m in whole):
        return None
    if any(m.down or not m.full for m in folds) or any(m.name in kernel.stored for m in whole if not m.is_reduction):
        return None
    members = tuple(replace(m, down=m.is_reduction) for m in whole)
    after = tuple(m for m in kernel.members if not m.full)
    if any(m.kind not in KINDS for m in after):
        return None
    turned = replace(kernel, rows=kernel.cols, cols=kernel.rows, members=members)
    return Nest(turned, "inner", turned.rows, turned.cols, 0, True, after=after, any=_any("0"))


def _can_split(kernel: FusedKernel) -> bool:
    stages = member_stages(kernel.members)
    simple = all(m.kind in ("sum", "prod", "max", "min", "any", "all", "point") for m in kernel.members)
    stored_again = any(m.full and not m.is_reduction and stages[m.name] > 0 and m.name in kernel.stored for m in kernel.members)
    return simple and not stored_again and prod(d.size for d in kernel.rows) <= 64


def _point_nest(kernel: FusedKernel, dims: tuple[Dim, ...], parallel: bool) -> Nest:
    if not dims:
        return Nest(kernel, "point", (), (), 0, False)
    other = _other_contiguous(kernel, dims)
    if other is not None:
        rest = tuple(d for d in dims[:-1] if d is not other)
        chunk = other.size if prod(d.size for d in rest) >= ROWS_WANTED else max(TILE, CHUNK // dims[-1].size // TILE * TILE)
        chunk = STRIP if dims[-1].size > STRIP else min(chunk, other.size)
        if any_size():
            text = f"mg_max({TILE}, {CHUNK} / {dims[-1].size} / {TILE} * {TILE})"
            return Nest(kernel, "point", rest, (other, dims[-1]), TILE, True, True, any=text)
        return Nest(kernel, "point", rest, (other, dims[-1]), chunk, parallel, True)
    if any_size():
        outer, inner = dims[:-2], dims[-2:]
        text = f"mg_max(1, {CHUNK} / {inner[1].size})" if len(inner) > 1 else str(CHUNK)
        return Nest(kernel, "point", outer, inner, max(1, CHUNK // inner[1].size) if len(inner) > 1 else CHUNK, True, any=text)
    if (joined := _joined(kernel, dims)) is not None:
        kernel, dims = joined, joined.rows
    if (short := _short(kernel, dims)) is not None:
        return replace(_point_nest(kernel, tuple(d for d in dims if d is not short), parallel), short=short)
    if (found := repeated(kernel, main_terms(kernel))) is not None:
        kernel, split = _canonical(found[0]), found[1]
        outer, inner = kernel.rows[:split], kernel.rows[split:]
        least = -(-LEAST // prod(d.size for d in inner[1:-1]))
        chunk = max(least, CHUNK // prod(d.size for d in inner[1:])) if parallel and prod(d.size for d in outer) < ROWS_WANTED else 0
        return Nest(kernel, "point", outer, inner, chunk if chunk < inner[0].size else 0, parallel, beside=True)
    split = 0
    while split < len(dims) - 1 and prod(d.size for d in dims[:split]) < ROWS_WANTED:
        split += 1
    outer, inner = dims[:split], dims[split:]
    chunk, below = 0, prod(d.size for d in inner[1:])
    if parallel and prod(d.size for d in outer) < ROWS_WANTED and inner[0].size * below > CHUNK:
        chunk = max(1, CHUNK // below)
    return Nest(kernel, "point", outer, inner, chunk, parallel)


def _other_contiguous(kernel: FusedKernel, dims: tuple[Dim, ...]) -> Dim | None:
    """The dimension along which some load is contiguous that jumps along the vector dimension."""
    last = dims[-1]
    for index in kernel_indices(kernel):
        linear, _ = _terms(index)
        if linear.get(last.sym, 0) >= 8 and last.size >= 8:
            for dim in dims[:-1]:
                if linear.get(dim.sym) == 1 and dim.size >= 8:
                    return dim
    return None


def _joined(kernel: FusedKernel, dims: tuple[Dim, ...]) -> FusedKernel | None:
    """With the last two dimensions as one, where these are small matrices whose elements conditions tell apart (gradients of their elements): all are written out then."""
    if len(dims) < 3 or dims[-1].size * dims[-2].size > TOLD or dims[-3].size < LONG:
        return None
    (rows, cols), both = dims[-2:], Dim(fresh_symbol(dims[-1].size * dims[-2].size), dims[-1].size * dims[-2].size)
    told = {rows.sym, cols.sym}
    conditions = [symbols_of(v.cond) for m in kernel.members for v in walk_values(m.body) if isinstance(v, Masked)]
    if told != set().union(*conditions):
        return None
    if any(_terms(m.store)[0].get(cols.sym) != 1 or _terms(m.store)[0].get(rows.sym) != cols.size for m in kernel.members):
        return None
    mapping: dict[Expr, Expr] = {rows.sym: floordiv(both.sym, cols.size), cols.sym: mod(both.sym, cols.size)}
    memo: dict[Value, Value] = {}
    members = tuple(
        replace(m.mapped(mapping, memo), store=substitute(m.store, {rows.sym: ZERO, cols.sym: both.sym})) for m in kernel.members
    )
    made = _canonical(replace(kernel, rows=(*dims[:-2], both), cols=(), members=members))
    return made if _short(made, made.rows) is made.rows[-1] else None


def _reached(kernel: FusedKernel, dim: Dim) -> int:
    """Operations where all elements of a dimension are written out: what conditions on it alone leave of each."""
    count = 0
    for at in range(dim.size):
        for member in kernel.members:
            seen: set[Value] = set()
            work = [member.body]
            while work:
                value = work.pop()
                if value not in seen:
                    seen.add(value)
                    taken = decided(value, {dim.sym: at})
                    work.extend(value.children() if taken is None else (taken,))
                    count += isinstance(value, Op | Load) or (isinstance(value, Masked) and taken is None)
    return count


def _short(kernel: FusedKernel, dims: tuple[Dim, ...]) -> Dim | None:
    """One of the last two dimensions, of few elements, that lie side by side in some memory, behind each other along the other one: a vector over these few would be no vector, and one over the other reads or writes
    with gaps, unless all of them are in one turn of its loop."""
    for short, vector in (dims[:-3:-1], dims[-2:]) if len(dims) > 1 else ():
        told = short.size > SHORT and any(
            symbols_of(v.cond) == {short.sym} for m in kernel.members for v in walk_values(m.body) if isinstance(v, Masked)
        )
        if not (
            2 <= short.size <= (TOLD if told else SHORT) and vector.size >= LONG and not any(m.kind == SCATTER for m in kernel.members)
        ):
            continue
        if _reached(kernel, short) > WRITTEN_OUT:
            continue
        masked = (v for m in kernel.members for v in walk_values(m.body) if isinstance(v, Masked) and symbols_of(v.cond) != {short.sym})
        if any(isinstance(x, Load) for v in masked for x in walk_values(v.value)):
            continue  # gcc 12 takes the mask of the first lanes for all lanes of neighbouring loads under one condition
        if _unsorted(kernel, vector):
            continue
        gathers = (s for index in kernel_indices(kernel) for s in index.free if isinstance(s, Indirect))
        guarded = any(isinstance(v, Masked) for m in kernel.members for v in walk_values(m.body))
        if (
            short.size > 2 and not guarded and any(short.sym not in symbols_of(s.value) for s in gathers)
        ):  # what is looked up lies side by side
            continue
        for linear, _ in map(_terms, kernel_indices(kernel)):
            if linear.get(short.sym) == 1 and short.size <= linear.get(vector.sym, 0) <= 2 * short.size:
                return short
    return None


def _unsorted(kernel: FusedKernel, vector: Dim) -> bool:
    """Are numbers compared that stand where gcc sorts them into vectors for sums only? (It sorts powers of two, and three, for anything.)"""
    values = [v for m in kernel.members for v in walk_values(m.body)]
    steps = {_terms(v.index)[0].get(vector.sym, 0) for v in values if isinstance(v, Load)}
    return any(isinstance(v, Op) and v.name in ("maximum", "minimum") for v in values) and any(s > 3 and s & (s - 1) for s in steps)


# ---- indices of a kernel -------------------------------------------------------------------------------------------------


def kernel_indices(kernel: FusedKernel) -> list[Expr]:
    """Every index expression, those inside computed indices included."""
    found: dict[Expr, None] = {}
    for member in kernel.members:
        found[member.store] = None
        if member.flat is not None:
            found[member.flat] = None
        for value in walk_values(member.body):
            if isinstance(value, Load):
                found[value.index] = None
            elif isinstance(value, IndexValue):
                found[value.expr] = None
    return list(found)


def _terms(index: Expr) -> tuple[dict[Sym, int], frozenset[Sym]]:
    """(coefficient of each symbol that occurs linearly, symbols that occur otherwise)."""
    linear: dict[Sym, int] = {}
    other: set[Sym] = set()
    for term, c in index.terms if isinstance(index, Add) else ((index, 1),):
        if isinstance(term, Sym) and not isinstance(term, Indirect):
            linear[term] = c
        else:
            other.update(s for s in term.free if not isinstance(s, Indirect))
    return linear, frozenset(other)


def stride_along(index: Expr, symbol: Sym) -> int | None:
    """The index's coefficient of a symbol; None where it depends on it in another way."""
    linear, other = _terms(index)
    return None if symbol in other else linear.get(symbol, 0)


def _ordered(kernel: FusedKernel) -> FusedKernel:
    """Dimensions of rows and of cols sorted by their stride in the memory that is walked most, largest first; cols not where they are walked in order."""
    main = _main_index(kernel)
    linear, other = _terms(main)
    if other:
        return kernel

    def sort(dims: Sequence[Dim]) -> tuple[Dim, ...]:
        return tuple(sorted(dims, key=lambda d: -linear.get(d.sym, 1 << 62)))

    cols = kernel.cols if any(m.is_scan for m in kernel.members) else sort(kernel.cols)
    return replace(kernel, rows=sort(kernel.rows), cols=cols)


def _main_index(kernel: FusedKernel) -> Expr:
    """Of a pointwise kernel the first store, of others the load (or the place that is added to) over most dimensions."""
    stores = [m for m in kernel.members if m.name in kernel.stored]
    if not kernel.cols and stores:
        return max(stores, key=lambda m: len(m.store.free)).store
    best = [v.expr for m in kernel.members if m.kind == SCATTER for v in m.body.children()[:1] if isinstance(v, IndexValue)]
    best += [load.index for m in kernel.members for load in walk_values(m.body) if isinstance(load, Load)]
    best += [m.store for m in kernel.members if m.is_scan]
    return max(best, key=weight, default=ZERO)


def main_terms(kernel: FusedKernel) -> dict[Sym, int]:
    """How the memory that is walked most moves with each symbol."""
    return _terms(_main_index(kernel))[0]


def _vector_row(kernel: FusedKernel) -> Dim | None:
    """The row dimension along which memory is contiguous, where the cols' last dimension is not."""
    linear, _ = _terms(_main_index(kernel))
    if any(m.kind in ("argmax", "argmin") for m in kernel.members) and prod(d.size for d in kernel.cols) >= 1 << 31:
        return None
    contiguous = [d for d in kernel.rows if linear.get(d.sym) == 1]
    if not contiguous or any(linear.get(d.sym) == 1 for d in kernel.cols) or contiguous[0].size < 4:
        return None
    return contiguous[0]


def _few_side_by_side(kernel: FusedKernel) -> Dim | None:
    """The row dimension that is walked as a vector, in squares, where the rows themselves are too short to be vectors; None for others. Sums of 32 elements are vectors, extrema need more steps to be joined."""
    linear, count = main_terms(kernel), prod(d.size for d in kernel.cols)
    searches = any(m.kind in ("argmax", "argmin") for m in kernel.members)
    if linear.get(kernel.cols[-1].sym) != 1 or count > TILE or any(m.down or m.is_scan for m in kernel.members):
        return None
    if searches and len(kernel.cols) > 1:
        return None
    if count >= 2 * FEW_LANES:
        extrema = searches or any(m.kind in ("max", "min") for m in kernel.members)
        whole = any(m.full and not m.is_reduction and m.name in kernel.stored for m in kernel.members)
        halves = all(
            load.dtype in HALVES for m in kernel.members if m.full for load in member_loads(m.body) if load.buffer not in kernel.computed
        )
        if not extrema or (whole and not halves):
            return None
    return min((d for d in kernel.rows if linear.get(d.sym, 0) > 1 and d.size >= TILE), key=lambda d: linear[d.sym], default=None)


def _turned_col(kernel: FusedKernel, vector: Dim) -> Dim | None:
    """The col dimension along which some load is contiguous that jumps along the vector loop over rows. Where places are found they are looked at in their order."""
    turned = _other_contiguous(kernel, (*kernel.cols, vector))
    ordered = any(m.kind in ("argmax", "argmin") for m in kernel.members)
    return None if turned is None or (ordered and turned is not kernel.cols[-1]) else turned


def _merged(kernel: FusedKernel) -> FusedKernel:
    """Neighbouring dimensions made one where every index moves through them as through one."""
    terms = [_terms(e) for e in kernel_indices(kernel)]
    mapping: dict[Expr, Expr] = {}

    def merge(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        result: list[Dim] = list(dims[:1])
        for dim in dims[1:]:
            last = result[-1]
            if _mergeable(last, dim, terms):
                joint = Dim(Sym(f"m{len(mapping)}_{dim.sym.name}", 0, last.size * dim.size - 1), last.size * dim.size)
                mapping[last.sym], mapping[dim.sym] = ZERO, joint.sym
                for linear, _ in terms:
                    if dim.sym in linear:
                        linear[joint.sym] = linear.pop(dim.sym)
                        linear.pop(last.sym, None)
                result[-1] = joint
            else:
                result.append(dim)
        return tuple(result)

    rows, cols = merge(kernel.rows), merge(kernel.cols)
    if not mapping:
        return kernel
    final = {s: _resolved(e, mapping) for s, e in mapping.items()}
    memo: dict[Value, Value] = {}
    return replace(kernel, rows=rows, cols=cols, members=tuple(m.mapped(final, memo) for m in kernel.members))


def _canonical(kernel: FusedKernel) -> FusedKernel:
    """Symbols named by position: the order of terms, and so the text, must not depend on where they came from."""
    names: dict[Expr, Expr] = {
        d.sym: Sym(f"{kind}{i}", 0, d.size - 1) for kind in "xy" for i, d in enumerate(kernel.rows if kind == "x" else kernel.cols)
    }

    def renamed(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(Dim(names[d.sym], d.size) for d in dims)  # type: ignore[arg-type]

    memo: dict[Value, Value] = {}
    members = tuple(m.mapped(names, memo) for m in kernel.members)
    return replace(kernel, rows=renamed(kernel.rows), cols=renamed(kernel.cols), members=members)


def _resolved(e: Expr, mapping: dict[Expr, Expr]) -> Expr:
    while e in mapping:
        e = mapping[e]
    return e


def _mergeable(outer: Dim, inner: Dim, terms: Sequence[tuple[dict[Sym, int], frozenset[Sym]]]) -> bool:
    for linear, other in terms:
        if outer.sym in other or inner.sym in other:
            return False
        if linear.get(outer.sym, 0) != linear.get(inner.sym, 0) * inner.size:
            return False
    return True


def normal_form(kernel: FusedKernel) -> FusedKernel:
    """The kernel with its dimensions sorted by stride, merged where that changes no index, and named by position."""
    return _canonical(_merged(_ordered(kernel)))


def order_within(kernel: FusedKernel, shared: Sequence[Dim]) -> tuple[FusedKernel, int]:
    """A pointwise kernel over dimensions that are `shared`, as they are, and the others in their normal form behind them; and how many are shared."""
    linear = main_terms(kernel)
    rest = sorted((d for d in kernel.rows if d not in shared), key=lambda d: -linear.get(d.sym, 0))
    merged = _merged(replace(kernel, rows=(), cols=tuple(rest)))
    return _canonical(replace(merged, rows=(*shared, *merged.cols), cols=())), len(shared)


def other_contiguous(kernel: FusedKernel, dims: tuple[Dim, ...]) -> Dim | None:
    """The dimension, not the last one, along which some memory is contiguous; None if there is none worth tiles."""
    return _other_contiguous(kernel, dims)


def contiguous_row(kernel: FusedKernel) -> Dim | None:
    """The row dimension along which a reduction's memory is contiguous; None where that is a dimension it reduces."""
    return _vector_row(kernel)
