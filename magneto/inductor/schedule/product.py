"""Products of matrices together with the loops around them: one kernel may do all.

A `Match` is a library call mm, addmm, bmm, baddbmm or a convolution (convolution.py) of a schedule, the pointwise kernel behind it that reads its result, and those ahead of it that compute nothing but an operand. `joined` makes them one
step, whose domain are the batch, the rows and the columns of the product. Which is faster is measured (runtime/tuning.py); without that the library's call stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from magneto.base.dataclass import dataclass, field, replace
from magneto.base.flags import config
from magneto.graph.layout import contiguous_strides
from magneto.inductor.loops.ir import Buffer, Const, LibraryCall, Load, Op, Value, ViewOf, walk_values
from magneto.inductor.runtime.kept import library_rounds
from magneto.inductor.schedule.convolution import Factors, Window, factors, windowed
from magneto.inductor.schedule.domain import align, fresh_symbol, replaced, row_major, strided_terms
from magneto.inductor.schedule.inplace import may_raise, touched
from magneto.inductor.schedule.kernel import POINT, Dim, FusedKernel, Member, member_loads
from magneto.inductor.schedule.schedule import Schedule
from magneto.symbolic.nodes import ZERO, Expr, add, mul

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = frozenset(op.default for op in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm))
LEAST = 64  # rows, columns and terms of a product worth a kernel
CHEAP = 16  # operations of an operand's loops, which run for every block that the operand is read for


Domain: TypeAlias = "tuple[tuple[tuple[Dim, ...], ...], Mapping[Any, Any]]"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows, columns and terms of a block, its warps, and how many loads are under way. `described`: operands are read by the device's copy engine, which goes by descriptors.
    `programs`: so many walk all blocks, and read ahead for the next block; 0: one for each. `parts`: 2: what follows the product is computed for one half of a block after the other (only where operands
    are described), so that two programs find room on a multiprocessor and the one multiplies meanwhile. `ahead`: operands that are computed where they are read: 1 the first, 2 the second, 3 both."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int
    described: int = 0
    programs: int = 0
    parts: int = 1
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """The loops of an operand, which is never in memory. As of a product, the first dimensions count matrices and the next ones rows."""

    kernel: FusedKernel
    batch: int
    tall: int


@dataclass(frozen=True, slots=True)
class TiledKernel(FusedKernel):
    """A pointwise kernel over the result of a product, which it computes itself: that is never in memory. The first `batch` dimensions count its matrices, the next `tall` the rows,
    the others the columns. By itself: of a depthwise convolution, which is a member like others."""

    batch: int = field(kw_only=True)
    tall: int = field(kw_only=True)
    tiles: Tiles = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class ProductKernel(TiledKernel):
    """`result` is computed from the operands. `bias`: spread over the result and added before that is rounded. `ahead`: loops of the two operands, where this kernel computes them. `window`, `precision`: as of `Factors`."""

    a: ViewOf = field(kw_only=True)
    b: ViewOf = field(kw_only=True)
    bias: ViewOf | None = field(kw_only=True)
    result: Buffer = field(kw_only=True)
    ahead: tuple[Ahead | None, Ahead | None] = field(kw_only=True)
    window: Window | None = field(kw_only=True)
    precision: str = field(kw_only=True)

    @property
    def operands(self) -> tuple[ViewOf, ...]:
        """Those in memory."""
        pairs = zip((self.a, self.b, self.bias), (*self.ahead, None), strict=True)
        return tuple(view for view, ahead in pairs if view is not None and ahead is None)

    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.factors, *(name for name in FusedKernel.reads(self) if name != self.result.name)]))

    @property
    def factors(self) -> tuple[str, ...]:
        """Memory of which other blocks read the same: that of operands, and of what they are computed from."""
        return (*(view.buffer for view in self.operands), *(name for one in self.ahead if one is not None for name in one.kernel.reads()))


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Positions in the schedule: `kernel` is the call's where nothing is behind it; `ahead`: of the operands' kernels."""

    call: int
    kernel: int
    of: Factors
    ahead: tuple[int | None, int | None] = (None, None)

    @property
    def result(self) -> Buffer:
        return self.of.result

    @property
    def views(self) -> list[ViewOf]:
        """What the call reads."""
        return [v for v in (self.of.a, self.of.b, self.of.bias, self.of.residual) if v is not None]


def matches(plan: Schedule) -> list[Match]:
    """What may be joined; each step is in one at most."""
    readers: dict[str, list[int]] = {}
    writer: dict[str, int] = {}
    for position, step in enumerate(plan.steps):
        reads, writes = touched(step)
        for name in dict.fromkeys(reads):
            readers.setdefault(name, []).append(position)
        writer.update(dict.fromkeys(writes, position))
    leaving = {view.buffer for view in plan.program.outputs if isinstance(view, ViewOf)}
    only = {name: found[0] for name, found in readers.items() if len(found) == 1 and name not in leaving}  # who alone reads it
    found: dict[int, Match] = {}
    for position, step in enumerate(plan.steps):
        if not isinstance(step, FusedKernel) or step.cols or may_raise(step) or not plan.into.keys().isdisjoint(step.stored):
            continue
        for name in reversed(FusedKernel.reads(step)):
            call = writer.get(name, -1)
            if call < 0 or only.get(name) != position:
                continue
            match = _match(plan, call, position)
            if match is not None and not match.of.relu and _domain(step, match) is not None:
                found[call] = match
                break
    behind = {match.kernel for match in found.values()}
    for call in range(len(plan.steps)):
        match = found.get(call) or _match(plan, call, call)
        if match is not None:
            views, fits = (match.of.a, match.of.b), match.of.window is None
            alone = [writer.get(v.buffer, call) if only.get(v.buffer) == call else call for v in views]
            first, second = (
                p if fits and p not in behind and _may_wait(plan, p, v, match) else None for p, v in zip(alone, views, strict=True)
            )
            if (ahead := (first, second)) != (None, None) or match.of.convolution or match.of.precision:
                found[call] = replace(match, ahead=ahead)
    return list(found.values())


def _may_wait(plan: Schedule, position: int, view: ViewOf, match: Match) -> bool:
    """May the operand be computed where the product reads it? Cheaply, of memory that is still the same then."""
    step = plan.steps[position]
    if not isinstance(step, FusedKernel) or step.cols or step.stored != (view.buffer,) or may_raise(step):
        return False
    if [v.buffer for v in match.views].count(view.buffer) > 1 or view.buffer in plan.into:
        return False
    operations = {v for m in step.members for v in walk_values(m.body) if isinstance(v, Op)}
    if len(operations) > CHEAP or any(op.name == "uniform" for op in operations) or any(m.kind != POINT for m in step.members):
        return False
    written = {name for between in plan.steps[position + 1 : match.kernel] for name in touched(between)[1]}
    return written.union(plan.into.values()).isdisjoint(step.reads()) and _operand(step, view) is not None


def _operand(kernel: FusedKernel, view: ViewOf) -> Ahead | None:
    """The loops of an operand over its dimensions; None where it is not just what they compute."""
    found = _over(next(m.store for m in kernel.members if m.name == view.buffer), kernel, view)
    if found is None:
        return None
    (batch, tall, wide), mapping = found
    memo: dict[Value, Value] = {}
    members = tuple(m.mapped(mapping, memo) for m in kernel.members)
    return Ahead(replace(kernel, rows=(*batch, *tall, *wide), members=members), len(batch), len(tall))


def _match(plan: Schedule, call: int, kernel: int) -> Match | None:
    """`kernel`: `call` itself where the product stands alone."""
    step = plan.steps[call]
    if not isinstance(step, LibraryCall) or (of := _factors(step) if step.op in PRODUCTS else factors(step)) is None:
        return None
    match = Match(call, kernel, of)
    operands = {view.buffer for view in match.views}
    written = {name for between in plan.steps[call + 1 : kernel] for name in touched(between)[1]}
    return match if operands.isdisjoint(written) and operands.isdisjoint(plan.into.values()) else None


def _factors(call: LibraryCall) -> Factors | None:
    """Of products of matrices as the library is called for them."""
    (result,) = call.buffers
    *biases, a, b = call.args
    bias = biases[0] if biases else None
    if call.kwargs or (bias is not None and (not isinstance(bias, ViewOf) or bias.dtype is not result.dtype)):
        return None
    sizes = (*a.shape[-2:], b.shape[-1])
    precision = "tf32x3" if result.dtype is torch.float32 and not library_rounds() and config.numerics == "fast" else ""
    if result.dtype not in HALVES and not precision:
        return None
    if {a.dtype, b.dtype} != {result.dtype} or not all(isinstance(n, int) and n >= LEAST for n in sizes):
        return None
    if not all(isinstance(n, int) for n in result.shape) or result.strides != contiguous_strides(result.shape):  # type: ignore[arg-type]
        return None
    return Factors(a, b, bias, result, precision=precision)


def _domain(kernel: FusedKernel, match: Match) -> Domain | None:
    """That of a kernel behind a product."""
    places = {load.index for m in kernel.members for load in member_loads(m.body) if load.buffer == match.result.name}
    result = match.result
    return (
        _over(next(iter(places)), kernel, ViewOf(result.name, result.shape, result.strides, 0, result.dtype)) if len(places) == 1 else None
    )


def _over(index: Expr, kernel: FusedKernel, view: ViewOf) -> Domain | None:
    """A kernel whose loops walk a batch of matrices by this index: the dimensions of the batch, of the rows and of the columns, and the kernel's symbols in theirs."""
    found = strided_terms(index, {d.sym: d.size for d in kernel.rows})
    if found is None or found[1] != view.offset or len(found[0]) != len(kernel.rows):
        return None
    whole = tuple(Dim(fresh_symbol(int(n)), int(n)) for n in view.shape)  # type: ignore[arg-type]
    form = [(int(stride), d.size, d.sym) for stride, d in zip(view.strides, whole, strict=True) if d.size > 1]  # type: ignore[arg-type]
    if (aligned := align(found[0], tuple(sorted(form, key=lambda term: term[0])))) is None:
        return None
    parts = (replaced(tuple(d for d in dims if d.size > 1), aligned, 2) for dims in (whole[:-2], whole[-2:-1], whole[-1:]))
    return tuple(parts), aligned.host


def product_kernel(plan: Schedule, match: Match, tiles: Tiles) -> TiledKernel:
    """All steps of a match as one, but for the kernels ahead that the tiles leave alone."""
    kernel = plan.steps[match.kernel]
    if not isinstance(kernel, FusedKernel):
        kernel, match = _alone(match)
    found = _domain(kernel, match)
    assert found is not None
    (batch, tall, wide), mapping = found
    memo: dict[Value, Value] = {}
    members: tuple[Member, ...] = tuple(m.mapped(mapping, memo) for m in kernel.members)
    of, ahead = match.of, chosen_ahead(match, tiles)
    pairs = zip(ahead, (of.a, of.b), strict=True)
    first, second = (None if p is None else _operand(plan.steps[p], view) for p, view in pairs)  # type: ignore[arg-type]
    origins = (*(o for p in (*ahead, match.call) if p is not None for o in plan.steps[p].origins), *kernel.origins)
    if of.deep:
        row, column = (add(0, 0, *(mul(sym, stride) for stride, _, sym in row_major(dims))) for dims in (tall, wide))
        place = add(mul(row, int(of.result.shape[1])), column)  # type: ignore[arg-type]
        deep = Member(POINT, of.result, windowed(of, row, column), place, True, of.result.dtype)
        return TiledKernel((*tall, *wide), (), (deep, *members), kernel.stored, origins, kernel.why, batch=0, tall=len(tall), tiles=tiles)
    return ProductKernel(
        (*batch, *tall, *wide), (), members, kernel.stored, origins, kernel.why,
        a=of.a, b=of.b, bias=of.bias, result=of.result, batch=len(batch), tall=len(tall), tiles=tiles, ahead=(first, second),
        window=of.window, precision=of.precision,
    )  # fmt: skip


def _alone(match: Match) -> tuple[FusedKernel, Match]:
    """The loops of a product with nothing behind it: they store what comes, or what the call makes of it, under another name."""
    result, residual = match.result, match.of.residual
    inner = replace(result, name=f"{result.name}_here")
    dims = tuple(Dim(fresh_symbol(int(n)), int(n)) for n in result.shape if n != 1)  # type: ignore[arg-type]
    symbols = iter(dims)
    place = result.offset(tuple(ZERO if n == 1 else next(symbols).sym for n in result.shape))
    body: Value = Load(inner.name, place, result.dtype)
    if residual is not None:
        body = Op("add", (body, Load(residual.buffer, add(residual.offset, place), result.dtype)), result.dtype)
    if match.of.relu:
        body = Op("maximum", (body, Const(0.0, result.dtype)), result.dtype)
    member = Member(POINT, result, body, place, True, result.dtype)
    return FusedKernel(dims, (), (member,), (result.name,)), replace(match, of=replace(match.of, result=inner))


def chosen_ahead(match: Match, tiles: Tiles) -> tuple[int | None, int | None]:
    """Positions of the kernels ahead that the product's own does the work of."""
    return match.ahead[0] if tiles.ahead & 1 else None, match.ahead[1] if tiles.ahead & 2 else None


def joined(plan: Schedule, chosen: Mapping[Match, Tiles]) -> Schedule:
    """The schedule with these matches as single steps, at the places of their kernels."""
    made = {match.kernel: product_kernel(plan, match, tiles) for match, tiles in chosen.items()}
    gone = {p for match, tiles in chosen.items() for p in (match.call, *chosen_ahead(match, tiles))} - {None, *made}
    steps = tuple(made.get(position, step) for position, step in enumerate(plan.steps) if position not in gone)
    last = plan.last if plan.last < 0 else plan.last - sum(position < plan.last for position in range(len(plan.steps)) if position in gone)
    return replace(plan, steps=steps, last=last)
