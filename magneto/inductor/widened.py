"""Products, convolutions, attention and the like of float16 and bfloat16 are computed in float32 where the machine multiplies no such numbers: `widen(graph)`.

    mm(a, b)      becomes      to(mm(to(a, float32), to(b, float32)), bfloat16)

Without instructions for them the libraries fall back on loops that take 2 to 70 times as long as the float32 product (AMD Milan, two threads: a linear layer of 256 x 512 x 512 in
bfloat16 8.2 ms, converted 1.05; a convolution 5.7 and 0.36; gradients of attention over 512 places 157 and 27). Sums are as exact or more so: products of such numbers are exact in float32,
and the result is rounded once. What converts becomes part of the kernels before and behind; conversions of weights are kept (schedule/prepared.py).

In inference of bfloat16 a batch norm, an activation and a residual behind a convolution stay in float32 with it, so that they can become part of it, and what a widened operation reads of
another is not rounded in between. Numbers of float16 are: eager's may be infinite.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.trace import drop_dead
from magneto.graph.attention import ATTENTION
from magneto.graph.meta import TensorMeta
from magneto.graph.narrow import narrow_types
from magneto.inductor.activation import attribute_of
from magneto.inductor.rewrite import Adding, addend, copied, laid_out, only_user

aten = torch.ops.aten

FEW = 8  # rows of a factor; for fewer the libraries' loop over a matrix whose columns lie one behind the other is limited by memory, which float32 has twice as much of
_PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1, aten.mv.default: 0, aten.addmv.default: 1}
"""And where their first factor stands."""
_OTHERS = frozenset(
    op.default
    for op in (
        aten.bmm,
        aten.baddbmm,
        aten.addbmm,
        aten.convolution,
        aten.convolution_backward,
        aten._trilinear,
        aten.addr,
        aten.conv_tbc,
        aten.affine_grid_generator,
        aten.erfinv,
        getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None),
        getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None),
    )
    if op is not None
) | {ATTENTION}
_SHOWING = frozenset(
    {aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default}
    | {aten.transpose.int, aten.t.default, aten.clone.default}
)


def widen(graph: fx.Graph, training: bool = False) -> fx.Graph:
    """A graph that multiplies in float32; `graph` itself where there is nothing to widen. `training`: everything is rounded where eager rounds it."""
    if not narrow_types() or not any(_narrow(node) for node in graph.nodes):
        return graph
    made = copied(graph)
    widening = _Widening(made, training)
    for node in list(made.nodes):
        widening.visit(node)
    drop_dead(made)
    return made


def _narrow(node: fx.Node) -> torch.dtype | None:
    """The type of a product that is to be widened."""
    if node.target in _PRODUCTS:
        if not _pays(node):
            return None
    elif node.target not in _OTHERS:
        return None
    if node.kwargs.get("alpha") == 0:  # which factors that are not finite survive in no float32 product
        return None
    metas = [n.meta["val"] for n in node.all_input_nodes]
    dtype = next((m.dtype for m in metas if m.dtype in narrow_types()), None)
    return dtype if all(m.device.type == "cpu" for m in metas) else None


def _pays(node: fx.Node) -> bool:
    """A product of many rows, or with a matrix that the libraries read across? They do so well for bfloat16 and a vector."""
    a, b = (n.meta["val"] for n in node.args[_PRODUCTS[node.target] :][:2])  # type: ignore[union-attr]
    if len(b.shape) == 1:
        return bool(a.strides[1] != 1 and a.dtype is torch.float16)
    return not isinstance(a.shape[0], int) or a.shape[0] >= FEW or b.strides[0] != 1


def _shows(node: fx.Node) -> bool:
    """All elements of another value, in other places?"""
    if node.target not in _SHOWING or not isinstance(node.args[0], fx.Node):
        return False
    source, meta = node.args[0].meta["val"], node.meta["val"]
    return bool(source.dtype is meta.dtype and source.is_dense() and source.numel <= meta.numel)


class _Widening:
    def __init__(self, graph: fx.Graph, training: bool) -> None:
        self.graph, self.training = graph, training
        self.joining: dict[fx.Node, torch.dtype] = {}  # what stays in float32 with a convolution before it
        self.wide: dict[fx.Node, fx.Node] = {}  # of a narrow value; in inference what has not been rounded

    def visit(self, node: fx.Node) -> None:
        """Nodes are computed in their order, so that a conversion stands before all its readers."""
        narrow = self.joining.get(node) or _narrow(node)
        if narrow is None:
            return
        if node not in self.joining and self.apart(narrow):
            self.joining.update(dict.fromkeys(self.chain(node), narrow))
        self.compute(node, narrow)

    def apart(self, narrow: torch.dtype | None) -> bool:
        """May values be left unrounded?"""
        return not self.training and narrow is torch.bfloat16

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """A convolution and what may become part of it."""
        found = [node]
        if node.target is not aten.convolution.default:
            return found
        last, after = node, only_user(node)
        if after is not None and after.target is aten.native_batch_norm.default and after.args[0] is node and not after.args[5]:
            first = only_user(after)
            if first is None or first.target is not operator.getitem or first.args[1] != 0:
                return found
            found.append(after)
            last, after = first, only_user(first)
        if after is not None and addend(after, last) is not None:
            found.append(after)
            last, after = after, only_user(after)
            if after is not None and after.target is aten.relu.default:
                found.append(after)
        elif after is not None and attribute_of(after) is not None:
            found.append(after)
        return found

    def compute(self, node: fx.Node, narrow: Any) -> None:
        """The node in float32, and then in its own type."""
        with self.graph.inserting_before(node):
            add = Adding(self.graph, node)

            def widened(given: fx.Node) -> fx.Node:
                if getattr(given.meta["val"], "dtype", None) is not narrow:
                    return given
                if given not in self.wide:
                    if _shows(given):  # what it shows is converted, once for all who see it, and before it is repeated
                        self.wide[given] = add(given.target, widened(given.args[0]), *given.args[1:], **given.kwargs)  # type: ignore[arg-type]
                    else:
                        self.wide[given] = add(aten._to_copy.default, given, dtype=torch.float32)
                return self.wide[given]

            made = add(node.target, *fx.node.map_arg(node.args, widened), **fx.node.map_arg(node.kwargs, widened))
        if isinstance(node.meta["val"], TensorMeta):
            self.narrowed(node, made, narrow)
            return
        for user in list(node.users):
            with self.graph.inserting_before(user):
                part = Adding(self.graph, user)(operator.getitem, made, user.args[1])
            self.narrowed(user, part, narrow)
        self.graph.erase_node(node)

    def narrowed(self, node: fx.Node, made: fx.Node, narrow: Any) -> None:
        if made.meta["val"].dtype is node.meta["val"].dtype:
            result = made
        else:
            with self.graph.inserting_before(node):
                add = Adding(self.graph, node)
                converted = add(aten._to_copy.default, made, dtype=narrow)
                result = laid_out(add, converted, node.meta["val"])
            if self.apart(narrow) and result is converted:
                self.wide[result] = made
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)
