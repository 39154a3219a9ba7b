"""Capturing the body of a call apart from the region's graph: what a transform transforms, what a custom autograd function computes.

The body runs symbolically on the machine itself, with a recorder of its own. It must leave no traces but guards: an effect, a change to a value made in the region, or an
exception restarts capture with a break at the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from magneto.dynamo import trackers
from magneto.dynamo.machine.frame import SymFrame
from magneto.dynamo.machine.recorder import Recorder
from magneto.dynamo.machine.signals import CapturedRaise
from magneto.dynamo.trackers.base import MISSING, Later, Tracker
from magneto.graph.higher import Body, Slot
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine


class BodyRecorder(Recorder):
    """Records a body. A tensor of the graph around it becomes a placeholder at its first use (`lifted`); its metadata stay what they were."""

    def __init__(self, machine: SymbolicMachine, around: Recorder, grad_mode: bool, transformed: bool) -> None:
        super().__init__(machine)
        self.around = around
        self.takes_unknown = self.takes_varying = False
        self.initial_grad_mode = self.grad_mode = grad_mode
        self.autocasts = list(around.autocasts)
        self.initial_attention, self.attention = dict(around.attention), dict(around.attention)
        self.inference_mode, self.inference_tensors = around.inference_mode, around.inference_tensors
        self.transformed = transformed or around.transformed
        self.lifted: dict[int, tuple[trackers.TensorTracker, fx.Node]] = {}
        self._placeholders = 0
        self._metas: list[tuple[trackers.TensorTracker, TensorMeta]] = []

    def guard_modes(self) -> None:
        self.around.guard_modes()

    def guard_attention(self) -> None:
        if not self.attention:
            self.around.guard_attention()
            self.initial_attention, self.attention = dict(self.around.attention), dict(self.around.attention)

    def leaf(self, meta: TensorMeta, cls: type) -> trackers.TensorTracker:
        """A tensor that the body is given."""
        return trackers.TensorTracker(meta, cls, self.placeholder(self._name("arg"), meta))

    def input_node(self, tracker: trackers.TensorTracker) -> fx.Node:
        if tracker.node is not None and tracker.node.graph is self.graph:
            return tracker.node
        known = self.lifted.get(id(tracker))
        if known is None:
            name = tracker.node.name.rstrip("_0123456789") if tracker.node is not None else "outside"
            known = self.lifted[id(tracker)] = (tracker, self.placeholder(self._name(name), tracker.meta))
            self._metas.append((tracker, tracker.meta))
        return known[1]

    def _name(self, hint: str) -> str:
        self._placeholders += 1
        return f"{hint}_{self._placeholders}"

    def number_input(self, number: trackers.ConstTracker | trackers.HostNumber) -> trackers.NumberInput:
        return self.around.number_input(number)

    def known(self, tracker: trackers.TensorTracker) -> torch.Tensor | None:
        own = tracker.node is not None and tracker.node.graph is self.graph
        return super().known(tracker) if own else self.around.known(tracker)

    def wrote_outside(self) -> bool:
        """Whether a tensor of the graph around was written (not through a view)."""
        return any(id(tracker) in self.lifted for tracker in self.mutated)

    def restore(self) -> None:
        """What the body's own writes made known of tensors outside is forgotten: the node that stands for the call says it."""
        for tracker, meta in self._metas:
            tracker.meta = meta


class Speculation:
    """One body being captured. A context manager round everything that runs on its recorder."""

    def __init__(self, machine: SymbolicMachine, name: str, *, grad_mode: bool, transformed: bool) -> None:
        self.machine = machine
        self.name = name
        self.recorder = BodyRecorder(machine, machine.recorder, grad_mode, transformed)

    def __enter__(self) -> Speculation:
        self.machine.recorder = self.recorder
        return self

    def __exit__(self, *error: object) -> None:
        self.machine.recorder = self.recorder.around
        self.recorder.restore()

    def refuse(self, reason: str) -> NoReturn:
        """A break at the call, from the state before it: capture starts again."""
        self.machine.restart_before(self.name, reason)

    def call(self, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker], own: Sequence[Tracker] = ()) -> Tracker:
        """Run a function of the body symbolically; whatever it leaves behind is refused, but for changes to the arguments `own`."""
        machine = self.machine
        reachable = [value for value in (fn, *args, *kwargs.values()) if not any(value is mine for mine in own)]
        before = made_values(machine, reachable)[0]
        n_effects, contexts, autocasts = len(machine.effects), list(machine.contexts), len(self.recorder.autocasts)
        try:
            value = machine.call(fn, args, kwargs)
        except CapturedRaise as raised:
            self.refuse(f"it raises {raised.value.show()}")
        if len(machine.effects) != n_effects:
            text, operands = machine.effects[n_effects]
            self.refuse(f"a side effect, {text.format(*[operand.show() for operand in operands])}")
        if contexts != machine.contexts or autocasts != len(self.recorder.autocasts) or self.recorder.attention_changed():
            self.refuse("it leaves a mode of torch switched")
        if before != made_values(machine, reachable)[0]:
            self.refuse("it changes a value made outside of it")
        return value

    def finish(self, takes: Any, value: Tracker) -> tuple[Body, list[trackers.TensorTracker]]:
        """The body's graph as a callable, and the tensors it reads from outside."""
        outputs: list[fx.Node] = []
        gives = self._template(value, outputs)
        recorder = self.recorder
        used = set(outputs) | recorder.keep | recorder.raising
        for node in reversed(list(recorder.graph.nodes)):
            if node.op != "placeholder" and node not in used and not node.users:
                recorder.graph.erase_node(node)
        recorder.graph.output(tuple(outputs))
        gm = fx.GraphModule({}, recorder.graph, class_name="Body")
        return Body(gm, takes, gives), [tracker for tracker, _ in recorder.lifted.values()]

    def _template(self, value: Tracker, outputs: list[fx.Node]) -> Any:
        """The result's structure with slots for tensors."""
        if isinstance(value, trackers.TensorTracker):
            outputs.append(self.recorder.input_node(value))
            return Slot(len(outputs) - 1)
        if isinstance(value, trackers.TupleTracker) and hasattr(value.cls, "_fields"):
            return value.cls(*[self._template(item, outputs) for item in value.items(self.machine)])
        if isinstance(value, trackers.TupleTracker | trackers.ListTracker) and value.cls in (tuple, list):
            return value.cls(self._template(item, outputs) for item in value.items(self.machine))
        if isinstance(value, trackers.DictTracker) and value.cls is dict:
            pairs = [(key.try_const(), item) for key, item in value.pairs(self.machine)]
            keys = [key.value for key, _ in pairs if key is not None]
            if len(keys) == len(pairs):
                return {key: self._template(item, outputs) for key, (_, item) in zip(keys, pairs, strict=True)}
        const = value.try_const()
        if const is None:
            self.refuse(f"it returns {value.show()}")
        return const.value


def made_values(machine: SymbolicMachine, reachable: Iterable[Tracker]) -> tuple[dict[int, Any], list[Tracker | Later]]:
    """Contents of the values made in the region that code can reach (existing ones log effects), and all values that were met on the way."""
    found: dict[int, Any] = {}
    met: list[Tracker | Later] = []
    stack: list[Tracker | Later] = [*reachable, *(operand for _, operands in machine.effects for operand in operands)]
    stack += [value for value in machine.overlay.values() if value is not None]
    while stack:
        tracker = stack.pop()
        if id(tracker) in found:
            continue
        met.append(tracker)
        if tracker.source is None and not isinstance(tracker, trackers.TensorTracker):
            found[id(tracker)] = None
            found[id(tracker)] = [_contents(getattr(tracker, slot, None), stack) for slot in _slots(type(tracker))]
    return found, met


_SLOTS: dict[type, tuple[str, ...]] = {}
_CACHES = frozenset({"source", "_shell", "_machine", "born", "views", "arrays"})


def _slots(cls: type) -> tuple[str, ...]:
    known = _SLOTS.get(cls)
    if known is None:
        names = {name for base in cls.__mro__ for name in base.__dict__.get("__slots__", ())}
        known = _SLOTS[cls] = tuple(sorted(names - _CACHES))
    return known


def _contents(value: Any, stack: list[Tracker | Later]) -> Any:
    """A comparable stand-in for a slot's value; trackers met on the way go on the stack. An entry that has been read since is the same entry."""
    if isinstance(value, Tracker):
        if value.source is not None:
            stack.append(value)
            return ("outside", id(value.value if isinstance(value, trackers.ConstTracker) else value.obj))
        if isinstance(value, trackers.ConstTracker):
            return ("constant", type(value.value), repr(value.value))
        stack.append(value)
        return ("made", id(value))
    if isinstance(value, Later):
        stack.append(value)
        return ("outside", id(value.obj))
    if isinstance(value, (list, tuple)):
        return [_contents(item, stack) for item in value]
    if isinstance(value, dict):
        return [(id(key) if not isinstance(key, (str, int, tuple)) else key, _contents(item, stack)) for key, item in value.items()]
    if isinstance(value, SymFrame):
        return (value.pc, _contents(value.locals, stack), _contents(value.stack, stack))
    if hasattr(type(value), "tobytes"):  # an array of numpy
        return id(value), value.tobytes()
    return value if value is None or isinstance(value, (bool, int, str)) else MISSING if value is MISSING else id(value)
