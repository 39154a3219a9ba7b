"""Conditions on places. Reductions of which each row has a span of its own: the elements from `first` up to, not including, `end`; both are the row's numbers.

In the loops IR that is a condition like any other: whatever takes no notice of it computes the same, from the first element to the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from magneto.inductor.loops.ir import IndexValue, Indirect, Load, Masked, Op, Value, walk_values
from magneto.symbolic import Expr, Sym, evaluate

Span: TypeAlias = tuple[Value, Value]


def within_span(place: Expr, first: Value, end: Value) -> Value:
    """Does the place lie in the span?"""
    at = IndexValue(place, first.dtype)
    return Op("bitwise_and", (Op("ge", (at, first), torch.bool), Op("lt", (at, end), torch.bool)), torch.bool)


def span_of(body: Value) -> tuple[Sym, Span] | None:
    """What the body of a sum is walked along, and the span outside of which it is 0."""
    if not isinstance(body, Masked) or not isinstance(body.cond, Op) or len(body.cond.args) != 2:
        return None
    left, right = body.cond.args
    if not isinstance(left, Op) or not isinstance(right, Op) or not isinstance(left.args[0], IndexValue):
        return None
    first, end, walked = left.args[-1], right.args[-1], left.args[0].expr
    if not isinstance(walked, Sym) or body.cond is not within_span(walked, first, end) or walked in symbols_of(first, end):
        return None
    return walked, (first, end)


def symbols_of(*values: Value) -> frozenset[Sym]:
    """The symbols on which values depend, those of computed indices included."""
    places = (v.index if isinstance(v, Load) else v.expr for v in walk_values(*values) if isinstance(v, Load | IndexValue))
    return frozenset(s for place in places for s in place.free if not isinstance(s, Indirect))


def decided(value: Value, at: Mapping[Sym, int]) -> Value | None:
    """The branch that is taken where a condition on these symbols alone chooses."""
    if not isinstance(value, Masked) or not isinstance(value.cond, IndexValue) or not value.cond.expr.free <= at.keys():
        return None
    return value.value if evaluate(value.cond.expr, at) else value.other
