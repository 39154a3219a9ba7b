"""Rows of Python's built-in functions and of the small standard-library modules that models use."""

from __future__ import annotations

import builtins
import collections
import copy
import functools
import inspect
import itertools
import math
import operator
import types
import typing
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.attributes import find_special, generic_get, generic_set, get_attr, no_attribute, set_attr
from magneto.dynamo.trackers.base import MISSING, Raised, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import FALLBACKS, fold, has_rows, pure, rule
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker, FunctionTracker, PartialTracker
from magneto.dynamo.trackers.iterator import (
    ChainIterator,
    CountIterator,
    CycleIterator,
    EnumerateIterator,
    FilterIterator,
    GeneratorTracker,
    ItemsIterator,
    IteratorTracker,
    MapIterator,
    RepeatIterator,
    SequenceIterator,
    SteppedIterator,
    ZipIterator,
    iterate,
    next_or_none,
    remaining,
)
from magneto.dynamo.trackers.getter import GetterTracker
from magneto.dynamo.trackers.klass import ClassTracker, SuperTracker, find_in_type, held
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import ExceptionTracker, IdTracker, ObjectTracker, OpaqueTracker
from magneto.dynamo.trackers.rules_container import sort_items
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from magneto.dynamo.machine.protocol import Machine

CONST_CLASSES = (int, float, complex, bool, str, bytes, range, torch.dtype, torch.device)
for _cls in CONST_CLASSES:
    pure(raw for name, raw in vars(_cls).items() if isinstance(raw, (types.MethodDescriptorType, types.WrapperDescriptorType)))
    pure([_cls])
pure(fn for fn in vars(math).values() if callable(fn))
pure([divmod, chr, ord, bin, hex, oct, ascii, len, int.from_bytes, str.maketrans, float.fromhex, bytes.fromhex])
pure([torch.promote_types, torch.can_cast, torch.finfo, torch.iinfo])


def const_str(m: Machine, v: Tracker) -> str:
    const = v.try_const()
    if const is None or not isinstance(const.value, str):
        m.raise_exception(TypeError(f"attribute name must be string, not '{v.python_type().__name__}'"))
    return str(const.value)


# -- attributes


@rule(getattr, Tracker, Tracker)
def getattr_(m: Machine, v: Tracker, name: Tracker, *default: Tracker) -> Tracker:
    text = const_str(m, name)
    try:
        found = get_attr(m, v, text)
    except Raised as raised:
        if default and raised.matches(AttributeError):
            return default[0]
        raise
    if found is not None:
        return found
    if default:
        return default[0]
    m.raise_exception(no_attribute(m, v, text))


@rule(hasattr, Tracker, Tracker)
def hasattr_(m: Machine, v: Tracker, name: Tracker) -> Tracker:
    try:
        return m.const(get_attr(m, v, const_str(m, name)) is not None)
    except Raised as raised:
        if raised.matches(AttributeError):
            return m.const(False)
        raise


@rule(setattr, Tracker, Tracker, Tracker)
def setattr_(m: Machine, v: Tracker, name: Tracker, value: Tracker) -> None:
    set_attr(m, v, const_str(m, name), value)


@rule(delattr, Tracker, Tracker)
def delattr_(m: Machine, v: Tracker, name: Tracker) -> None:
    set_attr(m, v, const_str(m, name), None)


@rule(object.__getattribute__, Tracker, Tracker)
def object_getattribute(m: Machine, v: Tracker, name: Tracker) -> Tracker:
    text = const_str(m, name)
    found = v.special_attr(m, text) or generic_get(m, v, v.python_type(), text)
    if found is None:
        m.raise_exception(no_attribute(m, v, text))
    return found


@rule(object.__setattr__, ObjectTracker, Tracker, Tracker)
def object_setattr(m: Machine, v: ObjectTracker, name: Tracker, value: Tracker) -> None:
    generic_set(m, v, const_str(m, name), value)


@rule(object.__delattr__, ObjectTracker, Tracker)
def object_delattr(m: Machine, v: ObjectTracker, name: Tracker) -> None:
    generic_set(m, v, const_str(m, name), None)


@rule(vars, Tracker)
def vars_(m: Machine, v: Tracker) -> Tracker:
    return m.apply(getattr, v, m.const("__dict__"))


@rule(super)
def super_(m: Machine, *args: Tracker) -> Tracker:
    cls, owner = args if args else m.super_args()  # type: ignore[attr-defined]
    assert isinstance(cls, ClassTracker)
    return SuperTracker(cls.obj, owner)


# -- types


def class_info(m: Machine, v: Tracker) -> Any:
    """The real second argument of isinstance."""
    if isinstance(v, ClassTracker):
        return v.obj
    if isinstance(v, SequenceTracker):
        return tuple(class_info(m, item) for item in v.items(m))
    if isinstance(v, OpaqueTracker) and isinstance(v.obj, (types.UnionType, types.GenericAlias)) or hasattr(v.obj, "__instancecheck__"):
        return v.obj
    const = v.try_const()
    if const is not None and isinstance(const.value, tuple):
        return const.value
    m.graph_break("B104", operation="isinstance", value=v.show())


def _plain_metaclass(cls: Any) -> bool:
    return type(cls).__instancecheck__ is type.__instancecheck__


@rule(isinstance, Tracker, Tracker)
def isinstance_(m: Machine, v: Tracker, info: Tracker) -> Tracker:
    return m.const(is_instance(m, v, class_info(m, info)))


def is_instance(m: Machine, v: Tracker, info: Any) -> bool:
    """isinstance on a tracked value. Classes with their own __instancecheck__ are asked with the real object, or by subclass."""
    cls = v.python_type()
    if isinstance(info, tuple):
        return any(is_instance(m, v, item) for item in info)
    if isinstance(info, types.UnionType):
        return any(is_instance(m, v, type(None) if item is None else item) for item in info.__args__)
    if isinstance(info, type) and _plain_metaclass(info):
        return issubclass(cls, info)
    if isinstance(v, TensorTracker):
        if info is torch.nn.Parameter:
            return issubclass(cls, torch.nn.Parameter)
        if info is torch.nn.Buffer:
            return issubclass(cls, torch.nn.Buffer) or (v.obj is not MISSING and isinstance(v.obj, torch.nn.Buffer))
        legacy = {"FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "BoolTensor"}
        if isinstance(info, type) and info.__name__ in legacy:
            return isinstance(torch.empty(0, dtype=v.meta.dtype), info)
    const = v.try_const()
    if const is not None:
        return isinstance(const.value, info)
    if v.obj is not MISSING and not isinstance(v, TensorTracker):
        return isinstance(v.obj, info)
    try:
        return issubclass(cls, info)
    except TypeError as error:
        m.raise_exception(error)


@rule(issubclass, Tracker, Tracker)
def issubclass_(m: Machine, v: Tracker, info: Tracker) -> Tracker:
    if not isinstance(v, ClassTracker):
        m.raise_exception(TypeError("issubclass() arg 1 must be a class"))
    return m.const(issubclass(v.obj, class_info(m, info)))


@rule(type, Tracker)
def type_(m: Machine, v: Tracker, *args: Tracker) -> Any:
    if args:
        m.graph_break("B101", callee="type", reason="a class is created")
    cls = v.python_type()
    return held(m, cls, cls.__name__)


@rule(type.__instancecheck__, ClassTracker, Tracker)
def type_instancecheck(m: Machine, cls: ClassTracker, v: Tracker) -> Tracker:
    return m.const(issubclass(v.python_type(), cls.obj))


@rule(callable, Tracker)
def callable_(m: Machine, v: Tracker) -> Tracker:
    return m.const(any("__call__" in base.__dict__ for base in v.python_type().__mro__))


@rule(id, Tracker)
def id_(m: Machine, v: Tracker) -> Any:
    if isinstance(v, (ModuleTracker, ClassTracker, BuiltinTracker)) and v.obj is not MISSING:
        return m.const(id(v.obj))  # guarded by identity
    return IdTracker(v)


@rule(hash, Tracker)
def hash_(m: Machine, v: Tracker) -> Any:
    folded = fold(m, hash, (v,), {})
    if folded is not NotImplemented:
        return folded
    if isinstance(v, (ModuleTracker, ClassTracker)):
        return m.const(hash(v.obj))
    method = find_special(m, v, "__hash__") if isinstance(v, ObjectTracker) else None
    if isinstance(method, BoundMethodTracker) and isinstance(method.fn, FunctionTracker):
        return m.call(method, [], {})
    if v.python_type().__hash__ is None:
        m.raise_exception(TypeError(f"unhashable type: '{v.python_type().__name__}'"))
    return NotImplemented


# -- conversions


@rule((int, float, complex), TensorTracker)
def number_of_tensor(m: Machine, v: TensorTracker) -> Any:
    m.graph_break("B102", operation="int(), float() or complex()")


@rule((int, float, complex), ObjectTracker)
def number_of_object(m: Machine, v: ObjectTracker, *args: Tracker) -> Any:
    for name in ("__int__", "__float__", "__index__"):
        method = find_special(m, v, name)
        if method is not None:
            return m.call(method, [], {})
    return NotImplemented


def text_of(m: Machine, v: Tracker, fn: Any) -> str:
    """str() or repr() of a value whose text capture knows."""
    const = v.try_const()
    if const is not None:
        return str(fn(const.value))
    if isinstance(v, SequenceTracker) and v.cls in (list, tuple):
        items = [text_of(m, item, repr) for item in v.items(m)]
        if v.cls is list:
            return "[" + ", ".join(items) + "]"
        return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
    if isinstance(v, SequenceTracker) and v.cls is torch.Size:
        return "torch.Size([" + ", ".join(text_of(m, item, repr) for item in v.items(m)) + "])"
    if isinstance(v, DictTracker) and v.cls is dict:
        return "{" + ", ".join(f"{text_of(m, k, repr)}: {text_of(m, x, repr)}" for k, x in v.pairs(m)) + "}"
    if isinstance(v, ClassTracker):
        return str(fn(v.obj))
    if isinstance(v, (ObjectTracker, ExceptionTracker)):
        return _object_text(m, v, fn)
    m.graph_break("B104", operation=f"{fn.__name__}()", value=v.show())


def _object_text(m: Machine, v: ObjectTracker, fn: Any) -> str:
    names = ("__str__", "__repr__") if fn is str else ("__repr__",)
    for name in names:
        if isinstance(find_in_type(m, v.cls, name), types.FunctionType):
            method = find_special(m, v, name)
            assert method is not None
            const = m.call(method, [], {}).try_const()
            if const is None:
                break
            return str(const.value)
    if isinstance(v, ExceptionTracker):
        values = [arg.try_const() for arg in v.args]
        if all(value is not None for value in values):
            if isinstance(v.cls.__str__, types.WrapperDescriptorType):
                return str(fn(v.cls.__new__(v.cls, *(value.value for value in values if value is not None))))
    m.graph_break("B104", operation=f"{fn.__name__}()", value=v.show())


@rule(str, Tracker)
def str_(m: Machine, v: Tracker, *args: Tracker) -> Any:
    return NotImplemented if args else m.const(text_of(m, v, str))


@rule(repr, Tracker)
def repr_(m: Machine, v: Tracker) -> Any:
    return m.const(text_of(m, v, repr))


@rule(format, Tracker)
def format_(m: Machine, v: Tracker, spec: Tracker | None = None) -> Any:
    folded = fold(m, format, (v,) if spec is None else (v, spec), {})
    if folded is not NotImplemented:
        return folded
    if isinstance(v, ObjectTracker) and isinstance(find_in_type(m, v.cls, "__format__"), types.FunctionType):
        method = find_special(m, v, "__format__")
        assert method is not None
        return m.call(method, [spec if spec is not None else m.const("")], {})
    const = spec.try_const() if spec is not None else None
    if spec is None or (const is not None and const.value == ""):
        return m.const(text_of(m, v, str))
    return NotImplemented


@rule(str.format, Tracker)
def str_format(m: Machine, v: Tracker, *args: Tracker, **kwargs: Tracker) -> Any:
    folded = fold(m, str.format, (v, *args), kwargs)
    if folded is not NotImplemented:
        return folded
    texts = [m.const(text_of(m, arg, str)) if arg.try_const() is None else arg for arg in args]
    named = {k: m.const(text_of(m, arg, str)) if arg.try_const() is None else arg for k, arg in kwargs.items()}
    return fold(m, str.format, (v, *texts), named)


@rule(str.join, ConstTracker, Tracker)
def str_join(m: Machine, v: ConstTracker, items: Tracker) -> Any:
    return fold(m, lambda text, *parts: text.join(parts), (v, *iterate(m, items)), {})


# -- numbers


def _extreme(fn: Any, better: Any) -> Any:
    def body(m: Machine, *args: Tracker, key: Tracker | None = None, default: Tracker | None = None) -> Any:
        items = iterate(m, args[0]) if len(args) == 1 else list(args)
        if not items:
            if default is not None:
                return default
            m.raise_exception(ValueError(f"{fn.__name__}() iterable argument is empty"))
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
    for item in iterate(m, items):
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
def round_(m: Machine, v: Tracker, *args: Tracker, **kwargs: Tracker) -> Any:
    if isinstance(v, TensorTracker):
        named = {"decimals": args[0].try_const().value} if args else {}  # type: ignore[union-attr]
        return m.node(torch.round, [v], named)
    return fold(m, round, (v, *args), kwargs)


@rule(pow, Tracker, Tracker)
def pow_(m: Machine, a: Tracker, b: Tracker, *args: Tracker) -> Any:
    return m.apply(operator.pow, a, b) if not args else fold(m, pow, (a, b, *args), {})


@rule((math.floor, math.ceil, math.trunc), TensorTracker)
def math_of_tensor(m: Machine, v: TensorTracker) -> Any:
    m.graph_break("B102", operation="math function of a tensor")


# -- iterators


@rule(next, Tracker)
def next_(m: Machine, it: Tracker, *default: Tracker) -> Tracker:
    item = next_or_none(m, it)
    if item is not None:
        return item
    if default:
        return default[0]
    result = it.result if isinstance(it, GeneratorTracker) else None
    const = result.try_const() if result is not None else None
    if result is None or (const is not None and const.value is None):
        m.raise_exception(StopIteration())
    m.raise_exception(ExceptionTracker(StopIteration, [result]))


@rule(range)
def range_(m: Machine, *args: Tracker) -> Any:
    values = []
    for arg in args:
        if isinstance(arg, TensorTracker):
            m.graph_break("B102", operation="range() of a tensor")
        values.append(m.apply(operator.index, arg))
    return fold(m, range, values, {})


@rule(enumerate, Tracker)
def enumerate_(m: Machine, items: Tracker, start: Tracker | None = None) -> Any:
    const = start.try_const() if start is not None else None
    return EnumerateIterator(m.apply(iter, items), const.value if const is not None else 0)


@rule(zip)
def zip_(m: Machine, *items: Tracker, strict: Tracker | None = None) -> Any:
    return ZipIterator([m.apply(iter, item) for item in items], strict is not None and m.truth(strict))


@rule(map, Tracker, Tracker)
def map_(m: Machine, fn: Tracker, *items: Tracker) -> Any:
    return MapIterator(fn, [m.apply(iter, item) for item in items])


@rule((filter, itertools.filterfalse), Tracker, Tracker)
def filter_(m: Machine, fn: Tracker, items: Tracker) -> Any:
    none = isinstance(fn, ConstTracker) and fn.read() is None
    return FilterIterator(None if none else fn, m.apply(iter, items))


@rule(reversed, Tracker)
def reversed_(m: Machine, v: Tracker) -> Any:
    if isinstance(v, TensorTracker):
        return m.apply(torch.flip, v, m.const((0,)))
    method = find_special(m, v, "__reversed__") if isinstance(v, ObjectTracker) else None
    if method is not None:
        return m.call(method, [], {})
    if isinstance(v, SequenceTracker):
        return SequenceIterator(ListTracker(v.items(m)[::-1]))
    if isinstance(v, ObjectTracker):
        length = m.apply(len, v).try_const()
        assert length is not None
        return ItemsIterator([m.apply(operator.getitem, v, m.const(i)) for i in range(length.value - 1, -1, -1)])
    return ItemsIterator(iterate(m, v)[::-1])


@rule(sorted, Tracker)
def sorted_(m: Machine, items: Tracker, **kwargs: Tracker) -> Any:
    return ListTracker(sort_items(m, iterate(m, items), kwargs))


@rule(itertools.chain)
def chain(m: Machine, *items: Tracker) -> Any:
    return ChainIterator(SequenceIterator(TupleTracker(items)))


@rule(itertools.chain.from_iterable, Tracker)
def chain_from(m: Machine, items: Tracker) -> Any:
    return ChainIterator(m.apply(iter, items))


@rule(itertools.count)
def count(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
    start = args[0] if args else kwargs.get("start", m.const(0))
    step = args[1] if len(args) > 1 else kwargs.get("step", m.const(1))
    first, increment = start.try_const(), step.try_const()
    if first is None or increment is None:
        return NotImplemented
    return CountIterator(first.value, increment.value)


@rule(itertools.repeat, Tracker)
def repeat(m: Machine, v: Tracker, times: Tracker | None = None) -> Any:
    const = times.try_const() if times is not None else None
    return RepeatIterator(v, const.value if const is not None else None)


@rule(itertools.cycle, Tracker)
def cycle(m: Machine, items: Tracker) -> Any:
    return CycleIterator(iterate(m, items))


@rule(itertools.islice, Tracker, Tracker)
def islice(m: Machine, items: Tracker, *bounds: Tracker) -> Any:
    consts = [bound.try_const() for bound in bounds]
    if any(const is None for const in consts):
        return NotImplemented
    wanted = slice(*(const.value for const in consts if const is not None))
    iterator = m.apply(iter, items)
    found: list[Tracker] = []
    position = 0
    following = wanted.start or 0
    while wanted.stop is None or following < wanted.stop:
        item = next_or_none(m, iterator)
        if item is None:
            break
        if position == following:
            found.append(item)
            following += wanted.step or 1
        position += 1
    return ItemsIterator(found)


def _combined(fn: Any) -> None:
    @rule(fn, Tracker)
    def body(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
        named = {name: value.try_const().value for name, value in kwargs.items()}  # type: ignore[union-attr]
        if fn in (itertools.product, itertools.pairwise):
            pools = [iterate(m, arg) for arg in args]
            rows = fn(*pools, **named)
        else:
            sizes = [arg.try_const().value for arg in args[1:]]  # type: ignore[union-attr]
            rows = fn(iterate(m, args[0]), *sizes, **named)
        return ItemsIterator([TupleTracker(row) for row in rows])


for _fn in (itertools.product, itertools.combinations, itertools.permutations, itertools.pairwise, itertools.combinations_with_replacement):
    _combined(_fn)


@rule(itertools.zip_longest)
def zip_longest(m: Machine, *items: Tracker, fillvalue: Tracker | None = None) -> Any:
    filler = fillvalue if fillvalue is not None else m.const(None)
    rows = itertools.zip_longest(*(iterate(m, item) for item in items), fillvalue=filler)
    return ItemsIterator([TupleTracker(row) for row in rows])


@rule(itertools.accumulate, Tracker)
def accumulate(m: Machine, items: Tracker, fn: Tracker | None = None, *, initial: Tracker | None = None) -> Any:
    found: list[Tracker] = [] if initial is None else [initial]
    for item in iterate(m, items):
        if not found:
            found.append(item)
        elif fn is None or (isinstance(fn, ConstTracker) and fn.read() is None):
            found.append(m.apply(operator.add, found[-1], item))
        else:
            found.append(m.call(fn, [found[-1], item], {}))
    return ItemsIterator(found)


@rule(itertools.starmap, Tracker, Tracker)
def starmap(m: Machine, fn: Tracker, items: Tracker) -> Any:
    source = remaining(m, m.apply(iter, items))
    return SteppedIterator(m, itertools.starmap, (m.call(fn, iterate(m, item), {}) for item in source))


@rule(itertools.takewhile, Tracker, Tracker)
def takewhile(m: Machine, fn: Tracker, items: Tracker) -> Any:
    source = remaining(m, m.apply(iter, items))
    return SteppedIterator(m, itertools.takewhile, itertools.takewhile(lambda item: m.truth(m.call(fn, [item], {})), source))


@rule(itertools.dropwhile, Tracker, Tracker)
def dropwhile(m: Machine, fn: Tracker, items: Tracker) -> Any:
    source = remaining(m, m.apply(iter, items))
    return SteppedIterator(m, itertools.dropwhile, itertools.dropwhile(lambda item: m.truth(m.call(fn, [item], {})), source))


@rule(itertools.compress, Tracker, Tracker)
def compress(m: Machine, items: Tracker, selectors: Tracker) -> Any:
    pairs = zip(remaining(m, m.apply(iter, items)), remaining(m, m.apply(iter, selectors)), strict=False)
    return SteppedIterator(m, itertools.compress, (item for item, selector in pairs if m.truth(selector)))


@rule(itertools.groupby, Tracker)
def groupby(m: Machine, items: Tracker, key: Tracker | None = None) -> Any:
    """Groups are gathered as they are asked for; equal neighbours by their keys' equality."""

    def groups() -> Iterator[Tracker]:
        found: list[Tracker] = []
        current: Tracker | None = None
        for item in remaining(m, m.apply(iter, items)):
            mark = item if key is None or (isinstance(key, ConstTracker) and key.read() is None) else m.call(key, [item], {})
            if current is not None and not m.truth(m.apply(operator.eq, current, mark)):
                yield TupleTracker([current, ItemsIterator(found)])
                found = []
            current = mark
            found.append(item)
        if current is not None:
            yield TupleTracker([current, ItemsIterator(found)])

    return SteppedIterator(m, itertools.groupby, groups())


@rule(itertools.tee, Tracker)
def tee(m: Machine, items: Tracker, n: Tracker | None = None) -> Any:
    known = iterate(m, items)
    const = n.try_const() if n is not None else None
    return TupleTracker([ItemsIterator(known) for _ in range(const.value if const is not None else 2)])


@rule(operator.itemgetter, Tracker)
def itemgetter(m: Machine, *keys: Tracker) -> Any:
    return GetterTracker(operator.itemgetter, keys, {})


@rule(operator.attrgetter, Tracker)
def attrgetter(m: Machine, *names: Tracker) -> Any:
    return GetterTracker(operator.attrgetter, names, {})


@rule(operator.methodcaller, Tracker)
def methodcaller(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
    return GetterTracker(operator.methodcaller, args, kwargs)


@rule(functools.reduce, Tracker, Tracker)
def reduce(m: Machine, fn: Tracker, items: Tracker, *initial: Tracker) -> Any:
    found = [*initial, *iterate(m, items)]
    if not found:
        m.raise_exception(TypeError("reduce() of empty iterable with no initial value"))
    total = found[0]
    for item in found[1:]:
        total = m.call(fn, [total, item], {})
    return total


@rule(functools.partial, Tracker)
def partial(m: Machine, fn: Tracker, *args: Tracker, **kwargs: Tracker) -> Tracker:
    if isinstance(fn, PartialTracker):
        return PartialTracker(fn.fn, [*fn.args, *args], {**fn.kwargs, **kwargs})
    return PartialTracker(fn, args, kwargs)


# -- generators


@rule(types.GeneratorType.send, GeneratorTracker, Tracker)
def generator_send(m: Machine, v: GeneratorTracker, value: Tracker) -> Any:
    item = m.generator_next(v, value)  # type: ignore[attr-defined]
    if item is None:
        m.raise_exception(ExceptionTracker(StopIteration, [v.result] if v.result is not None else []))
    return item


@rule(types.GeneratorType.close, GeneratorTracker)
def generator_close(m: Machine, v: GeneratorTracker) -> Any:
    if v.finished or not v.started:
        v.finished = True
        return None
    m.graph_break("B108", value=v.show())


# -- the rest


@rule(print)
def print_(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
    """Texts that capture knows are printed when the region's effects are replayed."""
    texts = [text_of(m, arg, str) for arg in args]
    if any(value.try_const() is None for value in kwargs.values()):
        return NotImplemented
    operands = [m.const(text) for text in texts] + list(kwargs.values())
    parts = [f"{{{i}}}" for i in range(len(texts))] + [f"{name}={{{len(texts) + i}}}" for i, name in enumerate(kwargs)]
    m.effect(f"print({', '.join(parts)})", *operands)
    return None


@rule(typing.cast, Tracker, Tracker)
def cast(m: Machine, cls: Tracker, v: Tracker) -> Tracker:
    return v


@rule(copy.copy, Tracker)
def copy_(m: Machine, v: Tracker) -> Any:
    if v.try_const() is not None:
        return v
    if isinstance(v, ListTracker):
        return ListTracker(v.items(m))
    if isinstance(v, DictTracker) and v.owner is v:
        made = DictTracker.of(m, v.pairs(m), v.cls)
        made.default_factory = v.default_factory
        return made
    if isinstance(v, TupleTracker):
        return v
    if isinstance(v, ObjectTracker) and not isinstance(v, ModuleTracker) and v.payload is None and not hasattr(v.cls, "__copy__"):
        attrs = v.attrs(m)
        if attrs is not None and v.cls.__reduce_ex__ is object.__reduce_ex__:
            made_object = ObjectTracker(v.cls)
            made_object._attrs = DictTracker.of(m, attrs.pairs(m))
            return made_object
    return NotImplemented


def real_callable(v: Tracker) -> Any:
    """The real object of a tracked callable, MISSING for one made inside the region."""
    if isinstance(v, BoundMethodTracker) and v.obj is MISSING:
        fn, owner = v.fn.obj, v.owner.obj
        return MISSING if fn is MISSING or owner is MISSING else types.MethodType(fn, owner)
    return v.obj


@rule(inspect.signature, Tracker)
def signature(m: Machine, v: Tracker, **kwargs: Tracker) -> Any:
    """Of an existing callable, known by identity or by its code: the real signature."""
    real = real_callable(v)
    if real is MISSING or kwargs:
        return NotImplemented
    try:
        found = inspect.signature(real)
    except (ValueError, TypeError) as error:
        m.raise_exception(error)
    return held(m, found, "signature")


def call_cached(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """Fallback: functools.lru_cache. On constants the cached function itself is asked, as the program would ask it; otherwise the function is inlined."""
    if not isinstance(fn, functools._lru_cache_wrapper):
        return NotImplemented
    consts = [arg.try_const() for arg in args]
    named = {name: arg.try_const() for name, arg in kwargs.items()}
    if all(const is not None for const in (*consts, *named.values())):
        try:
            value = fn(*(c.value for c in consts if c is not None), **{k: c.value for k, c in named.items() if c is not None})
        except Exception as error:
            m.raise_exception(error)
        return held(m, value, getattr(fn, "__name__", "cached"))
    return m.call(held(m, fn.__wrapped__, fn.__wrapped__.__name__), args, kwargs)


FALLBACKS.append(call_cached)
__all__ = ["DictViewTracker", "IteratorTracker", "builtins", "has_rows", "is_instance", "text_of"]
