"""A captured graph whose sizes vary, for the sizes of one call: `Propagation` says what each of its nodes is then, `specialised` is the graph with these numbers in it.

The graph is read once, into steps. Of those that are alike at the sizes at hand, as the layers of a model are, one is asked (`fake_call`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from magneto.graph.append import append_call
from magneto.graph.fake import Path, fake_call
from magneto.graph.fallback import UnsupportedFake
from magneto.graph.meta import TensorMeta
from magneto.graph.modes import ATTENTION, modes_kept
from magneto.graph.remember import is_torchs, key_of

_AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
_MODES = frozenset((torch._C._set_grad_enabled, *_AUTOCAST, *(switch.setter for switch in ATTENTION)))
_INFERENCE = frozenset((torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode))
_ARITHMETIC = frozenset(("_operator", "builtins", "math"))


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a value."""

    index: int


@dataclass(slots=True)
class _Step:
    """One call. Its value goes to `place`. kind: steps of one kind differ at most in the values in their `slots`. plain: no tensor takes part, it is called as it is. written, same: as in FakeResult."""

    place: int
    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: tuple[int, ...]
    kind: int | None
    plain: bool
    written: tuple[Path, ...] = ()
    same: int | None = None


class Propagation:
    """What is known of all nodes of a captured graph, given its inputs (TensorMeta; what is no tensor as it is). Raises what torch raises for the graph and these inputs; DataDependent and
    UnsupportedFake as fake_call.

    values: what nodes are for the first inputs, the inputs first. slots: the place among them, by node. kept: nodes that are called for more than a value.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], grad_enabled: bool) -> None:
        self.grad_enabled = grad_enabled
        self.slots: dict[fx.Node, int] = {}
        self.kept: set[fx.Node] = set()
        self.values: list[Any] = list(inputs)
        self._steps: list[_Step] = []
        self._now: dict[fx.Node, int] = {}  # where that stands which is known of a node now: writes in place change it
        self._kinds: dict[Any, int] = {}
        self._modes = 0
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self.n_inputs = len(placeholders)
        self.slots.update(zip(placeholders, range(self.n_inputs), strict=True))
        self._now.update(self.slots)
        self._given = list(range(self.n_inputs))
        run = _Run(self.values, self._given)
        with modes_kept(grad_enabled):
            for node in gm.graph.nodes:
                if node.op == "get_attr":
                    held = _attribute(gm, str(node.target))
                    run.put(TensorMeta.of(held) if isinstance(held, torch.Tensor) else held)
                    self._given.append(self._put(node))
                elif node.op in ("call_function", "call_method"):
                    self._add(node, run)
                elif node.op == "call_module":
                    raise UnsupportedFake(str(node.target), "a module in the graph")
        del self._now, self._kinds

    def at(self, inputs: Sequence[Any]) -> list[Any]:
        """The values for other inputs."""
        run = _Run([*inputs, *self.values[self.n_inputs :]], self._given)
        with modes_kept(self.grad_enabled):
            for step in self._steps:
                if run.call(step) != (step.written, step.same):
                    raise UnsupportedFake(str(step.fn), "what it writes depends on sizes")
        return run.values

    def _put(self, node: fx.Node) -> int:
        place = self.slots[node] = self._now[node] = len(self.values) - 1
        return place

    def _add(self, node: fx.Node, run: _Run) -> None:
        fn: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
        if fn in _INFERENCE:
            raise UnsupportedFake("inference_mode", "it is entered in the graph")
        slots: list[int] = []

        def slot(n: fx.Node) -> Slot:
            slots.append(self._now[n])
            return Slot(slots[-1])

        args, kwargs = _mapped(node.args, fx.Node, slot), _mapped(node.kwargs, fx.Node, slot)
        try:
            key = (self._modes, fn, _key_of(args), *((name, _key_of(value)) for name, value in kwargs.items())) if _is_pure(fn) else None
        except TypeError:
            key = None
        kind = None if key is None else self._kinds.setdefault(key, len(self._kinds))
        step = _Step(len(self.values), fn, args, kwargs, tuple(slots), kind, _is_plain(fn, _filled(args, self.values)))
        self.values.append(None)
        step.written, step.same = run.call(step)
        self._steps.append(step)
        place = self._put(node)
        if fn in _MODES or step.written or step.same is not None or self.values[place] is None:
            self.kept.add(node)
            self._modes += fn in _MODES
            if step.same is not None:
                self._now[_tensors_of((node.args, node.kwargs), self.values, self._now)[step.same]] = place


class _Run:
    """One propagation under way. `ids`: numbers that tell which values are equal."""

    __slots__ = ("_numbers", "_results", "ids", "values")

    def __init__(self, values: list[Any], given: Iterable[int]) -> None:
        self.values = values
        self._numbers: dict[Any, int] = {}
        self._results: dict[Any, tuple[Any, int, Any]] = {}
        self.ids = [-1] * len(values)
        for place in given:
            self.ids[place] = self._number(values[place])

    def _number(self, value: Any) -> int:
        try:
            return self._numbers.setdefault(key_of(value), len(self._numbers))
        except TypeError:  # equal to nothing but itself
            return self._numbers.setdefault(object(), len(self._numbers))

    def put(self, value: Any) -> None:
        self.values.append(value)
        self.ids.append(self._number(value))

    def call(self, step: _Step) -> tuple[tuple[Path, ...], int | None]:
        """What it writes, and which tensor it returns."""
        ids, place = self.ids, step.place
        if place == len(ids):
            ids.append(-1)
        key = None
        if step.kind is not None:
            key = step.kind, *[ids[slot] for slot in step.slots]
            known = self._results.get(key)
            if known is not None:
                self.values[place], ids[place], effects = known
                return effects
        value, written, same = _run(step, self.values)
        self.values[place], ids[place] = value, self._number(value)
        if key is not None:
            self._results[key] = value, ids[place], (written, same)
        return written, same


def specialised(gm: fx.GraphModule, propagation: Propagation, values: Sequence[Any]) -> fx.GraphModule:
    """The graph for inputs with which the propagation has these values: nodes that compute numbers are gone, and numbers stand in their places."""
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    slots, kept = propagation.slots, propagation.kept
    for node in gm.graph.nodes:
        args, kwargs = fx.map_arg(node.args, made.__getitem__), fx.map_arg(node.kwargs, made.__getitem__)
        if node.op == "output":
            graph.output(args[0]).meta.update(node.meta)
            continue
        value = values[slots[node]]
        if node.op == "placeholder":
            copy = graph.placeholder(str(node.target))
        elif node.op == "get_attr":
            copy = graph.get_attr(str(node.target))
        elif node not in kept and not _has_tensor(value):
            made[node] = value
            continue
        else:
            copy = append_call(graph, node.op, node.target, args, kwargs)
        copy.meta.update(node.meta, val=value)
        made[node] = copy
    found = fx.GraphModule(gm, graph)
    found.meta.update(gm.meta)
    found.meta["magneto"] = {key: value for key, value in gm.meta.get("magneto", {}).items() if key != "varying"}
    return found


def _run(step: _Step, values: Sequence[Any]) -> tuple[Any, tuple[Path, ...], int | None]:
    args, kwargs = _filled(step.args, values), _filled(step.kwargs, values)
    if step.plain:
        return step.fn(*args, **kwargs), (), None
    found = fake_call(step.fn, args, kwargs, grad_enabled=torch.is_grad_enabled())
    return found.value, found.mutated, found.same


def _is_plain(fn: Any, args: tuple[Any, ...]) -> bool:
    """Is it called as it is: a mode is switched, numbers are computed, or a result is taken from several?"""
    if fn is operator.getitem and not isinstance(args[0], TensorMeta):
        return True
    computes = getattr(fn, "__module__", None) in _ARITHMETIC or str(getattr(type(fn), "__module__", "")).startswith("magneto.")
    return fn in _MODES or (computes and not _has_tensor(args))


def _is_pure(fn: Any) -> bool:
    return is_torchs(fn) or getattr(fn, "__module__", None) in _ARITHMETIC


def _key_of(value: Any) -> Any:
    if type(value) is Slot:
        return Slot
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return (type(value), *map(_key_of, value))
    if type(value) is slice:
        return (slice, _key_of(value.start), _key_of(value.stop), _key_of(value.step))
    return key_of(value)


def _filled(value: Any, values: Sequence[Any]) -> Any:
    return _mapped(value, Slot, lambda slot: values[slot.index])


def _mapped(value: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """Nested arguments with what `fn` makes of each value of that kind; fx's lists become plain ones."""
    if type(value) is kind:
        return fn(value)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, fn) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, kind, fn) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [_mapped(item, kind, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) is slice:
        return slice(*[_mapped(end, kind, fn) for end in (value.start, value.stop, value.step)])
    return value


def _tensors_of(value: Any, values: Sequence[Any], now: dict[fx.Node, int]) -> list[fx.Node]:
    """The nodes of tensors among nested arguments, depth first; one that comes twice twice."""
    if isinstance(value, fx.Node):
        return [value] if isinstance(values[now[value]], TensorMeta) else []
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [node for item in items for node in _tensors_of(item, values, now)]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, TensorMeta) or (isinstance(value, (tuple, list)) and any(map(_has_tensor, value)))


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value
