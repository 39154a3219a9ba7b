"""Between which numbers a value lies, as far as that follows from how it is computed: computed indices that cannot be out of range need no check.

`x[i.clamp(0, n - 1)]`, `table[h % n]`, `palette[image]` of bytes, places of an image behind `where((p >= 0) & (p < n), p, 0)`. NaN lies nowhere: a comparison with it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, inf
from typing import TypeAlias

import torch

from magneto.inductor.loops.ir import Const, IndexValue, Masked, Op, Value

Range: TypeAlias = "tuple[float, float]"
Facts: TypeAlias = "frozenset[tuple[Value, Range]]"
ANY: Range = (-inf, inf)
NOTHING: Facts = frozenset()
EXACT = 1 << 24  # integers below are floats of any type that indices are computed in
LIMITS: dict[str, Callable[[float, int], Range]] = {
    "ge": lambda n, _: (n, inf), "gt": lambda n, step: (n + step, inf), "le": lambda n, _: (-inf, n), "lt": lambda n, step: (-inf, n - step),
    "eq": lambda n, _: (n, n),
}  # fmt: skip
OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


class Bounds:
    """`seen`: the value that a load stands for, where the kernel computes it itself."""

    def __init__(self, seen: Callable[[Value], Value]) -> None:
        self.seen = seen
        self.known: dict[tuple[Value, Facts], Range] = {}

    def within(self, value: Value, extent: int) -> bool:
        """Does the value lie in 0 <= value < extent wherever it is computed?"""
        low, high = self.of(value)
        return low >= 0 and high < extent

    def of(self, value: Value, facts: Facts = NOTHING) -> Range:
        """`facts`: what is known of some values where this one is taken."""
        value = self.seen(value)
        found = self.known.get((value, facts))
        if found is None:
            low, high = self._computed(value, facts)
            for _, (least, most) in (fact for fact in facts if fact[0] is value):
                low, high = max(low, least), min(high, most)
            if value.dtype in (torch.uint8, torch.int8, torch.int16):
                limits = torch.iinfo(value.dtype)
                low, high = max(low, limits.min), min(high, limits.max)
            found = self.known[value, facts] = (low, high)
        return found

    def _computed(self, value: Value, facts: Facts) -> Range:
        if isinstance(value, Const):
            number = value.value
            return (number, number) if isinstance(number, int | float) and number == number else ANY
        if isinstance(value, IndexValue):
            low, high = value.expr.lo, value.expr.hi
            return -inf if low is None else low, inf if high is None else high
        if isinstance(value, Masked):
            return _either(self.of(value.value, facts | self._said(value.cond)), self.of(value.other, facts))
        if not isinstance(value, Op):
            return ANY
        if value.name == "where":
            return self._where(value, facts)
        ranges = [self.of(arg, facts) for arg in value.args]
        if value.name in ("minimum", "maximum") and not (value.dtype.is_floating_point and ANY in ranges):  # NaN goes through
            (a, b), (c, d) = ranges
            return (min(a, c), min(b, d)) if value.name == "minimum" else (max(a, c), max(b, d))
        if value.name == "bitwise_and" and value.dtype is not torch.bool:
            return (0, min(masks)) if (masks := [high for low, high in ranges if low >= 0]) else ANY
        if value.name == "remainder":
            return (0, ranges[1][1] - 1) if ranges[1][0] > 0 and not value.dtype.is_floating_point else ANY
        if any(inf in (abs(low), abs(high)) for low, high in ranges):
            return ANY  # integers may wrap around
        return self._of_numbers(value, ranges)

    def _where(self, value: Op, facts: Facts) -> Range:
        condition, first, second = value.args
        condition = self.seen(condition)
        otherwise = NOTHING
        if isinstance(condition, Op) and condition.name in OPPOSITE and not condition.args[0].dtype.is_floating_point:
            otherwise = self._said(Op(OPPOSITE[condition.name], condition.args, condition.dtype))
            low, high = self.of(condition.args[0], facts)
            if any(least > high or most < low for _, (least, most) in self._said(condition)):
                return self.of(second, facts)  # it never holds: no index is negative
        return _either(self.of(first, facts | self._said(condition)), self.of(second, facts | otherwise))

    def _said(self, condition: Value) -> Facts:
        """What a condition says of values compared with numbers."""
        condition = self.seen(condition)
        if isinstance(condition, Op) and condition.name == "bitwise_and":
            return self._said(condition.args[0]) | self._said(condition.args[1])
        if not isinstance(condition, Op) or condition.name not in LIMITS or not isinstance(number := condition.args[1], Const):
            return NOTHING
        value, limit = self.seen(condition.args[0]), number.value
        if not isinstance(limit, int | float) or limit != limit:
            return NOTHING
        return frozenset(((value, LIMITS[condition.name](limit, not value.dtype.is_floating_point)),))

    def _of_numbers(self, value: Op, ranges: list[Range]) -> Range:
        if value.name == "convert_element_type":
            low, high = (0, 1) if value.args[0].dtype is torch.bool else ranges[0]
            whole = not value.dtype.is_floating_point and value.dtype is not torch.bool
            return _exact(value.dtype, (int(low), int(high)) if whole else (low, high))
        if value.name in ("floor", "ceil", "trunc", "round"):
            return floor(ranges[0][0]), ceil(ranges[0][1])
        if value.name not in ("add", "sub", "mul", "floordiv"):
            return ANY
        (a, b), (c, d) = ranges
        if value.name == "floordiv":
            return (a // c, b // c) if c == d and c > 0 and not value.dtype.is_floating_point else ANY
        products = sorted((a * c, a * d, b * c, b * d))
        ends = {"add": (a + c, b + d), "sub": (a - d, b - c), "mul": (products[0], products[-1])}[value.name]
        return _exact(value.dtype, ends)


def _either(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _exact(dtype: torch.dtype, found: Range) -> Range:
    """Only what neither wraps around nor is rounded."""
    if dtype.is_floating_point:
        return found if dtype.itemsize >= 4 and all(abs(n) < EXACT and n == int(n) for n in found) else ANY
    if dtype is torch.bool or dtype.is_complex:
        return ANY
    limits = torch.iinfo(dtype)
    return found if limits.min <= found[0] and found[1] <= limits.max else ANY
