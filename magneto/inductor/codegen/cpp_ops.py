"""One row per elementwise operation: its C text. Arguments are C expressions (names or literals) of the operand dtypes.

Integer arithmetic wraps (-fwrapv); integer division checks for zero before (`divides`). Comparisons give _Bool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from magneto.inductor.codegen.cpp_types import CannotEmit, compute_type, convert, is_float

Emit = Callable[[list[str], torch.dtype], str]
"""(arguments, operand dtype) -> expression"""


def _suffix(dtype: torch.dtype) -> str:
    return "f64" if dtype is torch.float64 else "f32"


def _cast(text: str, dtype: torch.dtype) -> str:
    """Integer expressions are cut back to their width (C computes in int)."""
    return text if is_float(dtype) or dtype is torch.int64 else f"({compute_type(dtype)})({text})"


def _infix(symbol: str) -> Emit:
    return lambda a, t: _cast(f"{a[0]} {symbol} {a[1]}", t)


def _compare(symbol: str) -> Emit:
    return lambda a, t: f"({a[0]} {symbol} {a[1]})"


def _builtin(name: str) -> Emit:
    return lambda a, t: f"__builtin_{name}{'' if t is torch.float64 else 'f'}({a[0]})" if is_float(t) else a[0]


def _through_double(name: str) -> Emit:
    """A function computed in double and rounded once."""
    return lambda a, t: f"{name}({a[0]})" if t is torch.float64 else f"(f32){name}({', '.join(f'(f64){x}' for x in a)})"


def _through_double2(name: str) -> Emit:
    return lambda a, t: f"{name}({a[0]}, {a[1]})" if t is torch.float64 else f"(f32){name}((f64){a[0]}, (f64){a[1]})"


def _own(name: str) -> Emit:
    """A function written out for float (cpp_preamble), of the C library for double."""
    return lambda a, t: f"{name if t is torch.float64 else f'mg_{name}_f32'}({', '.join(a)})"


def _one(t: torch.dtype) -> str:
    return "1.0" if t is torch.float64 else "1.0f"


def _abs(a: list[str], t: torch.dtype) -> str:
    if is_float(t):
        return _builtin("fabs")(a, t)
    return a[0] if t in (torch.uint8, torch.bool) else _cast(f"{a[0]} < 0 ? -{a[0]} : {a[0]}", t)


def _neg(a: list[str], t: torch.dtype) -> str:
    return f"-{a[0]}" if is_float(t) else _cast(f"0 - {a[0]}", t)


def _sign(a: list[str], t: torch.dtype) -> str:
    return a[0] if t is torch.bool else f"({compute_type(t)})(({a[0]} > 0) - ({a[0]} < 0))"


def _extreme(symbol: str, name: str, by_number: str) -> Emit:
    def emit(a: list[str], t: torch.dtype) -> str:
        if not is_float(t):
            return f"({a[0]} {symbol} {a[1]} ? {a[0]} : {a[1]})"
        return f"mg_{by_number if a[1].strip('(-')[:1].isdigit() else name}_{_suffix(t)}({a[0]}, {a[1]})"

    return emit


def _float_or_int(name: str, integer: str) -> Emit:
    return lambda a, t: f"mg_{name}_{_suffix(t)}({a[0]}, {a[1]})" if is_float(t) else _cast(f"{integer}({a[0]}, {a[1]})", t)


def _div(a: list[str], t: torch.dtype) -> str:
    return f"{a[0]} / {a[1]}" if is_float(t) else _cast(f"mg_idivs({a[0]}, {a[1]})", t)


_POWERS = {"2.0": "{0} * {0}", "3.0": "{0} * {0} * {0}", "1.0": "{0}", "(-1.0": "{one} / {0}", "(-2.0": "{one} / ({0} * {0})"}


def _pow(a: list[str], t: torch.dtype) -> str:
    if not is_float(t):
        return _cast(f"mg_ipow({a[0]}, {a[1]})", t)
    exponent = a[1].rstrip("f)") if a[1].endswith(("f", "f)", "0", "0)")) else ""
    form = _POWERS.get(exponent)
    if form is not None:
        return form.format(a[0], one=_one(t))
    return _own("pow")(a, t)


def _shift(symbol: str, beyond: str) -> Emit:
    def emit(a: list[str], t: torch.dtype) -> str:
        bits = t.itemsize * 8
        inside = f"((u64){a[1]} < {bits})"
        left = f"((u64){a[0]} << ({a[1]} & {bits - 1}))" if symbol == "<<" else f"({a[0]} >> ({a[1]} & {bits - 1}))"
        return f"({compute_type(t)})({inside} ? (i64){left} : {'0' if t is torch.uint8 else beyond.format(a[0], bits - 1)})"

    return emit


def _bitwise_not(a: list[str], t: torch.dtype) -> str:
    return f"!{a[0]}" if t is torch.bool else _cast(f"~{a[0]}", t)


def _mul(a: list[str], t: torch.dtype) -> str:
    return f"({a[0]} & {a[1]})" if t is torch.bool else _cast(f"{a[0]} * {a[1]}", t)


def _add(a: list[str], t: torch.dtype) -> str:
    return f"({a[0]} | {a[1]})" if t is torch.bool else _cast(f"{a[0]} + {a[1]}", t)


TURNS = ("sin", "cos", "tan")
"""Functions with a form for arguments that are not far from 0 (cpp_turns)."""

OPS: dict[str, Emit] = {
    "neg": _neg, "abs": _abs, "sign": _sign,
    **{name: _own(name) for name in ("exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "tanh", "erf", "asin", "acos", "atan", *TURNS)},
    **{name: _through_double(name) for name in ("sinh", "cosh", "asinh", "acosh", "atanh", "lgamma")}, "sqrt": _builtin("sqrt"),
    "rsqrt": lambda a, t: f"{_one(t)} / {_builtin('sqrt')(a, t)}", "reciprocal": lambda a, t: f"{_one(t)} / {a[0]}",
    "floor": _builtin("floor"), "ceil": _builtin("ceil"), "trunc": _builtin("trunc"), "round": _builtin("rint"),
    "isnan": lambda a, t: f"({a[0]} != {a[0]})" if is_float(t) else "0",
    "isinf": lambda a, t: f"({_builtin('fabs')(a, t)} == __builtin_inff())" if is_float(t) else "0", "bitwise_not": _bitwise_not,
    "logical_not": lambda a, t: f"!{a[0]}", "add": _add, "sub": _infix("-"), "mul": _mul, "div": _div,
    "floordiv": _float_or_int("floordiv", "mg_ifloordiv"), "remainder": _float_or_int("remainder", "mg_iremainder"),
    "fmod": _float_or_int("fmod", "mg_imods"), "pow": _pow, "atan2": _through_double2("atan2"),
    "maximum": _extreme(">", "maximum", "at_least"), "minimum": _extreme("<", "minimum", "at_most"), "bitwise_and": _infix("&"),
    "bitwise_or": _infix("|"), "bitwise_xor": _infix("^"), "shift_left": _shift("<<", "0"),
    "shift_right": _shift(">>", "(i64)({0} >> {1})"), "eq": _compare("=="), "ne": _compare("!="), "lt": _compare("<"), "le": _compare("<="),
    "gt": _compare(">"), "ge": _compare(">="),
}  # fmt: skip

DIVIDING = frozenset(("div", "floordiv", "remainder", "fmod"))
"""Integer operations that raise ZeroDivisionError for a zero divisor."""

HEAVY = frozenset(
    (
        "exp", "exp2", "expm1", "tanh", "erf", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
        "asinh", "acosh", "atanh", "lgamma", "pow", "atan2", "div", "sqrt", "rsqrt", "reciprocal", "floordiv", "remainder", "fmod",
    )
)  # fmt: skip
"""Operations whose result is worth keeping rather than computing again."""


def op_text(name: str, args: list[str], operand: torch.dtype, result: torch.dtype) -> str:
    """The C expression of an operation. CannotEmit for one without a row."""
    if name == "where":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    if name == "convert_element_type":
        return convert(args[0], operand, result)
    emit = OPS.get(name)
    if emit is None:
        raise CannotEmit(f"operation {name}")
    return emit(args, operand)
