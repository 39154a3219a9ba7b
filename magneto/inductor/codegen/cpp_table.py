"""TableKernel -> C text: one loop body over the rows of a table, all elements of all rows shared out evenly to threads.

A kernel is `int f(void *const *table, const i64 *work)`. `table` holds the pointers of row after row. `work` holds the number of portions, where the
items of each portion begin, and the items: (row, from, to).
"""

from __future__ import annotations

from collections.abc import Sequence

from magneto.inductor.codegen.cpp import Fill, Writer, parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.cpp_nest import PARALLEL, Nest
from magneto.inductor.codegen.cpp_types import memory_type
from magneto.inductor.schedule.kernel import FusedKernel, TableKernel

PORTION = 8192  # elements, at least


def table_text(table: TableKernel) -> str:
    """The C function, named SYMBOL."""
    body = table.body
    writer = Writer(body, Nest(body, "point", (), body.rows, 0, False))
    for name, pointer in writer.pointers.items():
        const = "" if name in body.stored else "const "
        writer.emitter.scopes[0].lines.append(f"{const}{memory_type(writer.dtypes[name])} *{pointer} = p[{pointer[1:]}];")
    row = _row_lines(writer, body)
    item = [
        f"void *const *p = table + items[3 * item] * {len(parameters(body))};",
        *(["const i64 lo = items[3 * item + 1], hi = items[3 * item + 2];"] if body.rows else []),
        *writer.emitter.scopes[0].lines,
        *row,
    ]
    lines = [
        "int SYMBOL(void *const *table, const i64 *work) {",
        "    const i64 portions = work[0], *first = work + 1, *items = first + portions + 1;",
        "    #pragma omp parallel for schedule(static) if (portions > 1)",
        "    for (i64 portion = 0; portion < portions; portion++) {",
        "        for (i64 item = first[portion]; item < first[portion + 1]; item++) {",
        *indent(indent(indent(item))),
        "        }",
        "    }",
        "    return 0;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _row_lines(writer: Writer, body: FusedKernel) -> list[str]:
    """The loop over the elements of one row."""
    stores = [m for m in body.members if m.name in body.stored]
    if body.rows:
        return writer.loops(body.rows, Fill(writer, stores=stores), {0: ("lo", "hi")})
    for value in writer.points((), stores):
        writer.emitter.emit(value)
    return [writer.store(m) for m in stores]


def work_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """The rows cut into portions of equally many elements."""
    total = sum(sizes)
    portion = max(PORTION, -(-total // 4096)) if total >= PARALLEL else max(total, 1)
    items: list[tuple[int, int, int]] = []
    first, room = [0], portion
    for row, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                first.append(len(items))
                room = portion
            stop = min(size, start + room)
            items.append((row, start, stop))
            room -= stop - start
            start = stop
    first.append(len(items))
    return (len(first) - 1, *first, *(n for item in items for n in item))
