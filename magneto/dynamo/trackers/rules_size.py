"""Rows of numbers that depend on how many elements an operation found."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import prefer, rule
from magneto.dynamo.trackers.size import SizeTracker, numel_of
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

EXACT: frozenset[Any] = frozenset({getattr(operator, name) for name in "add sub mul neg floordiv mod".split()} | {min, max})
"""Operations whose result may serve as a size like the operands: where two such sizes agree for all probes, they agree. The result of any other is a number of its own."""

_BINARY: frozenset[Any] = EXACT - {operator.neg} | {getattr(operator, name) for name in "truediv pow lt le gt ge eq ne".split()}
_IN_PLACE = {getattr(operator, f"i{name}"): getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "truediv", "mod")}
_OTHERS: list[Any] = [operator.imatmul, operator.matmul, operator.ipow, divmod]
_OTHERS += [getattr(operator, name) for name in "lshift rshift and_ or_ xor ilshift irshift iand ior ixor".split()]
_UNARY: list[Any] = [int, float, abs, bool, round, operator.not_, operator.truth, operator.index]
_UNARY += [math.sqrt, math.floor, math.ceil, math.log, math.trunc]
_NUMBERS = (int, float, bool)


def _operand(v: Tracker) -> bool:
    return isinstance(v, SizeTracker) or (isinstance(v, ConstTracker) and type(v.read()) in _NUMBERS)


def _binary(fn: Callable[..., Any], target: Callable[..., Any]) -> None:
    def body(m: Machine, a: Tracker, b: Tracker, /, *more: Tracker, **kwargs: Tracker) -> Any:
        if isinstance(a, TensorTracker) or isinstance(b, TensorTracker):
            return NotImplemented
        if more or kwargs or not _operand(a) or not _operand(b) or target in _OTHERS:
            return _foreign(m, fn, a, b)
        return m.number(target, a, b)

    for kinds in ((Tracker, SizeTracker), (SizeTracker, Tracker)):
        prefer(fn, *kinds)(body)


def _foreign(m: Machine, fn: Any, a: Tracker, b: Tracker) -> Any:
    """Beside what is no number."""
    if fn in (operator.eq, operator.ne) and any(isinstance(v, ConstTracker) and v.read() is None for v in (a, b)):
        return m.const(fn is operator.ne)
    size = a if isinstance(a, SizeTracker) else b
    m.graph_break("B104", operation=fn.__name__, value=size.show())


for _same in _BINARY:
    _binary(_same, _same)
for _fn, _target in _IN_PLACE.items():
    _binary(_fn, _target)
for _other in _OTHERS:
    _binary(_other, _other)


def _unary(fn: Callable[..., Any]) -> None:
    @prefer(fn, SizeTracker)
    def body(m: Machine, v: SizeTracker, /, *more: Tracker, **kwargs: Tracker) -> Any:
        if more or kwargs:
            m.graph_break("B104", operation=fn.__name__, value=v.show())
        return v if fn is v.python_type() else m.number(fn, v)


for _fn in (*_UNARY, operator.neg):
    _unary(_fn)


@prefer(operator.pos, SizeTracker)
def pos(m: Machine, v: SizeTracker) -> Any:
    return v if v.python_type() is not bool else m.number(int, v)


@prefer(operator.invert, SizeTracker)
def invert(m: Machine, v: SizeTracker) -> Any:
    m.graph_break("B104", operation="~", value=v.show())


def _identity(fn: Any) -> None:
    """Small numbers are one object, large ones are made anew: only the run can tell."""

    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        if a.python_type() is b.python_type():
            m.graph_break("B104", operation="is", value=(a if isinstance(a, SizeTracker) else b).show())
        return NotImplemented

    for kinds in ((Tracker, SizeTracker), (SizeTracker, Tracker)):
        prefer(fn, *kinds)(body)


_identity(operator.is_)
_identity(operator.is_not)


@rule(torch.Tensor.nelement, TensorTracker)
@rule((torch.Tensor.numel, torch.numel), TensorTracker)
def numel(m: Machine, v: TensorTracker) -> Any:
    return numel_of(m, v)
