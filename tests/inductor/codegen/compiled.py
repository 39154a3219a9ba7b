"""`compiled(g)`: a hand-built prim graph through lowering, scheduling, C and a plan, against eager and the interpreter."""

from __future__ import annotations

from typing import Any

import torch

from magneto.inductor.compile import compile_program
from magneto.inductor.loops.ir import Program
from magneto.inductor.lower import lower_graph
from tests.inductor.loops.interp import run_program
from tests.inductor.lower.prim_graphs import Graph


def float64_of(g: Graph) -> tuple[Any, ...]:
    """The graph's outputs computed in double precision by eager."""
    values: dict[Any, Any] = {}
    inputs = iter(g.inputs)

    def value(x: Any) -> Any:
        if isinstance(x, torch.fx.Node):
            return values[x]
        return type(x)(value(y) for y in x) if isinstance(x, list | tuple) else x

    for node in g.fx.nodes:
        if node.op == "placeholder":
            t = next(inputs)
            values[node] = t.double() if t.is_floating_point() else t
        elif node.op == "call_function":
            args = [torch.float64 if a is torch.float32 else value(a) for a in node.args]
            values[node] = node.target(*args, **{k: value(v) for k, v in node.kwargs.items()})
        else:
            return tuple(value(node.args[0]))
    raise AssertionError("no output")


def check_compiled(g: Graph, tolerance: float = 1e-6, again: int = 2, interpreter: bool = True) -> Program:
    """Compiles and runs; dtype, shape and strides must be eager's, values the interpreter's and eager's up to `tolerance`."""
    program = lower_graph(g.fx)
    plan = compile_program(program)
    reference = run_program(program, *g.inputs)
    kept = [t.clone() if isinstance(t, torch.Tensor) else t for t in g.inputs]
    for _ in range(again):  # the second call finds the workspace of the first
        found = plan(*g.inputs)
        assert len(found) == len(g.expected)
        for n, (ours, theirs, eager) in enumerate(zip(found, reference, g.expected, strict=True)):
            if not isinstance(eager, torch.Tensor):
                assert ours == eager
                continue
            assert ours.dtype is eager.dtype and ours.shape == eager.shape and ours.stride() == eager.stride()
            for wanted in (theirs, eager) if interpreter else (eager,):
                torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"output {n}: {m}")  # noqa: B023
    for before, after in zip(kept, g.inputs, strict=True):
        assert not isinstance(before, torch.Tensor) or torch.equal(before.nan_to_num(), after.nan_to_num()), "an input was written"
    return program
