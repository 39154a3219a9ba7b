"""GuardSet -> GuardProgram: each source becomes a register, each row a check (csrc/guards.c says what a program means and why it is fast).

An instruction is (operation, dst register, src register, row, may be absent, payload). Modes are checked first and what needs Python last.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from magneto import _C
from magneto.base.logs import GUARDS, log
from magneto.dynamo.guards.reading import relation
from magneto.dynamo.guards.rows import GuardSet, Kind, Row, TensorRow, Weak
from magneto.dynamo.guards.source import Attr, Cell, Global, Held, InstanceDict, Item, KeyAt, Local, Part, Peek, Source, Stack, may_die

OPS: dict[str, int] = _C.GUARD_OPS
NO_ROW = -2
INT64 = 1 << 63

Instruction = tuple[int, int, int, int, bool, Any]

# source class -> (operation, payload)
LOADS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    Local: ("LOCAL", lambda source: source.slot), Stack: ("STACK", lambda source: source.index),
    Global: ("GLOBAL", lambda source: source.name), Held: ("HELD", lambda source: source.obj), Cell: ("CELL", lambda source: None),
    InstanceDict: ("DICT", lambda source: None), Attr: ("ATTR", lambda source: source.name), Item: ("ITEM", lambda source: source.key),
    KeyAt: ("KEY_AT", lambda source: source.index), Part: ("PART", lambda source: source.index),
    Peek: ("PEEK", lambda source: (source.ahead, source.part)),
}  # fmt: skip

# Kinds whose check takes the payload as it is.
DIRECT = {
    Kind.TYPE_IS: "TYPE_IS", Kind.EQUALS: "EQUALS", Kind.LENGTH: "LENGTH", Kind.KEYS: "KEYS", Kind.KEY_ABSENT: "KEY_ABSENT",
    Kind.TYPE_VERSION: "TYPE_VERSION",
}  # fmt: skip


class Builder:
    """Instructions in three parts: modes, loads and checks, checks that call Python."""

    def __init__(self) -> None:
        self.modes: list[Instruction] = []
        self.body: list[Instruction] = []
        self.python: list[Instruction] = []
        self.places: dict[Any, int] = {}  # what a load reads -> its register
        self.known: dict[int, int] = {}  # id of a source -> its register
        self.sources: list[Source] = []  # keeps those ids valid
        self.steady = True

    def load(self, source: Source, row: int, maybe: bool = False) -> int:
        """Register of a source. Two sources are one register when they read the same place of the same register."""
        found = self.known.get(id(source))
        if found is not None:
            return found
        base = source.base()
        src = -1 if base is None else self.load(base, row)
        name, payload_of = LOADS[type(source)]
        payload = payload_of(source)
        if name == "ATTR" and "torch" in sys.modules:  # it may be the attribute of a tensor
            _know_tensors()
        place = (name, src, id(payload)) if name == "HELD" else (name, src, type(payload), payload)
        dst = self.places.get(place)
        if dst is None:
            dst = self.places[place] = len(self.places)
            self.body.append((OPS[name], dst, src, row, may_die(payload) if name == "HELD" else maybe, payload))
        self.known[id(source)] = dst
        self.sources.append(source)
        return dst

    def check(self, op: str, src: int, row: int, payload: Any) -> None:
        self.body.append((OPS[op], -1, src, row, False, payload))

    def check_python(self, holds: Callable[[Any], bool], src: int, row: int) -> None:
        """A check that only Python can make. The program is then evaluated completely on each call: Python code may change anything."""
        self.steady = False
        self.python.append((OPS["PYTHON"], -1, src, row, False, _C.Disabled(holds)))

    def add(self, index: int, row: Row) -> None:
        kind, source, payload = row.kind, row.source, row.payload
        if kind is Kind.STATE:
            self._add_state(index, payload)
            return
        assert source is not None, row
        if kind is Kind.ABSENT and payload is None:
            self.check("IS_ABSENT", self.load(source, index, maybe=True), index, None)
            return
        src = self.load(source, index)
        if isinstance(payload, Weak):
            payload = payload.known()
        if kind is Kind.PRESENT:  # the load is the check
            return
        if kind in DIRECT:
            weakly = kind in (Kind.TYPE_IS, Kind.TYPE_VERSION) and may_die(payload)
            self.body.append((OPS[DIRECT[kind]], -1, src, index, weakly, payload))
        elif kind is Kind.ID_IS:
            self.check("ID_IS", src, index, payload)
        elif kind is Kind.ABSENT:
            self.check("ATTR_ABSENT", src, index, payload)
        elif kind is Kind.SAME:
            self.check("SAME", src, index, self.load(payload, index))
        elif kind in (Kind.MEMBER, Kind.NOT_MEMBER):
            self.check(kind.name, src, index, self.load(payload, index))
        elif kind is Kind.DISTINCT:
            if "torch" in sys.modules:
                _know_tensors()
            self.check("DISTINCT", src, index, (src, *[self.load(other, index) for other in payload]))
        elif kind is Kind.TENSOR:
            self._add_tensor(index, src, payload)
        elif kind is Kind.SIZES:
            registers = (src, *[self.load(other, index) for other in payload.others])
            numbers = 2 * sum(len(form.shape) for form in payload.forms)
            fits = payload.holds if numbers else payload.holds_for
            self.python.append((OPS["SIZES"], -1, src, index, False, (_C.Disabled(fits), registers, numbers)))
        elif kind is Kind.TOGETHER:
            registers = (src, *[self.load(other, index) for other in payload[1]])
            self.python.append((OPS["SIZES"], -1, src, index, False, (_C.Disabled(relation(*payload)), registers, 0)))
        elif kind is Kind.INT_RANGE:
            self._add_range(index, src, payload)
        elif kind is Kind.DECIDES:
            self.python.append((OPS["PYTHON"], -1, src, index, False, _C.Disabled(payload.holds)))
        elif kind is Kind.RELATION:  # a function of a number: it changes nothing that other rows have found
            self.python.append((OPS["PYTHON"], -1, src, index, False, _C.Disabled(relation(payload))))
        else:
            raise AssertionError(kind)

    def _add_range(self, index: int, src: int, payload: tuple[int | None, int | None]) -> None:
        low, high = payload
        if all(bound is None or -INT64 < bound < INT64 - 1 for bound in payload):
            self.check("INT_RANGE", src, index, payload)
        else:
            from magneto.dynamo.guards.reading import in_range

            self.check_python(lambda value: in_range(value, low, high), src, index)

    def _add_state(self, index: int, payload: Any) -> None:
        from magneto.dynamo.guards.state import native_probe

        name, read, args, expected = payload
        table = getattr(read, "__self__", None)
        if type(read) is types.BuiltinFunctionType and type(table) is dict and read.__name__ == "get" and len(args) == 1:
            self.check("EQUALS", self.load(Item(Held(name, table), args[0]), index), index, expected)
            return
        probe = native_probe(payload)
        if probe is not None:
            self.modes.append((OPS["PROBE"], -1, -1, index, False, probe))
        else:
            self.modes.append((OPS["STATE"], -1, -1, index, False, (read, tuple(args), expected)))

    def _add_tensor(self, index: int, src: int, row: TensorRow) -> None:
        from magneto.dynamo.guards import tensors

        api = tensors.tensor_api()
        code = tensors.dlpack_code(row.dtype, row.device)
        if code is None or not api.keys:
            self.check_python(lambda value: tensors.tensor_holds(row, value), src, index)
        if code is None:
            return
        dtype_key, (device_type, device_index), ambiguous = code
        keys = tensors.plain_keys(row.device, row.inference, row.lazy) if api.keys else None
        grad = -1 if row.requires_grad is None else int(row.requires_grad)
        strides = None if row.strides is None else tuple(row.strides)
        ambiguous_dtype, told = row.dtype if ambiguous else None, tensors.told_by_words(row.device)
        payload = (row.cls, dtype_key, ambiguous_dtype, keys, device_type, device_index, tuple(row.shape), strides, grad, told)
        self.check("TENSOR", src, index, payload)

    def build(self, exports: Sequence[Source], frame_globals: dict[str, Any] | None, packed: Sequence[Source]) -> Any:
        registers = tuple(self.load(source, NO_ROW) for source in exports)
        together = tuple(self.load(source, NO_ROW) for source in packed)
        instructions = (*_merged(self.modes), *self.body, *self.python)
        return _C.GuardProgram(instructions, len(self.places), registers, self.steady, frame_globals, together)


def _know_tensors() -> None:
    from magneto.dynamo.guards.tensors import tensor_api

    tensor_api()


def _merged(modes: list[Instruction]) -> list[Instruction]:
    """Probes of several bits of one byte become one comparison."""
    from magneto.dynamo.guards.state import BYTE_MASK

    merged: list[Instruction] = []
    places: dict[tuple[int, int], int] = {}
    for instruction in modes:
        op, dst, src, _, maybe, payload = instruction
        if op == OPS["PROBE"] and payload[0] == BYTE_MASK:
            place = (payload[1], payload[2] >> 8)  # function, offset of the byte
            if place in places:
                old = merged[places[place]]
                both = (BYTE_MASK, payload[1], old[5][2] | payload[2], old[5][3] | payload[3])
                merged[places[place]] = (op, dst, src, old[3], maybe, both)
                continue
            places[place] = len(merged)
        merged.append(instruction)
    return merged


def build_guards(
    guards: GuardSet, exports: Sequence[Source] = (), frame_globals: dict[str, Any] | None = None, packed: Sequence[Source] = ()
) -> Any:
    """The GuardProgram of a guard set; after a hit it hands out the values of `exports`, and then those of `packed` as one tuple. It only holds
    for frames with `frame_globals`, if given: functions with the same code may have different globals."""
    builder = Builder()
    for index, row in enumerate(guards):
        builder.add(index, row)
    return builder.build(exports, frame_globals, packed)


def build_program(guards: GuardSet, exports: Sequence[Source], packed: Sequence[Source], state: Any) -> Any:
    """As `build_guards`; the frame that was captured (a FrameState) makes the first check, so that stable values are known from the start.
    The rows of `guards` then hold the objects whose identity they check weakly."""
    program = build_guards(guards, exports, state.globals, packed)
    if not check_state(program, state):
        log(GUARDS, lambda: f"guards do not hold for the frame they were made for: row {program.failed_row}")
    guards.weaken()
    return program


def check_state(program: Any, state: Any) -> bool:
    """Whether the guards hold for a FrameState."""
    return bool(program.check(tuple(state.locals), tuple(state.stack), state.globals, state.builtins, state.closure, _C.UNBOUND))
