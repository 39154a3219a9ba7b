"""FusedKernel -> C text.

A kernel is `int f(void *const *p)`: pointers to the data of the buffers it reads and writes, in the order of `parameters`. It returns 0, or
bits that say why its results are void (an index out of range, an integer division by zero).

The text depends on nothing but the computation: no buffer names, no symbol names, so that equal layers give equal text. Long sums are kept in
blocks of `SUM_BLOCK` elements whose partial sums are added in double: the error stays near that of eager's cascade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import torch

from magneto.base.dataclass import dataclass, field
from magneto.inductor.codegen.cpp_bits import in_bits
from magneto.inductor.codegen.cpp_crossed import write_crossed
from magneto.inductor.codegen.cpp_emit import ONE_PLUS, Emitter, Scope, indent, plain_loads
from magneto.inductor.codegen.cpp_fill import SQUARE_RUN, STREAM_FROM, STREAM_RUN, Fill, simd_loop
from magneto.inductor.codegen.cpp_nest import BLOCK, TILE, Nest, nest_of, stride_along
from magneto.inductor.codegen.cpp_ops import HEAVY
from magneto.inductor.codegen.cpp_parts import parts
from magneto.inductor.codegen.cpp_reduce import Fold, fold_of
from magneto.inductor.codegen.cpp_split import write_split
from magneto.inductor.codegen.cpp_staged import WHOLE_LINES, staged, whole_lines
from magneto.inductor.codegen.cpp_types import HALVES, compute_type, convert, from_memory, memory_type, to_memory
from magneto.inductor.loops.ir import Const, Indirect, Load, Masked, Op, Value, walk_values
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.kernel import Dim, FusedKernel, Member, OrderedKernel, member_loads
from magneto.symbolic import Expr, Sym, to_c

ROWS_BLOCK = 16  # rows added up in single precision across rows
MANY = 16  # operations, none of them costly, that are as much work as an array
CACHE_BYTES = 256 << 10  # of row-local arrays, which lie on a thread's stack


@dataclass(slots=True)
class _Pass:
    """One walk over the row: reductions folded and buffers stored in it, values kept for later walks, and what goes down the columns."""

    folds: list[Member] = field(default_factory=list)
    stores: list[Member] = field(default_factory=list)
    keeps: list[Member] = field(default_factory=list)
    downs: list[Member] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.folds or self.stores or self.keeps or self.downs)


def parameters(kernel: FusedKernel | OrderedKernel) -> tuple[str, ...]:
    """Buffers in the order of the kernel's pointers: read ones, then stored ones."""
    reads = kernel.reads()
    return (*reads, *(name for name in kernel.stored if name not in reads))


def _uses(kernel: FusedKernel) -> Iterator[tuple[Value, Value]]:
    """(operation, what uses its value); results are used by themselves."""
    bodies = {m.name: m.body for m in kernel.members if not m.is_reduction}
    yield from ((bodies[name], bodies[name]) for name in kernel.stored if name in bodies)
    for member in kernel.members:
        for value in walk_values(member.body):
            for child in value.children():
                found: Value = child
                while isinstance(found, Load) and found.buffer in bodies:
                    found = bodies[found.buffer]
                if isinstance(found, Op):
                    yield found, value


def _shared(kernel: FusedKernel) -> frozenset[Value]:
    """Functions with a cheaper form of 1 + f(x) whose own value is needed too."""
    parents: dict[Value, set[Value]] = {}
    for found, value in _uses(kernel):
        if isinstance(found, Op) and found.name in ONE_PLUS:
            parents.setdefault(found, set()).add(value)
    return frozenset(value for value, users in parents.items() if len(users) > 1)


def _rounded(kernel: FusedKernel) -> frozenset[Value]:
    """Quotients by numbers that nobody reads before they are rounded to 16 bits: the last bit of float32 is not seen."""
    quotients: dict[Value, bool] = {}
    for found, value in _uses(kernel):
        if isinstance(found, Op) and found.name == "div" and isinstance(found.args[1], Const) and found.dtype is torch.float32:
            converted = isinstance(value, Op) and value.name == "convert_element_type" and value.dtype in HALVES
            quotients[found] = quotients.get(found, True) and converted and 1e-30 < abs(float(found.args[1].value.real)) < 1e30
    return frozenset(value for value, alone in quotients.items() if alone)


def kernel_text(kernel: FusedKernel) -> str:
    """The C function, named SYMBOL."""
    kernel = in_bits(kernel)
    pieces, whole, names = parts(kernel), Writer(kernel), parameters(kernel)
    if len(pieces) == 1:
        body = whole.body()
        if whole.nest.mode == "point" and not whole.streaming and (found := staged(Writer(kernel, whole.nest), [whole.kernel])):
            body = found
        return whole.function([*whole.declarations(), *body])
    if found := staged(whole, pieces):
        return whole.function([*whole.declarations(), *found])
    lines = [line for piece in pieces for line in ("{", *indent(Writer(piece, names=names).body()), "}")]
    return whole.function([*whole.declarations(), *lines])


class Writer:
    """`names`: the buffers of the pointers, where the kernel is a part of a function."""

    def __init__(self, kernel: FusedKernel, nest: Nest | None = None, names: Sequence[str] = ()) -> None:
        self.nest: Nest = nest or nest_of(kernel)
        self.kernel = self.nest.kernel
        self.members = {m.name: m for m in (*self.kernel.members, *self.nest.after)}
        self.stages = member_stages(self.kernel.members)
        self.pointers = {name: f"p{i}" for i, name in enumerate(names or parameters(kernel))}
        self.emitter = Emitter(self.pointers, self._resolve)
        self.emitter.shared, self.emitter.rounded = _shared(self.kernel), _rounded(self.kernel)
        self.emitter.form = "half" if all(self.members[name].buffer.dtype in HALVES for name in self.kernel.stored) else "f32"
        self.emitter.maxima, self.emitter.sums = (
            {m.name: m.body for m in self.kernel.members if m.kind == kind and m.buffer.dtype is torch.float32} for kind in ("max", "sum")
        )
        self.emitter.bodies = {m.name: m.body for m in self.kernel.members if not m.is_reduction}
        self.answers: dict[str, tuple[str, int]] = {}  # of loads of what is at hand: results of folds, cached values
        self.downs: dict[str, Fold] = {}  # reductions down the columns (cpp_crossed)
        self.arrays: dict[str, str] = {}  # member -> row-local array
        self.operations: dict[str, int] = {}  # per element of a member, those of the members it reads included
        self.heavy_memo: dict[str, bool] = {}
        self.streaming: set[str] = set()
        self.staged = False  # results are parts of a block in the first cache (cpp_staged)
        self.walked: set[Load] = set()  # long loads of earlier passes, and those of them whose next row has been fetched
        self.fetched: set[Load] = set()
        self.turned: dict[Load, str] = {}  # loads read through squares: the array of each
        self.dtypes = {
            b: load.dtype for m in self.members.values() for body in m.bodies for load in member_loads(body) for b in (load.buffer,)
        }
        self.dtypes.update({name: m.buffer.dtype for name, m in self.members.items()})

    # ---- resolving loads of what this kernel computes --------------------------------------------------------------------

    def _resolve(self, load: Load) -> tuple[str, int] | Value | None:
        member = self.members.get(load.buffer)
        if member is None:
            return None
        answer = self.answers.get(load.buffer)
        if answer is not None:
            return answer
        assert not member.is_reduction, f"{load.buffer} is read before it is folded"
        return member.body

    # ---- passes ------------------------------------------------------------------------------------------------------------

    def _passes(self) -> list[_Pass]:
        """What each walk over the row does. A value that is costly and needed in two walks is kept in between."""
        last = max(self.stages.values(), default=0) + 1
        passes = [_Pass() for _ in range(last + 1)]
        for member in self.kernel.members:
            stage = passes[self.stages[member.name]]
            if member.down:
                stage.downs.append(member)
            elif member.is_reduction:
                stage.folds.append(member)
            elif member.full and member.name in self.kernel.stored:
                stage.stores.append(member)
        seen: dict[str, int] = {}
        room = CACHE_BYTES
        width = self._row_length()

        def is_kept(number: int, name: str) -> bool:
            nonlocal room
            earlier = passes[seen.setdefault(name, number)]
            if earlier is passes[number] or self.nest.mode == "split" or not self._is_heavy(name):
                return False
            member = self.members[name]
            if member not in earlier.keeps and (size := width * member.acc_dtype.itemsize) <= room:
                room -= size
                earlier.keeps.append(member)
            return member in earlier.keeps

        for number, current in enumerate(passes):
            self._look_through(current, partial(is_kept, number))
        return passes

    def _row_length(self) -> int:
        n = 1
        for dim in self.kernel.cols:
            n *= dim.size
        return n * (self._block if self.nest.mode == "outer" else 1)

    @property
    def _block(self) -> int:
        """Accumulators side by side, at most."""
        return BLOCK if self.nest.any else self.nest.chunk

    def _look_through(self, current: _Pass, is_kept: Callable[[str], bool]) -> None:
        """Asks for each full pointwise member whose value a pass needs, those that others need before them, whether it is kept; behind one that is, nothing is needed."""
        found: set[str] = set()
        work: list[Member] = [*current.folds, *current.downs, *current.stores]
        while work:
            member = work.pop()
            for load in member_loads(member.body):
                inner = self.members.get(load.buffer)
                if inner is not None and inner.full and not inner.is_reduction and inner.name not in found:
                    found.add(inner.name)
                    if not is_kept(inner.name):
                        work.append(inner)
        for member in current.stores:
            if member.name not in found:
                is_kept(member.name)

    def points(self, folds: Sequence[Fold], stores: Sequence[Member]) -> list[Value]:
        """Bodies of the pointwise members that folds and stores need and that are not at hand, in the program's order."""
        needed: set[str] = set()
        roots = [f.member for f in folds] + list(stores)
        for member in reversed(self.kernel.members):
            at_hand = member.is_reduction or member.name in self.answers
            if member in roots or (member.name in needed and not at_hand):
                needed.update(load.buffer for load in member_loads(member.body))
        return [m.body for m in self.kernel.members if m.name in needed and not m.is_reduction and m.name not in self.answers]

    def _is_heavy(self, name: str) -> bool:
        """Is computing the member anew more work than writing and reading an array?"""
        found = self.heavy_memo.get(name)
        if found is None:
            body = self.members[name].body
            values = walk_values(body)
            reads = {v.buffer for v in values if isinstance(v, Load)}
            found = any(isinstance(v, Op) and v.name in HEAVY for v in values) or len(reads) > 2
            inner = [b for b in reads if b in self.members and not self.members[b].is_reduction and self.members[b].full]
            found = found or any(map(self._is_heavy, inner))
            self.operations[name] = sum(isinstance(v, (Op, Masked)) for v in values) + sum(self.operations.get(b, 0) for b in inner)
            found = found or self.operations[name] > MANY
            self.heavy_memo[name] = found
        return found

    # ---- text --------------------------------------------------------------------------------------------------------------

    def declarations(self) -> list[str]:
        """Of the pointers."""
        stored = self.kernel.stored
        return [
            f"{'' if name in stored else 'const '}{memory_type(self.dtypes[name])} *{pointer} = p[{pointer[1:]}];"
            for name, pointer in self.pointers.items()
        ]

    def body(self) -> list[str]:
        """The statements behind the pointers' declarations."""
        if self.nest.mode == "split":
            body = write_split(self)
        elif any(member.down for member in self.kernel.members):
            body = write_crossed(self)
        else:
            body = self._parallel_loop()
        return [*self.emitter.scopes[0].lines, *self.nest.constants, *body]

    def inside_block(self, outer: Sequence[str]) -> list[str]:
        """The statements that fill a block of results (cpp_staged) at a point of the outer dimensions, whose variables these are."""
        self.pointers.update({name: f"{self.pointers[name]}s" for name in self.kernel.stored})
        self.staged = True
        scope = self.emitter.push({d.sym: name for d, name in zip(self.nest.outer, outer, strict=True)})
        body = self._point_row()
        self.emitter.pop()
        return [*self.emitter.scopes[0].lines, *scope.lines, *body]

    def function(self, body: list[str]) -> str:
        lines = ["int SYMBOL(void *const *p) {", "    int status = 0;", *indent(body), "    return status;", "}"]
        text = "\n".join(lines) + "\n"  # where a condition chooses, gcc moves calls behind branches and makes no vectors of them
        return text if " ? " in text else text.replace("mg_round_f16(", "mg_machine_f16(")

    def _parallel_loop(self) -> list[str]:
        """The loop over rows, shared out to threads, and what stands in it."""
        nest = self.nest
        head, symbols = self.decode_rows(nest)
        emitter = self.emitter
        scope = emitter.push(symbols)
        scope.lines.extend(head)
        if nest.mode == "outer":
            body = self._outer_row()
        elif nest.mode == "point":
            body = self._point_row()
        else:
            body = self.inner_row()
        emitter.pop()
        inside = [*scope.lines, *body] if nest.mode == "point" else body
        if nest.iterations == 1 and not nest.any:
            return ["{", *indent(inside), "}"]
        loop = [f"for (i64 row = 0; row < {nest.cut_in[3]}; row++) {{", *indent(inside), "}"]
        return self.shared_out(loop)

    def shared_out(self, loop: list[str]) -> list[str]:
        """A loop whose iterations threads take."""
        if not self.streaming:
            return (
                [f"#pragma omp parallel for schedule(static) reduction(|:status){self.nest.threads}", *loop] if self.nest.parallel else loop
            )
        shared = ["#pragma omp for schedule(static) nowait", *loop, "MG_FENCE"]
        return [*self.past_flags(), f"#pragma omp parallel reduction(|:status){self.nest.threads}", "{", *indent(shared), "}"]

    def past_flags(self) -> list[str]:
        """Per streamed result: does it have memory of its own?"""
        read = [self.pointers[name] for name in self.kernel.reads()]
        lines = []
        for name in sorted(self.streaming, key=lambda n: self.pointers[n]):
            pointer = self.pointers[name]
            lines.append(f"const _Bool {pointer}_past = {' & '.join(f'(void *){pointer} != {other}' for other in read) or '1'};")
        return lines

    def decode_rows(self, nest: Nest) -> tuple[list[str], dict[Sym, str]]:
        """Loop variables of the outer dimensions (and bounds of the portion) out of the flat `row`."""
        lines: list[str] = []
        symbols: dict[Sym, str] = {}
        rest = "0" if nest.iterations == 1 and not nest.any else "(u32)row" if nest.iterations < 1 << 31 else "row"
        if nest.chunk and nest.cut is not None:
            chunk, _, divisor, _ = nest.cut_in
            lines.append(f"const i64 lo = (i64)({rest} % {divisor}) * {chunk}, hi = mg_min(lo + {chunk}, {nest.cut.size});")
            rest = f"{rest} / {divisor}" if nest.outer else rest
        for position, dim in reversed(list(enumerate(nest.outer))):
            name = f"i{position}"
            symbols[dim.sym] = name
            lines.append(f"const i64 {name} = {rest if position == 0 else f'{rest} % {dim.size}'};")
            if position:
                rest = f"({rest}) / {dim.size}"
        return lines, symbols

    # ---- loops inside a row ------------------------------------------------------------------------------------------------

    def loops(self, dims: Sequence[Dim], fill: Fill, bounds: dict[int, tuple[str, str]]) -> list[str]:
        """Nested loops over dims; `fill.inside()` adds to the innermost scope; `bounds`: position -> (from, to) instead of the whole range."""
        return self._loop(dims, 0, fill, bounds)

    def _loop(self, dims: Sequence[Dim], position: int, fill: Fill, bounds: dict[int, tuple[str, str]]) -> list[str]:
        dim, last = dims[position], position == len(dims) - 1
        name = f"j{position}"
        if last and self.nest.short is not None:
            return self._written_out(self.nest.short, dim, name, fill, bounds.get(position, ("0", str(dim.size))))
        scope = self.emitter.push({dim.sym: name})
        if last:
            fill.inside()
            inner: list[str] = []
        else:
            inner = self._loop(dims, position + 1, fill, bounds)
        self.emitter.pop()
        start, stop = bounds.get(position, ("0", str(dim.size)))
        if self.nest.tiled and position == len(dims) - 2:
            across = bounds.get(position + 1, ("0", str(dims[position + 1].size)))
            return self._tile(name, (start, stop), across, [*scope.lines, *inner], fill.squares)
        if self.nest.tiled and last and position:
            start, stop = "vlo", "vhi"
        if last:
            return fill.wrap(name, start, stop, dim.size, scope)
        return [f"for (i64 {name} = {start}; {name} < {stop}; {name}++) {{", *indent([*scope.lines, *inner]), "}"]

    def _written_out(self, short: Dim, dim: Dim, name: str, fill: Fill, bounds: tuple[str, str]) -> list[str]:
        """The vector loop with all elements of the short dimension in one turn. What depends on that one alone stands before the loop."""
        before: list[str] = []
        stores: list[str] = []
        whole = Scope()
        for k in range(short.size):
            outside, self.emitter.fixed = self.emitter.push({short.sym: str(k)}), {short.sym: k}
            scope = self.emitter.push({dim.sym: name})
            fill.inside(k)
            self.emitter.pop()
            self.emitter.pop()
            before += outside.lines
            whole.lines += scope.lines[: -len(fill.stores)]
            stores += scope.lines[-len(fill.stores) :]
            whole.checks |= scope.checks
        self.emitter.fixed = {}
        whole.lines += stores
        return [*before, *fill.wrap(name, *bounds, dim.size, whole)]

    def _tile(self, name: str, bounds: tuple[str, str], across: tuple[str, str], inner: list[str], squares: dict[str, str]) -> list[str]:
        """Two loops in squares of TILE x TILE; `inner` is the vector loop from vlo to vhi, `across` its bounds over all squares. `squares`: what is written turned."""
        square = [
            f"const i64 vhi = mg_min(vlo + {TILE}, {across[1]});",
            *self._turned(),
            *(f"{memory_type(self.dtypes[m])} {array}[{TILE * TILE}] __attribute__((aligned(64)));" for m, array in squares.items()),
            f"for (i64 {name} = tlo; {name} < thi; {name}++) {{",
            *indent(inner),
            "}",
            *(line for member, array in squares.items() for line in self._written_turned(self.members[member], array)),
        ]
        tiles = [
            f"const i64 thi = mg_min(tlo + {TILE}, {bounds[1]});",
            f"for (i64 vlo = {across[0]}; vlo < {across[1]}; vlo += {TILE}) {{",
            *indent(square),
            "}",
        ]
        return [f"for (i64 tlo = {bounds[0]}; tlo < {bounds[1]}; tlo += {TILE}) {{", *indent(tiles), "}"]

    def _written_turned(self, member: Member, array: str) -> list[str]:
        """A square of a result, of which the lines of memory are written whole: those that vector stores jump between often share a place in the first cache."""
        (other, vector), kind = self.nest.inner[-2:], memory_type(member.buffer.dtype)
        bits, names = f"u{member.buffer.dtype.itemsize * 8}", {**self.emitter.variables, other.sym: "tlo", vector.sym: "(vlo + l)"}
        place = to_c(member.store, lambda s: names[s])
        return [
            f"{bits} {array}t[{TILE * TILE}] __attribute__((aligned(64)));",
            f"mg_tile_{bits}({array}t, (const {bits} *){array}, {TILE}, vhi - vlo, thi - tlo, 0);",
            f"for (i64 l = 0; l < vhi - vlo; l++) __builtin_memcpy({self.pointers[member.name]} + {place}, {array}t + l * {TILE}, (thi - tlo) * sizeof({kind}));",
        ]

    def _turned(self) -> list[str]:
        """Squares read along the dimension in which memory is contiguous, for the loads that jump along the vector loop."""
        other, vector = self.nest.inner[-2:]
        lines = []
        for load, array in self.turned.items():
            kind = memory_type(load.dtype)
            bits = f"u{load.dtype.itemsize * 8}"
            names = {**self.emitter.variables, other.sym: "tlo", vector.sym: "vlo"}
            place = to_c(load.index, lambda s, names=names: names[s])  # type: ignore[misc]
            lines.append(f"{kind} {array}[{TILE * TILE}] __attribute__((aligned(64)));")
            step = stride_along(load.index, vector.sym)
            square = f"{array}, (const {bits} *)({self.pointers[load.buffer]} + {place}), {step}, thi - tlo, vhi - vlo"
            long = load.index.hi is not None and load.index.hi * load.dtype.itemsize >= STREAM_FROM
            ahead = 0 if not long else TILE * (step or 0) if vector.size > TILE else TILE
            lines.append(f"mg_tile_{bits}(({bits} *){square}, {ahead});")
        return lines

    def store(self, member: Member, target: str = "") -> str:
        """The statement that writes a member's value at the point of the innermost scope. `target`: where to, instead of its buffer."""
        body, dtype = member.body, member.buffer.dtype
        exact = self.exact(member)
        if isinstance(body, Op) and body.name == "convert_element_type" and body.dtype is dtype and dtype in HALVES:
            value = convert(self.emitter.emit(body.args[0]), body.args[0].dtype, torch.float32)  # rounded once, on its way to memory
        else:
            value = convert(self.emitter.emit(body), body.dtype, dtype)
        if target.startswith("h") and dtype in HALVES:  # converted with its piece (cpp_fill)
            return f"{target} = {value};"
        if not target:
            target = f"{self.pointers[member.name]}[{self.emitter.index(member.store, '', len(self.emitter.scopes) - 1)}]"
        return f"{target} = {f'mg_cut_bf16({value})' if exact else to_memory(value, dtype)};"

    def exact(self, member: Member) -> bool:
        """Is a result in bfloat16 what bfloat16 holds, before it is converted?"""
        body = member.body
        if member.buffer.dtype is not torch.bfloat16 or body.dtype is not torch.bfloat16:
            return False
        return self.emitter.exact(body.args[0] if isinstance(body, Op) and body.name == "convert_element_type" else body)

    @staticmethod
    def is_large(member: Member) -> bool:
        return isinstance(size := member.buffer.nbytes, int) and size >= STREAM_FROM

    def streams(self, member: Member) -> bool:
        """Is a result so large that it should be written past the caches? (See cpp_fill.)"""
        nest = self.nest
        if self.staged or not nest.parallel or nest.mode not in ("point", "inner") or not self.is_large(member):
            return False
        vector, runs = nest.inner[-1], nest.runs(member.store)
        run = min(vector.size, nest.chunk or vector.size) if len(nest.inner) == 1 else vector.size
        least = STREAM_RUN
        if nest.tiled:
            run, least = min(TILE, vector.size), SQUARE_RUN
        if runs is not None and whole_lines(
            member, run * runs[1], [d for d in (*self.kernel.rows, *self.kernel.cols) if d not in (vector, nest.short)]
        ):
            least = WHOLE_LINES
        if runs is None or run * runs[1] * member.buffer.dtype.itemsize < least:
            return False
        self.streaming.add(member.name)
        return True

    def is_long(self, load: Load) -> bool:
        """Does the vector loop read far more memory than the caches hold, one element after the other?"""
        runs = self.nest.runs(load.index)
        if load.buffer in self.members or runs is None or runs[0] != 1 or load.index.hi is None:
            return False
        return load.index.hi * load.dtype.itemsize >= STREAM_FROM

    def _jumps(self, load: Load) -> bool:
        """Is a load of memory contiguous along the other loop of the squares and not along the vector loop? (A square is the same in all turns of what is written out.)"""
        short = self.nest.short
        if load.buffer in self.members or any(isinstance(s, Indirect) or (short is not None and s is short.sym) for s in load.index.free):
            return False
        return self.jumps(load.index)

    def jumps(self, index: Expr) -> bool:
        """Does memory jump along the vector loop of squares, and lie side by side along the other one?"""
        other, vector = self.nest.inner[-2:]
        return stride_along(index, other.sym) == 1 and (stride_along(index, vector.sym) or 0) >= 2

    @property
    def square(self) -> str:
        """Where an element of a square stands in its array."""
        last = len(self.nest.inner) - 1
        return f"(j{last - 1} - tlo) * {TILE} + j{last} - vlo"

    # ---- pointwise ---------------------------------------------------------------------------------------------------------

    def _point_row(self) -> list[str]:
        members = [m for m in self.kernel.members if m.name in self.kernel.stored]
        if not self.nest.inner:
            stores = [self.store(m) for m in members]
            return stores
        results: dict[str, tuple[str, torch.dtype]] = {}
        before = self._row_values(0, self.nest.inner[-1], results, ("0", str(self.nest.inner[-1].size)))
        fill = Fill(self, stores=members, results=results)
        bounds = {self.nest.inner.index(self.nest.cut): ("lo", "hi")} if self.nest.chunk and self.nest.cut is not None else {}
        self._turn()
        loops, row = self.loops(self.nest.inner, fill, bounds), self.emitter.scopes[-1].lines
        lines = [*before, *row, *loops]
        row.clear()
        return lines

    def _turn(self) -> None:
        """Loads that jump are answered by squares of their memory, turned."""
        if self.nest.tiled:
            jumping = dict.fromkeys(load for m in self.kernel.members for load in plain_loads(m.body) if self._jumps(load))
            self.turned = {load: self.emitter.fresh("w") for load in jumping}
            self.emitter.local.update({load: from_memory(f"{array}[{self.square}]", load.dtype) for load, array in self.turned.items()})

    # ---- reductions along the row ------------------------------------------------------------------------------------------

    def inner_row(self) -> list[str]:
        """Passes over the cols with row values in between. Statements of the row scope must stand before the loops that use them, so
        the row's lines are cut out after each pass."""
        emitter, row = self.emitter, self.emitter.scopes[-1]
        depth = len(emitter.scopes) - 1
        body: list[str] = []

        def flush() -> None:
            body.extend(row.lines)
            row.lines.clear()

        for number, current in enumerate(self._passes()):
            rows = [m for m in self.kernel.members if not m.full and m.name in self.kernel.stored and self.stages[m.name] == number]
            texts = [self.store(m) for m in rows]  # row values that this stage allows; loads stand before the first store
            row.lines.extend(texts)
            if not current:
                continue
            folds = [fold_of(m, emitter.fresh("a"), self.kernel.cols) for m in current.folds]
            loop = self.inner_pass(current, folds, {})
            flush()
            body.extend(fold.declare() for fold in folds)
            body.extend(loop)
            for fold in folds:
                name = emitter.fresh("r")
                row.lines.append(f"{compute_type(fold.result_dtype)} {name} = {fold.result()};")
                self.answers[fold.member.name] = (name, depth)
                if fold.member.name in self.kernel.stored:
                    index = emitter.index(fold.member.store, "", depth)
                    row.lines.append(f"{self.pointers[fold.member.name]}[{index}] = {to_memory(name, fold.member.buffer.dtype)};")
        flush()
        return body

    def inner_pass(self, current: _Pass, folds: list[Fold], bounds: dict[int, tuple[str, str]]) -> list[str]:
        """One walk over the cols: declarations of kept arrays, then the loops."""
        arrays = []
        for member in current.keeps:
            name = self.emitter.fresh("c")
            self.arrays[member.name] = name
            arrays.append(f"{compute_type(member.body.dtype)} {name}[{self._row_length()}];")
        fill = Fill(self, current.stores, folds, current.keeps, downs=[self.downs[m.name] for m in current.downs])
        saved = {m.name: self.answers.get(m.name) for m in current.keeps}
        loop = self.loops(self.kernel.cols, fill, bounds)
        assert all(v is None for v in saved.values())
        return [*arrays, *loop]

    # ---- reductions across rows --------------------------------------------------------------------------------------------

    def _outer_row(self) -> list[str]:
        """Accumulators for a block of rows side by side; the vector loop runs over the rows of the block."""
        emitter, row = self.emitter, self.emitter.scopes[-1]
        body: list[str] = list(row.lines)
        row.lines.clear()
        vector = self.nest.inner[-1]
        block = self.nest.cut_in[0]
        results: dict[str, tuple[str, torch.dtype]] = {}
        self._turn()
        for number, current in enumerate(self._passes()):
            rows = [m for m in self.kernel.members if not m.full and m.name in self.kernel.stored and self.stages[m.name] == number]
            body.extend(self._row_values(number, vector, results))
            for dims, stores, members, keeps in (
                ((vector,), rows, [], []),
                (self.nest.inner, current.stores, current.folds, current.keeps),
            ):
                if not (stores or members or keeps):
                    continue
                folds = [fold_of(m, emitter.fresh("a"), self.kernel.cols) for m in members]
                for member in keeps:
                    name = self.arrays[member.name] = emitter.fresh("c")
                    body.append(f"{compute_type(member.body.dtype)} {name}[{self._row_length()}];")
                blocked = [f for f in folds if f.accumulator != f.type]
                for fold in folds:
                    body.extend(fold.declare_across(block, self._block))
                position = len(dims) - 1
                fill = Fill(self, stores, folds, keeps, across=True, results=dict(results), blocks=block)
                step = max(1, ROWS_BLOCK // max(1, prod(d.size for d in dims[1:-1])))
                cut = bool(blocked) and (dims[0].size > step or bool(self.nest.any))
                loop = self.loops(dims, fill, {position: ("lo", "hi"), **({0: ("b", "e")} if cut else {})})
                body.extend(row.lines)
                body.extend(self._row_blocks(loop, blocked, block, dims[0].size, step if cut else dims[0].size) if blocked else loop)
                row.lines.clear()
                body.extend(line for fold in folds if self.nest.lanes for line in fold.join_beside(block, self.nest.lanes))
                for fold in folds:
                    results[fold.member.name] = (fold.result(f"{fold.name}[{{lane}}]"), fold.result_dtype)
                    if fold.member.name in self.kernel.stored:
                        text = fold.result(f"{fold.name}[j0 - lo]")
                        index = self._row_index(fold.member.store, vector)
                        target = f"{self.pointers[fold.member.name]}[{index}]"
                        body.append(f"for (i64 j0 = lo; j0 < hi; j0++) {target} = {to_memory(text, fold.member.buffer.dtype)};")
        return body

    def _row_values(
        self, number: int, vector: Dim, results: dict[str, tuple[str, torch.dtype]], bounds: tuple[str, str] = ("lo", "hi")
    ) -> list[str]:
        """Loops that compute costly row values once, which the walks of a stage read for every element."""
        emitter, lines, (first, last) = self.emitter, [], bounds
        lane, size = ("j0", vector.size) if first == "0" else ("j0 - lo", self._block)
        for member in self.kernel.members:
            if member.full or member.is_reduction or self.stages[member.name] != number:
                continue
            if not (self.nest.beside or self._is_heavy(member.name)):
                continue
            outside, scope = dict(self.answers), emitter.push({vector.sym: "j0"})
            self.answers.update({name: (text.format(lane=lane), len(emitter.scopes) - 1) for name, (text, _) in results.items()})
            emitter._depth_memo.clear()
            array, value = emitter.fresh("v"), emitter.emit(member.body)
            emitter.pop()
            self.answers = outside
            lines += [*emitter.scopes[-1].lines, f"{compute_type(member.body.dtype)} {array}[{size}];"]
            emitter.scopes[-1].lines.clear()
            lines += simd_loop(
                "j0", first, last, [*scope.lines, f"{array}[{lane}] = {value};"], " reduction(|:status)" if scope.checks else ""
            )
            results[member.name] = (f"{array}[{{lane}}]", member.body.dtype)
        return lines

    def _row_blocks(self, loop: list[str], folds: list[Fold], block: str, size: int, step: int) -> list[str]:
        """The loop over cols in pieces of `step`, whose sums are in single precision and are added to the row's in double."""
        lines = [f"{f.type} {f.lane}[{self._block}];" for f in folds]
        lines.append(f"for (i64 l = 0; l < {block}; l++) {{ {' '.join(f'{f.lane}[l] = {f.initial};' for f in folds)} }}")
        join = f"for (i64 l = 0; l < {block}; l++) {{ {' '.join(f.join_from(f'{f.name}[l]', f'{f.lane}[l]') for f in folds)} }}"
        if step >= size and not self.nest.any:
            return ["{", *indent([*lines, *loop, join]), "}"]
        head = f"const i64 e = mg_min(b + {step}, {size});"
        return [f"for (i64 b = 0; b < {size}; b += {step}) {{", *indent([head, *lines, *loop, join]), "}"]

    def _row_index(self, index: Expr, vector: Dim) -> str:
        names = {**self.emitter.variables, vector.sym: "j0"}
        assert not any(isinstance(s, Indirect) for s in index.free)
        return to_c(index, lambda s: names[s])
