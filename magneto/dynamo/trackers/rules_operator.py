"""Rows of the operators: arithmetic, comparison, identity, truth, membership, subscripts."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.attributes import find_special
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import fold, pure, rule
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.iterator import iterate
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type
from magneto.dynamo.trackers.lifted import decides
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker
from magneto.dynamo.trackers.module import ModuleTracker
from magneto.dynamo.trackers.object import IdTracker, ObjectTracker, OpaqueTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import lower

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "add": (operator.add, operator.iadd, "+"),
    "sub": (operator.sub, operator.isub, "-"),
    "mul": (operator.mul, operator.imul, "*"),
    "matmul": (operator.matmul, operator.imatmul, "@"),
    "truediv": (operator.truediv, operator.itruediv, "/"),
    "floordiv": (operator.floordiv, operator.ifloordiv, "//"),
    "mod": (operator.mod, operator.imod, "%"),
    "pow": (operator.pow, operator.ipow, "** or pow()"),
    "lshift": (operator.lshift, operator.ilshift, "<<"),
    "rshift": (operator.rshift, operator.irshift, ">>"),
    "and": (operator.and_, operator.iand, "&"),
    "or": (operator.or_, operator.ior, "|"),
    "xor": (operator.xor, operator.ixor, "^"),
}
COMPARISONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "lt": (operator.lt, "gt", "<"),
    "le": (operator.le, "ge", "<="),
    "gt": (operator.gt, "lt", ">"),
    "ge": (operator.ge, "le", ">="),
    "eq": (operator.eq, "eq", "=="),
    "ne": (operator.ne, "ne", "!="),
}
_NUMBERS = (int, float, bool, complex)

pure(
    fn
    for name, fn in vars(operator).items()
    if callable(fn) and not name.startswith("_") and name not in ("setitem", "delitem", "itemgetter")
)
pure(getattr(operator, f"__{name}__", None) for name in ("index", "not_"))


def tensor_operand(v: Tracker) -> bool:
    """Whether torch takes the value beside a tensor."""
    if isinstance(v, TensorTracker):
        return True
    return isinstance(v, ConstTracker) and isinstance(v.read(), _NUMBERS)


def _unsupported(m: Machine, symbol: str, a: Tracker, b: Tracker) -> None:
    m.raise_exception(TypeError(f"unsupported operand type(s) for {symbol}: '{a.python_type().__name__}' and '{b.python_type().__name__}'"))


def _dunder(m: Machine, name: str, a: Tracker, b: Tracker) -> Tracker | None:
    """`type(a).__name__(a, b)` written in Python; None when it is not there or returns NotImplemented."""
    if not isinstance(a, (ObjectTracker, ClassTracker)):
        return None
    if not isinstance(find_in_type(m, a.python_type(), name), types.FunctionType):
        return None
    method = find_special(m, a, name)
    assert method is not None
    result = m.call(method, [b], {})
    const = result.try_const()
    return None if const is not None and const.value is NotImplemented else result


def _binary(name: str, fn: Callable[..., Any], symbol: str) -> Callable[..., Any]:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        if isinstance(a, TensorTracker) or isinstance(b, TensorTracker):
            if tensor_operand(a) and tensor_operand(b):
                return m.node(fn, [lower(m, a), lower(m, b)], {})
            if isinstance(b, ObjectTracker) and (result := _dunder(m, f"__r{name}__", b, a)) is not None:
                return result
            if isinstance(a, ObjectTracker) and (result := _dunder(m, f"__{name}__", a, b)) is not None:
                return result
            if isinstance(a, SequenceTracker) and name == "mul":
                m.graph_break("B102", operation="repetition of a sequence by a tensor")
            m.graph_break("B104", operation=symbol, value=(b if isinstance(a, TensorTracker) else a).show())
        if isinstance(a, ConstTracker) and isinstance(b, ConstTracker):
            return fold(m, fn, (a, b), {})
        result = _containers(m, name, a, b)
        if result is not NotImplemented:
            return result
        result = _dunder(m, f"__{name}__", a, b) or _dunder(m, f"__r{name}__", b, a)
        if result is not None:
            return result
        folded = fold(m, fn, (a, b), {})
        if folded is not NotImplemented:
            return folded
        if isinstance(a, OpaqueTracker) or isinstance(b, OpaqueTracker):
            m.graph_break("B104", operation=symbol, value=(a if isinstance(a, OpaqueTracker) else b).show())
        _unsupported(m, symbol, a, b)

    return body


def payload_of(v: Tracker) -> Tracker:
    """The builtin container inside an instance of its subclass."""
    return v.payload if isinstance(v, ObjectTracker) and v.payload is not None else v


def _containers(m: Machine, name: str, a: Tracker, b: Tracker) -> Any:
    if isinstance(a, ConstTracker) and type(a.value) in (tuple, torch.Size):
        a = TupleTracker(iterate(m, a))
    if isinstance(b, ConstTracker) and type(b.value) in (tuple, torch.Size):
        b = TupleTracker(iterate(m, b))
    if name == "add" and isinstance(a, SequenceTracker) and isinstance(b, SequenceTracker):
        kinds = {a.cls, b.cls}
        if isinstance(a, ListTracker) and isinstance(b, ListTracker):
            return ListTracker([*a.items(m), *b.items(m)])
        if isinstance(a, TupleTracker) and isinstance(b, TupleTracker):
            return TupleTracker([*a.items(m), *b.items(m)], torch.Size if torch.Size in kinds and kinds <= {tuple, torch.Size} else tuple)
    if name == "mul":
        sequence, times = (a, b) if isinstance(a, SequenceTracker) else (b, a)
        const = times.try_const()
        if isinstance(sequence, (ListTracker, TupleTracker)) and const is not None and isinstance(const.value, int):
            items = sequence.items(m) * const.value
            if isinstance(sequence, ListTracker):
                return ListTracker(items)
            return TupleTracker(items, torch.Size if sequence.cls is torch.Size and type(torch.Size(()) * 2) is torch.Size else tuple)
    left, right = _as_set(m, a), _as_set(m, b)
    if left is not None and right is not None and name in ("or", "and", "sub", "xor"):
        return set_algebra(name, left, right)
    if name == "or" and isinstance(a, DictTracker) and isinstance(b, DictTracker):
        merged = DictTracker.of(m, a.pairs(m), a.cls)
        for key, value in b.pairs(m):
            merged.put(m, key, value)
        return merged
    return NotImplemented


def _as_set(m: Machine, v: Tracker) -> SetTracker | None:
    if isinstance(v, SetTracker):
        v.known()
        return v
    if isinstance(v, ConstTracker) and type(v.value) is frozenset:
        return SetTracker.of(m, iterate(m, v), frozenset)
    if isinstance(v, DictViewTracker) and v.kind != "values":
        return SetTracker.of(m, v.items(m))
    return None


def set_algebra(name: str, a: SetTracker, b: SetTracker) -> SetTracker:
    """Union, intersection, difference, symmetric difference."""
    one, two = a.entries, b.entries
    if name == "or":
        entries = {**one, **{k: v for k, v in two.items() if k not in one}}
    elif name == "and":
        entries = {k: v for k, v in one.items() if k in two}
    elif name == "sub":
        entries = {k: v for k, v in one.items() if k not in two}
    else:
        entries = {k: v for k, v in one.items() if k not in two} | {k: v for k, v in two.items() if k not in one}
    return SetTracker(entries, a.cls)


def _inplace(name: str, fn: Callable[..., Any], ifn: Callable[..., Any]) -> Callable[..., Any]:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        if isinstance(a, TensorTracker):
            if not tensor_operand(b):
                return m.apply(fn, a, b)
            result = m.node(ifn, [a, lower(m, b)], {})
            if isinstance(result, TensorTracker) and result is not a:
                a.meta = result.meta
            return a
        target = payload_of(a)
        if isinstance(target, ListTracker) and name == "add":
            m.apply(list.extend, a, b)
            return a
        if isinstance(target, DequeTracker) and name == "add":
            m.graph_break("B104", operation="+=", value=a.show())
        if isinstance(target, ListTracker) and name == "mul" and a.source is None:
            target.entries = list(m.apply(operator.mul, a, b).entries)  # type: ignore[attr-defined]
            return a
        if isinstance(target, DictTracker) and name == "or":
            m.apply(dict.update, a, b)
            return a
        if isinstance(target, SetTracker) and target.cls is set and name == "or":
            m.apply(set.update, a, b)
            return a
        result = _dunder(m, f"__i{name}__", a, b)  # type: ignore[assignment]
        return result if result is not None else m.apply(fn, a, b)

    return body


def _comparison(name: str, fn: Callable[..., Any], swapped: str, symbol: str) -> Callable[..., Any]:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        if isinstance(a, TensorTracker) or isinstance(b, TensorTracker):
            if tensor_operand(a) and tensor_operand(b):
                return m.node(fn, [lower(m, a), lower(m, b)], {})
            if name in ("eq", "ne"):
                return m.const(name == "ne")
            m.graph_break("B104", operation=symbol, value=(b if isinstance(a, TensorTracker) else a).show())
        if isinstance(a, ConstTracker) and isinstance(b, ConstTracker):
            return fold(m, fn, (a, b), {})
        result = _dunder(m, f"__{name}__", a, b)
        if result is None:
            result = _dunder(m, f"__{swapped}__", b, a)
        if result is None and name == "ne":
            result = _dunder(m, "__eq__", a, b)
            if result is not None:
                return m.const(not m.truth(result))
        if result is not None:
            return result
        if name in ("eq", "ne"):
            return m.const(equal(m, a, b) == (name == "eq"))
        return _ordered(m, fn, symbol, a, b)

    return body


def equal(m: Machine, a: Tracker, b: Tracker) -> bool:
    """`a == b` for values without an __eq__ in Python."""
    if a is b:
        return True
    left, right = payload_of(a), payload_of(b)
    one, two = _as_set(m, left), _as_set(m, right)
    if one is not None and two is not None:
        return one.entries.keys() == two.entries.keys()
    if isinstance(left, DictTracker) and isinstance(right, DictTracker):
        if left.length() != right.length() or left.entries.keys() != right.entries.keys():
            return False
        pairs = [(left.get_token(m, token), right.get_token(m, token)) for token in list(left.entries)]
        return all(x is y or m.truth(m.apply(operator.eq, x, y)) for x, y in pairs if x is not None and y is not None)
    if (
        issubclass(left.python_type(), tuple)
        and issubclass(right.python_type(), tuple)
        or (isinstance(left, ListTracker) and isinstance(right, ListTracker))
    ):
        items, others = iterate(m, left), iterate(m, right)
        return len(items) == len(others) and all(x is y or m.truth(m.apply(operator.eq, x, y)) for x, y in zip(items, others, strict=True))
    folded = fold(m, operator.eq, (a, b), {})
    if folded is not NotImplemented:
        return bool(folded.try_const().value)
    if isinstance(a, IdTracker) or isinstance(b, IdTracker):
        return isinstance(a, IdTracker) and isinstance(b, IdTracker) and same(m, a.of, b.of)
    if isinstance(a, BoundMethodTracker) and isinstance(b, BoundMethodTracker):
        return same(m, a.fn, b.fn) and same(m, a.owner, b.owner)
    for v in (a, b):
        if isinstance(v, OpaqueTracker) and type(v.obj).__eq__ is not object.__eq__:  # type: ignore[comparison-overlap]
            m.graph_break("B104", operation="==", value=v.show())
    return same(m, a, b)


def _ordered(m: Machine, fn: Callable[..., Any], symbol: str, a: Tracker, b: Tracker) -> Any:
    left, right = _as_set(m, a), _as_set(m, b)
    if left is not None and right is not None:
        return m.const(fn(left.entries.keys(), right.entries.keys()))
    both = isinstance(a, ListTracker) and isinstance(b, ListTracker)
    if both or (issubclass(a.python_type(), tuple) and issubclass(b.python_type(), tuple)):
        items, others = iterate(m, a), iterate(m, b)
        for x, y in zip(items, others, strict=False):
            if x is not y and not m.truth(m.apply(operator.eq, x, y)):
                return m.apply(fn, x, y)
        return m.const(fn(len(items), len(others)))
    folded = fold(m, fn, (a, b), {})
    if folded is not NotImplemented:
        return folded
    if isinstance(a, OpaqueTracker) or isinstance(b, OpaqueTracker):
        m.graph_break("B104", operation=symbol, value=a.show())
    m.raise_exception(
        TypeError(f"'{symbol}' not supported between instances of '{a.python_type().__name__}' and '{b.python_type().__name__}'")
    )


for _name, (_fn, _ifn, _symbol) in ARITHMETIC.items():
    rule(_fn, Tracker, Tracker)(_binary(_name, _fn, _symbol))
    rule(_ifn, Tracker, Tracker)(_inplace(_name, _fn, _ifn))
for _name, (_fn, _swapped, _symbol) in COMPARISONS.items():
    rule(_fn, Tracker, Tracker)(_comparison(_name, _fn, _swapped, _symbol))


# -- unary


def _unary(fn: Callable[..., Any], dunder: str, symbol: str) -> Callable[..., Any]:
    def body(m: Machine, v: Tracker) -> Any:
        if isinstance(v, TensorTracker):
            return m.node(torch.abs if fn is abs else fn, [v], {})
        folded = fold(m, fn, (v,), {})
        if folded is not NotImplemented:
            return folded
        method = find_special(m, v, dunder) if isinstance(v, ObjectTracker) else None
        if method is None:
            m.raise_exception(TypeError(f"bad operand type for {symbol}: '{v.python_type().__name__}'"))
        return m.call(method, [], {})

    return body


rule(operator.neg, Tracker)(_unary(operator.neg, "__neg__", "unary -"))
rule(operator.pos, Tracker)(_unary(operator.pos, "__pos__", "unary +"))
rule(operator.invert, Tracker)(_unary(operator.invert, "__invert__", "unary ~"))
rule((operator.abs, abs), Tracker)(_unary(abs, "__abs__", "abs()"))


# -- identity and truth


def same(m: Machine, a: Tracker, b: Tracker) -> bool:
    """`a is b`, guarded where it depends on what the program was given."""
    if a is b:
        return True
    if isinstance(a, ConstTracker) or isinstance(b, ConstTracker):
        if isinstance(a, ConstTracker) and isinstance(b, ConstTracker):
            x, y = a.read(), b.read()
            return x is y or (type(x) is type(y) and type(x) in (int, str, bytes) and x == y)
        for v in (a, b):
            v.python_type()
        return False
    if isinstance(a, (FunctionTracker, BuiltinTracker, ClassTracker)) and a.obj is not MISSING:
        return a.obj is b.obj
    if a.obj is not MISSING and a.obj is b.obj:
        return True
    if a.source is not None and b.source is not None and not isinstance(a, ModuleTracker):
        if not (isinstance(a.source, Held) and isinstance(b.source, Held)):
            m.guard(Kind.DISTINCT, a.source, (b.source,))
    return False


@rule(operator.is_, Tracker, Tracker)
def is_(m: Machine, a: Tracker, b: Tracker) -> Tracker:
    return m.const(same(m, a, b))


@rule(operator.is_not, Tracker, Tracker)
def is_not(m: Machine, a: Tracker, b: Tracker) -> Tracker:
    return m.const(not same(m, a, b))


def try_truth(m: Machine, v: Tracker) -> bool | None:
    """Truth value; None when it depends on a tensor's data."""
    if isinstance(v, ConstTracker) and (known := decides(m, v)) is not None:
        return known
    const = v.try_const()
    if const is not None:
        return bool(const.value)
    if isinstance(v, TensorTracker):
        value = m.known(v)
        return None if value is None else bool(value)
    target = payload_of(v)
    if isinstance(v, ObjectTracker):
        for name in ("__bool__", "__len__"):
            if isinstance(find_in_type(m, v.cls, name), types.FunctionType):
                method = find_special(m, v, name)
                assert method is not None
                return try_truth(m, m.call(method, [], {}))
    if isinstance(target, (SequenceTracker, DictTracker, SetTracker)):
        return target.length() > 0
    if isinstance(target, DictViewTracker):
        return target.of.length() > 0
    cls = v.python_type()
    if hasattr(cls, "__bool__") or hasattr(cls, "__len__"):
        m.graph_break("B104", operation="truth value", value=v.show())
    return True


@rule((bool, operator.truth), Tracker)
def bool_(m: Machine, v: Tracker) -> Any:
    return m.const(_truth(m, v))


@rule(bool)
def bool_empty(m: Machine) -> Tracker:
    return m.const(False)


@rule(operator.not_, Tracker)
def not_(m: Machine, v: Tracker) -> Any:
    return m.const(not _truth(m, v))


def _truth(m: Machine, v: Tracker) -> bool:
    known = try_truth(m, v)
    if known is None:
        m.graph_break("B102", operation="bool()")
    return known


# -- membership


@rule(operator.contains, Tracker, Tracker)
def contains(m: Machine, container: Tracker, item: Tracker) -> Any:
    if isinstance(container, ObjectTracker) and isinstance(find_in_type(m, container.cls, "__contains__"), types.FunctionType):
        method = find_special(m, container, "__contains__")
        assert method is not None
        return m.const(m.truth(m.call(method, [item], {})))
    target = payload_of(container)
    if isinstance(target, DictTracker):
        return m.const(target.has(m, item))
    if isinstance(target, SetTracker):
        return m.const(target.has(m, item))
    if isinstance(target, DictViewTracker) and target.kind == "keys":
        return m.const(target.of.has(m, item))
    if isinstance(target, ConstTracker):
        folded = fold(m, operator.contains, (target, item), {})
        if folded is not NotImplemented:
            return folded
        if isinstance(target.value, frozenset):
            return m.const(False)
    if isinstance(target, TensorTracker):
        m.graph_break("B102", operation="in")
    if isinstance(target, ClassTracker) and isinstance(find_in_type(m, type(target.obj), "__contains__"), types.FunctionType):
        const = item.try_const()
        if const is not None and not isinstance(item, TensorTracker):
            return m.const(const.value in target.obj)
    if isinstance(target, OpaqueTracker):
        m.graph_break("B104", operation="in", value=target.show())
    for candidate in iterate(m, target):
        if same(m, candidate, item) or m.truth(m.apply(operator.eq, candidate, item)):
            return m.const(True)
    return m.const(False)
