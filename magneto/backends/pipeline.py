"""THE ordered list of passes: from a captured graph to the callable that runs it. Read this first.

    captured graph (torch level)  --trace-->  functional ATen graph  --decompose-->  prims and library calls
        --compile-->  kernels and plan  --wrap-->  callable with eager's mutation and aliasing

Every pass is a function of a `Unit`. The runner times, logs and verifies each. Whatever fails becomes a named fallback: the captured graph runs in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.call import as_function, without_grad
from magneto.aot_autograd.trace import AtenGraph, drop_dead, trace
from magneto.aot_autograd.wrap import wrap
from magneto.backends.fallback import name_of, recover, run_captured_graph
from magneto.base.events import timer
from magneto.base.passes import Pass, run_passes

Compiled = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Unit:
    """What is being compiled, at any stage. `aten` is set by trace, `compiled` by compile (the functional graph) and by wrap (the whole)."""

    gm: fx.GraphModule
    inputs: tuple[Any, ...]
    name: str
    grad_enabled: bool
    aten: AtenGraph | None = None
    compiled: Compiled | None = None

    @property
    def traced(self) -> AtenGraph:
        assert self.aten is not None, "the trace pass comes first"
        return self.aten

    def with_graph(self, graph: fx.Graph) -> Unit:
        return replace(self, aten=replace(self.traced, graph=graph))


# ---- the passes ------------------------------------------------------------------------------------------------------


def trace_captured(unit: Unit) -> Unit:
    """Torch-level calls become functional ATen operations; mutation and aliasing move into the signature."""
    return replace(unit, aten=trace(unit.gm, unit.inputs, unit.grad_enabled, unit.name))


def decompose_to_prims(unit: Unit) -> Unit:
    """ATen operations become primitives; what has no decomposition stays a library call."""
    from magneto.prims import decompose

    return unit.with_graph(decompose(unit.traced.graph))


def drop_unused(unit: Unit) -> Unit:
    drop_dead(unit.traced.graph)
    return unit


def compile_kernels(unit: Unit) -> Unit:
    """Lower, schedule, generate code, build, plan."""
    from magneto.inductor.compile import compile_graph

    return replace(unit, compiled=compile_graph(unit.traced.graph, unit.name))


def call_eagerly(unit: Unit) -> Unit:
    """The functional graph as a Python function that calls its operations one by one (aot_eager)."""
    return replace(unit, compiled=without_grad(as_function(unit.traced.graph, unit.name)))


def wrap_compiled(unit: Unit) -> Unit:
    """Write-backs, aliases, constants."""
    assert unit.compiled is not None
    aten = unit.traced
    return replace(unit, compiled=wrap(unit.compiled, aten.signature, aten.constants, unit.gm.forward, unit.name))


INDUCTOR: tuple[Pass, ...] = (
    Pass("trace", trace_captured),
    Pass("decompose", decompose_to_prims),
    Pass("drop_unused", drop_unused),
    Pass("compile_kernels", compile_kernels),
    Pass("wrap", wrap_compiled),
)

AOT_EAGER: tuple[Pass, ...] = (
    Pass("trace", trace_captured),
    Pass("call_eagerly", call_eagerly),
    Pass("wrap", wrap_compiled),
)

AOT_EAGER_DECOMPOSED: tuple[Pass, ...] = (
    Pass("trace", trace_captured),
    Pass("decompose", decompose_to_prims),
    Pass("drop_unused", drop_unused),
    Pass("call_eagerly", call_eagerly),
    Pass("wrap", wrap_compiled),
)


# ---- running them ----------------------------------------------------------------------------------------------------


def compile_captured(gm: fx.GraphModule, example_inputs: Sequence[Any], passes: Sequence[Pass]) -> Compiled:
    """The callable for `gm`: compiled by `passes`, or `gm` itself where they do not apply."""
    with timer("backend"):
        try:
            if needs_grad(gm, example_inputs):
                return run_captured_graph(gm, "gradients are needed, PyTorch's autograd runs it", quiet=True)
            unit = Unit(gm, tuple(example_inputs), name_of(gm), torch.is_grad_enabled())
            unit = run_passes(passes, unit, verify=verify_unit, show=show_unit, label=unit.name)
        except Exception as error:
            return recover(gm, error)
    assert unit.compiled is not None
    return unit.compiled


def needs_grad(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether eager would record a backward graph while running `gm`."""
    if not (torch.is_grad_enabled() or any(node.target in _GRAD_SWITCHES for node in gm.graph.nodes)):
        return False
    held = (getattr(gm, str(node.target), None) for node in gm.graph.nodes if node.op == "get_attr")
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*inputs, *held))


_GRAD_SWITCHES = (torch._C._set_grad_enabled, torch.set_grad_enabled, torch.enable_grad)


def verify_unit(unit: Unit) -> None:
    if unit.aten is not None:
        unit.aten.graph.lint()


def show_unit(unit: Unit) -> str:
    if unit.aten is None:
        return str(unit.gm.graph)
    return f"{unit.aten.graph}\n{unit.aten.signature}"
