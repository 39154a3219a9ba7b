"""The graph recorder: torch-level calls become FX nodes, their results trackers whose metadata come from fake propagation."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from warnings import WarningMessage

import torch
from torch import fx

from magneto.base.errors import GraphBreak
from magneto.base.heard import taken
from magneto.dynamo import trackers
from magneto.dynamo.guards.rows import Kind, TensorRow
from magneto.dynamo.guards.source import Source
from magneto.dynamo.guards.state import state_payload
from magneto.dynamo.machine.assume import check_node
from magneto.dynamo.machine.known import known_result, known_value
from magneto.dynamo.machine.selected import Selected, Selections
from magneto.dynamo.machine.signals import Restart
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.rules_output import repeat_warnings
from magneto.graph import (
    EXAMPLE,
    DataDependent,
    FakeResult,
    Remembered,
    Sizes,
    SizeUnknown,
    TensorMeta,
    UnknownMeta,
    UnknownNumber,
    UnsupportedFake,
    arithmetic,
    fake_call,
    fake_probes,
)
from magneto.graph.append import append_call
from magneto.graph.modes import ATTENTION, Switch, attention_switched, settle_attention

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine

_LONGEST = 100  # characters of a placeholder's name
MAX_CHECKS = 500  # branches on sizes in one graph: a loop that ends when nothing is left goes on for long
LEAVES_LEFT = -(1 << 30)  # among the forced breaks: tensors that become leaves are left to the next region
_WHOLE = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


class Recorder:
    """The FX graph under construction. `inputs`: placeholders in order with the trackers they stand for."""

    def __init__(self, machine: SymbolicMachine) -> None:
        self.machine = machine
        self.graph = fx.Graph()
        self.inputs: list[tuple[fx.Node, trackers.TensorTracker]] = []
        self.keep: set[fx.Node] = set()
        self.raising: set[fx.Node] = set()
        self.mutated: set[Tracker] = set()
        self.n_calls = self.n_checks = 0
        self.random_nodes: set[fx.Node] = set()
        self.takes_unknown: bool = machine.unknown_sizes
        self.takes_varying = True
        self.made_leaves: list[trackers.TensorTracker] = []  # tensors made here that gather gradients
        self.turned: set[fx.Node] = set()  # those of them that begin to do so behind the operation that made them
        self.stand_ins: set[fx.Node] = set()  # of these, aliases of inputs
        self.frozen: dict[Tracker, tuple[fx.Node, fx.Node]] = {}  # leaves that gather no gradients now: (what stands for them, leaf)
        self.spent: set[fx.Node] = set()  # computed from a graph of autograd that a backward in this region has freed
        self.hooked: list[trackers.Hooked] = []
        self.selected = Selections()
        self.engine: tuple[int, int] | None = (
            None  # while backward is captured: its frame's depth, and how many frames of torch eager has before a hook's
        )
        self.hook_place: tuple[int, GraphBreak] | None = None  # where the hooks of the module that is being called break, if need be
        self.transformed = False  # inside a body that a transform of torch.func runs: tensors are not what they seem
        self.mode_changed = False
        self.initial_grad_mode = self.grad_mode = torch.is_grad_enabled()
        self.shown: list[trackers.TensorTracker] = []
        self.inference_mode = torch.is_inference_mode_enabled()
        self.inference_tensors = self.inference_mode  # whether there may be any
        self.inferences: list[tuple[fx.Node, bool, bool]] = []  # what was entered here, and inference and grad mode before
        self.autocasts: list[tuple[fx.Node, tuple[str, torch.dtype, bool, bool]]] = []
        self.attention: dict[Switch, Any] = {}  # switches of attention as they are here; empty: never asked for
        self.initial_attention: dict[Switch, Any] = {}
        self.sizes = Sizes(machine.unknown_sizes)
        self._remembered = Remembered()
        self._present: dict[fx.Node, TensorMeta | UnknownNumber] = {}  # what is known of a node's tensor now: writes in place change it
        self._numbers: dict[Any, trackers.NumberInput] = {}
        self._sized: dict[Any, trackers.SizedNumber] = {}
        self._guarded_by_contents: dict[fx.Node, trackers.ArrayMemory] = {}
        self._modes_guarded = False
        self._last_placeholder: fx.Node | None = None
        self._names: set[str] = set()

    # -- inputs

    def input_node(self, tracker: trackers.TensorTracker) -> fx.Node:
        """The node of a tensor; a tensor from outside becomes a placeholder at its first use."""
        if tracker.node is not None:
            return tracker.node
        source = tracker.number.source if isinstance(tracker, trackers.NumberInput) else tracker.source
        made = isinstance(tracker, trackers.MadeInput)
        assert source is not None or made, tracker
        name = placeholder_name(source) if source is not None else f"{tracker.hint}_{len(self.inputs)}_"  # type: ignore[attr-defined]
        node = self.placeholder(name, tracker.meta)
        if made and tracker.constant is not None:  # type: ignore[attr-defined]
            node.meta["constant"] = tracker.constant  # type: ignore[attr-defined]
        if isinstance(tracker, trackers.ArrayMemory) and (contents := tracker.contents(self.machine)) is not None:
            node.meta["constant"] = contents
            self._guarded_by_contents[node] = tracker
        self.inputs.append((node, tracker))
        tracker.node = node
        return node

    def placeholder(self, name: str, meta: TensorMeta) -> fx.Node:
        """A placeholder behind the last one."""
        anchor = self._last_placeholder
        context = (
            self.graph.inserting_after(anchor) if anchor is not None else self.graph.inserting_before(next(iter(self.graph.nodes), None))
        )
        name = base = name[:_LONGEST]
        while name in self._names:  # the parameters of the graph's function
            name = f"{base}_{len(self._names)}"
        self._names.add(name)
        with context:
            node = self.graph.placeholder(name)
        node.meta["val"] = meta
        node.meta["stack"] = self.machine.user_stack()
        self._last_placeholder = node
        return node

    def number_input(self, number: trackers.ConstTracker | trackers.HostNumber) -> trackers.NumberInput:
        """The input that stands for a changing number: one for all uses of a source, or of what is computed from one."""
        key = trackers.number_key(number)
        made = self._numbers.get(key)
        if made is None:
            made = self._numbers[key] = trackers.NumberInput(number)
        return made

    def sized_number(self, number: trackers.ConstTracker) -> trackers.SizedNumber | None:
        """The input whose size is a changing number; None where it has to be a constant."""
        found = self._sized.get(number.source)
        if found is None and number.source is not None:
            found = trackers.SizedNumber(number)
            row = TensorRow(torch.Tensor, found.meta.dtype, found.meta.device, found.meta.shape, found.meta.strides, False)
            found.meta, _, symbols = self.machine.varying.enter(found.obj, number.source, found.meta, row)
            for symbol, dim in symbols:
                symbol.places.append((found, dim, found.meta))
            self._sized[number.source] = found
        return found if found is not None and isinstance(found.meta, UnknownMeta) else None

    # -- calls

    def node(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], method: bool) -> Tracker:
        """Record one call. Trackers inside args may be nested in lists, tuples, dicts and slices, tracked or plain."""
        machine = self.machine
        self.guard_modes()
        if _name(target).partition(".")[0] in _ATTENTION:
            self.guard_attention()
        kwargs = trackers.placed(machine, target, kwargs)
        tensors: list[trackers.TensorTracker] = []
        fx_args = tuple(self.argument(arg, tensors) for arg in args)
        fx_kwargs = {name: self.argument(arg, tensors) for name, arg in kwargs.items()}
        fake_args = [_fake(arg, self._present) for arg in fx_args]
        fake_kwargs = {name: _fake(arg, self._present) for name, arg in fx_kwargs.items()}
        fn = getattr(torch.Tensor, target) if method else target
        settled, counted = None, self.sizes.found
        try:
            with self.autocast_now(), self.attention_now():
                try:
                    result = self._propagate(fn, fake_args, fake_kwargs, tensors, _is_unknown((fake_args, fake_kwargs)))
                except DataDependent:
                    settled = self._sizes_settled(args, kwargs)
                    if settled is None:
                        result = self._propagate(fn, fake_args, fake_kwargs, tensors, True)
        except DataDependent as problem:
            return known_result(self, target, args, kwargs) or machine.graph_break("B011", name=_name(target), reason=str(problem))
        except SizeUnknown as problem:
            self._refused(problem, target, fake_args, fake_kwargs)
        except (UnsupportedFake, NotImplementedError) as problem:
            machine.graph_break("B013", name=_name(target), reason=str(problem))
        except Exception as error:
            if any(name in str(error) for name in ("FakeTensor", "tuple")):  # torch's own check of arguments names their classes
                machine.graph_break("B013", name=_name(target), reason="torch refuses its arguments")
            machine.raise_exception(error)
        if settled is not None:
            return self.node(target, *settled, method)
        if result.random and machine.random_closed:
            machine.graph_break("B101", callee=_name(target), reason="random numbers behind a seed that follows other random numbers")
        mutated = dict.fromkeys(result.mutated)
        if kwargs.get("out") is not None:  # composite functions write it unseen
            mutated.update(
                dict.fromkeys([("out",)] if isinstance(kwargs["out"], Tracker) else [("out", i) for i in range(len(kwargs["out"]))])
            )
        gradient = self.grad_mode and any(tensor.meta.requires_grad for tensor in tensors)
        self._refuse_inference([_at(args, kwargs, path) for path in mutated])
        trackers.refuse_taken(machine, [_at(args, kwargs, path) for path in mutated if gradient and path[0] in _DIFFERENTIABLE])
        node = append_call(self.graph, "call_method" if method else "call_function", target, fx_args, fx_kwargs)
        node.meta.update(val=result.value, stack=machine.user_stack(), counted=self.sizes.found > counted, recorded=gradient and mutated)
        self.n_calls += 1
        if result.random:
            self.random_nodes.add(node)
        if mutated or result.random:
            self.keep.add(node)
        if result.raises:
            self.raising.add(node)
        tracked = self._result(node, result, tensors)
        if result.aliases:
            self._join_views(args, kwargs, result, tracked, target)
        for path in mutated:
            self._mark_mutated(args, kwargs, path, gradient and path[0] in _DIFFERENTIABLE)
        return tracked

    def _refused(self, problem: SizeUnknown, target: Any, *call: Any) -> NoReturn:
        """The call cannot be made with sizes that are unknown: those that vary become constants, others break."""
        if self.machine.varying.settle(problem.what or call, failed=True):
            self.machine.restart_knowing()
        self.machine.graph_break("B114", reason=f"{_name(target)}: {problem}")

    def _propagate(self, fn: Any, args: Any, kwargs: Any, tensors: Sequence[trackers.TensorTracker], unknown: bool) -> FakeResult:
        """What the call gives. `unknown`: some sizes are known at run time only."""
        if unknown and not (self.takes_unknown or (self.takes_varying and self.machine.varying.symbols)):
            if self.machine.varying.settle((args, kwargs)):
                self.machine.restart_knowing()
            raise DataDependent(_name(fn))
        heard: list[WarningMessage] = []
        with taken(heard):
            if unknown:
                found = fake_probes(fn, args, kwargs, self.sizes, [tensor.node for tensor in tensors], grad_enabled=self.grad_mode)
            else:
                call = fake_call if self.transformed else self._remembered.call
                found = call(fn, args, kwargs, grad_enabled=self.grad_mode)
        if heard:  # an equal call warns too
            self._remembered.clear()
            repeat_warnings(self.machine, heard)
        return found

    def check(self, value: trackers.SizeTracker, target: Callable[[object], None]) -> bool:
        """Whether the graph can check a size at this point, and take back what it has done before."""
        written = any(tracker.meta.requires_grad for _, tracker in self.inputs if tracker in self.mutated)
        if written or self.n_checks >= MAX_CHECKS:
            return False
        self.n_checks += 1
        check_node(self, target, self.argument(value, []))
        return True

    def turns_leaves(self) -> bool:
        """Whether tensors may begin to gather gradients in this graph."""
        return not (LEAVES_LEFT in self.machine.forced or self.transformed or self.inference_mode or hasattr(self, "around"))

    def leaf_node(self, tensor: trackers.TensorTracker, outside: bool = False) -> bool:
        """From here on a tensor that the graph made gathers gradients (`outside`: in the stead of an input); False where the graph cannot say so."""
        if tensor.node is None or (tensor.source is not None and not outside) or not self.turns_leaves():
            return False
        node = self.graph.call_method("requires_grad_", (tensor.node,))
        node.meta.update(val=tensor.meta.with_(requires_grad=True, is_leaf=True), stack=self.machine.user_stack())
        self.keep.add(node)
        self.made_leaves.append(tensor)
        self.turned.add(tensor.node)
        if outside:
            self.stand_ins.add(tensor.node)
        return True

    def check_history(self, outputs: Sequence[fx.Node]) -> None:
        """What leaves the region must not miss what autograd would know outside: a tensor that the graph has turned into a leaf may leave only when no gradient can
        flow to it any more, and no gradient may flow to a hooked tensor after the region. Else capture starts again without."""
        self.selected.leave(outputs)
        leaving = self.turned.intersection(outputs) | self.stand_ins
        if not leaving and not self.hooked:
            return
        vals = {node: node.meta["val"] for node in self.keep}
        computed = (node for node, val in vals.items() if getattr(val, "requires_grad", False) and not val.is_leaf)
        written = [*computed, *(node for node in vals if node.meta.get("recorded"))]
        todo = [node for node in (*outputs, *written) if node not in self.spent and node not in leaving]
        seen: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in leaving:
                raise Restart(LEAVES_LEFT, None, False)
            if node not in seen and getattr(node.meta["val"], "requires_grad", True):
                seen.add(node)
                todo.extend(node.all_input_nodes)
        for hooked in self.hooked:
            if hooked.node not in self.spent or hooked.node in seen or hooked.node in outputs:
                self.leave_hook(hooked)

    def select(self, copy: trackers.TensorTracker, base: trackers.TensorTracker, code: int | None, *found: Any) -> None:
        """`copy` stands for a view that eager makes of `base`, at a place known at run time only. Where it leaves the region, or one of the two is written, capture
        starts again, with a break here, or knowing `code`. `found`: see `Selected`."""
        reason = GraphBreak("B011", self.machine.user_stack(), name="getitem", reason="the place of a view is the value of a tensor")
        count = self.machine.frames[-1].count
        self.selected.append(Selected(copy, base, count, reason) if code is None else Selected(copy, base, code, None, *found))

    def leave_hook(self, hooked: trackers.Hooked) -> NoReturn:
        """Capture starts again, with a break where the hook is registered."""
        raise Restart(hooked.count, hooked.reason, False)

    def size_node(self, tensor: trackers.TensorTracker, method: str, args: tuple[Any, ...], read: Callable[[TensorMeta], int]) -> Tracker:
        """See `Machine.size_node`."""
        meta = tensor.meta
        assert isinstance(meta, UnknownMeta)
        probes = tuple(None if one is None else read(one) for one in meta.probes)
        number = UnknownNumber(probes, probes[EXAMPLE])
        symbol = self.machine.varying.symbol_of(probes)
        place = next(((one, dim) for one, dim, known in symbol.places if one.meta is known), None) if symbol is not None else None
        if symbol is None or place is None or hasattr(self, "around"):
            return self._number(self.graph.call_method(method, (self.argument(tensor, []), *args)), number)
        found = trackers.SizeTracker(symbol.node, number) if symbol.node is not None else None
        if found is None:
            found = self._number(self.graph.call_method("size", (self.argument(place[0], []), place[1])), number)
            symbol.node = found.node
            found.node.meta["place"] = place[0].source, None if isinstance(place[0], trackers.SizedNumber) else place[1]
        if (tensor.node, (method, *args)) != (place[0].node, ("size", place[1])):  # likely the same number
            likely = self._number(self.graph.call_method(method, (self.argument(tensor, []), *args)), number)
            self.machine.varying.decisions[likely.node] = symbol.node
        return found

    def number(self, fn: Callable[..., Any], args: Sequence[Tracker]) -> Tracker:
        """See `Machine.number`. See `trackers.EXACT`."""
        fx_args = tuple(self.argument(trackers.lower(self.machine, arg), []) for arg in args)
        number = arithmetic(fn, [_fake(arg, self._present) for arg in fx_args], self.sizes, fn in trackers.EXACT)
        return self._number(append_call(self.graph, "call_function", fn, fx_args), number)

    def _number(self, node: fx.Node, number: UnknownNumber) -> trackers.SizeTracker:
        node.meta["val"] = number
        node.meta["stack"] = self.machine.user_stack()
        return trackers.SizeTracker(node, number)

    def _sizes_settled(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with whole numbers in place of the tensors of one number behind the first argument: sizes computed by torch from constants.
        None when there are none, or when one is not known."""
        found: list[int] = []

        def settle(value: Any) -> Any:
            if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
                return type(value)(settle(item) for item in value)
            if isinstance(value, trackers.TensorTracker) and not value.meta.ndim and value.meta.dtype in _WHOLE:
                number = self.known(value)
                if number is not None:
                    found.append(int(number))
                    return found[-1]
            return value

        settled = (*args[:1], *(settle(arg) for arg in args[1:])), {name: settle(arg) for name, arg in kwargs.items()}
        return settled if found else None

    def known(self, tracker: trackers.TensorTracker) -> torch.Tensor | None:
        """The numbers of a tensor that the region made out of constants; None: they depend on data."""
        self.guard_modes()
        self.machine.particulars += 1
        if tracker.node is None and isinstance(tracker, trackers.ArrayMemory):
            self.input_node(tracker)
        autocast = self.autocasts or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if (
            tracker.node is None
            or autocast
            or tracker.new_leaf
            or any(n.op == "call_function" and n.target in _AUTOCAST for n in self.keep)
        ):
            return None
        value, needed = known_value(tracker.node, self.keep, self.random_nodes)
        outside = [self._guarded_by_contents[node] for node in needed if node in self._guarded_by_contents]
        if value is None or (outside and any(one in self.mutated for _, one in self.inputs)):
            return None
        for array in outside:
            array.guard_contents(self.machine)
        return value

    def guard_modes(self) -> None:
        """What an operation depends on besides its operands: grad mode, autocast ... guarded once per region."""
        if not self._modes_guarded:
            self._modes_guarded = True
            for payload in state_payload():
                self.machine.guard(Kind.STATE, None, payload)

    def mode_node(self, fn: Callable[..., Any], *consts: Any) -> None:
        """A call that changes torch's modes for the operations after it."""
        self._mode_call(fn, *consts)

    def _mode_call(self, fn: Callable[..., Any], *args: Any) -> fx.Node:
        self.guard_modes()
        node = self.graph.call_function(fn, args)
        node.meta["val"] = None
        node.meta["mode"] = True
        node.meta["stack"] = self.machine.user_stack()
        self.keep.add(node)
        self.mode_changed = True
        self._remembered.clear()
        return node

    def set_grad_mode(self, flag: bool) -> None:
        """Grad mode for the operations recorded from now on."""
        self.guard_modes()
        if flag != self.grad_mode:
            self.grad_mode = flag
            self.mode_node(torch._C._set_grad_enabled, flag)

    def enter_inference(self, flag: bool) -> None:
        """Inference mode for the operations recorded from now on (nested)."""
        node = self._mode_call(torch.autograd.grad_mode._enter_inference_mode, flag)
        self.inferences.append((node, self.inference_mode, self.grad_mode))
        self.inference_mode, self.grad_mode = flag, not flag
        self.inference_tensors = True

    def exit_inference(self) -> None:
        """Leave the innermost inference mode of this region."""
        node, self.inference_mode, self.grad_mode = self.inferences.pop()
        self._mode_call(torch.autograd.grad_mode._exit_inference_mode, node)

    def enter_autocast(self, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
        """Autocast for the operations recorded from now on (nested)."""
        state = (device_type, dtype, enabled, cache_enabled)
        self.autocasts.append((self._mode_call(torch.amp.autocast_mode._enter_autocast, *state), state))

    def exit_autocast(self) -> None:
        """Leave the innermost autocast of this region."""
        node, _ = self.autocasts.pop()
        self._mode_call(torch.amp.autocast_mode._exit_autocast, node)

    def autocast_now(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast of this place in the program, for propagation."""
        if not self.autocasts:
            return contextlib.nullcontext()
        device_type, dtype, enabled, _ = self.autocasts[-1][1]
        return torch.autocast(device_type, dtype, enabled, cache_enabled=False)

    def guard_attention(self) -> None:
        """The switches that choose the kernel of attention, guarded once per region."""
        if not self.attention:
            settle_attention()
            self.initial_attention = {switch: switch.read() for switch in ATTENTION}
            self.attention = dict(self.initial_attention)
            for switch, value in self.attention.items():
                read = switch.read if switch.many else switch.getter
                self.machine.guard(Kind.STATE, None, (switch.getter.__name__, read, (), value))

    def set_attention(self, switch: Switch, value: Any) -> None:
        """A switch of attention for the operations recorded from now on."""
        self.guard_attention()
        if self.attention[switch] != value:
            self.attention[switch] = value
            self.mode_node(switch.setter, switch.argument(value))

    def attention_changed(self) -> dict[Switch, Any]:
        """The switches that are not as they were at the region's start."""
        return {switch: value for switch, value in self.attention.items() if value != self.initial_attention[switch]}

    def attention_now(self) -> contextlib.AbstractContextManager[Any]:
        """The switches of attention of this place in the program, for propagation."""
        changed = self.attention_changed()
        return attention_switched(changed) if changed else contextlib.nullcontext()

    def argument(self, value: Any, tensors: list[trackers.TensorTracker]) -> Any:
        """FX argument of a tracker or of a nested structure of trackers."""
        if isinstance(value, trackers.TensorTracker):
            tensors.append(value)
            if value.new_leaf and self.grad_mode and value.meta.requires_grad:
                self.machine.graph_break("B112", value=value.show())
            self.selected.read(value)
            node = self.input_node(value)
            self._present[node] = value.meta
            return node
        if isinstance(value, trackers.SizeTracker):
            if value.node.graph is not self.graph:
                self.machine.graph_break("B114", reason="in a function that is captured apart")
            self._present[value.node] = value.number
            return value.node
        if isinstance(value, Tracker):
            self.machine.graph_break("B101", callee="a graph operation", reason=f"argument {value.show()}")
        if isinstance(value, tuple):
            items = [self.argument(item, tensors) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self.argument(item, tensors) for item in value]
        if isinstance(value, dict):
            return {key: self.argument(item, tensors) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start, tensors), self.argument(value.stop, tensors), self.argument(value.step, tensors))
        if isinstance(value, torch.Generator):
            self.machine.graph_break("B101", callee="a graph operation", reason="a random generator as argument")
        return value

    def _mark_mutated(self, args: Sequence[Any], kwargs: Mapping[str, Any], path: tuple[Any, ...], gradient: bool) -> None:
        value = _at(args, kwargs, path)
        self._refuse_doubtful(value, gradient)
        if isinstance(value, trackers.TensorTracker):
            memory = value.memory or (value,)
            self.selected.write(value, memory, gradient)
            if any(tensor is shown for tensor in memory for shown in self.shown):
                self.machine.restart_before("a write", "the tensor has been printed")
            self._forget_counts(value)
            self.mutated.update(memory)
            if gradient and not value.meta.requires_grad and value.meta.dtype.is_floating_point:
                value.meta = value.meta.with_(requires_grad=True, is_leaf=False)
            trackers.written(value)

    def show(self, tracker: trackers.TensorTracker) -> None:
        """The tensor is printed at the region's end: no later operation of the region may write to it."""
        self.shown.append(tracker)

    def _refuse_inference(self, written: Sequence[Any]) -> None:
        """A write to a tensor of inference mode, outside of it: eager raises behind the write itself."""
        for value in written:
            memory = (value.memory or (value,)) if isinstance(value, trackers.TensorTracker) else ()
            if any(isinstance(tracker.obj, torch.Tensor) and tracker.obj.is_inference() for tracker in memory):
                self.machine.grad_enabled()
                if not self.inference_mode:
                    self.machine.graph_break("B104", operation="a write outside of inference mode", value=f"{value.show()}, made inside,")

    def _refuse_doubtful(self, value: Any, gradient: bool) -> None:
        """A write that makes a tensor require gradients: those that share its memory for some sizes only (`contiguous`, `dropout` of what may be empty) may follow."""
        if gradient and isinstance(value, trackers.TensorTracker) and isinstance(value.meta, UnknownMeta) and value.memory != value.views:
            raise SizeUnknown("whether two tensors share memory")

    def _forget_counts(self, value: trackers.TensorTracker) -> None:
        """After a write, a mask selects another number of elements. What comes from outside may share memory in ways that capture does not see."""
        group = value.memory or (value,)
        if any(tracker.source is not None for tracker in group):
            self.sizes.of.clear()
        for tracker in group:
            self.sizes.of.pop(tracker.node, None)

    def _join_views(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: FakeResult, tracked: Tracker, target: Any) -> None:
        """Tell results that are views of arguments: a later write through one changes what autograd knows of the others (not of `detach()` and `.data`)."""
        views = _name(target) != "detach" and (target is not getattr or args[1] != "data")
        for place, path in result.aliases:
            argument = _at(args, kwargs, path)
            found = tracked
            for step in place:
                found = found.item(self.machine, step) if isinstance(found, trackers.TupleTracker | trackers.ListTracker) else found
            if isinstance(argument, trackers.TensorTracker) and isinstance(found, trackers.TensorTracker) and found is not argument:
                trackers.join_memory(argument, found)
                if views:
                    trackers.join_views(argument, found)

    # -- results

    def _result(self, node: fx.Node, result: FakeResult, tensors: list[trackers.TensorTracker]) -> Tracker:
        if result.same is not None:
            same = tensors[result.same]
            if isinstance(result.value, TensorMeta):
                asked = (
                    result.value.requires_grad != same.meta.requires_grad
                )  # else propagation may have taken what autograd computed for a leaf
                same.meta = result.value if asked else result.value.with_(is_leaf=same.meta.is_leaf)
            return same
        return self._track(node, result.value)

    def _track(self, node: fx.Node, value: Any) -> Tracker:
        if isinstance(value, TensorMeta):
            made = trackers.TensorTracker(value, node=node)
            if value.requires_grad and value.is_leaf:
                self.made_leaves.append(made)
            return made
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            if not any(isinstance(item, (TensorMeta, tuple, list, dict)) for item in value):
                return (
                    self.machine.const(value)
                    if isinstance(value, tuple)
                    else trackers.ListTracker([self.machine.const(item) for item in value])
                )
            items = [self._item(node, index, item) for index, item in enumerate(value)]
            if isinstance(value, list):
                return trackers.ListTracker(items)
            return trackers.NamedTupleTracker(type(value), items) if type(value) is not tuple else trackers.TupleTracker(items)
        if type(value) is dict:
            pairs = [(self.machine.const(key), self._item(node, key, item)) for key, item in value.items()]
            return trackers.DictTracker.of(self.machine, pairs)
        return self.machine.const(value)

    def _item(self, node: fx.Node, index: Any, value: Any) -> Tracker:
        import operator

        if not isinstance(value, (TensorMeta, tuple, list, dict)):
            return self.machine.const(value)
        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta["val"] = value
        item.meta["stack"] = node.meta["stack"]
        return self._track(item, value)

    # -- finishing

    def prune(self, outputs: Sequence[fx.Node]) -> None:
        """Drop what neither the outputs nor an effect need: pure nodes only."""
        needed = set(outputs) | self.keep | self.raising
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("placeholder", "output"):
                continue
            if node not in needed and not node.users:
                self.graph.erase_node(node)
        for node, tracker in list(self.inputs):
            if not node.users and node not in needed:
                self.graph.erase_node(node)
                self.inputs.remove((node, tracker))
                tracker.node = None
        self.selected.pruned()


_DIFFERENTIABLE = (0, "self", "input", "out")
"""Arguments through whose writes gradients flow; running statistics are written past autograd."""
_ATTENTION = {"scaled_dot_product_attention", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
_AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


def _at(args: Sequence[Any], kwargs: Mapping[str, Any], path: tuple[Any, ...]) -> Any:
    """The argument that a path of FakeResult leads to."""
    value: Any = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    for step in path[1:]:
        value = value[step]
    return value


def _fake(value: Any, present: Mapping[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return present[value]
    if isinstance(value, tuple):
        items = [_fake(item, present) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_fake(item, present) for item in value]
    if isinstance(value, dict):
        return {key: _fake(item, present) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_fake(value.start, present), _fake(value.stop, present), _fake(value.step, present))
    return value


def _is_unknown(value: Any) -> bool:
    """Whether there is a size among nested arguments that only a run knows."""
    if isinstance(value, (UnknownMeta, UnknownNumber)):
        return True
    if isinstance(value, dict):
        return any(map(_is_unknown, value.values()))
    if isinstance(value, slice):
        return _is_unknown((value.start, value.stop, value.step))
    return isinstance(value, (tuple, list)) and any(map(_is_unknown, value))


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))


def placeholder_name(source: Source) -> str:
    """`L['self']._parameters['weight']` -> `l_self_parameters_weight_`."""
    return re.sub(r"\W+", "_", source.text()).strip("_").lower().replace("__", "_") + "_"
