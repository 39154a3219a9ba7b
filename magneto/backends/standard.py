"""The backends that come with magneto, except those of other packages (`foreign.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from magneto.backends import pipeline
from magneto.backends.registry import register_backend
from magneto.graph.atomic import atomic


@register_backend
def eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The captured graph as it is: what capture alone costs and changes."""
    return atomic(gm)


@register_backend(fixed_sizes=True)
def aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The functional ATen graph, run operation by operation: capture and aot_autograd without code generation."""
    return pipeline.compile_captured(gm, example_inputs, pipeline.CALL_HALF)


@register_backend(fixed_sizes=True)
def aot_eager_decomposed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """As aot_eager, after decomposition into primitives."""
    return pipeline.compile_captured(gm, example_inputs, pipeline.CALL_HALF_DECOMPOSED)


@register_backend(fixed_sizes=True)
def cudagraphs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """As aot_eager, with what it launches on a GPU recorded as a CUDA graph and replayed by one call."""
    return pipeline.compile_captured(gm, example_inputs, pipeline.REPLAY_HALF)


@register_backend("numpy", fixed_sizes=True)
def numpy_oracle(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The primitives executed by numpy, in float64 where that is more exact: slow, an oracle for tests that uses neither torch's kernels nor ours (library calls stay torch's)."""
    return pipeline.compile_captured(gm, example_inputs, pipeline.NUMPY_HALF)


@register_backend(fixed_sizes=True, slow=True)
def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The whole compiler: fused kernels and a native plan."""
    return pipeline.compile_captured(gm, example_inputs, pipeline.COMPILE_HALF)
