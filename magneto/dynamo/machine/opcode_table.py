"""The opcode table: one row per opcode of every supported Python version: handled, breaking(reason) or unsupported(reason).

Handlers register with `@opcode(name, effect)`; `effect` is "inputs -- outputs" in words, as in CPython's own bytecode definitions; names that end in `*` stand for
a number of values given by the argument. Opcodes move values; what they mean is the dispatch row of a Python callable (`operator.add`, `getattr`, `iter` ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from magneto.dynamo.bytecode.decode import Instruction
from magneto.dynamo.machine.frame import SymFrame
from magneto.dynamo.trackers.base import Tracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine

Handler = Callable[["SymbolicMachine", SymFrame, Instruction], "Tracker | None"]

HANDLERS: dict[str, Handler] = {}
EFFECTS: dict[str, str] = {}

BREAKING: dict[str, str] = {"PRINT_EXPR": "interactive output", "IMPORT_STAR": "import * binds unknown names"}
UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        ("GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH", "END_ASYNC_FOR", "ASYNC_GEN_WRAP", "GET_AWAITABLE"),
        "coroutines and asynchronous generators run in the interpreter",
    ),
    **dict.fromkeys(
        ("INTERPRETER_EXIT", "ENTER_EXECUTOR", "EXIT_INIT_CHECK", "RESERVED", "CACHE", "EXTENDED_ARG", "<0>"),
        "the interpreter's own, never in the code of a function that is captured",
    ),
}


def opcode(name: str, effect: str) -> Callable[[Handler], Handler]:
    """Register the handler of one opcode."""

    def register(handler: Handler) -> Handler:
        HANDLERS[name] = handler
        EFFECTS[name] = effect
        return handler

    return register


def opcodes(effect: str, *names: str) -> Callable[[Handler], Handler]:
    """Register one handler for several opcodes that differ by name only."""

    def register(handler: Handler) -> Handler:
        for name in names:
            opcode(name, effect)(handler)
        return handler

    return register


def _breaking(name: str, reason: str) -> Handler:
    def handler(machine: SymbolicMachine, frame: SymFrame, instruction: Instruction) -> Tracker | None:
        machine.graph_break("B002", name=name, reason=reason)

    return handler


for _name, _reason in {**BREAKING, **UNSUPPORTED}.items():
    HANDLERS[_name] = _breaking(_name, _reason)
