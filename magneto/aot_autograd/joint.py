"""Forward and backward in one functional graph, traced through PyTorch's own autograd engine.

The captured graph runs on hollow tensors with grad mode as captured; then the engine runs backward from the results that require grad, under the same dispatch mode.
All formulas are PyTorch's. Nodes are marked with ``meta["stage"]``: forward or backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from magneto.aot_autograd.arrivals import watched
from magneto.aot_autograd.mode import FunctionalMode, hollow
from magneto.aot_autograd.overloads import aten
from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.related import find_links
from magneto.aot_autograd.results import Collector
from magneto.aot_autograd.signature import Signature
from magneto.aot_autograd.trace import Tracing, begin, describe, run_captured, steady_state
from magneto.aot_autograd.views import base_of
from magneto.base.dataclass import dataclass, replace
from magneto.graph.fake import VALUE_METHODS
from magneto.graph.gradient import Gradients
from magneto.graph.meta import TensorMeta

_LOOK = {
    torch.ops.aten._pack_padded_sequence.default: "a packed sequence, of which backward reads the sizes",
    torch.ops.aten.linalg_eig.default: "eigenvectors, whose backward refuses some gradients by their values",
    torch.ops.aten._linalg_eigh.default: "complex eigenvectors, whose backward refuses some gradients by their values",
}  # while it is traced, backward would read hollow memory, or not look

_OF_COMPLEX = frozenset({torch.ops.aten._linalg_eigh.default})  # real eigenvectors are given up to their sign, which no gradient sees


@dataclass(frozen=True, slots=True)
class JointGraph:
    """`graph` has no output node. `results`: nodes the forward returns. `tangents[k]`: placeholder of the gradient of result
    `differentiable[k]`. `gradients[i]`: node of the gradient of input i (constants included), or None; `origins[i]`: the tangents of which one at least must be there for it. `order`: the leaves
    among the inputs, as they get their gradients. `read_late`: inputs whose memory formulas of autograd read. `checked`: the inputs and results whose version autograd checks, when
    the graph itself does not show it any more. `frees`: whether a formula has saved tensors, which a backward frees."""

    graph: fx.Graph
    signature: Signature
    constants: tuple[torch.Tensor, ...]
    results: tuple[fx.Node, ...]
    differentiable: tuple[int, ...]
    tangents: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    name: str = "graph"
    checked: frozenset[fx.Node] | None = None
    frees: bool = True
    origins: tuple[frozenset[int], ...] = ()
    order: tuple[int, ...] = ()
    read_late: frozenset[int] = frozenset()


class _Reads(Refusal):
    """A formula in Python reads a tensor."""


def trace_joint(gm: fx.GraphModule, inputs: Sequence[Any], grad_enabled: bool = True, name: str = "graph") -> JointGraph:
    """Nothing is computed, no gradient is accumulated. Raises Refusal, or what torch raises for a call that is wrong."""
    try:
        return _trace_joint(gm, inputs, grad_enabled, name, False)
    except _Reads:
        return _trace_joint(gm, inputs, grad_enabled, name, True)


def _trace_joint(gm: fx.GraphModule, inputs: Sequence[Any], grad_enabled: bool, name: str, whole_formulas: bool) -> JointGraph:
    if gm.meta.get("magneto", {}).get("shows_history"):
        raise Refusal("the program asks what autograd has recorded (grad_fn, gradients of what is computed on the way)")
    with steady_state(grad_enabled):
        leaves: dict[int, torch.Tensor] = {}
        tracing, tensors = begin(gm, inputs)
        tracing.whole_formulas = whole_formulas
        tensors = _require_grad(tracing, tensors, leaves)
        copies = {i: _copied(tracing, leaf) for i, leaf in leaves.items() if _repeats(leaf)}
        with tracing.mode:
            value = run_captured(gm, tracing, [copies.get(i, tensor) for i, tensor in enumerate(tensors)])
            if copies:
                value = _laid_out_as_captured(gm, value)
        _refuse_shown(tracing, list(copies.values()), value)
        for node in tracing.mode.graph.nodes:
            if (
                node.op == "call_function"
                and node.target in _LOOK
                and (node.target not in _OF_COMPLEX or node.args[0].meta["val"].dtype.is_complex)
            ):
                raise Refusal(_LOOK[node.target])
        value, spent = _without_freed(gm, value)
        value, made = _without_leaves(value, tensors)
        collector, signature = describe(gm, tracing, tensors, value)
        signature = replace(signature, training=True, effects=True, spent=spent, leaves=made)
        differentiable = tuple(sorted(collector.carriers))
        if differentiable and not leaves:
            raise Refusal("a result requires grad though no input does")
        if not signature.single:
            outputs, links = find_links(collector.carriers, signature, value, tensors)
            signature = replace(signature, outputs=outputs, links=links)
        mode = tracing.mode
        results = tuple(collector.results)
        frees = _has_saved([carrier.grad_fn for carrier in collector.carriers.values()])
        flow = _backward(mode, collector, differentiable, leaves, len(tensors), results)
    constants = (*tracing.attributes, *mode.literals)
    signature = replace(signature, n_constants=len(constants))
    more = len(mode.literals)
    return JointGraph(
        mode.graph, signature, constants, results, differentiable, flow.tangents, (*flow.gradients, *(None,) * more), name, frees=frees,
        origins=(*flow.origins, *(frozenset[int](),) * more),
        order=tuple(i for i in flow.order if (*tracing.inputs, *tracing.attributes)[i].is_leaf), read_late=frozenset(mode.read_late),
    )  # fmt: skip


def _has_saved(todo: list[Any]) -> bool:
    """Whether any formula has saved a tensor: only then autograd refuses to go through the graph a second time."""
    return any(isinstance(fn, torch.autograd.function.BackwardCFunction) or any(_saved(fn)) for fn in _behind(todo))


def _is_freed(fn: Any) -> bool:
    """Whether what some formula behind has saved is gone."""
    try:
        for one in _behind([fn]):
            [*_saved(one)]
    except RuntimeError as error:
        return "a second time" in str(error)
    return False


def _saved(fn: Any) -> Iterator[bool]:
    """Of each thing that a formula may save, whether it has. RuntimeError where it has been freed."""
    kind = type(fn)
    if kind not in _SAVES:
        _SAVES[kind] = tuple(name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw_saved"))
    return (getattr(fn, name) is not None for name in _SAVES[kind])


def _behind(todo: list[Any]) -> Iterator[Any]:
    """These nodes of autograd and all that come after them."""
    seen = set(todo)
    while todo:
        fn = todo.pop()
        yield fn
        found = {following for following, _ in getattr(fn, "next_functions", ()) if following is not None} - seen
        seen |= found
        todo.extend(found)


class _Unread(TorchFunctionMode):
    """Formulas in Python (of custom operations) are refused where they take the numbers out of a tensor: there are none, and no dispatch would tell."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _READS:
            raise _Reads(f"a backward in Python that reads a tensor ({func.__name__})")
        return func(*args, **(kwargs or {}))


_READS = frozenset(getattr(torch.Tensor, name) for name in VALUE_METHODS - {"untyped_storage"})


_SAVES: dict[type, tuple[str, ...]] = {}


def _copied(tracing: Tracing, leaf: torch.Tensor) -> torch.Tensor:
    """Views are told apart by where they lie: an input that requires grad and whose elements share memory is a dense copy in the graph."""
    with tracing.mode, torch.enable_grad():
        return leaf.clone()


def _laid_out_as_captured(gm: fx.GraphModule, value: Any) -> Any:
    """What is computed of dense copies may lie otherwise than what is computed of the inputs themselves."""
    values = value if isinstance(value, tuple) else (value,)
    nodes: Any = gm.graph.output_node().args[0] if isinstance(value, tuple) else gm.graph.output_node().args
    tensors = {id(item): item for item in values if isinstance(item, torch.Tensor)}
    memory = [item.untyped_storage().data_ptr() for item in tensors.values()]
    made: dict[int, torch.Tensor] = {}
    for item, node in zip(values, nodes, strict=True):
        meta = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(item, torch.Tensor) or not isinstance(meta, TensorMeta) or id(item) in made:
            continue
        if all(a == b or size <= 1 for a, b, size in zip(item.stride(), meta.strides, item.shape, strict=True)):
            continue
        if item._is_view() or memory.count(item.untyped_storage().data_ptr()) > 1:
            raise Refusal("views of what is computed of an input that requires grad and whose elements share memory")
        with torch.set_grad_enabled(item.requires_grad):
            made[id(item)] = item.new_empty_strided(item.shape, meta.strides).copy_(item)
    found = tuple([made.get(id(item), item) for item in values])
    return found if isinstance(value, tuple) else found[0]


def _refuse_shown(tracing: Tracing, copies: list[torch.Tensor], value: Any) -> None:
    """The input itself may have been meant."""
    memory = {x.untyped_storage().data_ptr() for x in copies}
    shown = [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)] if copies else ()
    written = any(tracing.mode.view_for(x).storage.version for x in copies)  # through `.data` too, which has a version counter of its own
    if written or any(x.untyped_storage().data_ptr() in memory for x in shown):
        raise Refusal("an input that requires grad and whose elements share memory is written or returned")


def _repeats(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and any(not stride and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


def _without_freed(gm: fx.GraphModule, value: Any) -> tuple[Any, tuple[int, ...]]:
    """The outputs, those cut off from autograd whose graph a backward inside has freed, or that are computed from such; and which these are."""
    if not any(isinstance(node.target, Gradients) and not node.target.retain for node in gm.graph.nodes):
        return value, ()
    freed = [k for k, item in enumerate(value) if isinstance(item, torch.Tensor) and item.grad_fn is not None and _is_freed(item.grad_fn)]
    if not freed:
        return value, ()
    return tuple(item.detach() if k in freed else item for k, item in enumerate(value)), tuple(freed)


def _without_leaves(value: Any, tensors: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
    """The outputs, those cut off from autograd that the graph has made leaves; and which these are. Refuses where gradients may flow to one later."""
    if not isinstance(value, tuple):
        return value, ()
    known = {id(tensor) for tensor in tensors}
    made = [
        k
        for k, item in enumerate(value)
        if isinstance(item, torch.Tensor) and item.requires_grad and not item._is_view() and item.is_leaf and id(item) not in known
    ]
    if not made:
        return value, ()
    leaves = {id(value[k]) for k in made}
    todo = [item.grad_fn for item in value if isinstance(item, torch.Tensor) and item.grad_fn is not None]
    seen = set(todo)
    while todo:
        fn = todo.pop()
        if id(getattr(fn, "variable", None)) in leaves:
            raise Refusal("a tensor that requires grad is made in the graph")
        for found, _ in fn.next_functions:
            if found is not None and found not in seen:
                seen.add(found)
                todo.append(found)
    return tuple(item.detach() if k in made else item for k, item in enumerate(value)), tuple(made)


def _require_grad(tracing: Tracing, tensors: list[Any], leaves: dict[int, torch.Tensor]) -> list[Any]:
    """Inputs that require grad become leaves (by index in `leaves`), and what autograd computed becomes such a tensor again."""
    mode = tracing.mode
    originals = [*tracing.inputs, *tracing.attributes]
    result: list[Any] = []
    for index, (original, tensor) in enumerate(zip(originals, tensors, strict=True)):
        if not isinstance(original, torch.Tensor) or not original.requires_grad:
            result.append(tensor)
            continue
        leaf = tensor.requires_grad_()
        leaves[index] = leaf
        result.append(leaf if original.is_leaf or _repeats(original) else _not_a_leaf(mode, tracing, index, leaf))
    return result


def _not_a_leaf(mode: FunctionalMode, tracing: Tracing, index: int, leaf: torch.Tensor) -> torch.Tensor:
    """A tensor with the leaf's value and an identity as history: it may be written in place, as the caller's non-leaf tensor may."""
    view = tracing.roots[index]
    assert view is not None
    with mode, torch.enable_grad():
        tensor = leaf.clone(memory_format=torch.preserve_format)
    if tensor.stride() != leaf.stride():
        made = [hollow(TensorMeta.of(leaf))]  # the mode would see how it is made
        with mode, torch.enable_grad():
            tensor = Identity.apply(leaf, made)  # type: ignore[no-untyped-call]
    root = mode.storages.add_root(tensor, view.meta, view.node, index)
    tracing.roots[index] = root
    tracing.versions[index] = tensor._version
    tracing.histories[index] = tensor.grad_fn
    return tensor


class Identity(torch.autograd.Function):
    """Another memory with the same geometry, which is given in a list; gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@dataclass(frozen=True, slots=True)
class _Flow:
    """What flows back: the tangents' placeholders, for each input a gradient or None and the tangents it is made of, and the inputs that get one, in this order."""

    tangents: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    origins: tuple[frozenset[int], ...]
    order: tuple[int, ...]


def _backward(
    mode: FunctionalMode, collector: Collector, differentiable: tuple[int, ...], leaves: dict[int, torch.Tensor], n: int,
    results: tuple[fx.Node, ...],
) -> _Flow:  # fmt: skip
    """Run the engine."""
    gradients: list[fx.Node | None] = [None] * n
    origins = [frozenset[int]()] * n
    if not differentiable or not leaves:
        return _Flow((), tuple(gradients), tuple(origins), ())
    # A formula that computes such a value again does not read the tensor that the caller may write.
    mode.forget([base_of(node) for node in results])
    mode.stage, mode.stack = "backward", ()
    tangents, seeds = [], []
    for k, index in enumerate(differentiable):
        meta: TensorMeta = results[index].meta["val"]
        carrier = collector.carriers[index]
        node = mode.graph.placeholder(f"tangent_{k}")
        node.meta.update(val=meta, stack=(), stage="backward")
        seed = hollow(meta)
        if seed.shape != carrier.shape:
            raise Refusal("a gradient of another shape than its tensor")
        mode.storages.add_root(seed, meta, node)
        if meta.dtype.is_complex and collector.in_parts(index):
            mode.in_parts.add(node)
        tangents.append(node)
        seeds.append(seed)
    outputs = tuple(collector.carriers[index] for index in differentiable)
    engine = torch.autograd.Variable._execution_engine
    autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in autocast:
        torch.set_autocast_enabled(kind, False)
    python = any(isinstance(fn, torch.autograd.function.BackwardCFunction) for fn in _behind([output.grad_fn for output in outputs]))
    with watched(mode, outputs, leaves) as arrivals, mode, torch.no_grad(), _Unread() if python else nullcontext():
        found = engine.run_backward(outputs, tuple(seeds), False, False, tuple(leaves.values()), True, False)
    for index, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            gradients[index] = _added_in_place(mode, mode.read(mode.view_for(gradient)))
            origins[index] = arrivals.origins(leaves[index])
    return _Flow(tuple(tangents), tuple(gradients), tuple(origins), tuple(arrivals.order))


def _added_in_place(mode: FunctionalMode, gradient: fx.Node) -> fx.Node:
    """The engine adds to the first of a leaf's gradients in place if nobody else holds it (while it is traced, somebody does): the sum has that one's strides,
    those of dimensions of size 1 too."""
    total, wanted = gradient, gradient.meta["val"]
    while total.target is aten.add.Tensor and len({*total.args}) == 2 and isinstance(total.args[1], fx.Node):
        first = total.args[0]
        if not isinstance(first, fx.Node) or len(first.users) > 1 or first.op != "call_function" or base_of(first) is not first:
            break
        found: TensorMeta = first.meta["val"]
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype) or not found.is_dense():
            break
        total, wanted = first, found
    return mode.with_strides(gradient, wanted)
