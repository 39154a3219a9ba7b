"""On a GPU: batch norms of inference, activations and residuals become part of the channels-last convolution before them. `fold_cudnn(graph)`.

    convolution -> batch norm -> (+ residual) -> relu      becomes      one call of cuDNN with weight * scale and a bias

Weights are scaled and laid out in every call: nothing tells that a weight on a device has been written (`.data` counts no version), and it costs little; done where the
output outweighs the weights. The scales of all norms are computed at once. The norm of a residual without activation of its own becomes part of the bias. Rounding differs from eager's
and is as close to float64. Only where cuDNN computes on tensor cores: elsewhere, and for depthwise convolutions, its fused kernels are slow.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.trace import drop_dead
from magneto.base.dataclass import dataclass
from magneto.graph.meta import TensorMeta
from magneto.graph.rules import propagate
from magneto.inductor.rewrite import addend, copied, only_user
from magneto.inductor.runtime.kept import tensor_cores

aten = torch.ops.aten
RELU, ADD_RELU = aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default
WORTH = 1  # output elements per weight element


@dataclass(frozen=True, slots=True)
class Chain:
    """convolution, batch norm and the first of its results, then what follows: a residual, relu. `last`: the node whose value the chain computes."""

    convolution: fx.Node
    norm: fx.Node
    last: fx.Node
    residual: fx.Node | None = None
    relu: bool = False


def fold_cudnn(graph: fx.Graph) -> fx.Graph:
    """A graph with fewer operations; `graph` itself when there is nothing to fold."""
    if not any(_foldable(node) for node in graph.nodes):
        return graph
    made = copied(graph)
    _Folding(made).run()
    drop_dead(made)
    return made


def chain_of(node: fx.Node) -> Chain | None:
    """The chain that begins with this convolution: channels-last, in float32, its output larger than its weights."""
    if node.target is not aten.convolution.default or node.args[6]:
        return None
    value, weight, meta = node.args[0].meta["val"], node.args[1].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if meta.ndim != 4 or meta.device.type != "cuda" or meta.dtype is not torch.float32 or weight.numel * WORTH > meta.numel:
        return None
    if not (value.is_channels_last() and meta.is_channels_last() and meta.is_dense()):
        return None
    norm = only_user(node)
    if norm is None or norm.target is not aten.native_batch_norm.default or norm.args[0] is not node or norm.args[5]:
        return None
    last = only_user(norm)
    if last is None or last.target is not operator.getitem or last.args[1] != 0:
        return None
    if any(isinstance(p, fx.Node) and p.meta["val"].dtype is not torch.float32 for p in norm.args[1:5]):
        return None
    after = only_user(last)
    residual = None if after is None else addend(after, last)
    if after is not None and residual is not None:
        after = only_user(after)
    if after is not None and after.target is aten.relu.default:
        return Chain(node, norm, after, residual, True)
    return Chain(node, norm, last)


def _foldable(node: fx.Node) -> Chain | None:
    """The chain of a convolution that cuDNN takes with its norm and activation."""
    chain = chain_of(node)
    return chain if chain is not None and chain.relu and _taken(chain) else None


def _taken(chain: Chain) -> bool:
    weight: TensorMeta = chain.convolution.args[1].meta["val"]  # type: ignore[union-attr]
    grouped = chain.convolution.args[8] != 1
    if (grouped and weight.shape[1] < 4) or not tensor_cores(weight.dtype) or not torch._C._get_cudnn_enabled():
        return False
    return not torch.cuda.is_available() or runs(chain)


def runs(chain: Chain) -> bool:
    """Does this cuDNN have a kernel for it, whose relu keeps NaN as torch's does? Seen by running it once, which also finds the kernel that calls will use."""
    value, weight = (chain.convolution.args[k].meta["val"] for k in (0, 1))  # type: ignore[union-attr]
    result: TensorMeta = chain.convolution.meta["val"]
    key = (value, weight, str(chain.convolution.args[3:]), chain.residual is None)
    if key not in _known and torch.cuda.is_current_stream_capturing():
        return False
    if key not in _known:

        def full(meta: TensorMeta, number: float) -> torch.Tensor:
            return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device).fill_(number)

        _, _, _, stride, padding, dilation, _, _, groups = chain.convolution.args
        bias = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
        added = () if chain.residual is None else (full(result, 0.0), 1.0)
        try:
            op: Any = RELU if chain.residual is None else ADD_RELU
            made = op(full(value, float("nan")), full(weight, 1.0), *added, bias, stride, padding, dilation, groups)
            _known[key] = made.stride() == result.strides and bool(made.isnan().any())
        except RuntimeError:
            _known[key] = False
    return _known[key]


_known: dict[Any, bool] = {}


class _Folding:
    """Replaces chains in a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.affine: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # norm -> (scale, shift)
        self.made: dict[fx.Node, fx.Node] = {}  # end of a chain -> what stands for it

    def run(self) -> None:
        chains = self.chains()
        self.scale([chain.norm for chain, _ in chains])
        for chain, into in chains:
            self.replace(chain) if into is None else self.hand_over(chain, into)

    def chains(self) -> list[tuple[Chain, fx.Node | None]]:
        """What is folded, and for a norm without activation the end of the chain that adds its result."""
        found: list[tuple[Chain, fx.Node | None]] = []
        adds: dict[fx.Node, fx.Node] = {}  # residual -> the end of the chain that adds it
        for node in self.graph.nodes:
            chain = _foldable(node)
            if chain is not None and not (chain.residual is not None and chain.last in adds.values()):
                found.append((chain, None))
                if chain.residual is not None:
                    adds[chain.residual] = chain.last
        taken = {chain.convolution for chain, _ in found}
        for node in self.graph.nodes:
            if node in taken or (chain := chain_of(node)) is None:
                continue
            own = only_user(chain.norm)
            if own in adds and only_user(own) is not None and _taken(chain):
                found.append((Chain(node, chain.norm, own), adds[own]))
        return found

    def scale(self, norms: Sequence[fx.Node]) -> None:
        """scale = gamma / sqrt(variance + eps) and shift = beta - mean * scale of all norms; of those that have all parameters in two operations."""
        whole = [norm for norm in norms if norm.args[1] is not None and norm.args[2] is not None]
        first = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        by_eps: dict[float, list[fx.Node]] = {}
        for norm in whole:
            if all(p.op == "placeholder" for p in norm.args[1:5]):  # type: ignore[union-attr]
                by_eps.setdefault(norm.args[7], []).append(norm)  # type: ignore[arg-type]
        for eps, alike in by_eps.items():
            if len(alike) < 2:
                continue
            with self.graph.inserting_before(first):
                parameters = [self.add(alike[0], aten.cat.default, [norm.args[k] for norm in alike]) for k in (1, 2, 3, 4)]
                scale, shift = self.scaled(alike[0], parameters, eps)
                start = 0
                for norm in alike:
                    end = start + norm.args[1].meta["val"].shape[0]  # type: ignore[union-attr]
                    self.affine[norm] = (
                        self.add(norm, aten.slice.Tensor, scale, 0, start, end),
                        self.add(norm, aten.slice.Tensor, shift, 0, start, end),
                    )
                    start = end

    def scaled(self, norm: fx.Node, parameters: Sequence[Any], eps: Any) -> tuple[fx.Node, fx.Node]:
        gamma, beta, mean, variance = parameters
        scale = self.add(norm, aten.rsqrt.default, self.add(norm, aten.add.Tensor, variance, eps))
        if gamma is not None:
            scale = self.add(norm, aten.mul.Tensor, scale, gamma)
        shift = self.add(norm, aten.neg.default, self.add(norm, aten.mul.Tensor, mean, scale))
        return scale, shift if beta is None else self.add(norm, aten.add.Tensor, shift, beta)

    def add(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new operation, which belongs to what `like` did."""
        made = self.graph.call_function(target, args, kwargs)
        metas = fx.node.map_arg(args, lambda n: n.meta["val"])
        made.meta = {"val": propagate(target, metas, kwargs), "stack": like.meta.get("stack", ())}
        return made

    def parts(self, chain: Chain) -> tuple[fx.Node, fx.Node]:
        """(scaled weight in the layout that cuDNN reads, bias)"""
        _, weight, bias, *_ = chain.convolution.args
        norm = chain.norm
        scale, shift = self.affine.get(norm) or self.scaled(norm, norm.args[1:5], norm.args[7])
        if bias is not None:
            shift = self.add(norm, aten.add.Tensor, shift, self.add(norm, aten.mul.Tensor, bias, scale))
        scaled = self.add(norm, aten.mul.Tensor, weight, self.add(norm, aten.view.default, scale, [-1, 1, 1, 1]))
        if not scaled.meta["val"].is_channels_last():
            scaled = self.add(norm, aten.clone.default, scaled, memory_format=torch.channels_last)
        return scaled, shift

    def replace(self, chain: Chain) -> None:
        value, _, _, stride, padding, dilation, _, _, groups = chain.convolution.args
        with self.graph.inserting_before(chain.last):
            weight, bias = self.parts(chain)
            sizes = (bias, list(stride), list(padding), list(dilation), groups)  # type: ignore[arg-type]
            if chain.residual is None:
                made = self.graph.call_function(RELU, (value, weight, *sizes))
            else:
                residual = self.made.get(chain.residual, chain.residual)
                made = self.graph.call_function(ADD_RELU, (value, weight, residual, 1.0, *sizes))
        made.meta = dict(chain.last.meta)
        self.made[chain.last] = made
        chain.last.replace_all_uses_with(made)
        self.graph.erase_node(chain.last)

    def hand_over(self, chain: Chain, into: fx.Node) -> None:
        """A norm whose only reader adds it to another chain: that one's bias takes its shift."""
        end = self.made[into]
        value, _, _, *sizes = chain.convolution.args
        with self.graph.inserting_before(chain.last):
            weight, shift = self.parts(chain)
            made = self.graph.call_function(aten.convolution.default, (value, weight, None, *sizes))
            made.meta = dict(chain.convolution.meta)
        with self.graph.inserting_before(end):
            end.update_arg(4, self.add(chain.norm, aten.add.Tensor, end.args[4], shift))
        chain.last.replace_all_uses_with(made)
