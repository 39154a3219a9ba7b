"""`lower_graph`: an FX graph of prims and ATen overloads becomes a Program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from magneto.graph.layout import overlaps
from magneto.graph.meta import TensorMeta
from magneto.inductor.loops.ir import Buffer, Constant, LibraryCall, Node, Origin, Pointwise, Program, Reduction, Scalar, Size, ViewOf
from magneto.inductor.lower import bags, elementwise, indexing, operations, ordered, reductions, search, views, windows
from magneto.inductor.lower.box import Box, Stored
from magneto.inductor.lower.context import CONVERTED, UNSUPPORTED_DTYPES, CannotLower, Lowering, point_count, same_layout
from magneto.inductor.lower.library import emit_call

PRIM_ROWS: dict[str, Callable[..., Any]] = {**elementwise.ROWS, **views.ROWS, **reductions.ROWS, **indexing.ROWS, **windows.ROWS}
"""One row per prim with a loop form: fn(lowering, meta value of the result, *args, **kwargs) -> box(es), or None: run as library call."""

OP_ROWS: dict[Any, Callable[..., Any]] = {**operations.ROWS, **indexing.OP_ROWS, **ordered.OP_ROWS, **bags.OP_ROWS, **search.OP_ROWS}
"""ATen overloads that are not simply called: fn as in PRIM_ROWS."""


def lower_graph(graph: fx.Graph, alias_outputs: Collection[int] = (), state: Collection[int] = (), on_gpu: bool = False) -> Program:
    """The program of a functional graph whose nodes carry meta["val"] (TensorMeta, or tuples of them).

    Outputs have exactly the strides of their meta["val"], and memory of their own, except where the output is a placeholder itself
    and for positions in `alias_outputs` (what is kept for backward, say), which may be views of inputs or of other outputs.
    `state`: inputs that are weights, which seldom change. `on_gpu`: kernels will be Triton's. Raises CannotLower for a graph that means nothing here.
    """
    return _GraphLowering(graph, frozenset(alias_outputs), frozenset(state), on_gpu).run()


def prim_name(target: Any) -> str | None:
    """The name of a Prim; None for every other FX target."""
    if isinstance(target, torch._ops.OpOverload):
        return None
    name = getattr(target, "name", None)
    return name if isinstance(name, str) else None


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _heads_of(node: Any) -> fx.Node | None:
    """The keys or values of which each is repeated for the heads of a group, side by side, for nothing but this."""
    chain: Any = node
    targets: list[Any] = []
    while isinstance(chain, fx.Node) and len(chain.users) == 1 and len(targets) < 4 and chain.op == "call_function":
        targets.append(prim_name(chain.target) or chain.target)
        chain = chain.args[0]
    if targets[:1] != ["reshape"] or targets[1:] not in (
        ["broadcast_in_dim", "reshape"],
        [torch.ops.aten.clone.default, "broadcast_in_dim", "reshape"],
    ):
        repeated = None
    else:
        repeated = next(n for n in node.all_input_nodes) if len(targets) == 3 else node.args[0].args[0]
    if repeated is None or not isinstance(chain, fx.Node):
        return None
    batch, heads, length, width = shape = tuple(chain.meta["val"].shape) if len(chain.meta["val"].shape) == 4 else (0, 0, 0, 0)
    whole = tuple(repeated.meta["val"].shape)
    fits = (
        len(whole) == 5
        and repeated.args[2] == (0, 1, 2, 3, 4)
        and tuple(repeated.args[0].meta["val"].shape) == (batch, heads, 1, length, width)
    )
    fits = (
        fits
        and whole == (batch, heads, whole[2], length, width)
        and tuple(node.meta["val"].shape) == (batch, heads * whole[2], length, width)
    )
    return chain if fits and shape[1] else None


class _Consumers:
    """For every node: how many consumers read its value (through views), and whether one of them needs it in memory as it is."""

    def __init__(self, graph: fx.Graph) -> None:
        self.count: dict[fx.Node, int] = {}
        self.memory: dict[fx.Node, bool] = {}
        self.only_loops: dict[fx.Node, bool] = {}
        for node in reversed(graph.nodes):
            count, memory, loops = 0, False, True
            for user in node.users:
                name = prim_name(user.target)
                if name in views.VIEWS:
                    count += self.count[user]
                    memory = memory or self.memory[user]
                    loops = loops and self.only_loops[user]
                else:
                    count += 1
                    in_loop = name in PRIM_ROWS
                    memory = memory or not in_loop
                    loops = loops and in_loop
            self.count[node], self.memory[node], self.only_loops[node] = count, memory, loops and count > 0


class _GraphLowering:
    def __init__(self, graph: fx.Graph, alias_outputs: frozenset[int], state: frozenset[int], on_gpu: bool) -> None:
        self.graph = graph
        self.state = state
        self.alias_outputs = alias_outputs
        self.low = Lowering(on_gpu)
        self.env: dict[fx.Node, Any] = {}
        self.consumers = _Consumers(graph)
        self.inputs: list[Buffer | None] = []
        self.outside: frozenset[str] = frozenset()
        self.outputs: tuple[ViewOf | Scalar | None, ...] = ()

    def run(self) -> Program:
        self.low.names.update(n.name for n in self.graph.nodes if n.op in ("placeholder", "get_attr"))
        late = False
        for node in self.graph.nodes:
            if node.op == "call_function":
                if not late and "late" in node.meta:
                    late = True
                    self.enter_backward()
                self.call(node)
            elif node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "get_attr":
                self.attribute(node)
            elif node.op == "output":
                self.output(node)
            else:
                raise CannotLower(f"{node.op} nodes have no place in a functional graph: {node.format_node()}")
        nodes = _mark_flexible(ordered.added_to(self.low.nodes, self.outputs), self.outputs)
        return Program(tuple(self.inputs), tuple(self.low.constants), nodes, self.outputs)

    def enter_backward(self) -> None:
        """What is kept for backward goes to memory now; nothing else of the forward is used again."""
        for node, value in self.env.items():
            if "keep" in node.meta and isinstance(value, Box):
                self.low.realise(value.root)
        self.low.forget_bodies()

    # ---- leaves --------------------------------------------------------------------------------------------------------

    def placeholder(self, node: fx.Node) -> None:
        val: Any = node.meta.get("val")
        if not hasattr(val, "strides"):
            self.inputs.append(None)
            self.env[node] = None if val is None else _Unusable(node.name, val)
            return
        buffer = self.low.known(Buffer(node.name, tuple(val.shape), tuple(val.strides), val.dtype, val.device))
        if len(self.inputs) in self.state:
            self.low.steady.add(node.name)
        self.inputs.append(buffer)
        self.env[node] = Stored(buffer)

    def attribute(self, node: fx.Node) -> None:
        value: Any = self.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            self.env[node] = value
            return
        buffer = self.low.known(Buffer(node.name, tuple(value.shape), tuple(value.stride()), value.dtype, value.device))
        self.low.constants.append(Constant(buffer, value.detach()))
        self.env[node] = Stored(buffer)

    # ---- operations ----------------------------------------------------------------------------------------------------

    def call(self, node: fx.Node) -> None:
        low = self.low
        low.origins = (_origin(node),)
        low.uses = self.consumers.count[node]
        low.only_loops = self.consumers.only_loops[node]
        args = tuple([self.argument(a) for a in node.args])
        kwargs = {k: self.argument(v) for k, v in node.kwargs.items()} if node.kwargs else {}
        target = node.target
        if target is operator.getitem:
            self.env[node] = args[0][args[1]]
            return
        if target is FLASH and len(args) > 2 and (groups := [_heads_of(one) for one in node.args[1:3]])[0] and groups[1]:
            args = (args[0], *(self.env[one] for one in groups if one is not None), *args[3:])  # its kernel reads each for several heads
        val = node.meta["val"]
        name = prim_name(target)
        result = None
        if name is not None:
            if not node.users:
                return
            result = self.prim(name, node, val, args, kwargs)
        elif target in OP_ROWS:
            result = self.operation(target, node, val, args, kwargs)
        if result is None:
            if not isinstance(target, torch._ops.OpOverload) and name is None:
                raise CannotLower(f"{target} is neither a prim nor an ATen overload")
            result = emit_call(low, target, args, kwargs, val)
        self.env[node] = result

    def prim(self, name: str, node: fx.Node, val: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row = PRIM_ROWS.get(name)
        if row is None:
            return None
        if (
            name not in views.VIEWS
            and _has_unsupported(val, args)
            and not (name == "convert_element_type" and self._converts(val, args[0]))
        ):
            return None
        if name not in views.VIEWS:
            self.low.settle_steady(args, val)
        self.low.goes_on = self.low.on_gpu and name in reductions.ROWS and self._goes_on(node)
        result = row(self.low, val, *args, **kwargs)
        if isinstance(result, Box):
            if result.dtype in UNSUPPORTED_DTYPES and self.low.strided_form_of(result) is None:
                return None
            if result.shape != tuple(val.shape) or result.dtype is not val.dtype:
                raise CannotLower(f"{node.name} = {name}: {result.dtype}{result.shape} for {val.dtype}{tuple(val.shape)}")
            self.low.settle(result, self.consumers.memory[node], lambda: self.beside(node))
        return result

    def _goes_on(self, node: fx.Node) -> bool:
        """Has nothing that reads a reduction as many elements as it reduces? Otherwise they share a kernel (a softmax of short rows)."""
        whole = point_count(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
        readers = [user.meta.get("val") for user in _through_views(node)]
        return all(not isinstance(val, TensorMeta) or point_count(val.shape) != whole for val in readers)

    def beside(self, node: fx.Node) -> frozenset[str]:
        """Memory that everything reads which is computed of a node: operands of what follows it pointwise. Its own sums join the kernel of the others."""
        found: frozenset[str] | None = None
        for user in _through_views(node):
            name = prim_name(user.target)
            if name in reductions.ROWS:
                continue
            if name not in elementwise.ROWS:
                return frozenset()
            seen, ends = {node, user}, [user]
            for _ in range(4):
                ends = [n for end in ends for n in _through_views(end) if prim_name(n.target) in elementwise.ROWS and n not in seen]
                seen.update(ends)
            names = frozenset(name for n in seen - {node} for x in n.all_input_nodes for name in self.reads(x, 6, seen))
            found = names if found is None else found & names
        return found or frozenset()

    def reads(self, node: fx.Node, depth: int, beside: Collection[fx.Node]) -> frozenset[str]:
        """Memory that a value is computed of, as far as that is known and without that of the values `beside`."""
        box = self.env.get(node)
        if node in beside:
            return frozenset()
        if isinstance(box, Box):
            return box.reads
        if not depth or prim_name(node.target) not in elementwise.ROWS and prim_name(node.target) not in views.VIEWS:
            return frozenset()
        return frozenset(name for x in node.all_input_nodes for name in self.reads(x, depth - 1, beside))

    def _converts(self, val: Any, x: Any) -> bool:
        """Is it a conversion that loops do on a GPU, though they do nothing else with that type?"""
        return self.low.on_gpu and all(t in CONVERTED or t not in UNSUPPORTED_DTYPES for t in (val.dtype, getattr(x, "dtype", None)))

    def operation(self, target: Any, node: fx.Node, val: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A row of OP_ROWS; None: the operation is simply called."""
        if not node.users or _has_unsupported(val, args):
            return None
        self.low.wanted = {user.args[1] for user in node.users if user.target is operator.getitem}
        self.low.flips = {tuple(user.args[1]) if prim_name(user.target) == "flip" else () for user in node.users}  # type: ignore[arg-type]
        result = OP_ROWS[target](self.low, val, *args, **kwargs)
        if isinstance(result, Box):
            self.low.settle(result, self.consumers.memory[node])
        return result

    def argument(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            value = self.env[x]
            if isinstance(value, _Unusable):
                raise CannotLower(f"the input {value.name} is no tensor but {value.val!r}")
            return value
        if isinstance(x, list | tuple):
            return tuple([self.argument(y) for y in x])
        return x

    # ---- outputs -------------------------------------------------------------------------------------------------------

    def output(self, node: fx.Node) -> None:
        result = node.args[0]
        items = result if isinstance(result, list | tuple) else (result,)
        taken: dict[str, fx.Node] = {}
        self.outside = self.outside_buffers()
        done: dict[fx.Node, ViewOf] = {}
        out: list[Any] = []
        for position, item in enumerate(items):
            if not isinstance(item, fx.Node):
                out.append(item)
                continue
            self.low.origins = (_origin(item),)
            value = self.env[item]
            if isinstance(value, _Unusable):
                raise CannotLower(f"the output {value.name} is no tensor")
            if isinstance(value, Box):
                if item not in done:
                    done[item] = self.output_view(item, value, position in self.alias_outputs, taken)
                out.append(done[item])
            else:
                out.append(value)
        self.outputs = tuple(out)

    def output_view(self, item: fx.Node, box: Box, may_alias: bool, taken: dict[str, fx.Node]) -> ViewOf:
        """The memory of one output. `taken`: computed buffers that already are outputs, by whom."""
        strides = tuple(item.meta["val"].strides)
        form = self.low.strided_form_of(box)
        if form is not None and same_layout(box.shape, form[0], strides):
            root = box.root
            outside = isinstance(root, Stored) and root.buffer.name in self.outside
            shared = isinstance(root, Stored) and root.buffer.name in taken
            if may_alias or item.op == "placeholder" or not (outside or shared):
                view = self.low.strided(box)
                assert view is not None
                if may_alias or item.op == "placeholder" or view.buffer not in taken:  # another output may compute the same
                    taken.setdefault(view.buffer, item)
                    return ViewOf(view.buffer, view.shape, strides, view.offset, view.dtype)
        stored = self.copy_of_output(box, strides)
        taken[stored.buffer.name] = item
        return ViewOf(stored.buffer.name, box.shape, strides, 0, box.dtype)

    def copy_of_output(self, box: Box, strides: tuple[Size, ...]) -> Stored:
        """Memory for an output with these strides."""
        if overlaps(box.shape, strides, repeated=False):
            raise CannotLower(f"an output of shape {box.shape} with overlapping strides {strides}")
        return self.low.copy(box, strides, fresh=True)

    def outside_buffers(self) -> frozenset[str]:
        """Inputs, constants, and what a library call may have returned of those."""
        names = {b.name for b in self.inputs if b is not None} | {c.buffer.name for c in self.low.constants}
        for n in self.low.nodes:
            if isinstance(n, LibraryCall) and n.may_alias:
                names.update(b.name for b in n.buffers)
        return frozenset(names)


def _through_views(node: fx.Node) -> list[fx.Node]:
    """Who reads a node, through views."""
    return [n for user in node.users for n in (_through_views(user) if prim_name(user.target) in views.VIEWS else [user])]


class _Unusable:
    """An input that is no tensor: fine as long as nothing uses it."""

    def __init__(self, name: str, val: Any) -> None:
        self.name, self.val = name, val


def _origin(node: fx.Node) -> Origin:
    target = prim_name(node.target) or str(node.target)
    return Origin(node.name, target, tuple(node.meta.get("stack") or ()))


def _has_unsupported(val: Any, args: tuple[Any, ...]) -> bool:
    for v in (*(val if isinstance(val, list | tuple) else (val,)), *args):
        if isinstance(v, list | tuple):
            if any(isinstance(b, Box) and b.dtype in UNSUPPORTED_DTYPES for b in v):
                return True
        elif getattr(v, "dtype", None) in UNSUPPORTED_DTYPES:
            return True
    return False


def _mark_flexible(nodes: list[Node], outputs: tuple[Any, ...]) -> tuple[Node, ...]:
    """Buffers that only our own loops read may be laid out anew by the scheduler."""
    fixed = {v.buffer for v in outputs if isinstance(v, ViewOf)}
    for node in nodes:
        if isinstance(node, LibraryCall):
            fixed.update(v.buffer for v in node.views)
    marked: list[Node] = []
    for node in nodes:
        if isinstance(node, Pointwise) and node.name not in fixed:
            node = replace(node, buffer=replace(node.buffer, flexible=True))
        elif isinstance(node, Reduction) and fixed.isdisjoint(b.name for b in node.buffers):
            node = replace(node, buffers=tuple(replace(b, flexible=True) for b in node.buffers))
        marked.append(node)
    return tuple(marked)
