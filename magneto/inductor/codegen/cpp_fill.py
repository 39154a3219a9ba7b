"""What stands in the innermost loop of a kernel, and how that loop is written.

Results that are larger than the caches are computed into a piece of a row that stays in the first cache, and are written past the caches from there: a line
that is overwritten whole is then not read before. That is a third of the traffic of a copy. Not where the result takes an input's memory: its lines are there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from magneto.base.varying import sizes_vary
from magneto.inductor.codegen.cpp_emit import Scope, indent, plain_loads
from magneto.inductor.codegen.cpp_lookup import next_row
from magneto.inductor.codegen.cpp_nest import FEW_LANES, TILE, stride_along
from magneto.inductor.codegen.cpp_reduce import ArgFold, Fold
from magneto.inductor.codegen.cpp_staged import LINE
from magneto.inductor.codegen.cpp_turns import looked_at, near, turns
from magneto.inductor.codegen.cpp_types import HALVES, memory_type
from magneto.inductor.loops.ir import Load, Value, loads
from magneto.inductor.schedule.kernel import Member
from magneto.symbolic import Expr, to_c

if TYPE_CHECKING:
    from magneto.inductor.codegen.cpp import Writer

SUM_BLOCK = 2048  # elements added up in single precision, by LANES lanes
CONVERTED_BLOCK = 1024  # the same where pieces of it are converted or written past the caches: they stay in the first cache
PIECE = 256  # elements of a piece that is written past the caches: computing one and moving the lines of others go on side by side
AHEAD = 4096  # bytes between what is computed and what is fetched
LANES = 64
LANES_FROM = 256  # elements: shorter loops keep one vector of accumulators
BYTES_FROM = 1024  # elements: from here on bytes have four vectors of accumulators too
STREAM_FROM = 8 << 20  # bytes of a result that is not kept in the caches
STREAM_RUN = 512  # bytes that are written one after the other at least
FETCHED_ROW = 512 << 10  # bytes of a row that is fetched while the one before is walked again, at most
FETCHED_RUN = 16  # elements of a row of a block (cpp_staged), at least, that is fetched
FAR = 256  # elements between what neighbours in a vector read
SQUARE_RUN = 256  # the same of the rows of a square (cpp_nest.TILE)
CONVERT_FROM = 64  # elements: shorter loops convert one by one what does not fill vectors
CONVERTED = 6  # arrays of converted elements, at most
VECTOR = 16  # elements that are converted, computed and converted back in registers


class Fill:
    """What stands in the innermost loop: stores, folds, arrays kept for later passes; and how that loop is written."""

    def __init__(
        self, writer: Writer, stores: Sequence[Member] = (), folds: Sequence[Fold] = (), keeps: Sequence[Member] = (),
        across: bool = False, results: dict[str, tuple[str, torch.dtype]] | None = None, blocks: str = "", downs: Sequence[Fold] = (),
    ) -> None:  # fmt: skip
        self.writer, self.stores, self.folds, self.keeps, self.downs = writer, stores, folds, keeps, downs
        self.across, self.results, self.blocks = across, results or {}, blocks
        self.streamed: dict[str, str] = {}  # member -> array of the piece
        self.widened: dict[Load, str] = {}  # float16: array of the piece in float32, converted as a whole: gcc vectorises no such thing
        self.squares: dict[
            str, str
        ] = {}  # member whose memory jumps along the vector loop -> array of a square of it, which is turned when it is whole
        self.narrowed: dict[str, str] = {}  # float16 or bfloat16 member -> array of the piece before it is converted
        self.ahead: dict[Load, int] = {}  # fetched meanwhile, and how many elements further on: the processor does not look that far
        self.looked_up: list[Load] = []  # what gathers from rows, the next of which is fetched meanwhile

    def inside(self, turn: int = 0) -> None:
        """Emit everything into the innermost scope. `turn`: of a dimension that is written out (cpp_nest), its element."""
        writer, emitter = self.writer, self.writer.emitter
        scope, depth = emitter.scopes[-1], len(emitter.scopes) - 1
        vector = next(s for s, d in emitter.depths.items() if d == depth)
        lane = f"{emitter.variables[vector]} - lo" if self.across else ""
        along = lane or emitter.variables[vector]
        outside = dict(writer.answers)
        for name, (text, _) in self.results.items():
            writer.answers[name] = (text.format(lane=along), depth)
        kept_now = {m.name for m in self.keeps}
        for name, array in writer.arrays.items():
            if name not in kept_now:
                writer.answers[name] = (f"{array}[{self.position(lane)}]", depth)
        emitter._depth_memo.clear()
        points = writer.points([*self.folds, *self.downs], self.stores)
        if not turn:
            self._convert_whole(points)
        emitter.local.update({load: f"{array}[{self._place(load.index, turn)}]" for load, array in self.widened.items()})
        for body in points:  # one after the other: long chains must not become deep recursion
            emitter.emit(body)
        for member in self.keeps:
            scope.lines.append(f"{writer.arrays[member.name]}[{self.position(lane)}] = {emitter.emit(member.body)};")
        for fold in self.folds:
            if isinstance(fold, ArgFold):
                fold.across = self.across
            value = emitter.emit(fold.member.body)
            flat = emitter.index(fold.member.flat, "", depth) if fold.member.flat is not None else ""
            into = fold.lane if fold.accumulator != fold.type or not self.across else fold.name
            scope.lines.append(fold.step(value, f"{into}[{lane}]" if self.across else into, flat))
        for fold in self.downs:
            into = fold.name if fold.accumulator == fold.type else fold.lane
            flat = emitter.index(fold.member.flat, "", depth) if fold.member.flat is not None else ""
            scope.lines.append(fold.step(emitter.emit(fold.member.body), f"{into}[{self.position('')}]", flat))
        if not turn:
            self.streamed = {m.name: emitter.fresh("o") for m in self.stores if not self.across and writer.streams(m)}
        if self.across and writer.nest.tiled:
            self.squares = {m.name: emitter.fresh("q") for m in self.stores if writer.jumps(m.store)}
        arrays = {**self.streamed, **self.narrowed}
        places = {m.name: f"{arrays[m.name]}[{self._place(m.store, turn)}]" for m in self.stores if m.name in arrays}
        places.update({name: f"{array}[{writer.square}]" for name, array in self.squares.items()})
        texts = [writer.store(m, places.get(m.name, "")) for m in self.stores]
        # all loads stand before the first store: an output may take an input's memory
        scope.lines.extend(texts)
        if not self.across and writer.nest.mode != "split" and not turn:
            self._look_ahead([*points, *(m.body for m in self.stores), *(f.member.body for f in (*self.folds, *self.downs))])
        writer.answers = outside
        for load in self.widened:
            del emitter.local[load]
        emitter._depth_memo.clear()

    def _look_ahead(self, bodies: Sequence[Value]) -> None:
        """A row that is walked again is in the cache: meanwhile the next one is fetched. What is walked once is fetched before it is folded, or written past the caches: rows end before the processor has seen that it could."""
        writer = self.writer
        once = self.folds and not any(m.full and writer.stages[m.name] for m in writer.kernel.members)
        passing = self.streamed or once or (writer.staged and writer.nest.inner[-1].size >= FETCHED_RUN)
        for load in dict.fromkeys(load for body in bodies for load in loads(body)):
            if passing and next_row(writer, load, "0") and len(self.looked_up) < 4:
                self.looked_up.append(load)
            if not writer.is_long(load) or len(self.ahead) == 8:
                continue
            if load in writer.walked:
                row = stride_along(load.index, writer.nest.outer[-1].sym) if writer.nest.outer else None
                if row and load not in writer.fetched and row * load.dtype.itemsize <= FETCHED_ROW:
                    self.ahead[load] = row * -(-AHEAD // (row * load.dtype.itemsize))  # of short rows one further on
                    writer.fetched.add(load)
            elif passing:
                self.ahead[load] = AHEAD // load.dtype.itemsize
            writer.walked.add(load)

    def _convert_whole(self, points: Sequence[Value]) -> None:
        """Chooses the memory, read or written one element after the other, that is converted in whole pieces: float16, and results in bfloat16."""
        writer, nest = self.writer, self.writer.nest
        size = nest.inner[-1].size
        short = size < CONVERT_FROM  # in vectors of float16 all the same, where none is left over
        if nest.tiled or (short and (self.folds or self.downs or size < 2 * VECTOR or size % VECTOR)):
            return
        bodies = [*points, *(m.body for m in (*self.stores, *self.keeps)), *(f.member.body for f in (*self.folds, *self.downs))]
        for load in dict.fromkeys(load for body in bodies for load in plain_loads(body)):
            run = nest.runs(load.index) is not None
            if load.dtype is torch.float16 and run and load.buffer not in writer.members and len(self.widened) < CONVERTED:
                self.widened[load] = writer.emitter.fresh("h")
        for member in self.stores:
            if (
                (member.buffer.dtype is torch.float16 or (member.buffer.dtype in HALVES and not short))
                and nest.runs(member.store) is not None
                and not writer.exact(member)
            ):
                self.narrowed[member.name] = writer.emitter.fresh("h")

    def _place(self, index: Expr, turn: int) -> str:
        """Where an element of a piece of memory stands in its array: one run behind the other, each as the memory is."""
        nest = self.writer.nest
        runs, each = nest.runs(index) or (1, 1)
        place = f"{self.writer.emitter.variables[nest.inner[-1].sym]} - b"
        if each > 1:
            return f"({place}) * {each} + {turn}"
        return f"{place} + {turn * min(nest.inner[-1].size, PIECE)}" if runs > 1 and turn else place

    def _runs(self, index: Expr, pointer: str, array: str, size: int, first: str, count: str) -> list[tuple[str, str, str]]:
        """(memory, array, how many elements) of each run of a piece of `count` elements from `first` on."""
        nest = self.writer.nest
        runs, each = nest.runs(index) or (1, 1)
        names = {**self.writer.emitter.variables, nest.inner[-1].sym: first}
        found = []
        for turn in range(runs):
            if nest.short is not None:
                names[nest.short.sym] = str(turn)
            memory = f"{pointer} + {to_c(index, lambda s: names[s])}"
            found.append((memory, f"{array} + {turn * size}" if turn else array, f"({count}) * {each}" if each > 1 else count))
        return found

    def position(self, lane: str) -> str:
        """Flat position of the point in a row-local array."""
        writer = self.writer
        text = ""
        for dim in writer.kernel.cols:
            name = writer.emitter.variables[dim.sym]
            text = f"({text}) * {dim.size} + {name}" if text else name
        if lane:
            text = f"({text}) * {self.blocks} + {lane}" if text else lane
        return text

    def wrap(self, name: str, start: str, stop: str, size: int, scope: Scope) -> list[str]:
        """The innermost loop itself."""
        nest = self.writer.nest
        converted, tiled, turning = bool(self.widened or self.narrowed), nest.tiled, size > 1 and turns(scope.lines)
        brain = any(m.buffer.dtype is torch.bfloat16 and m.name in self.narrowed for m in self.stores)  # whose conversion has a branch
        chunks = converted and not (brain or turning or scope.checks or nest.short) and (not self.folds or self._width(size) == LANES)
        pieces = bool(self.streamed or (converted and not chunks) or (chunks and (self.ahead or self.looked_up)))
        block = TILE if tiled else (CONVERTED_BLOCK if pieces or turning else SUM_BLOCK) if self.folds else PIECE
        lasting = self._width(size) and all(fold.accumulator == fold.type for fold in self.folds)  # lanes that a whole row may run through
        cut = (bool(self.folds) and not lasting) or pieces or turning
        blocked = (size > block or bool(nest.any)) and not tiled and not self.across and cut
        first, last = ("b", "e") if blocked else (start, stop)
        width = block if nest.any else min(size, block)
        aligned = self._to_a_line() if blocked else ""
        if chunks:
            arrays = (*self.widened.values(), *self.narrowed.values())
            body = [re.sub(rf"\b({'|'.join(arrays)})\[{name} - b", rf"\1[{name} - g", line) for line in scope.lines]
            scope = replace(scope, lines=body)
        if chunks and not self.folds:
            even = not (nest.any or aligned) and size % VECTOR == 0 and (start.isdigit() or (nest.chunk > 0 and nest.chunk % VECTOR == 0))
            lines = self._chunks(name, first, last, body, even)
        else:
            lines = self._plain(name, first, last, size, scope, start.isdigit(), chunks)
        if turning:
            short = self._plain(name, first, last, size, replace(scope, lines=near(scope.lines)), start.isdigit())
            look = ["i32 far = 0;", *simd_loop(name, first, last, looked_at(scope.lines), " reduction(|:far)")]
            lines = [*look, "if (far) {", *indent(lines), "} else {", *indent(short), "}"]
        if pieces:
            lines = lines if chunks else self._converted(lines, width, "b", f"{last} - b")
            lines = [*([] if blocked else [f"const i64 b = {start};"]), *self._stream(lines, last, width)]
        elif self.writer.staged:
            lines = [*self._fetches(start, size), *lines]
        if aligned:
            lines = [f"e = mg_min(b + {block} - {aligned}, {stop});", *lines]
            return [f"for (i64 b = {start}, e; b < {stop}; b = e) {{", *indent(lines), "}"]
        if blocked:
            head = [f"const i64 e = mg_min(b + {block}, {stop});"]
            return [f"for (i64 b = {start}; b < {stop}; b += {block}) {{", *indent([*head, *lines]), "}"]
        return ["{", *indent(lines), "}"] if turning or pieces or chunks or (self.folds and not self.across) else lines

    def _to_a_line(self) -> str:
        """How far piece `b` of a result that is written past the caches begins behind a line of memory, where rows do not all begin with one: pieces end with lines, for one of which two pieces
        write a part each is written twice. Empty where sums would depend on it."""
        writer, nest = self.writer, self.writer.nest
        names = {**writer.emitter.variables, nest.inner[-1].sym: "b"}
        for member in () if self.folds else self.stores:
            size, dims = member.buffer.dtype.itemsize, (*nest.outer, *nest.inner[:-1])
            if member.name not in self.streamed or nest.runs(member.store) != (1, 1):
                continue
            if sizes_vary() or nest.any or any((stride_along(member.store, d.sym) or 1) * size % LINE for d in dims):
                return f"(i64)((u64)({writer.pointers[member.name]} + {to_c(member.store, lambda s: names[s])}) % {LINE} / {size})"
        return ""

    def _chunks(self, name: str, first: str, last: str, body: list[str], even: bool) -> list[str]:
        """The loop in vectors. gcc keeps what is converted in registers, because each small array is written and read as a whole. `even`: nothing is left behind the last one."""
        inner = ["#pragma omp simd", f"for (i64 l = 0; l < {VECTOR}; l++) {{", *indent([f"const i64 {name} = g + l;", *body]), "}"]
        lines = [f"for (; g + {VECTOR} <= {last}; g += {VECTOR}) {{", *indent(self._converted(inner, VECTOR, "g", str(VECTOR))), "}"]
        if not even:
            rest = self._converted(simd_loop(name, "g", last, body, ""), VECTOR, "g", f"{last} - g")
            lines += [f"if (g < {last}) {{", *indent(rest), "}"]
        return [f"i64 g = {first};", *lines]

    def _plain(self, name: str, first: str, last: str, size: int, scope: Scope, whole: bool, chunks: bool = False) -> list[str]:
        """The loop, not cut into pieces. `chunks`: conversions stand in it."""
        if not self.across and self.folds:
            width = self._width(size)
            return self._lanes(name, first, last, size, scope, width, whole, chunks) if width else self._lane(name, first, last, scope)
        simd = simd_loop(name, first, last, scope.lines, " reduction(|:status)" if scope.checks else "")
        return simd if size > 1 else simd[1:]

    def _declared(self, kind: str, array: str, index: Expr, size: int) -> str:
        return f"{kind} {array}[{size * max(self.writer.nest.runs(index) or (1, 1))}] __attribute__((aligned(64)));"

    def _converted(self, loop: list[str], size: int, first: str, count: str) -> list[str]:
        """A loop over `count` elements, `size` at most, from `first` on between the conversions of what it reads and writes."""
        before, after = [], []
        for load, array in self.widened.items():
            before.append(self._declared("f32", array, load.index, size))
            for memory, part, n in self._runs(load.index, self.writer.pointers[load.buffer], array, size, first, count):
                before.append(f"mg_widen_f16({part}, {memory}, {n});")
        for member in self.stores:
            if floats := self.narrowed.get(member.name):
                suffix, array = "f16" if member.buffer.dtype is torch.float16 else "bf16", self.streamed.get(member.name, "")
                before.append(self._declared("f32", floats, member.store, size))
                for memory, part, n in self._runs(member.store, self.writer.pointers[member.name], floats, size, first, count):
                    to = part.replace(floats, array if first == "b" else f"{array} + ({first} - b)", 1) if array else memory
                    after.append(f"mg_narrow_{suffix}({to}, {part}, {n});")
        return [*before, *loop, *after]

    def _stream(self, loop: list[str], last: str, size: int) -> list[str]:
        """A loop over a piece between the declarations of the pieces of results and the statements that write them."""
        before, after = [], []
        for member in self.stores:
            if array := self.streamed.get(member.name):
                pointer, kind = self.writer.pointers[member.name], memory_type(member.buffer.dtype)
                before.append(self._declared(kind, array, member.store, size))
                for memory, part, count in self._runs(member.store, pointer, array, size, "b", f"{last} - b"):
                    after.append(f"mg_stream({memory}, {part}, ({count}) * sizeof({kind}), {pointer}_past);")
        return [*before, *loop, *after, *([] if self.folds else self._fetches("b", size))]

    def _fetches(self, position: str, count: int) -> list[str]:
        """Statements that fetch what lies ahead of `count` elements at a position of the vector loop."""
        nest, lines = self.writer.nest, []
        names = {**self.writer.emitter.variables, nest.inner[-1].sym: position}
        if nest.short is not None:
            names[nest.short.sym] = "0"
        for load, distance in self.ahead.items():
            place = f"{self.writer.pointers[load.buffer]} + {to_c(load.index, lambda s: names[s])} + {distance}"
            lines.append(f"mg_ahead({place}, {count * (nest.runs(load.index) or (1, 1))[1]} * sizeof({memory_type(load.dtype)}));")
        for load in self.looked_up:
            place = f"{self.writer.pointers[load.buffer]} + {next_row(self.writer, load, position)}"
            lines.append(f"mg_ahead({place}, {count} * sizeof({memory_type(load.dtype)}));")
        return lines

    def _width(self, size: int) -> int:
        """How many accumulators each fold has side by side; 0: one vector."""
        simd, searches = all(fold.vectorised for fold in self.folds), any(isinstance(fold, ArgFold) and fold.ordered for fold in self.folds)
        if self.across or not all(fold.vectorised or (isinstance(fold, ArgFold) and fold.ordered) for fold in self.folds):
            return 0
        if size >= LANES_FROM or self.writer.nest.any:
            narrow = simd and size >= BYTES_FROM and all(fold.type in ("i8", "u8") for fold in self.folds)
            return LANES << 2 if narrow and not self.writer.nest.any else LANES
        if size >= 2 * FEW_LANES and searches:
            return FEW_LANES
        if simd and size >= 2 * FEW_LANES and any(fold.lanes_function for fold in self.folds):
            twice = size >= 8 * FEW_LANES or (size > 4 * FEW_LANES and size % (2 * FEW_LANES) == 0)
            return FEW_LANES << twice
        return 0

    def _lane(self, name: str, first: str, last: str, scope: Scope) -> list[str]:
        """The loop with one vector of accumulators per fold."""
        lines = [fold.declare_lane() for fold in self.folds]
        clauses = "".join(fold.clause() for fold in self.folds) + (" reduction(|:status)" if scope.checks else "")
        if all(fold.vectorised for fold in self.folds):
            lines.append(f"#pragma omp simd{clauses}")
        lines += [f"for (i64 {name} = {first}; {name} < {last}; {name}++) {{", *indent(scope.lines), "}"]
        size = SUM_BLOCK if self.writer.nest.any else min(SUM_BLOCK, self.writer.nest.inner[-1].size)
        return [*self._fetches(first, size), *lines, *(fold.join() for fold in self.folds)]

    def _lanes(self, name: str, first: str, last: str, size: int, scope: Scope, width: int, whole: bool, chunks: bool) -> list[str]:
        """The loop with `width` accumulators per fold: several vectors, so that one addition need not wait for the one before."""
        texts = {fold.lane: f"{fold.lane}s[l]" for fold in self.folds}
        searches = [fold for fold in self.folds if isinstance(fold, ArgFold)]
        texts.update({f"{fold.name}x": f"{fold.name}xs[l]" for fold in searches})
        body = [_renamed(line, texts) for line in scope.lines]
        for search in searches:
            body = [search.in_lanes(line) for line in body]
        plain = [fold for fold in self.folds if not isinstance(fold, ArgFold)]
        lines = [line for search in searches for line in search.declare_lanes(width, first, last)]
        again = any(m.full and self.writer.stages[m.name] for m in self.writer.kernel.members)
        lanes = "MG_WIDE" if width == LANES and again and not (chunks or searches or self.ahead or self.looked_up) else str(width)
        lines += [f"{fold.type} {fold.lane}s[{lanes}]{' = {0}' * (fold.initial == '0')};" for fold in plain]
        start = " ".join(f"{fold.lane}s[l] = {fold.initial};" for fold in plain if fold.initial != "0")
        lines += [f"for (i64 l = 0; l < {lanes}; l++) {{ {start} }}"] if start else []
        checks = " reduction(|:status)" if scope.checks else ""
        inner = [f"#pragma omp simd{checks}", f"for (i64 l = 0; l < {lanes}; l++) {{", *indent([f"const i64 {name} = g + l;", *body]), "}"]
        if chunks:
            inner = self._converted(inner, width, "g", str(width))
        lines += [
            f"i64 g = {first};",
            f"for (; g + {lanes} <= {last}; g += {lanes}) {{",
            *indent([*self._fetches("g", width), *inner]),
            "}",
        ]
        lines += [fold.declare_lane() for fold in self.folds]
        for fold in self.folds:
            if isinstance(fold, ArgFold):
                lines += fold.join_lanes(width)
                continue
            if fold.lanes_function:
                lines.append(f"{fold.lane} = {fold.lanes_function}({fold.lane}s, {lanes});")
                continue
            lines += [
                f"#pragma omp simd{fold.clause()}",
                f"for (i64 l = 0; l < {lanes}; l++) {fold.join_from(fold.lane, f'{fold.lane}s[l]')}",
            ]
        if size % width or not whole or self.writer.nest.any:  # blocks are multiples of the width
            known = first == "0" and not self.writer.nest.any  # few steps: known in number, they need no loop
            rest = "g" if not known else f"{size} / {lanes} * {lanes}" if lanes == "MG_WIDE" else str(size // width * width)
            clauses = "".join(fold.clause() for fold in self.folds) + checks
            pragma = [] if searches else [f"#pragma omp simd{clauses}"]
            tail = [*pragma, f"for (i64 {name} = {rest}; {name} < {last}; {name}++) {{", *indent(scope.lines), "}"]
            tail = self._converted(tail, width, "g", f"{last} - g") if chunks else tail
            lines += [f"if (g < {last}) {{", *indent(tail), "}"] if self.writer.nest.any else tail
        return lines + [fold.join() for fold in self.folds]


def simd_loop(name: str, first: str, last: str, body: Sequence[str], clauses: str) -> list[str]:
    """Where neighbours are read together at each of steps that are far apart, no vectors are made: gcc sorts into them all that lies in between, in minutes."""
    head = f"for (i64 {name} = {first}; {name} < {last}; {name}++) {{"
    steps = [(m[1], m[2]) for line in body for m in re.finditer(rf"\b(p\d+)\[[^\]]*?\b(\d+) \* {name}\b", line) if int(m[2]) >= FAR]
    if len(steps) > len(set(steps)):
        return [head, *indent(['__asm__ volatile("");', *body]), "}"]
    return [f"#pragma omp simd{clauses}", head, *indent(body), "}"]


def _renamed(line: str, names: dict[str, str]) -> str:
    """A statement over other accumulators."""
    for old, text in names.items():
        line = re.sub(rf"\b{old}\b", text, line)
    return line
