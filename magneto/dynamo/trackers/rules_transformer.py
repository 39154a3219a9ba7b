"""Rows of torch.nn.TransformerEncoder and of its layers.

With a padding mask in inference, eager packs the tokens that are there and answers zeros for the others. torch's own code takes another path where
`torch.compiler.is_compiling()`, whose numbers at the padded places are others; captured is a dense path that ends with eager's zeros.

What eager calls as one operation for a layer in inference is autocast from within, so that its result is narrow: under autocast its parts are captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import STAND_INS, FunctionTracker
from magneto.dynamo.trackers.klass import held

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def packs(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> bool:
    """Whether eager packs, if the padding lies behind what it pads."""
    if (
        mask is not None
        or src_key_padding_mask is None
        or not torch.backends.mha.get_fastpath_enabled()
        or not getattr(self, "mask_check", True)
    ):
        return False
    first = self.layers[0]
    if not getattr(self, "use_nested_tensor", False) or first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    if not torch.is_grad_enabled():
        return True
    of_attention = (
        first.self_attn.in_proj_weight,
        first.self_attn.in_proj_bias,
        first.self_attn.out_proj.weight,
        first.self_attn.out_proj.bias,
    )
    others = [tensor for part in (first.norm1, first.norm2, first.linear1, first.linear2) for tensor in (part.weight, part.bias)]
    return not any(tensor.requires_grad for tensor in (src, *of_attention, *others))


def packed(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    """What eager answers then: where the padding lies elsewhere, it does not pack."""
    padding: Any = F._canonical_mask(
        mask=src_key_padding_mask, mask_name="src_key_padding_mask", other_type=None, other_name="mask", target_type=src.dtype
    )
    output = src
    for layer in self.layers:
        output = layer(output, src_mask=None, is_causal=is_causal is True, src_key_padding_mask=padding)
    padded = padding.logical_not().logical_not()
    behind = (padded[:, 1:] >= padded[:, :-1]).all()
    output = output.masked_fill((padded & behind).unsqueeze(-1), 0.0)
    return output if self.norm is None else self.norm(output)


def _forward(m: Machine, fn: FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> FunctionTracker:
    masked = kwargs.get("src_key_padding_mask", args[3] if len(args) > 3 else None)
    if masked is None or masked.python_type() is type(None):
        return fn
    decided = m.call(held(m, packs, "packs"), args, kwargs).try_const()
    return held(m, packed, "packed") if decided is not None and decided.value is True else fn  # type: ignore[return-value]


STAND_INS[torch.nn.TransformerEncoder.forward.__code__] = _forward


def layer(
    src: Any, size: Any, heads: Any, qkv_weight: Any, qkv_bias: Any, weight: Any, bias: Any, gelu: Any, first: Any, eps: Any,
    weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any, inner: Any, inner_bias: Any, outer: Any, outer_bias: Any,
    mask: Any = None, mask_type: Any = None,
) -> Any:  # fmt: skip
    """The operations of `torch._transformer_encoder_layer_fwd`."""
    if src.numel() == 0:
        return src
    x = F.layer_norm(src, (size,), weight_1, bias_1, eps) if first else src
    x = torch._native_multi_head_attention(x, x, x, size, heads, qkv_weight, qkv_bias, weight, bias, mask, False, True, mask_type)[0]
    x = x.add_(src)
    x = x if first else F.layer_norm(x, (size,), weight_1, bias_1, eps)
    wide = F.linear(F.layer_norm(x, (size,), weight_2, bias_2, eps) if first else x, inner, inner_bias)
    x = F.linear(F.gelu(wide) if gelu else F.relu(wide), outer, outer_bias).add_(x)
    return x if first else F.layer_norm(x, (size,), weight_2, bias_2, eps)


@rule(torch._transformer_encoder_layer_fwd)
def autocast_layer(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
    kind = m.call(held(m, torch.is_autocast_enabled, "enabled"), [m.const("cpu")], {}).try_const()
    return m.call(held(m, layer, "layer"), args, kwargs) if kind is not None and kind.value else NotImplemented
