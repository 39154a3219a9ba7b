"""Kinds of `Ordered` that fuse on a GPU: what lies along one dimension, joined up to each place (`_back`: from each place on)."""

from __future__ import annotations

import torch

_JOINED = {"scan_sum": "add", "scan_prod": "mul", "scan_max": "maximum", "scan_min": "minimum", "scan_logaddexp": "logaddexp"}

SCANS = _JOINED | {f"{kind}_back": join for kind, join in _JOINED.items()}
"""What joins two elements; the scheduler writes the kinds as operations too."""


def neutral_of(kind: str, dtype: torch.dtype) -> float | int:
    """What joins with any element of the type to that element."""
    join = SCANS[kind]
    if join in ("add", "mul"):
        return int(join == "mul")
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return info.min if join == "maximum" else info.max
    return float("inf") if join == "minimum" else -float("inf")
