"""One torch.autograd.Function round a compiled forward and a compiled backward graph.

Its inputs are the functional graph's inputs, its outputs the functional graph's results; views and write-backs happen outside of it, by ordinary differentiable operations
(`wrap.py`). Exactly eager's: which outputs require grad, which inputs get None, errors on tensors changed in place since.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from magneto.aot_autograd.joint import JointGraph
from magneto.aot_autograd.partition import Partition, is_random
from magneto.aot_autograd.signature import Result
from magneto.base.errors import UserError
from magneto.graph.meta import TensorMeta

Compiled = Callable[..., Any]


@dataclass(slots=True)
class TrainingPlan:
    """What the autograd function needs to know. `build_backward` makes the compiled backward when it is first needed."""

    name: str
    forward: Compiled
    build_backward: Callable[[], Compiled]
    n_results: int
    kept: tuple[tuple[str, int], ...]
    silent: tuple[int, ...]  # results that do not require grad
    differentiable: tuple[int, ...]
    tangent_metas: tuple[TensorMeta, ...]
    gradients: tuple[int | tuple[str, int] | None, ...]
    needs: tuple[frozenset[int], ...]
    captured: Compiled
    replay_outputs: tuple[int, ...] | None  # positions of the differentiable results among the captured graph's outputs
    n_user_inputs: int
    weak_inputs: frozenset[int]  # inputs not kept alive for a replay
    backward: Compiled | None = field(default=None)


def plan_training(
    joint: JointGraph, cut: Partition, forward: Compiled, build_backward: Callable[[], Compiled], captured: Compiled
) -> TrainingPlan:
    kept = tuple((k.kind, k.index) for k in cut.kept)
    n = len(joint.results)
    held = {index for kind, index in kept if kind == "input"}
    return TrainingPlan(
        joint.name,
        forward,
        build_backward,
        n,
        kept,
        tuple(i for i in range(n) if i not in joint.differentiable),
        joint.differentiable,
        tuple(joint.results[i].meta["val"] for i in joint.differentiable),
        cut.gradients,
        cut.needs,
        captured,
        _replay_outputs(joint),
        joint.signature.n_inputs,
        frozenset(i for i, g in enumerate(cut.gradients) if i not in held),
    )


def _replay_outputs(joint: JointGraph) -> tuple[int, ...] | None:
    """Where a second run of the captured graph would return the differentiable results; None when a second run is not the same."""
    signature = joint.signature
    if signature.mutations or signature.n_constants or any(is_random(node) for node in joint.graph.nodes):
        return None
    places = {output.index: i for i, output in reversed(list(enumerate(signature.outputs))) if isinstance(output, Result)}
    if any(index not in places for index in joint.differentiable):
        return None
    return tuple(places[index] for index in joint.differentiable)


def training_function(plan: TrainingPlan) -> Compiled:
    """`(*inputs) -> results`, recorded by autograd."""
    if not plan.differentiable:
        return plan.forward
    return functools.partial(CompiledGraph.apply, plan)


class CompiledGraph(torch.autograd.Function):
    """First argument: the plan."""

    @staticmethod
    def forward(ctx: Any, plan: TrainingPlan, *inputs: Any) -> Any:
        out = plan.forward(*inputs)
        n = plan.n_results
        groups = {"input": inputs, "result": out, "extra": out[n:]}
        ctx.save_for_backward(*[groups[kind][index] for kind, index in plan.kept])
        ctx.plan = plan
        if plan.replay_outputs is not None:
            ctx.inputs = [_reference(x) if i in plan.weak_inputs else None for i, x in enumerate(inputs)]
        results = tuple(out[:n])
        if plan.silent:
            ctx.mark_non_differentiable(*[results[i] for i in plan.silent])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        plan: TrainingPlan = ctx.plan
        kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (None, *_replay(ctx, plan, kept, gradients))
        tangents = [_tangent(gradients[index], meta) for index, meta in zip(plan.differentiable, plan.tangent_metas, strict=True)]
        if plan.backward is None:
            plan.backward = plan.build_backward()
        found = plan.backward(*kept, *tangents)
        missing = frozenset(k for k, index in enumerate(plan.differentiable) if gradients[index] is None)
        return (None, *_input_gradients(plan, found, tangents, missing))


def _reference(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: value


def _tangent(gradient: torch.Tensor | None, meta: TensorMeta) -> torch.Tensor:
    """The gradient laid out as the backward graph expects it; zeros where nothing flows."""
    if gradient is None:
        return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device).zero_()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.stride() != meta.strides or gradient.is_conj() or gradient.is_neg():
        return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device).copy_(gradient)
    return gradient


def _input_gradients(
    plan: TrainingPlan, found: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], missing: frozenset[int]
) -> list[Any]:
    """One gradient or None per input. An input none of whose tangents is defined gets None, as in eager."""
    result: list[Any] = []
    for place, needs in zip(plan.gradients, plan.needs, strict=True):
        if place is None or (missing and needs <= missing):
            result.append(None)
        elif isinstance(place, tuple):
            result.append(tangents[place[1]])
        else:
            result.append(found[place])
    return result


def _replay(ctx: Any, plan: TrainingPlan, kept: Sequence[torch.Tensor], gradients: Sequence[Any]) -> list[Any]:
    """Backward with create_graph=True: the captured graph runs again in eager, so that autograd can differentiate its backward."""
    if plan.replay_outputs is None:
        raise UserError(
            "U006",
            function="backward",
            reason=f"create_graph=True through graph {plan.name}, which writes inputs, draws random numbers or returns views",
        )
    by_index = {index: tensor for (kind, index), tensor in zip(plan.kept, kept, strict=True) if kind == "input"}
    inputs = [reference() if reference is not None else by_index[i] for i, reference in enumerate(ctx.inputs)]
    if any(x is None for x in inputs):
        raise UserError("U006", function="backward", reason=f"create_graph=True through graph {plan.name}, an input of which is gone")
    wanted = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    with torch.enable_grad():
        outputs = plan.captured(*inputs)
    pairs = [(outputs[place], gradients[index]) for place, index in zip(plan.replay_outputs, plan.differentiable, strict=True)]
    pairs = [(output, gradient) for output, gradient in pairs if gradient is not None]
    found = torch.autograd.grad(
        [o for o, _ in pairs], [inputs[i] for i in wanted], [g for _, g in pairs], create_graph=True, allow_unused=True
    )
    by_input = dict(zip(wanted, found, strict=True))
    return [by_input.get(i) for i in range(len(inputs))]
