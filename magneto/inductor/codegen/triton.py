"""FusedKernel -> the text of one Triton kernel.

The text depends on nothing but the computation, so that equal layers give equal text. Parameters are the pointers of `cpp.parameters`, in that order.
Reductions are exact about NaN (maxima let it through, the first one wins a search) and add in float32 or wider.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import prod

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_emit import indent, plain_loads
from magneto.inductor.codegen.triton_emit import NARROW, Emitter, Name, Scope
from magneto.inductor.codegen.triton_nest import Axis, Blocks, blocks_of, under_way, widest
from magneto.inductor.codegen.triton_ops import TELLING
from magneto.inductor.codegen.triton_pairs import pairs_of
from magneto.inductor.codegen.triton_reduce import Fold
from magneto.inductor.codegen.triton_types import BYTES, POINTERS, as_byte, compute_type
from magneto.inductor.loops.ir import Buffer, IndexValue, Indirect, Load, Masked, Op, Value, walk_values
from magneto.inductor.loops.span import Span, span_of, symbols_of, within_span
from magneto.inductor.runtime.plan_code import TritonKernel
from magneto.inductor.schedule.fuse import member_stages
from magneto.inductor.schedule.kernel import COLUMN, SCATTER, Dim, FusedKernel, Member, member_loads


def triton_kernel(kernel: FusedKernel, buffers: Mapping[str, Buffer]) -> TritonKernel:
    """The kernel's text. CannotEmit for what Triton has no type or operation for."""
    blocks = pairs_of(kernel) or blocks_of(kernel)
    writer = Writer(blocks, parameters(kernel), buffers)
    return writer.run()


def reaches_far(names: Iterable[str], buffers: Mapping[str, Buffer]) -> bool:
    """Whether some buffer has more elements than indices of 32 bits count."""
    return any(int(buffers[name].storage_numel) >= NARROW for name in names if name in buffers)  # type: ignore[arg-type]


def memory_of(kernel: FusedKernel, buffers: Mapping[str, Buffer]) -> Hashable:
    """All that a kernel's text depends on besides its likeness: whether buffers reach far, and under conditions how much of them may be read everywhere."""
    names = parameters(kernel)
    conditions = any(isinstance(value, Masked) for m in kernel.members for value in walk_values(m.body))
    return reaches_far(names, buffers), tuple(buffers[name].storage_numel for name in names if name in buffers) if conditions else ()


def _tells(value: Value) -> bool:
    """Whether a value makes the last bits of what it is computed of visible."""
    return isinstance(value, Op) and (value.name in TELLING or (value.name == "convert_element_type" and not value.dtype.is_floating_point))


class Writer:
    def __init__(self, blocks: Blocks, names: tuple[str, ...], buffers: Mapping[str, Buffer], wide: bool = False) -> None:
        self.blocks, self.kernel, self.names = blocks, blocks.kernel, names
        self.members = {m.name: m for m in self.kernel.members if m.kind != SCATTER}
        self.stages = member_stages(self.kernel.members)
        self.pointers = {name: f"p{i}" for i, name in enumerate(names)}
        self.dtypes = {load.buffer: load.dtype for m in self.kernel.members for body in m.bodies for load in member_loads(body)}
        self.dtypes.update({m.name: m.buffer.dtype for m in self.kernel.members})
        masks = {a.name: f"{a.name}mask" for a in blocks.axes if a.masked}
        self.wide = wide or reaches_far(names, buffers) or max([0, *(a.size + a.block for a in blocks.axes)]) >= NARROW
        halves = widest(blocks.kernel) == 2
        rough = halves and not any(_tells(value) for m in self.kernel.members for value in walk_values(m.body))
        self.emitter = Emitter(self.pointers, [a.name for a in blocks.axes], masks, self.wide, self._resolve, halves, rough)
        self.emitter.blocks = {a.name: a.block for a in blocks.axes}
        values = walk_values(*(m.body for m in self.kernel.members))
        self.emitter.divisors.update(v.args[1] for v in values if isinstance(v, Op) and v.name == "div")
        self.emitter.sizes = {name: int(b.storage_numel) for name, b in buffers.items() if isinstance(b.storage_numel, int)}
        self.answers: dict[str, Name] = {}
        self.stores: list[tuple[str, frozenset[str]]] = []  # behind everything that is read: an output may lie in an input's memory
        self.every = frozenset(a.name for a in blocks.axes)
        self.back = any(
            m.kind.endswith("back") for m in self.kernel.members
        )  # rows are walked from their end: where a thread holds runs by its index, elsewhere block by block

    def _resolve(self, load: Load) -> Name | Value | None:
        member = self.members.get(load.buffer)
        return None if member is None else self.answers.get(load.buffer) or member.body

    def statements(self) -> list[str]:
        """The body of the function."""
        self._name_all()
        self.emitter.carrying, self.emitter.run = self.blocks.looped, self.blocks.run
        self.emitter.reverse = self.back and self.blocks.run == 1
        if self.blocks.axes and (last := self.blocks.axes[-1]).block >= 4 and self.blocks.run == 1 and not self.back:
            self.emitter.along, self.emitter.block = last.walk, last.block
            self.emitter.walked = last.block if self._starts(last) else last.size
        if self.blocks.stages:
            self._walk_rows()
        elif self.blocks.looped:
            self._passes()
        else:
            self._once()
        axes, loops = self.blocks.axes, self._loops()
        lines = [*self._outer_lines(), *(line for axis in axes if axis.name not in loops for line in self._axis_lines(axis))]
        return lines + self.emitter.scopes[0].lines

    def run(self) -> TritonKernel:
        lines = self.statements()
        constants = [(f"{a.name.upper()}BLOCK", a.block) for a in self.blocks.axes]
        arguments = [*self.pointers.values(), *(f"{name}: tl.constexpr" for name, _ in constants)]
        text = "\n".join([f"def kernel({', '.join(arguments)}):", *indent(lines)]) + "\n"
        asserts = "tl.device_assert(" in text
        pointers = tuple(POINTERS[self.dtypes[name]] for name in self.names)
        return TritonKernel(text, pointers, tuple(constants), self.blocks.grid, self.blocks.warps, asserts)

    def _loops(self) -> tuple[str, ...]:
        """The axis that loops walk."""
        return ("x",) if self.blocks.stages else ("r",) if self.blocks.looped else ()

    def _starts(self, axis: Axis) -> bool:
        """Is there more of the axis than a block?"""
        return axis.name != "r" or axis.name in self._loops()

    # ---- axes ------------------------------------------------------------------------------------------------------------

    def _name_all(self) -> None:
        for axis in self.blocks.axes:
            self._name_symbols(axis)
        for n, dim in enumerate(self.blocks.outer):
            self.emitter.symbols[dim.sym] = Name("z" if len(self.blocks.outer) == 1 else f"z_{n}")

    def _name_symbols(self, axis: Axis) -> None:
        for n, dim in enumerate(axis.dims):
            text = axis.name if len(axis.dims) == 1 else f"{axis.name}_{n}"
            self.emitter.symbols[dim.sym] = Name(text, frozenset(axis.name))
        if len(axis.dims) > 1:
            self.emitter.dense[axis.walk] = Name(axis.name, frozenset(axis.name))

    def _axis_lines(self, axis: Axis) -> list[str]:
        """The statements that define an axis: where the block begins, its mask, the indices of its dimensions."""
        name, size = axis.name, f"{axis.name.upper()}BLOCK"
        position = ", ".join(":" if a.name == name else "None" for a in self.blocks.axes)
        position = f"[{position}]" if len(self.blocks.axes) > 1 else ""
        start, group = "", "tl.full([], 0, tl.int32)"
        if name in self._loops():
            start, group = "offset + ", "offset // {0}"
            start = f"{(axis.blocks - 1) * axis.block} - offset + " if self.emitter.reverse and name == "r" else start
        elif self._starts(axis):
            program = [a.name for a in self.blocks.shared_out].index(name) + (self.blocks.tall and bool(self.blocks.outer))
            start = f"tl.program_id({program}){'.to(tl.int64)' if self.wide else ''} * "
            start, group = f"{start}{size} + ", f"{start}({size} // {{0}})"
        places = f"tl.arange(0, {size}){position}" + (".to(tl.int64)" if self.wide and "int64" not in start else "")
        if (run := self.blocks.run) > 1 and name == "r":  # neighbours within a thread, which holds places that lie apart
            places = f"{places} % ({size} // {run}) * {run} + {places} // ({size} // {run})"
        back = self.back and run > 1 and name == "r"
        lines = [f"{name} = {axis.size - 1} - ({start}{places})" if back else f"{name} = {start}{places}"]
        for n in sorted(self.emitter.grouped) if axis is self.blocks.axes[-1] else ():
            lines += [f"{name}from{n} = {group.format(n)}", f"{name}of{n} = tl.arange(0, {size} // {n}){position}"]
        if axis.masked:
            lines.append(f"{name}mask = {name} >= 0" if back else f"{name}mask = {name} < {axis.size}")
        return [*lines, *self._parts(name, axis.dims)]

    def _outer_lines(self) -> list[str]:
        if not self.blocks.outer:
            return []
        program = 0 if self.blocks.tall else len(self.blocks.shared_out)
        return [f"z = tl.program_id({program}){'.to(tl.int64)' if self.wide else ''}", *self._parts("z", self.blocks.outer)]

    def _parts(self, name: str, dims: tuple[Dim, ...]) -> list[str]:
        """The indices of dimensions that are counted as one."""
        lines = []
        step = prod(d.size for d in dims)
        for n, dim in enumerate(dims):
            step //= dim.size
            if len(dims) > 1 and dim.sym in self.emitter.used:
                part = name if step == 1 else f"{name} // {step}" if n == 0 else f"({name} // {step})"
                lines.append(f"{name}_{n} = {part}" if n == 0 else f"{name}_{n} = {part} % {dim.size}")
        return lines

    # ---- members ---------------------------------------------------------------------------------------------------------

    def _once(self) -> None:
        """Every member in order, each value computed once."""
        self.emitter.summing = bool(self.blocks.outer) and any(m.is_reduction for m in self.kernel.members)
        self._load_ahead(self.kernel.members)
        for member in self.kernel.members:
            if member.is_reduction:
                fold = self._fold(member)
                self._folded(member, fold.whole(self._value(member), self._flat(member)))
            elif member.kind == SCATTER:
                self._add_at(member)
            elif member.name in self.kernel.stored:
                self._store(member, self._value(member))
        self._flush(True)
        self._flush(False)

    def _passes(self) -> None:
        """One loop over `r` per stage; what is needed in several is computed in each."""
        axis = self.blocks.axes[-1]
        for stage in range(max(self.stages.values()) + 1):
            here = [m for m in self.kernel.members if self.stages[m.name] == stage]
            loops: dict[Span | None, list[Member]] = {}
            for member in sorted(here, key=lambda m: not m.is_reduction):
                if member.is_reduction:
                    loops.setdefault(self._span(member), []).append(member)
                elif member.full and member.name in self.kernel.stored:
                    loops.setdefault(None, []).append(member)
            for span, members in loops.items():
                folds = [(m, self._fold(m)) for m in members if m.is_reduction]
                for _, fold in folds:
                    fold.start()
                if span is not None:  # what stands behind the loop is under way before it
                    self._load_ahead([m for m in self.kernel.members if not m.full and not m.is_reduction])
                head, last = self._walk(span)
                self.emitter.scopes.append(Scope())
                self.emitter.checks, self.emitter.passing, self.emitter.summing = [], span is not None, bool(folds and self.blocks.outer)
                if span is not None:
                    self.emitter.name("r < end", frozenset("r"), (within_span(axis.walk, *span), None))
                self._load_ahead(members)
                for member, fold in folds:
                    fold.step(self._value(member), self._flat(member))
                for member in members:
                    if not member.is_reduction:
                        self._store(member, self._value(member))
                self._flush(True)
                body = self.emitter.scopes.pop().lines
                body = [*self._axis_lines(axis), *body]
                ahead, body = self._ahead(body) if span is not None else ([], body)
                asserts = self._checked(body)
                self.emitter.scopes[0].lines += [*head[:-1], *ahead, head[-1], *indent([*body, *last])]
                self.emitter.scopes[0].lines += asserts
                for member, fold in folds:
                    self._folded(member, fold.end())
            for member in here:
                if not member.full and not member.is_reduction and member.name in self.kernel.stored:
                    self._store(member, self._value(member))
        self._flush(False)

    def _checked(self, body: list[str]) -> list[str]:
        """Assertions behind the loop, of what held in each turn of `body`: inside, turns would wait for them."""
        emitter, lines = self.emitter, []
        for text, axes in emitter.checks or ():
            good = emitter.fresh("c")
            emitter.scopes[0].lines.append(f"{good} = tl.full({emitter.shape(axes)}, 1, tl.int1)")
            body.append(f"{good} = {good} & ({text})")
            lines.append(f'tl.device_assert({good}, "index out of range in self")')
        emitter.checks, emitter.passing, emitter.summing = None, False, False
        return lines

    def _ahead(self, body: list[str]) -> tuple[list[str], list[str]]:
        """What stands before the loop, and its body, where computed places are read a turn ahead: vectors are looked up at once in each turn."""
        made = {found[1]: line for line in body if (found := re.match(r"(\w+) = ", line))}

        def behind(names: Iterable[str]) -> list[str]:
            """What they are computed of, and they themselves."""
            found = set(names)
            for name, line in reversed(made.items()):
                found.update(re.findall(r"\w+", line) if name in found else ())
            return [name for name in made if name in found]

        def at(offset: str, suffix: str, kept: Iterable[str] = ()) -> list[str]:
            names = {name: name + suffix for name in steps if name not in kept} | {"offset": offset}
            return [re.sub(r"\w+", lambda word: names.get(word[0], word[0]), made[name]) for name in steps]

        read = [name for name in behind(self.emitter.places) if "= tl.load(" in made[name]]
        steps, rest = behind(read), [line for line in body if line.split(" = ")[0] not in read]
        return at("offset", "_first", read), [*at("(offset + RBLOCK)", "_next"), *rest, *(f"{name} = {name}_next" for name in read)]

    def _span(self, member: Member) -> Span | None:
        """Where the row's elements lie, if the block has one such span."""
        found = span_of(member.body)
        return found[1] if found is not None and symbols_of(*found[1]) <= {d.sym for d in self.blocks.outer} else None

    def _walk(self, span: Span | None) -> tuple[list[str], list[str]]:
        """The head of the loop over `r`, and the last lines of its body."""
        size = self.blocks.axes[-1].size
        if span is None:
            if any(m.is_scan for m in self.kernel.members):
                stages = under_way(self.kernel, prod(a.block for a in self.blocks.axes))
                return [f"for offset in tl.range(0, {size}, RBLOCK, num_stages={stages}):"], []
            return [f"for offset in range(0, {size}, RBLOCK):"], []
        first, end = (self.emitter.emit(value).text for value in span)
        kind = ".to(tl.int64)" if self.wide else ".to(tl.int32)"
        lines = [
            f'tl.device_assert({first} <= {end}, "offsets that decrease")',
            f"offset, end = tl.maximum({first}, 0){kind}, tl.minimum({end}, {size}){kind}",
            "while offset < end:",
        ]
        return lines, ["offset += RBLOCK"]

    def _walk_rows(self) -> None:
        """One loop over rows, each of them whole, and sums of columns over all of its turns."""
        axis, emitter = self.blocks.axes[0], self.emitter
        emitter.inner = "x"
        columns = {m.name: emitter.fresh("a") for m in self.kernel.members if m.kind == COLUMN}
        for member in self.kernel.members:
            if member.kind == COLUMN:
                zeros = f"tl.full({emitter.shape(self.every)}, 0, {compute_type(member.acc_dtype)})"
                emitter.line(f"{columns[member.name]} = {zeros}", frozenset("r"))
        emitter.scopes.append(Scope())
        self._load_ahead(self.kernel.members)
        for member in self.kernel.members:
            if member.kind == COLUMN:
                value = emitter.spread(self._value(member), self.every, compute_type(member.acc_dtype))
                emitter.line(f"{columns[member.name]} = {columns[member.name]} + {value}", self.every)
            elif member.is_reduction:
                self._folded(member, self._fold(member).whole(self._value(member), self._flat(member)))
            elif member.name in self.kernel.stored:
                self._store(member, self._value(member))
        self._flush(True)
        self._flush(False)
        body = [*self._axis_lines(axis), *emitter.scopes.pop().lines]
        emitter.scopes[0].lines += [f"for offset in tl.range(0, {axis.size}, XBLOCK, num_stages={self.blocks.stages}):", *indent(body)]
        along = frozenset("r")
        for member in self.kernel.members:
            if member.kind == COLUMN:
                place = emitter.spread(emitter.index(member.store, None), along, "tl.int64" if self.wide else "tl.int32")
                mask = emitter.mask(along)
                masked = "" if mask is None else f", mask={mask}"
                emitter.line(f"tl.store({self.pointers[member.name]} + {place}, tl.sum({columns[member.name]}, 0)[None, :]{masked})", along)

    def _load_ahead(self, members: Sequence[Member]) -> None:
        """What is read at every point anyway is read first, so that all of it is under way before the first reduction waits. What all rows share comes from the
        cache: it would only hold registers meanwhile."""
        for member in members:
            for load in plain_loads(member.body):
                if load.buffer not in self.members and not any(isinstance(s, Indirect) for s in load.index.free) and not self._shared(load):
                    self.emitter.emit(load)

    def _shared(self, load: Load) -> bool:
        """Do all rows read the same?"""
        symbols = self.emitter.symbols
        several = any(a.name != "r" and a.size > 1 for a in self.blocks.axes)
        return several and {a for s in load.index.free if s in symbols for a in symbols[s].axes} == {"r"}

    def _fold(self, member: Member) -> Fold:
        return Fold(member, self.emitter, self.every, self.blocks.axes[-1].size)

    def _value(self, member: Member) -> Name:
        body = member.body
        if member.buffer.dtype in BYTES and isinstance(body, Op) and compute_type(body.args[0].dtype) == "tl.float32":
            body = body.args[0]  # the store rounds
        return self.emitter.emit(body)

    def _flat(self, member: Member) -> Name | None:
        return None if member.flat is None else self.emitter.index(member.flat, None)

    def _folded(self, member: Member, result: Name) -> None:
        self.answers[member.name] = result
        if member.name in self.kernel.stored:
            self._store(member, result)

    def _store(self, member: Member, value: Name) -> None:
        across = member.full and not member.is_reduction
        axes = self.every if across else self.every - {"r"}
        place = self.emitter.index(member.store, None)
        where = self.emitter.spread(place, axes, "tl.int64" if self.wide else "tl.int32")
        mask = self.emitter.mask(axes)
        text = self.emitter.spread(value, axes, compute_type(member.buffer.dtype))
        if member.buffer.dtype in BYTES:
            text = as_byte(text, member.buffer.dtype)
        masked = "" if mask is None else f", mask={mask}"
        self.stores.append((f"tl.store({self.pointers[member.name]} + {where}, {text}{masked})", axes))

    def _add_at(self, member: Member) -> None:
        """An addition to memory that others add to at the same time, or a store at a computed place."""
        assert isinstance(member.body, Op)
        place, value, *condition = member.body.args
        assert isinstance(place, IndexValue)
        emitter = self.emitter
        where = emitter.spread(emitter.index(place.expr, None), self.every, "tl.int64" if self.wide else "tl.int32")
        text = emitter.spread(emitter.emit(value), self.every, compute_type(member.buffer.dtype))
        masks = [emitter.mask(self.every), *(emitter.spread(emitter.emit(c), self.every, "tl.int1") for c in condition)]
        mask = " & ".join(m for m in masks if m is not None)
        masked = f", mask={mask}" if mask else ""
        if member.buffer.dtype in BYTES:
            text = as_byte(text, member.buffer.dtype)
        call, order = ("atomic_add", ', sem="relaxed"') if member.body.name == "scatter" else ("store", "")
        self.stores.append((f"tl.{call}({self.pointers[member.name]} + {where}, {text}{masked}{order})", self.every))

    def _flush(self, along: bool) -> None:
        """The stores along `r`, or those of the rows."""
        for text, axes in self.stores:
            if ("r" in axes) == along:
                self.emitter.line(text, axes)
        self.stores = [(text, axes) for text, axes in self.stores if ("r" in axes) != along]
