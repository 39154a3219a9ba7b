"""`export`: the whole function as one graph, called with the function's own arguments; a graph break is an error."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.refusal import Refusal
from magneto.aot_autograd.signature import Alias, Input, Result
from magneto.aot_autograd.trace import trace
from magneto.api.optimize import make_optimized
from magneto.base.errors import UserError
from magneto.dynamo import trackers
from magneto.dynamo.guards.rows import GuardSet
from magneto.dynamo.region.build import RegionPlan
from magneto.dynamo.region.policy import Context
from magneto.dynamo.trackers.base import Tracker


def export(fn: Callable[..., Any], *args: Any, aten_graph: bool = False, **kwargs: Any) -> tuple[fx.GraphModule, GuardSet]:
    """Capture `fn(*args, **kwargs)` as one GraphModule and the guards under which it holds.

    The GraphModule takes the same arguments as the call and returns the same structure (tensors in tuples, lists and dicts). Parameters and other tensors that `fn`
    reaches by itself become attributes of the GraphModule. `aten_graph=True` gives ATen operations instead of torch-level calls. The call is executed once.
    Raises Unsupported at the first graph break, UserError when the result holds something that a graph cannot return.
    """
    if not callable(fn):
        raise UserError("U001", function="export", expected="a callable", got=type(fn).__name__)
    captured: list[tuple[RegionPlan, fx.GraphModule]] = []

    def on_plan(plan: RegionPlan) -> None:
        if not captured:
            captured.append((plan, _exported(fn, plan, args, kwargs, aten_graph)))

    context = Context(lambda gm, inputs: gm.forward, "export", nopython=True, on_plan=on_plan)
    args, kwargs = _told_apart(args, kwargs)
    make_optimized(fn, context)(*args, **kwargs)
    if not captured:
        raise UserError("U006", function="export", reason=f"{getattr(fn, '__name__', fn)!r} runs no Python code that can be captured")
    plan, gm = captured[0]
    return gm, plan.guards


def _told_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor given for two parameters becomes two tensors on the same memory, so that the graph keeps both inputs."""
    seen: set[int] = set()

    def one(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(one, value))
        if type(value) is dict:
            return {key: one(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in seen:
            return torch.ops.aten.alias(value)
        seen.add(id(value))
        return value

    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}


class _Export:
    """Rewrites a region's graph into one over the call's own arguments."""

    def __init__(self, plan: RegionPlan, names: Mapping[str, Any]) -> None:
        self.plan = plan
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.by_id: dict[int, fx.Node] = {}
        for name, value in names.items():
            self._argument(self.graph.placeholder(name), value)
        self.env: dict[fx.Node, fx.Node] = {}

    def _argument(self, node: fx.Node, value: Any) -> None:
        """Make the tensors inside an argument reachable."""
        if isinstance(value, torch.Tensor):
            self.by_id.setdefault(id(value), node)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._element(node, key, item)
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                self._element(node, index, item)

    def _element(self, node: fx.Node, key: Any, item: Any) -> None:
        if isinstance(item, (torch.Tensor, tuple, list, Mapping)):
            self._argument(self.graph.call_function(operator.getitem, (node, key)), item)

    def tensor(self, obj: torch.Tensor, name: str) -> fx.Node:
        """The node of an outside tensor: part of an argument, or an attribute of the exported module."""
        found = self.by_id.get(id(obj))
        if found is None:
            name = name.removeprefix("l_").strip("_") or "tensor"
            while hasattr(self.root, name):
                name += "_"
            if isinstance(obj, torch.nn.Parameter):
                self.root.register_parameter(name, obj)
            else:
                self.root.register_buffer(name, obj)
            found = self.by_id[id(obj)] = self.graph.get_attr(name)
        return found

    def build(self, aten_graph: bool) -> fx.GraphModule:
        machine, value = self.plan.machine, self.plan.ending.value
        assert value is not None
        if machine.draws:
            raise UserError("U006", function="export", reason=f"a graph cannot make the call {machine.draws[0].show()}")
        for node, tracker in machine.recorder.inputs:
            self.env[node] = self.tensor(tracker.obj, node.name)
            if isinstance(tracker, trackers.MadeInput):  # a constant: the program makes it anew at each call
                self.env[node] = self.graph.call_method("clone", (self.env[node],))
        if self.plan.gm is not None and aten_graph:
            self._aten(self.plan.gm)
        elif self.plan.gm is not None:
            for node in self.plan.gm.graph.nodes:
                if node.op.startswith("call"):
                    self.env[node] = self.graph.node_copy(node, lambda old: self.env[old])
        self.graph.output(self.result(value))
        used = {node for node in self.graph.nodes if node.op == "call_function" and node.target is operator.getitem and not node.users}
        for node in reversed(list(self.graph.nodes)):
            if node in used and not node.users:
                self.graph.erase_node(node)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, class_name="ExportedGraph")

    def _aten(self, gm: fx.GraphModule) -> None:
        """Put the functional ATen graph in the place of the captured one: inputs, calls, write-backs, then what each captured output is."""
        try:
            traced = trace(gm, self.plan.example_inputs, gm.meta["magneto"]["grad_enabled"])
        except Refusal as refusal:
            raise UserError("U006", function="export", reason=f"no ATen graph: {refusal}") from None
        signature = traced.signature
        env: dict[fx.Node, fx.Node] = {}
        inputs = [self.env[node] for node, _ in self.plan.machine.recorder.inputs]
        inputs += [self.tensor(constant, f"constant_{k}") for k, constant in enumerate(traced.constants)]
        results: tuple[fx.Node, ...] = ()
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                env[node] = inputs[len(env)]
            elif node.op == "output":
                results = tuple(env[source] for source in node.args[0])
            else:
                env[node] = self.graph.node_copy(node, lambda old: env[old])

        def found(place: Any) -> Any:
            if isinstance(place, Result):
                return results[place.index]
            if isinstance(place, Input):
                return inputs[place.index]
            if isinstance(place, Alias):
                node = found(place.base)
                for step in place.steps:
                    node = self.graph.call_function(step.op, (node, *step.args))
                return node
            return place.value

        for mutation in signature.mutations:
            self.graph.call_function(torch.ops.aten.copy_.default, (inputs[mutation.index], found(mutation.source)))
        outputs = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        for node, place in zip(outputs, signature.outputs, strict=True):
            self.env[node] = found(place)

    def result(self, value: Tracker) -> Any:
        """The output structure with nodes in place of tensors."""
        machine = self.plan.machine
        if isinstance(value, trackers.TensorTracker):
            if value.source is not None:
                return self.tensor(value.obj, value.source.text())
            assert value.node is not None
            return self.env[value.node]
        const = value.try_const()
        if const is not None:
            return const.value
        if isinstance(value, (trackers.TupleTracker, trackers.ListTracker)):
            items = [self.result(item) for item in value.items(machine)]
            kind = value.python_type()
            return kind(*items) if hasattr(kind, "_fields") else kind(items)
        if issubclass(value.python_type(), dict):
            keys = machine.iterate(value)
            pairs = {}
            for key in keys:
                known = key.try_const()
                if known is None or not isinstance(known.value, str):
                    raise UserError("U006", function="export", reason="a dictionary in the result has keys that are not strings")
                pairs[known.value] = self.result(machine.apply(operator.getitem, value, key))
            return pairs
        raise UserError("U006", function="export", reason=f"the result holds a {value.python_type().__name__}, which a graph cannot return")


def _exported(fn: Callable[..., Any], plan: RegionPlan, args: Sequence[Any], kwargs: Mapping[str, Any], aten_graph: bool) -> fx.GraphModule:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    names: dict[str, Any] = {}
    try:
        bound = inspect.signature(target).bind(*args, **kwargs)
    except (TypeError, ValueError):
        bound = None
    if bound is None:
        names.update({f"arg{k}": value for k, value in enumerate(args)}, **kwargs)
    else:
        for name, parameter in bound.signature.parameters.items():
            if name not in bound.arguments:
                continue
            value = bound.arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                names.update({f"{name}_{k}": item for k, item in enumerate(value)})
            elif parameter.kind is parameter.VAR_KEYWORD:
                names.update(value)
            else:
                names[name] = value
    return _Export(plan, names).build(aten_graph)
