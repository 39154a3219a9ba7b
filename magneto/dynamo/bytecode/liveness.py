"""Which local slots may still be read from an offset on: what a Resume must restore, and what a region may forget.

Backward data flow over the decoded instructions; every instruction inside a protected range may jump to its handler. Cell and free slots count
as always live (closures see them), and so does everything in code that can look at its frame by name (`locals()`, `eval`, ...).
"""

from __future__ import annotations

from types import CodeType

from magneto.dynamo.bytecode.decode import Decoded, Instruction, decode

_READS = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_CLOSURE", "LOAD_DEREF", "DELETE_FAST"}
_WRITES = {"STORE_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR"}
_ENDS = frozenset(
    "RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT INTERPRETER_EXIT".split()
)
_REFLECTIVE = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"}

_LIVE: dict[CodeType, tuple[CodeType, list[int]]] = {}


def _reads_writes(instruction: Instruction) -> tuple[int, int]:
    op, argval = instruction.op, instruction.argval
    if op == "LOAD_FAST_LOAD_FAST":
        return 1 << argval[0] | 1 << argval[1], 0
    if op == "STORE_FAST_STORE_FAST":
        return 0, 1 << argval[0] | 1 << argval[1]
    if op == "STORE_FAST_LOAD_FAST":
        return (1 << argval[1]) & ~(1 << argval[0]), 1 << argval[0]
    return (1 << argval if op in _READS else 0), (1 << argval if op in _WRITES else 0)


def _successors(decoded: Decoded, position: int) -> list[int]:
    instruction = decoded.instructions[position]
    found = []
    if instruction.op not in _ENDS and position + 1 < len(decoded.instructions):
        found.append(position + 1)
    if instruction.target >= 0:
        found.append(decoded.index[instruction.target])
    handler = decoded.handler_at(instruction.offset)
    if handler is not None:
        found.append(decoded.index[handler.target])
    return found


def _analyse(code: CodeType) -> list[int]:
    decoded = decode(code)
    count = len(decoded.instructions)
    everything = (1 << len(decoded.slots)) - 1
    if _REFLECTIVE.intersection(code.co_names):
        return [everything] * count
    cells = set(code.co_cellvars) | set(code.co_freevars)
    always = sum(1 << slot for slot, name in enumerate(decoded.slots) if name in cells)
    if "__class__" in code.co_freevars and code.co_argcount:
        always |= 1  # super() looks at the first argument
    effects = [_reads_writes(instruction) for instruction in decoded.instructions]
    successors = [_successors(decoded, position) for position in range(count)]
    live = [always] * count
    changed = True
    while changed:
        changed = False
        for position in range(count - 1, -1, -1):
            after = always
            for successor in successors[position]:
                after |= live[successor]
            reads, writes = effects[position]
            before = reads | (after & ~writes) | always
            handler = decoded.handler_at(decoded.instructions[position].offset)
            if handler is not None:
                before |= live[decoded.index[handler.target]]
            if before != live[position]:
                live[position] = before
                changed = True
    return live


def live_slots(code: CodeType, offset: int) -> set[int]:
    """Slots that may be read when execution goes on at byte `offset`."""
    found = _LIVE.get(code)
    if found is None or found[0] is not code:
        found = _LIVE[code] = (code, _analyse(code))
    decoded = decode(code)
    mask = found[1][decoded.index[offset]]
    return {slot for slot in range(len(decoded.slots)) if mask >> slot & 1}
