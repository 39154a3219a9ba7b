"""Activations that oneDNN computes together with the convolution or linear layer before them: `attribute_of(node)`.

Only what treats NaN and infinities as torch does. The library's "relu", "hardtanh" and "hardsigmoid" turn NaN into a number, its "gelu" turns infinity into NaN: a
diverged model would look healthy. For relu there is "leaky_relu", which keeps NaN, with a slope that no sum of products notices (`SLOPE`); it gives -1e-22 where
relu gives 0, so it is taken only where every reader sums, and nothing behind tells that from 0 (`only_summed`). Elsewhere, and for the others, the activation stays a loop of ours.
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
# Functions that are flat around 0, or round there: -1e-22 and 0 give the same.
_ABSORBS = frozenset({
    aten.relu.default, aten.sigmoid.default, aten.hardsigmoid.default, aten._softmax.default, aten._log_softmax.default, aten.exp.default,
})  # fmt: skip
# Sums of products: what comes out differs by 1e-22, which is rounding that is there anyway, unless the sum is of nothing but zeros.
_SUMS = frozenset({aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default})
# What hands values on, or adds them to others.
_HANDS_ON = frozenset({
    aten.add.Tensor, aten.cat.default, aten.mean.dim, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default,
    aten.max_pool2d_with_indices.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.clone.default, aten._to_copy.default, aten.expand.default, aten.slice.Tensor, aten.constant_pad_nd.default, aten.native_batch_norm.default, aten.hardtanh.default, operator.getitem,
})  # fmt: skip
# What tells even such a sum of zeros from 0: roots, quotients, signs, comparisons, choices.
_TELLS = frozenset(
    "sqrt rsqrt pow reciprocal log log2 log10 sign sgn signbit gt lt ge le eq ne argmax argmin max min topk sort kthvalue mode median nanmedian floor ceil atan2 copysign"
    " xlogy logical_not logical_and logical_or logical_xor nonzero any all count_nonzero remainder floor_divide isclose heaviside _unique2 unique_dim multinomial lgamma"
    " digamma nextafter angle cummax cummin bucketize searchsorted isin acosh logit erfinv".split()
)


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
    """Does nothing read this value that could tell -1e-22 from 0, nor what is summed up of it?"""
    waiting = [(node, False)]
    seen = set(waiting)
    while waiting:
        at, summed = waiting.pop()
        for user in at.users:
            if _absorbs(user):
                continue
            sums = summed or user.target in _SUMS or _is_library(user)
            if _tells(user, at) or not (sums or user.target in _HANDS_ON):
                return False
            if (user, sums) not in seen:
                seen.add((user, sums))
                waiting.append((user, sums))
    return True


def _absorbs(user: fx.Node) -> bool:
    if user.target is aten.hardtanh.default:
        return len(user.args) > 1 and bool(user.args[1] >= 0)  # type: ignore[operator]
    return user.target in _ABSORBS


def _tells(user: fx.Node, at: fx.Node) -> bool:
    if user.target is operator.getitem:  # where the largest elements lie
        return bool(user.args[1] != 0) and "max_pool" in str(at.target)
    if not isinstance(user.target, torch._ops.OpOverload):
        return False
    name = user.target.overloadpacket.__name__
    if name == "div":
        return user.args[0] is not at or at in user.args[1:] or "rounding_mode" in user.kwargs
    if name == "_to_copy":
        return user.kwargs.get("dtype") is torch.bool
    return name in _TELLS


def _is_library(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "mkldnn"
