"""backward() and torch.autograd.grad inside a region: one node that runs autograd's engine (graph/gradient.py), and gradients as effects.

Which inputs the results depend on, and how the gradients are laid out, comes from running the recorded graph once on fake tensors, through the engine itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from magneto.base.errors import GraphBreak
from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Attr
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.iterator import known_items
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.object import payload_of
from magneto.dynamo.trackers.rules_function_hook import Identity, identities_among
from magneto.dynamo.trackers.rules_hook import Hooked, engine_mode, hooked_among, run_hooks
from magneto.dynamo.trackers.rules_tensor_state import set_grad
from magneto.dynamo.trackers.tensor import PLAIN_CLASSES, TensorTracker, guard_leaf, tensor_attr
from magneto.graph import DataDependent, UnsupportedFake
from magneto.graph.gradient import Gradients, kept, propagate_gradients
from magneto.graph.unknown import UnknownMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _refuse(m: Machine, name: str, reason: str) -> NoReturn:
    m.graph_break("B101", callee=name, reason=reason)


def _tensors(m: Machine, name: str, value: Tracker | None, what: str) -> list[TensorTracker]:
    """A tensor, or a sequence of tensors."""
    items = [value] if value is None or isinstance(value, TensorTracker) else m.iterate(value)
    for item in items:
        if not isinstance(item, TensorTracker) or item.cls not in PLAIN_CLASSES:
            _refuse(m, name, f"{what} that are no plain tensors")
    return items  # type: ignore[return-value]


def _seeds(m: Machine, name: str, value: Tracker | None, n: int) -> list[TensorTracker | None]:
    if value is None or _is_none(value):
        return [None] * n
    items = [value] if isinstance(value, TensorTracker) else m.iterate(value)
    if len(items) != n:
        _refuse(m, name, "as many gradients as tensors are needed")
    return [None if _is_none(item) else _tensors(m, name, item, "gradients")[0] for item in items]


@contextmanager
def _asking(m: Machine, wanted: Tracker | None) -> Iterator[None]:
    """A break in the body asks autograd for gradients of what the region computes on the way, if `wanted` are such tensors."""
    try:
        yield
    except GraphBreak as reason:
        items = [] if wanted is None else [wanted] if isinstance(wanted, TensorTracker) else known_items(m, wanted) or []
        reason.asks_history = any(isinstance(t, TensorTracker) and t.source is None and t.node and not t.meta.is_leaf for t in items)
        raise


def _is_none(value: Tracker) -> bool:
    return isinstance(value, ConstTracker) and value.read() is None


def _flag(m: Machine, value: Tracker | None, default: bool) -> bool:
    return default if value is None or _is_none(value) else m.truth(value)


@rule(torch.Tensor.backward, TensorTracker)
def tensor_backward(
    m: Machine, v: TensorTracker, gradient: Tracker | None = None, retain_graph: Tracker | None = None, create_graph: Tracker | None = None,
    inputs: Tracker | None = None,
) -> Any:  # fmt: skip
    with _asking(m, inputs):
        return _backward(m, v, gradient, retain_graph, create_graph, None, inputs, 3)


@rule(torch.autograd.backward)
def backward(
    m: Machine, tensors: Tracker, grad_tensors: Tracker | None = None, retain_graph: Tracker | None = None,
    create_graph: Tracker | None = None, grad_variables: Tracker | None = None, inputs: Tracker | None = None,
) -> Any:  # fmt: skip
    with _asking(m, inputs):
        return _backward(m, tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs, 2)


def _backward(
    m: Machine, tensors: Tracker, grad_tensors: Tracker | None, retain_graph: Tracker | None, create_graph: Tracker | None,
    grad_variables: Tracker | None, inputs: Tracker | None, frames: int,
) -> Any:  # fmt: skip
    """Gradients of the leaves that the results depend on become, or are added to, their `.grad`."""
    name = "backward"
    if m.recorder.inference_mode:  # type: ignore[attr-defined]
        _refuse(m, name, "inference mode")
    outputs = _tensors(m, name, tensors, "results")
    seeds = _seeds(m, name, grad_tensors, len(outputs))
    if _flag(m, create_graph, False) or grad_variables is not None:
        _refuse(m, name, "create_graph")
    chosen = None if inputs is None or _is_none(inputs) else _tensors(m, name, inputs, "inputs")
    leaves = _leaves(m, name, outputs, {id(tensor) for tensor in chosen or ()})
    made = [leaf for leaf in m.recorder.made_leaves if leaf.meta.requires_grad and leaf.meta.is_leaf]  # type: ignore[attr-defined]
    on_the_way = _ancestors(m, [m.recorder.input_node(output) for output in outputs])  # type: ignore[attr-defined]
    hooked = hooked_among(m, on_the_way)
    identities = identities_among(m, on_the_way, list(hooked))
    if chosen is not None:
        _check_chosen(m, name, chosen, made)
        _leave_hooks(m, hooked, identities)
        leaves, made = chosen, []
    hooks = {leaf: found for leaf in (*leaves, *made) if any(found := [_hooks(m, name, leaf, attribute) for attribute in _HOOKS])}
    recorder: Any = m.recorder  # type: ignore[attr-defined]
    around, recorder.engine = recorder.engine, (len(m.frames) - 1, frames)  # type: ignore[attr-defined]
    try:
        _run(m, name, outputs, seeds, [*leaves, *made], hooks, hooked, identities, _flag(m, retain_graph, False))
    finally:
        recorder.engine = around
    return m.const(None)


def _leave_hooks(m: Machine, hooked: dict[TensorTracker, list[Hooked]], identities: Sequence[Identity]) -> None:
    """Hooks on the way of what does not call them here."""
    for one in [*(found[0] for found in hooked.values()), *(identity.hooks[0] for identity in identities)]:
        m.recorder.leave_hook(one)  # type: ignore[attr-defined]


def _check_chosen(m: Machine, name: str, chosen: Sequence[TensorTracker], made: Sequence[TensorTracker]) -> None:
    """`inputs=` of backward: different leaves."""
    if not chosen or len({id(tensor) for tensor in chosen}) < len(chosen):
        _refuse(m, name, "no inputs, or the same twice")
    for tensor in chosen:
        if tensor.source is not None:
            if tensor.cls is not torch.nn.Parameter:
                guard_leaf(m, tensor)
        elif not any(tensor is leaf for leaf in made):
            _refuse(m, name, f"gradients of {tensor.show()}")
        if tensor.new_leaf or not tensor.meta.requires_grad or not tensor.meta.is_leaf:
            _refuse(m, name, f"gradients of {tensor.show()}")


def _run(
    m: Machine, name: str, outputs: Sequence[TensorTracker], seeds: Sequence[TensorTracker | None], leaves: Sequence[TensorTracker],
    hooks: dict[TensorTracker, list[list[Tracker]]], hooked: dict[TensorTracker, list[Hooked]], identities: Sequence[Identity],
    retain: bool,
) -> None:  # fmt: skip
    """Leaves get their gradients, hooks are called, in the engine's order. Where a hook on the way gives another gradient, the rest is computed anew."""
    of = {tensor: one for one in identities for tensor in one.tensors if tensor is not None}
    todo = [*leaves, *dict.fromkeys([*hooked, *of])]
    changed: list[TensorTracker] = []
    given: list[TensorTracker | tuple[TensorTracker | None, ...]] = []
    while True:
        target = Gradients(True, retain, False, seen=sum(tensor in hooked or tensor in of for tensor in todo))
        order: list[int] | None = [] if hooks or hooked or of else None
        gradients = _record(m, name, target, outputs, seeds, todo, order, (changed, given))
        arriving = [*range(len(todo))] if order is None else order
        at = dict(zip(todo, gradients, strict=True))
        for place, index in enumerate(arriving):
            tensor, gradient = todo[index], gradients[index]
            found: TensorTracker | tuple[TensorTracker | None, ...] | None = gradient
            if gradient is not None:
                if tensor in hooked:
                    found = at[tensor] = run_hooks(m, hooked[tensor], gradient)
                elif tensor not in of:
                    _arrive(m, name, tensor, gradient, *hooks.get(tensor, ([], [])))
            if tensor in of:  # the engine calls the function when it has all its gradients
                if any(of.get(todo[later]) is of[tensor] for later in arriving[place + 1 :]):
                    continue
                found, gradient = _pass(m, of[tensor], at, gradients, todo)
            if found is not gradient:
                changed.append(tensor)
                given.append(found)  # type: ignore[arg-type]
                rest = {todo[later] for later in arriving[place + 1 :]}
                todo = [one for one in todo if one in rest]
                if not todo:
                    return
                target.retain = True
                break
        else:
            return


def _pass(
    m: Machine, one: Identity, at: dict[TensorTracker, TensorTracker | None], gradients: Sequence[TensorTracker | None], todo: Sequence[Any]
) -> tuple[tuple[TensorTracker | None, ...] | None, None]:
    """The gradients that go on behind a hooked identity, where they are others than the engine's."""
    own = [None if tensor is None else at[tensor] for tensor in one.tensors]
    found = one.run(m, own)
    engine = dict(zip(todo, gradients, strict=True))
    if found is None and all(tensor is None or at[tensor] is engine[tensor] for tensor in one.tensors):
        return None, None
    return tuple(found if found is not None else one.filled(m, own)), None


@rule(torch.autograd.grad)
def grad(
    m: Machine, outputs: Tracker, inputs: Tracker, grad_outputs: Tracker | None = None, retain_graph: Tracker | None = None,
    create_graph: Tracker | None = None, only_inputs: Tracker | None = None, allow_unused: Tracker | None = None,
    is_grads_batched: Tracker | None = None, materialize_grads: Tracker | None = None,
) -> Any:  # fmt: skip
    with _asking(m, inputs):
        name = "torch.autograd.grad"
        if _flag(m, is_grads_batched, False) or _flag(m, materialize_grads, False) or not _flag(m, only_inputs, True):
            _refuse(m, name, "batched or materialised gradients")
        results = _tensors(m, name, outputs, "results")
        seeds = _seeds(m, name, grad_outputs, len(results))
        wanted = _tensors(m, name, inputs, "inputs")
        on_the_way = _ancestors(m, [m.recorder.input_node(result) for result in results])  # type: ignore[attr-defined]
        _leave_hooks(m, hooked_among(m, on_the_way), identities_among(m, on_the_way, ()))
        create = _flag(m, create_graph, False)
        target = Gradients(False, _flag(m, retain_graph, create), create, _flag(m, allow_unused, False))
        _leaves(m, name, results, {id(tensor) for tensor in wanted})
        for tensor in wanted:
            if _hooks(m, name, tensor, _HOOKS[0]):
                _refuse(m, name, f"{tensor.show()} has hooks")
        gradients = _record(m, name, target, results, seeds, wanted)
        return TupleTracker([m.const(None) if gradient is None else gradient for gradient in gradients])


def _ancestors(m: Machine, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes through which gradients of `nodes` may flow: what they are computed from, and whatever writes in place, since a written tensor keeps its node."""
    found: set[fx.Node] = set()
    todo = [*nodes, *m.recorder.keep]  # type: ignore[attr-defined]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if getattr(node.meta["val"], "requires_grad", True):  # nothing flows through what was computed without gradients
                todo.extend(node.all_input_nodes)
    return found


def _leaves(m: Machine, name: str, outputs: Sequence[TensorTracker], known: set[int] = frozenset()) -> list[TensorTracker]:  # type: ignore[assignment]
    """The inputs of the region that the results may depend on. What autograd computed before the region would have to go on there."""
    recorder = m.recorder  # type: ignore[attr-defined]
    if recorder.transformed or hasattr(recorder, "around"):
        _refuse(m, name, "in a body that a transform runs")
    if torch.is_anomaly_enabled():
        _refuse(m, name, "anomaly detection is on")
    needed = _ancestors(m, [recorder.input_node(output) for output in outputs])
    leaves = []
    for node, tracker in recorder.inputs:
        if node not in needed or not node.meta["val"].requires_grad or id(tracker) in known:
            continue
        if tracker in recorder.frozen and node.meta["val"].is_leaf:
            continue  # autograd knows it, and leaves it alone
        if tracker.new_leaf or tracker.cls not in PLAIN_CLASSES or tracker.obj is MISSING:
            _refuse(m, name, f"gradients of {tracker.show()}")
        if tracker.cls is not torch.nn.Parameter:
            guard_leaf(m, tracker)
        if not node.meta["val"].is_leaf:
            _refuse(m, name, f"{tracker.show()} was computed by autograd before this region")
        leaves.append(tracker)
    return leaves


def _hooks(m: Machine, name: str, leaf: TensorTracker, attribute: str) -> list[Tracker]:
    """The hooks of a tensor from outside, guarded."""
    if leaf.source is None:
        return []
    present = getattr(leaf.obj, attribute, None)
    if present is None:
        m.guard(Kind.ID_IS, Attr(leaf.source, attribute), None)
        return []
    table = payload_of(m.wrap(present, Attr(leaf.source, attribute)))
    if not isinstance(table, DictTracker):
        _refuse(m, name, f"{leaf.show()} has hooks")
    return table.values(m)


def _arrive(
    m: Machine, name: str, leaf: TensorTracker, gradient: TensorTracker, before: Sequence[Tracker], behind: Sequence[Tracker]
) -> None:
    """A gradient reaches its leaf: hooks, `.grad`, hooks."""
    for hook in before:
        with engine_mode(m):
            found = m.call(hook, [gradient], {})
        if _is_none(found):
            continue
        meta = gradient.meta
        plain = isinstance(found, TensorTracker) and found.cls in PLAIN_CLASSES
        if not plain or (found.meta.shape, found.meta.dtype) != (meta.shape, meta.dtype):  # type: ignore[attr-defined]
            _refuse(m, name, f"a hook of {leaf.show()} gives {found.show()}")
        gradient = found  # type: ignore[assignment]
    if before or behind:
        with engine_mode(m):
            gradient = m.node(kept, [gradient, leaf], {})  # type: ignore[assignment]
    _accumulate(m, leaf, gradient)
    for hook in behind:
        with engine_mode(m):
            m.call(hook, [leaf], {})


def _record(
    m: Machine, name: str, target: Gradients, outputs: Sequence[Any], seeds: Sequence[Any], inputs: Sequence[TensorTracker],
    order: list[int] | None = None, replaced: tuple[Sequence[TensorTracker], Sequence[Any]] = ((), ()),
) -> list[TensorTracker | None]:  # fmt: skip
    """The node, and a tracker per gradient."""
    recorder = m.recorder  # type: ignore[attr-defined]
    recorder.guard_modes()
    if any(isinstance(node.meta.get("val"), UnknownMeta) for node in recorder.graph.nodes) and not _follow_leaves(m, target, inputs):
        _refuse(m, name, "sizes that depend on data are in the graph")
    arguments = tuple(recorder.argument(tuple(values), []) for values in (outputs, seeds, inputs, *(replaced if replaced[0] else ())))
    try:
        metas = propagate_gradients(recorder.graph, recorder.initial_grad_mode, target, arguments, order)
    except DataDependent as problem:
        m.graph_break("B011", name=name, reason=str(problem))
    except (UnsupportedFake, NotImplementedError) as problem:
        m.graph_break("B013", name=name, reason=str(problem))
    except Exception as error:
        _refuse(m, name, f"torch says: {str(error).splitlines()[0]}")
    node = recorder.graph.call_function(target, arguments)
    node.meta.update(val=metas, stack=m.user_stack())
    recorder.n_calls += 1
    recorder.keep.add(node)
    if not target.retain:
        recorder.spent |= {used for used in _ancestors(m, arguments[0]) if used.op != "placeholder"}
    gradients: list[TensorTracker | None] = []
    for index, meta in enumerate(metas):
        if meta is None:
            gradients.append(None)
            continue
        item = recorder.graph.call_function(operator.getitem, (node, index))
        item.meta.update(val=meta, stack=node.meta["stack"])
        gradients.append(TensorTracker(meta, node=item))
    return gradients


def _follow_leaves(m: Machine, target: Gradients, inputs: Sequence[TensorTracker]) -> bool:
    """Whether gradients are the same at all sizes: those of leaves whose sizes are constants, laid out as these, in a graph of which some inputs' sizes vary."""
    constant = not any(isinstance(tensor.meta, UnknownMeta) for tensor in inputs)
    return constant and target.accumulated and not target.seen and not m.recorder.sizes.found  # type: ignore[attr-defined]


def _accumulate(m: Machine, leaf: TensorTracker, gradient: TensorTracker) -> None:
    """As autograd's engine does: the first gradient is taken, further ones are added in place."""
    present = tensor_attr(m, leaf, "grad")
    if present is None or _is_none(present):
        set_grad(m, leaf, gradient)
        return
    if not isinstance(present, TensorTracker) or present.meta.requires_grad:
        _refuse(m, "backward", f"the gradient of {leaf.show()} requires grad itself")
    before = m.grad_enabled()
    m.set_grad_enabled(False)
    m.node("add_", [present, gradient], {}, method=True)
    m.set_grad_enabled(before)
