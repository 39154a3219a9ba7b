"""Building body values: `make_op` applies a prim to values and folds what is exact to fold."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from magneto.inductor.loops.ir import Const, IndexValue, Masked, Op, Scalar, Value, bounds_of
from magneto.symbolic import Const as IntConst
from magneto.symbolic import Expr, add, compare, conj, floordiv, maximum, minimum, mod, mul

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
INT32_LIMIT = 2**31


HALF = frozenset({torch.float16, torch.bfloat16})


def constant(value: Scalar, dtype: torch.dtype) -> Const:
    """A number as dtype; of half types the nearest representable one."""
    if dtype in HALF:
        value = torch.tensor(value, dtype=dtype).item()
    return Const(value, dtype)


def index_value(expr: Expr, dtype: torch.dtype) -> Value:
    """An index expression as a number; a Const where it is constant."""
    if isinstance(expr, IntConst):
        return Const(expr.value, dtype)
    return IndexValue(expr, dtype)


def _index_form(v: Value) -> Expr | None:
    """The integer expression of an int64 value that is one."""
    if v.dtype is torch.int64:
        if isinstance(v, IndexValue):
            return v.expr
        if isinstance(v, Const) and isinstance(v.value, int):
            return IntConst(v.value)
    return None


def _fits(expr: Expr) -> bool:
    """Bounded far below int64: arithmetic on it cannot wrap."""
    return expr.lo is not None and expr.hi is not None and -INT32_LIMIT < expr.lo and expr.hi < INT32_LIMIT


def _fold_index(name: str, args: tuple[Value, ...], dtype: torch.dtype) -> Value | None:
    """Integer arithmetic and comparisons of loop indices stay index expressions (masks made of iota, positions)."""
    if len(args) == 1 and name in ("neg", "abs") and dtype is torch.int64:
        only = None if isinstance(args[0], Const) else _index_form(args[0])
        if only is None or not _fits(only):
            return None
        return index_value(mul(only, -1) if name == "neg" else maximum(only, mul(only, -1)), dtype)
    if len(args) != 2 or all(isinstance(a, Const) for a in args):
        return None
    a, b = _index_form(args[0]), _index_form(args[1])
    if a is None or b is None or not (_fits(a) and _fits(b)):
        return None
    if name in COMPARISONS:
        return index_value(compare(name, a, b), torch.bool)
    if dtype is not torch.int64:
        return None
    if name == "add":
        return index_value(add(a, b), dtype)
    if name == "sub":
        return index_value(a - b, dtype)
    if name == "mul":
        return index_value(mul(a, b), dtype)
    if name in ("minimum", "maximum"):
        return index_value(minimum(a, b) if name == "minimum" else maximum(a, b), dtype)
    if name in ("floordiv", "remainder") and isinstance(b, IntConst) and b.value > 0:
        return index_value(floordiv(a, b) if name == "floordiv" else mod(a, b), dtype)
    return None


def _is(v: Value, number: int) -> bool:
    return isinstance(v, Const) and v.value == number


def _fold_unit(name: str, args: tuple[Value, ...], dtype: torch.dtype) -> Value | None:
    """x * 1, x / 1, x - 0 are x exactly (x + 0.0 is not, for x = -0.0)."""
    a, b = args
    if a.dtype is not dtype:
        return None
    if name == "mul":
        return a if _is(b, 1) else b if _is(a, 1) else None
    if name == "sub" and _is(b, 0) and not (dtype.is_floating_point and str(getattr(b, "value", 0)).startswith("-")):
        return a
    if name == "div" and _is(b, 1) and dtype.is_floating_point:
        return a
    if name == "add" and not dtype.is_floating_point and not dtype.is_complex:
        return a if _is(b, 0) else b if _is(a, 0) else None
    return None


def _fold_logic(name: str, args: tuple[Value, ...]) -> Value | None:
    a, b = args
    if isinstance(a, Const):
        a, b = b, a
    if isinstance(b, Const):
        keeps = (name == "bitwise_and") == bool(b.value)
        return a if keeps else b
    if isinstance(a, IndexValue) and isinstance(b, IndexValue) and name == "bitwise_and":
        return index_value(conj(a.expr, b.expr), torch.bool)
    return None


def convert(v: Value, dtype: torch.dtype) -> Value:
    """v as dtype; a no-op where it already is."""
    if v.dtype is dtype:
        return v
    if isinstance(v, Const) and _convertible(v, dtype):
        return Const(v.value, dtype)
    if isinstance(v, Op) and v.name == "convert_element_type" and v.args[0].dtype is torch.bool:
        return convert(v.args[0], dtype)  # 0 or 1 in any type
    if isinstance(v, IndexValue) and v.dtype is torch.int64 and dtype is torch.int32 and _fits(v.expr):
        return IndexValue(v.expr, dtype)
    if isinstance(v, IndexValue) and v.dtype is torch.int64 and dtype.is_floating_point and _fits(v.expr):
        v = IndexValue(v.expr, torch.int32)  # the same number, of half the width
    return Op("convert_element_type", (v,), dtype)


def _convertible(v: Const, dtype: torch.dtype) -> bool:
    """Constants are converted here only where every platform agrees on the result and no rounding happens."""
    value = v.value
    if isinstance(value, complex) or dtype.is_complex:
        return False
    if dtype is torch.bool:
        return value == value
    if dtype.is_floating_point:
        return (isinstance(value, float) and dtype is torch.float64) or (isinstance(value, int) and abs(value) < 256) or value in (0.0, 1.0)
    return isinstance(value, int) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def make_op(name: str, args: tuple[Value, ...], dtype: torch.dtype) -> Value:
    """The value of a prim; folded where that is exact."""
    if name == "convert_element_type":
        return convert(args[0], dtype)
    if name == "where":
        return _make_where(*args)
    if (found := _fold_index(name, args, dtype)) is not None:
        return found
    if len(args) == 2:
        if name == "lt" and _is(args[1], 0) and not args[0].dtype.is_floating_point and bounds_of(args[0])[0] >= 0:
            return Const(False, torch.bool)
        if name in _UNIT:
            found = _fold_unit(name, args, dtype)
        if found is None and dtype is torch.bool and name in ("bitwise_and", "bitwise_or"):
            found = _fold_logic(name, args)
        if found is not None:
            return found
        if name == "pow" and isinstance(args[1], Const):
            return make_pow(args[0], args[1])
    return Op(name, args, dtype)


_UNIT = frozenset({"add", "sub", "mul", "div"})


def _make_where(cond: Value, a: Value, b: Value) -> Value:
    if isinstance(cond, Const):
        return a if cond.value else b
    if a is b:
        return a
    return Op("where", (cond, a, b), a.dtype)


def make_masked(cond: Expr, value: Callable[[], Value], other: Callable[[], Value]) -> Value:
    """value() where the 0/1 expression holds, other() elsewhere; what is never taken is never built."""
    if isinstance(cond, IntConst):
        return value() if cond.value else other()
    return Masked(IndexValue(cond, torch.bool), value(), other())


def make_pow(x: Value, exponent: Const) -> Value:
    """x ** constant. ATen's own special cases are decomposed before (prims/decompositions/pointwise.py): what arrives here is the C library's `pow`, which differs from a root
    at -0 and -infinity."""
    dtype, e = x.dtype, exponent.value
    half = dtype in HALF
    if e == 1:
        return x
    if e == 2:
        return Op("mul", (x, x), dtype)
    if e == 3 and not half:
        return Op("mul", (Op("mul", (x, x), dtype), x), dtype)
    if dtype.is_floating_point:
        if e in (0.5, -0.5):
            root = Op("sqrt" if e == 0.5 else "rsqrt", (Op("add", (x, Const(0.0, dtype)), dtype),), dtype)  # -0 + 0 is 0
            return Op(
                "where", (Op("eq", (x, Const(-math.inf, dtype)), torch.bool), Const(math.inf if e == 0.5 else 0.0, dtype), root), dtype
            )
        if e == -1:
            return Op("reciprocal", (x,), dtype)
        if e == -2 and not half:
            return Op("reciprocal", (Op("mul", (x, x), dtype),), dtype)
    return Op("pow", (x, exponent), dtype)
