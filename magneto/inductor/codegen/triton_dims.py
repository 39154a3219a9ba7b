"""Dimensions of reductions cut where indices divide: `cut_dims(kernel)`.

A bias' gradient of an attention is a sum over (batch, sequence) of one row of 2,304 channels, whose memory is that of three tensors by (heads, 64): every index divides the row's symbol by 64. Cut into
pieces the row is contiguous memory along 64 channels, and nothing is divided.
"""

from __future__ import annotations

from dataclasses import replace

from magneto.inductor.codegen.cpp_nest import kernel_indices
from magneto.inductor.loops.ir import Value
from magneto.inductor.schedule.domain import chain, divided, fresh_symbol
from magneto.inductor.schedule.kernel import Dim, FusedKernel
from magneto.symbolic import Expr, add, mul

SHORTEST = 16  # elements of a piece: blocks along shorter ones are slower than dividing


def cut_dims(kernel: FusedKernel) -> FusedKernel:
    """The kernel with every dimension that indices divide by a number as several."""
    divisors = divided(kernel_indices(kernel))
    mapping: dict[Expr, Expr] = {}

    def pieces(dim: Dim) -> list[Dim]:
        steps = chain(dim.size, {d for d in divisors.get(dim.sym, ()) if d >= SHORTEST})
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
