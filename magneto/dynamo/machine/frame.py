"""The symbolic frame: the state of one Python frame while its instructions run on trackers."""

from __future__ import annotations

from types import CodeType
from typing import Any

from magneto.base.dataclass import dataclass, field
from magneto.dynamo.bytecode.decode import Decoded, Instruction, decode
from magneto.dynamo.guards.source import Source
from magneto.dynamo.machine.protocol import Emitter
from magneto.dynamo.trackers.base import Tracker


class NullTracker(Tracker):
    """The C NULL that CPython pushes beside callables."""

    __slots__ = ()

    def emit(self, em: Emitter) -> str:
        return "NULL"

    def show(self) -> str:
        return "NULL"


class HeldTracker(Tracker):
    """An object that the generated code holds by name: an operand of an effect, never seen by the program."""

    __slots__ = ("hint", "obj")

    def __init__(self, obj: Any, hint: str) -> None:
        super().__init__()
        self.obj = obj
        self.hint = hint

    def emit(self, em: Emitter) -> str:
        return em.const(self.obj, self.hint)


NULL = NullTracker()


@dataclass(slots=True, eq=False)
class Handling:
    """The exception being handled: one place for all frames of a thread, and one more for each generator, looked at before its caller's."""

    value: Tracker | None
    caller: Handling | None = None


@dataclass(slots=True, eq=False)
class SymFrame:
    """`locals` by slot (None = unbound); `before` is the value stack as it stood before the current instruction; `tail`: the caller pushes this frame's result
    unchanged, so that the frame can be materialised at a break; `handled`: the exceptions whose handlers it has entered in this region;
    `handling`: where CPython keeps the exception being handled, and `entered` what stood there at the frame's start; `compared`: what the comparison
    at an instruction count gave, before it was made a bool; `progress`: how far capture had come when the current instruction began; `names`: of a class body, the
    namespace that it fills (a DictTracker); `hashed`: at an instruction count, the hashes that it has asked the program for."""

    code: CodeType
    locals: list[Tracker | None]
    globals: dict[str, Any]
    globals_source: Source
    function: Tracker | None = None
    stack: list[Tracker] = field(default_factory=list)
    tail: bool = False
    pc: int = 0
    current: Instruction | None = None
    count: int = 0
    before: list[Tracker] = field(default_factory=list)
    handled: list[Tracker] = field(default_factory=list)
    handling: Handling = field(default_factory=lambda: Handling(None))
    entered: Tracker | None = None
    compared: tuple[int, Tracker | None] = (-1, None)
    keywords: tuple[str, ...] = ()
    yielded: bool = False
    progress: tuple[int, int, int] = (0, 0, 0)
    entry: list[Tracker | None] = field(default_factory=list)
    names: Any = None
    hashed: tuple[int, dict[Tracker, Any]] = (-1, {})
    decoded: Decoded = field(init=False)

    def __post_init__(self) -> None:
        self.decoded = decode(self.code)

    def suspension(self) -> tuple[int, list[Tracker | None], list[Tracker], bool] | None:
        """Of a generator's frame that stands at a yield: where it goes on, its slots (None: empty; what is not read any more shows in `gi_frame.f_locals`),
        its stack, whether the yield is that of a `yield from`. None: it handles an exception."""
        handled = self.handling.value
        if handled is not None and ((const := handled.try_const()) is None or const.value is not None):
            return None
        following = self.decoded.instructions[self.pc]
        offset, delegates = following.offset, following.op == "RESUME" and following.arg & 3 == 2
        return offset, self.locals, self.stack, delegates

    @property
    def yields(self) -> bool:
        """Whether it belongs to a generator."""
        return bool(self.code.co_flags & 0x20)

    def push(self, value: Tracker) -> None:
        self.stack.append(value)

    def pop(self) -> Tracker:
        return self.stack.pop()

    def popn(self, n: int) -> list[Tracker]:
        """The top n values, bottom first."""
        if n == 0:
            return []
        values = self.stack[-n:]
        del self.stack[-n:]
        return values

    def jump(self, offset: int) -> None:
        self.pc = self.decoded.index[offset]

    def where(self) -> tuple[str, int, str]:
        """(file, line, function) of the current instruction."""
        line = self.current.line if self.current is not None else self.code.co_firstlineno
        return (self.code.co_filename, line, self.code.co_name)
