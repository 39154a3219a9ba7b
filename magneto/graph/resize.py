"""Sizes of inputs that vary from call to call: a captured graph is propagated again for each, before it is used with them.

Capture knows tensors of such sizes by probes (`unknown.py`), and what the probes agree on it takes for granted. `Resizer.at` computes the metadata of all nodes for the sizes at hand
and compares: sizes for which anything is not as capture took it, by which the program decides otherwise, or which it cannot compute with, do not belong to the graph.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import fx

from magneto.base.heard import taken
from magneto.graph.fallback import DataDependent
from magneto.graph.meta import TensorMeta
from magneto.graph.modes import modes_kept
from magneto.graph.remember import Remembered
from magneto.graph.unknown import UnknownMeta, UnknownNumber

Term = tuple[int, tuple[int, ...]]
"""A number times the sizes of these symbols."""

KEPT = 8  # sizes whose metadata are remembered
KNOWN = 1 << 14  # sizes of which it is remembered whether they belong to the graph
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "<depends on data>"})()


class _Differs(Exception):
    """These sizes are not what was captured."""


def value_of(term: Term, sizes: Sequence[int]) -> int:
    return term[0] * math.prod(sizes[symbol] for symbol in term[1])


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes and strides of an input, as they follow from the sizes that vary."""

    shape: tuple[Term, ...]
    strides: tuple[Term, ...]

    def at(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(value_of(term, sizes) for term in self.shape), tuple(value_of(term, sizes) for term in self.strides)

    @property
    def symbols(self) -> tuple[tuple[int, int], ...]:
        """(dimension, symbol) of the sizes that vary."""
        return tuple((dim, term[1][0]) for dim, term in enumerate(self.shape) if term[1])

    def renamed(self, names: Mapping[int, int]) -> Form:
        """With other numbers of the symbols."""
        shape, strides = (tuple((n, tuple(names[s] for s in symbols)) for n, symbols in terms) for terms in (self.shape, self.strides))
        return Form(shape, strides)


def form_of(shape: Sequence[int], strides: Sequence[int], symbols: Mapping[int, int]) -> Form:
    """The form of a tensor of which some dimensions have symbols. A stride that is the number of elements below it stays so; any other is a constant."""
    sizes: list[Term] = [(1, (symbols[dim],)) if dim in symbols else (size, ()) for dim, size in enumerate(shape)]
    found: dict[int, Term] = {}
    below: Term = (1, ())
    reach = 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d], -d)):
        found[dim] = below if strides[dim] == reach else (strides[dim], ())
        if strides[dim]:
            number, names = found[dim]
            below = (number * sizes[dim][0], tuple(sorted((*names, *sizes[dim][1]))))
            reach = strides[dim] * shape[dim]
    return Form(tuple(sizes), tuple(found[dim] for dim in range(len(shape))))


def probed(meta: TensorMeta, form: Form, probes: Sequence[Sequence[int]]) -> UnknownMeta:
    """What capture knows of a tensor of that form; `probes`: of each symbol."""
    columns = [form.at(column) for column in zip(*probes, strict=True)]
    return UnknownMeta(tuple(meta.with_(shape=shape, strides=strides) for shape, strides in columns))


@dataclass(slots=True)
class Step:
    """One node of the graph, which others may change: what is called, and what capture knows of the result. `effects`: what it writes and shares memory with."""

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    val: Any
    kind: str
    effects: Any = None

    @classmethod
    def of(cls, node: fx.Node) -> Step:
        val = node.meta.get("val")
        mode = node.op == "call_function" and node.meta.get("mode")
        number, leaf = isinstance(val, UnknownNumber), node.target == "requires_grad_"
        kind = (
            "input"
            if node.op == "placeholder"
            else "mode"
            if mode
            else "none"
            if val is None
            else "number"
            if number
            else "leaf"
            if leaf
            else "call"
        )
        target = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" and kind == "call" else node.target
        return cls(node, node.meta.get("form") if kind == "input" else target, node.args, node.kwargs, val, kind)


class Resizer:
    """`steps`: of the graph, in order, and of the numbers by which the program has decided: `decisions` (node, what it was, or the node that it is equal to)."""

    def __init__(self, steps: Sequence[Step], decisions: Sequence[tuple[fx.Node, Any]], grad_enabled: bool) -> None:
        self.steps, self.decisions, self.grad_enabled = steps, decisions, grad_enabled
        self._found: OrderedDict[tuple[int, ...], dict[fx.Node, Any] | None] = OrderedDict()
        self._known: dict[tuple[int, ...], bool] = {}

    def fits(self, sizes: tuple[int, ...]) -> bool:
        """Whether the graph is what the program computes with these sizes."""
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            known = self._known[sizes] = self.at(sizes) is not None
        return known

    def at(self, sizes: tuple[int, ...]) -> dict[fx.Node, Any] | None:
        """What each node gives: metadata, numbers; None where these sizes do not belong to the graph. UNKNOWN is what depends on data."""
        if sizes in self._found:
            self._found.move_to_end(sizes)
            return self._found[sizes]
        try:
            found: dict[fx.Node, Any] | None = self._run(sizes)
        except Exception:
            found = None
        self._found[sizes] = found
        if len(self._found) > KEPT:
            self._found.popitem(last=False)
        return found

    def _run(self, sizes: tuple[int, ...]) -> dict[fx.Node, Any]:
        values: dict[fx.Node, Any] = {}
        present: dict[fx.Node, Any] = {}  # writes in place change what is known of a tensor
        remembered = Remembered()
        entered: list[Any] = []  # inference modes
        with modes_kept(self.grad_enabled), taken([]):
            try:
                for step in self.steps:
                    if step.kind == "mode":
                        remembered.clear()
                        _switch(step, values, entered)
                    else:
                        values[step.node] = present[step.node] = _value(step, sizes, present, remembered)
            finally:
                for mode in reversed(entered):
                    torch.autograd.grad_mode._exit_inference_mode(mode)  # type: ignore[no-untyped-call]
        for node, outcome in self.decisions:
            found = values[node]
            if found is UNKNOWN or (found != values[outcome] if isinstance(outcome, fx.Node) else bool(found) is not outcome):
                raise _Differs
        return values


def _switch(step: Step, values: dict[fx.Node, Any], entered: list[Any]) -> None:
    values[step.node] = None
    args = fx.map_arg(step.args, lambda node: values[node])
    if step.target is torch.autograd.grad_mode._exit_inference_mode:
        entered.remove(args[0])
    values[step.node] = step.target(*args)
    if step.target is torch.autograd.grad_mode._enter_inference_mode:
        entered.append(values[step.node])


def _value(step: Step, sizes: tuple[int, ...], present: dict[fx.Node, Any], remembered: Remembered) -> Any:
    val = step.val
    if step.kind == "input":
        form: Form | None = step.target
        if form is None:
            return val
        shape, strides = form.at(sizes)
        return val.probes[0].with_(shape=shape, strides=strides)
    if step.kind == "none":
        return None
    tensors: list[fx.Node] = []
    args, kwargs = (_read(value, present, tensors) for value in (step.args, step.kwargs))
    if any(present[node] is UNKNOWN for node in tensors):
        return UNKNOWN
    if step.kind == "number":
        return _number(step, args)
    if step.kind == "leaf":
        found = present[tensors[0]] = args[0].with_(requires_grad=True, is_leaf=True)
        return found
    if step.target is operator.getitem and not isinstance(args[0], TensorMeta):
        found = args[0][args[1]]
    elif not _is_torchs(step.target):  # it may do more than compute
        raise _Differs
    else:
        try:
            result = remembered.call(step.target, args, kwargs, torch.is_grad_enabled())
        except DataDependent:
            return UNKNOWN
        effects = result.mutated, result.aliases, result.same
        if step.effects is None:
            step.effects = effects
        elif step.effects != effects:
            raise _Differs
        found = result.value
        if result.same is not None:
            present[tensors[result.same]] = _checked(val, found)
    return _checked(val, found)


def _is_torchs(fn: Any) -> bool:
    """Whether a call runs no code of the program (but what it has registered for an operator of its own)."""
    return isinstance(fn, _TARGETS) or (isinstance(fn, FunctionType) and fn.__module__.partition(".")[0] == "torch")


_TARGETS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _read(value: Any, present: Mapping[fx.Node, Any], tensors: list[fx.Node]) -> Any:
    """Arguments with what is known in place of nodes; `tensors`: the nodes of tensors in order."""
    if isinstance(value, fx.Node):
        found = present[value]
        if isinstance(found, TensorMeta) or found is UNKNOWN:
            tensors.append(value)
        return found
    if isinstance(value, (tuple, list)):
        items = [_read(item, present, tensors) for item in value]
        return items if isinstance(value, list) else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, Mapping):
        return {key: _read(item, present, tensors) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_read(part, present, tensors) for part in (value.start, value.stop, value.step)))
    return value


def _number(step: Step, args: Any) -> Any:
    if isinstance(step.target, str):
        meta: TensorMeta = args[0]
        found: Any = meta.numel if step.target == "numel" else (meta.shape if step.target == "size" else meta.strides)[args[1]]
    else:
        found = step.target(*args)
    if type(found) is not step.val.type:
        raise _Differs
    return found


def _facts(meta: TensorMeta) -> tuple[Any, ...]:
    layout = (meta.is_contiguous(), meta.is_channels_last(), meta.is_dense(), meta.storage_offset, meta.lazy)
    return (meta.dtype, meta.device, len(meta.shape), *layout, *meta.shape, *meta.strides)


def _checked(val: Any, found: Any) -> Any:
    """What was found, with autograd's flags as capture knows them; _Differs where it is not what capture took it for."""
    if isinstance(val, UnknownMeta):
        known = zip(*(_facts(meta) for meta in val.probes if meta is not None), strict=True)
        if not isinstance(found, TensorMeta) or len(facts := _facts(found)) != 8 + 2 * val.ndim:
            raise _Differs
        if any(column.count(column[0]) == len(column) and column[0] != fact for column, fact in zip(known, facts, strict=True)):
            raise _Differs
        return found.with_(requires_grad=val.requires_grad, is_leaf=val.is_leaf)
    if isinstance(val, TensorMeta):
        if not isinstance(found, TensorMeta) or found.with_(requires_grad=val.requires_grad, is_leaf=val.is_leaf) != val:
            raise _Differs
        return val
    if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size):
        if type(found) is not type(val) or len(found) != len(val):
            raise _Differs
        items = [_checked(one, other) for one, other in zip(val, found, strict=True)]
        return type(val)(*items) if hasattr(val, "_fields") else type(val)(items)
    if isinstance(val, dict):
        if not isinstance(found, dict) or list(found) != list(val):
            raise _Differs
        return {key: _checked(one, found[key]) for key, one in val.items()}
    if type(found) is not type(val) or found != val:
        raise _Differs
    return found


def resizer(
    nodes: Sequence[fx.Node], kept: Callable[[fx.Node], bool], decisions: Sequence[tuple[fx.Node, Any]], grad_enabled: bool
) -> Callable[[], Resizer]:
    """Of a graph that is about to be pruned; what is called afterwards makes the Resizer of what is `kept` and what decisions come from."""
    steps = [Step.of(node) for node in nodes if node.op != "output"]
    needed = {node for pair in decisions for node in pair if isinstance(node, fx.Node)}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return lambda: Resizer([step for step in steps if step.node in needed or kept(step.node)], decisions, grad_enabled)


__all__ = ["UNKNOWN", "Form", "Resizer", "form_of", "probed", "resizer"]
