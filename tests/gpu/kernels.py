"""The code generator's cases on a device: the same graphs that Triton's interpreter executes, against eager's CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from magneto import optimize
from magneto.inductor import cuda
from magneto.inductor.runtime import tuning
from magneto.inductor.runtime.triton_launch import launchers
from tests.inductor.codegen.triton_cases import CASES, PRODUCTS, joining
from tests.inductor.lower.prim_graphs import Graph

ON_THE_CPU = ("numbers of indices",)  # makes its indices there


class CudaGraph(Graph):
    def input(self, t: torch.Tensor) -> fx.Node:
        reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        flat = torch.as_strided(t, (reach,), (1,)).cuda()
        return super().input(torch.as_strided(flat, t.shape, t.stride()))


def run_case(name: str) -> None:
    build, tolerance = CASES[name]
    _run(build, tolerance, *PRODUCTS.get(name, ()))


def _run(build: Callable[[Graph], None], tolerance: float, *tiles: int) -> None:
    torch.manual_seed(0)
    g = CudaGraph()
    build(g)
    device, gather = torch.device("cuda", 0), cuda.gather
    cuda.gather = joining(*tiles) if tiles else gather
    try:
        run, _, _ = cuda.compile_for(g.fx, "case", {}, device, lambda kernels: launchers(kernels, device))
    finally:
        cuda.gather = gather
    for n, (found, wanted) in enumerate(zip(run(*g.inputs), g.expected, strict=True)):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"output {n}: {m}")  # noqa: B023


KERNELS: dict[str, Callable[[], None]] = {f"kernels: {name}": partial(run_case, name) for name in CASES if name not in ON_THE_CPU}


def candidates() -> None:
    """All tiles that tuning tries are right: sizes that blocks divide, and sizes that they do not."""
    for tiles in tuning.candidates(torch.device("cuda", 0)):
        for rows, inner, columns in ((1024, 512, 768), (600, 200, 328)):

            def build(g: Graph, sizes: tuple[int, ...] = (rows, inner, columns)) -> None:
                x, w, bias = (torch.randn(size).bfloat16() for size in ((sizes[0], sizes[1]), (sizes[2], sizes[1]), (sizes[2],)))
                y = g.call(torch.ops.aten.addmm.default, g.input(bias), g.input(x), g.input((w * 0.05).t()))
                v = g.convert_element_type(y, torch.float32)
                g.output(g.convert_element_type(g.mul(g.mul(v, 0.5), g.add(g.erf(g.mul(v, 0.7071067811865476)), 1.0)), torch.bfloat16))

            try:
                _run(build, 2e-2, *(getattr(tiles, name) for name in type(tiles).__slots__))
            except Exception as error:
                raise AssertionError(f"{tiles} {rows} {inner} {columns}: {error}") from error


def autotuned() -> None:
    """`mode="max-autotune"` as users meet it: whoever computes the product."""
    layer = torch.nn.Linear(512, 1024, device="cuda", dtype=torch.bfloat16)
    run = lambda x, y: (torch.nn.functional.gelu(layer(x)), torch.relu(x.view(4, -1, 512) @ y))  # noqa: E731
    x, y = torch.randn(2048, 512, device="cuda").bfloat16(), torch.randn(4, 512, 256, device="cuda").bfloat16() * 0.05
    with torch.no_grad():
        wanted, compiled = run(x, y), optimize("inductor", mode="max-autotune")(run)
        for _ in range(4):
            torch.testing.assert_close(compiled(x, y), wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(compiled(x[4:], y), run(x[4:], y), rtol=2e-2, atol=2e-2)


KERNELS |= {"products: candidates": candidates, "products: autotuned": autotuned}
