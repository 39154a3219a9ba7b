"""Lowering of shape prims: each is an index map, no data move. `pad` and `cat` choose between values by masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from magneto.inductor.loops.ir import Const, Indirect, Scalar, Size, Value, index_symbols, loads
from magneto.inductor.lower.box import Box, Computed, Index, Stored, View, cost_of
from magneto.inductor.lower.context import Lowering, dense_strides, merge_origins, point_count
from magneto.inductor.lower.values import constant, make_masked
from magneto.symbolic import ZERO, Expr, add, compare, conj, floordiv, mod, mul

MAX_CAT_PIECES_ON_GPU = 12
MAX_CAT_PIECES = 9  # more pieces than this are copied by the library's cat: a chain of conditions per element costs more
MAX_COPIED_PIECES = 4  # the same where nothing is computed of them, nor they of anything, and each has
REPEATED = 8  # times, from which on what is looked up is put into memory on a CPU, rather than looked up each time
COPIED_RUN = 16  # elements side by side


def _is_one(s: Size) -> bool:
    return isinstance(s, int) and s == 1


def _as_is(low: Lowering, x: Box, index_map: Callable[[Index], Index], val: Any) -> Box:
    return View(x, index_map, tuple(val.shape), tuple(val.strides))


def lower_broadcast_in_dim(low: Lowering, val: Any, x: Box, shape: Sequence[Size], dims: Sequence[int]) -> Box:
    """Dimension d of x is dimension dims[d] of the result; size 1 is repeated."""
    root = x.root
    if isinstance(root, Computed) and root.heavy and root.reads and _numel(shape) != _numel(x.shape):
        low.realise(root)  # its work would be repeated along the new dimensions
    elif not low.on_gpu and isinstance(root, Computed) and REPEATED * point_count(x.shape) <= point_count(shape) and _looks_up(root):
        x = low.copy(x, dense_strides(x.shape))  # as its readers walk it
    picks = tuple(None if _is_one(s) else d for s, d in zip(x.shape, dims, strict=True))

    def index_map(index: Index) -> Index:
        return tuple([ZERO if d is None else index[d] for d in picks])

    return _as_is(low, x, index_map, val)


def _looks_up(box: Computed) -> bool:
    return any(isinstance(s, Indirect) for load in loads(box.load(index_symbols(box.shape))) for s in load.index.free)


def _numel(shape: Sequence[Size]) -> Size:
    n: Size = 1
    for s in shape:
        n = n * s
    return n


def reshape_groups(source: Sequence[Size], target: Sequence[Size]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Matching runs of dimensions of equal product, as small as possible: [(source dims, target dims), ...]. Dimensions of size 1 are in
    no group (their index is 0)."""
    src = [d for d, s in enumerate(source) if not _is_one(s)]
    dst = [d for d, s in enumerate(target) if not _is_one(s)]
    if any(not isinstance(s, int) for s in (*source, *target)):
        return _symbolic_groups(source, target, src, dst)
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(src) and j < len(dst):
        i0, j0 = i, j
        a, b = source[src[i]], target[dst[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:  # type: ignore[operator]
                a, i = a * source[src[i]], i + 1
            else:
                b, j = b * target[dst[j]], j + 1
        groups.append((tuple(src[i0:i]), tuple(dst[j0:j])))
    return groups


def _symbolic_groups(
    source: Sequence[Size], target: Sequence[Size], src: list[int], dst: list[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Equal leading and trailing dimensions pair up; what is between is one group."""
    head: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    tail: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while src and dst and source[src[0]] == target[dst[0]]:
        head.append(((src.pop(0),), (dst.pop(0),)))
    while src and dst and source[src[-1]] == target[dst[-1]]:
        tail.append(((src.pop(),), (dst.pop(),)))
    return head + ([(tuple(src), tuple(dst))] if src or dst else []) + tail[::-1]


def lower_reshape(low: Lowering, val: Any, x: Box, shape: Sequence[Size]) -> Box:
    """Row-major reinterpretation: flat position of the result's index, cut into x's dimensions, run by run."""
    target = tuple(val.shape)
    rank = len(x.shape)
    if any(isinstance(s, int) and s == 0 for s in target):
        return _as_is(low, x, lambda index: (ZERO,) * rank, val)
    groups = reshape_groups(x.shape, target)
    source = x.shape
    if all(len(s) == 1 == len(t) for s, t in groups):
        picks: list[int | None] = [None] * rank
        for (s,), (t,) in groups:
            picks[s] = t
        return _as_is(low, x, lambda index: tuple([ZERO if d is None else index[d] for d in picks]), val)

    def index_map(index: Index) -> Index:
        out: list[Expr] = [ZERO] * rank
        for sdims, tdims in groups:
            if len(sdims) == 1 == len(tdims):
                out[sdims[0]] = index[tdims[0]]
                continue
            flat: Expr = ZERO
            for t in tdims:
                flat = add(mul(flat, target[t]), index[t])
            for n in range(len(sdims) - 1, -1, -1):
                d = sdims[n]
                out[d] = flat if n == 0 else mod(flat, source[d])
                flat = flat if n == 0 else floordiv(flat, source[d])
        return tuple(out)

    return _as_is(low, x, index_map, val)


def lower_transpose(low: Lowering, val: Any, x: Box, perm: Sequence[int]) -> Box:
    """Dimension k of the result is dimension perm[k] of x."""
    inverse = tuple(sorted(range(len(perm)), key=lambda k: perm[k]))
    return _as_is(low, x, lambda index: tuple([index[k] for k in inverse]), val)


def lower_slice(low: Lowering, val: Any, x: Box, starts: Sequence[Size], limits: Sequence[Size], steps: Sequence[int] | None = None) -> Box:
    taken = tuple(steps) if steps else (1,) * len(starts)

    def index_map(index: Index) -> Index:
        return tuple([add(mul(i, k), s) for i, s, k in zip(index, starts, taken, strict=True)])

    return _as_is(low, x, index_map, val)


def lower_flip(low: Lowering, val: Any, x: Box, dims: Sequence[int]) -> Box:
    flipped = frozenset(dims)

    def index_map(index: Index) -> Index:
        return tuple([add(s, -1) - i if d in flipped else i for d, (i, s) in enumerate(zip(index, x.shape, strict=True))])

    return _as_is(low, x, index_map, val)


def lower_pad(low: Lowering, val: Any, x: Box, lo: Sequence[int], hi: Sequence[int], value: Scalar) -> Box:
    """x surrounded by a constant; lo and hi are not negative."""
    fill = constant(value, x.dtype)
    sizes = x.shape

    def fn(index: Index) -> Value:
        moved = tuple([i - a for i, a in zip(index, lo, strict=True)])
        inside = [compare("ge", i, 0) for i in moved]
        inside += [compare("lt", i, s) for i, s in zip(moved, sizes, strict=True)]
        return make_masked(conj(*inside), lambda: x.load(moved), lambda: fill)

    ops, heavy, origins = cost_of(x)
    box = Computed(fn, val.shape, val.strides, x.dtype, x.device, x.reads, merge_origins(origins, low.origins), ops + 1, heavy)
    return low.computed(box)


def lower_cat(low: Lowering, val: Any, xs: Sequence[Box], dim: int = 0) -> Box | None:
    """Pieces one after the other along a dimension; None (a library call) for many pieces."""
    dim = dim % max(len(val.shape), 1)
    pieces = [x for x in xs if len(x.shape) == len(val.shape) and x.shape[dim] != 0]
    if (
        not pieces
        or len(pieces) > (MAX_CAT_PIECES_ON_GPU if low.on_gpu else MAX_CAT_PIECES)
        or any(p.dtype is not val.dtype for p in pieces)
        or (len(pieces) > MAX_COPIED_PIECES and not low.on_gpu and not low.only_loops and _are_runs(val, pieces, dim))
    ):
        return None
    if len(pieces) == 2 and (rotated := _rotation(low, val, pieces[0], pieces[1], dim)) is not None:
        return rotated
    if 2 <= len(pieces) <= 3 and (wrapped := _wrapped(low, val, pieces, dim)) is not None:
        return wrapped
    if low.on_gpu:  # each element computes all pieces
        costs = [cost_of(p)[1] for p in pieces]
        if sum(costs) - max(costs) > HEAVY_ELSEWHERE:
            for p in pieces:
                if isinstance(p.root, Computed) and p.root.heavy:
                    low.realise(p.root)
    starts: list[Size] = [0]
    for p in pieces:
        starts.append(starts[-1] + p.shape[dim])

    def piece(n: int, index: Index) -> Value:
        moved = (*index[:dim], index[dim] - starts[n], *index[dim + 1 :])
        return pieces[n].load(moved)

    zero = Const(0, val.dtype)

    def fn(index: Index) -> Value:
        i = index[dim]

        def from_piece(n: int) -> Value:
            if n == len(pieces):
                return zero
            inside = conj(compare("ge", i, starts[n]), compare("lt", i, starts[n + 1]))
            return make_masked(inside, lambda: piece(n, index), lambda: from_piece(n + 1))

        return from_piece(0)

    ops, heavy, origins, reads = len(pieces), 0, low.origins, frozenset[str]()
    for p in pieces:
        o, h, more = cost_of(p)
        ops, heavy, origins, reads = ops + o, heavy + h, merge_origins(more, origins), reads | p.reads
    box = Computed(fn, val.shape, val.strides, val.dtype, val.device, reads, origins, ops, heavy)
    return low.computed(box)


def _are_runs(val: Any, pieces: Sequence[Box], dim: int) -> bool:
    """Pieces in memory, of which the library copies long runs?"""
    sizes = [n * run for p in pieces if isinstance(n := p.shape[dim], int) and isinstance(run := val.strides[dim], int)]
    return all(isinstance(p.root, Stored) for p in pieces) and min(sizes, default=0) >= COPIED_RUN


def _rotation(low: Lowering, val: Any, first: Box, second: Box, dim: int) -> Box | None:
    """x[k:] before x[:k] (what torch.roll is) reads x at (i + k) mod n, without conditions. On a CPU, where few elements lie side by side, two ranges are
    better than an index that jumps."""
    if not (isinstance(first, View) and isinstance(second, View)) or first.base is not second.base:
        return None
    n, k, run = val.shape[dim], second.shape[dim], val.strides[dim]
    if not isinstance(n, int) or not isinstance(k, int) or not isinstance(run, int) or (run < SHORT_RUN and not low.on_gpu):
        return None
    index = index_symbols(val.shape)

    def moved(index: Index, position: Expr) -> Index:
        return (*index[:dim], position, *index[dim + 1 :])

    of_second = second.index_map
    ahead = of_second(moved(index, add(index[dim], k)))
    if len(ahead) != len(here := first.index_map(index)) or any(a is not b for a, b in zip(here, ahead, strict=True)):
        return None

    def place(i: Expr) -> Expr:
        return add(i, k, mul(compare("ge", i, n - k), -n)) if low.on_gpu else mod(add(i, k), n)

    return View(second.base, lambda i: of_second(moved(i, place(i[dim]))), tuple(val.shape), tuple(val.strides))


def _wrapped(low: Lowering, val: Any, pieces: Sequence[Box], dim: int) -> Box | None:
    """x between a part of its end and one of its beginning (a circular pad), or beside one of them, reads x a whole x away where a place is beyond an end. (A CPU has vectors of
    numbers of 32 bits and more that lie at computed places.)"""
    sizes = [p.shape[dim] for p in pieces]
    if not all(isinstance(s, int) for s in sizes) or len({id(p.base if isinstance(p, View) else p) for p in pieces}) > 1:
        return None
    if not low.on_gpu and val.dtype.itemsize < 4 and val.strides[dim] == 1:
        return None
    size = max(sizes)  # type: ignore[type-var]
    place = sizes.index(size)
    if sizes.count(size) > 1 or place > 1 or len(pieces) - place > 2:
        return None
    whole, index = pieces[place], index_symbols(val.shape)

    def at(index: Index, position: Expr) -> Index:
        return (*index[:dim], position, *index[dim + 1 :])

    for k, piece in enumerate(pieces):
        there = whole.root_index(at(index, add(index[dim], size - sizes[k] if k < place else 0)))
        if any(a is not b for a, b in zip(piece.root_index(index), there, strict=True)):
            return None

    def wrapped(index: Index) -> Index:
        i = index[dim] - (sizes[0] if place else 0)
        return at(index, add(i, mul(compare("lt", i, 0), size), mul(compare("ge", i, size), mul(size, -1))))

    return View(whole, wrapped, tuple(val.shape), tuple(val.strides))


SHORT_RUN = 32
HEAVY_ELSEWHERE = 8  # functions such as exp that elements of a joined tensor would compute for other pieces

ROWS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": lower_broadcast_in_dim,
    "reshape": lower_reshape,
    "transpose": lower_transpose,
    "slice": lower_slice,
    "flip": lower_flip,
    "pad": lower_pad,
    "cat": lower_cat,
}
VIEWS = frozenset({"broadcast_in_dim", "reshape", "transpose", "slice", "flip"})
