"""THE table of prims: every primitive operation, its category, dtype rule, shape rule and meaning.

Operands of elementwise prims have the same dtype and shape (promotion and broadcasting are explicit), except Python numbers, which take the
tensor operand's dtype. Reductions take a list of dimensions and do not keep them. On half precision an elementwise prim computes in
float32 and rounds its result; sum and var accumulate in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from magneto.prims import shapes
from magneto.prims.meanings import numpy as np_meaning
from magneto.prims.meanings import torch as torch_meaning
from magneto.prims.prim import ALL, Meaning, Prim


def _add(name: str, category: str, signature: str, dtype_rule: str, meta: Callable[..., Any], torch_fn: Meaning, numpy_fn: Meaning) -> None:
    ALL[name] = Prim(name, category, signature, dtype_rule, meta, torch_fn, numpy_fn)


# name -> torch function (when it differs), numpy function (when it differs)
_UNARY: dict[str, tuple[Meaning | None, Meaning | None]] = {
    "neg": (None, np.negative),
    "abs": (None, None),
    "exp": (None, None),
    "exp2": (None, None),
    "expm1": (None, None),
    "log": (None, None),
    "log1p": (None, None),
    "log2": (None, None),
    "log10": (None, None),
    "sqrt": (None, None),
    "rsqrt": (None, np_meaning.rsqrt),
    "reciprocal": (None, np_meaning.reciprocal),
    "sin": (None, None),
    "cos": (None, None),
    "tan": (None, None),
    "asin": (None, np.arcsin),
    "acos": (None, np.arccos),
    "atan": (None, np.arctan),
    "sinh": (None, None),
    "cosh": (None, None),
    "tanh": (None, None),
    "asinh": (None, np.arcsinh),
    "acosh": (None, np.arccosh),
    "atanh": (None, np.arctanh),
    "erf": (None, np_meaning.erf),
    "floor": (None, None),
    "ceil": (None, None),
    "round": (None, np.rint),
    "trunc": (None, None),
    "sign": (None, np_meaning.sign),
    "isnan": (None, None),
    "isinf": (None, None),
    "bitwise_not": (None, np.bitwise_not),
    "logical_not": (None, None),
    "lgamma": (None, np_meaning.lgamma),
}

_BINARY: dict[str, tuple[Meaning | None, Meaning | None]] = {
    "add": (None, None),
    "sub": (None, np.subtract),
    "mul": (None, np.multiply),
    "div": (None, np.divide),
    "floordiv": (torch.floor_divide, np_meaning.floordiv),
    "remainder": (None, np_meaning.remainder),
    "fmod": (None, None),
    "pow": (torch_meaning.power, np.power),
    "atan2": (torch_meaning.atan2, np.arctan2),
    "maximum": (torch_meaning.maximum, np_meaning.maximum),
    "minimum": (torch_meaning.minimum, np_meaning.minimum),
    "bitwise_and": (None, None),
    "bitwise_or": (None, None),
    "bitwise_xor": (None, None),
    "shift_left": (torch.bitwise_left_shift, np_meaning.shift_left),
    "shift_right": (torch.bitwise_right_shift, np_meaning.shift_right),
    "eq": (None, np.equal),
    "ne": (None, np.not_equal),
    "lt": (None, np.less),
    "le": (None, np.less_equal),
    "gt": (None, np.greater),
    "ge": (None, np.greater_equal),
}

_TO_BOOL = frozenset({"isnan", "isinf", "logical_not", "eq", "ne", "lt", "le", "gt", "ge"})


def _elementwise(rows: dict[str, tuple[Meaning | None, Meaning | None]], category: str, signature: str) -> None:
    for name, (torch_fn, numpy_fn) in rows.items():
        rule = "bool" if name in _TO_BOOL else "same"
        meta = shapes.elementwise_meta(name, torch.bool if rule == "bool" else None)
        torch_fn = torch_fn or getattr(torch, name)
        if category == "binary":
            torch_fn = torch_meaning.number_first(torch_fn)
        _add(name, category, signature, rule, meta, torch_fn, np_meaning.rounded(numpy_fn or getattr(np, name), category))


_elementwise(_UNARY, "unary", "x")
_elementwise(_BINARY, "binary", "a, b")
_add("where", "ternary", "cond, a, b", "same", shapes.where_meta, torch_meaning.where, np_meaning.where)
_add("convert_element_type", "convert", "x, dtype", "argument", shapes.convert_meta, torch_meaning.convert, np_meaning.convert)

for _name, _rule, _meta in (
    ("sum", "sum", shapes.sum_meta),
    ("prod", "sum", shapes.sum_meta),
    ("amax", "same", shapes.reduction_meta("same")),
    ("amin", "same", shapes.reduction_meta("same")),
    ("any", "bool", shapes.reduction_meta("bool")),
    ("all", "bool", shapes.reduction_meta("bool")),
):
    _add(_name, "reduction", "x, dims", _rule, _meta, torch_meaning.REDUCTIONS[_name], np_meaning.REDUCTIONS[_name])
for _name in ("argmax", "argmin"):
    _add(
        _name, "reduction", "x, dim", "int64", shapes.reduction_meta("int64"), torch_meaning.REDUCTIONS[_name], np_meaning.REDUCTIONS[_name]
    )
_add("var", "reduction", "x, dims, correction -> var, mean", "same", shapes.var_meta, torch_meaning.var, np_meaning.var)

_add(
    "broadcast_in_dim",
    "shape",
    "x, shape, dims",
    "same",
    shapes.broadcast_meta,
    torch_meaning.broadcast_in_dim,
    np_meaning.broadcast_in_dim,
)
_add("reshape", "shape", "x, shape", "same", shapes.reshape_meta, torch.reshape, np.reshape)
_add("transpose", "shape", "x, perm", "same", shapes.transpose_meta, torch.permute, np.transpose)
_add("slice", "shape", "x, starts, limits, steps", "same", shapes.slice_meta, torch_meaning.slice_, np_meaning.slice_)
_add("flip", "shape", "x, dims", "same", shapes.flip_meta, torch.flip, np_meaning.flip)
_add("cat", "shape", "xs, dim", "same", shapes.cat_meta, torch_meaning.cat, np_meaning.cat)
_add("pad", "shape", "x, lo, hi, value", "same", shapes.pad_meta, torch_meaning.pad, np_meaning.pad)

_add("iota", "index", "n, dtype, device", "argument", shapes.iota_meta, torch_meaning.iota, np_meaning.iota)
_add("full", "index", "shape, value, dtype, device", "argument", shapes.full_meta, torch_meaning.full, np_meaning.full)
_add("index_select", "index", "x, dim, index", "same", shapes.index_select_meta, torch_meaning.index_select, np_meaning.index_select)
_add("gather", "index", "x, dim, index", "same", shapes.gather_meta, torch_meaning.gather, np_meaning.gather)
for _name, _rule in (("window_max", "same"), ("window_argmax", "int8")):
    _meta = shapes.window_meta(torch.int8 if _rule == "int8" else None)
    _signature = "x, size, step, pad, dilation, count"
    _add(_name, "window", _signature, _rule, _meta, getattr(torch_meaning, _name), getattr(np_meaning, _name))

PRIMS: dict[str, Prim] = ALL


class _Namespace:
    """`prims.add` and so on: attribute access to the table."""

    def __getattr__(self, name: str) -> Prim:
        try:
            return PRIMS[name]
        except KeyError:
            raise AttributeError(f"there is no prim {name!r}") from None


prims: Any = _Namespace()
