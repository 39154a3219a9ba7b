"""Rows of hooks on what autograd computes inside the region, and of `retain_grad`.

They are run where a backward in the same region reaches the tensor (rules_gradient.py). A tensor that leaves the region hooked, or to which gradients may flow
later, makes capture start again: it then breaks at the registration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from magneto.base.dataclass import dataclass
from magneto.base.errors import GraphBreak
from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.base import CannotEmit, Tracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import FunctionTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph.unknown import UnknownMeta

if TYPE_CHECKING:
    from torch import fx

    from magneto.dynamo.machine.protocol import Emitter, Machine


@dataclass(eq=False, slots=True)
class Hooked:
    """A hook (None: `retain_grad`) on `tensor`, which is what `node` gives; registered by the instruction `count`, where `reason` is the break if need be."""

    tensor: TensorTracker
    node: fx.Node
    hook: Tracker | None
    count: int
    reason: GraphBreak
    of_function: bool = False  # `node` is a call of a custom autograd function, on which the hook is


class HandleTracker(Tracker):
    """What `register_hook` returns. `born`: the instruction that registers."""

    __slots__ = ("born", "hooked")
    exact_type = RemovableHandle

    def __init__(self, hooked: Hooked) -> None:
        super().__init__()
        self.hooked = hooked
        self.born = hooked.count

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        if name not in ("remove", "__enter__", "__exit__", "__class__"):
            m.recorder.leave_hook(self.hooked)  # type: ignore[attr-defined]
        return None

    def special_set(self, m: Machine, name: str, value: Tracker | None) -> bool:
        m.recorder.leave_hook(self.hooked)  # type: ignore[attr-defined]
        return True

    def emit(self, em: Emitter) -> NoReturn:
        raise CannotEmit(self)

    def show(self) -> str:
        return "the handle of a hook"


@rule(RemovableHandle.remove, HandleTracker)
def remove(m: Machine, v: HandleTracker) -> None:
    recorder = m.recorder  # type: ignore[attr-defined]
    recorder.hooked = [hooked for hooked in recorder.hooked if hooked is not v.hooked]


@rule(RemovableHandle.remove, Tracker)
def remove_other(m: Machine, v: Tracker) -> Any:
    """A handle of a module's hook."""
    fn: Any = RemovableHandle.remove
    return m.inline(FunctionTracker.existing(m, fn, Held("RemovableHandle.remove", fn)), [v], {})


def _register(m: Machine, v: TensorTracker, hook: Tracker | None, name: str) -> Hooked | None:
    """None: left to the interpreter."""
    recorder = m.recorder  # type: ignore[attr-defined]
    apart = recorder.transformed or hasattr(recorder, "around") or recorder.inference_mode or torch.is_anomaly_enabled()
    known = v.cls is torch.Tensor and v.source is None and v.node is not None and not isinstance(v.meta, UnknownMeta)
    if apart or not known or not v.meta.requires_grad or v.meta.is_leaf or v.new_leaf or m.has_written(v) or v.node in recorder.spent:
        return None
    reason = GraphBreak("B102", m.user_stack(), operation=f"Tensor.{name}, of which no backward in the same region disposes")
    reason.asks_history = any(getattr(user.meta["val"], "requires_grad", False) for user in v.node.users)  # type: ignore[union-attr]
    found = Hooked(v, v.node, hook, m.count, reason)  # type: ignore[arg-type, attr-defined]
    recorder.hooked.append(found)
    return found


@rule(torch.Tensor.register_hook, TensorTracker, Tracker)
def register_hook(m: Machine, v: TensorTracker, hook: Tracker) -> Any:
    found = _register(m, v, hook, "register_hook")
    return NotImplemented if found is None else HandleTracker(found)


@rule(torch.Tensor.retain_grad, TensorTracker)
def retain_grad(m: Machine, v: TensorTracker) -> Any:
    if any(hooked.tensor is v and hooked.hook is None for hooked in m.recorder.hooked):  # type: ignore[attr-defined]
        return m.const(None)
    if _register(m, v, None, "retain_grad") is None:
        return NotImplemented
    v.attrs["grad"] = m.const(None)
    return m.const(None)


def hooked_among(m: Machine, nodes: set[fx.Node]) -> dict[TensorTracker, list[Hooked]]:
    """The hooks that a backward through `nodes` meets, by tensor; `retain_grad` is last, as in the engine."""
    recorder = m.recorder  # type: ignore[attr-defined]
    found: dict[TensorTracker, list[Hooked]] = {}
    for hooked in sorted(recorder.hooked, key=lambda one: one.hook is None):
        if hooked.node in nodes and not hooked.of_function:
            if m.has_written(hooked.tensor) or hooked.tensor.node is not hooked.node:
                recorder.leave_hook(hooked)
            found.setdefault(hooked.tensor, []).append(hooked)
    return found


@contextmanager
def engine_mode(m: Machine) -> Iterator[None]:
    """Hooks run without gradients, also those that raise."""
    enabled = m.grad_enabled()
    m.set_grad_enabled(False)
    try:
        yield
    finally:
        m.set_grad_enabled(enabled)


def run_hooks(m: Machine, hooks: list[Hooked], gradient: TensorTracker) -> TensorTracker:
    """The engine has reached a tensor: the gradient with which it goes on."""
    recorder: Any = m.recorder  # type: ignore[attr-defined]
    for hooked in hooks:
        if hooked.hook is None:
            with engine_mode(m):
                _retain(m, hooked.tensor, gradient)
            continue
        with engine_mode(m):
            found = m.call(hooked.hook, [gradient], {})
        if m.has_written(gradient):
            recorder.leave_hook(hooked)
        if (const := found.try_const()) is not None and const.value is None:
            continue
        fits = isinstance(found, TensorTracker) and found.cls is torch.Tensor
        if not fits or (found.meta.shape, found.meta.dtype) != (gradient.meta.shape, gradient.meta.dtype):  # type: ignore[attr-defined]
            recorder.leave_hook(hooked)
        gradient = found  # type: ignore[assignment]
    return gradient


def _retain(m: Machine, tensor: TensorTracker, gradient: TensorTracker) -> None:
    present = tensor.attrs["grad"]
    if isinstance(present, TensorTracker):
        tensor.attrs["grad"] = m.node("add", [present, gradient], {}, method=True)
    else:
        tensor.attrs["grad"] = m.node("clone", [gradient], {"memory_format": torch.contiguous_format}, method=True)
