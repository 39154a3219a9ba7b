"""SharedRows -> Triton text: `kernel` reduces its part of a row, publishes the part's numbers and counts itself; when all parts of the row are counted, `whole` joins their numbers, and the part's elements,
which have not left the registers, become results.

Nobody waits for ever: programs start in any order, and on a device that others hold not all of a row's programs need be there. One that has waited long computes the numbers of all parts itself
(`again`), from memory that nothing overwrites meanwhile; they are the same numbers, so that it does not matter who writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.triton import TritonKernel, Writer
from magneto.inductor.codegen.triton_emit import Name
from magneto.inductor.codegen.triton_nest import VECTOR, Axis, Blocks, power_above, widest
from magneto.inductor.codegen.triton_types import compute_type
from magneto.inductor.loops.ir import Buffer, Load, Value
from magneto.inductor.schedule.kernel import FusedKernel, Member, SharedRows

HELD = 8 * VECTOR  # bytes of a part that a thread holds
REGISTERS = 64  # of a thread: while some programs wait, enough others of a multiprocessor read and write


def triton_shared(step: SharedRows, buffers: Mapping[str, Buffer]) -> TritonKernel:
    """The kernel's text. CannotEmit for what Triton has no type or operation for."""
    main = _Main(step, step.body, buffers)
    made = main.run()
    again, whole = _Again(step, step.parts, buffers, main.wide), _Whole(step, replace(step.whole, stored=()), buffers, main.wide)
    pointers = ", ".join(main.pointers.values())
    texts = [
        "\n".join([f"def {name}({pointers}, x{constants}):", *indent(writer.statements())])
        for name, writer, constants in (("again", again, ", XBLOCK: tl.constexpr, RBLOCK: tl.constexpr"), ("whole", whole, ""))
    ]
    return replace(made, registers=REGISTERS, body="\n\n\n@triton.jit\n".join([*texts, made.body]))


class _Shared(Writer):
    """Over `kernel`: a block is one of its rows."""

    def __init__(self, step: SharedRows, kernel: FusedKernel, buffers: Mapping[str, Buffer], wide: bool = False) -> None:
        self.step, self.given = step, dict[str, Name]()
        block = power_above(prod(d.size for d in kernel.cols))
        warps = max(1, min(16, block * widest(kernel) // (32 * HELD)))
        blocks = Blocks(kernel, (Axis("x", kernel.rows, 1), Axis("r", kernel.cols, block)), False, warps)
        super().__init__(blocks, parameters(step), buffers, wide)
        self.emitter.halves = widest(step.body) == 2
        self.dtypes.update({m.name: m.buffer.dtype for m in step.members}, **{step.counters: torch.int32})

    def statements(self) -> list[str]:
        for axis in self.blocks.axes:
            self._name_symbols(axis)
        self._compute()
        return [line for axis in self.blocks.axes for line in self._axis_lines(axis)] + self.emitter.scopes[0].lines

    def _compute(self) -> None:
        raise NotImplementedError

    def _resolve(self, load: Load) -> Name | Value | None:
        return self.given.get(load.buffer) or super()._resolve(load)

    def _reduce(self, members: Sequence[Member]) -> None:
        self._load_ahead(members)
        for member in members:
            if member.is_reduction:
                self._folded(member, self._fold(member).whole(self._value(member), None))


class _Again(_Shared):
    """The numbers of one part, whose place is given."""

    def _compute(self) -> None:
        self._reduce(self.step.parts.members)
        self._flush(False)

    def _axis_lines(self, axis: Axis) -> list[str]:
        lines = super()._axis_lines(axis)
        return ["x = x + tl.arange(0, XBLOCK)[:, None]", *lines[1:]] if axis.name == "x" else lines


class _Whole(_Again):
    """A row's numbers from those of its parts, which others have written."""

    def _compute(self) -> None:
        self.emitter.modifier = ', cache_modifier=".cg"'
        self._reduce(self.step.whole.members)
        rows, members = frozenset("x"), {m.name: m for m in self.step.whole.members}
        found = [members[name] for name in self.step.numbers]
        texts = [self.emitter.spread(self._value_of(m), rows, compute_type(m.buffer.dtype)) for m in found]
        self.emitter.line(f"return {', '.join(texts)}", rows)

    def _value_of(self, member: Member) -> Name:
        return self.answers.get(member.name) or self._value(member)

    def _axis_lines(self, axis: Axis) -> list[str]:
        return [f"{axis.name.upper()}BLOCK: tl.constexpr = {axis.block}", *super()._axis_lines(axis)]


class _Main(_Shared):
    """One program for each part."""

    def _compute(self) -> None:
        step, scope = self.step, self.emitter.scopes[0]
        self._load_ahead(step.parts.members)
        loads, known = list(scope.lines), dict(scope.memo)
        self._reduce(step.parts.members)
        self._flush(False)
        count, pointers = step.parts.rows[-1].size, ", ".join(self.pointers.values())
        scope.lines += [
            f"row = tl.program_id(0) // {count}",
            f"if lib.arrived({self.pointers[step.counters]} + row, {count}) < {count}:",
            f"    for part in range({count}):",
            f"        again({pointers}, row * {count} + part, XBLOCK, RBLOCK)",
            "    tl.debug_barrier()",
            *(f"    {line}" for line in loads),  # so that nobody holds both
            f"{', '.join(f'w{n}' for n in range(len(step.numbers)))} = whole({pointers}, row)",
        ]
        scope.memo = known  # what is computed of the elements is computed again: it would be held
        self.answers = {}
        self.given = {name: Name(f"w{n}", frozenset("x")) for n, name in enumerate(step.numbers)}
        for member in step.whole.members:
            if member.name in step.stored:
                self._store(member, self.given[member.name])
        for member in step.result.members:
            if member.name in step.stored:
                self._store(member, self._value(member))
        self._flush(True)
        self._flush(False)
