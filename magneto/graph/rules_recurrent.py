"""Recurrent layers of oneDNN: library calls whose workspace, which only their backward reads, is made where gradients are recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from magneto.graph.layout import RuleError, Untried
from magneto.graph.meta import TensorMeta
from magneto.graph.rule_table import rule_table
from magneto.graph.rules_attention import seeded

RULES, rule = rule_table()

LAYER: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
WORKSPACE = 3  # position of the workspace among the results
LARGE = 1 << 28  # bytes: not a size of the program


@rule("mkldnn_rnn_layer")
def mkldnn_rnn_layer(*args: Any) -> Any:
    """Only oneDNN knows how large its workspace is, so the layer runs once on zeros."""
    metas = [arg for arg in args if isinstance(arg, TensorMeta)]
    if any(type(meta) is not TensorMeta or meta.device.type != "cpu" for meta in metas) or sum(m.nbytes for m in metas) > LARGE:
        raise RuleError("a recurrent layer of unknown size")
    x, w_input, w_hidden, *others = metas  # behind them biases (or the weights once more), then states
    state = (x.shape[1], w_hidden.shape[-1])
    fitting = x.shape[-1] == w_input.shape[-1] and all(meta.shape == state for meta in others[2:])
    if not fitting or any(meta.shape[0] != w_input.shape[0] for meta in (w_hidden, *others[:2])):
        raise Untried("sizes of a recurrent layer that do not fit")
    plain = tuple((arg.shape, arg.strides, arg.dtype) if isinstance(arg, TensorMeta) else _fixed(arg) for arg in args)
    return _described(plain, torch.is_grad_enabled())


def _fixed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache(256)
def _described(args: tuple[Any, ...], recorded: bool) -> tuple[TensorMeta | None, ...]:
    made = [
        torch.empty_strided(*arg[:2], dtype=arg[2]).zero_()
        if isinstance(arg, tuple) and len(arg) == 3 and isinstance(arg[0], tuple)
        else arg
        for arg in args
    ]
    with torch.set_grad_enabled(recorded):
        results = LAYER.default(*made)
    return tuple(None if result is None else TensorMeta.of(result) for result in results)


def keeping_workspace(*args: Any) -> Any:
    """The layer with its workspace, in a call that autograd does not record."""
    below: Any = torch._C._AutoDispatchBelowAutograd  # type: ignore[attr-defined]
    with below(), torch.enable_grad():
        return LAYER.default(*args)


def call_of(op: Any, value: Any) -> Callable[..., Any]:
    """What to call for an operation whose results are `value` (metadata; None for a result that is not there)."""
    if LAYER is not None and op is LAYER.default and value[WORKSPACE] is not None:
        return keeping_workspace
    return seeded(op) or op  # type: ignore[no-any-return]


# ---- the fused cells of CUDA ---------------------------------------------------------------------------------------------


def _dense(like: TensorMeta, *shape: Any) -> TensorMeta:
    return TensorMeta.contiguous(shape, like.dtype, like.device)


@rule("_thnn_fused_gru_cell")
def fused_gru_cell(gates: TensorMeta, hidden: TensorMeta, h: TensorMeta, *bias: Any) -> Any:
    return _dense(h, *h.shape), _dense(h, h.shape[0], 5 * h.shape[1])


@rule("_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(gradient: TensorMeta, workspace: TensorMeta, has_bias: bool) -> Any:
    rows, width = workspace.shape[0], workspace.shape[1] // 5 * 3
    gates, bias = _dense(workspace, rows, width), _dense(workspace, width) if has_bias else None
    return gates, gates, _dense(gradient, *gradient.shape), bias, bias


@rule("_thnn_fused_lstm_cell")
def fused_lstm_cell(gates: TensorMeta, hidden: TensorMeta, c: TensorMeta, *bias: Any) -> Any:
    return _dense(c, *c.shape), _dense(c, *c.shape), _dense(gates, *gates.shape)


@rule("_thnn_fused_lstm_cell_backward_impl")
def fused_lstm_cell_backward(
    h: TensorMeta | None, c: TensorMeta | None, before: TensorMeta, after: TensorMeta, workspace: TensorMeta, has_bias: bool
) -> Any:
    if h is None and c is None:
        raise RuleError("a cell without gradients")
    return _dense(workspace, *workspace.shape), _dense(before, *before.shape), _dense(workspace, workspace.shape[1]) if has_bias else None
