"""Gradients of results that other results are computed from.

One autograd node stands for the whole graph, so nothing flows from one of its results to another. A `Passing` node between the later results and the caller leads to the earlier
tensors: it passes gradients on as they come, until a gradient of an earlier tensor is asked for (`autograd.grad`, `retain_grad`, a hook). Then the captured graph runs again in eager, and
what flows back to the earlier tensors takes eager's way.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from magneto import _C
from magneto.aot_autograd.result_hooks import with_result_hooks
from magneto.aot_autograd.signature import Link
from magneto.aot_autograd.training import CompiledGraph, again, cuts, goes_on

_ENGINE = getattr(torch.autograd.graph, "_engine_run_backward", _C).__code__


def linked(link: Link) -> Callable[..., Any]:
    """`(tensors watched, *results, *earlier) -> results`."""
    return functools.partial(super(torch.autograd.Function, Passing).apply, link)


@with_result_hooks
class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, watched: Sequence[torch.Tensor], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.link = link
        ctx.graph = _graph(tensors[0].grad_fn)
        ctx.hooks = [_hooks(tensor) for tensor in watched]
        ctx.watched = [(weakref.ref(tensor), (tensor.grad_fn, tensor.output_nr)) for tensor in watched]
        return tuple([tensor.detach() for tensor in tensors[: len(link.results)]])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if _asked(ctx):
            return (None, None, *gradients, *_C.call_inactive(functools.partial(_flows, ctx, gradients)))
        return (None, None, *gradients, *(None,) * len(ctx.link.earlier))


def _hooks(tensor: torch.Tensor) -> Any:
    """The tensor's own dictionary of hooks, which lives on in autograd's node when the tensor is gone."""
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    return tensor._backward_hooks


def _asked(ctx: Any) -> bool:
    """Whether the run of autograd's engine under way wants a gradient of one of the tensors watched, or a later link has sent one on."""
    if any(ctx.hooks) or cuts(ctx.graph) or any(_retained(tensor, edge) for one, edge in ctx.watched if (tensor := one()) is not None):
        return True
    inputs = _inputs(sys._getframe(2))
    if inputs is None:  # a thread of the engine, or a caller of our own
        return not goes_on(ctx.graph) or any(_among(ctx, found) for f in sys._current_frames().values() if (found := _inputs(f)))
    return bool(inputs) and _among(ctx, inputs)


def _retained(tensor: torch.Tensor, edge: tuple[Any, int]) -> bool:
    return tensor.retains_grad and (tensor.grad_fn, tensor.output_nr) == edge


def _inputs(frame: FrameType | None) -> Sequence[Any] | None:
    """What gradients are asked for, as the innermost call of the engine says; none means all leaves."""
    while frame is not None:
        if frame.f_code is _ENGINE:
            passed = frame.f_locals
            return passed["args"][3] if len(passed["args"]) > 3 else passed["kwargs"].get("inputs", ())  # type: ignore[no-any-return]
        frame = frame.f_back
    return None


def _among(ctx: Any, inputs: Sequence[Any]) -> bool:
    edges = [(one.node, one.output_nr) if isinstance(one, GradientEdge) else (one.grad_fn, one.output_nr) for one in inputs]
    return any(edge in edges for _, edge in ctx.watched)


def _graph(node: Any) -> Any:
    """The node of the compiled graph behind one of its results."""
    while not isinstance(node, CompiledGraph._backward_cls):  # type: ignore[attr-defined]
        node = node.next_functions[0][0]
    return node


def _flows(ctx: Any, gradients: Sequence[Any]) -> Iterator[Any]:
    """What flows back to the earlier tensors, each."""
    node, link = ctx.graph, ctx.link
    outputs, results = again(node, node.plan, "the gradient of a result is asked for that others are computed from", link.earlier)
    pairs = [(results[i], g) for i, g in zip(link.results, gradients, strict=True) if g is not None]
    if not pairs:
        return iter((None,) * len(link.earlier))
    twins = [outputs[place] for _, place in link.earlier]
    found: dict[int, torch.Tensor] = {}
    handles = [twin.register_hook(functools.partial(_stopped, found, i)) for i, twin in enumerate(twins)]
    try:
        torch.autograd.grad(
            [o for o, _ in pairs], twins, [g for _, g in pairs], retain_graph=True, create_graph=torch.is_grad_enabled(), allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    node.again[3].extend([twins[i] for i in found])
    return iter([found.get(i) for i in range(len(twins))])


def _stopped(found: dict[int, torch.Tensor], i: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    found[i] = gradient
    return torch.zeros_like(gradient)
