"""Numbers that change from call to call become inputs of the graph instead of constants of it.

The first capture takes a number as a constant. When a later call comes with another value, its source is *changing* (`Machine.changing`), and the next capture
gives the number to the graph as a tensor of no dimensions, where that means exactly the same: as the other operand of an elementwise operation on a tensor that
has dimensions and whose kind of type is not below the number's. What a changing number decides (`if step % 10 == 0`) is guarded as the condition itself.
"""

from __future__ import annotations

import collections
import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import prefer, rule
from magneto.dynamo.trackers.host import HostNumber, is_numpy
from magneto.dynamo.trackers.lazy_number import changing, guard_types, leaves, text_of
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.object import payload_of
from magneto.dynamo.trackers.tensor import MadeInput, TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_DTYPES = {int: torch.int64, float: torch.float64}
_LIKE_NUMBERS = (torch.float32, torch.float64, torch.int64)
"""Types in which torch computes with a number beside a tensor of no dimensions as with such a tensor."""
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FUNCTIONS = (*"add sub subtract mul multiply div divide true_divide floor_divide remainder fmod".split(), *_COMPARISONS)
_METHODS = (*_FUNCTIONS, "add_", "sub_", "mul_", "div_", "floor_divide_", "remainder_", "fmod_")


def as_tensor(number: float) -> torch.Tensor:
    """What the graph is given for a number: region code calls this."""
    if is_numpy(number):
        return torch.from_numpy(number.__array__())  # type: ignore[attr-defined]
    return torch.scalar_tensor(number, dtype=_DTYPES[type(number)], device="cpu")


class NumberInput(MadeInput):
    """A tensor of no dimensions that the region makes from `number` at each call."""

    __slots__ = ("number",)

    def __init__(self, number: ConstTracker | HostNumber) -> None:
        super().__init__(as_tensor(_value(number)), "number" if number.source is None else "")
        self.number = number

    def graph_input(self, em: Emitter) -> str:
        return f"as_tensor({em.value(self.number)})"


def number_key(number: ConstTracker | HostNumber) -> Any:
    """Equal for numbers that are the same expression of one source."""
    if number.source is not None or not isinstance(number, ConstTracker):
        return number.source or id(number)
    sources = {leaf.source for leaf in leaves(number)}
    return (*sources, text_of(number, "{}")) if len(sources) == 1 else id(number)


def _value(number: ConstTracker | HostNumber) -> Any:
    """The number, or one like it."""
    return number.example if isinstance(number, HostNumber) else number.value


def _fits(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def _wide(m: Machine, tensor: TensorTracker, number: ConstTracker | HostNumber) -> TensorTracker:
    """`tensor` as it is computed with beside `number`: integers beside a float that changes are floats."""
    value, dtype = _value(number), tensor.meta.dtype
    if dtype.is_floating_point or dtype.is_complex or type(value) is not float or not tensor.meta.ndim:
        return tensor
    if not (isinstance(number, HostNumber) or changing(m, number)):
        return tensor
    return m.node("to", [tensor, torch.get_default_dtype()], {}, method=True)  # type: ignore[return-value]


def lift(m: Machine, tensor: TensorTracker, number: ConstTracker | HostNumber) -> TensorTracker | None:
    """`number` as an operand beside `tensor`; None where it stays a constant."""
    if isinstance(number, HostNumber) and is_numpy(number.example):  # torch takes it for the number it holds
        number = HostNumber(number.example.item(), "{}.item()", [number])
    value, dtype = _value(number), tensor.meta.dtype
    if not _fits(value) or not (isinstance(number, HostNumber) or changing(m, number)):
        return None
    if type(value) is float and not (dtype.is_floating_point or dtype.is_complex):
        return None
    if not tensor.meta.ndim and dtype not in _LIKE_NUMBERS:
        return None
    if isinstance(number, ConstTracker):
        guard_types(m, number)
    lifted = m.number_input(number)
    if tensor.meta.ndim or lifted.meta.dtype is dtype:
        return lifted
    found = m.node("to", [lifted, dtype], {}, method=True)
    return found if isinstance(found, TensorTracker) else None


def _elementwise(fn: Any, in_place: bool = False) -> None:
    def tensor_number(m: Machine, tensor: TensorTracker, number: ConstTracker | HostNumber, /, **kwargs: Any) -> Any:
        if not kwargs.keys() <= {"rounding_mode"}:
            return NotImplemented
        tensor = tensor if in_place else _wide(m, tensor, number)
        lifted = lift(m, tensor, number)
        return NotImplemented if lifted is None else m.apply(fn, tensor, lifted, **kwargs)

    rule(fn, TensorTracker, ConstTracker)(tensor_number)
    rule(fn, TensorTracker, HostNumber)(tensor_number)


def _reflected(fn: Any) -> None:
    def number_tensor(m: Machine, number: ConstTracker | HostNumber, tensor: TensorTracker) -> Any:
        tensor = _wide(m, tensor, number)
        lifted = lift(m, tensor, number)
        if lifted is None:
            return NotImplemented
        if fn is operator.truediv:  # as Tensor.__rtruediv__ computes it, to the last bit
            return m.apply(operator.mul, m.apply(torch.Tensor.reciprocal, tensor), lifted)
        return m.apply(fn, lifted, tensor)

    rule(fn, ConstTracker, TensorTracker)(number_tensor)
    rule(fn, HostNumber, TensorTracker)(number_tensor)


for _name in (*_ARITHMETIC, *_COMPARISONS):
    _elementwise(getattr(operator, _name))
    _reflected(getattr(operator, _name))
for _name in _ARITHMETIC:
    _elementwise(getattr(operator, f"i{_name}"), in_place=True)
for _name in _FUNCTIONS:
    _elementwise(getattr(torch, _name))
for _name in _METHODS:
    _elementwise(getattr(torch.Tensor, _name), in_place=_name.endswith("_"))


# -- torch functions that take a number elsewhere


def _third(fn: Any) -> None:
    def chosen(m: Machine, first: TensorTracker, second: TensorTracker, number: ConstTracker | HostNumber, /, **kwargs: Any) -> Any:
        lifted = None if kwargs else lift(m, second if fn is torch.where else first, number)
        return NotImplemented if lifted is None else m.apply(fn, first, second, lifted)

    rule(fn, TensorTracker, TensorTracker, ConstTracker)(chosen)
    rule(fn, TensorTracker, TensorTracker, HostNumber)(chosen)


for _fn in (torch.where, torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_):
    _third(_fn)


def tensor(m: Machine, number: ConstTracker | HostNumber, /, **kwargs: Any) -> Any:
    """A changing number as a tensor of its own."""
    value = _value(number)
    if not set(kwargs) <= {"dtype", "device"} or not _fits(value) or not (isinstance(number, HostNumber) or changing(m, number)):
        return NotImplemented
    dtype = torch.get_default_dtype() if type(value) is float else torch.int64
    if isinstance(number, ConstTracker):
        guard_types(m, number)
    made = m.node("to", [m.number_input(number)], {"dtype": dtype, "copy": True}, method=True)
    return m.apply(torch.Tensor.to, made, **kwargs) if kwargs else made


rule(torch.tensor, ConstTracker)(tensor)
rule(torch.tensor, HostNumber)(tensor)


# -- what a changing number decides


def decide(m: Machine, number: ConstTracker, condition: str) -> bool:
    """`condition` (with {} for the number) holds at each call."""
    (leaf,) = {leaf.source: leaf for leaf in leaves(number)}.values()
    guard_types(m, number)
    m.guard(Kind.RELATION, leaf.source, condition.format(text_of(number, "{}")))
    return True


def may_decide(m: Machine, number: ConstTracker) -> bool:
    """Whether a number changes, alone."""
    known = type(number.value) in _DTYPES or is_numpy(number.value)
    return known and changing(m, number) and len({leaf.source for leaf in leaves(number)}) == 1


_SYMBOLS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def _compare(m: Machine, name: str, number: ConstTracker, bound: Any) -> Any:
    if type(bound) not in _DTYPES or not math.isfinite(bound):
        return NotImplemented
    result = getattr(operator, name)(number.value, bound)
    value = number.value
    if number.source is not None and type(value) is int and type(bound) is int and value != bound:
        high = value < bound  # the bound is above
        low_end = None if high else bound if name in ("lt", "ge") else bound + 1
        high_end = None if not high else bound if name in ("le", "gt") else bound - 1
        guard_types(m, number)
        m.guard(Kind.INT_RANGE, number.source, (low_end, high_end))
    else:
        decide(m, number, f"({{}} {_SYMBOLS[name]} {bound!r}) {'is' if type(result) is bool else '=='} {result}")
    return m.const(result)


def _comparison(name: str) -> None:
    @rule(getattr(operator, name), ConstTracker, ConstTracker)
    def compare(m: Machine, left: ConstTracker, right: ConstTracker) -> Any:
        for number, bound, symbol in ((left, right, name), (right, left, _SWAPPED[name])):
            if may_decide(m, number) and not changing(m, bound):
                return _compare(m, symbol, number, bound.read())
        if may_decide(m, left) and may_decide(m, right) and (source := leaves(left)[0].source) == leaves(right)[0].source:
            result = getattr(operator, name)(left.value, right.value)
            guard_types(m, left, right)
            m.guard(Kind.RELATION, source, f"({text_of(left, '{}')} {_SYMBOLS[name]} {text_of(right, '{}')}) is {result}")
            return m.const(result)
        return NotImplemented if (known := _together(m, name, left, right)) is None else m.const(known)


for _name in _COMPARISONS:
    _comparison(_name)


def _together(m: Machine, name: str, left: ConstTracker, right: ConstTracker) -> bool | None:
    """How numbers compare of which several change, guarded as that; None for others."""
    both = (left, right)
    if any(type(number.value) not in _DTYPES or not math.isfinite(number.value) for number in both) or not changing(m, *both):
        return None
    found = [leaf for number in both for leaf in leaves(number)]
    first, *others = sources = list(dict.fromkeys(leaf.source for leaf in found))
    if not others or len(sources) > _MOST_TOGETHER or any(type(leaf.value) not in _DTYPES for leaf in found):
        return None
    names = {source: f"{{{i}}}" for i, source in enumerate(sources)}
    result = bool(getattr(operator, name)(left.value, right.value))
    guard_types(m, *both)
    m.guard(Kind.TOGETHER, first, (f"({text_of(left, names)} {_SYMBOLS[name]} {text_of(right, names)}) is {result}", tuple(others)))
    return result


_MOST_TOGETHER = 8


def decides(m: Machine, number: ConstTracker) -> bool | None:
    """Truth of a changing number, guarded; None for other values."""
    if not may_decide(m, number):
        return _together(m, "ne", number, ConstTracker(0))
    return bool(_compare(m, "ne", number, 0).value)


@prefer(operator.contains, Tracker, ConstTracker)
def among_keys(m: Machine, container: Tracker, number: ConstTracker) -> Any:
    """Whether a changing whole number is a key of a small dictionary."""
    if type(number.value) is not int or container.python_type() not in _DICTIONARIES or not may_decide(m, number):
        return NotImplemented
    target = payload_of(container)
    keys = [key.try_const() for key in target.keys(m)] if isinstance(target, DictTracker) else [None]
    if len(keys) > _MOST_KEYS or any(key is None or type(key.value) not in (int, str) for key in keys):
        return NotImplemented
    values = [key.value for key in keys if key is not None]
    decide(m, number, f"({{}} in {values!r}) is {number.value in values}")
    return m.const(number.value in values)


_DICTIONARIES = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_MOST_KEYS = 32
