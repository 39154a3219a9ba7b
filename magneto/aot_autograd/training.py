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

from magneto import _C
from magneto.aot_autograd.joint import JointGraph
from magneto.aot_autograd.partition import Partition, is_random
from magneto.aot_autograd.signature import Result
from magneto.base.errors import UserError
from magneto.graph.meta import TensorMeta

Compiled = Callable[..., Any]

_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


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
    weak_inputs: tuple[int, ...]  # inputs that a replay needs and nobody else keeps alive
    holds: Callable[[], bool] | None  # whether what the program's own backward functions read is still what was traced
    cut_off: tuple[int, ...]  # inputs that require grad and to which nothing flows back
    backward: Compiled | None = None  # takes its inputs out of a list
    passes_tangents: bool = field(init=False)
    keep: Compiled = field(init=False)
    answer: Compiled = field(init=False)

    def __post_init__(self) -> None:
        """The two selections made in every call, as flat code: what to keep from (inputs + outputs), and one gradient per input."""
        n = len(self.gradients)
        places = {"input": 0, "result": n, "extra": n + self.n_results}
        kept = "".join(f"v[{places[kind] + index}], " for kind, index in self.kept)
        given = (None if g is None else f"t[{g[1]}]" if isinstance(g, tuple) else f"f[{g}]" for g in self.gradients)
        self.passes_tangents = any(isinstance(g, tuple) for g in self.gradients)
        self.keep = eval(f"lambda v: ({kept})")
        self.answer = eval(f"lambda f, t: (None, {''.join(f'{g}, ' for g in given)})")


def plan_training(
    joint: JointGraph,
    cut: Partition,
    forward: Compiled,
    build_backward: Callable[[], Compiled],
    captured: Compiled,
    parameters: Sequence[int] = (),
    replay: bool = True,
    holds: Callable[[], bool] | None = None,
    differentiable: Sequence[int] = (),
) -> TrainingPlan:
    """`differentiable`: inputs that require grad. `captured` runs the captured graph in eager; `parameters`: inputs that live as long as their module; `replay`: whether a run of
    `captured` during backward would be the same computation."""
    kept = tuple((k.kind, k.index) for k in cut.kept)
    n = len(joint.results)
    held = {index for kind, index in kept if kind == "input"} | set(parameters)
    cut_off = tuple(i for i in differentiable if cut.gradients[i] is None)
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
        _replay_outputs(joint) if replay else None,
        tuple(i for i in range(len(cut.gradients)) if i not in held and i not in cut_off),
        holds,
        cut_off,
    )


def _replay_outputs(joint: JointGraph) -> tuple[int, ...] | None:
    """Where a second run of the captured graph would return the differentiable results; None when a second run is not the same."""
    signature = joint.signature
    if signature.single or signature.mutations or signature.n_constants or any(is_random(node) for node in joint.graph.nodes):
        return None
    places = {output.index: i for i, output in reversed(list(enumerate(signature.outputs))) if isinstance(output, Result)}
    if any(index not in places for index in joint.differentiable):
        return None
    return tuple(places[index] for index in joint.differentiable)


def training_function(plan: TrainingPlan) -> Compiled:
    """`(*inputs) -> results`, recorded by autograd."""
    if not plan.differentiable:
        return plan.forward
    # Past torch.autograd.Function.apply, whose Python part serves functorch only.
    apply = super(torch.autograd.Function, CompiledGraph).apply
    if not plan.cut_off:
        return functools.partial(apply, plan)

    def run(*inputs: Any) -> Any:
        passed = list(inputs)
        for index in plan.cut_off:  # the engine would go on into a history that eager's backward does not reach
            passed[index] = passed[index].detach()
        return apply(plan, *passed)  # type: ignore[no-untyped-call]

    return run


class CompiledGraph(torch.autograd.Function):
    """First argument: the plan."""

    @staticmethod
    def forward(ctx: Any, plan: TrainingPlan, *inputs: Any) -> Any:
        out = tuple(plan.forward(*inputs))
        ctx.save_for_backward(*plan.keep(inputs + out))
        ctx.plan = plan
        if plan.replay_outputs is not None:
            ctx.inputs = _held(inputs, plan.weak_inputs)
        results = out[: plan.n_results]
        if plan.silent:
            ctx.mark_non_differentiable(*[results[i] for i in plan.silent])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        plan: TrainingPlan = ctx.plan
        values: list[Any] = [*ctx.saved_tensors]
        if torch.is_grad_enabled() or (plan.holds is not None and not plan.holds()):
            return (None, *_replay(ctx.inputs if plan.replay_outputs is not None else None, plan, gradients))
        if not _keeps_graph():  # the list alone holds what was saved from here on
            ctx.maybe_clear_saved_tensors()
            ctx.inputs = None
        tangents = [_tangent(gradients[index], meta) for index, meta in zip(plan.differentiable, plan.tangent_metas, strict=True)]
        values += tangents
        if not plan.passes_tangents:
            tangents = []
        if plan.backward is None:
            backward = _C.call_inactive(plan.build_backward)  # a frame hook may be active: our own code is not to be captured
            plan.backward = getattr(backward, "consume", None) or (lambda values: backward(*values))
        answer = plan.answer(plan.backward(values), tangents)
        missing = {k for k, index in enumerate(plan.differentiable) if gradients[index] is None}
        if missing:  # an input none of whose tangents is defined gets None, as in eager
            return (None, *[None if needs <= missing else found for needs, found in zip(plan.needs, answer[1:], strict=True)])
        return answer


def _held(inputs: tuple[Any, ...], weak: tuple[int, ...]) -> list[Any]:
    """The inputs for a replay; those that eager would not keep alive, as weak references."""
    held: list[Any] = list(inputs)
    for i in weak:
        if isinstance(held[i], torch.Tensor):
            held[i] = weakref.ref(held[i])
    return held


def _tangent(gradient: torch.Tensor | None, meta: TensorMeta) -> torch.Tensor:
    """The gradient laid out as the backward graph expects it; zeros where nothing flows."""
    if gradient is None:
        return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device).zero_()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.stride() != meta.strides or gradient.is_conj() or gradient.is_neg():
        return torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device).copy_(gradient)
    return gradient


def _replay(held: Sequence[Any] | None, plan: TrainingPlan, gradients: Sequence[Any]) -> list[Any]:
    """Backward with create_graph=True, or of functions that read other values by now: the captured graph runs again in eager."""
    again = torch.is_grad_enabled()
    if held is None or plan.replay_outputs is None:
        raise _cannot_replay(plan, "which writes inputs, draws random numbers or returns views")
    inputs = [x() if isinstance(x, weakref.ref) else x for x in held]
    if any(x is None for x in inputs):
        raise _cannot_replay(plan, "an input of which is gone")
    wanted = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad}
    with torch.enable_grad():
        outputs = plan.captured(*inputs)
    pairs = [(outputs[place], gradients[index]) for place, index in zip(plan.replay_outputs, plan.differentiable, strict=True)]
    pairs = [(output, gradient) for output, gradient in pairs if gradient is not None]
    found = torch.autograd.grad([o for o, _ in pairs], list(wanted.values()), [g for _, g in pairs], create_graph=again, allow_unused=True)
    by_input = dict(zip(wanted, found, strict=True))
    return [by_input.get(i) for i in range(len(inputs))]


def _cannot_replay(plan: TrainingPlan, why: str) -> UserError:
    what = "create_graph=True" if torch.is_grad_enabled() else "a module's value, changed since the forward, is read by a custom backward"
    return UserError("U006", function="backward", reason=f"{what}: graph {plan.name}, {why}")
