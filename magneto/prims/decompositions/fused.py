"""torch.optim's fused steps: the formulas of eager's kernels, so that they take part in what is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magneto.graph.rule_table import rule_table
from magneto.prims.decompositions.rows import LIBRARY
from magneto.prims.value import Builder, Value

ROWS, row = rule_table()

_TAKEN = (torch.float32, torch.float64)


def _plain(lists: Sequence[Sequence[Value]], options: dict[str, Any]) -> bool:
    """Tensors of one dtype each, whose gradients need no unscaling."""
    dtypes = {value.dtype for values in lists for value in values}
    return len(dtypes) == 1 and dtypes <= set(_TAKEN) and options.get("grad_scale") is None and options.get("found_inf") is None


def _spread(number: Any, like: Value) -> Any:
    """A number beside a tensor: one of the graph, or a constant."""
    return number.to(like.dtype).reshape(()).broadcast(like.shape) if isinstance(number, Value) else number


def _rate(lr: Any) -> Any:
    """A learning rate, in a tensor where it changes."""
    return lr.to(torch.float64).reshape(()) if isinstance(lr, Value) else lr


def _adam(decoupled: bool) -> Any:
    def step(
        b: Builder, params: Any, grads: Any, means: Any, squares: Any, largest: Any, steps: Any, *, lr: Any, beta1: float, beta2: float,
        weight_decay: float, eps: float, amsgrad: bool, maximize: bool, **options: Any,
    ) -> Any:  # fmt: skip
        if not _plain((params, grads, means, squares, largest), options):
            return LIBRARY
        lr = _rate(lr)
        made: list[tuple[Value, ...]] = []
        for i, (p, g, mean, square) in enumerate(zip(params, grads, means, squares, strict=True)):
            gradient = -g if maximize else g
            if weight_decay:
                p, gradient = (p * _spread(1 - lr * weight_decay, p), gradient) if decoupled else (p, gradient + p * weight_decay)
            span = gradient - mean
            mean = mean + span * (1 - beta1) if 1 - beta1 < 0.5 else gradient - span * beta1
            square = square * beta2 + gradient * (1 - beta2) * gradient
            top = square.maximum(largest[i]) if amsgrad else square
            count = steps[i].to(torch.float64)
            size = lr / (1.0 - count._binary("pow", beta1, True))
            root = (1.0 - count._binary("pow", beta2, True)).unary("sqrt")
            denominator = top.unary("sqrt") / _spread(root, top) + eps
            made.append((p + _spread(-size, mean) * mean / denominator, g, mean, square, *((top,) if amsgrad else ())))
        columns = [tuple(column) for column in zip(*made, strict=True)]
        return tuple(columns) if amsgrad else (*columns, tuple(largest))

    return step


row("_fused_adam.default", "_fused_adam.tensor_lr")(_adam(False))
row("_fused_adamw.default", "_fused_adamw.tensor_lr")(_adam(True))


@row("_fused_sgd.default", "_fused_sgd.tensor_lr")
def _sgd(
    b: Builder, params: Any, grads: Any, buffers: Any, *, weight_decay: float, momentum: float, lr: Any, dampening: float, nesterov: bool,
    maximize: bool, is_first_step: bool, **options: Any,
) -> Any:  # fmt: skip
    if not _plain((params, grads, buffers), options):
        return LIBRARY
    lr = _rate(lr)
    updated, kept = [], []
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        gradient = -g if maximize else g
        if weight_decay:
            gradient = gradient + p * weight_decay
        if momentum:
            kept.append(gradient if is_first_step else buffers[i] * momentum + gradient * (1 - dampening))
            gradient = gradient + kept[-1] * momentum if nesterov else kept[-1]
        updated.append(p - gradient * _spread(lr, p))
    return tuple(updated), tuple(grads), tuple(kept) if momentum else tuple(buffers)
