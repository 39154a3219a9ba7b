"""Sizes of inputs that vary from call to call: a captured graph is propagated again for each, before it is used with them.

Capture knows tensors of such sizes by probes (`unknown.py`), and what the probes agree on it takes for granted. `Resizer.at` computes the metadata of all nodes for the sizes at hand
and compares: sizes for which anything is not as capture took it, by which the program decides otherwise, or which it cannot compute with, do not belong to the graph.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import fx

from magneto.base.dataclass import dataclass, replace
from magneto.base.flags import config
from magneto.base.heard import taken
from magneto.graph import numbered, scaled
from magneto.graph.fake import fake_call
from magneto.graph.fallback import DataDependent
from magneto.graph.gradient import Gradients
from magneto.graph.meta import TensorMeta
from magneto.graph.modes import modes_kept
from magneto.graph.remember import is_torchs, key_of
from magneto.graph.unknown import UnknownMeta, UnknownNumber

Factor = tuple[int, int]
"""The size of a symbol plus a constant."""
Term = tuple[int, tuple[Factor, ...]]
"""A number times these factors."""

KEPT = 8  # sizes whose metadata are remembered
KNOWN = 1 << 14  # sizes of which it is remembered whether they belong to the graph
PERIOD = 64  # of strides: what divides a larger number makes no difference
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "<depends on data>"})()


class _Differs(Exception):
    """These sizes are not what was captured."""


def value_of(term: Term, sizes: Sequence[int]) -> int:
    return term[0] * math.prod(sizes[symbol] + plus for symbol, plus in term[1])


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes and strides of an input, as they follow from what varies. `free`: dimensions whose strides are symbols of their own, from inside out, each with those that lie inside of it."""

    shape: tuple[Term, ...]
    strides: tuple[Term, ...]
    free: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def at(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(value_of(term, sizes) for term in self.shape), tuple(value_of(term, sizes) for term in self.strides)

    @property
    def symbols(self) -> tuple[tuple[int, int, int], ...]:
        """(dimension, symbol, what is added to it) of the sizes that vary, and of strides, which are numbered behind the dimensions."""
        sizes = tuple((dim, *term[1][0]) for dim, term in enumerate(self.shape) if term[1])
        return (*sizes, *((len(self.shape) + dim, *self.strides[dim][1][0]) for dim, _ in self.free))

    def renamed(self, names: Mapping[int, int]) -> Form:
        """With other numbers of the symbols."""
        shape, strides = (tuple((n, tuple((names[s], plus) for s, plus in by)) for n, by in terms) for terms in (self.shape, self.strides))
        return Form(shape, strides, self.free)

    def rows(self, place: int) -> Iterator[tuple[int, int, int, int]]:
        """The same with the number of the input, and ~dimension for its stride."""
        ndim = len(self.shape)
        return ((place, dim if dim < ndim else ~(dim - ndim), symbol, plus) for dim, symbol, plus in self.symbols)

    def reaches(self, sizes: Sequence[int]) -> list[int]:
        """How far what lies inside of each free dimension reaches."""
        return [reach(*self.at(sizes), inside) for _, inside in self.free]


def reach(shape: Sequence[int], strides: Sequence[int], dims: Iterable[int]) -> int:
    """How many places these dimensions take up."""
    return max([1, *(shape[dim] * strides[dim] for dim in dims)])


def inside_out(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions in the order in which they lie in memory."""
    return sorted(range(len(shape)), key=lambda d: (strides[d], shape[d], -d))


def gaps(shape: Sequence[int], strides: Sequence[int], dims: Collection[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Which of these dimensions may have strides of their own (`Form.free`): there are gaps between what they count, and no stride outside of theirs is a constant."""
    order, found, end = inside_out(shape, strides), [], 1
    for place, dim in enumerate(order):
        inside = tuple(order[:place])
        if dim in dims and strides[dim] > reach(shape, strides, inside):
            found.append((dim, inside))
        elif strides[dim] != end and shape[dim] != 1:
            found.clear()
        if strides[dim] and (shape[dim] != 1 or strides[dim] == end):
            end = strides[dim] * shape[dim]
    return found


def form_of(
    shape: Sequence[int],
    strides: Sequence[int],
    symbols: Mapping[int, Factor],
    free: Mapping[int, tuple[int, tuple[int, ...]]] | None = None,
) -> Form:
    """The form of a tensor of which some dimensions follow from symbols, and some strides are symbols of their own (`free`: these, and what lies inside). A stride that is the number of elements below
    it stays so; any other is a constant."""
    free = free or {}
    sizes: list[Term] = [(1, (symbols[dim],)) if dim in symbols else (size, ()) for dim, size in enumerate(shape)]
    found: dict[int, Term] = {}
    below: Term = (1, ())
    end = 1
    for dim in inside_out(shape, strides):
        found[dim] = (1, ((free[dim][0], 0),)) if dim in free else below if strides[dim] == end else (strides[dim], ())
        if strides[dim] and (shape[dim] != 1 or strides[dim] == end):
            number, names = found[dim]
            below = (number * sizes[dim][0], tuple(sorted((*names, *sizes[dim][1]))))
            end = strides[dim] * shape[dim]
    own = tuple((dim, inside) for dim, (_, inside) in free.items())
    return Form(tuple(sizes), tuple(found[dim] for dim in range(len(shape))), own)


def probed(meta: TensorMeta, form: Form, probes: Sequence[Sequence[int]]) -> UnknownMeta:
    """What capture knows of a tensor of that form; `probes`: of each symbol."""
    columns = [form.at(column) for column in zip(*probes, strict=True)]
    return UnknownMeta(tuple(meta.with_(shape=shape, strides=strides) for shape, strides in columns))


@dataclass(slots=True)
class Step:
    """One node of the graph, which others may change: what is called, and what capture knows of the result. `effects`: what it writes and shares memory with. `alike`: calls for which it is equal differ
    at most in what is known of the nodes in their arguments, `read`; `facts`: what all probes of the result agree on."""

    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    val: Any
    kind: str
    effects: Any = None
    read: tuple[fx.Node, ...] = ()
    alike: Any = None
    facts: Any = None

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
            else "gradients"
            if isinstance(node.target, Gradients)
            else "number"
            if number
            else "leaf"
            if leaf
            else "call"
        )
        target = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" and kind == "call" else node.target
        step = cls(node, node.meta.get("form") if kind == "input" else target, node.args, node.kwargs, val, kind)
        return step.learnt()

    def learnt(self) -> Step:
        """With what follows from its value and arguments."""
        if self.kind == "call":
            self.read, self.facts = tuple(_nodes_of((self.args, self.kwargs))), _agreed(self.val)
            with suppress(TypeError):
                self.alike = (
                    (self.target, _key_of(self.args), _key_of(self.kwargs), key_of_facts(self.facts)) if is_torchs(self.target) else None
                )
        return self


class Resizer:
    """`steps`: of the graph, in order, and of the numbers by which the program has decided: `decisions` (node, what it was, or the node that it is equal to)."""

    def __init__(self, steps: Sequence[Step], decisions: Sequence[tuple[fx.Node, Any]], grad_enabled: bool) -> None:
        self.steps, self.decisions, self.grad_enabled, self.loose = steps, decisions, grad_enabled, False
        self._found: OrderedDict[tuple[int, ...], dict[fx.Node, Any] | None] = OrderedDict()
        self._known: dict[tuple[int, ...], bool] = {}
        self._trusted: list[Callable[[tuple[int, ...]], Mapping[fx.Node, Any] | None]] = []
        self._forms: dict[Any, Form] = {step.node: step.target for step in steps if step.kind == "input" and step.target is not None}
        self._numbers = [step for step in self.steps if step.kind == "number"]
        told = any(step.target == "stride" for step in self._numbers)
        self._free = () if told else tuple(form for form in self._forms.values() if form.free)

    def trust(self, expected: Callable[[tuple[int, ...]], Mapping[fx.Node, Any] | None]) -> None:
        """For sizes at which `expected` gives something, the numbers of nodes, no tensor is propagated: only numbers are computed, and what the program decides by them."""
        self._trusted.append(expected)

    def trusts(self, sizes: tuple[int, ...]) -> bool:
        """Whether these are such sizes, and belong to the graph."""
        found = self.expected(sizes)
        with suppress(Exception):
            return found is not None and self._decided(sizes, found)
        return False

    def expected(self, sizes: tuple[int, ...]) -> Mapping[fx.Node, Any] | None:
        """What the first one of these gives that gives something."""
        return next((found for expected in self._trusted if (found := expected(sizes)) is not None), None)

    def rows(self, place: int, node: fx.Node) -> Iterator[tuple[int, int, int, int]]:
        """What varies of an input: see `Form.rows`."""
        return self._forms[node].rows(place) if node in self._forms else iter(())

    def _decided(self, sizes: tuple[int, ...], expected: Mapping[fx.Node, Any]) -> bool:
        values: dict[fx.Node, Any] = {}
        forms = self._forms
        for step in self._numbers:
            of = step.args[0]
            if isinstance(step.target, str) and of not in forms:
                found = expected.get(step.node)
            elif isinstance(step.target, str):
                shape, strides = forms[of].at(sizes)
                found = math.prod(shape) if step.target == "numel" else (shape if step.target == "size" else strides)[step.args[1]]
            else:
                found = step.target(*_read(step.args, values, []))
            if type(found) is not step.val.type or expected.get(step.node, found) != found:
                return False
            values[step.node] = found
        return all(
            (values[node] == values[outcome]) if isinstance(outcome, fx.Node) else (bool(values[node]) is outcome)
            for node, outcome in self.decisions
        )

    def copied(self, copies: Mapping[fx.Node, fx.Node]) -> Resizer:
        """Of a copy of the graph that runs without gradients and has lost some switches of torch's modes."""
        get = {node: node for step in self.steps for node in (step.node, *step.node.all_input_nodes)} | dict(copies)
        steps = [
            replace(
                step, node=get[step.node], args=fx.map_arg(step.args, get.__getitem__), kwargs=fx.map_arg(step.kwargs, get.__getitem__)
            ).learnt()
            for step in self.steps
            if step.kind != "mode" or step.node in copies
        ]
        decisions = [(get[node], get[what] if isinstance(what, fx.Node) else what) for node, what in self.decisions]
        made, back = Resizer(steps, decisions, False), {copy: node for node, copy in get.items()}

        def expected(sizes: tuple[int, ...]) -> Mapping[fx.Node, Any] | None:
            found = made.expected(sizes)
            return None if found is None else {back[node]: number for node, number in found.items()}

        self.trust(expected)
        return made

    def fits(self, sizes: tuple[int, ...]) -> bool:
        """Whether the graph is what the program computes with these sizes."""
        sizes = self._likened(sizes)
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            known = self._known[sizes] = (not config.verify and self.trusts(sizes)) or self.at(sizes) is not None
        return known

    def _likened(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of inputs that leave gaps differ for the graph's nodes in what they are divisible by, and else in nothing: the least ones stand for all."""
        found = list(sizes)
        for form in self._free:
            for place, (dim, _) in enumerate(form.free):
                symbol, least = form.strides[dim][1][0][0], form.reaches(found)[place] + 1
                found[symbol] = least + (found[symbol] - least) % PERIOD
        return tuple(found)

    def at(self, sizes: tuple[int, ...]) -> dict[fx.Node, Any] | None:
        """What each node gives: metadata, numbers; None where these sizes do not belong to the graph. UNKNOWN is what depends on data."""
        if sizes in self._found:
            self._found.move_to_end(sizes)
            return self._found[sizes]
        try:
            found: dict[fx.Node, Any] | None = self.run(sizes)
        except Exception:
            found = None
        self._found[sizes] = found
        if len(self._found) > KEPT:
            self._found.popitem(last=False)
        return found

    def run(self, sizes: tuple[int, ...]) -> dict[fx.Node, Any]:
        """The same, anew. Raises where there is None."""
        now = _Now(self.loose)
        entered: list[Any] = []  # inference modes
        with modes_kept(self.grad_enabled), taken([]):
            try:
                for step in self.steps:
                    if step.kind == "mode":
                        now.results.clear()
                        _switch(step, now.values, entered)
                    else:
                        now.values[step.node] = _value(step, sizes, now)
            finally:
                for mode in reversed(entered):
                    torch.autograd.grad_mode._exit_inference_mode(mode)  # type: ignore[no-untyped-call]
        for node, outcome in self.decisions:
            found = now.values[node]
            if found is UNKNOWN or (found != now.values[outcome] if isinstance(outcome, fx.Node) else bool(found) is not outcome):
                raise _Differs
        return now.values


class _Now:
    """One propagation under way; `loose`: whatever it finds. `present`: what is known of a node's tensor now: writes in place change it; `numbers`: equal for nodes of which the same is known. `results`: of calls, by what decides about them."""

    __slots__ = ("_seen", "loose", "numbers", "present", "results", "values")

    def __init__(self, loose: bool) -> None:
        self.loose = loose
        self.values: dict[fx.Node, Any] = {}
        self.present: dict[fx.Node, Any] = {}
        self.numbers: dict[fx.Node, int] = {}
        self.results: dict[Any, tuple[Any, int, Any]] = {}
        self._seen: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """Equal values have one number."""
        key = (type(value), value) if type(value) in (int, float, bool, TensorMeta) else id(value)  # `values` hold all that is found
        return self._seen.setdefault(key, len(self._seen))

    def put(self, node: fx.Node, value: Any, number: int | None = None) -> Any:
        self.present[node] = value
        self.numbers[node] = self.number(value) if number is None else number
        return value


def _switch(step: Step, values: dict[fx.Node, Any], entered: list[Any]) -> None:
    values[step.node] = None
    args = fx.map_arg(step.args, lambda node: values[node])
    if step.target is torch.autograd.grad_mode._exit_inference_mode:
        entered.remove(args[0])
    values[step.node] = step.target(*args)
    if step.target is torch.autograd.grad_mode._enter_inference_mode:
        entered.append(values[step.node])


def _value(step: Step, sizes: tuple[int, ...], now: _Now) -> Any:
    if step.kind == "call":
        return _called(step, now)
    val, present = step.val, now.present
    if step.kind == "input":
        form: Form | None = step.target
        if form is None:
            return now.put(step.node, val)
        shape, strides = form.at(sizes)
        return now.put(step.node, val.probes[0].with_(shape=shape, strides=strides))
    if step.kind == "none":
        return now.put(step.node, None)
    if step.kind == "gradients":  # of leaves whose sizes are constants, laid out as these
        return now.put(step.node, val)
    tensors: list[fx.Node] = []
    args = _read(step.args, present, tensors)
    if any(present[node] is UNKNOWN for node in tensors):
        return now.put(step.node, UNKNOWN)
    if step.kind == "number":
        return now.put(step.node, _number(step, args))
    now.put(tensors[0], args[0].with_(requires_grad=True, is_leaf=True))
    return now.put(step.node, present[tensors[0]])


def _called(step: Step, now: _Now) -> Any:
    present, key = now.present, None
    if step.alike is not None:
        key = step.alike, *[now.numbers[node] for node in step.read]
        known = now.results.get(key)
        if known is not None:
            found, number, effects = known
            _agree(step, effects)
            if effects is not None and effects[2] is not None:
                now.put([node for node in step.read if isinstance(present[node], TensorMeta)][effects[2]], found, number)
            return now.put(step.node, found, number)
    tensors: list[fx.Node] = []
    args, kwargs = (_read(value, present, tensors) for value in (step.args, step.kwargs))
    if any(present[node] is UNKNOWN for node in tensors):
        return now.put(step.node, UNKNOWN)
    effects = None
    if step.target is operator.getitem and not isinstance(args[0], TensorMeta):
        found = args[0][args[1]]
    elif not _is_torchs(step.target):  # it may do more than compute
        raise _Differs
    else:
        try:
            result = fake_call(step.target, args, kwargs, grad_enabled=torch.is_grad_enabled())
        except DataDependent:
            return now.put(step.node, UNKNOWN)
        found, effects = result.value, (result.mutated, result.aliases, result.same)
        _agree(step, effects)
    found = now.put(step.node, found if now.loose else _checked(step.val, found, step.facts))
    if effects is not None and effects[2] is not None:
        now.put(tensors[effects[2]], found)
    if key is not None:
        now.results[key] = found, now.numbers[step.node], effects
    return found


def _agree(step: Step, effects: Any) -> None:
    if step.effects is None:
        step.effects = effects
    elif step.effects != effects:
        raise _Differs


def _is_torchs(fn: Any) -> bool:
    """Whether a call runs no code of the program (but what it has registered for an operator of its own)."""
    return isinstance(fn, _TARGETS) or (
        isinstance(fn, FunctionType)
        and (fn.__module__ in (scaled.__name__, numbered.__name__) or fn.__module__.partition(".")[0] == "torch")
    )


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


def _agreed(val: Any) -> Any:
    """What is known of a value, by which `_checked` goes: of a tensor of unknown size, (place among the facts, fact) of those that all probes agree on."""
    if isinstance(val, UnknownMeta):
        columns = zip(*(_facts(meta) for meta in val.probes if meta is not None), strict=True)
        known = tuple((k, column[0]) for k, column in enumerate(columns) if column.count(column[0]) == len(column))
        return UnknownMeta, val.ndim, val.requires_grad, val.is_leaf, known
    if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size):
        return type(val), tuple(map(_agreed, val))
    return val


def layouts(inputs: Sequence[tuple[Form, UnknownMeta]]) -> Callable[[Sequence[int]], bool]:
    """Whether inputs of these forms are laid out at some sizes as capture took them to be: another layout may happen to have the same strides."""
    known = [(form, meta, _agreed(meta)) for form, meta in inputs]

    def hold(sizes: Sequence[int]) -> bool:
        try:
            for form, meta, facts in known:
                shape, strides = form.at(sizes)
                if any(strides[dim] <= reach(shape, strides, inside) for dim, inside in form.free):
                    return False
                _checked(meta, meta.probes[0].with_(shape=shape, strides=strides), facts)  # type: ignore[union-attr]
        except _Differs:
            return False
        return True

    return hold


def key_of_facts(facts: Any) -> Any:
    """These, where calls that agree in them may be taken for one. TypeError elsewhere."""
    if isinstance(facts, TensorMeta) or (isinstance(facts, tuple) and facts and facts[0] is UnknownMeta):
        return facts
    if isinstance(facts, tuple) and len(facts) == 2 and facts[0] in (tuple, list):
        return facts[0], tuple(map(key_of_facts, facts[1]))
    raise TypeError


def _nodes_of(value: Any) -> Iterator[fx.Node]:
    """The nodes among nested arguments, in the order of `_read`; one that comes twice twice."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list, Mapping, slice)):
        items = (
            (value.start, value.stop, value.step) if isinstance(value, slice) else value.values() if isinstance(value, Mapping) else value
        )
        for item in items:
            yield from _nodes_of(item)


def _key_of(value: Any) -> Any:
    """As `key_of`, for arguments with nodes."""
    if isinstance(value, fx.Node):
        return fx.Node
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return (isinstance(value, list), *map(_key_of, value))
    if isinstance(value, Mapping):
        return tuple((name, _key_of(item)) for name, item in value.items())
    if isinstance(value, slice):
        return slice, _key_of(value.start), _key_of(value.stop), _key_of(value.step)
    return key_of(value)


def _checked(val: Any, found: Any, known: Any) -> Any:
    """What was found, with autograd's flags as capture knows them; _Differs where it is not what capture took it for (`known`)."""
    if isinstance(val, UnknownMeta):
        if not isinstance(found, TensorMeta) or len(found.shape) != val.ndim:
            raise _Differs
        facts = _facts(found)
        if any(facts[k] != fact for k, fact in known[4]):
            raise _Differs
        return found.with_(requires_grad=val.requires_grad, is_leaf=val.is_leaf)
    if isinstance(val, TensorMeta):
        if not isinstance(found, TensorMeta) or found.with_(requires_grad=val.requires_grad, is_leaf=val.is_leaf) != val:
            raise _Differs
        return val
    if isinstance(val, (tuple, list)) and not isinstance(val, torch.Size):
        if type(found) is not type(val) or len(found) != len(val):
            raise _Differs
        items = [_checked(one, other, facts) for one, other, facts in zip(val, found, known[1], strict=True)]
        return type(val)(*items) if hasattr(val, "_fields") else type(val)(items)
    if isinstance(val, dict):
        if not isinstance(found, dict) or list(found) != list(val):
            raise _Differs
        return {key: _checked(one, found[key], _agreed(one)) for key, one in val.items()}
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
