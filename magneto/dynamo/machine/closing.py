"""What `generator.close()` would run: a generator left suspended inside a `try` may owe the program its `finally`, its `with`-block's exit or a handler.

Closing raises GeneratorExit at the yield. Handlers that name only exceptions which are not GeneratorExit (`except IndexError:`) let it pass; CPython's own
wrappers (3.12+: StopIteration becomes RuntimeError, or the result of `yield from`) are no code of the program. Anything else counts as owed.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

from magneto.dynamo.bytecode.decode import Decoded, Instruction

_STOPITERATION_ERROR = 3
_CLEANUP = ("COPY", "POP_EXCEPT", "RERAISE")
_NAME_CLEANUP = ("LOAD_CONST", "STORE_FAST", "DELETE_FAST", "RERAISE")  # of `except E as name`


def closing_runs_code(decoded: Decoded, offset: int, globals: Mapping[str, Any]) -> bool:
    """Whether GeneratorExit, raised at the instruction at `offset`, reaches code of the program."""
    handler = decoded.handler_at(offset)
    while handler is not None:
        position = decoded.index[handler.target]
        left = _passes(decoded.instructions, decoded.index, position, globals)
        if left is None:
            return True
        following = decoded.handler_at(decoded.instructions[left].offset)
        handler = None if following is handler else following
    return False


def _passes(instructions: tuple[Instruction, ...], index: Mapping[int, int], position: int, globals: Mapping[str, Any]) -> int | None:
    """Position of the instruction by which the exception leaves this handler without having run anything; None: something would run."""
    first = instructions[position]
    if first.op == "CLEANUP_THROW":  # of `yield from`: what it delegates to is closed by itself
        return position
    if first.op == "CALL_INTRINSIC_1" and first.arg == _STOPITERATION_ERROR:
        return position + 1
    if tuple(i.op for i in instructions[position : position + 3]) == _CLEANUP:
        return position + 2
    if tuple(i.op for i in instructions[position : position + 4]) == _NAME_CLEANUP:
        return position + 3
    if first.op != "PUSH_EXC_INFO":
        return None
    position += 1
    while instructions[position].op == "LOAD_GLOBAL" and instructions[position + 1].op == "CHECK_EXC_MATCH":
        name, jump = instructions[position].argval, instructions[position + 2]
        kind = globals.get(name, getattr(builtins, name, None))
        if not isinstance(kind, type) or issubclass(GeneratorExit, kind) or not jump.op.endswith("IF_FALSE"):
            return None
        position = index[jump.target]
    return position if instructions[position].op == "RERAISE" else None
