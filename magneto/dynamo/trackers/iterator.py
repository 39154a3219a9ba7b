"""Iterators: each steps to its next item without running the program. Half-used ones can leave the region."""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import CannotEmit, Raised, Tracker
from magneto.dynamo.trackers.basic_iterator import IteratorTracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker, TupleTracker
from magneto.dynamo.trackers.klass import find_in_type
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker
from magneto.dynamo.trackers.object import ObjectTracker
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES, TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.guards.source import Source
    from magneto.dynamo.machine.protocol import Emitter, Machine


class EnumerateIterator(IteratorTracker):
    """enumerate."""

    __slots__ = ("index", "inner")
    exact_type = enumerate

    def __init__(self, inner: Tracker, index: int) -> None:
        super().__init__()
        self.inner, self.index = inner, index

    def step(self, m: Machine) -> Tracker | None:
        item = next_or_none(m, self.inner)
        if item is None:
            return None
        self.index += 1
        return TupleTracker([m.const(self.index - 1), item])

    def emit(self, em: Emitter) -> str:
        return em.assign("it", f"enumerate({em.value(self.inner)}, {self.index})", self)


class ZipIterator(IteratorTracker):
    """zip, strict or not."""

    __slots__ = ("inner", "strict")
    exact_type = zip

    def __init__(self, inner: Sequence[Tracker], strict: bool) -> None:
        super().__init__()
        self.inner, self.strict = tuple(inner), strict

    def step(self, m: Machine) -> Tracker | None:
        items: list[Tracker] = []
        for number, inner in enumerate(self.inner, 1):
            item = next_or_none(m, inner)
            if item is None:
                if self.strict:
                    self._mismatch(m, number)
                return None
            items.append(item)
        return TupleTracker(items) if items else None

    def _mismatch(self, m: Machine, number: int) -> None:
        before = "argument 1" if number == 2 else f"arguments 1-{number - 1}"
        if number > 1:
            m.raise_exception(ValueError(f"zip() argument {number} is shorter than {before}"))
        for later, inner in enumerate(self.inner[1:], 2):
            if next_or_none(m, inner) is not None:
                before = "argument 1" if later == 2 else f"arguments 1-{later - 1}"
                m.raise_exception(ValueError(f"zip() argument {later} is longer than {before}"))

    def emit(self, em: Emitter) -> str:
        strict = ", strict=True" if self.strict else ""
        return em.assign("it", f"zip({', '.join(em.value(item) for item in self.inner)}{strict})", self)


class MapIterator(IteratorTracker):
    """map."""

    __slots__ = ("fn", "inner")
    exact_type = map

    def __init__(self, fn: Tracker, inner: Sequence[Tracker]) -> None:
        super().__init__()
        self.fn, self.inner = fn, tuple(inner)

    def step(self, m: Machine) -> Tracker | None:
        items: list[Tracker] = []
        for inner in self.inner:
            item = next_or_none(m, inner)
            if item is None:
                return None
            items.append(item)
        return m.call(self.fn, items, {})

    def emit(self, em: Emitter) -> str:
        return em.assign("it", f"map({', '.join(em.value(item) for item in (self.fn, *self.inner))})", self)


class FilterIterator(IteratorTracker):
    """filter (`negate`: itertools.filterfalse)."""

    __slots__ = ("fn", "inner", "negate")

    def __init__(self, fn: Tracker | None, inner: Tracker, negate: bool = False) -> None:
        super().__init__()
        self.fn, self.inner, self.negate = fn, inner, negate

    def python_type(self) -> type:
        return itertools.filterfalse if self.negate else filter

    def step(self, m: Machine) -> Tracker | None:
        while (item := next_or_none(m, self.inner)) is not None:
            verdict = m.truth(item if self.fn is None else m.call(self.fn, [item], {}))
            if verdict is not self.negate:
                return item
        return None

    def emit(self, em: Emitter) -> str:
        fn = "None" if self.fn is None else em.value(self.fn)
        name = em.const(itertools.filterfalse, "filterfalse") if self.negate else "filter"
        return em.assign("it", f"{name}({fn}, {em.value(self.inner)})", self)


class ChainIterator(IteratorTracker):
    """itertools.chain: `rest` yields the iterables still to come."""

    __slots__ = ("current", "rest")
    exact_type = itertools.chain

    def __init__(self, rest: Tracker) -> None:
        super().__init__()
        self.rest = rest
        self.current: Tracker | None = None

    def step(self, m: Machine) -> Tracker | None:
        while True:
            if self.current is not None:
                item = next_or_none(m, self.current)
                if item is not None:
                    return item
            following = next_or_none(m, self.rest)
            if following is None:
                self.current = None
                return None
            self.current = m.apply(iter, following)

    def emit(self, em: Emitter) -> str:
        chain = em.const(itertools.chain, "chain")
        rest = f"{chain}.from_iterable({em.value(self.rest)})"
        return em.assign("it", rest if self.current is None else f"{chain}({em.value(self.current)}, {rest})", self)


class CallableIterator(IteratorTracker):
    """iter(callable, sentinel)."""

    __slots__ = ("done", "fn", "sentinel")
    exact_type = type(iter(int, 1))

    def __init__(self, fn: Tracker, sentinel: Tracker) -> None:
        super().__init__()
        self.fn, self.sentinel, self.done = fn, sentinel, False

    def step(self, m: Machine) -> Tracker | None:
        if self.done:
            return None
        try:
            item = m.call(self.fn, [], {})
        except Raised as raised:
            if not raised.matches(StopIteration):
                raise
            self.done = True
        if self.done:  # by itself, or by a call of itself
            return None
        if m.truth(m.apply(operator.eq, self.sentinel, item)):
            self.done = True
            return None
        return item

    def emit(self, em: Emitter) -> str:
        if self.done:
            return em.assign("it", "iter(())", self)
        return em.assign("it", f"iter({em.value(self.fn)}, {em.value(self.sentinel)})", self)


class _Indexed:
    def __getitem__(self, index: int) -> int:
        raise IndexError


class GetItemIterator(IteratorTracker):
    """iter() of an object with __getitem__ alone."""

    __slots__ = ("index", "of")
    exact_type = type(iter(_Indexed()))

    def __init__(self, of: Tracker) -> None:
        super().__init__()
        self.of: Tracker | None = of
        self.index = 0

    def step(self, m: Machine) -> Tracker | None:
        if self.of is None:
            return None
        self.index += 1
        try:
            return m.apply(operator.getitem, self.of, m.const(self.index - 1))
        except Raised as raised:
            if not raised.matches((IndexError, StopIteration)):
                raise
            self.of = None
            return None

    def emit(self, em: Emitter) -> str:
        if self.of is None:
            return em.assign("it", "iter(())", self)
        name = em.assign("it", f"iter({em.value(self.of)})", self)
        if self.index:
            em.line(f"{name}.__setstate__({self.index})")
        return name


class ReversedIterator(IteratorTracker):
    """reversed() of what has a length and items by number: both are asked for again as the iterator runs."""

    __slots__ = ("born", "index", "of")
    exact_type = reversed

    def __init__(self, m: Machine, of: Tracker, length: int) -> None:
        super().__init__()
        self.of: Tracker | None = of
        self.index = length - 1
        self.born: int | None = m.count  # type: ignore[attr-defined]

    def step(self, m: Machine) -> Tracker | None:
        if self.of is None or self.index < 0:
            return None
        try:
            item = m.apply(operator.getitem, self.of, m.const(self.index))
        except Raised as raised:
            if not raised.matches((IndexError, StopIteration)):
                raise
            self.of = None
            return None
        self.index -= 1
        return item

    def left(self, m: Machine) -> Tracker:
        """What its `__length_hint__` says."""
        if self.of is None:
            return m.const(0)
        position = m.const(self.index + 1)
        return m.const(0) if m.truth(m.apply(operator.lt, m.apply(len, self.of), position)) else position

    def emit(self, em: Emitter) -> str:
        if self.of is not None and isinstance(
            getattr(self.of.python_type(), "__len__", None), types.FunctionType
        ):  # it would be asked once more
            raise CannotEmit(self)
        name = em.assign("it", f"reversed({em.value(self.of) if self.of is not None else repr('')})", self)
        em.line(f"{name}.__setstate__({self.index})" if self.of is not None and self.index >= 0 else f"next({name}, None)")
        return name


class GeneratorTracker(IteratorTracker):
    """A generator made inside the region; `frame` belongs to the machine. It leaves as the call that makes it, with its frame put where it stands. While it
    handles an exception it cannot leave, and `born` is the instruction at which capture then breaks."""

    __slots__ = ("args", "born", "finished", "fn", "frame", "kwargs", "result", "started")
    exact_type = types.GeneratorType

    def __init__(self, frame: Any, fn: Tracker | None, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> None:
        super().__init__()
        self.frame = frame
        self.fn, self.args, self.kwargs = fn, tuple(args), dict(kwargs)
        self.born: int | None = None
        self.started = self.finished = False
        self.result: Tracker | None = None

    def step(self, m: Machine) -> Tracker | None:
        return m.generator_next(self, m.const(None))  # type: ignore[attr-defined,no-any-return]

    def emit(self, em: Emitter) -> str:
        suspended = self.frame.suspension() if self.started and not self.finished else None
        if suspended is None and self.started and not self.finished:
            raise CannotEmit(self)
        assert self.fn is not None
        parts = [em.value(self.fn), *(em.value(arg) for arg in self.args)]
        if self.kwargs:
            parts.append(f"**{{{', '.join(f'{name!r}: {em.value(value)}' for name, value in self.kwargs.items())}}}")
        name = em.assign("generator", f"{parts[0]}({', '.join(parts[1:])})", self)
        if self.finished:
            em.line(f"finish({name})")  # (from 3.12 on `close()` keeps the frame of one that has not begun)
        elif suspended is not None:
            offset, slots, stack, delegates = suspended
            texts = ["".join(f"{'UNBOUND' if value is None else em.value(value)}, " for value in values) for values in (slots, stack)]
            em.line(f"suspend({name}, Resume({offset}, ({texts[0]}), ({texts[1]})), {delegates})")
        return name


class ExistingGenerator(GeneratorTracker):
    """A generator from outside. Its frame is looked into when it is first stepped; the region puts the real one where it then stands."""

    __slots__ = ("entry", "obj")

    def __init__(self, obj: types.GeneratorType[Any, Any, Any], source: Source) -> None:
        super().__init__(None, None, (), {})
        self.obj, self.source = obj, source
        self.entry: list[Tracker | None] = []

    def emit(self, em: Emitter) -> str:
        assert self.source is not None
        return em.source(self.source)

    def show(self) -> str:
        return f"generator object {self.source.text() if self.source else ''}"


class GeneratorState(Tracker):
    """Operand of the effect PUT: where an existing generator stands when the region ends."""

    __slots__ = ("of",)

    def __init__(self, of: ExistingGenerator) -> None:
        super().__init__()
        self.of = of

    def emit(self, em: Emitter) -> str:
        if self.of.finished:
            return "None"
        suspended = self.of.frame.suspension()
        if suspended is None:
            raise CannotEmit(self.of)
        offset, slots, stack, delegates = suspended
        parts = ["UNBOUND" if value is None else em.value(value) for value in slots]
        for slot, value in enumerate(self.of.frame.locals):
            if value is self.of.entry[slot]:
                parts[slot] = "KEEP"
        texts = ["".join(f"{part}, " for part in group) for group in (parts, [em.value(value) for value in stack])]
        return em.assign("state", f"(Resume({offset}, ({texts[0]}), ({texts[1]})), {delegates})", self)

    def show(self) -> str:
        return f"state of {self.of.show()}"


class SteppedIterator(IteratorTracker):
    """An iterator of `itertools` that steps a Python iterator of trackers. It can leave the region while unused, as the call `kind(*args)`; half-used it cannot."""

    __slots__ = ("args", "born", "finished", "kind", "started", "steps")

    def __init__(self, m: Machine, kind: Any, steps: Iterator[Tracker], args: Sequence[Tracker] | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.steps = steps
        self.args = args
        self.started = self.finished = False
        self.born: int | None = m.count  # type: ignore[attr-defined]

    def python_type(self) -> type:
        return self.kind if isinstance(self.kind, type) else type(self.steps)

    def step(self, m: Machine) -> Tracker | None:
        self.started = True
        item = next(self.steps, None)
        self.finished = item is None
        return item

    def emit(self, em: Emitter) -> str:
        if self.finished:
            return em.assign("it", "iter(())", self)
        if self.started or self.args is None:
            raise CannotEmit(self)
        return em.assign("it", f"{em.const(self.kind, self.kind.__name__)}({', '.join(em.value(arg) for arg in self.args)})", self)


def remaining(m: Machine, it: Tracker) -> Iterator[Tracker]:
    """The items still to come, as capture asks for them."""
    while (item := next_or_none(m, it)) is not None:
        yield item


def next_or_none(m: Machine, it: Tracker) -> Tracker | None:
    """The next item of an iterator, None at its end; an iterator that capture cannot step breaks."""
    if isinstance(it, IteratorTracker):
        item = it.step(m)
        m.steps += 1
        return item
    if isinstance(it, ObjectTracker):
        method = find_special(m, it, "__next__")
        if method is not None:
            try:
                return m.call(method, [], {})
            except Raised as raised:
                if raised.matches(StopIteration):
                    return None
                raise
    if not hasattr(it.python_type(), "__next__"):
        m.raise_exception(TypeError(f"'{_C.type_name(it.python_type())}' object is not an iterator"))
    m.graph_break("B110", value=it.show())


def known_items(m: Machine, v: Tracker) -> list[Tracker] | None:
    """The items of a container in order; None for what is not a container of known length."""
    if isinstance(v, (SequenceTracker, SetTracker, DictViewTracker)):
        return v.items(m)
    if isinstance(v, DictTracker):
        return v.keys(m)
    if isinstance(v, ConstTracker):
        value = v.read()
        if isinstance(value, (tuple, str, bytes, range, frozenset)) and not isinstance(value, type):
            return [m.const(item) for item in value]
        return None
    if isinstance(v, TensorTracker):  # a program may have replaced how tensors are iterated over
        own = v.cls not in PLAIN_CLASSES or find_in_type(m, v.cls, "__iter__") is _TENSOR_ITER
        return tensor_rows(m, v) if own else None
    return v.rows(m)


_TENSOR_ITER = vars(torch.Tensor)["__iter__"]


def tensor_rows(m: Machine, v: TensorTracker) -> list[Tracker]:
    """Iteration over a tensor: its first dimension unbound. A class with a `__torch_function__` hears of both questions; it may have its own."""
    if v.cls.__iter__ is not torch.Tensor.__iter__:  # type: ignore[attr-defined]
        return drain(m, m.call(m.apply(getattr, v, m.const("__iter__")), [], {}), v)
    if not m.truth(m.apply(torch.Tensor.dim, v)):
        m.raise_exception(TypeError("iteration over a 0-d tensor"))
    rows = m.node("unbind", [v, 0], {}, method=True) if v.cls in PLAIN_CLASSES else m.apply(torch.Tensor.unbind, v, m.const(0))
    return rows.items(m) if isinstance(rows, (SequenceTracker, ListTracker)) else m.iterate(rows)


def each(m: Machine, v: Tracker) -> Iterator[Tracker]:
    """The items of an iterable; those of an iterator are taken as they are asked for."""
    items = known_items(m, v)
    if items is not None:
        return iter(items)
    return remaining(m, v if isinstance(v, IteratorTracker) else m.apply(iter, v))


def iterate(m: Machine, v: Tracker) -> list[Tracker]:
    """All items of an iterable."""
    items = known_items(m, v)
    if items is not None:
        return items
    return drain(m, v if isinstance(v, IteratorTracker) else m.apply(iter, v), v)


def drain(m: Machine, iterator: Tracker, v: Tracker) -> list[Tracker]:
    """All items that an iterator of `v` still gives."""
    found: list[Tracker] = []
    while (item := next_or_none(m, iterator)) is not None:
        found.append(item)
        if len(found) > 1_000_000:
            m.graph_break("B110", value=v.show())
    return found
