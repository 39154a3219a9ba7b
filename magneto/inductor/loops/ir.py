"""The loops IR: what the lowering makes of a graph, and what the scheduler and the code generators read.

Semantics
---------
A `Program` is a list of nodes in an order that respects data flow. Every node defines one or more `Buffer`s: dense memory
of a dtype, seen as a tensor of `shape` and `strides` (in elements). A buffer is written by exactly one node.

- `Pointwise(buffer, body)`: for every index (i0, ..., in-1) in `ranges` (= buffer.shape):
      buffer[i0, ..., in-1] = body          at flat offset sum(i_d * stride_d)   (`store_index`)
- `Reduction(kind, buffers, reduce_ranges, body, acc_dtype)`: for every index in `ranges` (= buffers[0].shape) combine `body`
  over all (r0, ..., rm-1) in `reduce_ranges`, in `acc_dtype`, and round once to the buffer's dtype.
  Kinds: sum prod max min any all (one output); argmax argmin (one int64 output: the smallest flat reduce index, row-major in
  r, of the extremum); welford (two outputs: mean, m2 = sum of squared deviations from the mean),
  m2 (that sum alone: what the lowering never makes, but schedule/split.py where a variance is cut).
  max, min, argmax, argmin treat NaN as the extremum (the first NaN wins), as ATen does.
  Over an empty range sum is 0, prod 1, any false, all true; the others are never made empty by the lowering.
- `Ordered(kind, buffer, ranges, serial, body)`: loops over `ranges` of which those over the dimensions `serial` run in their order; the others are independent of each other.
      cumsum: buffer[i] = sum of body over the serial dimension up to i, added up in a wider type
      scan_sum, _prod, _max, _min, _logaddexp: on a GPU; the sum, ..., of body over the one serial dimension up to i (scan_sum_back, ...: from i on), joined with init (over the ranges); place: the element's flat offset, where it is not that of the index
      scatter_add: buffer = init (a value over the buffer's shape), then for every i: buffer.memory[place] += body, one after the other; scatter_put (on a GPU): = body, in no order
      row_sums: on the CPU; buffer = init + what a scatter_add of the same body would make of zeros. place depends on the serial dimensions through one Indirect alone, the row
- `LibraryCall(op, args, kwargs, buffers)`: op(*args, **kwargs) run by ATen. A tensor argument is a `ViewOf` of a buffer.
  `out_op`, where not None, is the out= overload: with it the outputs may be allocated by the plan (exactly as the buffers say).
  Without it the results are expected to have the buffers' strides: who runs the call checks that, and copies where it is not so.

The body is a DAG of values over the loop symbols `i0..` and `r0..` (`index_symbol`, `reduce_symbol`: 0 <= i < size):

    Value := Const(value, dtype)                 value: bool, int, float or complex; may be inf or nan; exact in dtype, but for float32
           | Load(buffer, index, dtype)          element at flat offset `index` (an integer Expr) of the buffer's memory
           | IndexValue(expr, dtype)             an integer Expr (a comparison, for bool) as a number
           | Op(name, args, dtype)               a prim of the elementwise table, all args of one dtype; the exceptions are
                                                 where(cond: bool, a, b), convert_element_type(x) -> dtype, comparisons -> bool, and
                                                 uniform(seed, offset, i, threads, vector) -> float32: the number that the library draws
                                                 for element i (philox.py); all int64, the last two constants
           | Masked(cond, value, other)          value where cond (a bool Value) holds, else other. Loads inside `value` may be
                                                 out of bounds where cond is false: they must not be executed there
                                                 (`other` is safe to evaluate everywhere)
    Expr leaf Indirect(value, size)              an integer Value used inside an index expression. 0 <= value < size must be
                                                 *checked* by the kernel: outside, the call raises IndexError, as ATen does

A loop symbol over a range of size 1 does not occur: it is 0. Sizes and strides are ints, or Exprs where symbolic.
All nodes are frozen; Values are hash-consed (`is` is equality), so sharing inside a body is visible as identity.
`origins` say which FX nodes and which user lines a node came from; they take no part in equality.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from magneto.base.dataclass import dataclass, field, fields
from magneto.symbolic.nodes import ZERO, Add, Expr, IntLike, Sym, add, mul, to_expr

Size: TypeAlias = "int | Expr"
Scalar: TypeAlias = "bool | int | float | complex"

PRINTER: list[Callable[[Value], str]] = []
"""`show.show_value`, which registers itself here (the package imports it): repr() of a value, and the order of Indirect symbols."""

_VALUES: WeakValueDictionary[tuple[Any, ...], Value] = WeakValueDictionary()


class Value:
    """A node of a body. `dtype` is what it evaluates to."""

    __slots__ = ("__weakref__", "dtype")
    dtype: torch.dtype

    def children(self) -> tuple[Value, ...]:
        """The values this one is computed from directly (those behind Indirect indices included)."""
        return ()

    def __copy__(self) -> Value:
        return self

    def __deepcopy__(self, memo: object) -> Value:
        return self

    def __repr__(self) -> str:
        return PRINTER[0](self)


def _intern(cls: type[Value], *key: Any) -> tuple[Any, bool]:
    table_key = (cls, *key)
    node = _VALUES.get(table_key)
    if node is not None:
        return node, False
    node = object.__new__(cls)
    _VALUES[table_key] = node
    return node, True


def _scalar_key(value: Scalar) -> Any:
    """Floats are told apart by their bits (0.0 and -0.0 differ, nan equals nan)."""
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag)
    return value


class Const(Value):
    __slots__ = ("value",)
    value: Scalar

    def __new__(cls, value: Scalar, dtype: torch.dtype) -> Const:
        if dtype is torch.bool:
            value = bool(value)
        elif dtype.is_complex:
            value = complex(value)
        elif dtype.is_floating_point:
            value = float(value)  # type: ignore[arg-type]
        else:
            bits = 8 * dtype.itemsize
            low = -(1 << bits - 1) if dtype.is_signed else 0
            value = (int(value) - low) % (1 << bits) + low  # type: ignore[arg-type]  # what is beyond the type wraps, as eager's kernels take it
        node, new = _intern(cls, _scalar_key(value), dtype)
        if new:
            node.value, node.dtype = value, dtype
        return node  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return Const, (self.value, self.dtype)


class Load(Value):
    __slots__ = ("buffer", "index")
    buffer: str
    index: Expr

    def __new__(cls, buffer: str, index: IntLike, dtype: torch.dtype) -> Load:
        index = to_expr(index)
        node, new = _intern(cls, buffer, index, dtype)
        if new:
            node.buffer, node.index, node.dtype = buffer, index, dtype
        return node  # type: ignore[no-any-return]

    def children(self) -> tuple[Value, ...]:
        return indirect_values(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        return Load, (self.buffer, self.index, self.dtype)


class IndexValue(Value):
    __slots__ = ("expr",)
    expr: Expr

    def __new__(cls, expr: IntLike, dtype: torch.dtype) -> IndexValue:
        expr = to_expr(expr)
        node, new = _intern(cls, expr, dtype)
        if new:
            node.expr, node.dtype = expr, dtype
        return node  # type: ignore[no-any-return]

    def children(self) -> tuple[Value, ...]:
        return indirect_values(self.expr)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexValue, (self.expr, self.dtype)


class Op(Value):
    __slots__ = ("args", "name")
    name: str
    args: tuple[Value, ...]

    def __new__(cls, name: str, args: tuple[Value, ...], dtype: torch.dtype) -> Op:
        node, new = _intern(cls, name, args, dtype)
        if new:
            node.name, node.args, node.dtype = name, args, dtype
        return node  # type: ignore[no-any-return]

    def children(self) -> tuple[Value, ...]:
        return self.args

    def __reduce__(self) -> tuple[Any, ...]:
        return Op, (self.name, self.args, self.dtype)


class Masked(Value):
    __slots__ = ("cond", "other", "value")
    cond: Value
    value: Value
    other: Value

    def __new__(cls, cond: Value, value: Value, other: Value) -> Masked:
        node, new = _intern(cls, cond, value, other)
        if new:
            node.cond, node.value, node.other, node.dtype = cond, value, other, value.dtype
        return node  # type: ignore[no-any-return]

    def children(self) -> tuple[Value, ...]:
        return (self.cond, self.value, self.other)

    def __reduce__(self) -> tuple[Any, ...]:
        return Masked, (self.cond, self.value, self.other)


def bounds_of(value: Value) -> tuple[int, int]:
    """The least and the largest number that a whole number can be, as far as its operations say."""
    found = _BOUNDS.get(value)
    if found is None:
        low, high = (0, 1) if value.dtype is torch.bool else (torch.iinfo(value.dtype).min, torch.iinfo(value.dtype).max)
        first, last = _bounds(value) or (low, high)
        found = _BOUNDS[value] = (first, last) if low <= first and last <= high else (low, high)
    return found


_BOUNDS: WeakKeyDictionary[Value, tuple[int, int]] = WeakKeyDictionary()


def _bounds(value: Value) -> tuple[int, int] | None:
    """Without regard to the width of the type: what is beyond it wraps."""
    if isinstance(value, Const):
        return int(value.value.real), int(value.value.real)
    if isinstance(value, IndexValue):
        expr = value.expr
        return None if expr.lo is None or expr.hi is None else (expr.lo, expr.hi)
    if isinstance(value, Masked):
        (a, b), (c, d) = bounds_of(value.value), bounds_of(value.other)
        return min(a, c), max(b, d)
    if (
        not isinstance(value, Op)
        or any(a.dtype.is_floating_point or a.dtype.is_complex for a in value.args)
        or value.name not in _INTERVALS
    ):
        return None
    return _INTERVALS[value.name](*map(bounds_of, value.args))


_INTERVALS: dict[str, Callable[..., tuple[int, int] | None]] = {
    "convert_element_type": lambda x: x,
    "where": lambda _, x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "remainder": lambda _, y: (0, y[1] - 1) if y[0] > 0 else None,
    "shift_right": lambda x, y: (x[0] >> y[0], x[1] >> y[0]) if y[0] == y[1] and 0 <= y[0] < 8 else None,
}


class Indirect(Sym):
    """An index computed by a Value: a leaf of index expressions, with 0 <= value < size (checked by the kernel)."""

    __slots__ = ("extent", "value")
    value: Value
    extent: Size

    def __new__(cls, value: Value, size: Size) -> Indirect:
        node, new = _intern_indirect(cls, value, size)
        if new:
            node.value, node.extent, node.name, node.divisor = value, size, "ind", 1
            node.lo, node.hi = 0, size - 1 if isinstance(size, int) else None
            node.size = size if isinstance(size, Expr) else None
            node.key = (cls.rank, "ind", repr(value), repr(size))
            node._free = frozenset((node,))
        return node

    def __reduce__(self) -> tuple[Any, ...]:
        return Indirect, (self.value, self.extent)


_INDIRECTS: WeakValueDictionary[tuple[Any, ...], Indirect] = WeakValueDictionary()


def _intern_indirect(cls: type[Indirect], value: Value, size: Size) -> tuple[Indirect, bool]:
    node = _INDIRECTS.get((value, size))
    if node is not None:
        return node, False
    node = object.__new__(cls)
    _INDIRECTS[value, size] = node
    return node, True


def indirect_values(index: Expr) -> tuple[Value, ...]:
    found = [s for s in index.free if isinstance(s, Indirect)]
    return tuple(s.value for s in sorted(found, key=lambda s: s.key)) if found else ()


def loop_symbol(prefix: str, dim: int, size: Size) -> Expr:
    """The loop symbol of one dimension; the constant 0 where the size is 1."""
    if isinstance(size, int):
        return ZERO if size == 1 else _static_symbol(f"{prefix}{dim}", size)
    return Sym(f"{prefix}{dim}", 0, None if size.hi is None else size.hi - 1, size)


_SYMBOLS: dict[tuple[str, int], Sym] = {}


def _static_symbol(name: str, size: int) -> Sym:
    found = _SYMBOLS.get((name, size))
    if found is None:
        found = _SYMBOLS[name, size] = Sym(name, 0, max(size - 1, 0))
    return found


def index_symbol(dim: int, size: Size) -> Expr:
    return loop_symbol("i", dim, size)


def reduce_symbol(dim: int, size: Size) -> Expr:
    return loop_symbol("r", dim, size)


def index_symbols(ranges: tuple[Size, ...]) -> tuple[Expr, ...]:
    return tuple(loop_symbol("i", d, s) for d, s in enumerate(ranges))


def reduce_symbols(ranges: tuple[Size, ...]) -> tuple[Expr, ...]:
    return tuple(loop_symbol("r", d, s) for d, s in enumerate(ranges))


@dataclass(frozen=True, slots=True)
class Origin:
    """One FX node: its name, the name of its target and the user's stack, innermost frame last."""

    name: str
    target: str
    stack: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Buffer:
    """Dense memory seen as a tensor. `flexible`: nobody outside (caller or library call) depends on these strides, the scheduler may
    choose others of the same shape if it rewrites every load."""

    name: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    flexible: bool = False

    @property
    def numel(self) -> Size:
        """Number of elements of the tensor."""
        n: Size = 1
        for s in self.shape:
            n = n * s
        return n

    @property
    def storage_numel(self) -> Size:
        """Number of elements between the first and the last, both included: what must be allocated."""
        n: Size = 1
        for s, t in zip(self.shape, self.strides, strict=True):
            if isinstance(s, int) and s == 0:
                return 0
            n = n + (s - 1) * t
        return n

    @property
    def nbytes(self) -> Size:
        return self.storage_numel * self.dtype.itemsize

    def offset(self, index: tuple[Expr, ...]) -> Expr:
        """Flat element offset of an index."""
        return _offset(index, self.strides)


_offset = lru_cache(4096)(lambda index, strides: add(0, 0, *(mul(i, t) for i, t in zip(index, strides, strict=True))))


@dataclass(frozen=True, slots=True)
class ViewOf:
    """A strided view of a buffer's memory, in elements (torch.as_strided)."""

    buffer: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Pointwise:
    buffer: Buffer
    body: Value
    origins: tuple[Origin, ...] = field(default=(), compare=False)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.buffer,)

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def ranges(self) -> tuple[Size, ...]:
        return self.buffer.shape

    @property
    def reduce_ranges(self) -> tuple[Size, ...]:
        return ()

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.dtype

    @property
    def strides(self) -> tuple[Size, ...]:
        return self.buffer.strides

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def store_index(self) -> Expr:
        return self.buffer.offset(index_symbols(self.buffer.shape))


@dataclass(frozen=True, slots=True)
class Reduction:
    kind: str
    buffers: tuple[Buffer, ...]
    reduce_ranges: tuple[Size, ...]
    body: Value
    acc_dtype: torch.dtype
    origins: tuple[Origin, ...] = field(default=(), compare=False)

    @property
    def buffer(self) -> Buffer:
        """The first output; the only one but for welford (mean, m2)."""
        return self.buffers[0]

    @property
    def name(self) -> str:
        return self.buffers[0].name

    @property
    def ranges(self) -> tuple[Size, ...]:
        return self.buffers[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers[0].dtype

    @property
    def strides(self) -> tuple[Size, ...]:
        return self.buffers[0].strides

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device

    @property
    def store_index(self) -> Expr:
        return self.buffers[0].offset(index_symbols(self.buffers[0].shape))


@dataclass(frozen=True, slots=True)
class Ordered:
    kind: str
    buffer: Buffer
    ranges: tuple[Size, ...]
    serial: tuple[int, ...]
    body: Value
    place: Value | None = None
    init: Value | None = None
    origins: tuple[Origin, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.buffer,)

    @property
    def values(self) -> tuple[Value, ...]:
        """Everything that it computes."""
        return tuple(v for v in (self.init, self.place, self.body) if v is not None)


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """`args`/`kwargs` (sorted pairs) hold constants, ViewOf and (nested) tuples of them; lists are written as tuples.

    `buffers` has one entry per output, None for an output that is no tensor or is not used. `single`: the op returns one tensor,
    not a tuple. `mutates`: names of buffers the call writes in place. `may_alias`: an output may share memory with an argument,
    so the arguments' memory must not be reused while an output lives, and outputs must not be written in place. `lists`: where the op returns
    lists of tensors, whose entries follow each other in `outputs`, the length of each (-1: no list).
    """

    name: str
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Buffer | None, ...]
    single: bool = True
    out_op: torch._ops.OpOverload | None = None
    mutates: tuple[str, ...] = ()
    may_alias: bool = False
    origins: tuple[Origin, ...] = field(default=(), compare=False)
    lists: tuple[int, ...] = ()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.outputs if b is not None)

    @property
    def out_names(self) -> tuple[str, ...]:
        """The keywords under which `out_op` takes its outputs, in the order of `outputs`."""
        if self.out_op is None:
            return ()
        return tuple(a.name for a in self.out_op._schema.arguments if a.is_out)

    @property
    def views(self) -> tuple[ViewOf, ...]:
        """Every tensor argument."""
        return tuple(iter_views((self.args, tuple(v for _, v in self.kwargs))))

    @property
    def shown(self) -> tuple[str, ...]:
        """Buffers that an output may be a view of: what the call writes, where it returns nothing else, otherwise any argument."""
        if self.mutates and all(r.alias_info is not None and r.alias_info.is_write for r in self.op._schema.returns):
            return self.mutates
        return tuple(view.buffer for view in self.views) if self.may_alias else ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Overloads do not pickle: they travel by name."""
        values = [getattr(self, f.name) for f in fields(self)]
        return _library_call, tuple(_OpName(str(v)) if isinstance(v, torch._ops.OpOverload) else v for v in values)


@dataclass(frozen=True, slots=True)
class _OpName:
    name: str


def _library_call(*values: Any) -> LibraryCall:
    restored: list[Any] = [op_named(v.name) if isinstance(v, _OpName) else v for v in values]
    return LibraryCall(*restored)


def op_named(name: str) -> torch._ops.OpOverload:
    """The overload that prints as `name` (namespace.packet.overload)."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    assert isinstance(found, torch._ops.OpOverload)
    return found


Node: TypeAlias = "Pointwise | Reduction | Ordered | LibraryCall"


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that was known when the graph was made (a lifted tensor attribute)."""

    buffer: Buffer
    value: torch.Tensor = field(compare=False)


@dataclass(frozen=True, slots=True)
class Program:
    """Input buffers in the order of the placeholders (None: an input that is no tensor), nodes in a valid order, outputs in the
    order of the graph's output: a ViewOf, or a constant (None, numbers)."""

    inputs: tuple[Buffer | None, ...]
    constants: tuple[Constant, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[ViewOf | Scalar | None, ...]

    def buffer_table(self) -> dict[str, Buffer]:
        """Every buffer by name."""
        table = {b.name: b for b in self.inputs if b is not None}
        table.update((c.buffer.name, c.buffer) for c in self.constants)
        for node in self.nodes:
            table.update((b.name, b) for b in node.buffers)
        return table


def iter_views(x: Any) -> Iterator[ViewOf]:
    if isinstance(x, ViewOf):
        yield x
    elif isinstance(x, tuple):
        for y in x:
            yield from iter_views(y)


def walk_values(*roots: Value) -> list[Value]:
    """All values of a body, each once, children before parents (the order in which a kernel would compute them)."""
    if len(roots) == 1 and (below := _BELOW.get(roots[0])) is not None:
        return [*below, *roots]
    seen: set[Value] = set()
    order: list[Value] = []
    stack: list[tuple[Value, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend([(c, False) for c in reversed(node.children())])
    if len(roots) == 1:
        _BELOW[roots[0]] = order[:-1]
    return order


_BELOW: WeakKeyDictionary[Value, list[Value]] = WeakKeyDictionary()  # what was walked, less the body: it would keep itself alive
_LOADS: WeakKeyDictionary[Value, list[Load]] = WeakKeyDictionary()


def loads(body: Value) -> list[Load]:
    """Every load of a body, each once. Not to be changed: bodies are asked again and again."""
    found = _LOADS.get(body)
    if found is None:
        found = [v for v in walk_values(body) if isinstance(v, Load)]
        if not isinstance(body, Load):  # it would keep itself alive
            _LOADS[body] = found
    return found


def reach(index: Expr) -> frozenset[Sym]:
    """The symbols on which a place depends, those of its computed indices included."""
    computed = [v for s in index.free if isinstance(s, Indirect) for v in walk_values(s.value)]
    places = (index, *(v.index if isinstance(v, Load) else v.expr for v in computed if isinstance(v, Load | IndexValue)))
    return frozenset(s for place in places for s in place.free if not isinstance(s, Indirect))


def weight(index: Expr) -> int:
    """How much it counts in which order memory at this place is walked: the symbols on which it depends; those of its computed indices where neighbours along another lie side by side."""
    direct = [s for s in index.free if not isinstance(s, Indirect)]
    terms = index.terms if isinstance(index, Add) else ((index, 1),)
    along = any(step == 1 and not any(isinstance(s, Indirect) for s in term.free) for term, step in terms)
    return len(reach(index) if along else direct)


def reads(node: Node) -> tuple[str, ...]:
    """Names of the buffers a node reads, in order of first use, each once."""
    if isinstance(node, LibraryCall):
        return tuple(dict.fromkeys(v.buffer for v in node.views))
    values = node.values if isinstance(node, Ordered) else (node.body,)
    return tuple(dict.fromkeys(load.buffer for value in values for load in loads(value)))
