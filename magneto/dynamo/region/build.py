"""From a finished capture to a region: the graph handed to the backend, the generated function, its guards. Everything is text and data until the last step."""

from __future__ import annotations

import ast
import builtins
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from magneto import _C
from magneto.base.dataclass import dataclass, field
from magneto.base.errors import GraphBreak
from magneto.base.text import compile_source, indent
from magneto.dynamo import trackers
from magneto.dynamo.bytecode.decode import Instruction
from magneto.dynamo.bytecode.liveness import live_slots
from magneto.dynamo.guards.rows import GuardSet, Kind, Row
from magneto.dynamo.guards.source import Held, Local, Source, Stack, of_module
from magneto.dynamo.guards.text import holds_later
from magneto.dynamo.machine.assume import IN_GRAPH, Drawn, Written, assume
from magneto.dynamo.machine.frame import NULL, SymFrame
from magneto.dynamo.machine.lifetime import looks_at_the_heap
from magneto.dynamo.machine.machine import SymbolicMachine
from magneto.dynamo.machine.signals import Ending, Restart
from magneto.dynamo.region import runtime
from magneto.dynamo.region.emit import LET_GO, RegionEmitter, let_go
from magneto.dynamo.region.forms import FORMS, FormContext, Outcome, has_form
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.context import GradModeTracker, InferenceModeTracker
from magneto.dynamo.trackers.existing_iterator import merged
from magneto.dynamo.trackers.lazy_number import NAMES as NUMBER_NAMES
from magneto.dynamo.trackers.lazy_number import typed
from magneto.dynamo.trackers.lifted import as_tensor
from magneto.dynamo.trackers.reference import can_be_watched
from magneto.dynamo.trackers.rules_tensor_state import GRADIENT_FREED
from magneto.graph.modes import modes

_numbers = itertools.count()
_BASE = {
    "__builtins__": dict(vars(builtins)),  # generated text means these, whatever the program has put in their place
    "Resume": _C.Resume,
    "UNBOUND": _C.UNBOUND,
    "KEEP": _C.KEEP,
    "NULL": _C.NULL_,
    "call_active": _C.call_active,
    "materialise": _C.materialise,
    "exception_now": sys.exception,
    "handled_here": getattr(_C, "handled_here", None),
    "END": runtime.END,
    "advance": _C.iterator_advance,
    "suspend": getattr(_C, "suspend", None),
    "finish": getattr(_C, "finish", None),
    "put": runtime.put,
    "as_tensor": as_tensor,
    "typed": typed,
    **NUMBER_NAMES,
    "match_group": runtime.match_group,
    "left_of_group": getattr(_C, "left_of_group", None),
    "put_back": trackers.put_back,
    "seed_torch": torch.manual_seed,
    "clean": runtime.clean,
    "enter": runtime.enter,
    "set_grad": torch._C._set_grad_enabled,
    "empty_like": torch.empty_like,
}
_RESERVED = set("inputs r e s graph before modes streams Streams random random_state assume written Written leaves leaf empty_like".split())


@dataclass(slots=True)
class RegionPlan:
    """A captured region as data: `text` defines `name`; `slots` + `exports`, and `packed` as one tuple if there are any, are its arguments in order."""

    name: str
    text: str
    namespace: dict[str, Any]
    slots: tuple[int, ...]
    exports: tuple[Source, ...]
    packed: tuple[Source, ...]
    guards: GuardSet
    gm: fx.GraphModule | None
    example_inputs: list[torch.Tensor]
    machine: SymbolicMachine
    ending: Ending
    code: types.CodeType
    offset: int
    info: dict[str, Any] = field(default_factory=dict)


def plan_region(machine: SymbolicMachine, ending: Ending) -> RegionPlan:
    """Write the region function of a finished capture. Raises Restart when a live value cannot be rebuilt."""
    return _Builder(machine, ending).build()


class _Builder:
    def __init__(self, machine: SymbolicMachine, ending: Ending) -> None:
        self.machine = machine
        self.ending = ending
        state = machine.state
        namespace: dict[str, Any] = dict(_BASE)
        self.em = RegionEmitter(
            _RESERVED | set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__), namespace, machine.made
        )
        self.namespace = namespace
        stem = "".join(c if c.isalnum() else "_" for c in state.code.co_name).strip("_") or "code"
        self.name = f"{stem}_at_{state.offset}"
        self.packed: tuple[Source, ...] = ()

    def build(self) -> RegionPlan:
        machine, em = self.machine, self.em
        try:
            for draw in machine.draws:
                em.value(draw)
            checks = self._checks()
            freed = [em.value(operands[0]) for text, operands in machine.effects if text is GRADIENT_FREED]
            for text, operands in merged(machine.effects[len(freed) :]):
                em.line(text.format(*[em.value(operand) for operand in operands]))
            recorder = machine.recorder
            grad_mode = recorder.initial_grad_mode
            for context in machine.contexts:
                if isinstance(context, GradModeTracker) and context.previous is not None:
                    if context.previous != grad_mode:  # it remembers the mode that it finds
                        em.line(f"set_grad({context.previous})")
                    grad_mode = context.flag
                if isinstance(context, InferenceModeTracker):
                    grad_mode = not context.flag
                em.line(f"{em.value(context)}.__enter__()")
            if recorder.grad_mode != grad_mode or recorder.grad_mode != recorder.initial_grad_mode:
                em.line(f"set_grad({recorder.grad_mode})")
            for switch, value in recorder.attention_changed().items():
                em.line(f"{em.const(switch.setter, 'set_attention')}({switch.argument(value)!r})")
            self._end()
        except trackers.CannotEmit as problem:
            born = getattr(problem.tracker, "born", None)
            if born is None:
                born = machine.frames[-1].count
            raise Restart(born, machine_break(machine, problem), False) from None
        machine.check_generators(em.emitted)
        head, gm, examples = self._graph_call()
        self._guard_distinct()
        for held in em.borrows:
            machine.guards.add(Row(Kind.PRESENT, held, None, *machine.read_at()))
        arguments = list(em.arguments.items())
        direct = [(source, name) for source, name in arguments if isinstance(source, (Local, Stack))]
        exported = [(source, name) for source, name in arguments if not isinstance(source, (Local, Stack))]
        parameters = ", ".join([*(name for _, name in direct + exported), *["inputs"] * bool(self.packed)])
        body = [self._comment(), *self._undone([*em.early_lines, *_freed_before(freed, [*head, *checks])]), *em.lines]
        text = f"def {self.name}({parameters}):\n" + indent("\n".join(let_go(parameters, body)), 4) + "\n"
        n_locals = len(machine.state.locals)
        slots = tuple(source.slot if isinstance(source, Local) else n_locals + source.index for source, _ in direct)  # type: ignore[union-attr]
        exports = tuple(source for source, _ in exported)
        return RegionPlan(
            self.name, text, self.namespace, slots, exports, self.packed, machine.guards, gm, examples, machine, self.ending,
            machine.state.code, machine.state.offset,
        )  # fmt: skip

    def _undone(self, lines: list[str]) -> list[str]:
        """What comes before the effects, in a region that draws random numbers: when it fails, the generators are put back."""
        owners = list(dict.fromkeys(self.em.value(owner) for call in self.machine.draws for owner in call.owners))
        if not owners or (len(lines) == len(self.machine.draws)):
            return lines
        self.em.namespace["Streams"] = runtime.Streams
        guarded = ["try:", *[f"    {line}" for line in lines], "except BaseException:", "    streams.put_back()", "    raise"]
        return [f"streams = Streams({', '.join(owners)})", *guarded]

    def _comment(self) -> str:
        state = self.machine.state
        reason = self.ending.reason
        end = "returns" if self.ending.value is not None else f"break {reason.id} {reason.where}" if reason is not None else "raises"
        text = f"# {state.code.co_qualname} from offset {state.offset} ({state.code.co_filename}:{state.code.co_firstlineno}); {end}"
        return text + (f"\n# {len(self.packed)} inputs: {self.packed[0].text()} ... {self.packed[-1].text()}" if self.packed else "")

    def _checks(self) -> list[str]:
        """Lines that check what capture has assumed of the graph's results, before anything happens that cannot be taken back."""
        assumptions, recorder, em = self.machine.assumptions, self.machine.recorder, self.em
        if not assumptions or IN_GRAPH in self.machine.forced:
            return []
        written = [tracker for _, tracker in recorder.inputs if tracker in recorder.mutated]
        if not all(map(_can_be_put_back, written)) or sum(tracker.plain().nbytes for tracker in written) > MAX_COPIED:
            if all(_writes_unrecorded(tracker) for tracker in written):
                raise Restart(IN_GRAPH, None, False)
            first = assumptions[0]
            raise Restart(first.count, first.reason, False)
        self.namespace["assume"] = assume
        random = ""
        if recorder.random_nodes:
            em.early_lines.append("random = random_state()")
            self.namespace["random_state"] = Drawn
            random = ", random"
        if written:
            em.early_lines.append(f"written = Written({', '.join(self._input(tracker) for tracker in written)})")
            self.namespace["Written"] = Written
            random += ", written=written"
        effects, em.lines = em.lines, []
        for found in assumptions:
            place = em.const(found.place, "place")
            em.line(f"assume({em.value(found.condition)}, {found.expected}, {place}{random})")
        checks, em.lines = em.lines, effects
        return checks

    # -- the graph

    def _graph_call(self) -> tuple[list[str], fx.GraphModule | None, list[torch.Tensor]]:
        recorder, em = self.machine.recorder, self.em
        outputs = [node for node, _ in em.outputs]
        recorder.check_history(outputs)
        self._put_modes_back()
        guard_sizes = self.machine.varying.finish(recorder)
        recorder.prune(outputs)
        guard_sizes()
        if self.machine.varying.again:
            self.machine.restart_knowing()
        calls = [node for node in recorder.graph.nodes if node.op in ("call_function", "call_method")]
        if not calls:
            return [], None, []
        recorder.graph.output(tuple(outputs))
        gm = _LazyGraphModule(torch.nn.Module(), recorder.graph, class_name="CapturedGraph")  # its code is for those who call it
        gm.meta["magneto"] = {
            "name": self.name,
            "stack": tuple(frame.where() for frame in self.machine.frames),
            "grad_enabled": recorder.initial_grad_mode,
            "parameter_inputs": tuple(k for k, (_, t) in enumerate(recorder.inputs) if isinstance(t.obj, torch.nn.Parameter)),
            "state_inputs": tuple(k for k, (_, t) in enumerate(recorder.inputs) if of_module(t.source) and t not in recorder.mutated),
            "backward_holds": holds_later(self.machine.read_by_backward, self.machine.asks_whole),
            "asks_whole": self.machine.asks_whole,
            "mutated_inputs": tuple(k for k, (_, t) in enumerate(recorder.inputs) if t in recorder.mutated),
            "shows_history": em.shows_history or (self.ending.reason is not None and self.ending.reason.asks_history),
            **self.machine.varying.told([node for node, _ in recorder.inputs]),
        }
        call = f"graph({', '.join(self._arguments([tracker for _, tracker in recorder.inputs]))})"
        arrays = [tracker for _, tracker in recorder.inputs if isinstance(tracker, trackers.ArrayMemory)]
        if arrays and recorder.mutated:
            em.namespace["apart"] = runtime.apart
            tensors = [tracker for _, tracker in recorder.inputs if not isinstance(tracker, trackers.MadeInput)]
            call = f"apart({', '.join(self._input(tracker) for tracker in tensors)}) or {call}"
        targets = "".join(f"{name}, " for _, name in em.outputs).rstrip()
        line = f"{targets} = {call}" if targets else call
        if recorder.mode_changed:
            em.namespace["modes"] = modes
            head = ["before = modes()", "try:", f"    {line}", "except BaseException:", "    before.restore()", "    raise"]
        else:
            head = [line]
        return head, gm, [tracker.plain() for _, tracker in recorder.inputs]

    def _put_modes_back(self) -> None:
        """At the graph's end modes are what they were at its beginning."""
        recorder = self.machine.recorder
        position = {node: index for index, node in enumerate(recorder.graph.nodes)}
        while (
            recorder.autocasts or recorder.inferences
        ):  # the last entered first: inference mode puts back the thread's keys, autocast's among them
            autocast, inference = recorder.autocasts[-1:], recorder.inferences[-1:]
            if not inference or (autocast and position[autocast[0][0]] > position[inference[0][0]]):
                recorder.exit_autocast()
            else:
                recorder.exit_inference()
        if recorder.grad_mode != recorder.initial_grad_mode:
            recorder.mode_node(torch._C._set_grad_enabled, recorder.initial_grad_mode)
        for switch in recorder.attention_changed():
            recorder.set_attention(switch, recorder.initial_attention[switch])

    def _arguments(self, inputs: list[trackers.TensorTracker]) -> list[str]:
        """The graph's arguments. Many tensors in a row that the guards have found anyway come as one tuple, which costs less than a name for each."""
        runs = [list(run) for _, run in itertools.groupby(inputs, lambda tracker: tracker.given() is not None)]
        longest = max(runs, key=lambda run: (run[0].given() is not None) * len(run), default=[])
        sources = [tracker.given() for tracker in longest]
        if len(sources) < MANY or None in sources:
            return [self._input(tracker) for tracker in inputs]
        self.packed = tuple(source for source in sources if source is not None)
        return [text for run in runs for text in (["*inputs"] if run is longest else map(self._input, run))]

    def _input(self, tracker: trackers.TensorTracker) -> str:
        """What the graph is given for one of its placeholders."""
        if isinstance(tracker, trackers.MadeInput):
            return self.em.made(tracker)
        return tracker.graph_input(self.em) if isinstance(tracker, trackers.TensorTracker) else self.em.source(tracker.source)

    def _guard_distinct(self) -> None:
        """A region that writes to objects holds only while what it took for different objects are different objects.

        Tensors that already share memory at capture are left alone: the backend sees the real tensors and decides.
        """
        machine = self.machine
        recorder = machine.recorder
        apart: set[Tracker] = set()
        if recorder.mutated:
            tensors = [tracker for _, tracker in recorder.inputs if tracker.source is not None]
            if len(tensors) > 1 and _in_memory_of_their_own(tensors):
                self._distinct(tensors)
                apart.update(tensors)
        keys: dict[type, list[Tracker]] = {}
        for key in machine.keys_by_identity:
            if not isinstance(key, trackers.ModuleTracker) or machine.changing:
                keys.setdefault(key.python_type(), []).append(key)
        for alike in keys.values():
            if len(alike) < 2 or apart.issuperset(alike) or all(isinstance(key.source, Held) for key in alike):
                continue
            if _in_memory_of_their_own([key for key in alike if isinstance(key, trackers.TensorTracker)]):
                self._distinct(alike)
                continue
            for key in alike:
                if not isinstance(key.source, Held):
                    machine.guards.add(Row(Kind.ID_IS, key.source, key.obj, *machine.read_at()))
        written = {id(operands[0]): operands[0] for _, operands in machine.effects if operands and operands[0].source is not None}
        for tracker in written.values():
            if isinstance(tracker, trackers.ObjectSet) and (several := tracker.different()):
                self._distinct(several)
        by_type: dict[type, list[Tracker]] = {}
        for tracker in machine.wrapped.values():
            if tracker.source is not None and not isinstance(tracker.source, Held):
                by_type.setdefault(tracker.python_type(), []).append(tracker)
        for kind in {tracker.python_type() for tracker in written.values()}:
            peers = by_type.get(kind, [])
            if len(peers) > 1:
                self._distinct(peers)

    def _distinct(self, values: Sequence[Tracker]) -> None:
        sources = [tracker.source for tracker in values]
        self.machine.guards.add(Row(Kind.DISTINCT, sources[0], tuple(sources[1:]), *self.machine.read_at()))

    # -- ends

    def _end(self) -> None:
        if self.ending.value is not None:
            self.em.line(f"return {self.em.value(self.ending.value)}")
            return
        frames = self.machine.frames
        innermost = frames[-1]
        assert innermost.current is not None
        outer_stacks = [[self.em.value(value) for value in frame.stack] for frame in frames[:-1]]
        for value in innermost.before:
            if value is not NULL:
                self.em.value(value)
        locals_text = [self._locals(depth, frame) for depth, frame in enumerate(frames)]
        instruction = innermost.current
        handling = [self._handling(frame.entered) for frame in frames[1:]] + [self._handling(self.machine.handling.value)]
        looked_at = self._looked_at()
        if looked_at and len(frames) > 1:
            raise Restart(frames[0].count, self.ending.reason, False)
        advanced = len(frames) > 1 or _resume_offset(innermost) != self.machine.state.offset
        behind = advanced and self.ending.reason is not None and self.ending.reason.id == "B120"
        formless = not behind and (self.ending.interpret or not has_form(innermost, instruction))
        if formless or behind or handling[-1] or looked_at or self._keeps_alive() or self._called_from_elsewhere():
            self._resume_at(innermost, locals_text[-1], f"{', interpret=True' if formless else ''}{handling[-1]}")
        else:
            outcome = FORMS[instruction.op](FormContext(self.em, innermost, instruction))
            self._execute(innermost, instruction, outcome, locals_text[-1])
        for depth in range(len(frames) - 2, -1, -1):
            self._materialise(frames[depth], frames[depth + 1], locals_text[depth], outer_stacks[depth], handling[depth])
        self.em.line("return s")

    def _keeps_alive(self) -> bool:
        """Whether the frame still holds objects that the program has let go of in this region and whose death it may see (weak references, finalisers):
        the instruction that breaks is then left to the next region, when the frame has been written."""
        frames = self.machine.frames
        kept = {id(value) for frame in frames for value in (*frame.locals, *frame.stack, *frame.before)}
        entered = [value for value in (*frames[0].entry, *self.machine.entry_stack) if value is not None and id(value) not in kept]
        return any(_dies_visibly(value) for value in entered)

    def _looked_at(self) -> bool:
        """Whether what breaks can tell that an object which the program has let go of in this region is still held by it."""
        machine = self.machine
        if len(machine.frames) == 1 and _resume_offset(machine.frames[0]) == machine.state.offset:
            return False  # the region has done nothing yet
        return bool(machine.references) or looks_at_the_heap(machine.frames[-1])

    def _called_from_elsewhere(self) -> bool:
        """Whether the innermost frame belongs to another module than its caller, whose name this region's function bears: the frame then runs on as
        itself before anything that it calls looks at its callers."""
        frames = self.machine.frames
        return len(frames) > 1 and frames[-1].globals is not frames[-2].globals and not _asks_a_tensor(frames[-1])

    def _handling(self, value: Tracker | None) -> str:
        """What a Resume says of the exception being handled: nothing, unless a handler was entered or left in this region. The instruction that breaks
        is then left to the next region, so that what it calls sees the right exception."""
        return f", handling={self.em.value(value)}" if value is not None and value is not self.machine.outside else ""

    def _locals(self, depth: int, frame: SymFrame) -> str:
        """Name of the tuple of all slots of a frame at the break."""
        assert frame.current is not None
        live = live_slots(frame.code, frame.current.offset)
        frees = len(frame.locals) - len(frame.code.co_freevars)
        parts = []
        for slot, tracker in enumerate(frame.locals):
            entry = frame.entry[slot] if depth == 0 else None
            if depth == 0 and tracker is entry and not (self.machine.state.offset == 0 and slot >= frees):
                parts.append("KEEP")
            elif tracker is None or (slot not in live and not self._lives_on(tracker)):
                parts.append("UNBOUND")
            else:
                parts.append(self.em.value(tracker))
        text = ", ".join(parts)
        name: str = self.em.assign(f"locals_{depth}", f"({text}{',' if len(parts) == 1 else ''})")
        return name

    def _lives_on(self, value: Tracker) -> bool:
        """Whether a variable that is not read any more must keep its object alive: others know the object, and could see it die."""
        if value.source is not None:
            return _dies_visibly(value)
        if isinstance(value, trackers.MadeClassTracker) and value.obj.__base__ is not object:
            return True  # its bases know it
        return isinstance(value, trackers.ObjectTracker) and self.em.emitted(value)

    def _resume_at(self, frame: SymFrame, locals_name: str, options: str) -> None:
        """Resume at the instruction itself."""
        stack = _tuple([self.em.value(value) for value in frame.before])
        self.em.line(f"s = Resume({_resume_offset(frame)}, {locals_name}, {stack}{options})")

    def _execute(self, frame: SymFrame, instruction: Instruction, outcome: Outcome, locals_name: str) -> None:
        line = self.em.line
        depth = self._handler_depth(frame, instruction)
        stack_at_throw = _tuple([self.em.value(value) for value in frame.before[:depth]])
        line("try:")
        line(f"    {outcome.expr}" if outcome.raises else f"    r = {outcome.expr}")
        line("except BaseException as e:")
        line(f"    s = Resume({instruction.offset}, {locals_name}, {stack_at_throw}, clean(e))")
        if outcome.raises:
            return
        line("else:")
        resume = f"Resume({outcome.offset}, {locals_name}, {_tuple(outcome.stack)}{outcome.handling})"
        if outcome.condition:
            assert outcome.other_stack is not None
            other = f"Resume({outcome.other_offset}, {locals_name}, {_tuple(outcome.other_stack)})"
            resume = f"{other} if {outcome.condition} else {resume}"
        line(f"    s = {resume}")

    def _materialise(self, outer: SymFrame, inner: SymFrame, locals_name: str, stack: list[str], handling: str) -> None:
        """The inner frame runs on as a frame of its own; its result goes on the outer frame's stack."""
        assert outer.current is not None
        function = self.em.const(_clone_function(inner), f"rest_of_{inner.code.co_name}")
        line, result = self.em.line, self.em.fresh("result")
        line(LET_GO)
        line("try:")
        line(f"    {result} = materialise({function}, s)")
        line("except BaseException as e:")
        line(f"    s = Resume({outer.current.offset}, {locals_name}, {_tuple(stack)}, clean(e){handling})")
        line("else:")
        line(f"    s = Resume({outer.current.next}, {locals_name}, {_tuple([*stack, result])}{handling})")

    def _handler_depth(self, frame: SymFrame, instruction: Instruction) -> int:
        handler = frame.decoded.handler_at(instruction.offset)
        return handler.depth if handler is not None else 0


def _resume_offset(frame: SymFrame) -> int:
    """Where to resume so that the current instruction is executed; a CALL goes back to its KW_NAMES, whose effect the interpreter keeps outside the frame."""
    instruction = frame.current
    assert instruction is not None
    first = frame.decoded.index[instruction.offset]
    instructions = frame.decoded.instructions
    while first and instructions[first - 1].op in ("KW_NAMES", "PRECALL") and instruction.op in ("CALL", "PRECALL"):
        first -= 1
    return instructions[first].offset


def _freed_before(tensors: list[str], lines: list[str]) -> list[str]:
    """`lines`, in front of which tensors lose their gradients, as the program does. When they fail, the interpreter runs the frame from its start: it finds tensors that have a
    gradient, whose numbers nobody reads before the program drops it."""
    if not tensors:
        return lines
    freed = ["for leaf in leaves:", "    leaf.grad = None"]
    again = ["except Exception:", "    for leaf in leaves:", "        leaf.grad = empty_like(leaf, requires_grad=False)", "    raise"]
    return [f"leaves = ({', '.join(tensors)},)", *freed, *(["try:", *(f"    {line}" for line in lines), *again] if lines else [])]


MANY = 16  # inputs of a graph that come as one tuple
MAX_COPIED = 1 << 20  # bytes that a region copies in each call, for the case that a check fails


def _in_memory_of_their_own(tensors: Sequence[trackers.TensorTracker]) -> bool:
    try:
        return len({tracker.plain().untyped_storage().data_ptr() for tracker in tensors}) == len(tensors)
    except RuntimeError:  # sparse
        return False


def _can_be_put_back(tracker: Tracker) -> bool:
    """Whether the region can take back a write to an input: autograd knows nothing of it."""
    return type(tracker) is trackers.TensorTracker and not tracker.meta.requires_grad


def _writes_unrecorded(tracker: Tracker) -> bool:
    """Whether a graph that fails has put back its write to an input: autograd has recorded nothing of it."""
    return type(tracker) is trackers.TensorTracker and (not tracker.meta.requires_grad or tracker.meta.is_leaf)


def _asks_a_tensor(frame: SymFrame) -> bool:
    """Whether the instruction takes a tensor's truth value: that looks at no frame."""
    assert frame.current is not None
    top = frame.before[-1] if frame.before else None
    return frame.current.op.startswith(("POP_JUMP", "TO_BOOL")) and isinstance(top, trackers.TensorTracker) and top.cls is torch.Tensor


def _dies_visibly(value: Tracker) -> bool:
    """Whether weak references can tell when an existing object, or one in a container, dies. Tensors and modules are left out: they are kept a little longer."""
    return not isinstance(value, trackers.ConstTracker) and value.obj is not MISSING and can_be_watched(value.obj)


def machine_break(machine: SymbolicMachine, problem: trackers.CannotEmit) -> Any:
    return getattr(problem.tracker, "reason", None) or GraphBreak("B022", machine.user_stack(), value=problem.tracker.show())


def _tuple(parts: list[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _clone_function(frame: SymFrame) -> Callable[..., Any]:
    """A function over the no-argument clone of an inlined callee's code; its cells are given by the state that is filled in."""
    code = _C.clone_code(frame.code)
    closure = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, frame.globals, frame.code.co_name, None, closure)


def finish_region(plan: RegionPlan, graph: Callable[..., Any] | None, program: Any) -> Any:
    """Compile the region's text and make the hook's Region."""
    namespace = plan.namespace
    if graph is not None:
        namespace["graph"] = graph
    if plan.ending.value is None:
        function = _in_the_programs_name(plan)
    else:
        function = compile_source(f"{plan.name}_{next(_numbers)}", plan.text, namespace)[plan.name]
    return _C.Region(function, plan.slots, program, plan.info, tuple(plan.machine.codes.values()))


def _in_the_programs_name(plan: RegionPlan) -> Callable[..., Any]:
    """The region function as code of the program's own file, line and function: what is called at the break, and looks at its caller (a warning's
    stacklevel, a logger, `namedtuple`), finds the program there."""
    frames = plan.machine.frames
    frame = frames[-2] if len(frames) > 1 and frames[-1].globals is not frames[-2].globals else frames[-1]
    file, line, _ = frame.where()
    tree = ast.parse(plan.text)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    plan.namespace["__name__"] = frame.globals.get("__name__")
    exec(compile(tree, file, "exec", dont_inherit=True), plan.namespace)
    function: types.FunctionType = plan.namespace[plan.name]
    function.__code__ = function.__code__.replace(co_name=frame.code.co_name, co_qualname=frame.code.co_qualname)
    return function
