"""Activations that oneDNN computes together with the convolution or linear layer before them: `attribute_of(node)`.

Only what treats NaN and infinities as torch does. The library's "relu", "hardtanh" and "hardsigmoid" turn NaN into a number, its "gelu" turns infinity into NaN: a
diverged model would look healthy. For relu there is "leaky_relu", which keeps NaN, with a slope that no sum of products notices (`SLOPE`); it gives -1e-22 where
relu gives 0, so it is taken only where every reader sums (`only_summed`). Elsewhere, and for the others, the activation stays a loop of ours.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Attribute = tuple[str, tuple[float, ...], str]  # oneDNN's name, numbers, algorithm

SLOPE = 2.0**-70  # -1 becomes -8e-22: far below a float32's last place, far above its subnormal numbers (which are slow)

_PLAIN: dict[Any, Attribute] = {
    aten.hardswish.default: ("hardswish", (), ""),
    aten.silu.default: ("swish", (), ""),
    aten.sigmoid.default: ("sigmoid", (), ""),
    aten.tanh.default: ("tanh", (), ""),
}
# What computes sums of products of an argument, or a function that is flat or rounds around 0: -1e-22 and 0 give the same up to rounding that is there anyway.
_SUMS = frozenset({
    aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.native_batch_norm.default, aten.relu.default, aten.sigmoid.default,
    aten.hardsigmoid.default, aten.hardtanh.default,
})  # fmt: skip
# What hands values on, or adds them to others.
_HANDS_ON = frozenset({
    aten.add.Tensor, aten.cat.default, aten.mean.dim, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default,
    aten.max_pool2d_with_indices.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.clone.default, aten.expand.default, aten.slice.Tensor, aten.constant_pad_nd.default, operator.getitem,
})  # fmt: skip


def attribute_of(node: fx.Node) -> Attribute | None:
    """How oneDNN names this activation; None where it has none with torch's meaning."""
    if node.op != "call_function" or node.kwargs.keys() - {"approximate"}:
        return None
    if node.target is aten.relu.default:
        return ("leaky_relu", (SLOPE,), "") if only_summed(node) else None
    if node.target is aten.leaky_relu.default:
        slope = node.args[1] if len(node.args) > 1 else 0.01
        return ("leaky_relu", (float(slope),), "") if slope else None  # type: ignore[arg-type]
    if node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh":
        return ("gelu", (), "tanh")
    return _PLAIN.get(node.target)


def only_summed(node: fx.Node) -> bool:
    """Does nothing read this value that could tell -1e-22 from 0?"""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        at = waiting.pop()
        for user in at.users:
            if user in seen or user.target in _SUMS or _is_library(user):
                continue
            if user.target not in _HANDS_ON or (user.target is operator.getitem and user.args[1] != 0):
                return False
            seen.add(user)
            waiting.append(user)
    return True


def _is_library(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "mkldnn"


__all__ = ["SLOPE", "Attribute", "attribute_of", "only_summed"]
