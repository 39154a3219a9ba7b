"""Dimensions of reductions cut where indices divide: `cut_dims(kernel)`.

A bias' gradient of an attention is a sum over (batch, sequence) of one row of 2,304 channels, whose memory is that of three tensors by (heads, 64): every index divides the row's symbol by 64. Cut into
pieces the row is contiguous memory along 64 channels, and nothing is divided.
"""

from __future__ import annotations

from dataclasses import replace

from magneto.inductor.codegen.cpp_nest import kernel_indices
from magneto.inductor.loops.ir import Value
from magneto.inductor.schedule.domain import fresh_symbol
from magneto.inductor.schedule.kernel import Dim, FusedKernel
from magneto.symbolic import Add, Const, Expr, FloorDiv, Mod, Sym, add, mul, walk


def cut_dims(kernel: FusedKernel) -> FusedKernel:
    """The kernel with every dimension that indices divide by a number as several."""
    divisors = divided(kernel_indices(kernel))
    mapping: dict[Expr, Expr] = {}

    def pieces(dim: Dim) -> list[Dim]:
        steps = chain(dim.size, divisors.get(dim.sym, set()))
        if len(steps) < 2:
            return [dim]
        made = [Dim(fresh_symbol(n), n) for n in (large // small for large, small in zip((dim.size, *steps), steps, strict=False))]
        mapping[dim.sym] = add(0, 0, *(mul(d.sym, step) for d, step in zip(made, steps, strict=True)))
        return made

    rows, cols = (tuple(piece for dim in dims for piece in pieces(dim)) for dims in (kernel.rows, kernel.cols))
    if not mapping:
        return kernel
    memo: dict[Value, Value] = {}
    return replace(kernel, rows=rows, cols=cols, members=tuple(m.mapped(mapping, memo) for m in kernel.members))


def chain(size: int, divisors: set[int]) -> list[int]:
    """Steps of the pieces of a dimension, the largest first and 1 last: divisors of which each divides the next and the last the size; [1] where they are none."""
    steps = [1]
    for divisor in sorted(divisors):
        if divisor < size and size % divisor == 0 and divisor % steps[-1] == 0 and divisor != steps[-1]:
            steps.append(divisor)
    return steps[::-1]


def divided(indices: list[Expr]) -> dict[Sym, set[int]]:
    """By which numbers each symbol is divided in the indices."""
    found: dict[Sym, set[int]] = {}
    for index in indices:
        for part in walk(index):
            if isinstance(part, FloorDiv | Mod) and isinstance(part.b, Const) and part.b.value > 1:
                for term, step in part.a.terms if isinstance(part.a, Add) else ((part.a, 1),):
                    if isinstance(term, Sym) and part.b.value % step == 0:
                        found.setdefault(term, set()).add(part.b.value // step)
    return found
