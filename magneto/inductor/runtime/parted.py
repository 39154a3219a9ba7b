"""A plan in two: `parted(code)` gives the plan up to where only results are made, which may be recorded, and the plan of those results, which runs behind each replay into memory of the call's own.

The second takes the whole plan's inputs, and the tensors of the first that it reads. Views and constants are made in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from magneto.base.dataclass import dataclass, replace
from magneto.inductor.runtime.plan_code import PlanCode, restrided

Instruction = tuple[Any, ...]

REGISTERS = {
    "CONST": (1,), "ALLOC": (1,), "VIEW": (1, 2), "LAUNCH": (2,), "CALL": (1, 3), "LIST": (1, 2), "UNPACK": (1, 2), "LAYOUT": (1,), "FREE": (1,),
}  # fmt: skip
"""Where an instruction of a plan on a CUDA device names registers: one (-1: none), or a tuple."""
DEFINED = {"CONST": 1, "ALLOC": 1, "VIEW": 1, "CALL": 1, "LIST": 1, "UNPACK": 2}
"""Which of these it defines."""


@dataclass(frozen=True, slots=True)
class Parted:
    """`head` returns its outputs of the whole's, in order, then the tensors that `tail` takes behind the inputs. `places`: per output of the whole its place among those of the tail, -1: the head's."""

    head: PlanCode
    tail: PlanCode
    places: tuple[int, ...]


def parted(code: PlanCode) -> Parted:
    before, after = list(code.instructions[: code.tail]), list(code.instructions[code.tail :])
    origin = {r: i for i in code.instructions for r in _defined(i)}
    made: set[int] = set()  # registers of the tail
    rest: list[Instruction] = []
    for i in after:
        if i[0] == "VIEW" and i[2] not in made:
            before += [i] * (i[1] in code.outputs)  # how an output of the head leaves
        elif i[0] == "CALL" and i[2] is restrided and i[3][0] not in made:
            before.append(i)
        else:
            rest.append(i)
            made.update(_defined(i))
    taken: list[int] = []
    again: dict[int, Instruction] = {}

    def needed(register: int) -> None:
        """The tail gets what it does not make."""
        if register < code.n_inputs or register in made or register in taken or register in again:
            return
        i = origin[register]
        if i[0] not in ("CONST", "VIEW"):
            taken.append(register)
        else:
            if i[0] == "VIEW":
                needed(i[2])
            again[register] = i

    for i in rest:
        for register in _read(i):
            needed(register)
    ends = [r for r in code.outputs if r in made]
    before = [
        ("FREE", tuple(r for r in i[1] if r not in taken)) if i[0] == "FREE" else i for i in before
    ]  # memory of a view that is made again
    head = replace(code, instructions=tuple(before), outputs=(*(r for r in code.outputs if r not in made), *taken), tail=0)
    numbers = {r: code.n_inputs + k for k, r in enumerate(taken)}
    freed = [("FREE", tuple(r for r in i[1] if r in made)) if i[0] == "FREE" else i for i in rest]
    instructions = [_renumbered(i, numbers, code.n_inputs) for i in (*again.values(), *freed) if i[0] != "FREE" or i[1]]
    outputs = tuple(numbers[r] for r in ends)
    tail = PlanCode(tuple(instructions), code.n_inputs + len(numbers), code.n_inputs + len(taken), outputs, 0)
    return Parted(head, tail, tuple(ends.index(r) if r in made else -1 for r in code.outputs))


def _registers(value: Any) -> tuple[int, ...]:
    return tuple(r for r in (value if isinstance(value, tuple) else (value,)) if r >= 0)


def _defined(i: Instruction) -> tuple[int, ...]:
    return _registers(i[DEFINED[i[0]]]) if i[0] in DEFINED else ()


def _read(i: Instruction) -> Iterator[int]:
    if i[0] != "FREE":
        for place in REGISTERS[i[0]]:
            if place != DEFINED.get(i[0]):
                yield from _registers(i[place])


def _renumbered(i: Instruction, numbers: dict[int, int], n_inputs: int) -> Instruction:
    """With other registers behind those of the inputs, in the order in which they come."""

    def number(r: int) -> int:
        return r if r < n_inputs else numbers.setdefault(r, n_inputs + len(numbers))

    found = list(i)
    for place in REGISTERS[i[0]]:
        found[place] = tuple(map(number, i[place])) if isinstance(i[place], tuple) else number(i[place])
    return tuple(found)
