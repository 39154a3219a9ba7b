"""torch.utils.checkpoint: the call stays one node, so that forward keeps little and backward computes the body again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import SequenceTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph.higher import Checkpointed, Slot

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_NAME = "torch.utils.checkpoint.checkpoint"
_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@rule(torch.utils.checkpoint.checkpoint, Tracker)
def checkpoint(m: Machine, fn: Tracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    """Without gradients, the function itself."""
    given = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    if not m.grad_enabled():  # type: ignore[attr-defined]
        return m.call(fn, args, kwargs)
    settings = {}
    for name, value in given.items():
        const = value.try_const()
        if const is None:
            m.graph_break("B101", callee=_NAME, reason=f"option {name}={value.show()}")
        settings[name] = const.value
    reentrant = settings.get("use_reentrant")
    if not isinstance(reentrant, bool):
        m.graph_break("B101", callee=_NAME, reason="use_reentrant is not given")
    if reentrant and (kwargs or not any(isinstance(arg, TensorTracker) and arg.meta.requires_grad for arg in args)):
        m.graph_break(
            "B101", callee=_NAME, reason="with use_reentrant=True gradients flow through positional tensors only, and none has one"
        )
    return _node(m, fn, args, kwargs, settings, reentrant)


def _node(
    m: Machine, fn: Tracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker], settings: dict[str, Any], reentrant: bool
) -> Tracker:
    with m.speculate(_NAME, grad_mode=True) as body:
        inner: list[Tracker] = list(args)
        tensors: list[Tracker] = []
        if reentrant:  # its tensors are detached ones
            for index, arg in enumerate(args):
                if isinstance(arg, TensorTracker):
                    inner[index] = body.recorder.leaf(arg.meta.with_(is_leaf=True), arg.cls)
                    tensors.append(arg)
        value = body.call(fn, inner, kwargs)
        takes: Any = (tuple(Slot(index) for index in range(len(tensors))), {})
        captured, lifted = body.finish(takes, value)
        recorder = body.recorder
        if recorder.random_nodes and settings.get("preserve_rng_state") is False:
            body.refuse("random numbers that are drawn again in backward")
        if recorder.mutated:
            body.refuse("it writes to tensors, twice")
        if reentrant and not all(_differentiable(item) for item in (value.items(m) if isinstance(value, SequenceTracker) else [value])):
            body.refuse("with use_reentrant=True all its results require grad")
    target = Checkpointed(torch.utils.checkpoint.checkpoint, settings, captured)
    return m.node(target, [tuple(tensors), tuple(lifted)], {})


def _differentiable(value: Tracker) -> bool:
    return not isinstance(value, TensorTracker) or value.meta.requires_grad or not value.meta.dtype.is_floating_point
