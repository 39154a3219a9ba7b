"""The code generator's cases on a device: the same graphs that Triton's interpreter executes, against eager's CUDA kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from magneto import optimize
from magneto.inductor import cuda
from magneto.inductor.runtime import tuning
from magneto.inductor.runtime.triton_launch import launchers
from tests.gpu.convolutions import distance
from tests.inductor.codegen.triton_cases import CASES, PRODUCTS, joining
from tests.inductor.codegen.triton_convolutions import convolved, last, scaled
from tests.inductor.lower.prim_graphs import Graph

ON_THE_CPU = ("numbers of indices", "gradients of averages of single elements")  # they make their indices there


def _moved(t: torch.Tensor) -> torch.Tensor:
    """On the device, with its strides."""
    if t.is_cuda:
        return t
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return torch.as_strided(torch.as_strided(t, (reach,), (1,)).cuda(), t.shape, t.stride())


class CudaGraph(Graph):
    def input(self, t: torch.Tensor) -> fx.Node:
        return super().input(_moved(t))


def run_case(name: str) -> None:
    build, tolerance = CASES[name]
    _run(build, tolerance, *PRODUCTS.get(name, ()))


def _run(build: Callable[[Graph], None], tolerance: float, *tiles: int) -> None:
    torch.manual_seed(0)
    g = CudaGraph()
    build(g)
    g.inputs, g.expected = [_moved(t) for t in g.inputs], tuple(_moved(t) for t in g.expected)  # of cases that set them themselves
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


def windows() -> None:
    """The same of convolutions: channels that fill blocks of terms, and three colours; float32 as TF32, and in full."""
    before = torch.backends.cudnn.allow_tf32
    try:
        for dtype, allowed, found in (
            (torch.bfloat16, True, tuning.WINDOWS),
            (torch.float32, True, tuning.FLOATS),
            (torch.float32, False, tuning.EXACT),
        ):
            torch.backends.cudnn.allow_tf32 = allowed
            for numbers in found:
                for image, weight, stride, padding in (
                    ((3, 64, 30, 29), (72, 64, 3, 3), 2, 1),
                    ((3, 128, 16, 16), (256, 128, 3, 3), 1, 1),
                    ((3, 3, 33, 31), (64, 3, 7, 7), 2, 3),
                ):

                    def build(g: Graph, sizes: tuple[Any, ...] = (image, weight, stride, padding, dtype)) -> None:
                        image, weight, stride, padding, dtype = sizes
                        x, w = g.input(last(*image, dtype=dtype)), g.input(last(*weight, dtype=dtype, scale=0.1))
                        g.output(scaled(g, convolved(g, x, w, (stride, stride), (padding, padding)), dtype))

                    try:
                        _run(build, 1e-4 if not allowed else 2e-2 if dtype is torch.float32 else 5e-2, *numbers)
                    except Exception as error:
                        raise AssertionError(f"{numbers} {image} {weight} {dtype}: {error}") from error
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Convolved(torch.nn.Module):
    """Colours, windows, single places and every second one, with norms, a residual and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(64)
        self.narrow, self.middle, self.wide = torch.nn.Conv2d(64, 32, 1), torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.Conv2d(32, 64, 1)
        self.depth, self.last = torch.nn.Conv2d(64, 64, 3, 2, 1, groups=64), torch.nn.Conv2d(64, 128, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.wide(torch.relu(self.middle(torch.relu(self.narrow(x))))) + x)
        return torch.nn.functional.gelu(self.last(torch.nn.functional.silu(self.depth(x))))


def autotuned_convolutions() -> None:
    """`mode="max-autotune"` as users meet it, in inference and training, channels-last or not: whoever computes the convolutions."""
    before = torch.backends.cudnn.allow_tf32
    try:
        for dtype, allowed in ((torch.bfloat16, True), (torch.float32, True), (torch.float32, False)):
            torch.backends.cudnn.allow_tf32 = allowed
            torch.manual_seed(0)
            exact = Convolved().cuda().double()
            plain, ours = (copy.deepcopy(exact).to(dtype, memory_format=torch.channels_last) for _ in range(2))
            for train in (False, True):
                compiled = optimize("inductor", mode="max-autotune")(ours.train(train))
                exact.train(train), plain.train(train)
                x = torch.randn(8, 3, 64, 64, device="cuda").double().contiguous(memory_format=torch.channels_last)
                for _ in range(4):
                    with torch.enable_grad() if train else torch.no_grad():
                        found, near, far = compiled(x.to(dtype)), plain(x.to(dtype)), exact(x)
                    assert (found.shape, found.stride(), found.dtype) == (near.shape, near.stride(), near.dtype)
                    assert distance(found, far) <= 2 * distance(near, far) + 1e-3, (
                        f"{dtype} {train}: {distance(found, far)}, eager {distance(near, far)}"
                    )
                    if train:
                        for net, out in ((ours, found), (plain, near), (exact, far)):
                            net.zero_grad()
                            out.square().mean().backward()
                        for (name, a), b, c in zip(ours.named_parameters(), plain.parameters(), exact.parameters(), strict=True):
                            assert a.grad is not None and b.grad is not None and c.grad is not None
                            assert distance(a.grad, c.grad) <= 4 * distance(b.grad, c.grad) + 0.05, f"{dtype}: the gradient of {name}"
    finally:
        torch.backends.cudnn.allow_tf32 = before


KERNELS |= {"convolutions: candidates": windows, "convolutions: autotuned": autotuned_convolutions}
KERNELS |= {"products: candidates": candidates, "products: autotuned": autotuned}
