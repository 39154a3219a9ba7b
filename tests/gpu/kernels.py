"""The code generator's cases on a device: the same graphs that Triton's interpreter executes, against eager's CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from magneto.inductor.cuda import compile_for
from magneto.inductor.runtime.triton_launch import launchers
from tests.inductor.codegen.triton_cases import CASES
from tests.inductor.lower.prim_graphs import Graph

ON_THE_CPU = ("numbers of indices",)  # makes its indices there


class CudaGraph(Graph):
    def input(self, t: torch.Tensor) -> fx.Node:
        reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        flat = torch.as_strided(t, (reach,), (1,)).cuda()
        return super().input(torch.as_strided(flat, t.shape, t.stride()))


def run_case(name: str) -> None:
    build, tolerance = CASES[name]
    torch.manual_seed(0)
    g = CudaGraph()
    build(g)
    device = torch.device("cuda", 0)
    run, _, _ = compile_for(g.fx, "case", {}, device, lambda kernels: launchers(kernels, device))
    for n, (found, wanted) in enumerate(zip(run(*g.inputs), g.expected, strict=True)):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"output {n}: {m}")  # noqa: B023


KERNELS: dict[str, Callable[[], None]] = {f"kernels: {name}": partial(run_case, name) for name in CASES if name not in ON_THE_CPU}
