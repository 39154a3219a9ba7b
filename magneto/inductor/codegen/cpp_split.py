"""Split reductions: few, long rows. Every pass is a parallel loop over (row, portion) that leaves partial results in a small array, followed by
a serial loop that joins them in order: the result does not depend on the number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.cpp_reduce import Fold, fold_of
from magneto.inductor.codegen.cpp_types import compute_type, to_memory

if TYPE_CHECKING:
    from magneto.inductor.codegen.cpp import Writer


def write_split(writer: Writer) -> list[str]:
    """The statements of a kernel in split mode."""
    nest, emitter, kernel = writer.nest, writer.emitter, writer.kernel
    rows, (_, portions, _, iterations) = nest.rows, nest.cut_in
    most = rows * 256 if nest.any else nest.iterations
    body: list[str] = []
    results: dict[str, tuple[str, Fold]] = {}
    for number, current in enumerate(writer._passes()):
        row_stores = [m for m in kernel.members if not m.full and m.name in kernel.stored and writer.stages[m.name] == number]
        if row_stores:
            body += _over_rows(writer, rows, results, row_stores)
        if not current:
            continue
        folds = [fold_of(m, emitter.fresh("a")) for m in current.folds]
        head, symbols = writer.decode_rows(nest)
        scope = emitter.push(symbols)
        _answer(writer, results, f"row / {portions}")
        loop = writer.inner_pass(current, folds, {0: ("lo", "hi")})
        emitter.pop()
        inside = [*head, *scope.lines, *(f.declare() for f in folds), *loop, *(f"{f.name}p[row] = {f.name};" for f in folds)]
        body += [f"{f.accumulator} {f.name}p[{most}], {f.name}r[{rows}];" for f in folds]
        body += [
            f"#pragma omp parallel for schedule(static) reduction(|:status){nest.threads}",
            f"for (i64 row = 0; row < {iterations}; row++) {{",
            *indent(inside),
            "}",
        ]
        joins = []
        for fold in folds:
            joins += [
                fold.declare(),
                f"for (i64 k = 0; k < {portions}; k++) {fold.join_from(fold.name, f'{fold.name}p[row * {portions} + k]')}",
            ]
            joins.append(f"{fold.name}r[row] = {fold.name};")
            results[fold.member.name] = (f"{fold.name}r", fold)
        body += [f"for (i64 row = 0; row < {rows}; row++) {{", *indent(joins), "}"]
        stored = [m for m in current.folds if m.name in kernel.stored]
        if stored:
            body += _over_rows(writer, rows, results, stored)
    return body


def _answer(writer: Writer, results: dict[str, tuple[str, Fold]], row: str) -> None:
    """Results of earlier passes as values of the row scope."""
    emitter = writer.emitter
    depth = len(emitter.scopes) - 1
    for name, (array, fold) in results.items():
        local = emitter.fresh("r")
        text = fold.result(f"{array}[{row}]")
        emitter.scopes[depth].lines.append(f"{compute_type(fold.result_dtype)} {local} = {text};")
        writer.answers[name] = (local, depth)
    emitter._depth_memo.clear()


def _over_rows(writer: Writer, rows: int, results: dict[str, tuple[str, Fold]], members: list) -> list[str]:  # type: ignore[type-arg]
    """A serial loop over the rows that stores row values."""
    nest, emitter = writer.nest, writer.emitter
    lines, symbols = [], {}
    rest = "row"
    for position, dim in reversed(list(enumerate(nest.outer))):
        lines.append(f"const i64 i{position} = {rest if position == 0 else f'{rest} % {dim.size}'};")
        symbols[dim.sym] = f"i{position}"
        rest = f"({rest}) / {dim.size}"
    scope = emitter.push(symbols)
    scope.lines.extend(lines)
    _answer(writer, results, "row")
    texts = []
    for member in members:
        if member.is_reduction:
            index = emitter.index(member.store, "", len(emitter.scopes) - 1)
            texts.append(f"{writer.pointers[member.name]}[{index}] = {to_memory(writer.answers[member.name][0], member.buffer.dtype)};")
        else:
            texts.append(writer.store(member))
    emitter.pop()
    return [f"for (i64 row = 0; row < {rows}; row++) {{", *indent([*scope.lines, *texts]), "}"]
