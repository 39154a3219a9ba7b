"""Which blocks a Triton kernel computes: axes, their sizes, the grid, warps.

- pointwise: one axis `x` over all dimensions; two, `y` and `x`, where some memory is contiguous along another dimension than the results (transposition).
- reduction: `x` over the rows, `r` over what is reduced. *Persistent*: a block holds whole rows, which are read once. Otherwise loops walk `r`, once per stage.

Sizes are known, so that the grid is, and masks are left out where blocks divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from magneto.inductor.codegen.cpp_nest import contiguous_row, normal_form, other_contiguous
from magneto.inductor.schedule.kernel import Dim, FusedKernel, member_loads

PERSISTENT = 16384  # elements of a row that one block holds in registers
PERSISTENT_ACROSS = 64  # as many where memory is contiguous along the rows
HELD = 32  # bytes of each operand that a thread holds: two vectors
TILE = 32
NARROW_ROW = 16
MOST_BLOCKS = 65535  # along all but the first axis of a grid
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
    def masked(self) -> bool:
        return self.size % self.block != 0

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)


@dataclass(frozen=True, slots=True)
class Blocks:
    """`axes` in the order of the blocks' dimensions. `looped`: the last one is walked in a loop. `outer`: dimensions of which a block has one index, a scalar."""

    kernel: FusedKernel
    axes: tuple[Axis, ...]
    looped: bool
    warps: int
    outer: tuple[Dim, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks along each axis that is shared out, the fastest first."""
        return (*(a.blocks for a in reversed(self.axes) if a.name != "r"), *((prod(d.size for d in self.outer),) if self.outer else ()))


def power_above(n: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(n - 1, 0).bit_length()


def blocks_of(kernel: FusedKernel) -> Blocks:
    """The blocks of a kernel."""
    kernel = normal_form(kernel)
    if any(m.is_reduction for m in kernel.members):
        return _reduction(kernel)
    dims = (*kernel.rows, *kernel.cols)
    other = other_contiguous(kernel, dims) if len(dims) > 1 else None
    if other is not None:
        outer = (*(d for d in dims[:-1] if d is not other), other)
        y, x = Axis("y", outer, TILE), Axis("x", dims[-1:], TILE)
        if y.blocks <= MOST_BLOCKS:
            return Blocks(kernel, (y, x), False, 4)
    size = prod(d.size for d in dims)
    block = min(power_above(size), 1024 if size >= 1024 * WANTED else 256)
    return Blocks(kernel, (Axis("x", dims, block),), False, max(1, min(4, block // 64)))


def _width(kernel: FusedKernel) -> int:
    """Bytes of the widest elements that are read at every point, 4 at most."""
    rows, cols = {d.sym for d in kernel.rows}, {d.sym for d in kernel.cols}
    loads = [load for m in kernel.members for load in member_loads(m.body)]
    widths = [
        load.dtype.itemsize for load in loads if not load.index.free.isdisjoint(cols) and not (rows and load.index.free.isdisjoint(rows))
    ]
    return min(4, max(widths, default=4))


def _reduction(kernel: FusedKernel) -> Blocks:
    rows, length = prod(d.size for d in kernel.rows), prod(d.size for d in kernel.cols)
    side = contiguous_row(kernel)
    if side is not None:
        outer = tuple(d for d in kernel.rows if d is not side)
        if side.size < NARROW_ROW or prod(d.size for d in outer) > MOST_BLOCKS:
            outer = ()
        along = (side,) if outer else kernel.rows
        outside, rows = prod(d.size for d in outer), prod(d.size for d in along)
        across = min(power_above(length), PERSISTENT_ACROSS)
        wide = next((w for w in (64, 32) if -(-rows // w) * outside >= WANTED), 16 if rows * outside <= 4 * WANTED else 32)
        while across * wide < 1024 and across < power_above(length):
            across *= 2
        x, r = Axis("x", along, min(wide, power_above(rows))), Axis("r", kernel.cols, across)
        return Blocks(kernel, (x, r), across < length, 4 if x.block * across <= 2048 else 8, outer)
    whole = power_above(length)
    if whole <= PERSISTENT:
        wide = 1
        while wide * whole < 1024 and wide < rows and -(-rows // (2 * wide)) >= WANTED:
            wide *= 2
        warps = max(1, min(16, wide * whole * _width(kernel) // (32 * HELD)))
        return Blocks(kernel, (Axis("x", kernel.rows, wide), Axis("r", kernel.cols, whole)), False, warps)
    return Blocks(kernel, (Axis("x", kernel.rows, 1), Axis("r", kernel.cols, 4096)), True, 16)
