"""torch.optim inside a region. Its steps are Python that is followed; two of its decorators are written for the incumbent and would end the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer

from magneto.dynamo.guards.source import Held
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.container import ListTracker, SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import CODE_RULES, FunctionTracker
from magneto.dynamo.trackers.item_graph import graph_number
from magneto.dynamo.trackers.mapping import DictTracker
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph import scaled

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def _wrapped(m: Machine, f: FunctionTracker, name: str) -> Tracker:
    """The function that a decorator's wrapper holds."""
    inner = f.obj.__closure__[f.code.co_freevars.index(name)].cell_contents
    return FunctionTracker.existing(m, inner, Held(inner.__name__, inner))


def _disabled(m: Machine, f: FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """`torch._disable_dynamo`: round `zero_grad` and the like, which hold nothing that we could not follow."""
    if f.obj is MISSING or not (f.obj.__module__ or "").startswith("torch.optim"):
        return NotImplemented
    return m.call(_wrapped(m, f, "fn"), args, kwargs)


def _step(m: Machine, f: FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    """`_use_grad_for_differentiable`: a step runs without gradients unless the optimiser is differentiable. The wrapper breaks the incumbent's graph
    before and after it (and imports it)."""
    if f.obj is MISSING or not args:
        return NotImplemented
    flag = m.truth(m.apply(dict.__getitem__, m.apply(getattr, args[0], m.const("defaults")), m.const("differentiable")))
    before = m.grad_enabled()
    m.set_grad_enabled(flag)
    try:
        return m.call(_wrapped(m, f, "func"), args, kwargs)
    finally:
        m.set_grad_enabled(before)


CODE_RULES[torch._disable_dynamo(_wrapped).__code__] = _disabled  # type: ignore[attr-defined]
CODE_RULES[optimizer._use_grad_for_differentiable(_wrapped).__code__] = _step


@rule(optimizer._get_value, Tracker)
def get_value(m: Machine, v: Tracker) -> Tracker:
    """The number of a step, in Python's precision (for the incumbent torch gives the tensor itself)."""
    return m.apply(torch.Tensor.item, v) if isinstance(v, TensorTracker) else v


@rule(optimizer._stack_if_compiling, Tracker)
def stack_if_compiling(m: Machine, v: Tracker) -> Tracker:
    return v


@rule(torch._C._group_tensors_by_device_and_dtype, SequenceTracker)  # type: ignore[attr-defined]
def group_tensors(m: Machine, lists: SequenceTracker, with_indices: Tracker | None = None) -> Any:
    """{(device, dtype): (lists, indices)}; empty tensors of the same kinds tell which group comes first."""
    rows = [row.items(m) for row in lists.items(m) if isinstance(row, SequenceTracker)]
    alike = [
        [torch.empty(0, dtype=t.meta.dtype, device=t.meta.device) if isinstance(t, TensorTracker) else None for t in row] for row in rows
    ]
    try:
        found = torch._C._group_tensors_by_device_and_dtype(alike, True)  # type: ignore[attr-defined]
    except RuntimeError:
        return NotImplemented
    wanted = with_indices is not None and m.truth(with_indices)
    groups = []
    for kind, (_, indices) in found.items():
        members = ListTracker([ListTracker([row[index] for index in indices]) for row in rows])
        groups.append((m.const(kind), TupleTracker([members, ListTracker([m.const(index) for index in indices] if wanted else [])])))
    return DictTracker.of(m, groups)


# -- scaled updates with a number that the graph computes or is given


def _weighted(name: str) -> None:
    formula = getattr(scaled, name)

    @rule(getattr(torch.Tensor, name), TensorTracker, TensorTracker)
    def body(m: Machine, v: TensorTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
        number = kwargs.get(_SCALE[name])
        if (
            number is None
            or len(kwargs) > 1
            or not v.meta.dtype.is_floating_point
            or not all(isinstance(arg, TensorTracker) for arg in args)
        ):
            return NotImplemented
        if (
            isinstance(number, TensorTracker)
            and not number.meta.ndim
            and number.meta.dtype.is_floating_point
            and not number.meta.requires_grad
        ):
            number = m.apply(torch.Tensor.item, number)  # as torch itself: a learning rate may be a tensor
        held = graph_number(m, number)
        return NotImplemented if held is None else m.node(formula, [v, *args, held], {})


_SCALE = {"add_": "alpha", "addcmul_": "value", "addcdiv_": "value"}
for _name in _SCALE:
    _weighted(_name)
