"""Rows of attention that kernels of attention do not train as the formula does: `rows_of(add, scores, meta)`.

A query that sees no key. What -inf was filled in lets nothing flow back, so that only its row of the result and the gradients of values are NaN; what was added makes NaN of queries' and keys' too. Where all places
of a row are filled with a number its weights are alike, and learn nothing. Such rows are hidden from the kernel, whatever it would answer: they see all keys and nothing flows back through them (or they are zero
queries), and what the formula gives is put in afterwards.

A query whose scores are all lowered (or lifted) by a large number. Of its weights kernels keep the logarithm of a sum, which loses as many digits as the number has. The largest number that was added to a
row is taken from it, unless it swallows the scores: then weights are alike where it stands, and are made 1 on the way back, and what flows back is divided.
"""

from __future__ import annotations

from math import inf, nan

import torch
from torch import fx

from magneto.base.dataclass import dataclass
from magneto.inductor.rewrite import Adding

aten = torch.ops.aten
LARGE = 16.0  # what is added to a score leaves its sum exact enough up to here
SWALLOWS = 2.0**29  # and nothing of the score in float32 from here
LOWEST = -(2.0**100)  # a power of two: whether kernels count in these or not, its difference from itself is 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a mask (batch, heads, queries, 1) are `hidden`. `alike`: by a number, so that their weights are alike; otherwise by -inf, and `open` are places of them where gradients flow on. `share`: of what flows back through a row, where its weights are made 1."""

    hidden: fx.Node
    alike: bool = False
    open: fx.Node | None = None
    share: fx.Node | None = None

    def query(self, add: Adding, query: fx.Node) -> fx.Node:
        return add(aten.where.ScalarSelf, self.hidden, 0.0, query) if self.alike else query

    def out(self, add: Adding, out: fx.Node) -> fx.Node:
        return out if self.alike else add(aten.where.ScalarSelf, self.hidden, nan, out)

    def gradient(self, add: Adding, gradient: fx.Node) -> fx.Node:
        """What flows back into the kernel."""
        if self.share is not None:
            gradient = add(aten._to_copy.default, add(aten.mul.Tensor, gradient, self.share), dtype=gradient.meta["val"].dtype)
        return gradient if self.alike else add(aten.where.ScalarSelf, self.hidden, 0.0, gradient)

    def sums(self, add: Adding, sums: fx.Node) -> fx.Node:
        """The logarithms of the sums of weights that the kernel is given back."""
        return sums if self.share is None else add(aten.where.ScalarSelf, add(aten.lt.Scalar, sums, LOWEST / 2), LOWEST, sums)

    def gradients(self, add: Adding, query: fx.Node, key: fx.Node, value: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        if self.alike:
            return add(aten.where.ScalarSelf, self.hidden, 0.0, query), key, value
        if self.open is not None:
            query = add(aten.where.ScalarSelf, add(aten.any.dim, self.open, 3, True), nan, query)
            key = add(aten.where.ScalarSelf, add(aten.transpose.int, add(aten.any.dim, self.open, 2, True), 2, 3), nan, key)
        return query, key, add(aten.where.ScalarSelf, add(aten.any.dim, self.hidden, 2, True), nan, value)


def rows_of(add: Adding, bias: fx.Node, filled: fx.Node | None, alike: bool) -> tuple[fx.Node, Rows]:
    """The bias that kernels are given instead of this one (of four dimensions), and its rows. `filled`: -inf where something was filled in, else 0; None where that is all there is, with `alike` a number."""
    most = add(aten.amax.default, bias, [3], True)
    size = add(aten.abs.default, most)
    hidden = add(aten.logical_not.default, add(aten.lt.Scalar, size, inf))  # infinity and NaN spoil a row as well
    if bias is filled:
        return add(aten.where.ScalarSelf, hidden, 0.0, bias), Rows(hidden, alike)
    places = hidden if filled is None else add(aten.logical_and.default, hidden, add(aten.eq.Scalar, filled, 0))
    taken = add(aten.where.ScalarOther, add(aten.gt.Scalar, size, LARGE), most, 0.0)
    made, share = add(aten.sub.Tensor, bias, taken), None
    if bias.meta["val"].dtype is not torch.float16:  # which has no numbers that swallow
        swallowed, top = add(aten.le.Scalar, most, -SWALLOWS), add(aten.eq.Tensor, bias, most)
        count = add(aten.sum.dim_IntList, top, [3], True, dtype=torch.float32)
        share = add(aten.where.ScalarOther, swallowed, add(aten.reciprocal.default, count), 1.0)
        below = add(aten.logical_and.default, swallowed, add(aten.logical_not.default, top))
        below = add(aten.logical_or.default, below, add(aten.lt.Scalar, made, -SWALLOWS))
        made = add(aten.where.ScalarSelf, add(aten.logical_and.default, swallowed, top), LOWEST, made)
        made = add(aten.where.ScalarSelf, below, -inf, made)
    return add(aten.where.ScalarSelf, hidden, 0.0, made), Rows(hidden, False, places, share)
