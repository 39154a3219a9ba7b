"""Which decompositions give eager's bits, for `config.numerics = "eager"`: `gives_eagers_bits(node)`.

Moving numbers does, and arithmetic that IEEE 754 rounds in one way only. Exponentials, roots and their like do not (eager's vector functions and its scalar tails differ from
the C library's), nor do sums (their order), nor formulas that eager's kernels may contract. Those stay eager's own kernels.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from magneto.graph.meta import TensorMeta
from magneto.prims.decompositions import factories, indexing, padding, rearranging, views

_INEXACT = (
    frozenset("aten.trace.default aten.linalg_cross.default aten.arange.default aten.arange.start aten.arange.start_step".split())
    | padding.SUMS
)
_MOVES = frozenset(name for family in (views, rearranging, indexing, factories, padding) for name in family.ROWS) - _INEXACT
_ARITHMETIC = frozenset(
    "add sub rsub mul div true_divide neg abs floor ceil trunc round sign sgn positive square maximum minimum max.other min.other clamp clamp_min clamp_max relu hardtanh threshold_backward "
    "eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not isnan isinf isfinite where masked_fill".split()
)
_SCALED = frozenset("add sub rsub".split())
_EXTREMES = frozenset("maximum.default minimum.default max.other min.other clamp.Tensor clamp_min.Tensor clamp_max.Tensor".split())


def gives_eagers_bits(node: fx.Node) -> bool:
    """Does the decomposition of this call compute what eager's kernel computes, bit for bit?"""
    if node.target is operator.getitem:
        return True
    name = str(node.target)
    packet = name.split(".")[1] if name.startswith("aten.") else ""
    if name in _MOVES or f"aten.{packet}" in _MOVES:
        return not (packet.startswith(("index_put", "_unsafe_index_put")) and len(node.args) > 3 and node.args[3])
    if packet not in _ARITHMETIC and name.removeprefix("aten.") not in _ARITHMETIC:
        return False
    if name.removeprefix("aten.") in _EXTREMES and _is_float(node):
        return False  # of zeros with two signs eager's vectors take the right one, its tails the left one
    if name.endswith("_mode") or (packet in _SCALED and (len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1)):
        return False
    return packet not in ("div", "true_divide") or not _by_number_on_device(node)


def _is_float(node: fx.Node) -> bool:
    meta: Any = node.meta.get("val")
    return type(meta) is not TensorMeta or meta.dtype.is_floating_point


def _by_number_on_device(node: fx.Node) -> bool:
    """A GPU's kernels multiply by the reciprocal of a number."""
    meta: Any = node.meta.get("val")
    return type(meta) is TensorMeta and meta.device != torch.device("cpu") and len(node.all_input_nodes) < 2
