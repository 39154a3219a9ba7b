"""Decompositions of ATen operations into prims, by family. `DECOMPOSITIONS` is the whole table."""

from __future__ import annotations

from magneto.prims.decompositions import activations, factories, foreach, fused, indexing, losses, norms, pointwise, reductions, views
from magneto.prims.decompositions.rows import LIBRARY, Row

FAMILIES = (pointwise, activations, reductions, norms, views, indexing, factories, losses, foreach, fused)

DECOMPOSITIONS: dict[str, Row] = {name: fn for family in FAMILIES for name, fn in family.ROWS.items()}

__all__ = ["DECOMPOSITIONS", "LIBRARY"]
