"""Decompositions of ATen operations into prims, by family. `DECOMPOSITIONS` is the whole table."""

from __future__ import annotations

from magneto.prims.decompositions import activations, bags, columns, factories, foreach, fused, indexing, interpolate, losses, norms

# isort: split
from magneto.prims.decompositions import padding, pointwise, pooling, rearranging, reductions, sampling, special, views
from magneto.prims.decompositions.rows import LIBRARY, Row

FAMILIES = (
    pointwise, activations, special, reductions, norms, views, rearranging, indexing, factories, losses, columns, padding, pooling, interpolate, sampling, bags, foreach, fused,
)  # fmt: skip

DECOMPOSITIONS: dict[str, Row] = {name: fn for family in FAMILIES for name, fn in family.ROWS.items()}

__all__ = ["DECOMPOSITIONS", "LIBRARY"]
