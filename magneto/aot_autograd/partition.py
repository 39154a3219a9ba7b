"""Cutting a joint graph into a forward and a backward graph.

Which forward values are kept for backward is a minimum cut: a value costs its bytes to keep (nothing, when it is an input, a result, or kept anyway),
and a value that is not kept is computed again in backward from what is. Only cheap operations may be computed again; random ones never are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.ahead import Ahead, prepared
from magneto.aot_autograd.joint import JointGraph
from magneto.aot_autograd.mincut import min_cut
from magneto.aot_autograd.overloads import aten
from magneto.aot_autograd.recompute import computed_again, dear, read_apart
from magneto.aot_autograd.refusal import OtherGraph, Refusal
from magneto.aot_autograd.trace import drop_dead
from magneto.aot_autograd.views import VIEWS, packet_of
from magneto.base.dataclass import dataclass
from magneto.base.events import counter
from magneto.base.flags import config
from magneto.base.varying import any_size, chosen
from magneto.graph.append import append_call
from magneto.graph.higher import plain
from magneto.graph.meta import TensorMeta
from magneto.graph.opinfo import stays
from magneto.graph.rules import propagate
from magneto.prims.prim import Prim

Gradient = int | tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Kept:
    """A value the backward needs: input, result or further output ("extra") `index` of the forward graph."""

    kind: str
    index: int


@dataclass(frozen=True, slots=True)
class Partition:
    """`forward` returns the results, then the extras. `backward` takes the kept values, then the tangents; it returns `n_gradients` distinct tensors.

    `gradients[i]`: for input i None, an index into what backward returns, or ("tangent", k); `origins[i]`: the tangents of which one at least must be there for it.
    """

    forward: fx.Graph
    backward: fx.Graph
    kept: tuple[Kept, ...]
    gradients: tuple[Gradient, ...]
    origins: tuple[frozenset[int], ...]


def partition(joint: JointGraph) -> Partition:
    roots = checked_by_autograd(joint)
    joint, ahead = prepared(joint) if joint.checked is not None and config.numerics != "eager" and not any_size() else (joint, [])
    kept_nodes = _kept(joint, roots, ahead)
    while refused := [one for one in ahead if one.made not in kept_nodes]:
        for one in refused:
            joint = one.undone(joint)
        ahead = [one for one in ahead if one not in refused]
        kept_nodes = _kept(joint, roots, ahead)
    counter("gradients_ahead", len(ahead))
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder" and node.meta["stage"] == "forward"]
    wanted = _wanted(joint)
    written = {mutation.index for mutation in joint.signature.mutations}
    forward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = forward.node_copy(node)
        env[node].meta = node.meta
    extras: list[fx.Node] = []
    kept: list[Kept] = []
    place = {node: i for i, node in enumerate(inputs)}
    result_place = {node: i for i, node in reversed(list(enumerate(joint.results)))}
    for node in kept_nodes:
        if node in place and place[node] not in written and node in roots:
            kept.append(Kept("input", place[node]))
        elif node in result_place and node in roots:
            kept.append(Kept("result", result_place[node]))
        else:
            kept.append(Kept("extra", len(extras)))
            extras.append(node)
    copy_needed(forward, [*joint.results, *extras], env, _effects(joint))
    outputs = [env[node] for node in joint.results]
    for node in extras:
        copied = node in place or node in result_place or not node.meta["val"].is_dense()
        outputs.append(_cloned(forward, env[node]) if copied else env[node])
    forward.output(tuple(outputs))
    drop_dead(forward)
    backward = _backward_graph(joint, kept_nodes, kept, wanted)
    gradients = tuple(_gradient(node, wanted, joint.tangents) for node in joint.gradients)
    return Partition(forward, backward, tuple(kept), gradients, joint.origins)


def _wanted(joint: JointGraph) -> list[fx.Node]:
    return [node for node in dict.fromkeys(n for n in joint.gradients if n is not None) if node not in joint.tangents]


def _kept(joint: JointGraph, roots: frozenset[fx.Node], ahead: Sequence[Ahead]) -> list[fx.Node]:
    wanted, made = _wanted(joint), {one.made for one in ahead}
    itself = {node for node in wanted if node.meta["stage"] == "forward"}  # gradients that are a value of the forward
    read, cost = sorted(read_by_backward(wanted) | itself), _cost(joint, roots, made)
    kept = _chosen(joint.graph, lambda: min_cut(read, cost, _recomputable))
    again = lambda node: _recomputable(node) and not _checkpointed(node)  # noqa: E731
    late = lambda node: node.meta.get("stage") != "forward"  # noqa: E731
    held = set(kept)
    if free := dear(joint.graph.nodes, held, again, late):
        if read_apart(joint.graph, free, held, again, late):
            read = sorted(read_by_backward(wanted) | itself)
        kept = min_cut(read, lambda node: 0 if node in free else cost(node), _recomputable)
    return kept


def _chosen(graph: fx.Graph, cut: Callable[[], list[fx.Node]]) -> list[fx.Node]:
    """What `cut` gives; for all samples of a family what it gives for the first one."""
    if not any_size():
        return cut()
    places = {node: k for k, node in enumerate(graph.nodes)}
    form = [(node.target, [places[source] for source in node.all_input_nodes]) for node in places]
    first, kept = chosen(lambda: (form, [places[node] for node in cut()]))
    if first != form:
        raise OtherGraph("what forward and backward compute depends on sizes", (len(first), len(form)))
    nodes = list(places)
    return [nodes[k] for k in kept]


def _effects(joint: JointGraph) -> list[fx.Node]:
    """Forward operations that are kept although nothing may read them: they advance the random stream, or raise."""
    return [node for node in joint.graph.nodes if node.op == "call_function" and stays(node.target) and node.meta["stage"] == "forward"]


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _cloned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The numbers of an input or result that is written before backward, by the graph or perhaps by its caller, or of a value with gaps."""
    copy = graph.call_function(aten.clone.default, (node,))
    copy.meta.update(val=propagate(aten.clone.default, (node.meta["val"],), {}), stack=(), stage="forward")
    return copy


def owned(graph: fx.Graph, node: fx.Node, shared: bool = False) -> fx.Node:
    """A gradient in dense memory of its own; autograd would copy an expanded one before it is accumulated."""
    meta: TensorMeta = node.meta["val"]
    if not meta.is_dense():
        copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        copy.meta.update(val=TensorMeta.contiguous(meta.shape, meta.dtype, meta.device), stack=(), stage="backward")
        return copy
    return _cloned(graph, node) if shared or node.op == "placeholder" else node


def copy_needed(graph: fx.Graph, roots: Iterable[fx.Node], env: dict[fx.Node, fx.Node], effects: Sequence[fx.Node] | None = None) -> None:
    """Copy what `roots` and a forward's `effects` need into `graph`, in the old order (random numbers have one); `env` maps what is there already."""
    needed: set[fx.Node] = set()
    stack = [*roots, *(effects or ())]
    while stack:
        node = stack.pop()
        if node not in needed and node not in env:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in _as_late_as_possible(needed) if effects is None else sorted(needed):
        copy = append_call(graph, node.op, node.target, *fx.map_arg((node.args, node.kwargs), env.__getitem__))
        copy.meta = node.meta
        env[node] = copy


def _as_late_as_possible(needed: set[fx.Node]) -> list[fx.Node]:
    """Operations of forward stand right before what first reads them in backward, so that what is computed again is not in memory for long."""
    ordered: dict[fx.Node, None] = {}
    stack = [node for node in sorted(needed, reverse=True) if node.meta["stage"] == "backward"]
    while stack:
        node = stack[-1]
        missing = [source for source in node.all_input_nodes if source in needed and source not in ordered]
        if missing and node not in ordered:
            stack.extend(sorted(missing, reverse=True))
            continue
        stack.pop()
        ordered.setdefault(node)
    return [*ordered, *(node for node in sorted(needed) if node not in ordered)]


def _backward_graph(joint: JointGraph, kept: Sequence[fx.Node], places: Sequence[Kept], wanted: Sequence[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate([*kept, *joint.tangents]):
        name = f"kept_{i}" if i < len(kept) else node.name
        env[node] = graph.placeholder(name)
        env[node].meta = node.meta
    closed = [env[node] for node, kind in zip(kept, places, strict=True) if kind.kind == "extra" and not node.meta["val"].is_dense()]
    for node in closed:
        node.meta = {**node.meta, "val": propagate(aten.clone.default, (node.meta["val"],), {})}
    copy_needed(graph, wanted, env)
    _describe_again(graph, set(closed))
    graph.output(tuple([owned(graph, env[node]) for node in wanted]))
    drop_dead(graph)
    return graph


def _describe_again(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Metadata of what is computed from kept values whose layout is another one than it was in forward."""
    for node in graph.nodes:
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        op: Any = node.target
        if "as_strided" in str(op):
            raise Refusal("a value with gaps in memory is kept for backward, which looks at its memory")
        args, kwargs = plain(fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"]))
        value = op.meta(*args) if isinstance(op, Prim) else args[0][args[1]] if op is operator.getitem else propagate(op, args, kwargs)
        if value != node.meta["val"]:
            changed.add(node)
            node.meta = {**node.meta, "val": value}


def _gradient(node: fx.Node | None, wanted: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> Gradient:
    if node is None:
        return None
    if node in tangents:
        return ("tangent", tangents.index(node))
    return wanted.index(node)


# ---- what to keep ----------------------------------------------------------------------------------------------------

# Computing these again costs next to nothing: they fuse into whatever reads them.
CHEAP = frozenset(
    """add sub mul div neg abs exp exp2 expm1 log log1p log2 log10 sqrt rsqrt reciprocal sin cos tan tanh sigmoid silu gelu relu erf hardtanh
    hardswish hardsigmoid hardswish leaky_relu elu softplus mish clamp clamp_min clamp_max where eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_xor bitwise_not maximum minimum pow square sign sgn floor ceil round trunc masked_fill rsub isnan isinf
    remainder fmod atan2 asin acos atan sinh cosh lerp addcmul addcdiv _to_copy clone fill full full_like zeros ones zeros_like ones_like
    arange scalar_tensor new_zeros new_ones new_full view _unsafe_view t transpose permute expand squeeze unsqueeze select slice alias detach
    diagonal unfold split split_with_sizes unsafe_split unsafe_split_with_sizes unbind view_as_real view_as_complex _conj tril triu getitem lift_fresh_copy""".split()
)


def cheap(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_random(node) and packet_of(node) in CHEAP


def read_by_backward(wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """Forward nodes that the formulas of autograd read: what eager saves."""
    needed: set[fx.Node] = set()
    direct: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        for source in node.all_input_nodes:
            if source.meta["stage"] == "forward":
                direct.add(source)
            else:
                stack.append(source)
    return direct


def checked_by_autograd(joint: JointGraph) -> frozenset[fx.Node]:
    """The inputs and results that formulas of autograd read, or views of them. Only of these an input or result is kept itself, whose version is checked as eager checks it: any other may be
    written by the caller before backward, where eager, which has saved something else, does not mind."""
    if joint.checked is not None:
        return joint.checked
    found: set[fx.Node] = set()
    stack = list(read_by_backward([node for node in joint.gradients if node is not None]))
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node.op == "call_function" and packet_of(node) in VIEWS:
                stack.append(node.all_input_nodes[0])
    results = set(joint.results)
    return frozenset(node for node in found if node.op == "placeholder" or node in results)


def _checkpointed(node: fx.Node) -> bool:
    """Whether the program asked for the value to be computed again in backward. Random numbers are drawn once."""
    if node.target is operator.getitem:
        return _checkpointed(node.args[0])  # type: ignore[arg-type]
    return "checkpoint" in node.meta and not is_random(node)


def _crosses(node: fx.Node) -> bool:
    """Whether a value leaves its checkpointed body: what the next one starts from may be kept."""
    region = node.meta.get("checkpoint")
    return any(user.meta["stage"] == "forward" and user.meta.get("checkpoint") != region for user in node.users)


def _recomputable(node: fx.Node) -> bool:
    if node.op == "call_function" and _checkpointed(node):
        return True
    if computed_again(node):
        return True
    if not cheap(node):
        return False
    return node.target is not operator.getitem or cheap(node.args[0])  # type: ignore[arg-type]


def _cost(joint: JointGraph, roots: frozenset[fx.Node], made: Collection[fx.Node]) -> Callable[[fx.Node], int | None]:
    """Bytes that keeping a node costs; None when it cannot be kept (several results in one node, a view with gaps). Inputs and results that
    autograd reads (`roots`) are there anyway; others are copied. Gradients `made` ahead may be an eighth larger (zeros for the last word, which is no target's) than what they are made of."""
    results = set(joint.results)

    def cost(node: fx.Node) -> int | None:
        meta = node.meta["val"]
        if not isinstance(meta, TensorMeta):
            return None
        if node.op == "call_function" and _checkpointed(node) and node not in results and not _crosses(node):
            return None
        if node in roots:
            return 0
        if not meta.is_dense() and _recomputable(node):  # a view with gaps: what it is a view of is kept, or computed again too
            return None
        if node.op == "placeholder":  # read once more for the copy: of equal bytes rather what is computed
            return meta.nbytes + meta.nbytes // 16 + 1
        return meta.nbytes * 7 // 8 if node in made else meta.nbytes + 1

    return cost
