"""Cases of triton_cases.py: convolutions that kernels of ours compute together with what follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.inductor.lower.prim_graphs import Graph

aten = torch.ops.aten
CONVOLUTIONS: dict[str, tuple[Callable[[Graph], Any], float]] = {}
TILES: dict[str, tuple[int, ...]] = {}


def case(name: str, *tiles: int) -> Callable[[Callable[[Graph], None]], None]:
    def add(build: Callable[[Graph], None]) -> None:
        CONVOLUTIONS[name], TILES[name] = (build, 2e-3), tiles or (32, 32, 32, 4, 3)

    return add


def last(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype).contiguous(memory_format=torch.channels_last)


def convolved(
    g: Graph,
    x: Any,
    w: Any,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    bias: Any = None,
) -> Any:
    return g.call(aten.convolution.default, x, w, bias, stride, padding, dilation, False, (0, 0), 1)


def spread(g: Graph, numbers: torch.Tensor, shape: tuple[int, ...]) -> Any:
    return g.broadcast_in_dim(g.input(numbers), shape, (1,))


def relu(g: Graph, x: Any) -> Any:
    return g.where(g.gt(x, 0.0), x, 0.0)


def scaled(g: Graph, y: Any, dtype: torch.dtype = torch.float16) -> Any:
    """A norm's scale and shift, a residual, relu."""
    shape = tuple(g.values[y].shape)
    y = g.add(g.mul(y, spread(g, torch.rand(shape[1]).to(dtype), shape)), spread(g, torch.randn(shape[1]).to(dtype), shape))
    return relu(g, g.add(y, g.input(last(*shape, dtype=dtype))))


@case("a convolution of single places")
def _places(g: Graph) -> None:
    g.output(scaled(g, convolved(g, g.input(last(2, 40, 7, 9)), g.input(last(48, 40, 1, 1, scale=0.2)))))


@case("a convolution of single places of what a relu makes", 32, 32, 32, 4, 3, 0, 0, 1, 1)
def _made(g: Graph) -> None:
    x = relu(g, g.mul(g.input(last(2, 64, 7, 9)), 0.5))
    g.output(convolved(g, x, g.input(last(64, 64, 1, 1, scale=0.2))))


@case("a convolution of every second place")
def _apart(g: Graph) -> None:
    x, w = g.input(last(3, 64, 11, 9)), g.input(last(40, 64, 1, 1, scale=0.1))
    g.output(scaled(g, convolved(g, x, w, (2, 2))))


@case("a convolution whose channels end within a block")
def _within(g: Graph) -> None:
    g.output(scaled(g, convolved(g, g.input(last(2, 48, 19, 8)), g.input(last(40, 48, 3, 3, scale=0.05)), (2, 2), (1, 1))))


@case("a convolution of three colours")
def _colours(g: Graph) -> None:
    g.output(scaled(g, convolved(g, g.input(last(2, 3, 23, 21)), g.input(last(32, 3, 7, 7, scale=0.1)), (2, 2), (3, 3))))


@case("a convolution with steps between a window's elements", 32, 64, 16, 4, 3, 0, 4)
def _steps(g: Graph) -> None:
    """Height and width differ in everything, the weight lies contiguous, few programs walk the blocks."""
    x, w = g.input(last(2, 32, 17, 13)), g.input((torch.randn(48, 32, 3, 2) * 0.1).half())
    g.output(g.tanh(convolved(g, x, w, (1, 2), (0, 1), (2, 3))))


@case("a convolution of a part of an image, with its bias")
def _part(g: Graph) -> None:
    """The image begins inside its memory; the result leaves."""
    x = g.slice(g.input(last(3, 32, 12, 12)), (1, 0, 2, 1), (3, 32, 12, 10), (1, 1, 1, 1))
    g.output(convolved(g, x, g.input(last(40, 32, 3, 3, scale=0.1)), padding=(1, 1), bias=g.input(torch.randn(40).half())))


@case("a convolution of float32")
def _floats(g: Graph) -> None:
    x, w = g.input(last(2, 32, 9, 8, dtype=torch.float32)), g.input(last(64, 32, 3, 3, dtype=torch.float32, scale=0.1))
    g.output(scaled(g, convolved(g, x, w, padding=(1, 1)), torch.float32))


def fused(g: Graph, x: Any, w: Any, bias: Any, residual: Any, *sizes: Any) -> Any:
    """A call of cuDNN, which the CPU has not."""

    def run(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
        z, bias = (rest[0], rest[2]) if residual is not None else (0, rest[0])
        return torch.relu(F.conv2d(x, w, bias, *rest[-4:]) + z)

    added = () if residual is None else (residual, 1.0)
    node = g.call(run, x, w, *added, bias, *sizes, 1)
    node.target = aten.cudnn_convolution_relu.default if residual is None else aten.cudnn_convolution_add_relu.default
    return node


@case("convolutions with what cuDNN does behind them")
def _fused(g: Graph) -> None:
    dtype = torch.float32
    x, bias = g.input(last(2, 64, 8, 9, dtype=dtype)), g.input(torch.randn(64))
    y = fused(g, x, g.input(last(64, 64, 3, 3, dtype=dtype, scale=0.05)), bias, None, (1, 1), (1, 1), (1, 1))
    g.output(fused(g, y, g.input(last(64, 64, 1, 1, dtype=dtype, scale=0.1)), bias, x, (1, 1), (0, 0), (1, 1)))


@case("a depthwise convolution", 16, 32, 1, 4, 0)
def _deep(g: Graph) -> None:
    x, w, bias = g.input(last(2, 40, 11, 9)), g.input(last(40, 1, 3, 3, scale=0.3)), g.input(torch.randn(40).half())
    g.output(scaled(g, g.call(aten.convolution.default, x, w, bias, (2, 1), (1, 1), (1, 2), False, (0, 0), 40)))


@case("depthwise convolutions with nothing behind them", 32, 32, 1, 4, 0)
def _deep_alone(g: Graph) -> None:
    x, w = g.input(last(3, 32, 8, 8, dtype=torch.float32)), g.input(torch.randn(32, 1, 2, 3) * 0.3)
    y = g.call(aten.convolution.default, x, w, None, (1, 1), (0, 2), (1, 1), False, (0, 0), 32)
    g.output(y, g.call(aten.convolution.default, x, g.input(torch.randn(32, 1, 1, 1)), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 32))
