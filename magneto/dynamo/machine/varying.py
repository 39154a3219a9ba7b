"""Sizes and strides of inputs that vary: which ones one region takes as unknown, what the program does with them, and the guard that belongs to them.

A dimension is taken as unknown when the program says so (`mark_dynamic`, `dynamic=True`) or when calls have come with different sizes. Dimensions that are equal in the call at hand are one
*symbol*; one that an operation wants to be another one plus a constant (a mask as long as a cache and the new token) follows from that one's (`Symbol.root`). What the program computes with a symbol is a node of the graph (`trackers/size.py`), what it decides by one is written down (`decide`), and whatever needs the number itself makes the
dimension a constant: capture starts again (`settle`). Sizes 0 and 1 are constants always.

So are strides, but those that have differed and leave gaps between what lies inside of their dimension (a column of a matrix that grows): each is a symbol of its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from magneto.base.dataclass import dataclass, field
from magneto.dynamo import trackers
from magneto.dynamo.guards.rows import Kind, Row, SizesRow, TensorRow
from magneto.dynamo.guards.source import Source
from magneto.dynamo.guards.tensors import dlpack_code
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES
from magneto.graph import Sizes, TensorMeta, UnknownMeta, UnknownNumber
from magneto.graph.resize import Factor, Form, Resizer, form_of, gaps, layouts, probed, reach, resizer
from magneto.graph.unknown import EXAMPLE, N_PROBES

if TYPE_CHECKING:
    from magneto.dynamo.machine.recorder import Recorder

Bounds = tuple[int, int | None]
Key = int | tuple[Source, int]
LEAST = 2
MOST_TENSORS = 256  # MG_MOST_SIZED in csrc/guards.h
MOST_STEP = 64
MOST_STRIDES = 6  # different ones that vary
PATIENCE = 12  # times that capture starts again for one more constant; then all are
SHOWN = "a size that depends on data"
_NAMED = re.compile(rf"(\w+), {SHOWN}")


@dataclass(eq=False, slots=True)
class Symbol:
    """One size that varies: a number of its own (`index`), or that of its `root` plus a constant. `places`: dimensions of inputs that have it. `key`: the size; of a stride, where it is."""

    index: int
    example: int
    probes: tuple[int, ...]
    low: int
    high: int | None
    root: Symbol | None = None
    places: list[tuple[trackers.TensorTracker, int, TensorMeta]] = field(default_factory=list)
    node: fx.Node | None = None
    key: Key = 0

    @property
    def strides(self) -> bool:
        return isinstance(self.key, tuple)


class Varying:
    """Of the attempts at one capture. `wanted`: the dimensions of a tensor that may be unknown, with bounds (~dim: whose strides may be). `constant`: sizes and strides that are constants after all."""

    def __init__(self, wanted: Callable[[torch.Tensor, Source], Mapping[int, Bounds]]) -> None:
        self._wanted = wanted
        self.constant: set[Key] = set()
        self.steps: dict[Key, int] = {}
        self.related: dict[int, int] = {}  # sizes, and the smaller ones from which they follow
        self.asked: dict[tuple[Source, int], int] = {}  # what was to be unknown, and its size
        self.refusals = 0
        self.again = False  # the attempt has been given up for a constant
        self.begin(Sizes())

    def begin(self, sizes: Sizes) -> None:
        """A new attempt."""
        self.sizes = sizes
        self.symbols: dict[Key, Symbol] = {}
        self.strides: dict[tuple[int, tuple[int, ...]], Symbol] = {}  # by what they are, and how far what lies inside of them reaches
        self.inputs: list[tuple[Source, Form]] = []
        self.metas: list[UnknownMeta] = []  # of these
        self.decisions: dict[fx.Node, Any] = {}
        self.resizer: Resizer | None = None
        self.again = False

    # -- inputs

    def enter(
        self, obj: torch.Tensor, source: Source, meta: TensorMeta, row: TensorRow
    ) -> tuple[TensorMeta, TensorRow, list[tuple[Symbol, int]]]:
        """What capture knows of a tensor from outside, and the row that guards it."""
        known: tuple[TensorMeta, TensorRow, list[tuple[Symbol, int]]] = meta, row, []
        if self.refusals > PATIENCE or len(self.inputs) >= MOST_TENSORS or not meta.shape or meta.lazy or row.cls not in PLAIN_CLASSES:
            return known
        given = self._wanted(obj, source)
        asked = {d: bounds for d, bounds in given.items() if d >= 0 and meta.shape[d] >= LEAST}
        self.asked.update({(source, d): meta.shape[d] for d in asked})
        wanted = {d: bounds for d, bounds in asked.items() if meta.shape[d] not in self.constant}
        own = (
            gaps(meta.shape, meta.strides, [~d for d in given if d < 0 and (source, d) not in self.constant]) if 0 not in meta.shape else []
        )
        if not (wanted or own) or dlpack_code(meta.dtype, meta.device) is None:
            return known
        found = [(self._symbol(meta.shape[d], bounds), d) for d, bounds in sorted(wanted.items())]
        form = self._form(meta, source, {d: _factor(symbol) for symbol, d in found}, own)
        if not (found or form.free):
            return known
        made = probed(meta, form, [symbol.probes for symbol in self.roots()])
        self.inputs.append((source, form))
        self.metas.append(made)
        shape, strides = (tuple(None if term[1] else term[0] for term in terms) for terms in (form.shape, form.strides))
        open_row = TensorRow(row.cls, row.dtype, row.device, shape, strides, row.requires_grad, row.inference, row.lazy)
        return made, open_row, found

    def _form(self, meta: TensorMeta, source: Source, sizes: Mapping[int, Factor], own: Sequence[tuple[int, tuple[int, ...]]]) -> Form:
        """`own`: strides that are symbols, from inside out."""
        free: dict[int, tuple[int, tuple[int, ...]]] = {}
        form = form_of(meta.shape, meta.strides, sizes)
        for dim, inside in own if len(self.strides) + len(own) <= MOST_STRIDES else ():
            columns = list(zip(*(symbol.probes for symbol in self.roots()), strict=True)) or [()] * N_PROBES
            ends = tuple(reach(*form.at(column), inside) for column in columns)
            symbol = self.strides.get((meta.strides[dim], ends))
            if symbol is None:
                key = source, ~dim
                step = self.steps.get(key, 1)
                probes = tuple(meta.strides[dim] if k == EXAMPLE else step * self.sizes.beyond(end // step) for k, end in enumerate(ends))
                symbol = self.symbols[key] = Symbol(len(self.roots()), meta.strides[dim], probes, LEAST, None, key=key)
                self.strides[meta.strides[dim], ends] = symbol
            free[dim] = symbol.index, inside
            form = form_of(meta.shape, meta.strides, sizes, free)
        return form

    def _symbol(self, size: int, bounds: Bounds) -> Symbol:
        found = self.symbols.get(size)
        if found is None:
            base = self.related.get(size)
            root = None if base is None or base in self.constant else self._symbol(base, (LEAST, None))
            probes = tuple(n + size - root.example for n in root.probes) if root else self.sizes.varying(size, self.steps.get(size, 1))
            found = self.symbols[size] = Symbol(root.index if root else len(self.roots()), size, probes, *bounds, root, key=size)
        highs = [high for high in (found.high, bounds[1]) if high is not None]
        found.low, found.high = max(found.low, bounds[0]), min(highs, default=None)
        return found

    def roots(self) -> list[Symbol]:
        """The symbols that follow from no other one, by their numbers."""
        return [symbol for symbol in self.symbols.values() if symbol.root is None]

    def _relate(self, columns: Sequence[tuple[Any, ...]]) -> bool:
        """Whether sizes of an operation that are equal in the call at hand come from two symbols: one follows from the other one from now on."""
        found: dict[int, Symbol] = {}
        for column, root in itertools.product(columns, self.roots()):
            size = column[EXAMPLE]
            if not root.strides and None not in column and column == tuple(n + size - root.example for n in root.probes):
                low, high = sorted((found.setdefault(size, root).example, root.example))
                if low != high and high not in self.related and high not in self.related.values():
                    self.related[high] = low
                    return True
        return False

    def fixed(self) -> set[tuple[Source, int]]:
        """Dimensions that had to be constants, and not as another one has that size."""
        sizes = list(self.asked.values())
        strides = {key for key in self.constant if isinstance(key, tuple)}
        return strides | {place for place, size in self.asked.items() if size in self.constant and sizes.count(size) == 1}

    # -- what the program does with them

    def symbol_of(self, probes: Any) -> Symbol | None:
        return next((symbol for symbol in self.symbols.values() if symbol.probes == probes), None)

    def decide(self, recorder: Recorder, value: trackers.SizeTracker) -> bool | None:
        """What the program decides by a number, which is so for all sizes that the region takes; None: the number depends on data."""
        if not self.knows(recorder, value):
            return None
        return self.decisions.setdefault(value.node, bool(value.number.example))

    def knows(self, recorder: Recorder, value: trackers.SizeTracker) -> bool:
        """Whether a number follows from sizes of inputs."""
        if not self.symbols or value.node.graph is not recorder.graph or value.number.example is None:
            return False
        todo, seen = [value.node] if self.sizes.found else [], set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.meta.get("counted"):
                return False
            todo.extend(node.all_input_nodes)
        return True

    def settle(self, what: Any, failed: bool = False) -> bool:
        """The sizes that `what` comes from are constants (None: all). False: there are none. `failed`: an operation has refused them, which may be as they are not what a constant beside them
        is, or no multiples of anything."""
        if not self.symbols:
            return False
        self.again = True
        self.refusals += 1
        sizes = _sizes_in(what)
        columns = [size for size in sizes if isinstance(size, tuple)]
        if failed and self._relate(columns):
            return True
        strides = [one for one in self.symbols.values() if one.strides and (_counts_by(what, one) or one.probes in columns)]
        if strides:
            known = {one.key: step for one in strides if (step := min(one.example & -one.example, MOST_STEP)) > 1}
            if failed and not self.steps.keys() >= known.keys():
                self.steps.update(known)
            else:
                self.constant.update(one.key for one in strides)
            return True
        found = [symbol for symbol in self.symbols.values() if any(_same(column, symbol.probes) for column in columns)]
        clash = [symbol for symbol in found if symbol.example in sizes] if failed else []
        steps: dict[Key, int] = {symbol.example: step for symbol in found if (step := min(symbol.example & -symbol.example, MOST_STEP)) > 1}
        if failed and not clash and not self.steps.keys() >= steps.keys():
            self.steps.update(steps)
            return True
        if failed and not clash and found:  # one by one: the last dimensions vary the least
            clash = [max(found, key=lambda symbol: max(dim - meta.ndim for _, dim, meta in symbol.places))]
        self.constant.update(symbol.key for symbol in clash or found or self.symbols.values())
        return True

    def settle_named(self, recorder: Recorder, text: str) -> bool:
        """The same for what a break is about, where it is about such a size."""
        names = set(_NAMED.findall(text))
        if not names and SHOWN not in text:
            return False
        numbers = [node.meta["val"] for node in recorder.graph.nodes if node.name in names]
        return self.settle(numbers or None)

    # -- the end

    def finish(self, recorder: Recorder) -> Callable[[], None]:
        """Of a graph that is about to be pruned. What is returned is called behind that: it adds the guard."""
        forms = {node: form for node, tracker in recorder.inputs for source, form in self.inputs if source == tracker.source}
        used: dict[int, int] = {}  # symbols, and their numbers in the graph
        for node, form in forms.items():
            if new := dict.fromkeys(symbol for _, symbol, _ in form.symbols if symbol not in used):
                used.update(zip(new, itertools.count(len(used))))
                recorder.keep.add(node)  # from it they are read
            node.meta["form"] = form.renamed(used)
        made = resizer(list(recorder.graph.nodes), lambda node: not node._erased, list(self.decisions.items()), recorder.initial_grad_mode)
        return lambda: self._guard(recorder, made(), tuple(used))

    def _guard(self, recorder: Recorder, graph: Resizer, used: tuple[int, ...]) -> None:
        if not self.inputs:
            return
        symbols = self.roots()
        example = tuple(symbol.example for symbol in symbols)
        if not graph.fits(tuple(example[symbol] for symbol in used)):
            self.settle(None)
            return
        self.resizer = graph
        bounds = tuple(self._bounds(symbol) for symbol in symbols)
        sources, forms = zip(*self.inputs, strict=True)
        as_captured = layouts(list(zip(forms, self.metas, strict=True)))
        fits = lambda sizes: as_captured(sizes) and graph.fits(tuple(sizes[symbol] for symbol in used))  # noqa: E731
        row = SizesRow(sources[1:], forms, bounds, tuple(range(len(symbols))), fits)
        recorder.machine.guards.add(Row(Kind.SIZES, sources[0], row, *recorder.machine.read_at()))

    def _bounds(self, root: Symbol) -> Bounds:
        """Of a symbol and all that follow from it."""
        all_of = [(symbol, symbol.example - root.example) for symbol in self.symbols.values() if symbol is root or symbol.root is root]
        highs = [symbol.high - plus for symbol, plus in all_of if symbol.high is not None]
        return max(symbol.low - plus for symbol, plus in all_of), min(highs, default=None)

    def told(self, placeholders: Sequence[fx.Node]) -> dict[str, Any]:
        """What the graph says of its sizes that vary: `varying`, rows (number of the input, dimension or ~dimension for its stride, symbol, what is added to it), and the `resizer`."""
        if self.resizer is None:
            return {}
        rows = [row for k, node in enumerate(placeholders) if (form := node.meta.get("form")) for row in form.rows(k)]
        return {"varying": tuple(rows), "resizer": self.resizer} if rows else {}


def _factor(symbol: Symbol) -> Factor:
    return symbol.index, symbol.example - (symbol.root or symbol).example


def _same(column: tuple[Any, ...], probes: tuple[int, ...]) -> bool:
    return all(size is None or size == probe for size, probe in zip(column, probes, strict=True))


def _counts_by(what: Any, symbol: Symbol) -> bool:
    """Whether a tensor among nested arguments has strides that are multiples of this one."""
    if isinstance(what, UnknownMeta):
        known = [(meta.strides, probe) for meta, probe in zip(what.probes, symbol.probes, strict=True) if meta is not None]
        return any(all(strides[dim] and not strides[dim] % probe for strides, probe in known) for dim in range(what.ndim))
    if isinstance(what, UnknownNumber):
        return what.probes == symbol.probes
    items = (
        what.values() if isinstance(what, Mapping) else what if isinstance(what, (tuple, list)) and not isinstance(what, TensorMeta) else ()
    )
    return any(_counts_by(item, symbol) for item in items)


def _sizes_in(what: Any) -> set[Any]:
    """Sizes among nested arguments: numbers, and probes of those that vary."""
    if isinstance(what, UnknownNumber):
        return {what.probes}
    if isinstance(what, UnknownMeta):
        columns = zip(*(meta.shape if meta is not None else (None,) * what.ndim for meta in what.probes), strict=True)
        return {column if size is None else size for column, size in zip(columns, what.sizes(), strict=True)}
    if isinstance(what, TensorMeta):
        return set(what.shape)
    if isinstance(what, slice):
        return _sizes_in((what.start, what.stop, what.step))
    if isinstance(what, Mapping):
        return _sizes_in(tuple(what.values()))
    return set().union(*map(_sizes_in, what)) if isinstance(what, (tuple, list)) else {what} if type(what) is int else set()
