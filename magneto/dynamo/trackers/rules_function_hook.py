"""Rows of full backward (pre-)hooks of modules. torch leads a module's tensors through an identity (`BackwardHookFunction`) and hooks the function that autograd records
for it; torch's own code is followed, and the hook is run where a backward in the same region reaches the function (rules_gradient.py).

Where none does, capture starts again with one break, at the call that leads the tensors through (`setup_input_hook`, `setup_output_hook`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.hooks import BackwardHook

from magneto.base.dataclass import dataclass, field
from magneto.base.errors import GraphBreak
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import prefer, rule
from magneto.dynamo.trackers.function import CODE_RULES, FunctionTracker
from magneto.dynamo.trackers.klass import ClassTracker
from magneto.dynamo.trackers.rules_hook import HandleTracker, Hooked, engine_mode
from magneto.dynamo.trackers.tensor import GradFnTracker, TensorTracker
from magneto.graph.meta import TensorMeta

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_NODE: Any = torch._C._FunctionBase  # type: ignore[attr-defined]


def _set_up(m: Machine, f: FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker:
    """The instruction that calls this is where a hook that is left to the interpreter breaks."""
    recorder: Any = m.recorder  # type: ignore[attr-defined]
    before = recorder.hook_place
    reason = "the module has full backward hooks, of which no backward in the same region disposes"
    recorder.hook_place = m.count, GraphBreak("B101", m.user_stack(), callee=f"BackwardHook.{f.name}", reason=reason)  # type: ignore[attr-defined]
    try:
        return m.inline(f, args, kwargs)
    finally:
        recorder.hook_place = before


for _name in ("setup_input_hook", "setup_output_hook"):
    CODE_RULES[getattr(BackwardHook, _name).__code__] = _set_up


@prefer(type, GradFnTracker)
def type_of_step(m: Machine, v: GradFnTracker, *_: Tracker) -> Any:
    m.graph_break("B103", attribute="__class__", value=v.show())  # MulBackward0: torch knows when the graph has run


@prefer(type.__instancecheck__, ClassTracker, GradFnTracker)
def is_step_of(m: Machine, cls: ClassTracker, v: GradFnTracker) -> Any:
    return NotImplemented if cls.obj in (object, torch.autograd.graph.Node) else type_of_step(m, v)


@prefer(callable, GradFnTracker)
def callable_(m: Machine, v: GradFnTracker) -> Tracker:
    return m.const(True)


@rule(_NODE.name, GradFnTracker)
def name(m: Machine, v: GradFnTracker) -> Tracker:
    return m.const(f"{v.applied.target.function.__name__}Backward")  # type: ignore[union-attr]


@rule(_NODE.register_hook, GradFnTracker, Tracker)
def register_hook(m: Machine, v: GradFnTracker, hook: Tracker) -> Any:
    """Hooks of the identity: they are given its gradients, and may give others."""
    recorder: Any = m.recorder  # type: ignore[attr-defined]
    node = v.applied
    if node is None or node.target.function is not BackwardHookFunction or recorder.hook_place is None:  # type: ignore[union-attr]
        return NotImplemented
    if (
        recorder.transformed
        or hasattr(recorder, "around")
        or recorder.inference_mode
        or torch.is_anomaly_enabled()
        or node in recorder.spent
    ):
        return NotImplemented
    hooked = Hooked(v.of, node, hook, recorder.hook_place[0], recorder.hook_place[1], True)
    recorder.hooked.append(hooked)
    return HandleTracker(hooked)


@dataclass(eq=False, slots=True)
class Identity:
    """One `BackwardHookFunction` on the way of a backward, and the hooks on it. `tensors`: its results, by position; None for what has no gradient."""

    tensors: list[TensorTracker | None]
    metas: list[TensorMeta]
    hooks: list[Hooked] = field(default_factory=list)

    def run(self, m: Machine, gradients: Sequence[TensorTracker | None]) -> list[TensorTracker | None] | None:
        """The function's own gradients are zeros where it is given none. Other ones that the hooks give (None: no gradient), or None."""
        given: Any = TupleTracker([m.const(None) if one is None else one for one in gradients])
        with engine_mode(m):
            own: list[Any] = self.filled(m, gradients)
        before = list(own)
        for hooked in self.hooks:
            with engine_mode(m):
                found = m.call(hooked.hook, [TupleTracker(own), given], {})  # type: ignore[arg-type]
            if any(isinstance(one, TensorTracker) and m.has_written(one) for one in own):
                m.recorder.leave_hook(hooked)  # type: ignore[attr-defined]
            if (const := found.try_const()) is not None and const.value is None:
                continue
            items = found.items(m) if isinstance(found, TupleTracker) else []
            if len(items) != len(own) or not all(_fits(item, meta) for item, meta in zip(items, self.metas, strict=True)):
                m.recorder.leave_hook(hooked)  # type: ignore[attr-defined]
            own = list(items)
        if all(one is two or tensor is None for one, two, tensor in zip(own, before, self.tensors, strict=True)):
            return None
        return [one if isinstance(one, TensorTracker) else None for one in own]

    def filled(self, m: Machine, gradients: Sequence[TensorTracker | None]) -> list[Any]:
        return [_zeros(m, meta) if one is None else one for one, meta in zip(gradients, self.metas, strict=True)]


def _zeros(m: Machine, meta: TensorMeta) -> Tracker:
    return m.node(torch.zeros, [tuple(meta.shape)], {"dtype": meta.dtype, "device": meta.device})


def _fits(item: Tracker, meta: TensorMeta) -> bool:
    if (const := item.try_const()) is not None and const.value is None:
        return True
    plain = isinstance(item, TensorTracker) and item.cls is torch.Tensor
    return plain and (item.meta.shape, item.meta.dtype) == (meta.shape, meta.dtype)  # type: ignore[attr-defined]


def identities_among(m: Machine, nodes: set[fx.Node], known: Sequence[TensorTracker]) -> list[Identity]:
    """The hooked identities that a backward through `nodes` meets; `known`: trackers that stand for their results already."""
    recorder: Any = m.recorder  # type: ignore[attr-defined]
    found: dict[fx.Node, Identity] = {}
    for hooked in recorder.hooked:
        if not hooked.of_function or hooked.node not in nodes:
            continue
        if hooked.node not in found:
            results = {user.args[1]: user for user in hooked.node.users if user.target is operator.getitem}
            metas = list(hooked.node.meta["val"])
            if len(results) != len(metas):
                recorder.leave_hook(hooked)
            by_node = {tensor.node: tensor for tensor in known}
            tensors = [by_node.get(results[k]) or TensorTracker(meta, node=results[k]) for k, meta in enumerate(metas)]
            found[hooked.node] = Identity([one if one.meta.requires_grad else None for one in tensors], metas)
        found[hooked.node].hooks.append(hooked)
    return list(found.values())
