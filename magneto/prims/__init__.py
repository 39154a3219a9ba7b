"""The primitive operations and the decompositions of ATen operations into them."""

from __future__ import annotations

from magneto.prims.decompose import decompose
from magneto.prims.prim import Prim
from magneto.prims.table import PRIMS, prims

__all__ = ["PRIMS", "Prim", "decompose", "prims"]
