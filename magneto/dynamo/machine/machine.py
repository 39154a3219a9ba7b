"""The symbolic machine: runs the instructions of a frame (and of the functions it calls) on trackers until the region ends.

A region ends with a return of the entry frame or with a break. A break needs no roll-back where every frame on the symbolic stack can be
materialised: the frames' states are written out and CPython, or the next region, goes on. Where something that is not a Python frame lies between two
frames (a `sorted` that calls a key function, a half-run generator), capture restarts with a forced break at the outer instruction; capture is
deterministic, so instruction counts identify instructions.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import CodeType
from typing import Any, NoReturn

import torch

from magneto.base.errors import GraphBreak, MagnetoError, MagnetoWarning, warn_once
from magneto.base.flags import config
from magneto.base.logs import log
from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import Instruction
from magneto.dynamo.bytecode.liveness import live_slots
from magneto.dynamo.guards.rows import GuardSet, Kind
from magneto.dynamo.guards.source import Held, Local, Source, Stack
from magneto.dynamo.machine import assume
from magneto.dynamo.machine.assume import MAX_TIMES, Assumption, Check, Place, branch_of, survives
from magneto.dynamo.machine.decided import decision_of
from magneto.dynamo.machine.frame import NULL, Handling, SymFrame
from magneto.dynamo.machine.generators import MAY_OWE, GeneratorRun, open_generator, owes
from magneto.dynamo.machine.lifetime import lose_temporaries, sole_holders
from magneto.dynamo.machine.recorder import Recorder
from magneto.dynamo.machine.reflective import asks_for_the_callers_module, calls_reflective
from magneto.dynamo.machine.replay import Replays, repeatable
from magneto.dynamo.machine.signals import CapturedRaise, Ending, Forced, RegionEnd, Restart
from magneto.dynamo.machine.speculate import Speculation
from magneto.dynamo.machine.varying import Varying
from magneto.dynamo.trackers.base import Signal, Tracker
from magneto.graph import SizeUnknown, TensorMeta

MAX_INSTRUCTIONS = 2_000_000
MAX_IDLE = 60_000  # instructions without any tensor operation
MAX_DEPTH = 60
MAX_DECISIONS = 4  # by one number from outside
_TORCH = os.path.dirname(torch.__file__) + os.sep
_GENERATOR, _COROUTINE = 0x20, 0x80 | 0x200


class SymbolicMachine:
    """One capture attempt of one entry point. `state` is the C hook's FrameState."""

    def __init__(
        self, state: Any, forced: Mapping[int, Forced], unbound: object, null: object, changing: frozenset[Source] = frozenset(),
        joins: Callable[[Any], bool] = lambda policy: False, refuted: AbstractSet[Place] = frozenset(), unknown_sizes: bool = False,
        varying: Varying | None = None,
    ) -> None:  # fmt: skip
        self.state = state
        self.refuted = refuted
        self.assumptions: list[Assumption] = []
        self.decisions: Counter[Source] = Counter()
        self.unknown_sizes = unknown_sizes
        self.varying = varying or Varying(lambda tensor, source: {})
        self.changing, self.joins, self.forced = changing, joins, forced
        self.unbound, self.null = unbound, null
        self.guards = GuardSet()
        self.read_by_backward = GuardSet()  # rows that must still hold when a custom backward of the graph runs
        self.keys_by_identity: dict[Tracker, None] = {}  # existing objects that were told apart by their identity
        self.asks_whole = False  # whether one is told which gradients are missing
        self.recorder = Recorder(self)
        self.varying.begin(self.recorder.sizes)
        self.frames: list[SymFrame] = []
        self.codes: dict[int, CodeType] = {}  # by id: of the frames that were run
        self.entry_stack: list[Tracker] = []
        self.effects: list[tuple[str, tuple[Tracker, ...]]] = []
        self.contexts: list[Tracker] = []
        self.wrapped: dict[int, Tracker] = {}
        self.reached: list[tuple[Source, Any, type]] = []  # where objects were found, and what kinds of tracker they have
        self.particulars = 0  # how often capture has looked at what guards do not tell: which module it is, the numbers of a tensor
        self.replays = Replays(self)
        self.overlay: dict[tuple[int, str], Tracker | None] = {}
        self.references: dict[Tracker, Tracker] = {}
        self.memories: dict[int, Any] = {}  # of numpy arrays made here (trackers.array_memory), by the id of the array that owns them
        self.begun: list[torch.Tensor] = []  # existing tensors that begin to have a history here
        self.streams: dict[
            int, Any
        ] = {}  # copies of the random generators whose state is known, by the id of the generator (trackers.draw)
        self.draws: list[trackers.HostCall] = []  # calls that the region makes before its graph: random numbers, for the most part
        self.switches: dict[Any, Any] = {}  # of cuDNN, as the region has set them (trackers.rules_cudnn)
        self.random_closed = False  # the default generator of torch is set behind the graph
        self.overriding = False  # a class with __torch_function__ has been met
        self.functions_off = 0 if torch._C._is_torch_function_enabled() else 1
        self.count = 0
        self.outside = trackers.OutsideException()
        self._handled_outside = sys.exception()
        self.handling = Handling(self.outside, Handling(trackers.OutsideException()))
        self.limit = min(MAX_IDLE, MAX_INSTRUCTIONS)
        self.steps = 0  # items taken from iterators
        self.changes = 0  # of containers
        self.ending: Ending | None = None
        self.generators: dict[int, GeneratorRun] = {}
        self._tail = False
        self._behind: GraphBreak | None = None
        self.sole = sole_holders(state)
        self.mortal: list[Tracker] = []  # what lay on the stack when the region began, and has a finaliser or may hold a generator
        self.made: dict[int, Tracker] = {}  # by id: classes made here, and what stands in for values in their prototypes
        self.stand_ins: list[Any] = []

    # -- running

    def capture(self) -> Ending:
        """Run from the entry point to the region's end. Raises Restart."""
        frame = self._entry_frame()
        try:
            value = self.run(frame)
            self.ending = Ending(value=value)
            self.frames.append(frame)
        except RegionEnd:
            pass
        except CapturedRaise as raised:
            raise Restart(raised.count, None, not getattr(raised.value, "caught", False)) from None
        assert self.ending is not None
        return self.ending

    def check_generators(self, leaves: Callable[[Tracker], bool]) -> None:
        """A generator that nobody holds when the region ends would be closed: capture breaks where it was made, if that runs code."""
        for run in self.generators.values():
            if run.pending() and run.tracker.source is None and run.tracker.born not in self.forced and not leaves(run.tracker):
                assert run.tracker.born is not None
                raise Restart(run.tracker.born, GraphBreak("B022", self.user_stack(), value=run.tracker.show()), False)

    def release(self) -> None:
        """Let go of the call's objects at once: this machine stands in reference cycles, and the program may wait for an object to die."""
        self.state = None
        self._handled_outside = None
        trackers.forget_prototypes(self.stand_ins)
        for tracker in self.wrapped.values():
            trackers.forget_object(tracker)
        for frame in [*self.frames, *(run.frame for run in self.generators.values())]:
            frame.locals, frame.stack, frame.entry, frame.before, frame.function = [], [], [], [], None
        for held in (self.wrapped, self.overlay, self.references, self.made, self.generators, self.memories, self.streams):
            held.clear()
        self.replays.clear()
        tables: Any = (self.reached, self.stand_ins, self.entry_stack, self.mortal, self.frames, self.effects, self.contexts)
        for kept in (*tables, self.recorder.inputs):
            kept.clear()
        self.draws.clear()
        self.ending = None

    def _entry_frame(self) -> SymFrame:
        state = self.state
        frame = SymFrame(state.code, [], state.globals, Held("globals()", state.globals))
        live = live_slots(state.code, state.offset)
        for slot, (name, obj) in enumerate(zip(frame.decoded.slots, state.locals, strict=True)):
            unread = obj is self.unbound or (slot not in live and not trackers.can_be_watched(obj))
            frame.locals.append(None if unread else self.wrap(obj, Local(slot, name)))
        frame.entry = list(frame.locals)
        frame.stack = [NULL if obj is self.null else self.wrap(obj, Stack(index)) for index, obj in enumerate(state.stack)]
        self.entry_stack = list(frame.stack)
        held = [value for value in frame.stack if value is not NULL and not isinstance(value, trackers.ConstTracker)]
        self.mortal = [value for value in held if trackers.has_finaliser(value.obj) or isinstance(value, MAY_OWE)]
        frame.jump(state.offset)
        return frame

    def run(self, frame: SymFrame, thrown: CapturedRaise | None = None) -> Tracker:
        """Run a frame to its return (or, for a generator frame, to its next yield); the frame is popped unless the region ends inside it.
        `thrown`: an exception that arrives at the yield where the frame stands."""
        from magneto.dynamo.machine.handlers import HANDLERS

        if len(self.frames) >= MAX_DEPTH:
            self.graph_break("B020", depth=MAX_DEPTH)
        if frame.yields and self.frames:
            frame.handling.caller = self.frames[-1].handling
        else:
            frame.handling = self.frames[-1].handling if self.frames else self.handling
        frame.entered = frame.handling.value
        self.codes[id(frame.code)] = frame.code
        self.frames.append(frame)
        if thrown is not None:
            assert frame.current is not None
            if not self._unwind(frame, frame.current, thrown):
                self.frames.pop()
                raise thrown
        instructions = frame.decoded.instructions
        while True:
            instruction = instructions[frame.pc]
            frame.current = instruction
            frame.pc += 1
            self.count += 1
            frame.count = self.count
            frame.before = frame.stack.copy()
            frame.progress = self.count, self.steps, len(self.effects)
            self._tail = False
            try:
                if self.count in self.forced:
                    self._forced_break(frame)
                if self.mortal:
                    lose_temporaries(self)
                if self._behind is not None:
                    self._break(frame, self._behind)
                if self.count > self.limit:
                    self.graph_break("B021", limit=self.limit)
                result: Tracker | None = HANDLERS[instruction.op](self, frame, instruction)
            except CapturedRaise as raised:
                if not self._unwind(frame, instruction, raised):
                    self.frames.pop()
                    raise
                continue
            except GraphBreak as reason:
                self._break(frame, reason)
            except trackers.CannotEmit as problem:
                self._break(frame, GraphBreak("B022", self.user_stack(), value=problem.tracker.show()))
            except SizeUnknown as problem:  # out of a rule that may have begun
                if self.varying.settle(problem.what):
                    self.restart_knowing()
                raise Restart(frame.count, GraphBreak("B114", self.user_stack(), reason=str(problem)), False) from None
            except (RegionEnd, Restart, MagnetoError, MagnetoWarning, RecursionError):
                raise
            except Exception as error:
                self._defect(frame, error)
            if result is not None:
                self.frames.pop()
                return result

    def _unwind(self, frame: SymFrame, instruction: Instruction, raised: CapturedRaise) -> bool:
        """Enter the frame's handler for the exception, if it has one."""
        handler = frame.decoded.handler_at(instruction.offset)
        if handler is None:
            return False
        again = instruction.op == "RERAISE" and instruction.arg > 0  # it counts as raised by the instruction noted on the stack
        raised_at = frame.stack[-instruction.arg] if again else self.const(instruction.offset // 2)
        dropped = [value for value in frame.stack[handler.depth :] if isinstance(value, trackers.ExistingGenerator)]
        del frame.stack[handler.depth :]
        if any(owes(self, generator) for generator in dropped):
            self.end_behind(GraphBreak("B120", self.user_stack(), value=dropped[0].show()))
        if handler.lasti:
            frame.push(raised_at)
        frame.push(raised.value)
        if isinstance(raised.value, trackers.ExceptionTracker):
            raised.value.caught = True
        frame.jump(handler.target)
        return True

    # -- ends

    def _forced_break(self, frame: SymFrame) -> NoReturn:
        forced = self.forced[self.count]
        self._finish(frame, forced.reason, forced.interpret)

    def _progress(self) -> tuple[int, int, int]:
        return self.count, self.steps, len(self.effects)

    def _break(self, frame: SymFrame, reason: GraphBreak) -> NoReturn:
        if self.varying.settle_named(self.recorder, reason.reason):
            self.restart_knowing()
        trackers.texts_wanted(reason.reason)
        if frame.progress != self._progress():  # half of the instruction has happened: break before it
            raise Restart(frame.count, reason, False)
        if calls_reflective(frame):
            if len(self.frames) > 1:
                raise Restart(self.frames[0].count, reason, True)
            self._finish(frame, reason, True)
        self._finish(frame, reason, False)

    def _defect(self, frame: SymFrame, error: Exception) -> NoReturn:
        """A rule of ours failed: its instruction becomes a graph break, before it has done anything."""
        if not config.suppress_errors:
            raise error
        log(1, "".join(traceback.format_exception(error)))
        text = f"{type(error).__name__}: {error}"
        warn_once("W015", code=frame.code.co_qualname, where=self.user_line(), error=text)
        raise Restart(frame.count, GraphBreak("B024", self.user_stack(), error=text), False) from None

    def _finish(self, frame: SymFrame, reason: GraphBreak | None, interpret: bool) -> NoReturn:
        """End the region at the current instruction of the innermost frame, or restart with a break at an outer one."""
        for depth, candidate in enumerate(self.frames):
            if depth and not candidate.tail:
                outer = self.frames[depth - 1]
                raise Restart(outer.count, reason, False)
            for exc in candidate.handled:
                born = getattr(exc, "born", None)
                if born is not None:
                    raise Restart(born, reason, False)
        self.ending = Ending(reason=reason, interpret=interpret)
        raise RegionEnd

    def end_behind(self, reason: GraphBreak) -> None:
        """The region ends when the current instruction has been executed."""
        self._behind = reason

    def suspend(self, frame: SymFrame) -> NoReturn:
        """The region of a generator frame ends at its next yield, or at its return."""
        try:
            self._finish(frame, None, True)
        finally:
            if self.ending is not None:
                self.ending.suspends = True

    def graph_break(self, id: str, **fields: Any) -> NoReturn:
        raise GraphBreak(id, self.user_stack(), **fields)

    def raise_exception(self, exc: BaseException | Tracker) -> NoReturn:
        """The program raises `exc`. A rule that computes with the program's values may call back into capture: what is capture's own goes on through it."""
        if isinstance(exc, (Signal, MagnetoError, SizeUnknown)):
            raise exc
        real = None if isinstance(exc, Tracker) else exc
        value = exc if isinstance(exc, Tracker) else trackers.ExceptionTracker.of(self, exc)
        if isinstance(value, trackers.ExceptionTracker) and value.source is None:
            if value.born is None:
                value.born = self.count
            context = self._innermost_handled()
            if context is self.outside:
                context = self._handled_by_this_frame() or context
            if context is not value and not (value.context is not None and isinstance(context, trackers.OutsideException)):
                value.context = context
                _cut_cycle(value, context)
        raise CapturedRaise(value, getattr(value, "born", None) or self.count, real)

    def _innermost_handled(self) -> Tracker | None:
        handling: Handling | None = self.frames[-1].handling if self.frames else None
        while handling is not None:
            const = handling.value.try_const() if handling.value is not None else None
            if handling.value is not None and (const is None or const.value is not None):
                return handling.value
            handling = handling.caller
        return None

    def handled_exception(self) -> Tracker:
        """The exception being handled, as `sys.exception()` would give it."""
        found = self._innermost_handled()
        if not isinstance(found, trackers.OutsideException):
            return found or self.const(None)
        return (self._handled_by_this_frame() if found is self.outside else None) or self.handled_by_callers()

    def _handled_by_this_frame(self) -> Tracker | None:
        """The exception that a handler of the entry frame had begun to handle before the region."""
        for index, obj in enumerate(self.state.stack):
            if obj is self._handled_outside and obj is not None:
                return self.wrap(obj, Stack(index))
        return None

    def handled_by_callers(self) -> Tracker:
        """What `sys.exception()` gave before the function was called."""
        if self._handled_outside is not None:
            self.graph_break("B101", callee="sys.exception", reason="the exception is handled by a caller of the function")
        self.guard(Kind.STATE, None, ("sys.exception", sys.exception, (), None))
        return self.const(None)

    # -- values

    def wrap(self, obj: Any, source: Source) -> Tracker:
        found = self.wrapped.get(id(obj))
        if found is not None:
            self.reached.append((source, obj, type(found)))
            return self._rewrap(found, obj, source)
        tracker = trackers.wrap(self, obj, source)
        if tracker.shared:
            self.wrapped[id(obj)] = tracker
            self.reached.append((source, obj, type(tracker)))
        return tracker

    def _rewrap(self, found: Tracker, obj: Any, source: Source) -> Tracker:
        """The same object reached by a second path: one tracker, and a row that the two paths still meet."""
        if isinstance(found, trackers.Awaited):
            self.graph_break("B107", value=found.show(), reason="it is read where something is to be added")
        if found.source is not None and found.source != source:
            known, other = (found.source, source) if isinstance(found.source, Held) else (source, found.source)
            self.guard(*((Kind.ID_IS, other, obj) if isinstance(known, Held) else (Kind.SAME, source, found.source)))
        return found

    def const(self, value: Any) -> Tracker:
        return trackers.from_value(self, value)

    def guard(self, kind: Kind, source: Source | None, payload: Any) -> None:
        if kind is Kind.ID_IS and id(payload) in self.wrapped and isinstance(payload, torch.nn.Module):
            self.particulars += 1
        self.guards.require(kind, source, payload, self.read_at)

    def hashed_now(self) -> dict[Tracker, Any]:
        """The hashes that the current instruction has asked the program for: CPython asks once in one operation."""
        frame = self.frames[-1]
        if frame.hashed[0] != frame.count:
            frame.hashed = (frame.count, {})
        return frame.hashed[1]

    def user_stack(self) -> tuple[tuple[str, int, str], ...]:
        return tuple(frame.where() for frame in self.frames)

    def user_line(self) -> str:
        if not self.frames:
            return f"{self.state.code.co_filename}:{self.state.code.co_firstlineno}"
        file, line, _ = self.frames[-1].where()
        return f"{file}:{line}"

    def read_at(self) -> tuple[str, str]:
        """The innermost line of the program that is not torch's, and the line of torch that it has reached ("" for none)."""
        for frame in reversed(self.frames):
            if not frame.code.co_filename.startswith(_TORCH):
                if frame is self.frames[-1]:
                    break
                file, line, _ = frame.where()
                return f"{file}:{line}", self.user_line()
        return self.user_line(), ""

    # -- behaviour

    def apply(self, fn: Callable[..., Any], *args: Tracker, **kwargs: Tracker) -> Tracker:
        self._tail = False
        return trackers.apply(self, fn, args, kwargs)

    def call(self, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
        self._tail = False
        return trackers.call(self, fn, args, kwargs)

    def call_tail(self, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
        """A call whose result the current instruction pushes unchanged: frames of a Python callee can be materialised at a break."""
        resolve = getattr(fn, "resolve_call", None)
        resolved = resolve(self) if resolve is not None else None
        if resolved is None:
            return self.call(fn, args, kwargs)
        function, prefix = resolved
        self._tail = True
        return self.inline(function, [*prefix, *args], kwargs)

    def inline(self, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
        tail, self._tail = self._tail, False
        assert isinstance(fn, trackers.FunctionTracker)
        if fn.code in trackers.STAND_INS:
            fn = trackers.STAND_INS[fn.code](self, fn, args, kwargs)
        code: CodeType = fn.code
        if code.co_flags & _COROUTINE:
            self.graph_break("B023", name=code.co_name)
        if asks_for_the_callers_module(code):
            self.graph_break("B101", callee=code.co_name, reason="it looks at its caller")
        generator = bool(code.co_flags & _GENERATOR)
        again, call = None, None
        if not generator and args and (key := repeatable(fn, args, kwargs)) is not None:
            again, call = self.replays.begin(key, args, kwargs)
            if again is not None:
                return again
        slots = fn.bind(self, args, kwargs)
        if fn.closure:
            slots[-len(fn.closure) :] = fn.closure
        frame = SymFrame(code, slots, fn.globals, fn.globals_source, function=fn, tail=tail and not generator)
        if not generator:
            value = self.run(frame)
            if call is not None:
                self.replays.finish(key, call, value)
            return value
        tracker = trackers.GeneratorTracker(frame, fn, args, kwargs)
        tracker.born = self.count
        self.generators[id(tracker)] = GeneratorRun(self, frame, tracker)
        return tracker

    def run_class_body(self, body: trackers.FunctionTracker) -> trackers.DictTracker:
        """The namespace that the body of a class statement leaves."""
        frame = SymFrame(body.code, body.bind(self, (), {}), body.globals, body.globals_source, function=body)
        frame.names = trackers.DictTracker()
        self.run(frame)
        return frame.names  # type: ignore[no-any-return]

    def generator_next(self, generator: trackers.GeneratorTracker, send: Tracker | None = None) -> Tracker | None:
        """Run a generator up to its next yield; None when it returned (its `result` is then set)."""
        return self.generator_run(generator).next(send)

    def generator_run(self, generator: trackers.GeneratorTracker) -> GeneratorRun:
        """The state of a generator; one from outside is looked into."""
        found = self.generators.get(id(generator))
        if found is None:
            assert isinstance(generator, trackers.ExistingGenerator)
            found = self.generators[id(generator)] = open_generator(self, generator)
        return found

    def super_args(self) -> tuple[Tracker | None, Tracker | None]:
        """(`__class__`, first argument) of the current frame, for `super()`; None for what is not there."""
        frame = self.frames[-1]
        slots = frame.decoded.slots
        cell = frame.locals[slots.index("__class__")] if "__class__" in frame.code.co_freevars else None
        first = frame.locals[0] if frame.locals and frame.code.co_argcount else None
        if isinstance(first, trackers.CellTracker) and frame.code.co_varnames[0] in frame.code.co_cellvars:
            first = first.load(self)
        return cell.load(self) if isinstance(cell, trackers.CellTracker) else None, first

    def enter_autocast(self, device_type: str, dtype: Any, enabled: bool, cache_enabled: bool) -> None:
        """Autocast for what follows. What is still entered at the region's end is left in the graph and entered again for real (`contexts`)."""
        self.recorder.enter_autocast(device_type, dtype, enabled, cache_enabled)

    def exit_autocast(self) -> None:
        self.recorder.exit_autocast()

    def truth(self, value: Tracker) -> bool:
        known = trackers.truth(self, value)
        return self._undecided(value) if known is None else known

    def decide(self, frame: SymFrame, instruction: Instruction, value: Tracker) -> bool:
        """The truth value that a jump of the program depends on; assumed, where one side of it raises, or where it depends on a size."""
        known = trackers.truth(self, value)
        if known is not None:
            return known
        jump = branch_of(frame.decoded, instruction)
        if isinstance(value, trackers.SizeTracker):
            return self._decide_size(frame, jump, value)
        expected = survives(frame.decoded, jump) if jump is not None else None
        if jump is None or expected is None:
            return self._undecided(value)
        place = Place(frame.code, jump.offset, expected)
        condition = trackers.number_of(self, value, "bool()", bool) if isinstance(value, trackers.TensorTracker) else value
        if place in self.refuted or condition is None or sum(a.place == place for a in self.assumptions) >= MAX_TIMES:
            return self._undecided(value)
        reason = GraphBreak("B012", self.user_stack(), value=value.show())
        assume.add(self, Assumption(condition, expected, place, self.count, reason))
        return expected

    def assume(self, condition: trackers.ItemTracker) -> bool:
        """Go on as if the condition held; the region checks it behind the graph. False: it did not hold in an earlier run."""
        frame = self.frames[-1]
        assert frame.current is not None
        place = Place(frame.code, frame.current.offset, True)
        if place in self.refuted:
            return False
        reason = GraphBreak("B102", self.user_stack(), operation=condition.operation)
        assume.add(self, Assumption(condition, True, place, self.count, reason))
        return True

    def _decide_size(self, frame: SymFrame, jump: Instruction | None, value: trackers.SizeTracker) -> bool:
        """A branch on a size goes as in an example, or the other way if that was wrong."""
        known = self.varying.decide(self.recorder, value)
        if known is not None:
            return known
        example = value.number.example
        for way in (bool(example), not example):
            if jump is not None and example is not None:
                place = Place(frame.code, jump.offset, way)
                if place not in self.refuted and self.recorder.check(value, Check(place)):
                    return way
        return self._undecided(value)

    def decided(self, value: Tracker) -> bool | None:
        """What a number in a small tensor from outside decides; it is guarded."""
        found = decision_of(self.recorder, value)
        if found is None or found[0] in self.changing or self.decisions[found[0]] >= MAX_DECISIONS:
            return None
        self.decisions[found[0]] += 1
        self.guard(Kind.DECIDES, *found)
        return found[1].expected

    def _undecided(self, value: Tracker) -> bool:
        known = self.decided(value)
        if known is not None:
            return known
        if isinstance(value, trackers.ItemTracker):
            value.needed(self)
        if isinstance(value, trackers.SizeTracker) and (known := self.varying.decide(self.recorder, value)) is not None:
            return known
        self.graph_break("B012", value=value.show())

    def iterate(self, value: Tracker) -> list[Tracker]:
        return trackers.iterate(self, value)

    def next_or_none(self, iterator: Tracker) -> Tracker | None:
        """The next item, or None at the end."""
        self._tail = False
        return trackers.next_or_none(self, iterator)

    # -- modes

    def grad_enabled(self) -> bool:
        """Grad mode at this point of the program."""
        self.recorder.guard_modes()
        return self.recorder.grad_mode

    def set_grad_enabled(self, flag: bool) -> None:
        """Switch grad mode for what follows; the graph carries the switch, and the region restores or hands over the mode at its end."""
        self.recorder.set_grad_mode(flag)

    # -- the graph and effects

    def node(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, method: bool = False) -> Tracker:
        self.limit = min(self.count + MAX_IDLE, MAX_INSTRUCTIONS)
        return self.recorder.node(target, args, kwargs, method)

    def number_input(self, number: trackers.ConstTracker | trackers.HostNumber) -> trackers.NumberInput:
        return self.recorder.number_input(number)

    def size_node(self, tensor: trackers.TensorTracker, method: str, args: tuple[Any, ...], read: Callable[[TensorMeta], int]) -> Tracker:
        return self.recorder.size_node(tensor, method, args, read)

    def number(self, fn: Callable[..., Any], *args: Tracker) -> Tracker:
        return self.recorder.number(fn, args)

    def settle(self, number: Tracker) -> None:
        if isinstance(number, trackers.SizeTracker) and self.varying.knows(self.recorder, number) and self.varying.settle(number.number):
            self.restart_knowing()

    def known(self, tensor: trackers.TensorTracker) -> Any:
        return self.recorder.known(tensor)

    def selects(self) -> bool:
        return not (self.recorder.transformed or hasattr(self.recorder, "around"))

    def select(self, copy: trackers.TensorTracker, base: trackers.TensorTracker, code: int | None = None, *found: Any) -> None:
        self.recorder.select(copy, base, code, *found)

    def selected(self, value: Tracker, base: trackers.TensorTracker, parts: Sequence[Tracker]) -> bool:
        return any(one.copy is value and one.base is base and one.parts == parts for one in self.recorder.selected)

    def has_written(self, tensor: trackers.TensorTracker) -> bool:
        """Whether the graph has written the tensor's memory."""
        return any(one in self.recorder.mutated for one in tensor.memory or (tensor,))

    def restart_at(self, count: int, id: str, **fields: Any) -> NoReturn:
        """A break at an instruction that has been captured already: capture starts again."""
        raise Restart(count, GraphBreak(id, self.user_stack(), **fields), False)

    def restart_before(self, callee: str, reason: str) -> NoReturn:
        """A break at the current instruction, when the state before it is no longer at hand: capture starts again."""
        raise Restart(self.frames[-1].count, GraphBreak("B101", self.user_stack(), callee=callee, reason=reason), False)

    def restart_knowing(self) -> NoReturn:
        """Capture starts again, knowing something more; nothing breaks for it."""
        raise Restart(min([0, *self.forced]) - 1, None, False)

    def speculate(self, name: str, *, grad_mode: bool, transformed: bool = False) -> Speculation:
        """A context in which bodies are captured apart from the region's graph (`speculate.py`)."""
        return Speculation(self, name, grad_mode=grad_mode, transformed=transformed)

    def mode_node(self, fn: Callable[..., Any], *consts: Any) -> None:
        self.recorder.mode_node(fn, *consts)

    def effect(self, text: str, *operands: Tracker) -> None:
        self.effects.append((text, operands))


def _cut_cycle(raised: Tracker, context: Tracker | None) -> None:
    """An exception raised again where its own consequence is handled leaves the chain of contexts there, as CPython has it. (The program may have made a chain
    that runs in a circle.)"""
    seen: set[Tracker] = set()
    while isinstance(context, trackers.ExceptionTracker) and context.context is not raised and context not in seen:
        seen.add(context)
        context = context.context
    if isinstance(context, trackers.ExceptionTracker) and context not in seen:
        context.context = None
