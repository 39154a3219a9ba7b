"""decompose: a functional graph of ATen operations becomes a graph of prims and library calls."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from magneto.base.events import emit
from magneto.base.flags import config
from magneto.graph.append import append_copy
from magneto.graph.layout import RuleError
from magneto.graph.meta import TensorMeta
from magneto.graph.opinfo import stays
from magneto.prims.decompositions import DECOMPOSITIONS, LIBRARY
from magneto.prims.exact import gives_eagers_bits
from magneto.prims.value import Builder, Value

aten = torch.ops.aten

_ROWS_OF: dict[Any, Any] = {}


def row_of(op: Any) -> Any:
    """The decomposition of an overload, or None."""
    try:
        return _ROWS_OF[op]
    except KeyError:
        packet, _, overload = str(op).rpartition(".")
        found = _ROWS_OF[op] = DECOMPOSITIONS.get(f"{packet}.{overload}") or DECOMPOSITIONS.get(packet)
        return found


def decompose(graph: fx.Graph, table: Mapping[str, Any] | None = None) -> fx.Graph:
    """A new graph of prims and library calls with the same placeholders and outputs; every node has meta["val"].

    Each output is a node of its own with exactly the strides that `graph` promises; an output is an input only where it was one.
    `table` replaces the table of decompositions (names as in DECOMPOSITIONS).
    """
    return _Decomposition(graph, table).run()


class _Decomposition:
    def __init__(self, graph: fx.Graph, table: Mapping[str, Any] | None) -> None:
        self.graph = graph
        self.table = table
        self.fast = config.numerics == "fast" or table is not None
        self.kept = frozenset(filter(None, config.fallback_ops.replace(" ", "").split(",")))
        self.b = Builder(fx.Graph(graph.owning_module))
        self.env: dict[fx.Node, Any] = {}
        self.own: set[fx.Node] = set()  # nodes whose layout an original node has fixed
        self.outputs: set[fx.Node] = set()

    def run(self) -> fx.Graph:
        for node in self.graph.nodes:
            if node.op == "output":
                self.outputs = set(node.all_input_nodes)
        for node in self.graph.nodes:
            self.b.stack = node.meta.get("stack")
            self.b.late = self.b.late or "in_backward" in node.meta or node.meta.get("stage") == "backward"
            if node.op == "call_function":
                self.env[node] = self.call(node)
            elif node.op == "output":
                self.output(node)
            else:
                self.env[node] = self.leaf(node)
        self.remove_unused()
        return self.b.graph

    def leaf(self, node: fx.Node) -> Any:
        copy = append_copy(self.b.graph, node)
        self.own.add(copy)
        meta = node.meta.get("val")
        return Value(self.b, copy, meta) if type(meta) is TensorMeta else _Opaque(copy)

    def call(self, node: fx.Node) -> Any:
        target = node.target
        if target is operator.getitem:
            source = self.value(node.args[0])
            if isinstance(source, (tuple, list)):
                return source[node.args[1]]  # type: ignore[index]
            return self.library(node)
        if target is aten.clone.default:
            return self.clone(node)
        row = self.row_of(target)
        if row is None or _is_left(target) or not (self.fast or gives_eagers_bits(node)):
            return self.library(node)
        self.b.wanted = frozenset(user.args[1] for user in node.users if user.target is operator.getitem)
        args = [self.value(arg) for arg in node.args]
        kwargs = {key: self.value(arg) for key, arg in node.kwargs.items()}
        try:
            result = row(self.b, *args, **kwargs)
        except RuleError as problem:
            emit("fallback", what=str(target), reason=f"decomposition refused: {problem}")
            result = LIBRARY
        if result is LIBRARY:
            return self.library(node)
        return self.adopt(node, result)

    def row_of(self, target: Any) -> Any:
        if self.kept and str(target) in self.kept:
            return None
        return row_of(target) if self.table is None else self.table.get(str(target))

    def adopt(self, node: fx.Node, result: Any) -> Any:
        """Give results the layout the original graph states; a result that contradicts it becomes a library call."""
        expected = node.meta["val"]
        wrong = next(
            (value for value, meta in _paired(result, expected) if value.shape != meta.shape or value.dtype is not meta.dtype), None
        )
        if wrong is not None:
            emit("fallback", what=str(node.target), reason=f"decomposes to {wrong.meta}, the graph says {expected}")
            return self.library(node)
        return self.settled(result, expected)

    def settled(self, value: Any, meta: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self.settled(one, of) for one, of in zip(value, meta, strict=True))
        return self.settle(value, meta) if type(value) is Value else value

    def settle(self, value: Value, meta: TensorMeta) -> Value:
        if value.node not in self.own:
            self.own.add(value.node)
            value.node.meta["val"] = value.meta = meta
        return value if value.meta.strides == meta.strides else Value(self.b, value.node, meta)

    def clone(self, node: fx.Node) -> Any:
        """A copy matters for the layout, and for an output's own memory; otherwise it is the same value."""
        source = self.value(node.args[0])
        if node not in self.outputs and isinstance(source, Value) and source.meta.strides == node.meta["val"].strides:
            return source
        return self.library(node)

    def library(self, node: fx.Node) -> Any:
        meta = node.meta.get("val")
        args = tuple([self.operand(arg) for arg in node.args])
        kwargs = {key: self.operand(arg) for key, arg in node.kwargs.items()}
        made = self.b.node(node.target, args, meta, kwargs)
        self.own.add(made)
        if type(meta) is TensorMeta:
            return Value(self.b, made, meta)
        if isinstance(meta, (tuple, list)) and any(type(item) is TensorMeta for item in meta):
            return _Several(self.b, made, meta)
        return _Opaque(made)

    # ---- arguments ------------------------------------------------------------------------------------------------------

    def value(self, arg: Any) -> Any:
        """An argument for a decomposition: Values in place of nodes."""
        if isinstance(arg, fx.Node):
            found = self.env[arg]
            return found.node if type(found) is _Opaque else found
        if isinstance(arg, (list, tuple)):
            return [self.value(item) for item in arg]
        return arg

    def operand(self, arg: Any) -> Any:
        """An argument for a library call: nodes of the new graph, laid out as the operation was promised."""
        if isinstance(arg, fx.Node):
            found = self.env[arg]
            if type(found) is Value:
                return self.laid_out(found)
            if isinstance(found, tuple):
                return tuple(self.laid_out(item) for item in found)
            return found.node
        if isinstance(arg, (list, tuple)):
            return type(arg)(self.operand(item) for item in arg)
        if isinstance(arg, dict):
            return {key: self.operand(item) for key, item in arg.items()}
        return arg

    def laid_out(self, value: Value) -> fx.Node:
        """The value's node; through a clone when another value with a different layout shares that node."""
        if value.node.meta["val"].strides == value.meta.strides:
            return value.node
        return self.copy(value.node, value.meta)

    def copy(self, node: fx.Node, meta: TensorMeta) -> fx.Node:
        return self.b.node(aten.clone.default, (node,), meta)

    # ---- outputs --------------------------------------------------------------------------------------------------------

    def output(self, node: fx.Node) -> None:
        taken: set[fx.Node] = set()

        def convert(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return type(item)(convert(one) for one in item)
            if not isinstance(item, fx.Node):
                return item
            found = self.env[item]
            if type(found) is not Value:
                return found.node
            made = self.laid_out(found)
            own_memory = item.op not in ("placeholder", "get_attr")
            if own_memory and (made in taken or made.op in ("placeholder", "get_attr")):
                made = self.copy(made, item.meta["val"])
            taken.add(made)
            return made

        result = self.b.graph.output(convert(node.args[0]))
        result.meta.update(node.meta)

    def remove_unused(self) -> None:
        for node in reversed(list(self.b.graph.nodes)):
            if not node.users and node.op in ("call_function", "get_attr") and not stays(node.target):
                self.b.graph.erase_node(node)


def _paired(result: Any, expected: Any) -> Iterator[tuple[Value, TensorMeta]]:
    """The Values of a result with what the graph says of them."""
    if isinstance(result, (tuple, list)):
        for one, of in zip(result, expected, strict=True):
            yield from _paired(one, of)
    elif type(result) is Value:
        yield result, expected


class _Opaque:
    """A node whose value is no tensor (or several)."""

    __slots__ = ("node",)

    def __init__(self, node: fx.Node) -> None:
        self.node = node


class _Several(list):  # type: ignore[type-arg]
    """The results of a library call with several: `getitem` nodes on demand."""

    def __init__(self, b: Builder, node: fx.Node, metas: Any) -> None:
        super().__init__([None] * len(metas))
        self.b, self.node, self.metas = b, node, metas

    def __getitem__(self, position: Any) -> Any:
        found = super().__getitem__(position)
        meta = self.metas[position]
        if found is None and type(meta) is TensorMeta:
            found = self.b.item(self.node, position, meta)
            self[position] = found
        elif found is None and isinstance(meta, (list, tuple)):
            found = self[position] = _Several(self.b, self.b.node(operator.getitem, (self.node, position), meta), meta)
        return found

    def __iter__(self) -> Any:
        return (self[position] for position in range(len(self)))


def _is_left(target: Any) -> bool:
    """Random numbers, and uninitialised memory where PyTorch fills it."""
    if torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory() and "empty" in str(target):
        return True
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
