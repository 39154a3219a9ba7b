"""TableKernel -> C text: one loop body over the rows of a table, all elements of all rows shared out evenly to threads.

A kernel is `int f(void *const *table, const i64 *work)`. `table` holds the pointers of row after row. `work` holds the number of portions, where the
items of each portion begin, and the items: (row, from, to).
"""

from __future__ import annotations

from collections.abc import Sequence

from magneto.inductor.codegen.cpp import Writer, parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.cpp_fill import Fill
from magneto.inductor.codegen.cpp_nest import PARALLEL, Nest
from magneto.inductor.codegen.cpp_reduce import fold_of
from magneto.inductor.codegen.cpp_types import compute_type, memory_type, to_memory
from magneto.inductor.schedule.kernel import FusedKernel, TableKernel

PORTION = 8192  # elements, at least


def table_text(table: TableKernel) -> str:
    """The C function, named SYMBOL."""
    body = table.body
    dims = body.rows or body.cols
    writer = Writer(body, Nest(body, "inner" if body.cols else "point", (), dims, 0, False))
    for name, pointer in writer.pointers.items():
        const = "" if name in body.stored else "const "
        writer.emitter.scopes[0].lines.append(f"{const}{memory_type(writer.dtypes[name])} *{pointer} = p[{pointer[1:]}];")
    pointers = f"void *const *p = table + items[3 * item] * {len(parameters(body))};"
    bounds = ["const i64 lo = items[3 * item + 1], hi = items[3 * item + 2];"] if dims else []
    partial: list[str] = []
    joined: list[str] = []
    if body.cols:
        partial, loop, rest = _folded(writer, body)
        each = [*writer.emitter.scopes[0].lines, *loop]
        joined = ["for (i64 item = 0; item < first[portions];) {", *indent([pointers, *writer.emitter.scopes[0].lines, *rest]), "}"]
    else:
        loop = _points(writer, body)
        each = [*writer.emitter.scopes[0].lines, *loop]
    lines = [
        "const i64 portions = work[0], *first = work + 1, *items = first + portions + 1;",
        *partial,
        "#pragma omp parallel for schedule(static) if (portions > 1)",
        "for (i64 portion = 0; portion < portions; portion++) {",
        "    for (i64 item = first[portion]; item < first[portion + 1]; item++) {",
        *indent(indent([pointers, *bounds, *each])),
        "    }",
        "}",
        *joined,
        "return 0;",
    ]
    return "\n".join(["int SYMBOL(void *const *table, const i64 *work) {", *indent(lines), "}"]) + "\n"


def _points(writer: Writer, body: FusedKernel) -> list[str]:
    """The loop over the elements of one item."""
    stores = [m for m in body.members if m.name in body.stored]
    if body.rows:
        return writer.loops(body.rows, Fill(writer, stores=stores), {0: ("lo", "hi")})
    for value in writer.points((), stores):
        writer.emitter.emit(value)
    return [writer.store(m) for m in stores]


def _folded(writer: Writer, body: FusedKernel) -> tuple[list[str], list[str], list[str]]:
    """Reductions: an array of partial results per item, the loop over an item's elements, and what joins the items of one row in their order,
    so that the result does not depend on the number of threads."""
    emitter = writer.emitter
    (walk,) = (current for current in writer._passes() if current)
    folds = [fold_of(m, emitter.fresh("a")) for m in walk.folds]
    loop = [
        *(f.declare() for f in folds),
        *writer.inner_pass(walk, folds, {0: ("lo", "hi")}),
        *(f"{f.name}p[item] = {f.name};" for f in folds),
    ]
    arrays = [f"{f.accumulator} {f.name}p[first[portions]];" for f in folds]
    scope = emitter.push({})
    joins = " ".join(f.join_from(f.name, f"{f.name}p[item]") for f in folds)
    rest = [
        *(f.declare() for f in folds),
        f"for (const i64 row = items[3 * item]; item < first[portions] && items[3 * item] == row; item++) {{ {joins} }}",
    ]
    for fold in folds:
        name = emitter.fresh("r")
        rest.append(f"{compute_type(fold.result_dtype)} {name} = {fold.result()};")
        writer.answers[fold.member.name] = (name, 1)
    emitter._depth_memo.clear()
    texts = []
    for member in body.members:
        if member.name in body.stored and member.is_reduction:
            place = emitter.index(member.store, "", 1)
            texts.append(f"{writer.pointers[member.name]}[{place}] = {to_memory(writer.answers[member.name][0], member.buffer.dtype)};")
        elif member.name in body.stored and not member.full:
            texts.append(writer.store(member))
    emitter.pop()
    return arrays, loop, [*rest, *scope.lines, *texts]


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
