"""ATen operations with a row of their own.

- addmm whose result only loops read: the bias is added by those loops, not written into the product's memory beforehand; other linear layers.
- mm and addmm with a weight that seldom changes: packed (lower/linear.py).
- products of a matrix with one vector, on a GPU: sums along the matrix's rows, at the speed of memory, which the loops in front and behind are part of.
- convolution with a bias whose result only loops read, on a GPU: they add it, where cuDNN would need a pass of its own. With `max_autotune` its weight is laid out as kernels of ours, and cuDNN's, read it.
- the gradient of such a bias, on a GPU: a sum in loops, where ATen would make a slower pass.
- dropout that our kernels draw (lower/dropout.py).
- clone: the same values in another layout; whether that needs a copy depends on who reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from magneto.base.flags import config
from magneto.graph.layout import channels_last_strides
from magneto.graph.meta import TensorMeta
from magneto.inductor.lower.box import Box, Computed, Stored, View
from magneto.inductor.lower.context import Lowering, same_layout
from magneto.inductor.lower.dropout import DROPOUT, lower_dropout
from magneto.inductor.lower.elementwise import pointwise
from magneto.inductor.lower.library import emit_call
from magneto.inductor.lower.linear import as_vector, packed_product
from magneto.inductor.lower.reductions import lower_reduction
from magneto.inductor.lower.values import HALF
from magneto.symbolic import ZERO

aten = torch.ops.aten

MANY_ROWS, LONG, HELD = (
    528,
    512,
    16384,
)  # of a matrix whose product with a vector is a sum of each row: rows, elements of one, which a block holds
LONG_OF_COMPUTED = 32  # elements of one that is computed for this alone, and need not be put into memory


def lower_addmm(low: Lowering, val: Any, bias: Box, a: Box, b: Box, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """bias + a @ b -> mm and a fused addition. bfloat16 rounds once more so, and saves the pass in which the library writes the bias first; what no loop
    reads goes to oneDNN's linear layer where `b` is a transposed weight."""
    if (
        config.numerics == "eager"
        or beta != 1
        or alpha != 1
        or val.dtype not in (torch.float32, torch.float64, torch.bfloat16)
        or len(bias.shape) > 2
    ):
        return None
    if low.on_gpu and a.shape[0] == 1 and (made := lower_mm(low, val, a, b)) is not None:
        return pointwise(low, "add", (made, _spread(bias, val)), val.dtype, tuple(val.shape), tuple(val.strides))
    fused = as_vector(bias, val) and (not low.only_loops or val.dtype is torch.bfloat16)
    packed = packed_product(low, val, a, b, bias if fused else None) if fused or low.only_loops else None
    if packed is not None and fused:
        return packed
    if not low.only_loops:
        on_cpu = val.device.type == "cpu"
        return _lower_linear(low, val, bias, a, b) if on_cpu and val.dtype is torch.bfloat16 and linear_available() else None
    product = packed if packed is not None else emit_call(low, aten.mm.default, (a, b), {}, val)
    assert isinstance(product, Stored)
    return pointwise(low, "add", (product, _spread(bias, val)), val.dtype, tuple(val.shape), tuple(val.strides))


def _spread(bias: Box, val: Any) -> Box:
    """A bias over a matrix."""
    rank = len(bias.shape)
    keep = tuple(bias.shape[d] != 1 for d in range(rank))
    return View(bias, lambda i: tuple([x if k else ZERO for x, k in zip(i[2 - rank :], keep, strict=True)]), val.shape, val.strides)


def lower_mm(low: Lowering, val: Any, a: Box, b: Box) -> Any:
    """A product with a weight may have it packed."""
    if config.numerics == "eager":
        return None
    if low.on_gpu and a.shape[0] == 1 and b.strides[0] == 1:
        return _sums_of_rows(
            low, val, View(b, lambda i: (i[1], i[0]), b.shape[::-1], b.strides[::-1]), View(a, lambda i: (ZERO, *i), a.shape[1:], (1,))
        )
    return packed_product(low, val, a, b)


def lower_mv(low: Lowering, val: Any, matrix: Box, vector: Box) -> Any:
    return _sums_of_rows(low, val, matrix, vector) if low.on_gpu and config.numerics == "fast" else None


def _sums_of_rows(low: Lowering, val: Any, matrix: Box, vector: Box) -> Any:
    """A product with one vector; None where rows do not lie in memory as they are, are too few for a GPU or too short to be worth a program."""
    shape, strides = tuple(matrix.shape), tuple(matrix.strides)
    rows, length = shape
    least = LONG if isinstance(matrix.root, Stored) else LONG_OF_COMPUTED
    if not isinstance(rows, int) or not isinstance(length, int) or strides[1] != 1 or rows < MANY_ROWS or not least <= length <= HELD:
        return None
    if val.dtype not in (torch.float32, *HALF) or matrix.dtype is not vector.dtype:
        return None
    if isinstance(vector.root, Computed):
        low.realise(vector.root)  # once, not for each row
    factors = (matrix, View(vector, lambda i: (i[1],), shape, strides))
    wide = [f if f.dtype is torch.float32 else pointwise(low, "convert_element_type", (f,), torch.float32, shape, strides) for f in factors]
    product = pointwise(low, "mul", tuple(wide), torch.float32, shape, strides)
    total = lower_reduction("sum", low, TensorMeta.contiguous((rows,), torch.float32, val.device), product, (1,))
    result = total if val.dtype is torch.float32 else pointwise(low, "convert_element_type", (total,), val.dtype, (rows,), (1,))
    return result if len(val.shape) == 1 else View(result, lambda i: i[1:], tuple(val.shape), tuple(val.strides))


@cache
def linear_available() -> bool:
    """Does oneDNN multiply bfloat16 here?"""
    built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _lower_linear(low: Lowering, val: Any, bias: Box, a: Box, b: Box) -> Any:
    rows, columns = b.shape
    dtypes = {box.dtype for box in (bias, a, b)}
    if len(bias.shape) != 1 or bias.shape[0] != columns or b.strides != (1, rows) or a.strides != (rows, 1) or dtypes != {val.dtype}:
        return None
    if 0 in (*a.shape, columns) or 1 in (*a.shape, columns) or bias.strides != (1,):
        return None
    weight = View(b, lambda i: (i[1], i[0]), (columns, rows), (rows, 1))
    return emit_call(low, torch.ops.mkldnn._linear_pointwise.default, (a, weight, bias, "none", (), ""), {}, val)


def lower_activated(low: Lowering, val: Any, a: Box, weight: Box, bias: Box | None, attr: str, scalars: Any, algorithm: str | None) -> Any:
    """A linear layer with its activation (inductor/post_ops.py) may have its weight packed."""
    turned = View(weight, lambda i: (i[1], i[0]), weight.shape[::-1], weight.strides[::-1])
    return packed_product(low, val, a, turned, bias, (attr, tuple(scalars), algorithm))


def lower_clone(low: Lowering, val: Any, x: Box, *, memory_format: Any = None) -> Any:
    if low.only_loops and x.reads and x.reads <= low.steady and not same_layout(x.shape, x.strides, val.strides):
        return low.copy(x, tuple(val.strides))  # of weights only: laid out once for many calls, rather than read across in each
    return View(x, lambda i: i, tuple(val.shape), tuple(val.strides))


def lower_convolution(low: Lowering, val: Any, x: Box, weight: Box, bias: Box | None, *sizes: Any) -> Any:
    given, added = weight, bias is not None and val.device.type == "cuda" and low.only_loops and bias.dtype is val.dtype
    dense = not sizes[3] and sizes[5] == 1 and tuple(weight.shape[2:]) != (1, 1)
    if dense and low.on_gpu and config.max_autotune and len(val.shape) == 4 and val.is_channels_last():
        lying = channels_last_strides(weight.shape)  # type: ignore[arg-type]
        given = weight if same_layout(weight.shape, weight.strides, lying) else low.copy(weight, lying)
    if given is weight and not added:
        return None
    made = emit_call(low, aten.convolution.default, (x, given, None if added else bias, *sizes), {}, val)
    if bias is None or not added:
        return made
    spread = View(bias, lambda i: (i[1],), tuple(val.shape), tuple(val.strides))
    return pointwise(low, "add", (made, spread), val.dtype, tuple(val.shape), tuple(val.strides))


def lower_convolution_backward(low: Lowering, val: Any, grad: Box, x: Box, weight: Box, sizes: Any, *rest: Any) -> Any:
    *rest, (of_input, of_weight, of_bias) = rest  # type: ignore[assignment]
    if not of_bias or grad.device.type != "cuda":
        return None
    made: Any = (None, None)
    if of_input or of_weight:
        args = (grad, x, weight, sizes, *rest, (of_input, of_weight, False))
        made = emit_call(low, aten.convolution_backward.default, args, {}, (val[0], val[1], None))
    bias = lower_reduction("sum", low, val[2], grad, (0, *range(2, len(grad.shape))))
    return made[0], made[1], bias


ROWS: dict[Any, Callable[..., Any]] = {
    DROPOUT: lower_dropout,
    aten.clone.default: lower_clone,
    aten.mm.default: lower_mm,
    aten.mv.default: lower_mv,
    aten.addmm.default: lower_addmm,
    aten.convolution.default: lower_convolution,
    aten.convolution_backward.default: lower_convolution_backward,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    ROWS[torch.ops.mkldnn._linear_pointwise.default] = lower_activated
