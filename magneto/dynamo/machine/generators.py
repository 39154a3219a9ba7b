"""Generators consumed inside the region: stepped, thrown into and closed as CPython does it."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from magneto import _C
from magneto.base.dataclass import dataclass
from magneto.base.errors import GraphBreak
from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import VERSION
from magneto.dynamo.bytecode.liveness import live_slots
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Part
from magneto.dynamo.machine.closing import closing_runs_code
from magneto.dynamo.machine.frame import NULL, SymFrame
from magneto.dynamo.machine.signals import CapturedRaise
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.basic_iterator import IteratorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine


@dataclass(slots=True)
class GeneratorRun:
    """State of one generator."""

    machine: SymbolicMachine
    frame: SymFrame
    tracker: trackers.GeneratorTracker
    started: bool = False
    finished: bool = False
    hands_on: bool = False  # an exception, to the generator that it has handed over to: it runs, though its frame does not

    over: bool = False  # before this region: it has no frame of its own

    def pending(self) -> bool:
        """Whether closing it where it stands would run code of the program (`finally`, `with`, `except`)."""
        if not self.started or self.finished or self.frame.current is None:
            return False
        return closing_runs_code(self.frame.decoded, self.frame.current.offset, self.frame.globals)

    def next(self, sent: Tracker | None) -> Tracker | None:
        """Up to the next yield; None when it returned (the tracker's `result` is then set)."""
        m, frame = self.machine, self.frame
        self._not_running()
        if self.finished:
            self.tracker.result = None
            return None
        if self.started:
            frame.push(sent or m.const(None))
        elif sent is not None and ((const := sent.try_const()) is None or const.value is not None):
            m.raise_exception(TypeError("can't send non-None value to a just-started generator"))
        return self._run(None)

    def _not_running(self) -> None:
        if self.hands_on or (not self.over and any(frame is self.frame for frame in self.machine.frames)):
            self.machine.raise_exception(ValueError("generator already executing"))

    def _ends(self) -> None:
        """It has returned; or so it seems while it runs."""
        if isinstance(self.tracker, trackers.ExistingGenerator) and not self.finished:
            self.machine.effect(trackers.PUT, self.tracker, trackers.GeneratorState(self.tracker))
        self.started = self.finished = self.tracker.started = self.tracker.finished = True

    def _run(self, thrown: CapturedRaise | None) -> Tracker | None:
        self.finished = False
        self._ends()
        self.frame.yielded = False
        if thrown is not None:
            self._chain(thrown.value)
        try:
            value = self.machine.run(self.frame, thrown)
        except CapturedRaise as raised:
            if VERSION == (3, 11) and raised.matches(StopIteration):  # later versions have a handler in the generator's own code
                error = trackers.ExceptionTracker.of(self.machine, RuntimeError("generator raised StopIteration"))
                error.cause = error.context = raised.value
                self.machine.raise_exception(error)
            raise
        if self.frame.yielded:
            self.finished = self.tracker.finished = False
            return value
        self.tracker.result = value
        return None

    def _chain(self, exc: Tracker) -> None:
        """What the generator itself handles is the context of an exception that is thrown into it."""
        handled = self.frame.handling.value
        if isinstance(handled, trackers.ExceptionTracker) and isinstance(exc, trackers.ExceptionTracker) and handled is not exc:
            if exc.source is not None:
                self.machine.graph_break("B107", value=exc.show(), reason="its context is set")
            exc.context = handled

    def throw(self, exc: Tracker) -> Tracker | None:
        """`generator.throw`: the next value, or None when it returned."""
        m = self.machine
        self._not_running()
        if self.finished or not self.started:
            self._ends()
            raise _raised(m, exc)
        receiver = self._delegate()
        if receiver is None:
            return self._run(_raised(m, exc))
        inner = m.generator_run(receiver)
        if issubclass(exc.python_type(), GeneratorExit):
            error = _raised(m, exc)
            try:
                self.hands_on = True
                inner.close()
            except CapturedRaise as raised:
                error = raised
            finally:
                self.hands_on = False
            return self._run(error)
        try:
            self.hands_on = True
            value = inner.throw(exc)
        except CapturedRaise as raised:
            self.hands_on = False
            return self._run(raised)
        finally:
            self.hands_on = False
        if value is not None:
            return value
        return self._delegate_returned(receiver)

    def _delegate(self) -> trackers.GeneratorTracker | None:
        """The generator that a `yield from`, at which this one stands, has handed over to."""
        following = self.frame.decoded.instructions[self.frame.pc]
        if following.op != "RESUME" or following.arg & 3 != 2:
            return None
        receiver = self.frame.stack[-1]
        if isinstance(receiver, trackers.GeneratorTracker):
            return receiver
        if any(hasattr(receiver.python_type(), name) for name in _ASKED) or isinstance(
            receiver.python_type().__getattribute__, FunctionType
        ):
            self.machine.graph_break("B108", value=receiver.show())
        return None

    def _delegate_returned(self, receiver: trackers.GeneratorTracker) -> Tracker | None:
        frame = self.frame
        send = frame.decoded.instructions[frame.pc - 2]
        assert send.op == "SEND"
        if VERSION == (3, 11):
            frame.pop()
        frame.push(receiver.result or self.machine.const(None))
        frame.jump(send.target)
        return self._run(None)

    def close(self) -> Tracker:
        """`generator.close()`."""
        m = self.machine
        none = m.const(None)
        if self.finished or not self.started:
            self._ends()
            return none
        try:
            value = self.throw(trackers.ExceptionTracker(GeneratorExit))
        except CapturedRaise as raised:
            if raised.matches(GeneratorExit) or raised.matches(StopIteration):
                return none
            raise
        if value is not None:
            m.raise_exception(RuntimeError("generator ignored GeneratorExit"))
        return self.tracker.result or none if VERSION >= (3, 13) else none


def _raised(m: SymbolicMachine, exc: Tracker) -> CapturedRaise:
    try:
        m.raise_exception(exc)
    except CapturedRaise as raised:
        return raised


_ASKED = ("throw", "close", "__getattr__")
_OFFSET, _FUNCTION, _CODE, _DEPTH = -1, -2, -3, -4  # parts of a generator, as in csrc/guards.h


def open_generator(m: SymbolicMachine, tracker: trackers.ExistingGenerator) -> GeneratorRun:
    """A generator from outside: its function, the place where it stands, its variables and its stack, under guards."""
    obj, source = tracker.obj, tracker.source
    assert source is not None
    tracker.born = m.frames[-1].count
    try:
        offset = _C.iterator_part(obj, _OFFSET)
    except LookupError:
        m.guard(Kind.ABSENT, Part(source, _OFFSET), None)
        tracker.started = tracker.finished = True
        return GeneratorRun(m, m.frames[-1], tracker, started=True, finished=True, over=True)
    except TypeError:  # it is running, or handles an exception
        m.graph_break("B110", value=tracker.show())
    code = _C.iterator_part(obj, _CODE)
    fn = m.wrap(_C.iterator_part(obj, _FUNCTION), Part(source, _FUNCTION))
    if not isinstance(fn, trackers.FunctionTracker) or fn.code is not code:
        m.graph_break("B110", value=tracker.show())
    m.guard(Kind.ID_IS, Part(source, _CODE), code)
    m.guard(Kind.EQUALS, Part(source, _OFFSET), offset)
    frame = SymFrame(code, [], fn.globals, fn.globals_source, function=fn)

    def held(part: int) -> Tracker | None:
        try:
            return m.wrap(_C.iterator_part(obj, part), Part(source, part))
        except LookupError:
            m.guard(Kind.ABSENT, Part(source, part), None)
            return None

    live, n_slots = live_slots(code, offset), len(frame.decoded.slots)
    frame.locals = [held(slot) if slot in live else None for slot in range(n_slots)]
    frame.stack = [held(part) or NULL for part in range(n_slots, n_slots + _C.iterator_part(obj, _DEPTH))]
    tracker.entry, tracker.frame = list(frame.locals), frame
    frame.jump(offset)
    created = frame.pc > 0 and frame.decoded.instructions[frame.pc - 1].op == "RETURN_GENERATOR"
    frame.current = frame.decoded.instructions[frame.pc - 1]  # (the yield)
    frame.pc += created  # (the POP_TOP behind RETURN_GENERATOR)
    tracker.started = not created
    return GeneratorRun(m, frame, tracker, started=not created)


def owes(m: SymbolicMachine, generator: trackers.ExistingGenerator) -> bool:
    """Whether closing a generator from outside runs code of the program (or that cannot be known)."""
    try:
        return m.generator_run(generator).pending()
    except GraphBreak:
        return True


MAY_OWE = (trackers.ExistingGenerator, trackers.ExistingComposite)


def owes_inside(m: SymbolicMachine, iterator: Tracker) -> bool:
    """Whether the death of an iterator from outside closes a generator, itself or inside, that then runs code of the program."""
    if isinstance(iterator, trackers.ExistingGenerator) and owes(m, iterator):
        return True
    try:
        if isinstance(iterator, trackers.ExistingComposite):
            iterator.open(m)
    except GraphBreak:
        return True
    return any(isinstance(value, MAY_OWE) and owes_inside(m, value) for value in held_by(m, iterator))


def held_by(m: SymbolicMachine, value: Tracker) -> list[Tracker]:
    """What an iterator, a generator, a list, tuple or dictionary holds."""
    if isinstance(value, trackers.GeneratorTracker):
        run = m.generators.get(id(value))
        found: list[Any] = [] if run is None or run.finished else [*run.frame.locals, *run.frame.stack]
    elif isinstance(value, trackers.SequenceTracker):
        found = list(value.entries)
    elif isinstance(value, trackers.DictTracker):
        found = [entry for _, entry in value.entries.values()]
    elif isinstance(value, IteratorTracker):
        slots = [getattr(value, name, None) for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        found = [part for slot in slots for part in (slot if isinstance(slot, (tuple, list)) else (slot,))]
    else:
        return []
    return [part for part in found if isinstance(part, Tracker)]


def reached(m: SymbolicMachine, value: Tracker) -> bool:
    """Whether variables and stacks hold the value, directly or through what the region has put round it."""
    seen: dict[int, Tracker] = {}
    left = [held for frame in m.frames for held in (*frame.locals, *frame.stack) if held is not None]
    while left:
        held = left.pop()
        if held is value:
            return True
        if id(held) not in seen:
            seen[id(held)] = held
            left += held_by(m, held)
    return False
