"""Lowering of graphs of prims to the loops IR. `lower_graph` is the entry; one row per prim in the files of this folder."""

from __future__ import annotations

from magneto.inductor.lower.context import CannotLower
from magneto.inductor.lower.graph import OP_ROWS, PRIM_ROWS, lower_graph

__all__ = ["OP_ROWS", "PRIM_ROWS", "CannotLower", "lower_graph"]
