"""Batch norms of inference, activations and residuals become part of the convolution before them: `fold(graph)`.

    convolution -> (batch norm) -> (activation | + residual)      becomes      one oneDNN call with weight * scale and a bias

Of the activations after a sum the library offers relu alone, and its relu makes 0 of NaN (activation.py): it is taken where another plan may answer (runtime/invalid.py), elsewhere sum and relu stay a loop.

Weights that belong to a module are scaled, and brought into oneDNN's own layout, when their numbers have changed (schedule/prepared.py). Others are scaled in
every call, which is done only where the output outweighs the weights. Rounding differs from eager's and is as close to float64 (measured: at most 1.4 times eager's error). Channels-last (2-D and 3-D) and transposed convolutions
on the CPU, in float32 and bfloat16, and only with a oneDNN that offers the fused operations.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.trace import drop_dead
from magneto.base.dataclass import dataclass
from magneto.base.varying import any_size
from magneto.graph.layout import is_channels_last_contiguous
from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate
from magneto.inductor.activation import Attribute, attribute_of
from magneto.inductor.lower.library import may_alias
from magneto.inductor.rewrite import addend, copied, only_user

aten = torch.ops.aten
WORTH = 1  # output elements per weight element; 1, 2, 4 and 16 measured on ResNet-18 and -50, where folding saves 3 % to 4 % of the run


NOTHING: Attribute = ("none", (), "")
RELU: Attribute = ("relu", (), "")


@dataclass(frozen=True, slots=True)
class Chain:
    """convolution, batch norm (None: there is none), then what follows and can be taken along: a residual or an activation. `last`: the node whose value the chain computes."""

    convolution: fx.Node
    norm: fx.Node | None
    last: fx.Node
    residual: fx.Node | None
    activation: Attribute


def fold(graph: fx.Graph, state: frozenset[int] = frozenset(), speculate: bool = False, ours: bool = False) -> fx.Graph:
    """A graph with fewer operations; `graph` itself when there is nothing to fold, or when it is `ours` to change. `state`: inputs that are weights, which seldom change: what is
    computed of them alone is kept between calls (schedule/prepared.py), so that they are scaled and brought into the library's own layout once. `speculate`: with calls that make 0 of NaN."""
    if not available() or not any(chain_of(node, True) or packed_of(node) for node in graph.nodes):
        return graph
    made = graph if ours else copied(graph)
    kept = {node for k, node in enumerate(n for n in made.nodes if n.op == "placeholder") if k in state}
    for node in list(made.nodes):
        chain = chain_of(node, all(_of_state(n, kept) for n in _weights(node)), speculate)
        if chain is not None:
            _replace(made, chain)
    for node in list(made.nodes):
        if packed_of(node) and _of_state(node.args[1 if node.target is not POINTWISE_ADD else 2], kept):
            _pack(made, node)
    drop_dead(made)
    _write_residuals(made)
    return made


def available() -> bool:
    """Does this torch offer oneDNN's fused convolutions?"""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


def _weights(node: fx.Node) -> list[fx.Node]:
    """Weight and bias of a convolution, and what the norm behind it scales with."""
    if node.target is not aten.convolution.default:
        return []
    norm = only_user(node)
    scales = norm.args[1:5] if norm is not None and norm.target is aten.native_batch_norm.default else ()
    return [n for n in (*node.args[1:3], *scales) if isinstance(n, fx.Node)]


def chain_of(node: fx.Node, kept: bool = False, speculate: bool = False) -> Chain | None:
    """The chain that begins with this convolution. `kept`: its weights are scaled once, not in each call. `speculate`: a relu behind a sum is taken along."""
    if node.target is not aten.convolution.default:
        return None
    value, weight, meta = node.args[0].meta["val"], node.args[1].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if meta.ndim not in (4, 4 if node.args[6] else 5) or meta.device.type != "cpu" or not _computed_in(meta.dtype):
        return None
    if weight.dtype is not meta.dtype or value.dtype is not meta.dtype:
        return None
    if node.args[6]:  # transposed, in whatever layout it is
        if TRANSPOSED is None or not kept or node.args[8] != 1:
            return None
    elif not (_channels_last(value) and _channels_last(meta)):
        return None
    norm, last = _norm_of(node, kept or weight.numel * WORTH <= meta.numel)
    after = only_user(last)
    residual, activation = None, NOTHING
    if after is not None and not node.args[6] and (residual := addend(after, last)) is not None:
        final = only_user(after)
        if final is not None and final.target is aten.relu.default:
            residual, last, activation = (residual, final, RELU) if speculate else (None, last, activation)
        else:
            last = after
    elif after is not None and (found := attribute_of(after)) is not None:
        last, activation = after, found
    return Chain(node, norm, last, residual, activation) if last is not node else None


def _computed_in(dtype: torch.dtype) -> bool:
    return dtype is torch.float32 or (dtype is torch.bfloat16 and _bfloat16_convolutions())


def _norm_of(node: fx.Node, foldable: bool) -> tuple[fx.Node | None, fx.Node]:
    """The batch norm that a convolution's result is for, and what of it is used; (None, the convolution) where that cannot be folded."""
    norm = only_user(node)
    if not foldable or norm is None or norm.target is not aten.native_batch_norm.default or norm.args[0] is not node or norm.args[5]:
        return None, node
    if any(isinstance(p, fx.Node) and p.meta["val"].dtype not in (torch.float32, node.meta["val"].dtype) for p in norm.args[1:5]):
        return None, node
    last = only_user(norm)
    if last is None or last.target is not operator.getitem or last.args[1] != 0:
        return None, node
    return norm, last


def _channels_last(meta: TensorMeta) -> bool:
    """Does it lie so in memory? (One pixel does in either layout, whatever its strides say.)"""
    return meta.ndim in (4, 5) and is_channels_last_contiguous(meta.shape, meta.strides)


def _replace(graph: fx.Graph, chain: Chain) -> fx.Node:
    value, weight, bias, stride, padding, dilation, transposed, more, groups = chain.convolution.args
    with graph.inserting_before(chain.last):
        if chain.norm is not None:
            along = [1, -1, 1, 1] if transposed else [-1] + [1] * (weight.meta["val"].ndim - 1)  # type: ignore[union-attr]
            weight, bias = _scaled(graph, chain.norm, weight, bias, along)
        sizes = (list(padding), *((list(more),) if transposed else ()), list(stride), list(dilation), groups)  # type: ignore[arg-type]
        if chain.residual is None:
            op: Any = TRANSPOSED if transposed else POINTWISE
            args: tuple[Any, ...] = (value, weight, bias, *sizes, chain.activation[0], list(chain.activation[1]), chain.activation[2])
        else:
            op = POINTWISE_ADD
            args = (value, chain.residual, weight, bias, *sizes, "add", 1.0, "relu" if chain.activation is RELU else None, [], None)
        made = graph.call_function(op, args)
        made.meta = dict(chain.last.meta)
    chain.last.replace_all_uses_with(made)
    graph.erase_node(chain.last)
    return made


def _scaled(graph: fx.Graph, norm: fx.Node, weight: Any, bias: Any, along: list[int]) -> tuple[fx.Node, fx.Node]:
    """The convolution's weight and bias with the norm in them, computed in float32 and rounded once."""
    _, gamma, beta, mean, variance, _, _, eps = norm.args
    stack, dtype = norm.meta.get("stack", ()), weight.meta["val"].dtype

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        metas = fx.node.map_arg(args, lambda n: n.meta["val"])
        made.meta = {"val": propagate(target, metas, kwargs), "stack": stack}
        return made

    def as_type(value: Any, wanted: torch.dtype) -> Any:
        return value if value is None or value.meta["val"].dtype is wanted else add(aten._to_copy.default, value, dtype=wanted)

    weight, bias, gamma, beta, mean, variance = (as_type(p, torch.float32) for p in (weight, bias, gamma, beta, mean, variance))
    scale = add(aten.rsqrt.default, add(aten.add.Tensor, variance, eps))
    if gamma is not None:
        scale = add(aten.mul.Tensor, scale, gamma)
    start = mean if bias is None else add(aten.sub.Tensor, mean, bias)
    shift = add(aten.neg.default, add(aten.mul.Tensor, start, scale))
    if beta is not None:
        shift = add(aten.add.Tensor, shift, beta)
    return as_type(add(aten.mul.Tensor, weight, add(aten.view.default, scale, along)), dtype), as_type(shift, dtype)


# ---- weights in the library's own layout -----------------------------------------------------------------------------------


def _offered(name: str, overload: str = "default") -> Any:
    """An operation of oneDNN, None where this torch has none of that name."""
    return getattr(getattr(torch.ops.mkldnn, name, None), overload, None) if available() else None


POINTWISE = _offered("_convolution_pointwise")
POINTWISE_ADD = _offered("_convolution_pointwise", "binary")
TRANSPOSED = _offered("_convolution_transpose_pointwise") if _offered("_reorder_convolution_transpose_weight") is not None else None
OPAQUE = frozenset(
    op for name in ("_reorder_convolution_weight", "_reorder_convolution_transpose_weight") if (op := _offered(name)) is not None
)
"""Operations whose result has a layout that only the library knows."""


def packed_of(node: fx.Node) -> bool:
    """A convolution that reorders its weights in each call? (Small depthwise ones gain most: what the library does besides costs more than their arithmetic.)"""
    if node.target not in (aten.convolution.default, POINTWISE, POINTWISE_ADD, TRANSPOSED) or node.target is None:
        return False
    value, meta = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    weight = node.args[2 if node.target is POINTWISE_ADD else 1].meta["val"]  # type: ignore[union-attr]
    if meta.ndim not in (4, 5) or meta.device.type != "cpu" or not _computed_in(meta.dtype):
        return False
    if weight.dtype is not meta.dtype or value.dtype is not meta.dtype:
        return False
    if node.target is TRANSPOSED or (node.target is aten.convolution.default and node.args[6]):
        return bool(TRANSPOSED is not None and meta.ndim == 4 and (node.target is TRANSPOSED or node.args[8] == 1))
    return _channels_last(value) and _channels_last(meta)


@cache
def _bfloat16_convolutions() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _of_state(weight: Any, kept: set[fx.Node]) -> bool:
    """Is it computed of weights only?"""
    if not isinstance(weight, fx.Node):
        return False
    if weight.op == "placeholder":
        return weight in kept
    return weight.op == "call_function" and bool(weight.all_input_nodes) and all(_of_state(n, kept) for n in weight.all_input_nodes)


def _pack(graph: fx.Graph, node: fx.Node) -> None:
    """The convolution reads a weight that was reordered before."""
    if node.target is aten.convolution.default:
        node = _replace(graph, Chain(node, None, node, None, NOTHING))
    at = 2 if node.target is POINTWISE_ADD else 1
    weight, sizes = node.args[at], node.args[at + 2 : at + (7 if node.target is TRANSPOSED else 6)]
    assert isinstance(weight, fx.Node)
    reorder = torch.ops.mkldnn._reorder_convolution_weight
    if node.target is TRANSPOSED:
        reorder = torch.ops.mkldnn._reorder_convolution_transpose_weight
    shape = None if any_size() else list(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    with graph.inserting_before(node):
        packed = graph.call_function(reorder.default, (weight, *sizes, shape))
    packed.meta = dict(weight.meta)
    node.update_arg(at, packed)


# ---- residuals written in place ---------------------------------------------------------------------------------------------

POINTWISE_INTO = _offered("_convolution_pointwise_", "binary")
FRESH = frozenset({POINTWISE, POINTWISE_ADD, POINTWISE_INTO, TRANSPOSED, aten.convolution.default, aten.relu.default} - {None})
"""Operations whose result is in memory of its own."""


def _write_residuals(graph: fx.Graph) -> None:
    """A residual that nobody reads afterwards takes the sum: its memory is read anyway, and no other is touched."""
    if POINTWISE_INTO is None:
        return
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not POINTWISE_ADD:
            continue
        value, other = node.args[:2]
        others = [user for user in other.users if user is not node]
        if value is other or other.target not in FRESH or any(place[user] > place[node] or _aliases(user.target) for user in others):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(POINTWISE_INTO, (other, value, *node.args[2:]))
        made.meta = dict(node.meta)
        place[made] = place[node]
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def hides_nan(op: Any, args: Sequence[Any]) -> bool:
    """Does this call make 0 of NaN?"""
    return op is not None and op in (POINTWISE_ADD, POINTWISE_INTO) and "relu" in args


def _aliases(op: Any) -> bool:
    """May a result share memory with an argument?"""
    return not isinstance(op, torch._ops.OpOverload) or may_alias(op)
