"""Numbers that change from call to call become inputs of the graph instead of constants of it.

The first capture takes a number as a constant. When a later call comes with another value, its source is *changing* (`Machine.changing`), and the next capture
gives the number to the graph as a tensor of no dimensions, where that means exactly the same: as the other operand of an elementwise operation on a tensor that
has dimensions and whose kind of type is not below the number's. What a changing number decides (`if step % 10 == 0`) is guarded as the condition itself.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.lazy_number import changing, guard_types, is_unread, leaves, text_of
from magneto.dynamo.trackers.tensor import MadeInput, TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_DTYPES = {int: torch.int64, float: torch.float64}
_ARITHMETIC = ("add", "sub", "mul", "truediv")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FUNCTIONS = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "lt", "le", "gt", "ge", "eq", "ne")
_METHODS = (*_FUNCTIONS, "add_", "sub_", "mul_", "div_")


def as_tensor(number: float) -> torch.Tensor:
    """What the graph is given for a number: region code calls this."""
    return torch.scalar_tensor(number, dtype=_DTYPES[type(number)], device="cpu")


class NumberInput(MadeInput):
    """A tensor of no dimensions that the region makes from `number` at each call."""

    __slots__ = ("number",)

    def __init__(self, number: ConstTracker) -> None:
        super().__init__(as_tensor(number.value), "number" if number.source is None else "")
        self.number = number

    def graph_input(self, em: Emitter) -> str:
        return f"as_tensor({em.value(self.number)})"


def _fits(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def lift(m: Machine, tensor: TensorTracker, number: ConstTracker) -> NumberInput | None:
    """`number` as an operand beside `tensor`; None where it stays a constant."""
    if not _fits(number.value) or not tensor.meta.ndim or not changing(m, number):
        return None
    dtype = tensor.meta.dtype
    if type(number.value) is float and not (dtype.is_floating_point or dtype.is_complex):
        return None
    guard_types(m, number)
    return m.number_input(number)


def _elementwise(fn: Any) -> None:
    @rule(fn, TensorTracker, ConstTracker)
    def tensor_number(m: Machine, tensor: TensorTracker, number: ConstTracker, /, **kwargs: Any) -> Any:
        lifted = None if kwargs else lift(m, tensor, number)
        return NotImplemented if lifted is None else m.apply(fn, tensor, lifted)


def _reflected(fn: Any) -> None:
    @rule(fn, ConstTracker, TensorTracker)
    def number_tensor(m: Machine, number: ConstTracker, tensor: TensorTracker) -> Any:
        lifted = lift(m, tensor, number)
        return NotImplemented if lifted is None else m.apply(fn, lifted, tensor)


for _name in (*_ARITHMETIC, *_COMPARISONS):
    _elementwise(getattr(operator, _name))
    _reflected(getattr(operator, _name))
for _name in _ARITHMETIC:
    _elementwise(getattr(operator, f"i{_name}"))
for _name in _FUNCTIONS:
    _elementwise(getattr(torch, _name))
for _name in _METHODS:
    _elementwise(getattr(torch.Tensor, _name))


# -- torch functions that take a number elsewhere


def _third(fn: Any) -> None:
    @rule(fn, TensorTracker, TensorTracker, ConstTracker)
    def chosen(m: Machine, first: TensorTracker, second: TensorTracker, number: ConstTracker, /, **kwargs: Any) -> Any:
        lifted = None if kwargs else lift(m, second if fn is torch.where else first, number)
        return NotImplemented if lifted is None else m.apply(fn, first, second, lifted)


for _fn in (torch.where, torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_):
    _third(_fn)


@rule(torch.tensor, ConstTracker)
def tensor(m: Machine, number: ConstTracker, /, **kwargs: Any) -> Any:
    """A changing number as a tensor of its own."""
    if kwargs or not _fits(number.value) or not changing(m, number):
        return NotImplemented
    dtype = torch.get_default_dtype() if type(number.value) is float else torch.int64
    guard_types(m, number)
    return m.node("to", [m.number_input(number)], {"dtype": dtype, "copy": True}, method=True)


# -- what a changing number decides


def _decide(m: Machine, number: ConstTracker, condition: str) -> bool:
    """`condition` (with {} for the number) holds at each call."""
    (leaf,) = {leaf.source: leaf for leaf in leaves(number)}.values()
    guard_types(m, number)
    m.guard(Kind.RELATION, leaf.source, condition.format(text_of(number, "{}")))
    return True


def _may_decide(m: Machine, number: ConstTracker) -> bool:
    return type(number.value) in _DTYPES and changing(m, number) and len({leaf.source for leaf in leaves(number)}) == 1


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
        _decide(m, number, f"({{}} {_SYMBOLS[name]} {bound!r}) is {result}")
    return m.const(result)


def _comparison(name: str) -> None:
    @rule(getattr(operator, name), ConstTracker, ConstTracker)
    def compare(m: Machine, left: ConstTracker, right: ConstTracker) -> Any:
        if not is_unread(right) and _may_decide(m, left):
            return _compare(m, name, left, right.value)
        if not is_unread(left) and _may_decide(m, right):
            return _compare(m, _SWAPPED[name], right, left.value)
        return NotImplemented


for _name in _COMPARISONS:
    _comparison(_name)


def decides(m: Machine, number: ConstTracker) -> bool | None:
    """Truth of a changing number, guarded; None for other values."""
    if not _may_decide(m, number):
        return None
    return bool(_compare(m, "ne", number, 0).value)
