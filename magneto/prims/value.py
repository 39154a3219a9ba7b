"""Values of a decomposition: nodes of the new graph with their metadata and Python operators.

A decomposition is an ordinary function over Values that builds prim nodes as it runs. Equal pure prim calls become one node.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from magneto.graph.append import append_call
from magneto.graph.layout import RuleError, numel
from magneto.graph.meta import CPU, TensorMeta
from magneto.graph.promotion import INTEGER, category, promote
from magneto.prims.table import PRIMS

Number = bool | int | float


class Builder:
    """Emits prim nodes into a graph and remembers them by (prim, arguments). `late`: they stand behind the first operation of a backward."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.stack: Any = None
        self.known: dict[Any, Value] = {}
        self.late = False
        self.wanted: frozenset[Any] = frozenset()  # of an operation with several results: the positions of those that somebody reads
        self.places: dict[fx.Node, Value] = {}  # by indices of pooling's maxima: which element of its window each is, in a byte

    def emit(self, name: str, *args: Any) -> Value:
        """One prim node of a single result."""
        prim = PRIMS[name]
        plain = tuple([arg.node if type(arg) is Value else arg for arg in args])
        key = _key(name, plain)
        found = self.known.get(key)
        if found is None:
            meta = prim.meta(*[arg.meta if type(arg) is Value else arg for arg in args])
            found = self.known[key] = Value(self, self.node(prim, plain, meta), meta)
        return found

    def node(self, target: Any, args: tuple[Any, ...], meta: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = append_call(self.graph, "call_function", target, args, kwargs)
        node.meta["val"] = meta
        if self.stack is not None:
            node.meta["stack"] = self.stack
        if self.late:
            node.meta["late"] = True
        return node

    def cat(self, values: Sequence[Value], dim: int) -> Value:
        if len(values) == 1:
            return values[0]
        meta = PRIMS["cat"].meta([value.meta for value in values], dim)
        return Value(self, self.node(PRIMS["cat"], ([value.node for value in values], dim), meta), meta)

    def var(self, x: Value, dims: Sequence[int], correction: float) -> tuple[Value, Value]:
        """(variance, mean), without the reduced dimensions."""
        metas = PRIMS["var"].meta(x.meta, tuple(dims), correction)
        pair = self.node(PRIMS["var"], (x.node, tuple(dims), correction), metas)
        return self.item(pair, 0, metas[0]), self.item(pair, 1, metas[1])

    def item(self, node: fx.Node, position: int, meta: TensorMeta) -> Value:
        return Value(self, self.node(operator.getitem, (node, position), meta), meta)

    def full(self, shape: Sequence[int], value: Number, dtype: torch.dtype, device: torch.device = CPU) -> Value:
        if dtype is not torch.bool and isinstance(value, bool):
            value = int(value)
        return self.emit("full", tuple(shape), value, dtype, device)

    def iota(self, count: int, dtype: torch.dtype = torch.int64, device: torch.device = CPU) -> Value:
        return self.emit("iota", count, dtype, device)


def _key(name: str, args: tuple[Any, ...]) -> Any:
    """Numbers of different types or signs are different constants (0.0 and -0.0, 1 and True)."""
    return (name, *[(type(arg), repr(arg)) if type(arg) in (float, int, bool) else arg for arg in args])


class Value:
    """A tensor in the new graph."""

    __slots__ = ("b", "meta", "node")

    def __init__(self, b: Builder, node: fx.Node, meta: TensorMeta) -> None:
        self.b, self.node, self.meta = b, node, meta

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        return self.meta.device

    @property
    def ndim(self) -> int:
        return len(self.meta.shape)

    def __repr__(self) -> str:
        return f"Value({self.node}: {self.meta})"

    # ---- elementwise; operands of unlike dtypes promote among themselves, shapes must agree -----------------------------

    def _binary(self, name: str, other: Any, reverse: bool = False) -> Value:
        left: Any = self
        if type(other) is float and category(self.meta.dtype) <= INTEGER:
            raise RuleError(f"prims.{name} of {self.meta} and a float")
        if type(other) is Value and other.meta.dtype is not self.meta.dtype:
            dtype = promote(self.meta.dtype, other.meta.dtype)
            left, other = self.to(dtype), other.to(dtype)
        return self.b.emit(name, other, left) if reverse else self.b.emit(name, left, other)

    def __add__(self, other: Any) -> Value:
        return self._binary("add", other)

    def __radd__(self, other: Any) -> Value:
        return self._binary("add", other)

    def __sub__(self, other: Any) -> Value:
        return self._binary("sub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._binary("sub", other, True)

    def __mul__(self, other: Any) -> Value:
        return self._binary("mul", other)

    def __rmul__(self, other: Any) -> Value:
        return self._binary("mul", other)

    def __truediv__(self, other: Any) -> Value:
        return self._binary("div", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._binary("div", other, True)

    def __neg__(self) -> Value:
        return self.b.emit("neg", self)

    def __and__(self, other: Any) -> Value:
        return self._binary("bitwise_and", other)

    def __or__(self, other: Any) -> Value:
        return self._binary("bitwise_or", other)

    def __xor__(self, other: Any) -> Value:
        return self._binary("bitwise_xor", other)

    def __lt__(self, other: Any) -> Value:
        return self._binary("lt", other)

    def __le__(self, other: Any) -> Value:
        return self._binary("le", other)

    def __gt__(self, other: Any) -> Value:
        return self._binary("gt", other)

    def __ge__(self, other: Any) -> Value:
        return self._binary("ge", other)

    def eq(self, other: Any) -> Value:
        return self._binary("eq", other)

    def ne(self, other: Any) -> Value:
        return self._binary("ne", other)

    def unary(self, name: str) -> Value:
        return self.b.emit(name, self)

    def maximum(self, other: Any) -> Value:
        return self._binary("maximum", other)

    def minimum(self, other: Any) -> Value:
        return self._binary("minimum", other)

    def to(self, dtype: torch.dtype) -> Value:
        return self if self.meta.dtype is dtype else self.b.emit("convert_element_type", self, dtype)

    def where(self, left: Any, right: Any) -> Value:
        """`left` where this bool value is true, else `right`; at least one of them is a Value."""
        return self.b.emit("where", self, left, right)

    # ---- shape ----------------------------------------------------------------------------------------------------------

    def reshape(self, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        return self if shape == self.meta.shape else self.b.emit("reshape", self, shape)

    def transpose(self, order: Sequence[int]) -> Value:
        order = tuple(order)
        return self if order == tuple(range(len(order))) else self.b.emit("transpose", self, order)

    def broadcast(self, shape: Sequence[int]) -> Value:
        """NumPy broadcasting to `shape`."""
        shape = tuple(shape)
        if shape == self.meta.shape:
            return self
        lead = len(shape) - len(self.meta.shape)
        return self.b.emit("broadcast_in_dim", self, shape, tuple(range(lead, len(shape))))

    def along(self, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Broadcast to `shape`, this value's dimensions standing at `dims`."""
        shape, dims = tuple(shape), tuple(dims)
        if shape == self.meta.shape and dims == tuple(range(len(shape))):
            return self
        return self.b.emit("broadcast_in_dim", self, shape, dims)

    def narrow(self, dim: int, start: int, limit: int, step: int = 1) -> Value:
        """Elements start, start + step, ... below limit along `dim` (all non-negative); of a part, where this is several joined and one has them."""
        shape = self.meta.shape
        if start == 0 and limit >= shape[dim] and step == 1:
            return self
        for part, first in self.joined(dim):
            if first <= start and limit <= first + part.shape[dim]:
                return part.narrow(dim, start - first, limit - first, step)
        starts = tuple(start if d == dim else 0 for d in range(len(shape)))
        limits = tuple(limit if d == dim else size for d, size in enumerate(shape))
        steps = tuple(step if d == dim else 1 for d in range(len(shape)))
        return self.b.emit("slice", self, starts, limits, steps)

    def joined(self, dim: int) -> list[tuple[Value, int]]:
        """What was concatenated along `dim`, and where in this each begins; empty where nothing was."""
        if self.node.target is not PRIMS["cat"] or self.node.args[1] != dim:
            return []
        parts = [Value(self.b, node, node.meta["val"]) for node in self.node.args[0]]  # type: ignore[union-attr, arg-type]
        ends = itertools.accumulate(part.shape[dim] for part in parts)
        return [(part, end - part.shape[dim]) for part, end in zip(parts, ends, strict=True)]

    def narrowed_parts(self, dim: int, start: int, limit: int) -> list[Value]:
        """As `narrow`: values that hold the elements one behind the other, without joining again what was concatenated."""
        parts = self.joined(dim) or [(self, 0)]
        cuts = [(part, max(start - first, 0), min(limit - first, part.shape[dim])) for part, first in parts]
        return [part.narrow(dim, low, high) for part, low, high in cuts if low < high]

    # ---- reductions -----------------------------------------------------------------------------------------------------

    def reduce(self, name: str, dims: Sequence[int], keepdim: bool = False) -> Value:
        dims = tuple(dims)
        if not self.meta.shape:
            return self.reshape((1,)).reduce(name, (0,))
        result = self.b.emit(name, self, dims)
        return result.kept(self.meta.shape, dims) if keepdim else result

    def kept(self, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """A reduced value with the reduced dimensions of `shape` back as size 1."""
        return self.reshape([1 if d in dims else size for d, size in enumerate(shape)])

    def spread(self, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """A value reduced over `dims` of `shape`, broadcast back over them."""
        return self.along(shape, [d for d in range(len(shape)) if d not in dims])

    def count(self, dims: Sequence[int]) -> int:
        return math.prod(self.meta.shape[d] for d in dims)

    def numel(self) -> int:
        return numel(self.meta.shape)
