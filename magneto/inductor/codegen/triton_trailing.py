"""TrailingKernel -> Triton text: the statements of its three kernels, one behind the other, and between them the waiting for the row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from magneto.inductor.codegen.cpp import parameters
from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.codegen.triton import Writer
from magneto.inductor.codegen.triton_emit import Name
from magneto.inductor.codegen.triton_nest import Axis, Blocks, power_above
from magneto.inductor.codegen.triton_types import POINTERS, compute_type
from magneto.inductor.loops.ir import Buffer, Load, Value
from magneto.inductor.runtime.plan_code import TritonKernel
from magneto.inductor.schedule import trailing
from magneto.inductor.schedule.kernel import member_loads
from magneto.inductor.schedule.trailing import APART, TrailingKernel

WARPS = 8


class _Part(Writer):
    """One of the kernels. `programs`: what stands for the indices of programs; `rows`: the numbers of a row, which those `wanted` become."""

    def __init__(
        self,
        step: TrailingKernel,
        blocks: Blocks,
        buffers: Mapping[str, Buffer],
        programs: tuple[str, ...],
        rows: dict[str, Name],
        wanted: tuple[str, ...] = (),
    ) -> None:
        super().__init__(blocks, parameters(step), buffers)
        scratch = self.pointers[step.scratch.name]
        self.pointers.update({name: f"{scratch} + {place}" for name, place in step.places.items()})
        self.emitter.uncached = frozenset(step.places)
        self.programs, self.rows, self.wanted = programs, rows, wanted

    def program(self, number: int) -> str:
        return self.programs[number]

    def _resolve(self, load: Load) -> Name | Value | None:
        return self.rows.get(load.buffer) or super()._resolve(load)

    def _once(self) -> None:
        super()._once()
        for member in (m for m in self.kernel.members if m.name in self.wanted):
            value = self.answers.get(member.name) or self._value(member)
            text = self.emitter.spread(value, frozenset("x"), compute_type(member.buffer.dtype))
            self.emitter.line(f"row{len(self.rows)} = tl.reshape({text}, [1])", frozenset())
            self.rows[member.name] = Name(f"row{len(self.rows)}")


def triton_trailing(step: TrailingKernel, buffers: Mapping[str, Buffer]) -> TritonKernel:
    """The kernel's text. CannotEmit for what Triton has no type or operation for."""
    first, second, chunks = step.first, replace(step.second, stored=()), step.first.rows[-1].size
    along, row, rows = Axis("x", step.rows[-1:], step.block), f"(turn // {chunks})", dict[str, Name]()
    blocks = (
        Blocks(first, (Axis("x", first.rows, 1), Axis("r", first.cols, step.block)), False, WARPS),
        Blocks(second, (Axis("x", second.rows, 1), Axis("r", second.cols, power_above(chunks))), False, WARPS),
        Blocks(step, (along,), False, WARPS, step.rows[:-1]),
    )
    ahead = _Part(step, blocks[0], buffers, ("turn",), rows)
    number = _Part(step, blocks[1], buffers, (row,), rows, step.second.stored)
    last = _Part(step, blocks[2], buffers, (f"(turn % {chunks})", row), rows)
    again = {load.buffer for m in step.members for load in member_loads(m.body) if step.rows[-1].sym in load.index.free}
    ahead.emitter.policies, last.emitter.policies = dict.fromkeys(again, "evict_last"), dict.fromkeys(again, "evict_first")
    given, found, written = (_named(part.statements(), n) for n, part in enumerate((ahead, number, last)))
    counters, total = ahead.pointers[step.scratch.name], step.count * chunks
    behind = max(chunks, min(total, trailing.BEHIND // (along.block * step.members[-1].buffer.dtype.itemsize)))
    written = [line[:-1] + ', cache_modifier=".cs")' if line.startswith("tl.store(") else line for line in written]
    reading = next(
        n for n, line in enumerate(written) if any(name.text in line for name in rows.values())
    )  # what is read waits for nothing
    seen = f"{counters} + ({APART} + {row} * {APART})"
    lines = [
        f'taken = tl.atomic_add({counters}, 1.0, sem="relaxed").to(tl.int32)',
        "turn = taken",
        f"if turn < {total}:",
        *indent([*given, "tl.debug_barrier()", f'tl.atomic_add({seen}, 1.0, sem="release")']),
        f"turn = taken - {behind}",
        "if turn >= 0:",
        *indent([*written[:reading], f'while tl.atomic_add({seen}, 0.0, sem="acquire") < {chunks}:', "    pass", "tl.debug_barrier()"]),
        *indent([*found, *written[reading:]]),
    ]
    constants = tuple((f"{a.name.upper()}BLOCK{n}", a.block) for n, b in enumerate(blocks) for a in b.axes)
    arguments = [*(ahead.pointers[name] for name in ahead.names), *(f"{name}: tl.constexpr" for name, _ in constants)]
    text = "\n".join([f"def kernel({', '.join(arguments)}):", *indent(lines)]) + "\n"
    dtypes = {**ahead.dtypes, **number.dtypes, **last.dtypes, step.scratch.name: step.scratch.dtype}
    pointers = tuple(POINTERS[dtypes[name]] for name in ahead.names)
    return TritonKernel(text, pointers, constants, (total + behind,), WARPS, "tl.device_assert(" in text)


def _named(lines: list[str], part: int) -> list[str]:
    """Each part has blocks and variables of its own."""
    return [_OWN.sub(rf"\g<0>of{part}", line).replace("XBLOCK", f"XBLOCK{part}").replace("RBLOCK", f"RBLOCK{part}") for line in lines]


_OWN = re.compile(r"\b(?:[xrz](?:mask|_\d+)?|[taci]\d+[a-z]?)\b")


__all__ = ["triton_trailing"]
