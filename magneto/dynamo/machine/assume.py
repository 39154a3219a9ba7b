"""Branches of which one side always raises: `assert`, `if bad: raise ...`.

Where the condition depends on data, capture goes on as if it did not raise, and the region checks the condition behind the graph, before anything else happens. When it
does not hold, the interpreter runs the frame again from the region's start, and raises the program's own exception; from then on there is a break.
Branches on how many elements an operation found (`if boxes.numel() == 0`) are assumed to go as for a few dozen; when they do not, the other way; then there is a break.
Operations behind such a branch may fail where it goes the other way, so that the graph itself checks it (`Check`).
A graph that writes what cannot be put back behind it (a step that updates parameters) checks on the way: it raises before it has written (`in_graph`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from magneto.base.dataclass import dataclass
from magneto.base.errors import GraphBreak
from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import Decoded, Instruction
from magneto.dynamo.machine.signals import Restart
from magneto.dynamo.trackers.base import Tracker
from magneto.graph.atomic import Before

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine
    from magneto.dynamo.machine.recorder import Recorder

MAX_LENGTH = 200  # instructions between a branch and its raise
MAX_TIMES = 256  # that one branch is assumed in a region: a loop may wait for what it raises
ENDS = ("StopIteration", "StopAsyncIteration")  # no errors: a loop ends
IN_GRAPH = -(1 << 26)  # among the forced breaks: the graph itself checks what is assumed


@dataclass(frozen=True, slots=True)
class Place:
    """A branch of the program, and which way it was assumed to go."""

    code: CodeType
    offset: int
    expected: bool

    @property
    def key(self) -> str:
        """The same in each process."""
        return f"{self.code.co_filename}:{self.code.co_firstlineno} {self.code.co_qualname} {self.offset} {self.expected}"


class Refuted(Exception):
    """What a region has assumed at a branch does not hold."""

    def __init__(self, place: Place) -> None:
        super().__init__(f"{place.code.co_qualname} at {place.offset}")
        self.place = place


@dataclass(slots=True)
class Assumption:
    """`condition` is `expected` at each call; `count`: the instruction that asks, and breaks where the assumption cannot be made."""

    condition: Tracker
    expected: bool
    place: Place
    count: int
    reason: GraphBreak


_LIBRARY = torch.library.Library("magneto", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("check_assumed(Tensor condition, bool expected, str place) -> ()")  # type: ignore[no-untyped-call]
_PLACES: dict[str, Place] = {}


def _check_assumed(condition: torch.Tensor, expected: bool, place: str) -> None:
    if bool(condition) is not expected:
        raise Refuted(_PLACES[place])


_LIBRARY.impl("check_assumed", _check_assumed, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_LIBRARY.impl("check_assumed", lambda condition, expected, place: None, "Meta")  # type: ignore[no-untyped-call]


def add(m: SymbolicMachine, found: Assumption) -> None:
    """Where the graph has to check it, and cannot, there is a break."""
    m.assumptions.append(found)
    if IN_GRAPH in m.forced:
        condition = trackers.graph_condition(m, found.condition)
        if condition is None or condition.node is None:
            raise Restart(found.count, found.reason, False)
        _PLACES[found.place.key] = found.place
        check_node(m.recorder, torch.ops.magneto.check_assumed.default, condition.node, found.expected, found.place.key)


def check_node(recorder: Recorder, target: Callable[..., None], *args: Any) -> None:
    node = recorder.graph.call_function(target, args)
    node.meta.update(val=None, stack=recorder.machine.user_stack())
    recorder.keep.add(node)


class Written:
    """The tensors that a graph writes, as they were before."""

    __slots__ = ("tensors",)

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = [Before(tensor) for tensor in tensors]

    def put_back(self) -> None:
        for before in self.tensors:
            before.put_back()


class Drawn:
    """The states of torch's own generators: the CPU's, and those of the devices that the program has used (not while it captures a stream: they may not be read then)."""

    __slots__ = ("cpu", "devices")

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        used = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        self.devices = [(generator, generator.get_state()) for generator in (torch.cuda.default_generators if used else ())]

    def put_back(self) -> None:
        torch.set_rng_state(self.cpu)
        for generator, state in self.devices:
            generator.set_state(state)


def assume(condition: object, expected: bool, place: Place, random: Drawn | None = None, written: Written | None = None) -> None:
    """Region code calls this. `random`: the generators before the graph; `written`: the graph's inputs that it writes."""
    if bool(condition) is not expected:
        if random is not None:
            random.put_back()
        if written is not None:
            written.put_back()
        raise Refuted(place)


class Check:
    """Target of the graph's node that checks a branch on a size."""

    __name__ = __qualname__ = "check_branch"
    __module__ = __name__

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, condition: object) -> None:
        assume(condition, self.place.expected, self.place)


def branch_of(decoded: Decoded, instruction: Instruction) -> Instruction | None:
    """The jump that an instruction decides: itself, or the next one (3.13 computes the truth first)."""
    if instruction.op in ("TO_BOOL", "COMPARE_OP"):
        instruction = decoded.instructions[decoded.index[instruction.next]]
    return instruction if instruction.op.startswith("POP_JUMP") and instruction.op.endswith(("TRUE", "FALSE")) else None


def survives(decoded: Decoded, jump: Instruction) -> bool | None:
    """The truth value with which the program goes on, if the other side of the jump always raises."""
    taken, passed = _raises(decoded, jump.target), _raises(decoded, jump.next)
    return None if taken == passed else jump.op.endswith("TRUE") == passed


def _raises(decoded: Decoded, offset: int) -> bool:
    """Whether every way from here leads to a `raise`, without a loop."""
    waiting, left = [offset], MAX_LENGTH
    while waiting:
        position = decoded.index[waiting.pop()]
        while True:
            found = decoded.instructions[position]
            left -= 1
            if left < 0 or found.op.startswith(("RETURN", "YIELD", "FOR_ITER", "SEND", "JUMP_BACKWARD", "RERAISE", "POP_JUMP_BACKWARD")):
                return False
            if found.op in ("LOAD_GLOBAL", "LOAD_NAME") and found.argval in ENDS:
                return False
            if found.op == "RAISE_VARARGS" or _fails(decoded, position):
                break
            if found.target >= 0:
                if found.target <= found.offset:
                    return False
                waiting.append(found.target)
                if found.op == "JUMP_FORWARD":
                    break
            position += 1
    return True


def _fails(decoded: Decoded, position: int) -> bool:
    """`torch._assert(False, ...)`."""
    found = decoded.instructions[position]
    if not (found.op == "LOAD_CONST" and found.argval is False):
        return False
    before = [i for i in decoded.instructions[max(0, position - 2) : position] if i.op != "PUSH_NULL"]
    return bool(before) and before[-1].op in ("LOAD_ATTR", "LOAD_METHOD") and before[-1].argval == "_assert"
