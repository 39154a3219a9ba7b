"""HostNumber: a number that the region itself computes before its graph runs, from what it has drawn. Its value differs with each call and is never guarded.

In tensor operations it is an input of the graph like a changing number (`lifted.py`); arithmetic on it is more code of the region. What it decides, and what needs
its value otherwise, is a break, behind which it is an ordinary number.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.lazy_number import CHECKED, SAFE, changing, guard_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magneto.dynamo.machine.protocol import Emitter, Machine

_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class HostNumber(Tracker):
    """`template` over `operands` (host values and constants); `example`: a value it might have, which says the type."""

    __slots__ = ("example", "operands", "template")
    unknown = True

    def __init__(self, example: Any, template: str, operands: Sequence[Tracker]) -> None:
        super().__init__()
        self.example = example
        self.template = template
        self.operands = tuple(operands)

    def python_type(self) -> type:
        return type(self.example)

    def emit(self, em: Emitter) -> str:
        text = self.template.format(*[em.value(operand) for operand in self.operands])
        cls = type(self.example)
        return em.early(f"typed({text}, {em.const(cls, cls.__name__)})")

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in ("shape", "ndim", "size", "dtype") and is_numpy(self.example):
            return m.const(getattr(self.example, name))
        return None

    def show(self) -> str:
        return f"a random {type(self.example).__name__}"


def is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def compute(m: Machine, fn: Any, template: str, operands: Sequence[Tracker]) -> Any:
    """`fn` of host numbers, changing ones and constants, as a host number."""
    examples = []
    for operand in operands:
        if isinstance(operand, HostNumber):
            examples.append(operand.example)
        elif isinstance(operand, ConstTracker) and type(operand.value) in (int, float) and changing(m, operand):
            guard_types(m, operand)  # the region computes with it, whatever it is
            examples.append(operand.value)
        elif isinstance(operand, ConstTracker) and (type(operand.read()) in (int, float, bool) or is_numpy(operand.value)):
            examples.append(operand.value)
        else:
            return NotImplemented
    try:
        example = fn(*examples)
    except Exception:
        return NotImplemented
    if type(example) not in (int, float, bool) and not is_numpy(example):
        return NotImplemented
    return HostNumber(example, template, operands)


def _row(fn: Any, template: str) -> None:
    def body(m: Machine, /, *args: Tracker, **kwargs: Tracker) -> Any:
        return compute(m, fn, template, args) if not kwargs and len(args) == template.count("{}") else NotImplemented

    prefer(fn, HostNumber)(body)
    if template.count("{}") == 2:
        prefer(fn, ConstTracker, HostNumber)(body)


for _fn, _template in (SAFE | CHECKED).items():
    _row(_fn, _template)
for _name, _symbol in _COMPARISONS.items():
    _row(getattr(operator, _name), f"({{}} {_symbol} {{}})")
_row(operator.not_, "(not {})")
