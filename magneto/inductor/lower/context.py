"""The state of one lowering: nodes made so far, realisation of boxes, strided views for library calls.

When is a tensor put into memory (realised)?
- a reduction and a library call always write memory;
- a pointwise result when a library call or the caller needs it, when several consumers would repeat work that is not cheap
  (`WORTH_KEEPING`), or when the body grows past `MAX_OPS` operations or `MAX_READS` buffers;
- a view is never realised where its root's memory can be read through strides instead.
Whether a realised buffer really goes through memory is the scheduler's decision: fused with all its readers it stays in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from magneto.inductor.loops.ir import (
    Buffer,
    Constant,
    IndexValue,
    Indirect,
    LibraryCall,
    Node,
    Origin,
    Pointwise,
    Size,
    ViewOf,
    index_symbols,
    loads,
)
from magneto.inductor.lower.box import Box, Computed, Stored, View
from magneto.symbolic import ZERO, Expr, strided_form
from magneto.symbolic import Const as IntConst

MAX_OPS = 64
MAX_READS = 12
WORTH_KEEPING = 3  # operations; with fewer, several consumers recompute (one load and arithmetic against a store and a load)
TABLE = 8  # operations; a number made of the index alone by fewer is made anew for each element
FEW_PLACES = 4
SAVED = 4  # elements computed per element of what does not change, at least, to put it into memory
CHEAP_OPS = 6  # at most as many are done again where that reads no more memory than the result has
GPU_OPS = 16  # the same on a GPU, whose kernels wait for memory
GPU_HEAVY = 2  # of them functions such as exp, at most

UNSUPPORTED_DTYPES = frozenset(
    d
    for name in (
        "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64 "
        "quint8 qint8 qint32"
    ).split()
    if (d := getattr(torch, name, None)) is not None
)
"""Loops are not generated over these: an operation on them runs as a library call."""
CONVERTED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""But on a GPU loops convert from and to these; torch computes with none of them."""


class CannotLower(Exception):
    """The graph holds something that has no meaning here; the caller runs it in eager. Says what."""


def dense_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Row-major strides, in elements."""
    strides: list[Size] = []
    step: Size = 1
    for s in reversed(shape):
        strides.append(step)
        step = step * (max(s, 1) if isinstance(s, int) else s)
    return tuple(reversed(strides))


def is_dense(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Do the strides lay out the shape without gaps and overlaps, in some order of dimensions?"""
    pairs = []
    for s, t in zip(shape, strides, strict=True):
        if s == 1:
            continue
        if not (isinstance(s, int) and isinstance(t, int)):
            return tuple(strides) == dense_strides(shape)
        if s == 0:
            return True
        pairs.append((t, s))
    step = 1
    for t, s in sorted(pairs):
        if t != step:
            return False
        step *= s
    return True


def compact_strides(shape: Sequence[Size], strides: Sequence[Size]) -> tuple[Size, ...]:
    """Strides without gaps or overlaps in the same order of dimensions (what a preserving copy in eager has)."""
    if is_dense(shape, strides):
        return tuple(strides)
    if not all(isinstance(s, int) for s in (*shape, *strides)):
        return dense_strides(shape)
    sizes, steps = [int(s) for s in shape if isinstance(s, int)], [int(t) for t in strides if isinstance(t, int)]
    order = sorted(range(len(sizes)), key=lambda d: (steps[d] == 0, -steps[d], d))
    out: list[Size] = [0] * len(sizes)
    step = 1
    for d in reversed(order):
        out[d] = step
        step *= max(sizes[d], 1)
    return tuple(out)


def stored_once(shape: Sequence[Size], strides: Sequence[Size]) -> tuple[Size, ...]:
    """The shape without its repetitions: 1 where the stride is 0."""
    return tuple(1 if t == 0 and s != 1 else s for s, t in zip(shape, strides, strict=True))


def same_layout(shape: Sequence[Size], a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Equal strides, but for dimensions of size 1 (or 0), whose stride says nothing."""
    return any(s == 0 for s in shape) or all(s == 1 or x == y for s, x, y in zip(shape, a, b, strict=True))


def point_count(shape: Sequence[Size]) -> int:
    return prod(s if isinstance(s, int) else 1 for s in shape)


def _bytes_of(box: Box) -> int:
    return point_count(box.shape) * box.dtype.itemsize


def _size(x: Expr) -> Size:
    return x.value if isinstance(x, IntConst) else x


class Lowering:
    """Everything that changes while one graph is lowered."""

    def __init__(self, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu  # kernels are Triton's
        self.nodes: list[Node] = []
        self.constants: list[Constant] = []
        self.origins: tuple[Origin, ...] = ()  # of the FX node being lowered
        self.own: dict[str, int] = {}  # copies that library calls write into: how many read the result
        self.steady: set[str] = set()  # weights, and buffers that are computed of nothing else
        self.packed: dict[Any, Any] = {}  # weights in the library's own layout (lower/linear.py)
        self.packed_bytes = 0
        self.only_loops = False  # are all consumers of the FX node being lowered loops?
        self.wanted: set[Any] = set()  # of an operation with several results: the positions of those that somebody reads
        self.flips: set[tuple[int, ...]] = (
            set()
        )  # along which dimensions all consumers of an operation turn its result, each of them; () for one that does not
        self.goes_on = False  # on a GPU: is the reduction being lowered read by nothing that has as many elements as it reduces?
        self.uses = 0  # of the FX node being lowered: consumers, counted through views
        self.names: set[str] = set()
        self.sizes: dict[str, Size] = {}  # of buffers, in bytes
        self._counter = 0
        self._made: dict[tuple[Any, ...], Stored] = {}
        self._by_body: list[tuple[Computed, frozenset[str]]] = []  # unrealised boxes, for mutation

    # ---- names and buffers ---------------------------------------------------------------------------------------------

    def fresh_name(self) -> str:
        while True:
            name = f"buf{self._counter}"
            self._counter += 1
            if name not in self.names:
                self.names.add(name)
                return name

    def new_buffer(self, shape: Sequence[Size], strides: Sequence[Size], dtype: torch.dtype, device: torch.device) -> Buffer:
        return self.known(Buffer(self.fresh_name(), tuple(shape), tuple(strides), dtype, device))

    def known(self, buffer: Buffer) -> Buffer:
        self.sizes[buffer.name] = buffer.nbytes
        return buffer

    # ---- boxes ---------------------------------------------------------------------------------------------------------

    def computed(self, box: Computed) -> Computed:
        """Registers a freshly made computed box (mutation must find those that still read memory)."""
        self._by_body.append((box, box.reads))
        return box

    def realise(self, box: Box) -> Stored:
        """The box in memory: its root's own buffer where the box is a root, otherwise a copy in the box's eager layout."""
        root = box.root
        if box is root or (isinstance(box, Computed) and box.stored is not None):
            if isinstance(root, Stored):
                return root
            stored = self._store(root, compact_strides(root.shape, root.strides), origins=root.origins)
            root.become(stored)
            return stored
        return self.copy(box, compact_strides(box.shape, box.strides))

    def copy(self, box: Box, strides: Sequence[Size], fresh: bool = False) -> Stored:
        """A buffer with exactly these strides that holds the box, repeated dimensions (stride 0) once. `fresh`: never one that something else uses too."""
        root, once = box.root, stored_once(box.shape, strides)
        if once != box.shape:
            repeated = tuple(a != b for a, b in zip(once, box.shape, strict=True))
            box = View(box, lambda index: tuple([ZERO if r else i for i, r in zip(index, repeated, strict=True)]), once, tuple(strides))
        return self._store(box, tuple(strides), root.origins if isinstance(root, Computed) else (), fresh)

    def _store(self, box: Box, strides: tuple[Size, ...], origins: tuple[Origin, ...], fresh: bool = False) -> Stored:
        if box.dtype in UNSUPPORTED_DTYPES and not (self.on_gpu and box.dtype in CONVERTED and isinstance(box.root, Computed)):
            return self._clone(box, strides, origins)
        body = box.load(index_symbols(box.shape))
        key = (body, box.shape, strides, box.dtype, box.device)
        found = None if fresh else self._made.get(key)
        if found is None:
            found = Stored(self.new_buffer(box.shape, strides, box.dtype, box.device))
            self.nodes.append(Pointwise(found.buffer, body, merge_origins(origins, self.origins)))
            if box.reads <= self.steady:
                self.steady.add(found.buffer.name)
            if not fresh:
                self._made[key] = found
        return found

    def _clone(self, box: Box, strides: tuple[Size, ...], origins: tuple[Origin, ...]) -> Stored:
        """A copy made by the library, for dtypes without loops."""
        view = self.strided(box) if isinstance(box.root, Stored) else None
        if view is None:
            raise CannotLower(f"a {box.dtype} tensor of shape {box.shape} that is no strided view")
        buffer = self.new_buffer(box.shape, strides, box.dtype, box.device)
        clone = torch.ops.aten.clone
        origins = merge_origins(origins, self.origins)
        self.nodes.append(LibraryCall(buffer.name, clone.default, (view,), (), (buffer,), out_op=clone.out, origins=origins))
        return Stored(buffer)

    def settle(self, box: Box, feeds_memory: bool, beside: Callable[[], frozenset[str]] | None = None) -> None:
        """Decides, when a pointwise result has been made, whether it is put into memory at once. `feeds_memory`: a library call or the
        caller reads it as it is. `beside`: what all readers read anyway (asked on a GPU)."""
        if not isinstance(box, Computed) or box.stored is not None:
            return
        reads = len(box.reads)
        if box.ops > MAX_OPS or reads > MAX_READS:
            self.realise(box)
        elif self.uses > 1 and reads:
            several = box.ops >= WORTH_KEEPING or reads > 2 or (reads == 2 and self.uses > 2)
            heavy = box.heavy > GPU_HEAVY if self.on_gpu else box.heavy
            if feeds_memory or heavy or (several and not self._reads_no_more(box) and not self._reads_little(box, beside)):
                self.realise(box)

    def settle_steady(self, operands: Sequence[object], val: object) -> None:
        """An operation is about to combine what changes in each call with what does not (constants, weights): the latter is put into memory where that
        saves work, so that it is not computed for each element, and may be kept between calls (schedule/prepared.py)."""
        boxes = [x for x in operands if isinstance(x, Box)]
        if all(box.reads <= self.steady for box in boxes):
            return
        points = point_count(getattr(val, "shape", boxes[0].shape))
        for box in boxes:
            root = box.root
            if not isinstance(root, Computed) or not root.reads <= self.steady or (root.heavy and is_place(root)):
                continue
            if (2 if root.heavy and not self.on_gpu else SAVED) * point_count(root.shape) > points:
                continue
            if root.heavy or root.ops >= WORTH_KEEPING and (bool(root.reads) or root.ops >= TABLE and not self.on_gpu):
                self.realise(root)

    def _reads_no_more(self, box: Computed) -> bool:
        """Is computing a result anew as cheap as reading it, and its memory saved? (What does not change is computed once for all calls.)"""
        if box.reads <= self.steady or box.ops > (GPU_OPS if self.on_gpu else CHEAP_OPS):
            return False
        own, points = _bytes_of(box), point_count(box.shape)
        sizes = {name: self.size_of(name) for name in box.reads}
        if self.on_gpu and sum(sizes.values()) > own:  # of a part of some memory no more than that is read
            found: dict[str, int] = {}
            for load in loads(box.load(index_symbols(box.shape))):
                found[load.buffer] = found.get(load.buffer, 0) + points * load.dtype.itemsize
            sizes = {name: min(size, found.get(name, size)) for name, size in sizes.items()}
        return sum(sizes.values()) <= own + own // 8

    def _reads_little(self, box: Computed, beside: Callable[[], frozenset[str]] | None) -> bool:
        """Is no more read for a result than it has itself, beside what its readers read anyway? Then it is not even written (a relu's gradient in front of a norm). Twice as much, where they read
        something as large: writing takes longer than reading what may still be in the cache."""
        own = _bytes_of(box)
        if not self.on_gpu or beside is None or box.ops > GPU_OPS or sum(self.size_of(name) >= own for name in box.reads) < 2:
            return False
        others = beside()
        twice = any(own <= self.size_of(name) < 1 << 62 for name in others)
        return sum(map(self.size_of, box.reads - others)) <= (1 + twice) * own + own // 8

    def size_of(self, name: str) -> int:
        """Bytes of a buffer; more than any where that is not known."""
        size = self.sizes.get(name)
        return size if isinstance(size, int) else 1 << 62

    # ---- strided views -------------------------------------------------------------------------------------------------

    def strided_form_of(self, box: Box) -> tuple[tuple[Size, ...], Size] | None:
        """(strides, offset) of the box in its root's memory (as it is, or as it would be once realised); None if it is no strided view."""
        root = box.root
        if isinstance(root, Stored):
            buffer = root.buffer
        else:
            buffer = Buffer("", root.shape, compact_strides(root.shape, root.strides), root.dtype, root.device)
        symbols = index_symbols(box.shape)
        form = strided_form(buffer.offset(box.root_index(symbols)), symbols)
        if form is None or any(isinstance(s, Indirect) for s in form[1].free):
            return None
        strides = tuple(t if s == 1 else _size(x) for s, x, t in zip(box.shape, form[0], box.strides, strict=True))
        if any(isinstance(s, int) and s < 0 for s in strides):
            return None
        return strides, _size(form[1])

    def strided(self, box: Box) -> ViewOf | None:
        """The box as a strided view of its root's memory, the root being realised for it where needed; None if it is no such view."""
        form = self.strided_form_of(box)
        if form is None:
            return None
        return ViewOf(self.realise(box.root).buffer.name, box.shape, form[0], form[1], box.dtype)

    def forget_bodies(self) -> None:
        """What is computed from here on is computed anew, though it be in memory."""
        self._made.clear()

    def before_mutation(self, buffer: str) -> None:
        """A library call is about to write `buffer`: what still reads it lazily is realised first."""
        for box, reads in self._by_body:
            if buffer in reads and box.stored is None:
                self.realise(box)
        stale = (
            key for key, stored in self._made.items() if stored.buffer.name == buffer or any(v.buffer == buffer for v in loads(key[0]))
        )
        for key in tuple(stale):
            del self._made[key]


def is_place(box: Box) -> bool:
    """Is it arithmetic of few places, which becomes part of an address? (It may divide: over so few the loop is written out.)"""
    return not box.reads and point_count(box.shape) <= FEW_PLACES and isinstance(box.load(index_symbols(box.shape)), IndexValue)


def merge_origins(a: tuple[Origin, ...], b: tuple[Origin, ...]) -> tuple[Origin, ...]:
    return tuple(dict.fromkeys((*a, *b))) if a and b else a or b
