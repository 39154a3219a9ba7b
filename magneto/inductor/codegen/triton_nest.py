"""Which blocks a Triton kernel computes: axes, their sizes, the grid, warps.

- pointwise: one axis `x` over all dimensions; two, `y` and `x`, where some memory is contiguous along another dimension than the results (transposition), and where
  rows and columns are told apart by division: then `x` is along the rows, and no element is divided for.
- reduction of spans (bags of an embedding): a row's number, or few side by side, in a block, whose loop goes from the beginning of the span to its end.
- reduction over pairs: triton_pairs.py.
- reduction: `x` over the rows, `r` over what is reduced. *Persistent*: a block holds whole rows, which are read once. Otherwise loops walk `r`, once per stage.

Sizes are known, so that the grid is, and masks are left out where blocks divide. The numbers are measured on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from magneto.base.dataclass import dataclass
from magneto.inductor.codegen.cpp_nest import contiguous_row, cut_dims, normal_form, other_contiguous
from magneto.inductor.loops.ir import Indirect, Op, reach, walk_values
from magneto.inductor.loops.span import span_of, symbols_of
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.kernel import COLUMN, Dim, FusedKernel, member_loads
from magneto.symbolic import ONE, ZERO, Add, Cmp, Const, Expr, Max, Min, Sym, add, coefficient, mul, substitute
from magneto.symbolic.nodes import linear
from magneto.symbolic.rules import divisor_of

PERSISTENT = 16384  # elements of a row that one block holds in registers
PERSISTENT_ACROSS = 64  # as many where memory is contiguous along the rows
LOOPED_ACROSS = 32  # rows of 64 elements of 4 bytes that a block of 8 warps walks at a time
LONG_ACROSS = 2048  # rows that each block walks: there are more of such blocks
HELD_ACROSS = 8192  # elements of such a block where there are few
LEAST_BESIDE, HELD_BESIDE = (
    8,
    16384,
)  # rows of a block of which some memory is contiguous along the rows, some along what is reduced; elements
SCANNED = 32  # columns of elements of 4 bytes that a block adds up, each in order: what one line of memory holds
HELD_OF_SCAN = 8192  # such elements in a turn of its loop
IN_REGISTERS = 96  # elements of all operands that a thread holds of such a block
VECTOR = 16  # bytes
HELD = 2 * VECTOR  # bytes of each operand that a thread of a pointwise kernel holds
HELD_OF_ROW = 2 * VECTOR  # bytes of a row that a thread holds
HELD_HALVES = (
    4 * VECTOR
)  # the same of elements of 16 bits, of which one operand is read, or which arithmetic bounds since numbers are drawn; of what is added up in order
READ_ONLY = 8 * VECTOR  # the same of a row of which nothing is written
AHEAD = 1 << 16  # bytes that a program which walks rows reads ahead
TILE = 32
LOOKED_UP_TILE = 16  # elements of memory side by side where places are looked up
TURNED = 8  # elements of a dimension, or between neighbours along another, that are worth tiles
NARROW_ROW = 16
SHARED = 4096  # elements of a block of rows all of whose operands other rows read too
LONG = 1 << 24  # elements of a pointwise kernel: from here on blocks are large
FEW_OPERANDS = 4  # of 16 bits, of which large blocks are as fast or faster (half a pool's gradient's time)
WINDOW, FIELDS = 4, 3  # operands that are read element by element, those of them that skip elements
SHORT_ROW = 64  # elements: along shorter rows of a pointwise kernel there is no block
MOST_BLOCKS = 65535  # along all but the first axis of a grid
SHORTEST = 16  # elements of a piece of a dimension that indices divide: blocks along shorter ones are slower than dividing
SPAN_ROW = 128  # elements side by side that a block of spans has
SPAN_HELD = 2048  # elements of looked up rows that are under way in one, twice as many where spans are long
LOOKED_UP = (
    4096  # elements of looked up rows for each warp: the fewer warps, the more of their loads are under way; half as many of large tables
)
HALF_A_CACHE = 1 << 25  # bytes, of a large GPU
WANTED = 256  # blocks, about two for each multiprocessor of a large GPU


@dataclass(frozen=True, slots=True)
class Axis:
    """`dims`: slowest first; `block`: elements of it in one block."""

    name: str
    dims: tuple[Dim, ...]
    block: int

    @property
    def size(self) -> int:
        return prod(d.size for d in self.dims)

    @property
    def walk(self) -> Expr:
        """The index of what lies one behind the other along the axis."""
        steps = (prod(d.size for d in self.dims[n + 1 :]) for n in range(len(self.dims)))
        return add(0, 0, *(mul(d.sym, step) for d, step in zip(self.dims, steps, strict=True)))

    @property
    def masked(self) -> bool:
        return self.size % self.block != 0

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)


@dataclass(frozen=True, slots=True)
class Blocks:
    """`axes` in the order of the blocks' dimensions. `looped`: the last one is walked in a loop. `outer`: dimensions of which a block has one index, a scalar.
    `stages`: the rows are walked in a loop, of which so many turns are under way at a time; each program has one index of `outer`, and sums up columns (columns.py).
    `run`: neighbours along the last axis that a thread holds, although memory is contiguous along another: so many it adds up in order by itself.
    `tall`: the grid counts the first axis (or `outer`) fastest, of which there are more blocks than the others may have."""

    kernel: FusedKernel
    axes: tuple[Axis, ...]
    looped: bool
    warps: int
    outer: tuple[Dim, ...] = ()
    tall: bool = False
    stages: int = 0
    run: int = 1

    @property
    def shared_out(self) -> tuple[Axis, ...]:
        """The axes that programs share, in the order of the grid."""
        found = tuple(a for a in self.axes if a.name != "r" and not self.stages)
        return found if self.tall else found[::-1]

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks along each axis that is shared out, the fastest first."""
        outside = (prod(d.size for d in self.outer),) if self.outer else ()
        shared = tuple(a.blocks for a in self.shared_out)
        return (*outside, *shared) if self.tall else (*shared, *outside)


def power_above(n: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(n - 1, 0).bit_length()


def blocks_of(kernel: FusedKernel) -> Blocks:
    """The blocks of a kernel."""
    scans = any(m.is_scan for m in kernel.members)
    if not scans and not any(m.is_reduction for m in kernel.members):
        return _pointwise(normal_form(kernel))
    if not scans and (spans := [found[1] for m in kernel.members if (found := span_of(m.body)) is not None]) and len(kernel.cols) == 1:
        return _spans(kernel, symbols_of(*(value for span in spans for value in span)))
    kernel = normal_form(cut_dims(kernel, SHORTEST))
    return _walked_rows(kernel) if any(m.kind == COLUMN for m in kernel.members) else _reduction(kernel)


def _pointwise(kernel: FusedKernel) -> Blocks:
    dims = (*kernel.rows, *kernel.cols)
    other, tile = (other_contiguous(kernel, dims), TILE) if len(dims) > 1 else (None, TILE)
    if other is None and len(dims) > 1:
        other, tile = _looked_up_across(kernel, dims), LOOKED_UP_TILE
    if other is not None:
        outer = (*(d for d in dims[:-1] if d is not other), other)
        y, x = Axis("y", outer, tile), Axis("x", dims[-1:], TILE * TILE // tile)
        if y.blocks <= MOST_BLOCKS:
            return Blocks(kernel, (y, x), False, 4)
    elif (turned := _turned_pieces(kernel)) is not None:
        return turned
    size, width = prod(d.size for d in dims), widest(kernel)
    large = size >= 1024 * WANTED
    if large and len(dims) > 1 and (made := _by_rows(kernel, dims, width, 4096 if size >= LONG else 1024)) is not None:
        return made
    if large and _narrow(kernel, dims):
        return Blocks(kernel, (Axis("x", dims, 512),), False, 8)
    if large and width == 2 and size >= 2048 * WANTED and len(walked(kernel)) <= FEW_OPERANDS:
        return Blocks(kernel, (Axis("x", dims, 2048),), False, 8)
    block = min(power_above(size), 1024 if large else 256)
    warps = min(4, (block * width // (32 * HELD) if width > 1 else 4) if large else block // 64)
    return Blocks(kernel, (Axis("x", dims, block),), False, max(1, warps))


def _turned_pieces(kernel: FusedKernel) -> Blocks | None:
    """Tiles where memory is contiguous along a piece of a dimension (patches whose elements come first)."""
    cut = cut_dims(kernel, TURNED)
    if cut is kernel:
        return None
    cut = normal_form(cut)
    dims = (*cut.rows, *cut.cols)
    other, side = other_contiguous(cut, dims), len(dims) - 1
    while other is not None and prod(d.size for d in dims[side:]) < TILE and dims[side - 1] is not other:
        side -= 1
    if other is None or side == 0 or prod(d.size for d in dims[side:]) < TILE:
        return None
    y, x = Axis("y", (*(d for d in dims[:side] if d is not other), other), TILE), Axis("x", dims[side:], TILE)
    return Blocks(cut, (y, x), False, 4) if y.blocks <= MOST_BLOCKS else None


def _looked_up_across(kernel: FusedKernel, dims: tuple[Dim, ...]) -> Dim | None:
    """The dimension along which memory is contiguous where the last one says which of its rows is read (mirrored pads and computed places of channels-last memory)."""
    last = dims[-1]
    for _, index, _ in _memory(kernel):
        terms = index.terms if isinstance(index, Add) else ((index, 1),)
        steps = [abs(step) for term, step in terms if last.sym in reach(term)]
        if last.size < TURNED or not steps or min(steps) < TURNED or (last.sym in index.free and _evenly(index, last.sym)):
            continue
        for dim in dims[:-1]:
            if dim.size >= TURNED and coefficient(index, dim.sym) is ONE:
                return dim
    return None


def _by_rows(kernel: FusedKernel, dims: tuple[Dim, ...], width: int, block: int) -> Blocks | None:
    """Blocks that lie along rows, so that rows and columns need no division; None: dividing costs nothing, blocks fit such rows badly, or elements do not lie evenly there."""
    row, along = dims[-1].size, block
    if row & (row - 1) == 0 or row * width % VECTOR or not all(_evenly(index, dims[-1].sym) for _, index, _ in _memory(kernel)):
        return None
    while -(-row // along) * along * 15 > row * 16:
        along //= 2
    if along < SHORT_ROW:
        return None
    y, x = Axis("y", dims[:-1], block // along), Axis("x", dims[-1:], along)
    tall = y.blocks > MOST_BLOCKS
    warps = max(1, min(8, block * width // (32 * HELD)))
    return None if tall and x.blocks > MOST_BLOCKS else Blocks(kernel, (y, x), False, warps, tall=tall)


def _evenly(index: Expr, symbol: Sym) -> bool:
    """Do neighbours along the symbol lie at equal distances?"""
    return coefficient(index, symbol) is not None


def _narrow(kernel: FusedKernel, dims: tuple[Dim, ...]) -> bool:
    """Are many operands read element by element: do they skip some (pools' windows, fields of records) or begin between vectors (stencils)? Threads with few elements touch less memory at a time."""
    symbol, dense, count, skipping, computed = dims[-1].sym, Axis("x", dims, 1).walk, 0, 0, kernel.computed
    for buffer, index, width in {(load.buffer, load.index, load.dtype.itemsize) for m in kernel.members for load in member_loads(m.body)}:
        if isinstance(index, Add):  # without what rolls
            index = linear(index.const, ((term, step) for term, step in index.terms if not isinstance(term, Cmp)))
        step = coefficient(index, symbol)
        nearest = any(isinstance(term, Max | Min) and symbol in reach(term) for term, _ in getattr(index, "terms", ((index, 1),)))
        if buffer in computed or index is dense or (not nearest and (not isinstance(step, Const) or step is ZERO)):
            continue
        skips = not nearest and step is not ONE
        skipping += skips
        count += nearest or skips or divisor_of(substitute(index, {symbol: ZERO})) % max(1, VECTOR // width) != 0
    return count >= WINDOW or skipping >= FIELDS


def _memory(kernel: FusedKernel) -> Iterator[tuple[str, Expr, int]]:
    """(buffer, index, bytes of an element) of what the kernel reads and writes at every point: no row of numbers that all rows share, no number of a row."""
    every = {d.sym for d in (*kernel.rows, *kernel.cols) if d.size > 1}
    computed = kernel.computed
    for member in kernel.members:
        for load in member_loads(member.body):
            if load.buffer not in computed and every <= reach(load.index):
                yield load.buffer, load.index, load.dtype.itemsize
        if member.name in kernel.stored and every <= member.store.free:
            yield member.name, member.store, member.buffer.dtype.itemsize


def spread_out(index: Expr, width: int) -> bool:
    """Whether elements of so many bytes are looked up there, in more memory than half a cache."""
    steps = [(s.extent, coefficient(index, s)) for s in index.free if isinstance(s, Indirect)]
    return any(isinstance(rows, int) and isinstance(step, Const) and rows * int(step) * width >= HALF_A_CACHE for rows, step in steps)


def widest(kernel: FusedKernel) -> int:
    """Bytes of the widest elements that are read or written at every point, 4 at most."""
    return min(4, max((width for _, _, width in _memory(kernel)), default=4))


def walked(kernel: FusedKernel) -> set[tuple[str, Expr]]:
    """What is read and written at every point, and where."""
    return {(name, index) for name, index, _ in _memory(kernel)}


def _warps(kernel: FusedKernel, elements: int) -> int:
    """For a block that holds so many elements of rows."""
    found = walked(kernel)
    alone = len(found) == 1 and not any(name in kernel.stored for name, _ in found)
    width = widest(kernel)
    draws = any(isinstance(v, Op) and v.name == "uniform" for v in walk_values(*(m.body for m in kernel.members)))
    scans = any(m.is_scan for m in kernel.members)
    halves = width == 2 or (len(found) == 2 and min((w for _, _, w in _memory(kernel)), default=4) == 2)
    held = READ_ONLY if alone else HELD_HALVES if scans or (halves and (len(found) == 2 or draws)) else HELD_OF_ROW
    return max(1, min(16, elements * width // (32 * held)))


def _reduction(kernel: FusedKernel) -> Blocks:
    rows, length = prod(d.size for d in kernel.rows), prod(d.size for d in kernel.cols)
    side = contiguous_row(kernel)
    if side is not None:
        outer = tuple(d for d in kernel.rows if d is not side)
        if side.size < NARROW_ROW or prod(d.size for d in outer) > MOST_BLOCKS:
            outer = ()
        along = (side,) if outer else kernel.rows
        if any(m.is_scan for m in kernel.members):
            return _scanned_across(kernel, along, outer)
        outside, rows = prod(d.size for d in outer), prod(d.size for d in along)
        across = min(power_above(length), PERSISTENT_ACROSS)
        looks_up = bool(outer) and any(isinstance(s, Indirect) for _, index in walked(kernel) for s in index.free)
        widths = (128, 64, 32) if looks_up and rows >= 128 else (64, 32)
        wanted = 2 * WANTED if length > LONG_ACROSS and not looks_up else WANTED
        wide = next(
            (w for w in widths if -(-rows // w) * outside >= wanted),
            16 if rows * outside <= 4 * WANTED or (wanted > WANTED and widest(kernel) == 4) else 32,
        )
        while across * wide < 1024 and across < power_above(length):
            across *= 2
        few = -(-rows // wide) * outside <= WANTED // 2  # what each waits for is under way at once
        stages = member_stages(kernel.members)
        again = any(stages[m.name] and (m.full or m.is_reduction) for m in kernel.members)
        if again and not few:
            wide = next((w for w in (wide, 32, 16) if w * power_above(length) <= HELD_ACROSS), wide)
        if (few or again) and wide * power_above(length) <= HELD_ACROSS:
            across = power_above(length)
        x = Axis("x", along, min(wide, power_above(rows)))
        warps = 4 if x.block * across <= 2048 else 8
        if looks_up and x.blocks * outside >= WANTED:
            spread = any(spread_out(index, width) for _, index, width in _memory(kernel))
            warps = max(1, min(warps, x.block * across * (1 + spread) // LOOKED_UP))
        elif warps == 8 and x.block == across == 64 and across < length and widest(kernel) == 4:
            across = LOOPED_ACROSS
        while across > 8 and x.block * across * len(walked(kernel)) > 32 * warps * IN_REGISTERS:
            across //= 2
        return Blocks(kernel, (x, Axis("r", kernel.cols, across)), across < length, warps, outer)
    whole = power_above(length)
    if (beside := _beside(kernel)) is not None and whole <= HELD_BESIDE // LEAST_BESIDE:
        outer = tuple(d for d in kernel.rows if d is not beside)
        wide = max(LEAST_BESIDE, min(PERSISTENT_ACROSS, HELD_ACROSS // whole, power_above(beside.size)))
        warps = max(4, min(16, wide * whole // 1024))
        if prod(d.size for d in outer) <= MOST_BLOCKS and wide * whole * len(walked(kernel)) <= 32 * warps * IN_REGISTERS * 2:
            return Blocks(kernel, (Axis("x", (beside,), wide), Axis("r", kernel.cols, whole)), False, warps, outer)
    if whole <= PERSISTENT:
        bytewise = widest(kernel) == 1 and bool(walked(kernel))
        wide, least = 1, 1024 if walked(kernel) and not bytewise else SHARED
        while wide * whole < least and wide < rows and -(-rows // (2 * wide)) >= WANTED:
            wide *= 2
        warps = max(_warps(kernel, wide * whole), min(4, wide * whole // 1024) if bytewise else 1)
        return Blocks(
            kernel,
            (Axis("x", kernel.rows, wide), Axis("r", kernel.cols, whole)),
            False,
            warps if bytewise or least < SHARED else min(4, warps),
        )
    warps = 8 if any(m.is_scan for m in kernel.members) else 16
    return Blocks(kernel, (Axis("x", kernel.rows, 1), Axis("r", kernel.cols, 4096)), True, warps)


def _beside(kernel: FusedKernel) -> Dim | None:
    """The row dimension along which some memory is contiguous though most is along what is reduced: a block reads whole sectors of it."""
    indices = [index for _, index in walked(kernel)]
    if any(m.is_scan for m in kernel.members):
        return None
    return next((d for d in kernel.rows if d.size >= LEAST_BESIDE and any(coefficient(index, d.sym) is ONE for index in indices)), None)


def _scanned_across(kernel: FusedKernel, along: tuple[Dim, ...], outer: tuple[Dim, ...]) -> Blocks:
    """A line of memory in each turn of a loop down the columns, more where these are short."""
    rows, whole = prod(d.size for d in along), power_above(prod(d.size for d in kernel.cols))
    width = max((width for _, _, width in _memory(kernel)), default=4)
    wide = min(power_above(rows), SCANNED * 4 // widest(kernel))
    while wide * whole < 1024 and wide < rows:
        wide *= 2
    down = min(whole, HELD_OF_SCAN * 4 // max(width, 4) // wide)
    while down > 8 and wide * down * len(walked(kernel)) > 32 * 8 * IN_REGISTERS:
        down //= 2
    x, r, warps = Axis("x", along, wide), Axis("r", kernel.cols, down), 4 if wide * down <= 2048 else 8
    held = wide * down * width // (32 * warps * VECTOR)
    return Blocks(kernel, (x, r), r.blocks > 1, warps, outer, run=held if 1 < held < down else 1)


def _spans(kernel: FusedKernel, by: frozenset[Sym]) -> Blocks:
    """`by`: the symbols that say which span it is."""
    outer, side = (tuple(d for d in kernel.rows if (d.sym in by) is is_outer) for is_outer in (True, False))
    x = Axis("x", side, min(power_above(prod(d.size for d in side)), SPAN_ROW))
    long = prod(d.size for d in kernel.cols) * x.block >= 4 * SPAN_HELD * prod(d.size for d in outer)
    held = 2 * SPAN_HELD if long and all(m.acc_dtype.itemsize <= 4 for m in kernel.members) else SPAN_HELD
    behind = any(not m.full and not m.is_reduction for m in kernel.members)  # means: shorter turns, so that a warp has as much of one
    warps = 4 if held > SPAN_HELD and not behind else 2
    r = Axis("r", kernel.cols, max(4, (SPAN_HELD if behind else held) // x.block))
    return Blocks(kernel, (x, r), True, warps, outer, tall=True)


def under_way(kernel: FusedKernel, elements: int) -> int:
    """Turns of a loop over so many elements that are under way at a time: what they read lies in shared memory."""
    turn = elements * sum({(name, index): width for name, index, width in _memory(kernel) if name not in kernel.stored}.values())
    return max(1, min(4, 1 + AHEAD // max(turn, 1)))


def _walked_rows(kernel: FusedKernel) -> Blocks:
    kept = {s for m in kernel.members if m.kind == COLUMN for s in m.store.free}
    outer, inner = (tuple(d for d in kernel.rows if (d.sym in kept) is is_outer) for is_outer in (True, False))
    rows, whole = prod(d.size for d in inner), power_above(prod(d.size for d in kernel.cols))
    wide = next(w for w in (32, 16, 8, 4, 2, 1) if (w * whole <= 2048 or w == 1) and rows % w == 0)
    stages = under_way(kernel, wide * whole)
    x, r = Axis("x", inner, wide), Axis("r", kernel.cols, whole)
    return Blocks(kernel, (x, r), False, max(4, min(16, wide * whole // 512)), outer, stages=stages)
