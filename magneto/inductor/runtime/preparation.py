"""What the plans of a family compute of weights alone (schedule/prepared.py), as one plan for all of them: folded and repacked weights are made once and lie in memory once, whatever sizes come.

prefix, KEEP, section, KEPT, rest      ->      the plan of `Preparation`: what the section needs of the prefix, KEEP, section, KEPT; its results are its outputs
                                               a plan for each size: prefix, rest; those results are inputs behind the others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.inductor.runtime.plan_code import PlanCode, carve

Instruction = tuple[Any, ...]
READS: dict[str, tuple[int, ...]] = {
    "VIEW": (2,), "KERNEL": (2,), "TABLE": (2,), "CALL": (3,), "LIST": (2,), "UNPACK": (1,), "LAYOUT": (1,), "FREE": (1,), "KEEP": (2, 4),
}  # fmt: skip
WRITES: dict[str, int] = {"CONST": 1, "ALLOC": 1, "VIEW": 1, "CALL": 1, "LIST": 1, "UNPACK": 2}
"""Which parts of an instruction are registers, or tuples of these. Kernels write registers that an ALLOC or VIEW has defined."""


def _registers(part: Any) -> tuple[int, ...]:
    return part if isinstance(part, tuple) else (part,)


def _read(instruction: Instruction) -> set[int]:
    return {r for k in READS.get(instruction[0], ()) for r in _registers(instruction[k])}


def _written(instruction: Instruction) -> set[int]:
    place = WRITES.get(instruction[0])
    return set() if place is None else {r for r in _registers(instruction[place]) if r >= 0}


def _lend(section: list[Instruction], alloc: Instruction) -> None:
    """What would lie in the arena for a moment has memory of its own from where it is first used to where it is last used: nobody holds an arena for it."""
    register = alloc[1]
    used = [k for k, one in enumerate(section) if register in _read(one) and one[0] != "KEEP"]
    section.insert(used[-1] + 1, ("FREE", (register,)))
    section.insert(used[0], alloc)
    op, count, *rest = section[0]
    section[0] = (op, count + 2, *rest)


def _lasting(prefix: Sequence[Instruction], section: Sequence[Instruction]) -> set[int]:
    """Registers that are still what they were in the next call."""
    return {one[1] for one in prefix if one[0] in ("ALLOC", "VIEW") and one[5]} | set(section[0][4])


@dataclass(frozen=True, slots=True)
class Preparation:
    """`first`, `last`: where in the instructions the KEEP and the KEPT are. `results`: registers that the rest reads; their numbers in a plan for single sizes follow those of the inputs."""

    first: int
    last: int
    results: tuple[int, ...]
    n_inputs: int
    plan: _C.Plan

    @staticmethod
    def of(instructions: Sequence[Instruction | None], code: PlanCode) -> Preparation | None:
        """None where nothing is prepared, or not the same for all sizes. `instructions`: None for those that go by sizes."""
        first = next((k for k, one in enumerate(code.instructions) if one[0] == "KEEP"), None)
        if first is None:
            return None
        last = first + code.instructions[first][1]
        section = instructions[first : last + 1]
        if None in section:
            return None
        inside: list[Instruction] = [one for one in section if one is not None]
        needed = {r for one in inside for r in _read(one)}
        prefix: list[Instruction] = []
        for instruction, form in zip(reversed(instructions[:first]), reversed(code.instructions[:first]), strict=True):
            if needed.isdisjoint(_written(form)):
                continue
            if instruction is None:
                return None
            if instruction[0] == "VIEW" and instruction[3] is carve:
                if any(instruction[1] in _read(one) for one in prefix):
                    return None
                _, _, dtype, shape, strides = instruction[4]
                _lend(inside, ("ALLOC", instruction[1], torch.empty_strided, (shape, strides), {"dtype": dtype}, False))
                continue
            needed |= _read(instruction)
            prefix.insert(0, instruction)
        made = {r for one in (*prefix, *inside) if one[0] != "CONST" for r in _written(one)}
        results = tuple(sorted(made & ({r for one in code.instructions[last + 1 :] for r in _read(one)} | set(code.outputs))))
        if not results or not made.isdisjoint(code.outputs) or not _lasting(prefix, inside).issuperset(results):
            return None
        plan = _C.Plan((*prefix, *inside), code.n_registers, code.n_inputs, results)
        return Preparation(first, last, results, code.n_inputs, plan)

    def apart(self, instructions: Sequence[Instruction], code: PlanCode) -> tuple[tuple[Instruction, ...], int, int, tuple[int, ...]]:
        """Arguments of the plan for single sizes: instructions, numbers of registers and of inputs, outputs."""
        more = len(self.results)
        places = {r: self.n_inputs + k for k, r in enumerate(self.results)}

        def moved(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple([moved(r) for r in part])
            return places[part] if part in places else part + more if part >= self.n_inputs else part

        rest = []
        for instruction in (*instructions[: self.first], *instructions[self.last + 1 :]):
            if not _written(instruction).isdisjoint(places):
                continue
            parts = list(instruction)
            for k in {*READS.get(parts[0], ()), *([WRITES[parts[0]]] if parts[0] in WRITES else ())}:
                parts[k] = moved(parts[k])
            rest.append(tuple(parts))
        return tuple(rest), code.n_registers + more, self.n_inputs + more, moved(code.outputs)

    def ahead_of(self, plan: _C.Plan) -> Callable[..., Any]:
        """A plan for single sizes with what is prepared."""
        prepared = self.plan

        def run(*inputs: Any) -> Any:
            return plan(*inputs, *prepared(*inputs))

        return run


def every_time(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Instructions that keep nothing."""
    return tuple([one for one in instructions if one[0] not in ("KEEP", "KEPT")])
