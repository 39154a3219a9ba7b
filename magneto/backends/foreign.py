"""Backends that hand the captured graph to another compiler: TorchScript, its inference optimiser, ONNX Runtime."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.refusal import Refusal
from magneto.backends.fallback import recover
from magneto.backends.registry import register_backend


def _mutates(gm: fx.GraphModule) -> bool:
    return bool(gm.meta.get("magneto", {}).get("mutated_inputs"))


def _traced(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """torch.jit.trace of the graph, on copies, so that example inputs written by the graph stay as they are."""
    if _mutates(gm):
        raise Refusal("torch.jit.trace runs the graph, which writes its inputs")
    copies = tuple(x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in example_inputs)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        return torch.jit.trace(gm, copies, check_trace=False)  # type: ignore[no-untyped-call]


def _as_tuple(fn: Callable[..., Any]) -> Callable[..., Any]:
    """TorchScript returns a graph's one-element tuple as it is, an empty one as None."""

    def run(*inputs: Any) -> Any:
        result = fn(*inputs)
        return result if isinstance(result, (tuple, list)) else (result,)

    return run


@register_backend(aliases=("ts",), fixed_sizes=True)
def torchscript(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch.jit.trace."""
    try:
        return _as_tuple(_traced(gm, example_inputs))
    except Exception as error:
        return recover(gm, error)


@register_backend(fixed_sizes=True)
def ofi(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch.jit.trace, frozen and passed through torch.jit.optimize_for_inference. Not for training."""
    try:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
            raise Refusal("ofi is for inference, and gradients are needed")
        traced = _traced(gm.eval(), example_inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _as_tuple(torch.jit.optimize_for_inference(torch.jit.freeze(traced.eval())))
    except Exception as error:
        return recover(gm, error)


@register_backend(needs="onnxruntime", fixed_sizes=True)
def onnxrt(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """ONNX Runtime on the exported graph (inference, tensors on the CPU)."""
    try:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
            raise Refusal("onnxrt is for inference, and gradients are needed")
        return _onnx_session(_traced(gm, example_inputs), gm, example_inputs)
    except Exception as error:
        return recover(gm, error)


def _onnx_session(traced: Any, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]

    names = [f"input_{i}" for i in range(len(example_inputs))]
    exported = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(traced, tuple(example_inputs), exported, input_names=names, dynamo=False)  # type: ignore[arg-type]
    session = onnxruntime.InferenceSession(exported.getvalue(), providers=["CPUExecutionProvider"])
    used = {value.name for value in session.get_inputs()}

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        feeds = {name: value.detach().numpy() for name, value in zip(names, inputs, strict=True) if name in used}
        return tuple(torch.from_numpy(array) for array in session.run(None, feeds))

    return run
