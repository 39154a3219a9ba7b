"""Products of matrices together with the loops that read nothing but their result: one kernel may do both.

A `Match` is a library call mm, addmm, bmm or baddbmm of a schedule and the pointwise kernel behind it. `joined` makes them one step, whose domain are the batch, the rows and the columns of the product.
Which is faster is measured (runtime/tuning.py); without that the library's call stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from magneto.graph.layout import contiguous_strides
from magneto.inductor.loops.ir import Buffer, LibraryCall, Value, ViewOf
from magneto.inductor.schedule.domain import align, fresh_symbol, replaced, row_major, strided_terms
from magneto.inductor.schedule.inplace import may_raise, touched
from magneto.inductor.schedule.kernel import Dim, FusedKernel, Member, member_loads
from magneto.inductor.schedule.schedule import Schedule

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = frozenset(op.default for op in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm))
LEAST = 64  # rows, columns and terms of a product worth a kernel


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows, columns and terms of a block, its warps, and how many loads are under way. `described`: operands are read by the device's copy engine, which goes by descriptors.
    `programs`: so many walk all blocks, and read ahead for the next block; 0: one for each. `parts`: 2: what follows the product is computed for one half of a block after the other (only where operands
    are described), so that two programs find room on a multiprocessor and the one multiplies meanwhile."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int
    described: int = 0
    programs: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class ProductKernel(FusedKernel):
    """A pointwise kernel over the result of a product, which it computes itself: `result` is never in memory. The first `batch` dimensions count its matrices, the next `tall` the rows,
    the others the columns. `bias`: spread over the result and added before that is rounded."""

    a: ViewOf = field(kw_only=True)
    b: ViewOf = field(kw_only=True)
    bias: ViewOf | None = field(kw_only=True)
    result: Buffer = field(kw_only=True)
    batch: int = field(kw_only=True)
    tall: int = field(kw_only=True)
    tiles: Tiles = field(kw_only=True)

    @property
    def operands(self) -> tuple[ViewOf, ...]:
        return (self.a, self.b) if self.bias is None else (self.a, self.b, self.bias)

    def reads(self) -> tuple[str, ...]:
        others = (name for name in FusedKernel.reads(self) if name != self.result.name)
        return tuple(dict.fromkeys([*(view.buffer for view in self.operands), *others]))


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    call: int  # positions in the schedule
    kernel: int
    a: ViewOf
    b: ViewOf
    bias: ViewOf | None
    result: Buffer


def matches(plan: Schedule) -> list[Match]:
    """Pairs that may be joined; each step is in one at most."""
    readers: dict[str, list[int]] = {}
    writer: dict[str, int] = {}
    for position, step in enumerate(plan.steps):
        reads, writes = touched(step)
        for name in dict.fromkeys(reads):
            readers.setdefault(name, []).append(position)
        writer.update(dict.fromkeys(writes, position))
    leaving = {view.buffer for view in plan.program.outputs if isinstance(view, ViewOf)}
    found = []
    for position, step in enumerate(plan.steps):
        if not isinstance(step, FusedKernel) or step.cols or may_raise(step) or not plan.into.keys().isdisjoint(step.stored):
            continue
        for name in reversed(FusedKernel.reads(step)):
            call = writer.get(name, -1)
            if call < 0 or name in leaving or readers[name] != [position]:
                continue
            match = _match(plan, call, position)
            if match is not None and _domain(plan.steps[position], match) is not None:  # type: ignore[arg-type]
                found.append(match)
                break
    return found


def _match(plan: Schedule, call: int, kernel: int) -> Match | None:
    step = plan.steps[call]
    if not isinstance(step, LibraryCall) or step.op not in PRODUCTS or step.kwargs:
        return None
    (result,) = step.buffers
    *biases, a, b = step.args
    bias = biases[0] if biases else None
    if bias is not None and (not isinstance(bias, ViewOf) or bias.dtype is not result.dtype):
        return None
    sizes = (*a.shape[-2:], b.shape[-1])
    if result.dtype not in HALVES or {a.dtype, b.dtype} != {result.dtype} or not all(isinstance(n, int) and n >= LEAST for n in sizes):
        return None
    if not all(isinstance(n, int) for n in result.shape) or result.strides != contiguous_strides(result.shape):  # type: ignore[arg-type]
        return None
    operands = {view.buffer for view in (a, b, bias) if view is not None}
    written = {name for between in plan.steps[call + 1 : kernel] for name in touched(between)[1]}
    if not operands.isdisjoint(written) or not operands.isdisjoint(plan.into.values()):
        return None
    return Match(call, kernel, a, b, bias, result)


def _domain(kernel: FusedKernel, match: Match) -> tuple[tuple[tuple[Dim, ...], ...], Mapping[Any, Any]] | None:
    """The dimensions of the batch, of the product's rows and of its columns, and the kernel's symbols in theirs."""
    places = {load.index for m in kernel.members for load in member_loads(m.body) if load.buffer == match.result.name}
    found = strided_terms(next(iter(places)), {d.sym: d.size for d in kernel.rows}) if len(places) == 1 else None
    if found is None or found[1] or len(found[0]) != len(kernel.rows):
        return None
    whole = tuple(Dim(fresh_symbol(int(n)), int(n)) for n in match.result.shape)  # type: ignore[arg-type]
    aligned = align(found[0], row_major(tuple(d for d in whole if d.size > 1)))
    if aligned is None:
        return None
    parts = tuple(replaced(tuple(d for d in dims if d.size > 1), aligned, 2) for dims in (whole[:-2], whole[-2:-1], whole[-1:]))
    return parts, aligned.host


def product_kernel(plan: Schedule, match: Match, tiles: Tiles) -> ProductKernel:
    """Both steps of a match as one."""
    kernel = plan.steps[match.kernel]
    assert isinstance(kernel, FusedKernel)
    found = _domain(kernel, match)
    assert found is not None
    (batch, tall, wide), mapping = found
    memo: dict[Value, Value] = {}
    members: tuple[Member, ...] = tuple(m.mapped(mapping, memo) for m in kernel.members)
    origins = (*plan.steps[match.call].origins, *kernel.origins)
    return ProductKernel(
        (*batch, *tall, *wide), (), members, kernel.stored, origins, kernel.why,
        a=match.a, b=match.b, bias=match.bias, result=match.result, batch=len(batch), tall=len(tall), tiles=tiles,
    )  # fmt: skip


def joined(plan: Schedule, chosen: Mapping[Match, Tiles]) -> Schedule:
    """The schedule with these matches as single steps, at the places of their kernels."""
    made = {match.kernel: product_kernel(plan, match, tiles) for match, tiles in chosen.items()}
    gone = {match.call for match in chosen}
    steps = tuple(made.get(position, step) for position, step in enumerate(plan.steps) if position not in gone)
    last = plan.last if plan.last < 0 else plan.last - sum(position < plan.last for position in gone)
    return replace(plan, steps=steps, last=last)
