"""Replay: the call of a module that is equal to one whose call has been captured in this region.

What a capture depends on are its arguments, the state of the machine, and what it has read of the program's objects; each read is a guard row. So a call of
another module, with like arguments and in like state, is captured as the first one was if all rows about the first module hold for the second one, the path
to the first module being replaced by the path to the second (`_Moved`). Then the nodes of the first call are copied, the rows are added, and no bytecode runs.

A call is kept for replay (`Replays.finish`) only where it left nothing behind but nodes and rows: no effect, no write, no changed value that the call or an
effect can reach (`speculate.made_values`), no mode switched, and where nobody asked for what guards do not tell two modules apart by: identity of modules, the
numbers of tensors that the region makes (`SymbolicMachine.particulars`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from magneto.base.dataclass import dataclass, field
from magneto.base.errors import GraphBreak
from magneto.base.flags import config
from magneto.dynamo import trackers
from magneto.dynamo.guards import reading
from magneto.dynamo.guards.rows import Kind, Row
from magneto.dynamo.guards.source import Attr, Cell, InstanceDict, Item, KeyAt, Source
from magneto.dynamo.guards.tensors import tensor_holds
from magneto.dynamo.machine.frame import HeldTracker
from magneto.dynamo.machine.recorder import Recorder
from magneto.dynamo.machine.speculate import made_values
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.object import InstanceDictTracker
from magneto.graph import TensorMeta
from magneto.graph.append import append_call

if TYPE_CHECKING:
    from magneto.dynamo.machine.machine import SymbolicMachine

KEPT = 4  # calls of one function with modules of one class
_MANY = 50  # effects: all that they reach is compared
_TARGETS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_SHARED = (
    *(trackers.TensorTracker, trackers.ConstTracker, trackers.ModuleTracker, trackers.FunctionTracker, trackers.BuiltinTracker),
    *(trackers.ClassTracker, trackers.TupleTracker, trackers.ListTracker, trackers.DictTracker, trackers.ObjectTracker),
)
"""Arguments that may be the very same in both calls."""
_MADE = (*_SHARED, trackers.CellTracker, trackers.BoundMethodTracker, trackers.SetTracker, InstanceDictTracker, HeldTracker)
"""What effects and arguments may lead to: not what changes without a trace."""
_READ = (*_SHARED, trackers.BoundMethodTracker, trackers.CellTracker, trackers.PyModuleTracker, trackers.SetTracker, trackers.OpaqueTracker)
"""What may be read of a module: not iterators, generators, arrays, whose state is not in the rows alone."""


class _Differs(Exception):
    """The call is captured."""


def _need(condition: object) -> None:
    if not condition:
        raise _Differs


@dataclass(slots=True, eq=False)
class Call:
    """A captured call of a function whose first argument is a module. `n_*` and `count`: how far capture had come when it began."""

    module: trackers.ModuleTracker
    args: list[Tracker]
    state: tuple[Any, ...]
    made: dict[int, Any]
    met: list[Any]
    tensors: dict[trackers.TensorTracker, tuple[fx.Node | None, tuple[Any, ...]]]  # among the arguments, and what was known of them
    before: fx.Node
    line: str
    count: tuple[int, int, int]
    particulars: int
    depth: int
    n_inputs: int
    n_reached: int
    n_rows_end: int = 0
    n_reached_end: int = 0
    last: fx.Node | None = None
    steps: tuple[int, int, int, int] = (0, 0, 0, 0)
    result: Any = None
    known: _Known | None = None
    useless: bool = False


@dataclass(slots=True)
class _Known:
    """What replays of a call need: paths that begin at its module, the rows about these (a SAME row's other path too), what was found there (metadata of tensors),
    ids of modules among that and of other objects that were met; the nodes, and the inputs of the graph that they take."""

    own: _Paths
    rows: list[tuple[Row, int, int | None]] = field(default_factory=list)
    found: list[tuple[int, Any, type, TensorMeta | None]] = field(default_factory=list)
    modules: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: dict[fx.Node, tuple[trackers.TensorTracker, int | None]] = field(default_factory=dict)


def repeatable(fn: trackers.FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """What calls have in common of which one may be a replay of the other; None: it is not worth the trouble, or there is no such call."""
    module = args[0]
    if type(module) is not trackers.ModuleTracker or fn.obj is MISSING or module.source is None or not config.replay_equal_modules:
        return None
    return (fn.obj, module.cls, len(args), tuple(kwargs)) if module.obj.__dict__.get("_modules") else None


class Replays:
    """Of one capture. `calls`: how many have been replayed. `suspended`: the program's objects seem to hold what they do not, and no effect says so."""

    def __init__(self, machine: SymbolicMachine) -> None:
        self.machine = machine
        self.calls = self.suspended = 0
        self._guards = machine.guards  # others are read apart
        self._kept: dict[Any, list[Call]] = {}

    def clear(self) -> None:
        self._kept.clear()

    def begin(self, key: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> tuple[Tracker | None, Call | None]:
        """(the result, where an equal call is replayed; else what `finish` wants when the call has been captured, if it may be of use)."""
        m, recorder = self.machine, self.machine.recorder
        values = [*args, *kwargs.values()]
        apart = type(recorder) is not Recorder or m.guards is not self._guards or recorder.engine is not None
        if apart or self.suspended or recorder.hooked or len(m.effects) > _MANY:
            return None, None
        try:
            tensors, others = _leaves(values[1:])
        except _Differs:
            return None, None
        state, (made, met) = self._state(), made_values(m, others)
        if not all(value.source is not None or type(value) in _MADE for value in met):
            return None, None
        kept = self._kept.setdefault(key, [])
        for call in kept:
            if not call.useless and call.state == state and call.made == made:
                try:
                    return self._replay(call, values, tensors), None
                except _Differs:
                    continue
        if len(kept) >= KEPT:
            return None, None
        known = {tensor: (tensor.node, _facts(recorder, tensor)) for tensor in tensors}
        count, line = (m.count, m.steps, m.changes), m.read_at()[0]
        place = recorder.graph._root._prev, line, count, m.particulars, len(m.frames), len(recorder.inputs), len(m.reached)
        return None, Call(args[0], values, state, made, met, known, *place)  # type: ignore[arg-type]

    def finish(self, key: Any, call: Call, result: Tracker) -> None:
        """The call has been captured: keep it, if nothing else remains of it but its nodes and rows."""
        m, recorder = self.machine, self.machine.recorder
        last = recorder.graph._root._prev
        if last is call.before or call.before._erased:
            return
        try:
            _need(
                m.particulars == call.particulars
                and self._state() == call.state
                and made_values(m, _leaves(call.args[1:])[1])[0] == call.made
            )
            for tensor, (node, facts) in call.tensors.items():
                _need(_facts(recorder, tensor)[:-1] == facts[:-1] and (tensor.node is node or (node is None and tensor.source is not None)))
            _need(all(tracker.source is not None for _, tracker in recorder.inputs[call.n_inputs :]))
            call.result = self._template(call, result, set(_between(call.before, last)), [])
        except _Differs:
            return
        call.n_rows_end, call.n_reached_end, call.last = len(m.guards.rows), len(m.reached), last
        count, steps, changes = call.count
        call.steps = m.count - count, m.steps - steps, m.changes - changes, m.limit - m.count
        self._kept[key].append(call)

    def _state(self) -> tuple[Any, ...]:
        """What capture depends on beside what is read and what is given. What only grows is told by its length."""
        m, r = self.machine, self.machine.recorder
        return (
            *[len(one) for one in (m.effects, m.overlay, m.draws, m.assumptions, m.memories, m.streams, m.switches, m.references)],  # type: ignore[arg-type]
            *[
                len(one)
                for one in (m.made, m.stand_ins, m.keys_by_identity, m.read_by_backward, r.inferences, r._numbers, r.mutated, r.made_leaves)
            ],  # type: ignore[arg-type]
            *[len(one) for one in (r.turned, r.stand_ins, r.frozen, r.spent, r.hooked, r.shown, r.selected)],  # type: ignore[arg-type]
            *(m.random_closed, m.overriding, m.functions_off, m.decisions.total(), r.n_checks, r.hook_place is None, len(_copied(m))),
            *(
                r,
                r.grad_mode,
                r.inference_mode,
                r.transformed,
                tuple(r.attention_changed().items()),
                tuple(state for _, state in r.autocasts),
                sum(one.meta.requires_grad for one in r.mutated),  # type: ignore[attr-defined]
            ),
            *(tuple(m.contexts), sum(run.pending() for run in m.generators.values()), m._innermost_handled()),
        )

    def _template(self, call: Call, value: Tracker, nodes: set[fx.Node], seen: list[Tracker]) -> Any:
        """How a result is made again: the place of an argument, a constant, (node, metadata, class), or (kind, class, items)."""
        for index, arg in enumerate(call.args):
            if arg is value:
                return index
        _need(value.source is None and not any(one is value for one in seen))
        if isinstance(value, trackers.ConstTracker):
            return value
        seen.append(value)
        if type(value) is trackers.TensorTracker:
            _need(value.node in nodes and not value.attrs and not value.new_leaf)
            group = [one for one in (*(value.memory or ()), *(value.views or ())) if one is not value]
            _need(all(one.node in nodes for one in group) and not any(one is other for one in seen for other in group))
            return value.node, value.meta, value.cls
        _need(type(value) in (trackers.TupleTracker, trackers.ListTracker) and value.obj is MISSING)
        items = [self._template(call, item, nodes, seen) for item in value.items(self.machine)]  # type: ignore[attr-defined]
        return type(value), value.cls, items  # type: ignore[attr-defined]

    # -- again

    def _replay(self, call: Call, args: list[Tracker], tensors: list[trackers.TensorTracker]) -> Tracker:
        m, recorder, module = self.machine, self.machine.recorder, args[0]
        assert isinstance(module, trackers.ModuleTracker)
        _need(not any(m.count < count <= m.count + call.steps[0] for count in m.forced))
        pairs: dict[trackers.TensorTracker, trackers.TensorTracker] = {}
        for old, new in zip(call.args, args, strict=True):
            self._pair(call, old, new, module, pairs)
        known = self._known(call)
        if module is not call.module:
            _need(all(value.source is None or known.own.place(value.source) is None for value in call.met))
            _need(all(arg.source is None or arg is call.module or known.own.place(arg.source) is None for arg in call.args))
        _need(len(set(pairs.values())) == len(pairs))
        _need(not any(old is not new and any(value is old or value is new for value in call.met) for old, new in pairs.items()))
        copies = {call.tensors[old][0]: new.node for old, new in pairs.items() if call.tensors[old][0] is not None}
        inputs = {node: tracker for node, (tracker, _) in known.inputs.items()}
        if module is not call.module:
            moved, here = _Moved(m, known, call.module, module), m.read_at()[0]
            moved.check(known)
            payloads = [moved.payload(*row, known.modules) for row in known.rows]
            for (row, place, _), payload in zip(known.rows, payloads, strict=True):
                at = here if row.user_line == call.line else row.user_line, row.inside
                m.guards.require(row.kind, moved.paths[place], payload, lambda at=at: at)  # type: ignore[misc]
            moved.meet(known)
            inputs = {node: moved.tensor(*given) for node, given in known.inputs.items()}
        self._copy(call, known.nodes, copies, inputs)
        recorder.n_calls += len(known.nodes)
        count, steps, changes, limit = call.steps
        m.count, m.steps, m.changes = m.count + count, m.steps + steps, m.changes + changes
        m.limit = m.count + limit if known.nodes else m.limit
        self.calls += 1
        return self._result(call.result, args, copies)

    def _pair(
        self, call: Call, old: Tracker, new: Tracker, module: Tracker, pairs: dict[trackers.TensorTracker, trackers.TensorTracker]
    ) -> None:
        """Whether two arguments are alike; `pairs`: which tensor takes the place of which."""
        _need(type(old) is type(new) and (old is call.module) == (new is module))
        if isinstance(old, trackers.TensorTracker):
            assert isinstance(new, trackers.TensorTracker)
            facts = _facts(self.machine.recorder, new)
            _need(call.tensors[old][1][: -1 if old is new else None] == facts[: -1 if old is new else None])
            _need(old is new or (old.source is None is new.source and call.tensors[old][0] is not None and new.node is not None))
            _need(pairs.setdefault(old, new) is new)
        elif isinstance(old, trackers.TupleTracker) and old.source is None:
            assert isinstance(new, trackers.TupleTracker)
            _need(new.source is None and old.cls is new.cls and len(old.entries) == len(new.entries))
            for one, two in zip(old.items(self.machine), new.items(self.machine), strict=True):
                self._pair(call, one, two, module, pairs)
        elif isinstance(old, trackers.ConstTracker) and old is not new:
            one, two = old.value, new.value  # type: ignore[attr-defined]
            _need(old.source == new.source and type(one) is type(two) and (one is two or (type(one) is int and one == two)))
        else:
            _need(old is new or old is call.module)

    def _known(self, call: Call) -> _Known:
        if call.known is None:
            call.useless = True
            call.known = self._look(call)
            call.useless = False
        return call.known

    def _look(self, call: Call) -> _Known:
        """What there is to know of a call: looked up when another one might be a replay."""
        m, own = self.machine, _Paths(call.module.source)
        known = _Known(own)
        for row in m.guards.rows[: call.n_rows_end]:
            place = own.place(row.source) if row.source is not None else None
            if place is not None:
                _need(row.kind in _HOLDS or row.kind in (Kind.ID_IS, Kind.SAME))
                known.rows.append((row, place, own.place(row.payload) if row.kind is Kind.SAME else None))
            elif row.kind in _OF_TWO:
                others = row.payload if row.kind is Kind.DISTINCT else (row.payload,)
                _need(not any(own.place(path) is not None for path in others))
        for index, (source, obj, kind) in enumerate(m.reached[: call.n_reached_end]):
            place = own.place(source)
            if place is not None:
                _need(kind in _READ)
                known.found.append((place, obj, kind, TensorMeta.of(obj) if kind is trackers.TensorTracker else None))
                if kind is trackers.ModuleTracker:
                    known.modules.add(id(obj))
            elif index >= call.n_reached:
                known.others.add(id(obj))
        given = {node for node, _ in call.tensors.values()}
        inside: set[fx.Node] = set()
        placeholders = dict(m.recorder.inputs)
        assert call.last is not None
        for node in _between(call.before, call.last):
            _need(isinstance(node.target, (str, *_TARGETS)) or (type(node.target) is types.FunctionType and _is_torchs(node.target)))
            _need(_plain(node.meta["val"]))
            for arg in node.all_input_nodes:
                if arg not in inside and arg not in given and arg not in known.inputs:
                    tracker = placeholders.get(arg)
                    _need(type(tracker) is trackers.TensorTracker and tracker.source is not None)
                    known.inputs[arg] = tracker, own.place(tracker.source)  # type: ignore[assignment,union-attr,arg-type]
            inside.add(node)
            known.nodes.append(node)
        return known

    def _copy(self, call: Call, nodes: list[fx.Node], copies: dict[Any, Any], inputs: dict[fx.Node, trackers.TensorTracker]) -> None:
        """Append the nodes again; `copies`: what takes whose place."""
        recorder, stack = self.machine.recorder, self.machine.user_stack()

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                new = inputs[node].node is None
                found = copies[node] = recorder.input_node(inputs[node])
                if new:
                    found.meta["stack"] = (*stack, *node.meta["stack"][call.depth :])
            return copies[node]  # type: ignore[no-any-return]

        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copied)
            new = copies[node] = append_call(recorder.graph, node.op, node.target, args, kwargs)
            new.meta.update(node.meta, stack=(*stack, *node.meta["stack"][call.depth :]))
            for members in (recorder.keep, recorder.raising, recorder.random_nodes):
                if node in members:
                    members.add(new)

    def _result(self, template: Any, args: list[Tracker], copies: dict[Any, Any]) -> Tracker:
        if isinstance(template, int):
            return args[template]
        if isinstance(template, Tracker):
            return template
        first, second, third = template
        if isinstance(first, fx.Node):
            return trackers.TensorTracker(second, third, copies[first])
        return first([self._result(item, args, copies) for item in third], second)  # type: ignore[no-any-return]


def _copied(m: SymbolicMachine) -> Sequence[Any]:
    return m.__dict__.get("_copied_tensors", ())


def _is_torchs(fn: types.FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] == "torch"


def _plain(value: Any) -> bool:
    """Whether all of a node's metadata is known."""
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    return value is None or type(value) in (TensorMeta, int, float, bool)


def _between(before: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The calls behind one node up to another."""
    while before is not last:
        before = before.next
        if before.op != "placeholder":
            yield before


def _leaves(values: Sequence[Any]) -> tuple[list[trackers.TensorTracker], list[Tracker]]:
    """The tensors in arguments, those in tuples made here included, and what else there is but constants."""
    tensors: list[trackers.TensorTracker] = []
    others: list[Tracker] = []
    for value in values:
        _need(type(value) in _SHARED)
        if isinstance(value, trackers.TensorTracker):
            _need(type(value.meta) is TensorMeta)
            tensors.append(value)
        elif isinstance(value, trackers.TupleTracker) and value.source is None:
            for found, more in zip((tensors, others), _leaves(value.entries), strict=True):
                found += more  # type: ignore[operator]
        elif not isinstance(value, trackers.ConstTracker):
            others.append(value)
    return tensors, others


def _facts(recorder: Recorder, tensor: trackers.TensorTracker) -> tuple[Any, ...]:
    """What capture knows of a tensor beside its node."""
    written = any(one in recorder.mutated for one in tensor.memory or (tensor,))
    spent, turned = tensor.node in recorder.spent, (tensor.node in recorder.turned, tensor in recorder.frozen)
    return (
        tensor.meta, tensor.cls, dict(tensor.attrs), tensor.new_leaf, written, spent, turned, (tensor.views is None, tensor.memory is None),
    )  # fmt: skip


class _Paths:
    """Paths that begin with one, as steps: (the number of the path it goes on from, its class, its other fields)."""

    def __init__(self, start: Source | None) -> None:
        assert start is not None
        self.steps: list[tuple[int, Any, tuple[Any, ...]]] = [(0, None, ())]
        self._places: dict[Source, int | None] = {start: 0}

    def place(self, path: Source) -> int | None:
        """The path's number; None for a path that begins elsewhere."""
        try:
            return self._places[path]
        except KeyError:
            base = path.base()
        place = of = self.place(base) if base is not None else None
        if of is not None:
            names = _FIELDS.get(type(path))
            _need(names is not None)
            place = len(self.steps)
            self.steps.append((of, type(path), tuple([getattr(path, name) for name in names])))  # type: ignore[union-attr]
        self._places[path] = place
        return place


_FIELDS: dict[type, tuple[str, ...]] = {InstanceDict: (), Item: ("key",), Attr: ("name",), Cell: (), KeyAt: ("index",)}
_STEP: dict[type, Any] = {
    InstanceDict: reading.instance_dict,
    Item: reading.item,
    Attr: reading.attr,
    Cell: reading.cell,
    KeyAt: reading.key_at,
}


class _Moved:
    """What is known of one module, looked up in another one: `paths` there, and `values`, as the program left them before the region."""

    def __init__(self, m: SymbolicMachine, known: _Known, old: trackers.ModuleTracker, new: trackers.ModuleTracker) -> None:
        _need(new.source is not None and type(new.obj) is type(old.obj))
        self.m = m
        self.paths: list[Source] = [new.source]  # type: ignore[list-item]
        self.values: list[Any] = [new.obj]
        for of, kind, fields in known.own.steps[1:]:
            self.paths.append(kind(self.paths[of], *fields))
            value = self.values[of]
            try:
                value = _NOWHERE if value is _ABSENT or value is _NOWHERE else _STEP[kind](value, *fields)
            except (reading.Absent, reading.Unreadable) as error:
                value = _ABSENT if type(error) is reading.Absent else _NOWHERE
            self.values.append(value)
        if m.effects:
            operands = [one for _, operands in m.effects for one in operands if not isinstance(one, trackers.ConstTracker)]
            written = {id(one.obj) for one in operands if one.obj is not MISSING}
            _need(not any(id(value) in written for value in self.values))

    def check(self, known: _Known) -> None:
        """Objects correspond one to one, and the region has not changed what it knows of those that it has met."""
        there: dict[int, int] = {}
        for place, obj, kind, meta in known.found:
            new = self.values[place]
            _need(new is not _ABSENT and new is not _NOWHERE and there.setdefault(id(obj), id(new)) == id(new))
            if meta is not None and obj is not new:
                if id(new) in self.m.wrapped:
                    tracker: Any = self.m.wrapped[id(new)]
                    _need(type(tracker) is kind)
                    _need(tracker.meta == meta and not tracker.attrs and not tracker.new_leaf and tracker not in self.m.recorder.mutated)
                _need(type(new) is type(obj) and TensorMeta.of(new) == meta)
        _need(len(set(there.values())) == len(there) and not any(new in known.others for old, new in there.items() if old != new))

    def payload(self, row: Row, place: int, other: int | None, modules: set[int]) -> Any:
        """The payload of the row about the other module, which holds."""
        kind, payload, value = row.kind, row.payload, self.values[place]
        if kind is Kind.ABSENT and payload is None:
            _need(value is _ABSENT)
            return payload
        _need(value is not _ABSENT and value is not _NOWHERE)
        if kind is Kind.ID_IS:
            if id(payload) in modules:
                _need(type(value) is type(payload))
                return value
            _need(value is payload)
        elif kind is Kind.SAME and other is None:  # something that the region knows by another path
            known = self.m.wrapped.get(id(value))
            _need(known is not None and known.source == payload)
        elif kind is Kind.SAME:
            _need(value is self.values[other])  # type: ignore[index]
            return self.paths[other]  # type: ignore[index]
        else:
            try:
                _need(_HOLDS[kind](value, payload))
            except (reading.Absent, reading.Unreadable):
                raise _Differs from None
        return payload

    def meet(self, known: _Known) -> None:
        """The region knows the objects from here on, as if capture had found them."""
        for place, _, kind, _ in known.found:
            try:
                _need(type(self.m.wrap(self.values[place], self.paths[place])) is kind)
            except GraphBreak:
                raise _Differs from None

    def tensor(self, tracker: trackers.TensorTracker, place: int | None) -> trackers.TensorTracker:
        """What takes the place of an input of the graph."""
        if place is None:
            return tracker
        found = self.m.wrap(self.values[place], self.paths[place])
        _need(type(found) is trackers.TensorTracker and found.meta == tracker.meta and found.cls is tracker.cls)
        return found  # type: ignore[return-value]


def _is_absent(read: Any, obj: Any, name: Any) -> bool:
    try:
        read(obj, name)
    except reading.Absent:
        return True
    return False


_ABSENT, _NOWHERE = object(), object()  # in place of values: the place holds nothing; there is no such place
_HOLDS: dict[Kind, Any] = {
    Kind.TYPE_IS: lambda value, payload: type(value) is payload, Kind.EQUALS: reading.same_constant,
    Kind.TENSOR: lambda value, payload: tensor_holds(payload, value), Kind.LENGTH: lambda value, payload: reading.length(value) == payload,
    Kind.KEYS: lambda value, payload: reading.same_constant(tuple(reading.listed(value)), tuple(payload)),
    Kind.KEY_ABSENT: lambda value, payload: isinstance(value, dict) and _is_absent(reading.item, value, payload),
    Kind.ABSENT: lambda value, payload: _is_absent(reading.attr, value, payload), Kind.PRESENT: lambda value, payload: True,
}  # fmt: skip
"""Whether a row holds for a value; rows of other kinds, but ID_IS and SAME, are not moved."""
_OF_TWO = (Kind.SAME, Kind.DISTINCT, Kind.MEMBER, Kind.NOT_MEMBER)
