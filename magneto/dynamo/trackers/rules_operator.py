"""Rows of the operators: arithmetic, comparison, truth, membership. Identity: rules_identity.py."""

from __future__ import annotations

import collections
import enum
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto import _C
from magneto.dynamo.trackers.array import ArrayTracker
from magneto.dynamo.trackers.attributes import find_special, user_method
from magneto.dynamo.trackers.base import MISSING, Raised, Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_bool, is_numpy_scalar
from magneto.dynamo.trackers.container import DequeTracker, ListTracker, SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import fold, pure, rule
from magneto.dynamo.trackers.function import BoundMethodTracker, BuiltinTracker
from magneto.dynamo.trackers.host import HostNumber
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.iterator import each, iterate
from magneto.dynamo.trackers.klass import ClassTracker, find_in_type, held
from magneto.dynamo.trackers.lifted import decides
from magneto.dynamo.trackers.mapping import DictTracker, DictViewTracker, SetTracker, equal_keys
from magneto.dynamo.trackers.object import IdTracker, ObjectTracker, OpaqueTracker, payload_of
from magneto.dynamo.trackers.plain import plain
from magneto.dynamo.trackers.reference import RefTracker
from magneto.dynamo.trackers.rules_identity import same
from magneto.dynamo.trackers.size import SizeTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import lower

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "add": (operator.add, operator.iadd, "+"), "sub": (operator.sub, operator.isub, "-"), "mul": (operator.mul, operator.imul, "*"),
    "matmul": (operator.matmul, operator.imatmul, "@"), "truediv": (operator.truediv, operator.itruediv, "/"),
    "floordiv": (operator.floordiv, operator.ifloordiv, "//"), "mod": (operator.mod, operator.imod, "%"),
    "pow": (operator.pow, operator.ipow, "** or pow()"), "lshift": (operator.lshift, operator.ilshift, "<<"),
    "rshift": (operator.rshift, operator.irshift, ">>"), "and": (operator.and_, operator.iand, "&"),
    "or": (operator.or_, operator.ior, "|"), "xor": (operator.xor, operator.ixor, "^"),
}  # fmt: skip
COMPARISONS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "lt": (operator.lt, "gt", "<"), "le": (operator.le, "ge", "<="), "gt": (operator.gt, "lt", ">"), "ge": (operator.ge, "le", ">="),
    "eq": (operator.eq, "eq", "=="), "ne": (operator.ne, "ne", "!="),
}  # fmt: skip
_NUMBERS = (int, float, bool, complex)

pure(
    fn
    for name, fn in vars(operator).items()
    if callable(fn)
    and not name.startswith("_")
    and name not in ("setitem", "delitem", "itemgetter", "concat", "iconcat", "countOf", "indexOf", "call")
)
pure(getattr(operator, f"__{name}__", None) for name in ("index", "not_"))


def tensor_operand(v: Tracker) -> bool:
    """Whether torch takes the value beside a tensor."""
    if isinstance(v, (TensorTracker, SizeTracker)):
        return True
    return isinstance(v, ConstTracker) and (isinstance(v.read(), _NUMBERS) or (is_numpy_scalar(v.value) and hasattr(v.value, "item")))


def _lowered(m: Machine, v: Tracker) -> Any:
    return float(v.value) if isinstance(v, ConstTracker) and is_numpy_bool(v.read()) else lower(m, v)


def ask(m: Machine, v: Tracker, name: str, *args: Tracker) -> Tracker | None:
    """What the special method gives; None for NotImplemented."""
    if user_method(m, v, name) is None:
        m.raise_exception(TypeError("'NoneType' object is not callable"))
    method = find_special(m, v, name)
    assert method is not None
    result = m.call(method, args, {})
    return None if isinstance(result, ConstTracker) and result.value is NotImplemented else result


def _dunder(m: Machine, name: str, a: Tracker, b: Tracker) -> Tracker | None:
    """The operation by a special method of the program, asked as CPython asks: the right operand first where its type is a subclass that overrides."""
    left, right = user_method(m, a, f"__{name}__"), user_method(m, b, f"__r{name}__")
    if left is MISSING and right is MISSING:
        return None
    one, two = a.python_type(), b.python_type()
    if one is two:
        right = MISSING
    elif right is not MISSING and one in two.__mro__ and right is not find_in_type(m, one, f"__r{name}__"):
        result = ask(m, b, f"__r{name}__", a)
        if result is not None:
            return result
        right = MISSING
    result = ask(m, a, f"__{name}__", b) if left is not MISSING else None
    return ask(m, b, f"__r{name}__", a) if result is None and right is not MISSING else result


def _binary(name: str, fn: Callable[..., Any], symbol: str) -> Callable[..., Any]:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        if isinstance(a, TensorTracker) or isinstance(b, TensorTracker):
            if not (name == "mod" and isinstance(a, ConstTracker) and type(a.value) in (str, bytes)):
                return _with_tensor(m, name, fn, symbol, a, b)
        if isinstance(a, ConstTracker) and isinstance(b, ConstTracker):
            return fold(m, fn, (a, b), {})
        result = _dunder(m, name, a, b)
        if result is not None:
            return result
        left, right = payload_of(a), payload_of(b)
        if name == "mod" and isinstance(left, ConstTracker) and type(left.value) in (str, bytes):
            return m.apply(type(left.read()).__mod__, left, b)
        if (
            name == "or"
            and isinstance(left, DictTracker)
            and right is not b
            and isinstance(right, DictTracker)
            and left.cls is right.cls is dict
        ):
            made = DictTracker.of(m, left.pairs(m))  # the other may answer for its keys by itself
            m.apply(dict.update, made, b)
            return made
        ordered = next((v for v, one in ((a, left), (b, right)) if getattr(one, "cls", None) is collections.OrderedDict), None)
        if name == "or" and ordered not in (None, left, right) and isinstance(left, DictTracker) and isinstance(right, DictTracker):
            union = m.call(held(m, ordered.python_type(), "class"), [a], {})  # a class derived from OrderedDict makes its own
            m.apply(collections.OrderedDict.update, union, b)
            return union
        result = _containers(m, name, left, right)
        if result is not NotImplemented:
            return result
        folded = fold(m, fn, (left, right), {})
        if folded is not NotImplemented:
            return folded
        return _refuse(m, fn, symbol, left, right)

    return body


def _with_tensor(m: Machine, name: str, fn: Callable[..., Any], symbol: str, a: Tracker, b: Tracker) -> Any:
    """Tensors take numbers; other operands are asked themselves."""
    left = user_method(m, a, f"__{name}__")
    if left is not MISSING and (result := ask(m, a, f"__{name}__", b)) is not None:
        return result
    one, two = payload_of(a), payload_of(b)
    if tensor_operand(one) and tensor_operand(two) and name != "divmod":
        return m.node(fn, [_lowered(m, one), _lowered(m, two)], {})
    if user_method(m, b, f"__r{name}__") is not MISSING and (result := ask(m, b, f"__r{name}__", a)) is not None:
        return result
    if isinstance(a, SequenceTracker) and name == "mul":
        m.graph_break("B102", operation="repetition of a sequence by a tensor")
    m.graph_break("B104", operation=symbol, value=(b if isinstance(a, TensorTracker) else a).show())


def _stand_in(m: Machine, v: Tracker) -> Any:
    """An object that CPython refuses in the same words; MISSING for one that only it knows."""
    known = plain(m, v)
    if known is not None:
        return known.value
    if isinstance(v, OpaqueTracker):
        return MISSING
    if isinstance(v, ClassTracker):
        return v.obj
    cls = v.python_type()
    if isinstance(v, (SequenceTracker, DictTracker, SetTracker)):
        return cls() if cls in (list, tuple, dict, set, frozenset, collections.deque) else MISSING
    if not cls.__flags__ & 1 << 9:  # a class of C: only it knows what it does (`list[int] | str`)
        return MISSING
    return type(cls.__name__, (), {})()


def _refuse(m: Machine, fn: Callable[..., Any], symbol: str, a: Tracker, b: Tracker) -> Tracker:
    """The TypeError of an operation that no operand knows; or what two classes make."""
    left, right = _stand_in(m, a), _stand_in(m, b)
    if left is not MISSING and right is not MISSING:
        try:
            made = fn(left, right)
            if isinstance(made, types.UnionType):
                return m.const(made)
        except TypeError as error:
            m.raise_exception(error)
        except Exception:  # of the stand-ins' values
            pass
    m.graph_break("B104", operation=symbol, value=(a if left is MISSING else b).show())


def _containers(m: Machine, name: str, a: Tracker, b: Tracker) -> Any:
    if name == "mul" and isinstance(a, (TupleTracker, ConstTracker)) and a.python_type() is tuple:
        once = b.try_const()
        if once is not None and type(once.value) is int and once.value == 1:
            return a  # the same tuple
    if isinstance(a, ConstTracker) and type(a.value) in (tuple, torch.Size):
        a = TupleTracker(iterate(m, a))
    if isinstance(b, ConstTracker) and type(b.value) in (tuple, torch.Size):
        b = TupleTracker(iterate(m, b))
    if name == "add" and isinstance(a, SequenceTracker) and isinstance(b, SequenceTracker):
        kinds = {a.cls, b.cls}
        if isinstance(a, ListTracker) and isinstance(b, ListTracker):
            return ListTracker([*a.items(m), *b.items(m)])
        if isinstance(a, DequeTracker) and isinstance(b, DequeTracker):
            return m.apply(collections.deque, ListTracker([*a.items(m), *b.items(m)]), m.const(a.maxlen))
        if isinstance(a, TupleTracker) and isinstance(b, TupleTracker):
            joined = [*a.items(m), *b.items(m)]
            if torch.Size not in kinds or not kinds <= {tuple, torch.Size}:
                return TupleTracker(joined)
            if not all(issubclass(item.python_type(), int) for item in joined):
                m.graph_break("B104", operation=name, value="torch.Size and a tuple of what is no int")  # torch converts, or raises
            return TupleTracker(joined, torch.Size)
    if name == "mul":
        sequence, times = (a, b) if isinstance(a, SequenceTracker) else (b, a)
        const = times.try_const()
        if isinstance(sequence, SequenceTracker) and const is not None and isinstance(const.value, int):
            items = sequence.items(m) * const.value
            if isinstance(sequence, DequeTracker):
                return m.apply(collections.deque, ListTracker(items), m.const(sequence.maxlen))
            if isinstance(sequence, ListTracker):
                return ListTracker(items)
            return TupleTracker(items, torch.Size if sequence.cls is torch.Size and type(torch.Size(()) * 2) is torch.Size else tuple)
    left, right = _as_set(m, a), _as_set(m, b)
    if left is not None and right is not None and name in ("or", "and", "sub", "xor"):
        return set_algebra(name, left, right)
    if any(isinstance(v, DictTracker) and v.cls is types.MappingProxyType for v in (a, b)):
        m.graph_break("B104", operation=name, value="mappingproxy")
    if name == "or" and isinstance(a, DictTracker) and isinstance(b, DictTracker):
        first = b if a.cls is dict else a  # a subclass on the right makes the result
        merged = DictTracker.of(m, a.pairs(m), first.cls)
        merged.default_factory = first.default_factory
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
    made = SetTracker(entries, a.cls)
    made.real = a.cls(_ALGEBRA[name](a.real, b.real)) if a.real is not None and b.real is not None else None
    return made


_ALGEBRA: dict[str, Callable[..., Any]] = {"or": operator.or_, "and": operator.and_, "sub": operator.sub, "xor": operator.xor}
_SET_UPDATES = {"or": set.update, "and": set.intersection_update, "sub": set.difference_update, "xor": set.symmetric_difference_update}


def _inplace(name: str, fn: Callable[..., Any], ifn: Callable[..., Any], symbol: str) -> Callable[..., Any]:
    refused = f"unsupported operand type(s) for {symbol}: "

    def plainly(m: Machine, a: Tracker, b: Tracker) -> Tracker:
        """`a + b` in the place of `a += b`; where no operand knows the operation, CPython names the one that was written."""
        count = m.count  # type: ignore[attr-defined]
        try:
            return m.apply(fn, a, b)
        except Raised as raised:
            text = str(raised.exc)
            if type(raised.exc) is not TypeError or not text.startswith(refused) or getattr(raised.value, "born", None) != count:
                raise
        m.raise_exception(TypeError(f"unsupported operand type(s) for {symbol.partition(' ')[0]}=: {text.removeprefix(refused)}"))

    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        if isinstance(a, TensorTracker):
            if not tensor_operand(b):
                return plainly(m, a, b)
            result = m.node(ifn, [a, lower(m, b)], {})
            if isinstance(result, TensorTracker) and result is not a:
                a.meta = result.meta
            return a
        if user_method(m, a, f"__i{name}__") is not MISSING:
            result = ask(m, a, f"__i{name}__", b)  # type: ignore[assignment]
            return result if result is not None else plainly(m, a, b)
        target = payload_of(a)
        method: Any = None
        if isinstance(target, (ListTracker, DequeTracker)) and name == "add":
            method = target.cls.extend  # type: ignore[attr-defined]
        elif isinstance(target, (ListTracker, DequeTracker)) and name == "mul":
            return _repeat(m, a, target, b)
        elif isinstance(target, DictTracker) and name == "or":
            method = dict.update
        elif isinstance(target, SetTracker) and target.cls is set and name in _SET_UPDATES and _as_set(m, payload_of(b)) is not None:
            method = _SET_UPDATES[name]
        if method is None:
            return plainly(m, a, b)
        m.apply(method, a, b)
        return a

    return body


def _repeat(m: Machine, a: Tracker, target: ListTracker | DequeTracker, times: Tracker) -> Tracker:
    """`a *= n` of a list or a deque."""
    entries = list(m.apply(operator.mul, target, times).entries)  # type: ignore[attr-defined]
    if isinstance(target, DequeTracker):
        real = collections.deque(range(len(target.entries)), target.maxlen)
        steps = iter(real)
        real *= times.try_const().value  # type: ignore[union-attr]
        try:
            next(steps, None)
        except RuntimeError:  # CPython counts it as a change, which iterators notice: not `*= 1`, nor of a full one
            target.log(m, "__imul__", times)
        target.entries = entries
        return a
    target.entries = entries
    if a.source is not None:
        m.effect("list.__imul__({0}, {1})", a, times)
    return a


def _comparison(name: str, fn: Callable[..., Any], swapped: str, symbol: str) -> Callable[..., Any]:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        if isinstance(a, ConstTracker) and isinstance(b, ConstTracker):
            return fold(m, fn, (a, b), {})
        one, two = payload_of(a), payload_of(b)
        if (isinstance(a, TensorTracker) or isinstance(b, TensorTracker)) and tensor_operand(one) and tensor_operand(two):
            return m.node(fn, [_lowered(m, one), _lowered(m, two)], {})
        result = _compared_by_program(m, name, swapped, a, b)
        if result is not None:
            return result
        if isinstance(a, TensorTracker) or isinstance(b, TensorTracker):
            if name in ("eq", "ne"):
                return m.const(name == "ne")
            m.graph_break("B104", operation=symbol, value=(b if isinstance(a, TensorTracker) else a).show())
        if name in ("eq", "ne"):
            return m.const(equal(m, a, b) == (name == "eq"))
        return _ordered(m, fn, symbol, one, two)

    return body


def _compared_by_program(m: Machine, name: str, swapped: str, a: Tracker, b: Tracker) -> Tracker | None:
    """The comparison by a method of the program; a right operand of a subclass is asked first."""
    if not isinstance(a, (ObjectTracker, ClassTracker)) and not isinstance(b, (ObjectTracker, ClassTracker)):
        return None
    asked = [(a, name, b), (b, swapped, a)]
    one, two = a.python_type(), b.python_type()
    if one is not two and one in two.__mro__:
        asked.reverse()
    for v, method, other in asked:
        if user_method(m, v, f"__{method}__") is not MISSING:
            result = ask(m, v, f"__{method}__", other)
            if result is not None:
                return result
        elif name == "ne" and v.python_type().__ne__ is object.__ne__ and user_method(m, v, "__eq__") is not MISSING:  # type: ignore[comparison-overlap]
            result = ask(m, v, "__eq__", other)
            if result is not None:
                return m.const(not m.truth(result))
    return None


def equal(m: Machine, a: Tracker, b: Tracker) -> bool:
    """`a == b` for values without an __eq__ in Python."""
    if a is b:
        return True
    left, right = payload_of(a), payload_of(b)
    one, two = _as_set(m, left), _as_set(m, right)
    if one is not None and two is not None:
        return one.entries.keys() == two.entries.keys()
    if isinstance(left, DictTracker) and isinstance(right, DictTracker):
        if left.length() != right.length():
            return False
        if left.asks_program() or right.asks_program():
            m.graph_break("B104", operation="== by methods of the program", value=left.show())
        if left.entries.keys() != right.entries.keys():
            return False
        if left.cls is right.cls is collections.OrderedDict and list(left.entries) != list(right.entries):
            return False
        pairs = [(left.get_token(m, token), right.get_token(m, token)) for token in list(left.entries)]
        return all(x is y or equal_keys(m, x, y) for x, y in pairs if x is not None and y is not None)
    if (
        issubclass(left.python_type(), tuple)
        and issubclass(right.python_type(), tuple)
        or (isinstance(left, (ListTracker, DequeTracker)) and type(left) is type(right))
    ):
        items, others = iterate(m, left), iterate(m, right)
        return len(items) == len(others) and all(x is y or equal_keys(m, x, y) for x, y in zip(items, others, strict=True))
    folded = fold(m, operator.eq, (left, right), {})
    if folded is not NotImplemented:
        return bool(folded.try_const().value)
    if isinstance(a, IdTracker) or isinstance(b, IdTracker):
        for address, other in ((a, b), (b, a)):
            if isinstance(address, IdTracker) and address.of.source is not None and not isinstance(other, IdTracker):
                m.graph_break("B104", operation="comparison", value=address.show())  # a number that is kept from before
        return isinstance(a, IdTracker) and isinstance(b, IdTracker) and same(m, a.of, b.of)
    if isinstance(a, RefTracker) and isinstance(b, RefTracker):
        return m.truth(m.apply(operator.eq, a.referent, b.referent))
    if isinstance(a, BoundMethodTracker) and isinstance(b, BoundMethodTracker):
        return same(m, a.fn, b.fn) and same(m, a.owner, b.owner)
    if isinstance(a, BuiltinTracker) and isinstance(b, BuiltinTracker) and type(a.obj) is type(b.obj) is types.BuiltinFunctionType:
        return bool(a.obj == b.obj)
    kinds = {_kind(v.python_type()) for v in (left, right)}
    for v in (a, b):
        cls = v.python_type()
        plain = cls.__eq__ is object.__eq__  # type: ignore[comparison-overlap]
        asked = isinstance(v, ObjectTracker) and isinstance(find_in_type(m, cls, "__eq__"), types.FunctionType)  # and declined
        if not (plain or asked) and not (_kind(cls) in _KINDS and len(kinds) > 1):
            m.graph_break("B104", operation="==", value=v.show())
    return same(m, a, b)


_ONE_KIND = {frozenset: set, bool: int, float: int, complex: int}
_KINDS = {list, tuple, dict, set, str, int, bytes, range, slice, type(None), types.MethodType, types.BuiltinFunctionType, *_ONE_KIND}
"""Builtin types whose == with a value of another kind says False, or asks the other."""


def _kind(cls: type) -> type:
    """The one whose == a class has."""
    base = next((base for base in cls.__mro__ if base in _KINDS and cls.__eq__ is base.__eq__), cls)
    return _ONE_KIND.get(base, base)


def _ordered(m: Machine, fn: Callable[..., Any], symbol: str, a: Tracker, b: Tracker) -> Any:
    left, right = _as_set(m, a), _as_set(m, b)
    if left is not None and right is not None:
        return m.const(fn(left.entries.keys(), right.entries.keys()))
    both = isinstance(a, SequenceTracker) and isinstance(b, SequenceTracker) and a.cls is b.cls
    if both or (issubclass(a.python_type(), tuple) and issubclass(b.python_type(), tuple)):
        items, others = iterate(m, a), iterate(m, b)
        for x, y in zip(items, others, strict=False):
            if x is not y and not equal_keys(m, x, y):
                return m.apply(fn, x, y)
        return m.const(fn(len(items), len(others)))
    folded = fold(m, fn, (a, b), {})
    if folded is not NotImplemented:
        return folded
    if isinstance(a, OpaqueTracker) or isinstance(b, OpaqueTracker):
        m.graph_break("B104", operation=symbol, value=a.show())
    m.raise_exception(
        TypeError(f"'{symbol}' not supported between instances of '{_C.type_name(a.python_type())}' and '{_C.type_name(b.python_type())}'")
    )


for _name, (_fn, _ifn, _symbol) in ARITHMETIC.items():
    rule(_fn, Tracker, Tracker)(_binary(_name, _fn, _symbol))
    rule(_ifn, Tracker, Tracker)(_inplace(_name, _fn, _ifn, _symbol))
rule(divmod, Tracker, Tracker)(_binary("divmod", divmod, "divmod()"))
for _name, (_fn, _swapped, _symbol) in COMPARISONS.items():
    rule(_fn, Tracker, Tracker)(_comparison(_name, _fn, _swapped, _symbol))


# -- unary


def _unary(fn: Callable[..., Any], dunder: str, symbol: str) -> Callable[..., Any]:
    def body(m: Machine, v: Tracker) -> Any:
        if isinstance(v, TensorTracker):
            return m.node(torch.abs if fn is abs else fn, [v], {})
        if user_method(m, v, dunder) is not MISSING:
            method = find_special(m, v, dunder)
            assert method is not None
            return m.call(method, [], {})
        folded = fold(m, fn, (payload_of(v),), {})
        if folded is not NotImplemented:
            return folded
        if isinstance(v, OpaqueTracker):
            m.graph_break("B104", operation=symbol, value=v.show())
        m.raise_exception(TypeError(f"bad operand type for {symbol}: '{_C.type_name(v.python_type())}'"))

    return body


rule(operator.neg, Tracker)(_unary(operator.neg, "__neg__", "unary -"))
rule(operator.pos, Tracker)(_unary(operator.pos, "__pos__", "unary +"))
rule(operator.invert, Tracker)(_unary(operator.invert, "__invert__", "unary ~"))
rule((operator.abs, abs), Tracker)(_unary(abs, "__abs__", "abs()"))


# -- truth


def try_truth(m: Machine, v: Tracker) -> bool | None:
    """Truth value; None when it depends on a tensor's data."""
    if isinstance(v, ConstTracker) and (known := decides(m, v)) is not None:
        return known
    const = v.try_const()
    if const is not None:
        return bool(const.value)
    if isinstance(v, TensorTracker):
        value = m.known(v)
        return None if value is None or value.numel() != 1 else bool(value)
    if isinstance(v, (HostNumber, SizeTracker)) or (isinstance(v, ArrayTracker) and v.number):
        return None
    if isinstance(v, ArrayTracker) and v.real is not None:
        try:
            return bool(v.real)
        except ValueError as error:
            m.raise_exception(error)
    if isinstance(v, ItemTracker):
        return None
    target = payload_of(v)
    for name in ("__bool__", "__len__"):
        if user_method(m, v, name) is not MISSING:
            if name == "__len__":
                return try_truth(m, m.apply(len, v))
            method = find_special(m, v, name)
            assert method is not None
            result = m.call(method, [], {})
            if not issubclass(result.python_type(), bool):
                m.raise_exception(TypeError(f"__bool__ should return bool, returned {_C.type_name(result.python_type())}"))
            return try_truth(m, result)
    if isinstance(target, ConstTracker):
        return bool(target.read())
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
        known = m.decided(v)
    if known is None and isinstance(v, ItemTracker):
        v.needed(m)
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
    if isinstance(target, TensorTracker) or (isinstance(target, ArrayTracker) and not target.number and not target.shape()):
        m.graph_break("B102", operation="in")
    if isinstance(target, ClassTracker) and isinstance(asked := find_in_type(m, type(target.obj), "__contains__"), types.FunctionType):
        const = item.try_const()
        if const is not None and not isinstance(item, TensorTracker) and asked is enum.EnumType.__contains__:
            return m.const(const.value in target.obj)
        return m.const(m.truth(m.call(held(m, asked, "__contains__"), [target, item], {})))
    if isinstance(target, OpaqueTracker):
        m.graph_break("B104", operation="in", value=target.show())
    if not any(hasattr(container.python_type(), name) for name in ("__iter__", "__getitem__", "__contains__")):
        m.raise_exception(TypeError(f"argument of type '{_C.type_name(container.python_type())}' is not iterable"))
    for candidate in each(m, target):
        if same(m, candidate, item) or equal_keys(m, candidate, item):
            return m.const(True)
    return m.const(False)
