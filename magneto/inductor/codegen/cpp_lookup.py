"""Rows that are gathered from, in any order: the next one is fetched from its beginning to its end while this one is read, because no processor foresees it.

(A row that is looked up in a table, as of an embedding, is read from its beginning to its end: fetching it gained nothing.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magneto.inductor.codegen.cpp_nest import stride_along
from magneto.inductor.loops.ir import Indirect, Load, loads
from magneto.symbolic import ONE, coefficient, to_c

if TYPE_CHECKING:
    from magneto.inductor.codegen.cpp import Writer

LARGE = 8 << 20  # bytes of memory that the caches do not hold


def next_row(writer: Writer, load: Load, position: str) -> str:
    """C text of the place in the buffer that belongs to `position` of the vector loop in the next row; empty where the load does not gather from a row as long as the loop."""
    nest, names = writer.nest, dict(writer.emitter.variables)
    computed = [s for s in load.index.free if isinstance(s, Indirect)]
    if len(computed) != 1 or not nest.outer or nest.short is not None or load.buffer in writer.members or load.index.hi is None:
        return ""
    (index,), vector, row = computed, nest.inner[-1], nest.outer[-1]
    moves = any(vector.sym in inner.index.free for inner in loads(index.value))
    whole = index.extent == vector.size and coefficient(load.index, index) is ONE and vector.sym not in load.index.free
    if not (moves and whole) or load.index.hi * load.dtype.itemsize < LARGE or not stride_along(load.index, row.sym):
        return ""
    names[row.sym] = f"mg_min({names[row.sym]} + 1, {row.size - 1})"
    names[index] = position
    return to_c(load.index, lambda s: names[s])
