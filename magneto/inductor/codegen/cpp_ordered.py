"""OrderedKernel -> C text: cumulative sums, and additions at computed places.

The dimensions that must run in order are loops inside of each iteration of the parallel loop; the innermost loop is a vector of independent elements, cut into portions that are iterations
of their own. Along memory a cumulative sum is OpenMP's scan: the sums up to each lane of a vector in steps, and what came before added to all of them. No element is added to by two iterations, so that results do not depend on the number of threads, and no addition is atomic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from magneto.base.dataclass import replace
from magneto.base.varying import any_size
from magneto.inductor.codegen.cpp_emit import Emitter, indent
from magneto.inductor.codegen.cpp_nest import PARALLEL, stride_along
from magneto.inductor.codegen.cpp_types import HALVES, compute_type, convert, memory_type, to_memory
from magneto.inductor.loops.ir import IndexValue, Indirect, Load, Ordered, Value, index_symbols, loads, walk_values
from magneto.inductor.schedule.kernel import OrderedKernel, map_value
from magneto.symbolic import ZERO, Expr, Sym

BLOCK = 512  # sums side by side
COLUMNS = 128  # of rows that are added up, in one portion
_THREADS = "#pragma omp parallel for schedule(static) reduction(|:status)"
LINE = 64  # bytes: threads that add to one row take whole lines of it


def vector_dim(node: Ordered) -> int | None:
    """The independent dimension along which the result is contiguous."""
    place = node.buffer.offset(index_symbols(node.ranges)) if node.place is None else node.place.expr  # type: ignore[attr-defined]
    for d, symbol in enumerate(index_symbols(node.ranges)):
        if d not in node.serial and isinstance(symbol, Sym) and stride_along(place, symbol) == 1:
            return d
    return None


def merged(node: Ordered) -> Ordered:
    """Neighbouring dimensions that run in any order (heads and their channels) made one where every index moves through them as through one."""
    for d in range(len(node.ranges) - 1, 0, -1):
        symbols, (outer, inner) = index_symbols(node.ranges), index_symbols(node.ranges)[d - 1 : d + 1]
        if {d - 1, d} & {*node.serial} or not isinstance(outer, Sym) or not isinstance(inner, Sym):
            continue
        values = [v for value in node.values if value is not node.init for v in walk_values(value)]
        indices = [v.index if isinstance(v, Load) else v.expr for v in values if isinstance(v, Load | IndexValue)]
        steps = [(stride_along(e, outer), stride_along(e, inner)) for e in indices]
        if any(a is None or b is None or a != b * node.ranges[d] for a, b in steps):
            continue
        ranges = (*node.ranges[: d - 1], node.ranges[d - 1] * node.ranges[d], *node.ranges[d + 1 :])
        now = index_symbols(ranges)
        mapping: dict[Expr, Expr] = dict(zip(symbols, (*now[: d - 1], ZERO, *now[d - 1 :]), strict=True))
        memo: dict[Value, Value] = {}
        body, place = map_value(node.body, mapping, memo), node.place and map_value(node.place, mapping, memo)
        node = replace(node, ranges=ranges, serial=tuple(k - (k > d) for k in node.serial), body=body, place=place)
    return node


def ordered_text(kernel: OrderedKernel) -> str:
    """The C function, named SYMBOL."""
    return _Writer(kernel).text()


class _Writer:
    def __init__(self, kernel: OrderedKernel) -> None:
        self.node = merged(kernel.node) if kernel.node.kind == "scatter_add" else kernel.node
        self.sizes = [int(s) for s in self.node.ranges]  # type: ignore[arg-type]
        self.names = (*kernel.reads(), self.node.name)
        self.emitter = Emitter({name: f"p{k}" for k, name in enumerate(self.names)}, lambda load: None)
        self.vector = vector_dim(self.node)
        self.parallel = prod(self.sizes) >= PARALLEL or any_size()
        self.target = f"p{len(self.names) - 1}"

    def text(self) -> str:
        dtypes = {load.buffer: load.dtype for value in self.node.values for load in loads(value)}
        dtypes[self.node.name] = self.node.buffer.dtype
        pointers = [
            f"{'' if name == self.node.name else 'const '}{memory_type(dtypes[name])} *p{k} = p[{k}];" for k, name in enumerate(self.names)
        ]
        loops = (
            self._row_sums() if self.node.kind == "row_sums" else [*(self._first() if self.node.init is not None else []), *self._loops()]
        )
        pointers += [f"const i64 points = {prod(self.sizes)};"] if any_size() else []
        lines = ["int status = 0;", *pointers, *self.emitter.scopes[0].lines, *loops, "return status;"]
        return "\n".join(["int SYMBOL(void *const *p) {", *indent(lines), "}"]) + "\n"

    # ---- what stands in memory first ---------------------------------------------------------------------------------------

    def _first(self) -> list[str]:
        """The initial values, in the order of memory."""
        buffer, value = self.node.buffer, self.node.init
        assert value is not None
        symbols = [s for s in index_symbols(buffer.shape) if isinstance(s, Sym)]
        place = buffer.offset(index_symbols(buffer.shape))
        symbols.sort(key=lambda s: -(stride_along(place, s) or 0))
        scope = self.emitter.push({s: f"k{n}" for n, s in enumerate(symbols)})
        text = to_memory(convert(self.emitter.emit(value), value.dtype, buffer.dtype), buffer.dtype)
        inner = [*scope.lines, f"{self.target}[{self.emitter.index(place, '', len(self.emitter.scopes) - 1)}] = {text};"]
        checks = scope.checks
        self.emitter.pop()
        for n, s in reversed(list(enumerate(symbols))):
            size = s.hi + 1  # type: ignore[operator]
            inner = [f"for (i64 k{n} = 0; k{n} < {size}; k{n}++) {{", *indent(inner), "}"]
            if n == len(symbols) - 1 and n > 0 and not checks:
                inner = ["#pragma omp simd", *inner]
        if not symbols:
            return ["{", *indent(inner), "}"]
        large = int(buffer.numel) >= PARALLEL or any_size()  # type: ignore[arg-type]
        return [_THREADS + self._wide(), *inner] if large else inner

    # ---- sums of rows that are added to a matrix -----------------------------------------------------------------------------

    def _row_sums(self) -> list[str]:
        """For each place of a row the next one, counted from 1, and for each row its first; where that is met, all of them are added up. A row that is in memory already is not copied."""
        node, emitter, init = self.node, self.emitter, self.node.init
        assert isinstance(node.place, IndexValue) and isinstance(init, Load)
        target, table = node.place.expr, int(node.buffer.shape[0])  # type: ignore[arg-type]
        rows, width, dtype = prod(self.sizes[:-1]), self.sizes[-1], compute_type(node.buffer.dtype)
        column = index_symbols(node.ranges)[-1]
        row = next(s for s in node.place.expr.free if isinstance(s, Indirect))

        def at(place: str) -> tuple[dict[Sym, str], list[str]]:
            names, lines, rest = {}, [], place
            for d in reversed(node.serial):
                if isinstance(symbol := index_symbols(node.ranges)[d], Sym):
                    names[symbol] = f"i{d}"
                    lines.append(f"const i64 i{d} = {rest if d == 0 else f'({rest}) % {self.sizes[d]}'};")
                rest = f"({rest}) / {self.sizes[d]}"
            return names, lines

        def looked_up(place: str, then: Callable[[str], list[str]]) -> list[str]:
            names, lines = at(place)
            scope = emitter.push(names)
            text = emitter.index(row, "", len(emitter.scopes) - 1)
            found = then(text)
            emitter.pop()
            return [*lines, *scope.lines, *found]

        def columns(statement: Callable[[], str]) -> list[str]:
            scope = emitter.push({column: "c"} if isinstance(column, Sym) else {})
            text = statement()
            emitter.pop()
            simd = f"#pragma omp simd{' reduction(|:status)' if scope.checks else ''}"
            return [simd, "for (i64 c = lo; c < hi; c++) {", *indent([*scope.lines, text]), "}"]

        names, lines = at("k - 1")
        scope = emitter.push(names)
        sums = columns(lambda: f"a[c - lo] = a[c - lo] + {emitter.emit(node.body)};")
        emitter.pop()
        chain = ["for (i64 k = i + 1; k; k = next[k - 1]) {", *indent([*lines, *scope.lines, *sums]), "}"]

        def add(text: str) -> list[str]:
            added = columns(lambda: f"{self.target}[{emitter.index(target, '', len(emitter.scopes) - 1)}] += a[c - lo];")
            clear = f"{dtype} a[{min(COLUMNS, width)}] = {{0}};"
            return [f"if (first[{text}] != i + 1) continue;", clear, *chain, *added]

        body = [f"for (i64 i = 0; i < {rows}; i++) {{", *indent(looked_up("i", add)), "}"]
        return [
            f"if ({emitter.pointers[init.buffer]} != {self.target}) {{", *indent(self._first()), "}",
            f"i32 *first = __builtin_calloc({table + rows}, 4), *next = first + {table};",
            "if (first == 0) return 8;",
            f"for (i64 i = {rows}; i-- > 0;) {{",
            *indent(looked_up("i", lambda text: [f"next[i] = first[{text}]; first[{text}] = (i32)i + 1;"])),
            "}",
            *([_THREADS] if self.parallel else []),
            f"for (i64 row = 0; row < {-(-width // COLUMNS)}; row++) {{",
            *indent([f"const i64 lo = row * {COLUMNS}, hi = mg_min(lo + {COLUMNS}, {width});", *body]),
            "}",
            "__builtin_free(first);",
        ]  # fmt: skip

    # ---- the loops ---------------------------------------------------------------------------------------------------------

    def _loops(self) -> list[str]:
        node, emitter = self.node, self.emitter
        symbols = index_symbols(node.ranges)
        outer = [d for d, s in enumerate(symbols) if isinstance(s, Sym) and d not in node.serial and d != self.vector]
        serial = [d for d in node.serial if isinstance(symbols[d], Sym)]
        rows = prod(self.sizes[d] for d in outer)
        head, inside = self._portions(rows), []
        names: dict[Sym, str] = {}
        rest = "row / portions"
        for position, d in reversed(list(enumerate(outer))):
            inside.append(f"const i64 i{d} = {rest if position == 0 else f'({rest}) % {self.sizes[d]}'};")
            rest = f"({rest}) / {self.sizes[d]}"
            names[symbols[d]] = f"i{d}"  # type: ignore[index]
        scope = emitter.push(names)
        body = self._serial(symbols, serial)
        emitter.pop()
        inside += [*scope.lines, *body]
        loop = [f"for (i64 row = 0; row < {rows} * portions; row++) {{", *indent(inside), "}"]
        return [*head, *([_THREADS + self._wide()] if self.parallel else []), *loop]

    @staticmethod
    def _wide() -> str:
        return f" if (points >= {PARALLEL})" if any_size() else ""

    def _portions(self, rows: int) -> list[str]:
        """How the vector loop is cut: cumulative sums by their accumulators, additions among the threads."""
        if self.vector is None:
            return ["const i64 portions = 1;"]
        size, step = self.sizes[self.vector], LINE // self.node.buffer.dtype.itemsize
        if self.node.place is None:
            if any_size():
                return [f"const i64 chunk = {BLOCK}, portions = ({size} + {BLOCK - 1}) / {BLOCK};"]
            return [f"const i64 chunk = {min(BLOCK, size)}, portions = {-(-size // BLOCK)};"]
        if not self.parallel or rows >= 64:
            return [f"const i64 chunk = {size}, portions = 1;"]
        wanted = (
            f"mg_min(omp_get_max_threads(), {-(-size // step)})"
            if not any_size()
            else f"mg_min(omp_get_max_threads(), ({size} + {step - 1}) / {step})"
        )
        return [
            f"const i64 wanted = {wanted}, chunk = ({size} + wanted * {step} - 1) / (wanted * {step}) * {step};",
            f"const i64 portions = ({size} + chunk - 1) / chunk;",
        ]

    def _serial(self, symbols: Sequence[Expr], serial: Sequence[int]) -> list[str]:
        """The loops that run in order, and the vector loop inside of them."""
        if self.vector is None and self.node.place is None:
            return self._scan(symbols[serial[0]], self.sizes[serial[0]], serial[0])
        lines: list[str] = []
        if self.vector is not None:
            lines.append(f"const i64 lo = row % portions * chunk, hi = mg_min(lo + chunk, {self.sizes[self.vector]});")
        if self.node.place is None:
            kind = _sum_type(self.node.buffer.dtype)
            lines += [f"{kind} a[{min(BLOCK, self.sizes[self.vector or 0])}];", "for (i64 l = 0; l < hi - lo; l++) a[l] = 0;"]
        return [*lines, *self._nested(symbols, list(serial))]

    def _nested(self, symbols: Sequence[Expr], serial: list[int]) -> list[str]:
        emitter = self.emitter
        if serial:
            d = serial[0]
            scope = emitter.push({symbols[d]: f"i{d}"})  # type: ignore[dict-item]
            inner = self._nested(symbols, serial[1:])
            emitter.pop()
            return [f"for (i64 i{d} = 0; i{d} < {self.sizes[d]}; i{d}++) {{", *indent([*scope.lines, *inner]), "}"]
        if self.vector is None:
            scope = emitter.push({})
            text = self._step("0")
            emitter.pop()
            return [*scope.lines, *text]
        d = self.vector
        scope = emitter.push({symbols[d]: f"i{d}"})  # type: ignore[dict-item]
        text = self._step(f"i{d} - lo")
        emitter.pop()
        pragma = f"#pragma omp simd{' reduction(|:status)' if scope.checks else ''}"
        return [pragma, f"for (i64 i{d} = lo; i{d} < hi; i{d}++) {{", *indent([*scope.lines, *text]), "}"]

    def _scan(self, symbol: Expr, size: int, d: int) -> list[str]:
        """A row whose sums lie one behind the other."""
        emitter, dtype = self.emitter, self.node.buffer.dtype
        scope = emitter.push({symbol: f"i{d}"})  # type: ignore[dict-item]
        value, place = emitter.emit(self.node.body), self.node.buffer.offset(index_symbols(self.node.ranges))
        store = f"{self.target}[{emitter.index(place, '', len(emitter.scopes) - 1)}] = {to_memory(f'({compute_type(dtype)})s', dtype)};"
        emitter.pop()
        scans = not scope.checks  # all reductions of such a loop would have to be scans
        middle = ["MG_SO_FAR"] * scans
        body = ["{", *indent([*scope.lines, f"s = s + {value};"]), "}", *middle, f"{{ {store} }}"]
        head = [f"{_sum_type(dtype)} s = 0;", *["MG_SCAN"] * scans]
        return [*head, f"for (i64 i{d} = 0; i{d} < {size}; i{d}++) {{", *indent(body), "}"]

    def _step(self, lane: str) -> list[str]:
        """One element."""
        node, emitter = self.node, self.emitter
        depth, dtype = len(emitter.scopes) - 1, node.buffer.dtype
        value = emitter.emit(node.body)
        if node.place is None:
            place = emitter.index(node.buffer.offset(index_symbols(node.ranges)), "", depth)
            text = f"({compute_type(dtype)})a[{lane}]"
            return [f"a[{lane}] = a[{lane}] + {value};", f"{self.target}[{place}] = {to_memory(text, dtype)};"]
        assert isinstance(node.place, IndexValue)
        place = f"{self.target}[{emitter.index(node.place.expr, '', depth)}]"
        return [f"{place} = {place} + {value};"]


def _sum_type(dtype: torch.dtype) -> str:
    """What cumulative sums run in: eager's type."""
    return "f64" if dtype in (torch.float32, torch.float64) else "f32" if dtype in HALVES else "i64"
