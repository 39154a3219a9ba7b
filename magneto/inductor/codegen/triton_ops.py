"""One row per elementwise operation: its Triton text. Arguments are names or literals of the operands' compute type.

`lib` is `triton_library`: libdevice's functions (those that eager's CUDA kernels call too) and what Triton's own operators mean otherwise than torch's:
division is rounded to nearest, `//` and `%` follow the sign of the divisor, maxima let NaN through.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from magneto.inductor.codegen.cpp_types import CannotEmit
from magneto.inductor.codegen.triton_types import compute_type, convert

Emit = Callable[[list[str], torch.dtype], str]
"""(arguments, operand dtype) -> expression"""


def _infix(symbol: str) -> Emit:
    return lambda a, t: f"{a[0]} {symbol} {a[1]}"


def _logical(symbol: str, of_bool: str) -> Emit:
    return lambda a, t: f"{a[0]} {of_bool if t is torch.bool else symbol} {a[1]}"


def _of_float(name: str) -> Emit:
    """A function of floats that leaves integers as they are."""
    return lambda a, t: f"{name}({a[0]})" if t.is_floating_point else a[0]


def _lib(name: str) -> Emit:
    return lambda a, t: f"lib.{name}({', '.join(a)})"


def _by_type(name: str, unsigned: str) -> Emit:
    """A function of the library, which has one form for floats and one for signed integers; `unsigned`: what stands for it there."""

    def emit(a: list[str], t: torch.dtype) -> str:
        if t is torch.uint8:
            return unsigned.format(*a)
        return f"lib.{name if t.is_floating_point else f'int_{name}'}({a[0]}, {a[1]})"

    return emit


def _extreme(name: str, of_bool: str) -> Emit:
    def emit(a: list[str], t: torch.dtype) -> str:
        if t is torch.bool:
            return f"{a[0]} {of_bool} {a[1]}"
        return f"{'lib' if t.is_floating_point else 'tl'}.{name}({a[0]}, {a[1]})"

    return emit


def _div(a: list[str], t: torch.dtype) -> str:
    if t is torch.float64:
        return f"{a[0]} / {a[1]}"
    return f"tl.div_rn({a[0]}, {a[1]})" if t.is_floating_point else f"{a[0]} // {a[1]}"


def _abs(a: list[str], t: torch.dtype) -> str:
    return a[0] if t in (torch.uint8, torch.bool) else f"tl.abs({a[0]})"


def _neg(a: list[str], t: torch.dtype) -> str:
    """Triton's own minus is 0 - x, also of floats, where it loses the sign of 0."""
    return f"{a[0]} * -1.0" if t.is_floating_point else f"0 - {a[0]}" if t is torch.uint8 else f"-{a[0]}"


def _sign(a: list[str], t: torch.dtype) -> str:
    goal = compute_type(t)
    return a[0] if t is torch.bool else f"({a[0]} > 0).to({goal}) - ({a[0]} < 0).to({goal})"


def _shift(symbol: str) -> Emit:
    def emit(a: list[str], t: torch.dtype) -> str:
        bits = t.itemsize * 8
        inside = f"({a[1]} >= 0) & ({a[1]} < {bits})"
        beyond = f"{a[0]} >> {bits - 1}" if symbol == ">>" and t is not torch.uint8 else f"{a[0]} * 0"
        return f"tl.where({inside}, {a[0]} {symbol} ({a[1]} & {bits - 1}), {beyond}).to({compute_type(t)})"

    return emit


def _sqrt(a: list[str], t: torch.dtype) -> str:
    return f"tl.sqrt({a[0]})" if t is torch.float64 else f"tl.sqrt_rn({a[0]})"


OPS: dict[str, Emit] = {
    "neg": _neg, "abs": _abs, "sign": _sign,
    **{name: _lib(name) for name in ("exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: _lib(name) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "lgamma", "rsqrt", "atan2")}, "sqrt": _sqrt,
    "reciprocal": lambda a, t: _div([f"tl.full([], 1.0, {compute_type(t)})", a[0]], t), "floor": _of_float("tl.floor"),
    "ceil": _of_float("tl.ceil"), "trunc": _of_float("lib.trunc"), "round": _of_float("lib.rint"),
    "isnan": lambda a, t: f"{a[0]} != {a[0]}",
    "isinf": lambda a, t: f'tl.abs({a[0]}) == float("inf")' if t.is_floating_point else f"{a[0]} != {a[0]}",
    "bitwise_not": lambda a, t: f"{a[0]} == 0" if t is torch.bool else f"{a[0]} ^ 255" if t is torch.uint8 else f"~{a[0]}",
    "logical_not": lambda a, t: f"{a[0]} == 0", "add": _logical("+", "|"), "sub": _infix("-"), "mul": _logical("*", "&"), "div": _div,
    "floordiv": lambda a, t: _by_type("floordiv_f64" if t is torch.float64 else "floordiv", "{} // {}")(a, t),
    "remainder": _by_type("remainder", "{} % {}"), "fmod": _by_type("fmod", "{} % {}"), "pow": _by_type("pow", "lib.uint_pow({}, {})"),
    "maximum": _extreme("maximum", "|"), "minimum": _extreme("minimum", "&"), "bitwise_and": _infix("&"), "bitwise_or": _infix("|"),
    "bitwise_xor": _infix("^"), "shift_left": _shift("<<"), "shift_right": _shift(">>"), "eq": _infix("=="), "ne": _infix("!="),
    "lt": _infix("<"), "le": _infix("<="), "gt": _infix(">"), "ge": _infix(">="),
}  # fmt: skip

BARE = frozenset("add sub mul eq ne lt le gt ge".split())
"""Operators that give a bare number the type of the tensor beside it (comparisons make it a float32 first)."""
COMPARISONS = frozenset("eq ne lt le gt ge".split())


OF_HALVES: dict[str, Emit] = {"exp": _lib("exp_of_half"), "erf": _lib("erf_of_half")}
"""Shorter forms in kernels whose memory holds 16 bits an element: arithmetic is what bounds those. Right to 1e-6, a thousandth of what rounding the result costs."""

ROUGH: dict[str, Emit] = {"div": _infix("/"), "reciprocal": lambda a, t: f"1.0 / {a[0]}"}
"""The same, right to two units of float32: for what becomes a half at once, and in such kernels where nothing asks which side of a whole number a quotient is on."""
TELLING = frozenset("round floor ceil trunc floordiv remainder fmod eq ne lt le gt ge sign".split())


def op_text(name: str, args: list[str], operand: torch.dtype, result: torch.dtype, halves: bool = False, rough: bool = False) -> str:
    """The Triton expression of an operation. CannotEmit for one without a row."""
    if name == "where":
        return f"tl.where({args[0]}, {args[1]}, {args[2]})"
    if name == "convert_element_type":
        return convert(args[0], operand, result)
    emit = OF_HALVES.get(name) if halves and operand.is_floating_point and operand is not torch.float64 else None
    if rough and operand is torch.float32:
        emit = ROUGH.get(name, emit)
    emit = emit or OPS.get(name)
    if emit is None:
        raise CannotEmit(f"operation {name}")
    return emit(args, operand)
