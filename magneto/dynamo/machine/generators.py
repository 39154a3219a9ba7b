"""Generators consumed inside the region: stepped, thrown into and closed as CPython does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import VERSION
from magneto.dynamo.machine.closing import closing_runs_code
from magneto.dynamo.machine.frame import SymFrame
from magneto.dynamo.machine.signals import CapturedRaise
from magneto.dynamo.trackers.base import Tracker

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
        if any(frame is self.frame for frame in self.machine.frames):
            self.machine.raise_exception(ValueError("generator already executing"))

    def _run(self, thrown: CapturedRaise | None) -> Tracker | None:
        self.started = self.finished = True
        self.tracker.started = self.tracker.finished = True
        self.frame.yielded = False
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

    def throw(self, exc: Tracker) -> Tracker | None:
        """`generator.throw`: the next value, or None when it returned."""
        m = self.machine
        self._not_running()
        if self.finished or not self.started:
            self.finished = self.started = True
            self.tracker.started = self.tracker.finished = True
            raise _raised(m, exc)
        receiver = self._delegate()
        if receiver is None:
            return self._run(_raised(m, exc))
        inner = m.generators[id(receiver)]
        if issubclass(exc.python_type(), GeneratorExit):
            inner.close()
            return self._run(_raised(m, exc))
        try:
            value = inner.throw(exc)
        except CapturedRaise as raised:
            return self._run(raised)
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
        if hasattr(receiver.python_type(), "throw") or hasattr(receiver.python_type(), "close"):
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
            self.finished = self.started = self.tracker.started = self.tracker.finished = True
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
