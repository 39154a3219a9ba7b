"""torch.autograd.Function: where gradients are wanted, a call is one node that calls the class as it is, so that autograd runs the program's own backward.

`forward` and `backward` are captured apart first, for what they read (guards) and leave behind: a compiler runs them once, while tracing, and never again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx, _SingleLevelFunction

from magneto.dynamo.guards.rows import GuardSet, Kind
from magneto.dynamo.guards.source import Held, root_of
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.object import ObjectTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import record
from magneto.graph.higher import Applied
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_APPLY = torch.autograd.Function.__dict__["apply"]
_APPLY = getattr(_APPLY, "__func__", _APPLY)  # torch 2.15 has a class method of C there
_TORCH = os.path.dirname(torch.__file__) + os.sep
MANY = 3  # results of a function whose backward is followed for each choice of those that have gradients
_FIXED = frozenset({Kind.ID_IS, Kind.TYPE_IS, Kind.TYPE_VERSION, Kind.STATE, Kind.SAME})
"""Rows of what hardly changes between a forward and its backward: code, classes, modules."""
_CHECKED_AGAIN = frozenset({Kind.EQUALS, Kind.LENGTH, Kind.KEYS, Kind.KEY_ABSENT, Kind.ABSENT, Kind.PRESENT})
"""Rows that a compiled backward checks when it runs, where no frame is needed for that: constants of modules."""


class ContextTracker(ObjectTracker):
    """`ctx` while forward and backward are captured. It never leaves them."""

    __slots__ = ()

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name in ("saved_tensors", "saved_variables"):
            saved = self.instance_attr(m, "to_save")
            return saved if saved is not None else TupleTracker([])
        return None

    def emit(self, em: Emitter) -> str:
        raise NotImplementedError("the context of a custom autograd function")

    def flag(self, m: Machine, name: str, default: bool) -> bool:
        found = self.instance_attr(m, name)
        return default if found is None else m.truth(found)

    def tensors(self, m: Machine, name: str) -> list[Tracker]:
        found = self.instance_attr(m, name)
        return found.items(m) if isinstance(found, SequenceTracker) else []


@rule(_APPLY, ClassTracker)
def apply(m: Machine, klass: ClassTracker, /, *args: Tracker, **kwargs: Tracker) -> Tracker:
    """`Klass.apply(...)`. Without gradients a custom function is its forward."""
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, TensorTracker)]
    wanted = m.grad_enabled() and any(tensor.meta.requires_grad for tensor in tensors)  # type: ignore[attr-defined]
    if m.recorder.transformed:  # type: ignore[attr-defined]
        _capture(m, klass, args, kwargs, True)
        return record(m, Applied(klass.obj), args, kwargs)
    if not wanted:
        return _forward_only(m, klass, args, kwargs)
    context = _capture(m, klass, args, kwargs, True)
    result = record(m, Applied(klass.obj), args, kwargs)
    dirty = context.tensors(m, "dirty_tensors")
    if isinstance(result, SequenceTracker) and dirty:
        m.graph_break("B101", callee=_name(klass), reason="it returns several tensors and has written one of its arguments")
    return result


def _name(klass: ClassTracker) -> str:
    return f"{klass.obj.__qualname__}.apply"


def _context(m: Machine, args: Sequence[Tracker], wanted: bool) -> ContextTracker:
    context = ContextTracker(FunctionCtx)
    needs = [m.const(wanted and isinstance(arg, TensorTracker) and arg.meta.requires_grad) for arg in args]
    context.set_instance_attr(m, "needs_input_grad", TupleTracker(needs), False)
    return context


def _separate(klass: ClassTracker) -> bool:
    """Whether forward and setup_context are two functions."""
    return klass.obj.setup_context is not _SingleLevelFunction.setup_context  # type: ignore[attr-defined,no-any-return]


def _forward_only(m: Machine, klass: ClassTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    forward = m.apply(getattr, klass, m.const("forward"))
    context = _context(m, args, False)
    result = m.call(forward, args if _separate(klass) else [context, *args], kwargs)
    if _separate(klass):
        m.call(m.apply(getattr, klass, m.const("setup_context")), [context, TupleTracker(args), result], {})
    dirty = context.tensors(m, "dirty_tensors")

    def fresh(value: Tracker) -> Tracker:
        """An argument that is returned comes back as another tensor on its memory."""
        same = isinstance(value, TensorTracker) and any(value is arg for arg in args) and not any(value is tensor for tensor in dirty)
        return m.node("detach", [value], {}, method=True) if same else value

    if isinstance(result, TupleTracker):
        return TupleTracker([fresh(item) for item in result.items(m)])
    return fresh(result)


def _capture(m: Machine, klass: ClassTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker], wanted: bool) -> ContextTracker:
    """Run forward and backward apart from the region's graph: guards for what they read; what they may not do is a break."""
    for arg in args:
        m.settle(arg)  # a size that varies is a number to forward and backward
    with m.speculate(_name(klass), grad_mode=False) as body:
        context = _context(m, args, wanted)
        forward = m.apply(getattr, klass, m.const("forward"))
        _check_arguments(m, body, args, kwargs)
        if _separate(klass):
            result = body.call(forward, args, kwargs)
            body.call(m.apply(getattr, klass, m.const("setup_context")), [context, TupleTracker(args), result], {}, own=(context,))
        else:
            result = body.call(forward, [context, *args], kwargs, own=(context,))
        outputs = result.items(m) if isinstance(result, TupleTracker) else [result]
        _check_written(m, body, context)
        for present in _arriving(m, body, context, outputs):
            _backward(m, body, klass, context, outputs, present)
    return context


def _arriving(m: Machine, body: Any, context: ContextTracker, outputs: Sequence[Tracker]) -> list[set[int]]:
    """Which results' gradients a backward may be given: all, zeros among them; where the function asks for None in their place, any but none."""
    tensors = [i for i, output in enumerate(outputs) if isinstance(output, TensorTracker)]
    if context.flag(m, "materialize_grads", True) or len(tensors) < 2:
        return [set(tensors)]
    apart = context.tensors(m, "non_differentiable")
    floating = [i for i in tensors if (d := outputs[i].meta.dtype).is_floating_point or d.is_complex]  # type: ignore[attr-defined]
    known = [i for i in floating if not any(outputs[i] is one for one in apart)]
    if len(known) > MANY:
        body.refuse("a backward that may be given None in place of many gradients")
    machine: Any = m
    machine.asks_whole |= len(known) > 1
    return [set(some) for n in range(len(known), 0, -1) for some in itertools.combinations(known, n)]


def _check_arguments(m: Machine, body: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> None:
    if kwargs:
        body.refuse("keyword arguments")
    for arg in args:
        if (
            not isinstance(arg, (TensorTracker, ConstTracker, ClassTracker))
            and not isinstance(arg, SequenceTracker)
            and arg.try_const() is None
        ):
            body.refuse(f"argument {arg.show()}")


def _check_written(m: Machine, body: Any, context: ContextTracker) -> None:
    """Only intermediate results of the region may be written: what a write in `forward` means for autograd is known where it is called only."""
    dirty = context.tensors(m, "dirty_tensors")
    for tensor in dirty:
        views = (tensor.views or [tensor]) if isinstance(tensor, TensorTracker) else [tensor]
        if any(view.source is not None for view in views):
            body.refuse("it writes to a tensor made outside of the function")
    if body.recorder.wrote_outside() and not dirty:
        body.refuse("it writes to a tensor and does not say so")


def _backward(m: Machine, body: Any, klass: ClassTracker, context: ContextTracker, outputs: Sequence[Tracker], present: set[int]) -> None:
    gradients = []
    for i, output in enumerate(outputs):
        if isinstance(output, TensorTracker) and i in present:
            meta = TensorMeta.contiguous(output.meta.shape, output.meta.dtype, output.meta.device)
            gradients.append(body.recorder.leaf(meta, torch.Tensor))
        else:
            gradients.append(m.const(None))
    machine: Any = m
    before, machine.guards = machine.guards, GuardSet()
    try:
        name = "backward" if klass.obj.backward is not _SingleLevelFunction.backward else "vjp"
        backward = m.apply(getattr, klass, m.const(name))
        body.call(backward, [context, *gradients], {}, own=(context,))
    finally:
        read, machine.guards = machine.guards, before
    for row in read:
        before.add(row)
    for row in read:
        fixed = (
            row.kind in _FIXED or isinstance(row.source, Held) or (row.inside or row.user_line).startswith(_TORCH)
        )  # the latter: parameters of decorators
        if fixed:
            continue
        if row.kind in _CHECKED_AGAIN and isinstance(root_of(row.source), Held):
            machine.read_by_backward.add(row)
        else:
            body.refuse(f"its backward reads {row.source.text()}, which may change before it runs")
