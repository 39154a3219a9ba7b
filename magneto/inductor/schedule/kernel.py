"""What the scheduler makes: steps in execution order, each a FusedKernel or a library call.

A `FusedKernel` is one loop nest over a domain of `rows` x `cols`. Every member is expressed in the domain's symbols:

- a *reduction* member folds its body over all cols, once per row; its outputs are per row. One that goes *down* folds over all rows, once per col, and is not read here;
- a *full* member is pointwise over rows x cols (in a kernel without reductions all dimensions are rows, and every member is full);
- a *row* member is pointwise over rows only, in a kernel with reductions.

A member may load what earlier members compute, at the same point only: a full member's value at (row, col), a row value or a reduction's
result at its row. Only `stored` buffers are written to memory; the others exist in registers and row-local arrays.
Welford reductions arrive here as sum, mean and sum of squared deviations: two passes over a cached row are exact and fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from magneto.base.dataclass import dataclass, field
from magneto.inductor.loops.ir import (
    Buffer,
    IndexValue,
    Indirect,
    LibraryCall,
    Load,
    Masked,
    Op,
    Ordered,
    Origin,
    Value,
    loads,
    reads,
)
from magneto.inductor.loops.scans import SCANS
from magneto.symbolic import Expr, Sym, substitute

POINT = "point"
SCATTER = "scatter"
COLUMN = "column"


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a domain: 0 <= sym < size."""

    sym: Sym
    size: int


@dataclass(frozen=True, slots=True)
class Member:
    """`kind` is POINT, a reduction kind (sum prod max min any all argmax argmin m2), COLUMN: a sum over those of the rows that do not occur in `store` (columns.py), or SCATTER: `body` is an Op "scatter" of
    a place, what is added there, and perhaps the condition under which it is, or an Op "put" of a place and what is written there (scatter.py); the buffer is written already. One of SCANS, on a GPU: a full member whose body holds such an Op,
    of the elements of its row up to it (group.py). `store`: element offset in the buffer's memory. `flat`: of argmax and argmin, the index they count; of a scan, the index along the row. `full`: iterates rows x cols. `position`: of its node in the program.
    `down`: a reduction over the rows, once per col (schedule/crossed.py)."""

    kind: str
    buffer: Buffer
    body: Value
    store: Expr
    full: bool
    acc_dtype: torch.dtype
    flat: Expr | None = None
    position: int = 0
    down: bool = False

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def bodies(self) -> tuple[Value, ...]:
        """The body, and the places that are looked up where the member is stored (narrowed.py)."""
        return (self.body, *(s.value for s in self.store.free if isinstance(s, Indirect))) if self.kind == POINT else (self.body,)

    @property
    def is_reduction(self) -> bool:
        return self.kind not in (POINT, SCATTER, *SCANS)

    @property
    def is_scan(self) -> bool:
        return self.kind in SCANS

    def mapped(self, mapping: Mapping[Expr, Expr], memo: dict[Value, Value], full: bool | None = None) -> Member:
        """The member over other symbols."""
        return Member(
            self.kind, self.buffer, map_value(self.body, mapping, memo), substitute(self.store, mapping),
            self.full if full is None else full, self.acc_dtype, None if self.flat is None else substitute(self.flat, mapping),
            self.position, self.down,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FusedKernel:
    rows: tuple[Dim, ...]
    cols: tuple[Dim, ...]
    members: tuple[Member, ...]
    stored: tuple[str, ...]
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    why: str = field(default="", compare=False)

    @property
    def computed(self) -> frozenset[str]:
        return frozenset(m.name for m in self.members if m.kind != SCATTER)

    def reads(self) -> tuple[str, ...]:
        """Buffers in memory that other steps have written, in order of first use."""
        computed = self.computed
        read = [load.buffer for m in self.members for body in m.bodies for load in member_loads(body) if load.buffer not in computed]
        return tuple(dict.fromkeys((*read, *self._added_to)))

    @property
    def writes(self) -> tuple[str, ...]:
        """What changes: new memory (`stored`), and memory that is added to."""
        return (*self.stored, *self._added_to)

    @property
    def _added_to(self) -> tuple[str, ...]:
        return tuple(m.name for m in self.members if m.kind == SCATTER)


@dataclass(frozen=True, slots=True, eq=False)
class TableKernel:
    """`body` computes one row over generic buffers; `rows`: per row the buffers in the order of `body.parameters`; `sizes`: elements of each row. `offsets`: where it is not empty, the body has a
    domain of its own, the same for all rows, and the memory of each parameter begins at that element (repeat.py); `wide`: indices need 64 bits."""

    body: FusedKernel
    rows: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    stored: tuple[str, ...]
    origins: tuple[Origin, ...] = ()
    why: str = ""
    offsets: tuple[tuple[int, ...], ...] = ()
    wide: bool = False

    def reads(self) -> tuple[str, ...]:
        count = len(self.body.reads())
        return tuple(dict.fromkeys(name for row in self.rows for name in row[:count]))

    @property
    def writes(self) -> tuple[str, ...]:
        """What changes: the generic buffers of the body are numbered as its parameters are."""
        names = (*self.body.reads(), *self.body.stored)
        columns = [names.index(name) for name in self.body.writes]
        return tuple(row[c] for row in self.rows for c in columns)


@dataclass(frozen=True, slots=True)
class OrderedKernel:
    """Loops that fuse with nothing: what they read is computed inside of them, what reads their result runs later."""

    node: Ordered
    why: str = ""

    def reads(self) -> tuple[str, ...]:
        return reads(self.node)

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.node.name,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.node.name,)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return self.node.origins


Kernel: TypeAlias = "FusedKernel | TableKernel | OrderedKernel"
Step: TypeAlias = "FusedKernel | TableKernel | OrderedKernel | LibraryCall"


def member_loads(body: Value) -> list[Load]:
    """Loads of a body, each once."""
    return loads(body)


def map_value(value: Value, mapping: Mapping[Expr, Expr], memo: dict[Value, Value]) -> Value:
    """The value over other symbols; sharing is kept."""
    if not mapping:
        return value
    found = memo.get(value)
    if found is not None:
        return found
    result: Value
    if isinstance(value, Load):
        result = Load(value.buffer, map_index(value.index, mapping, memo), value.dtype)
    elif isinstance(value, IndexValue):
        result = IndexValue(map_index(value.expr, mapping, memo), value.dtype)
    elif isinstance(value, Op):
        result = Op(value.name, tuple(map_value(a, mapping, memo) for a in value.args), value.dtype)
    elif isinstance(value, Masked):
        result = Masked(map_value(value.cond, mapping, memo), map_value(value.value, mapping, memo), map_value(value.other, mapping, memo))
    else:
        result = value
    memo[value] = result
    return result


def map_index(index: Expr, mapping: Mapping[Expr, Expr], memo: dict[Value, Value]) -> Expr:
    """An index over other symbols, computed indices included."""
    indirect: dict[Expr, Expr] = {s: Indirect(map_value(s.value, mapping, memo), s.extent) for s in index.free if isinstance(s, Indirect)}
    return substitute(index, {**mapping, **indirect} if indirect else mapping)
