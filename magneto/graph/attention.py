"""Attention on the CPU as one call that answers NaN where the formula does: `magneto.attention`.

PyTorch's kernel answers zeros for a row that sees no key, or nothing but NaN, and says so by a sum of 0; the formula `softmax(q @ k.t() * scale + bias) @ v` gives NaN. Few other rows have such a
sum (a zero query that sees one key), so the scores of those that have are computed again.
"""

from __future__ import annotations

from typing import Any

import torch

_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("attention(Tensor query, Tensor key, Tensor value, Tensor? bias, bool causal, float scale) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]
_KERNEL: Any = getattr(
    torch, "_scaled_dot_product_flash_attention_for_cpu", getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithms of the sums of its weights. Of (batch, heads, length, size) each, whose last dimension is dense. `bias`: added to the scores, of four dimensions too. `causal`: a query sees the keys up to its own place."""
    out, sums = _KERNEL(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    unseen = sums == 0
    if unseen.any():
        _mend(out, sums, unseen, query, key, bias, causal, scale)
    return out, sums


def _mend(
    out: torch.Tensor,
    sums: torch.Tensor,
    unseen: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    """NaN into the rows that see nothing, among those that may be such."""
    if bias is not None:
        masked = (bias > -torch.inf).any(-1, keepdim=True).logical_not_()
        out.masked_fill_(masked, torch.nan)
        sums.masked_fill_(masked[..., 0], torch.nan)
        unseen = unseen & ~masked[..., 0]
        bias = bias.expand(*unseen.shape, key.shape[2])
    for batch, head in unseen.any(-1).nonzero().tolist():
        rows = unseen[batch, head].nonzero()[:, 0]
        scores = query[batch, head, rows].float() @ key[batch, head].float().T * scale
        if bias is not None:
            scores += bias[batch, head, rows]
        if causal:
            scores.masked_fill_(torch.arange(key.shape[2], device="cpu") > rows[:, None], -torch.inf)
        rows = rows[~(scores > -torch.inf).any(-1)]
        out[batch, head, rows] = sums[batch, head, rows] = torch.nan


_LIBRARY.impl("attention", attention, "CPU")  # type: ignore[no-untyped-call]
ATTENTION: Any = torch.ops.magneto.attention.default
