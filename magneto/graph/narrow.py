"""Types that this machine's CPU libraries multiply by loops, or not at all: `narrow_types()`."""

from __future__ import annotations

import functools

import torch


@functools.cache
def narrow_types() -> frozenset[torch.dtype]:
    """Types of which the CPU libraries have no products that this machine has instructions for."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(
        dtype for dtype, name in asked.items() if (answer := getattr(torch.ops.mkldnn, name, None)) is not None and not answer()
    )
