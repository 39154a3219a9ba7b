"""The primitive operations, and in `decompose` what becomes of ATen operations in terms of them."""

from __future__ import annotations

from magneto.prims.prim import Prim
from magneto.prims.table import PRIMS, prims

__all__ = ["PRIMS", "Prim", "prims"]
