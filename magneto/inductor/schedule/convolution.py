"""Convolutions as products of matrices: rows are the places of the result, columns its channels, terms what a window covers, channels innermost.

Two dimensions, channels-last, not transposed; also cuDNN's calls with a bias, a residual and relu behind them. In one group what covers single places, and all of them, is a product of matrices as they lie (`window`
None); for others the kernel finds each term in the image (codegen/triton_convolution.py). Of depthwise ones, with a group for each channel, a result is a short sum: loops like any other (`windowed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from magneto.base.dataclass import dataclass
from magneto.graph.layout import channels_last_strides
from magneto.inductor.loops.ir import Buffer, LibraryCall, Load, Op, Value, ViewOf
from magneto.inductor.lower.values import constant, convert, make_masked
from magneto.inductor.runtime.kept import tensor_cores
from magneto.symbolic import Expr, add, compare, conj, floordiv, mod, mul

aten = torch.ops.aten
CONVOLUTION, RELU, ADD_RELU = (op.default for op in (aten.convolution, aten.cudnn_convolution_relu, aten.cudnn_convolution_add_relu))
TYPES = (torch.float16, torch.bfloat16, torch.float32)
LEAST_ROWS, LEAST = 64, 16  # places; channels of the result, and terms, worth a kernel
MOST = 49  # terms of a depthwise one, which are written out

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Window:
    """Along height and width: elements that a window covers, steps between windows, zeros around the image, steps between a window's elements, the image and the result."""

    size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    image: Pair
    result: Pair


@dataclass(frozen=True, slots=True)
class Factors:
    """Of a product, or of a `convolution`; with a window `a` is the image (batch, height, width, channels) and `b` the weight (height, width, channels, channels of the result). `precision`: of products of float32.
    `relu`, `residual`: what the call does behind the product. `deep`: each channel has its own window, and `b` one channel."""

    a: ViewOf
    b: ViewOf
    bias: ViewOf | None
    result: Buffer
    window: Window | None = None
    precision: str = ""
    relu: bool = False
    residual: ViewOf | None = None
    convolution: bool = False
    deep: bool = False


def factors(call: LibraryCall) -> Factors | None:
    """None for what is no such convolution."""
    residual: Any = None
    if call.op is CONVOLUTION:
        x, w, bias, stride, padding, dilation, transposed, _, groups = call.args
    elif call.op is RELU:
        (x, w, bias, stride, padding, dilation, groups), transposed = call.args, False
    elif call.op is ADD_RELU and call.args[3] == 1:
        (x, w, residual, _, bias, stride, padding, dilation, groups), transposed = call.args, False
    else:
        return None
    (result,) = call.buffers
    given = [view for view in (x, w, bias, residual) if view is not None]
    deep = groups != 1 and groups == x.shape[1] == w.shape[0]
    if (
        transposed
        or not (groups == 1 or deep)
        or call.kwargs
        or len(w.shape) != 4
        or {result.dtype, *(v.dtype for v in given)} - {result.dtype}
    ):
        return None
    if result.dtype not in TYPES or not all(isinstance(n, int) for v in (*given, result) for n in v.shape):
        return None
    if not _lie_last(x) or any(not _dense(v) for v in (result, residual) if v is not None):
        return None
    batch, columns, *places = _ints(result.shape)
    high, wide = _ints(x.shape[2:])
    window = Window(_pair(w.shape[2:]), _pair(stride), _pair(padding), _pair(dilation), (high, wide), (places[0], places[1]))
    rows, terms = batch * places[0] * places[1], prod(_ints(w.shape[1:]))
    if rows < LEAST_ROWS or columns < LEAST or (terms > MOST if deep else terms < LEAST):
        return None
    matrix = Buffer(result.name, (rows, columns), (columns, 1), result.dtype, result.device)
    precision = (
        "" if result.dtype is not torch.float32 else "tf32" if tensor_cores(torch.float32) and torch._C._get_cudnn_enabled() else "ieee"
    )
    a, b = _moved(x, (0, 2, 3, 1)), _moved(w, (2, 3, 1, 0))
    rest = precision, call.op is not CONVOLUTION, residual, True
    if deep:
        return Factors(a, b, bias, matrix, window, "", *rest[1:], True)
    if (step := _one_step(a)) and window.size == window.stride == (1, 1) and window.padding == (0, 0):
        a = ViewOf(x.buffer, (rows, terms), (step, 1), x.offset, x.dtype)
        return Factors(a, ViewOf(w.buffer, b.shape[2:], b.strides[2:], w.offset, w.dtype), bias, matrix, None, *rest)
    return Factors(a, b, bias, matrix, window, *rest)


def _ints(sizes: Sequence[Any]) -> list[int]:
    return [int(n) for n in sizes]


def _pair(sizes: Sequence[Any]) -> Pair:
    """One number serves both."""
    return int(sizes[0]), int(sizes[-1])


def _lie_last(view: ViewOf) -> bool:
    return view.shape[1] == 1 or view.strides[1] == 1


def _dense(view: ViewOf | Buffer) -> bool:
    wanted = channels_last_strides(view.shape)  # type: ignore[arg-type]
    return all(n == 1 or s == t for n, s, t in zip(view.shape, view.strides, wanted, strict=True))


def _moved(view: ViewOf, order: Sequence[int]) -> ViewOf:
    shape, strides = (tuple(given[k] for k in order) for given in (view.shape, view.strides))
    return ViewOf(view.buffer, shape, strides, view.offset, view.dtype)


def _one_step(image: ViewOf) -> int:
    """From each place to the next; 0 where there is no such step."""
    step = reach = 0
    for size, stride in list(zip(image.shape, image.strides, strict=True))[2::-1]:
        if size != 1 and step and stride != reach:
            return 0
        if size != 1:
            step, reach = step or int(stride), int(size) * int(stride)  # type: ignore[arg-type]
    return step


def windowed(of: Factors, row: Expr, channel: Expr) -> Value:
    """An element of a depthwise convolution."""
    window, kind = of.window, torch.float32
    assert window is not None
    tall, broad = window.result
    places = floordiv(row, tall * broad), mod(floordiv(row, broad), tall), mod(row, broad)
    sums: Value | None = None
    for down in range(window.size[0]):
        for over in range(window.size[1]):
            at = [add(mul(places[1 + k], window.stride[k]), n * window.dilation[k] - window.padding[k]) for k, n in enumerate((down, over))]
            inside = conj(
                *(compare(how, place, end) for place, size in zip(at, window.image, strict=True) for how, end in (("ge", 0), ("lt", size)))
            )
            value = make_masked(inside, lambda at=at: _load(of.a, (places[0], *at, channel)), lambda: constant(0.0, of.a.dtype))  # type: ignore[misc]
            term = Op("mul", (convert(value, kind), convert(_load(of.b, (down, over, 0, channel)), kind)), kind)
            sums = term if sums is None else Op("add", (sums, term), kind)
    assert sums is not None
    if of.bias is not None:
        sums = Op("add", (sums, convert(_load(of.bias, (channel,)), kind)), kind)
    return convert(sums, of.result.dtype)


def _load(view: ViewOf, index: Sequence[Expr | int]) -> Load:
    return Load(view.buffer, add(view.offset, *(mul(i, t) for i, t in zip(index, view.strides, strict=True))), view.dtype)
