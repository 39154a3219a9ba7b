"""Kernels that fold along their rows and down their columns in one walk (schedule/crossed.py).

The rows are cut into portions whose number depends on the sizes only. Each portion has accumulators for all columns: sums of floats run in single precision over ROWS_BLOCK rows and in
double over the portion. What the portions have found is joined in their order, so that no result depends on the number of threads or on time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.cpp_fill import Fill
from magneto.inductor.codegen.cpp_nest import PARALLEL, Nest
from magneto.inductor.codegen.cpp_reduce import ArgFold, Fold, fold_of
from magneto.inductor.codegen.cpp_types import compute_type, to_memory

if TYPE_CHECKING:
    from magneto.inductor.codegen.cpp import Writer

ROWS_BLOCK = 16  # rows added up in single precision
PORTION = 64  # rows of a portion, at least, where there are enough
PARTIAL_BYTES = 512 << 10  # of what all portions have found; it lies on the caller's stack
MOST = 64  # portions


def write_crossed(writer: Writer) -> list[str]:
    """The statements of a kernel with members that go down."""
    nest, emitter = writer.nest, writer.emitter
    width = prod(d.size for d in nest.inner)
    folds = [fold_of(m, emitter.fresh("a"), nest.outer) for m in writer.kernel.members if m.down]
    for fold in folds:
        if isinstance(fold, ArgFold):
            fold.across = True
    writer.downs = {fold.member.name: fold for fold in folds}
    head, symbols = writer.decode_rows(nest)
    scope = emitter.push(symbols)
    scope.lines.extend(head)
    row = writer.inner_row()
    emitter.pop()
    most = _portions(nest, width * 8 * len(folds))
    each = -(-nest.iterations // most)
    cut = str(-(-nest.iterations // each)), str(each)
    rows, head = nest.iterations, []
    if nest.any:
        wanted = f"mg_min(mg_max({rows} / {PORTION}, mg_min(8, {rows} / 8)), {PARTIAL_BYTES // 8 // len(folds)} / {width})"
        head = [f"const i64 wanted = points < {PARALLEL} ? 1 : mg_max(1, mg_min({wanted}, {MOST})), each = ({rows} + wanted - 1) / wanted;"]
        head.append(f"const i64 count = ({rows} + each - 1) / each;")
        cut = "count", "each"
    held = max(width, min(most * width, PARTIAL_BYTES // 8 // len(folds))) if nest.any else -(-rows // each) * width
    found = [f"{kind} {name}p[{held}] __attribute__((aligned(64)));" for fold in folds for kind, name, _ in fold.arrays()]
    loop = _portion(row, folds, rows, cut[1], width)
    loop = [f"for (i64 portion = 0; portion < {cut[0]}; portion++) {{", *indent(loop), "}"]
    return [*head, *found, *writer.shared_out(loop), *_joined(folds, cut[0], width), *_stored(writer, folds)]


def _portions(nest: Nest, width: int) -> int:
    """Into how many portions the rows are cut; `width`: bytes that each leaves."""
    if not nest.parallel:
        return 1
    rows = nest.iterations
    if nest.any:  # never fewer than for a smaller size
        return max(1, min(max(-(-rows // PORTION), min(8, rows // 8)), MOST))
    return max(1, min(max(rows // PORTION, min(8, rows // 8)), PARTIAL_BYTES // width, MOST))


def _portion(row: list[str], folds: Sequence[Fold], rows: int, each: str, width: int) -> list[str]:
    """The rows of one portion. A fold whose accumulator is wider than its values has one array for a block of rows, and one for the portion."""
    blocked = [fold for fold in folds if fold.accumulator != fold.type]
    lines = [f"const i64 last = mg_min((portion + 1) * {each}, {rows});"]
    arrays = [array for fold in folds for array in fold.arrays()]
    lines += [f"{kind} *restrict {name} = {name}p + portion * {width};" for kind, name, _ in arrays]
    lines += [f"{fold.type} {fold.lane}[{width}] __attribute__((aligned(64)));" for fold in blocked]
    start = [f"{name}[l] = {initial};" for _, name, initial in arrays] + [f"{fold.lane}[l] = {fold.initial};" for fold in blocked]
    lines.append(f"for (i64 l = 0; l < {width}; l++) {{ {' '.join(start)} }}")
    if not blocked:
        return [*lines, f"for (i64 row = portion * {each}; row < last; row++) {{", *indent(row), "}"]
    joins = (f"{fold.join_from(f'{fold.name}[l]', f'{fold.lane}[l]')} {fold.lane}[l] = {fold.initial};" for fold in blocked)
    block = [
        f"const i64 stop = mg_min(base + {ROWS_BLOCK}, last);",
        "for (i64 row = base; row < stop; row++) {",
        *indent(row),
        "}",
        *(line for join in joins for line in ("#pragma omp simd", f"for (i64 l = 0; l < {width}; l++) {{ {join} }}")),
    ]
    return [*lines, f"for (i64 base = portion * {each}; base < last; base += {ROWS_BLOCK}) {{", *indent(block), "}"]


def _joined(folds: Sequence[Fold], count: str, width: int) -> list[str]:
    """What the portions have found, added to the first one's."""
    if count == "1":
        return []
    lines = [f"for (i64 k = 1; k < {count}; k++) {{"]
    for fold in folds:
        join = fold.join_from(f"{fold.name}p[l]", f"{fold.name}p[k * {width} + l]")
        lines += ["#pragma omp simd", f"    for (i64 l = 0; l < {width}; l++) {join}"]
    return [*lines, "}"]


def _stored(writer: Writer, folds: Sequence[Fold]) -> list[str]:
    """A loop over the columns that writes the results."""
    emitter, dims = writer.emitter, writer.nest.inner
    scope = emitter.push({dim.sym: f"j{k}" for k, dim in enumerate(dims)})
    depth = len(emitter.scopes) - 1
    position = Fill(writer).position("")
    lines, stored = [], writer.kernel.stored
    for fold in folds:
        name = emitter.fresh("r")
        scope.lines.append(f"{compute_type(fold.result_dtype)} {name} = {fold.result(f'{fold.name}p[{position}]')};")
        writer.answers[fold.member.name] = (name, depth)
        if fold.member.name in stored:
            place = emitter.index(fold.member.store, "", depth)
            lines.append(f"{writer.pointers[fold.member.name]}[{place}] = {to_memory(name, fold.member.buffer.dtype)};")
    emitter._depth_memo.clear()
    lines += [writer.store(member) for member in writer.nest.after if member.name in stored]  # all loads stand before the first store
    lines = [*scope.lines, *lines]
    emitter.pop()
    for k, dim in reversed(list(enumerate(dims))):
        lines = [f"for (i64 j{k} = 0; j{k} < {dim.size}; j{k}++) {{", *indent(lines), "}"]
    return lines
