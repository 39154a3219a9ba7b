"""Numbers that are computed from unread numbers stay unread: `self.steps += 1` guards the type of `steps`, not its value.

A counter that changes with each call then costs no recompile. As soon as the number decides something (a branch, a shape, an operand of a tensor
operation) it is read, and with it what it was computed from: the usual EQUALS rows.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import rule

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

SIGNS = {operator.add: "+", operator.iadd: "+", operator.sub: "-", operator.isub: "-", operator.mul: "*", operator.imul: "*"}
"""Operations that never raise on numbers (a float overflow gives inf)."""

MAX_DEPTH = 32  # operations in one expression; a longer one is read


class ComputedNumber(ConstTracker):
    """`left sign right`, where at least one side is unread."""

    __slots__ = ("depth", "left", "right", "sign")

    def __init__(self, value: Any, sign: str, left: ConstTracker, right: ConstTracker, depth: int) -> None:
        super().__init__(value)
        self.sign, self.left, self.right, self.depth = sign, left, right, depth

    def read(self) -> Any:
        self.left.read()
        self.right.read()
        return self.value

    def python_type(self) -> type:
        return type(self.value)

    def emit(self, em: Emitter) -> str:
        if not (is_unread(self.left) or is_unread(self.right)):
            return em.const(self.value)
        return f"({em.value(self.left)} {self.sign} {em.value(self.right)})"


def is_unread(tracker: ConstTracker) -> bool:
    """Whether nobody has looked at the value yet."""
    if isinstance(tracker, ComputedNumber):
        return is_unread(tracker.left) or is_unread(tracker.right)
    return tracker._machine is not None


def _depth(tracker: ConstTracker) -> int:
    return tracker.depth if isinstance(tracker, ComputedNumber) else 0


def _arithmetic(fn: Any, sign: str) -> None:
    @rule(fn, ConstTracker, ConstTracker)
    def compute(m: Machine, left: ConstTracker, right: ConstTracker) -> Any:
        if not (is_unread(left) or is_unread(right)):
            return NotImplemented
        depth = 1 + max(_depth(left), _depth(right))
        for side in (left, right):
            if type(side.value) not in (int, float) or depth > MAX_DEPTH:
                return NotImplemented
        for side in (left, right):
            if side._machine is not None:
                m.guard(Kind.TYPE_IS, side.source, type(side.value))
        return ComputedNumber(fn(left.value, right.value), sign, left, right, depth)


for _fn, _sign in SIGNS.items():
    _arithmetic(_fn, _sign)
