"""Rows of iteration: the built-in iterators, itertools, functools, and the functions that consume an iterable."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.bytecode.decode import VERSION
from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import Const, Raised, Tracker
from magneto.dynamo.trackers.basic_iterator import (
    CountIterator,
    CycleIterator,
    DequeIterator,
    DictIterator,
    ItemsIterator,
    IteratorTracker,
    RangeIterator,
    RepeatIterator,
    ReverseIterator,
    SequenceIterator,
)
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import fold, rule
from magneto.dynamo.trackers.exception import ExceptionTracker
from magneto.dynamo.trackers.function import PartialTracker
from magneto.dynamo.trackers.getter import GetterTracker
from magneto.dynamo.trackers.item import ItemTracker, is_operand
from magneto.dynamo.trackers.iterator import (
    ChainIterator,
    EnumerateIterator,
    FilterIterator,
    GeneratorTracker,
    MapIterator,
    ReversedIterator,
    SteppedIterator,
    ZipIterator,
    iterate,
    known_items,
    next_or_none,
    remaining,
)
from magneto.dynamo.trackers.klass import find_in_type
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker
from magneto.dynamo.trackers.object import ObjectTracker, payload_of
from magneto.dynamo.trackers.rules_container import sort_items
from magneto.dynamo.trackers.rules_length import expected
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from magneto.dynamo.machine.protocol import Machine

# -- numbers


try:
    min(())
except ValueError as _error:
    _EMPTY = str(_error).replace("min", "{}")


def _extreme(fn: Any, better: Any) -> Any:
    def body(m: Machine, *args: Tracker, key: Tracker | None = None, default: Tracker | None = None) -> Any:
        if default is not None and len(args) > 1:
            return NotImplemented
        items = iterate(m, args[0]) if len(args) == 1 else list(args)
        if not items:
            if default is not None:
                return default
            m.raise_exception(ValueError(_EMPTY.format(fn.__name__)))
        keyed = (lambda x: x) if key is None or (isinstance(key, ConstTracker) and key.read() is None) else (lambda x: m.call(key, [x], {}))
        best, best_key = items[0], keyed(items[0])
        for item in items[1:]:
            item_key = keyed(item)
            if m.truth(m.apply(better, item_key, best_key)):
                best, best_key = item, item_key
        return best

    return body


rule(min, Tracker)(_extreme(min, operator.lt))
rule(max, Tracker)(_extreme(max, operator.gt))


@rule(sum, Tracker)
def sum_(m: Machine, items: Tracker, start: Tracker | None = None) -> Any:
    total = start if start is not None else m.const(0)
    if issubclass(total.python_type(), str | bytes | bytearray):
        return NotImplemented
    found = iterate(m, items)
    if VERSION >= (3, 12) and any(item.python_type() is float for item in (total, *found)):
        return _compensated(m, found, total)
    for item in found:
        total = m.apply(operator.add, total, item)
    return total


def _compensated(m: Machine, items: list[Tracker], total: Tracker) -> Any:
    """From 3.12 on sum() of floats keeps what rounding loses: it is more than additions."""
    late = next((item for item in items if isinstance(item, ItemTracker)), None)
    if late is not None and all(map(is_operand, (total, *items))):
        return ItemTracker(float, f"sum([{', '.join(['{}'] * len(items))}], {{}})", (*items, total), late.born, late.operation)
    known = list(itertools.takewhile(lambda item: isinstance(item, ConstTracker), items)) if isinstance(total, ConstTracker) else []
    if any(item.python_type() is float for item in items[len(known) :]):
        return NotImplemented
    if known:
        total = fold(m, lambda start, *values: sum(values, start), (total, *known), {})
    for item in items[len(known) :]:
        total = m.apply(operator.add, total, item)
    return total


@rule(math.prod, Tracker)
def prod(m: Machine, items: Tracker, *, start: Tracker | None = None) -> Any:
    total = start if start is not None else m.const(1)
    for item in iterate(m, items):
        total = m.apply(operator.mul, total, item)
    return total


def _search(found: bool) -> Any:
    def body(m: Machine, items: Tracker) -> Any:
        iterator = m.apply(iter, items)
        while (item := next_or_none(m, iterator)) is not None:
            if m.truth(item) is found:
                return m.const(found)
        return m.const(not found)

    return body


rule(any, Tracker)(_search(True))
rule(all, Tracker)(_search(False))


@rule(round, Tracker)
def round_(m: Machine, v: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    if isinstance(v, TensorTracker):
        m.raise_exception(TypeError(f"type {_C.type_name(v.python_type())} doesn't define __round__ method"))
    return fold(m, round, (v, *args), kwargs)


@rule(pow, Tracker, Tracker)
def pow_(m: Machine, a: Tracker, b: Tracker, *args: Tracker) -> Any:
    return m.apply(operator.pow, a, b) if not args else fold(m, pow, (a, b, *args), {})


# -- iterators


@rule(next, Tracker)
def next_(m: Machine, it: Tracker, *default: Tracker) -> Tracker:
    item = next_or_none(m, it)
    if item is not None:
        return item
    if default:
        return default[0]
    result = it.result if isinstance(it, GeneratorTracker) else None
    m.raise_exception(ExceptionTracker(StopIteration, [result] if result is not None and _something(result) else []))


@rule(range)
def range_(m: Machine, *args: Tracker) -> Any:
    values = []
    for arg in args:
        values.append(m.apply(operator.index, arg))
    return fold(m, range, values, {})


@rule(enumerate, Tracker)
def enumerate_(m: Machine, items: Tracker, start: Tracker | None = None) -> Any:
    first = m.apply(operator.index, start).try_const() if start is not None else Const(0)
    return NotImplemented if first is None else EnumerateIterator(m.apply(iter, items), first.value)


@rule(zip)
def zip_(m: Machine, *items: Tracker, strict: Tracker | None = None) -> Any:
    return ZipIterator([m.apply(iter, item) for item in items], strict is not None and m.truth(strict))


@rule(map, Tracker, Tracker)
def map_(m: Machine, fn: Tracker, *items: Tracker) -> Any:
    if fn.obj is id:
        m.graph_break("B101", callee="map", reason="addresses of items that nobody holds")
    return MapIterator(fn, [m.apply(iter, item) for item in items])


def _filter(kind: Any) -> None:
    @rule(kind, Tracker, Tracker)
    def body(m: Machine, fn: Tracker, items: Tracker) -> Any:
        none = isinstance(fn, ConstTracker) and fn.read() is None
        return FilterIterator(None if none else fn, m.apply(iter, items), kind is itertools.filterfalse)


_filter(filter)
_filter(itertools.filterfalse)


@rule(reversed, Tracker)
def reversed_(m: Machine, v: Tracker) -> Any:
    if isinstance(v, TensorTracker):
        return m.apply(torch.flip, v, m.const((0,)))
    if isinstance(v, ObjectTracker) and find_in_type(m, v.python_type(), "__reversed__") is None:
        m.raise_exception(TypeError(f"'{_C.type_name(v.python_type())}' object is not reversible"))
    method = find_special(m, v, "__reversed__") if isinstance(v, ObjectTracker) else None
    if method is not None:
        return m.call(method, [], {})
    if isinstance(v, (ListTracker, TupleTracker)):
        return ReverseIterator(v)
    if isinstance(v, DictTracker):
        return DictIterator(m, v, "keys", True)
    if isinstance(v, DictViewTracker):
        return DictIterator(m, v.of, v.kind, True)
    if isinstance(v, ConstTracker) and isinstance(v.read(), range):
        return RangeIterator(v.read()[::-1])
    if isinstance(v, DequeTracker):
        return DequeIterator(v, True)
    cls = v.python_type()
    if hasattr(cls, "__reversed__"):
        return ItemsIterator(iterate(m, v)[::-1])
    if not (hasattr(cls, "__getitem__") and hasattr(cls, "__len__")):
        m.raise_exception(TypeError(f"'{_C.type_name(cls)}' object is not reversible"))
    length = m.apply(len, v).try_const()
    if length is None:
        m.graph_break("B104", operation="reversed()", value=v.show())
    return ReversedIterator(m, v, length.value)


@rule(sorted, Tracker)
def sorted_(m: Machine, items: Tracker, /, **kwargs: Tracker) -> Any:
    if (
        isinstance(items, SetTracker)
        and not kwargs
        and items.real is None
        and all(v.try_const() is not None for v in items.entries.values())
    ):
        items.known()
        return ListTracker(sort_items(m, list(items.entries.values()), kwargs))  # whatever their order was
    return ListTracker(sort_items(m, expected(m, items), kwargs))


@rule(operator.length_hint, Tracker)
def length_hint(m: Machine, v: Tracker, default: Tracker | None = None) -> Any:
    if isinstance(v, (ObjectTracker, IteratorTracker)):
        return NotImplemented
    return m.apply(len, v)


@rule(itertools.chain)
def chain(m: Machine, *items: Tracker) -> Any:
    return ChainIterator(SequenceIterator(TupleTracker(items)))


@rule(itertools.chain.from_iterable, Tracker)
def chain_from(m: Machine, items: Tracker) -> Any:
    return ChainIterator(m.apply(iter, items))


@rule(itertools.count)
def count(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    start = args[0] if args else kwargs.get("start", m.const(0))
    step = args[1] if len(args) > 1 else kwargs.get("step", m.const(1))
    first, increment = start.try_const(), step.try_const()
    if first is None or increment is None or not isinstance(first.value, int | float) or not isinstance(increment.value, int | float):
        return NotImplemented
    if len(args) > 2 or kwargs.keys() - {"start", "step"} or (args and "start" in kwargs):
        return NotImplemented
    return CountIterator(first.value, increment.value)


@rule(itertools.repeat, Tracker)
def repeat(m: Machine, v: Tracker, times: Tracker | None = None) -> Any:
    const = times.try_const() if times is not None else None
    if times is not None and (const is None or not isinstance(const.value, int)):
        return NotImplemented
    return RepeatIterator(v, const.value if const is not None else None)


def _stepped(m: Machine, kind: Any, args: Sequence[Tracker], make: Callable[..., Iterator[Any]]) -> SteppedIterator:
    """`kind(*args)`, stepped by the real one (`make`) over the items of the first argument as capture asks for them."""
    source = m.apply(iter, args[0])
    return SteppedIterator(m, kind, make(remaining(m, source)), [source, *args[1:]])


def _test(m: Machine, fn: Tracker) -> Callable[[Tracker], bool]:
    return lambda item: m.truth(m.call(fn, [item], {}))


@rule(itertools.cycle, Tracker)
def cycle(m: Machine, items: Tracker) -> Any:
    known = known_items(m, items)
    return CycleIterator(known) if known is not None else _stepped(m, itertools.cycle, [items], itertools.cycle)


@rule(itertools.islice, Tracker, Tracker)
def islice(m: Machine, items: Tracker, *bounds: Tracker) -> Any:
    consts = [payload_of(bound).try_const() for bound in bounds]
    if any(const is None for const in consts):
        return NotImplemented
    limits = [const.value for const in consts if const is not None]
    try:
        itertools.islice((), *limits)
    except (TypeError, ValueError) as error:
        m.raise_exception(error)
    return _stepped(m, itertools.islice, [items, *bounds], lambda source: itertools.islice(source, *limits))


def _combined(fn: Any) -> None:
    @rule(fn)
    def body(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
        named = {name: value.try_const() for name, value in kwargs.items()}
        n_pools = len(args) if fn is itertools.product else 1
        sizes = [arg.try_const() for arg in args[n_pools:]]
        if not args or any(not isinstance(c.value if c else None, int | None) or c is None for c in (*named.values(), *sizes)):
            return NotImplemented
        pools = [iterate(m, arg) for arg in args[:n_pools]]
        try:
            rows = fn(*pools, *(c.value for c in sizes if c), **{name: c.value for name, c in named.items() if c})
        except Exception as error:
            m.raise_exception(error)
        return SteppedIterator(m, fn, (TupleTracker(row) for row in rows))


for _fn in (itertools.product, itertools.combinations, itertools.permutations, itertools.combinations_with_replacement):
    _combined(_fn)


@rule(itertools.pairwise, Tracker)
def pairwise(m: Machine, items: Tracker, /) -> Any:
    return SteppedIterator(m, itertools.pairwise, (TupleTracker(pair) for pair in itertools.pairwise(remaining(m, m.apply(iter, items)))))


_BATCHED = getattr(itertools, "batched", None)  # from 3.12 on


@rule((_BATCHED,) if _BATCHED is not None else (), Tracker)
def batched(m: Machine, items: Tracker, n: Tracker, *, strict: Tracker | None = None) -> Any:
    size = n.try_const()
    if size is None or type(size.value) is not int or size.value < 1 or not (strict is None or strict.try_const() == Const(False)):
        return NotImplemented

    def batches(source: Iterator[Tracker]) -> Iterator[Tracker]:
        while part := list(itertools.islice(source, size.value)):
            yield TupleTracker(part)

    return _stepped(m, _BATCHED, [items, n], batches)


@rule(itertools.zip_longest)
def zip_longest(m: Machine, *items: Tracker, fillvalue: Tracker | None = None) -> Any:
    sources = [m.apply(iter, item) for item in items]
    rows = itertools.zip_longest(
        *(remaining(m, source) for source in sources), fillvalue=fillvalue if fillvalue is not None else m.const(None)
    )
    return SteppedIterator(m, itertools.zip_longest, map(TupleTracker, rows), sources if fillvalue is None else None)


@rule(itertools.accumulate, Tracker)
def accumulate(m: Machine, items: Tracker, func: Tracker | None = None, *, initial: Tracker | None = None) -> Any:
    absent = func is None or (isinstance(func, ConstTracker) and func.read() is None)

    def add(total: Tracker, item: Tracker) -> Tracker:
        return m.apply(operator.add, total, item) if absent else m.call(func, [total, item], {})  # type: ignore[arg-type]

    start = None if isinstance(initial, ConstTracker) and initial.read() is None else initial
    args = [items] if func is None else [items, func]
    made = _stepped(m, itertools.accumulate, args, lambda source: itertools.accumulate(source, add, initial=start))
    if start is not None:
        made.args = None
    return made


@rule(itertools.starmap, Tracker, Tracker)
def starmap(m: Machine, fn: Tracker, items: Tracker) -> Any:
    source = m.apply(iter, items)
    return SteppedIterator(m, itertools.starmap, (m.call(fn, iterate(m, item), {}) for item in remaining(m, source)), [fn, source])


@rule(itertools.takewhile, Tracker, Tracker)
def takewhile(m: Machine, fn: Tracker, items: Tracker) -> Any:
    source = m.apply(iter, items)
    return SteppedIterator(m, itertools.takewhile, itertools.takewhile(_test(m, fn), remaining(m, source)), [fn, source])


@rule(itertools.dropwhile, Tracker, Tracker)
def dropwhile(m: Machine, fn: Tracker, items: Tracker) -> Any:
    source = m.apply(iter, items)
    return SteppedIterator(m, itertools.dropwhile, itertools.dropwhile(_test(m, fn), remaining(m, source)), [fn, source])


@rule(itertools.compress, Tracker, Tracker)
def compress(m: Machine, items: Tracker, selectors: Tracker) -> Any:
    data, chosen = m.apply(iter, items), m.apply(iter, selectors)
    truths = (m.truth(selector) for selector in remaining(m, chosen))
    return SteppedIterator(m, itertools.compress, itertools.compress(remaining(m, data), truths), [data, chosen])


class _Key:
    """A key of groupby: compares as the program's value does."""

    __slots__ = ("m", "of")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, m: Machine, of: Tracker) -> None:
        self.m, self.of = m, of

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Key)
        return self.of is other.of or self.m.truth(self.m.apply(operator.eq, self.of, other.of))


@rule(itertools.groupby, Tracker)
def groupby(m: Machine, iterable: Tracker, key: Tracker | None = None) -> Any:
    absent = key is None or (isinstance(key, ConstTracker) and key.read() is None)

    def key_of(item: Tracker) -> _Key:
        return _Key(m, item if absent else m.call(key, [item], {}))  # type: ignore[arg-type]

    def groups(source: Iterator[Tracker]) -> Iterator[Tracker]:
        for mark, group in itertools.groupby(source, key_of):  # the iterator of a group may be used later, or not at all
            yield TupleTracker([mark.of, SteppedIterator(m, type(group), group)])  # noqa: B031

    return _stepped(m, itertools.groupby, [iterable] if key is None else [iterable, key], groups)


@rule(itertools.tee, Tracker)
def tee(m: Machine, items: Tracker, n: Tracker | None = None) -> Any:
    """A tee of a tee is asked of the real one that stands behind it: what it shares depends on the version of Python."""
    const = n.try_const() if n is not None else None
    it = m.apply(iter, items)
    known = it.steps if isinstance(it, SteppedIterator) and it.kind is _TEE else None
    if known is None and hasattr(it.python_type(), "__copy__"):
        return NotImplemented  # it is copied
    shared = itertools.tee(known or remaining(m, it), const.value if const is not None else 2)
    return TupleTracker([it if part is known else SteppedIterator(m, _TEE, part) for part in shared])


_TEE: Any = type(itertools.tee(())[0])


@rule(operator.itemgetter, Tracker)
def itemgetter(m: Machine, *keys: Tracker) -> Any:
    return GetterTracker(operator.itemgetter, keys, {})


@rule(operator.attrgetter, Tracker)
def attrgetter(m: Machine, *names: Tracker) -> Any:
    return GetterTracker(operator.attrgetter, names, {})


@rule(operator.methodcaller, Tracker)
def methodcaller(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
    return GetterTracker(operator.methodcaller, args, kwargs)


@rule(functools.reduce, Tracker, Tracker)
def reduce(m: Machine, fn: Tracker, items: Tracker, *initial: Tracker) -> Any:
    try:
        it = m.apply(iter, items)
    except Raised as raised:
        if raised.matches(TypeError):
            m.raise_exception(TypeError("reduce() arg 2 must support iteration"))
        raise
    total = initial[0] if initial else next_or_none(m, it)
    if total is None:
        m.raise_exception(TypeError("reduce() of empty iterable with no initial value"))
    for item in remaining(m, it):
        total = m.call(fn, [total, item], {})
    return total


@rule(functools.partial, Tracker)
def partial(m: Machine, fn: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
    if isinstance(fn, PartialTracker):
        return PartialTracker(fn.fn, [*fn.args, *args], {**fn.kwargs, **kwargs})
    if not m.truth(m.apply(callable, fn)):
        m.raise_exception(TypeError("the first argument must be callable"))
    return PartialTracker(fn, args, kwargs)


# -- generators


@rule(types.GeneratorType.send, GeneratorTracker, Tracker)
def generator_send(m: Machine, v: GeneratorTracker, value: Tracker) -> Any:
    item = m.generator_next(v, value)  # type: ignore[attr-defined]
    if item is None:
        m.raise_exception(ExceptionTracker(StopIteration, [v.result] if v.result is not None and _something(v.result) else []))
    return item


@rule(types.GeneratorType.close, GeneratorTracker)
def generator_close(m: Machine, v: GeneratorTracker) -> Any:
    return m.generator_run(v).close()  # type: ignore[attr-defined]


@rule(types.GeneratorType.throw, GeneratorTracker, Tracker)
def generator_throw(m: Machine, v: GeneratorTracker, kind: Tracker, *rest: Tracker) -> Any:
    if rest and sys.version_info >= (3, 12):
        return NotImplemented  # it warns
    exc = kind
    if issubclass(kind.python_type(), type):
        value = rest[0] if rest else m.const(None)
        const = value.try_const()
        if issubclass(value.python_type(), BaseException):
            exc = value
        else:
            exc = m.call(kind, [] if const is not None and const.value is None else [value], {})
    if len(rest) > 1 and (const := rest[1].try_const()) is None:
        m.apply(BaseException.with_traceback, exc, rest[1])
    item = m.generator_run(v).throw(exc)  # type: ignore[attr-defined]
    if item is None:
        m.raise_exception(ExceptionTracker(StopIteration, [v.result] if v.result is not None and _something(v.result) else []))
    return item


def _something(result: Tracker | None) -> bool:
    return result is not None and ((const := result.try_const()) is None or const.value is not None)
