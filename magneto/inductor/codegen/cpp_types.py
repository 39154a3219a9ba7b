"""C types of tensor elements: how they lie in memory, what they are computed in, and how one becomes another.

float16 and bfloat16 are computed in float and rounded when stored or converted. bool is a byte in memory and _Bool in registers.
Conversions follow eager on x86: float to integer truncates through the machine's conversion, to uint8 through int64.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

MEMORY: dict[torch.dtype, str] = {
    torch.bool: "u8", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "u16", torch.bfloat16: "u16", torch.float32: "f32", torch.float64: "f64",
}  # fmt: skip
COMPUTE: dict[torch.dtype, str] = {**MEMORY, torch.bool: "_Bool", torch.float16: "f32", torch.bfloat16: "f32"}
HALVES = (torch.float16, torch.bfloat16)


class CannotEmit(Exception):
    """A dtype or operation that has no C form; says which."""


def memory_type(dtype: torch.dtype) -> str:
    try:
        return MEMORY[dtype]
    except KeyError:
        raise CannotEmit(f"dtype {dtype}") from None


def compute_type(dtype: torch.dtype) -> str:
    try:
        return COMPUTE[dtype]
    except KeyError:
        raise CannotEmit(f"dtype {dtype}") from None


def is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def from_memory(text: str, dtype: torch.dtype) -> str:
    """The compute value of a memory element."""
    if dtype is torch.bool:
        return f"({text} != 0)"
    if dtype is torch.bfloat16:
        return f"mg_load_bf16({text})"
    if dtype is torch.float16:
        return f"mg_load_f16({text})"
    return text


def to_memory(text: str, dtype: torch.dtype) -> str:
    """The memory element of a compute value."""
    if dtype is torch.bfloat16:
        return f"mg_store_bf16({text})"
    if dtype is torch.float16:
        return f"mg_store_f16({text})"
    if dtype is torch.bool:
        return f"(u8)({text})"
    return text


def convert(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """A compute value of another dtype."""
    if target in HALVES:
        as_float = text if COMPUTE[source] == "f32" else convert(text, source, torch.float32)
        return as_float if source is target else f"mg_round_{'f16' if target is torch.float16 else 'bf16'}({as_float})"
    if source is target or COMPUTE[source] == COMPUTE[target]:
        return text
    if target is torch.bool:
        return f"({text} != 0)"
    if source is torch.bool and is_float(target):  # chosen, not converted: gcc would go by vectors of bytes
        return f"({text} ? {literal(1, target)} : {literal(0, target)})"
    if target is torch.uint8 and source is torch.float64:
        return f"(u8)(i64)({text})"
    if target in (torch.uint8, torch.int8, torch.int16) and is_float(source):  # from 2^31 on the last eight bits of a float are zeros
        return f"({COMPUTE[target]})(i32)({text})"
    if target is torch.int64 and COMPUTE[source] == "f32":
        return f"mg_{'f16' if source is torch.float16 else 'f32'}_i64({text})"
    if is_float(source) and not is_float(target):
        return f"MG_INTEGER(({compute_type(target)})({text}))"
    return f"({compute_type(target)})({text})"


_rounded = lru_cache(4096)(lambda number, dtype: float(torch.tensor(float.fromhex(number), dtype=torch.float64).to(dtype)))
"""A number, given in hexadecimal, which tells zeros apart, in another precision."""


def literal(value: bool | complex, dtype: torch.dtype) -> str:
    """A constant. Exact: floats are printed in hexadecimal."""
    if dtype is torch.bool:
        return "1" if value else "0"
    if not is_float(dtype):
        n = int(value)  # type: ignore[arg-type]
        if dtype is torch.int64:
            return "(-9223372036854775807LL - 1)" if n == -(2**63) else f"{n}LL" if n >= 0 else f"({n}LL)"
        return f"({compute_type(dtype)}){n}" if n >= 0 else f"({compute_type(dtype)})({n})"
    number = float(value)  # type: ignore[arg-type]
    if dtype is not torch.float64:
        number = _rounded(number.hex(), dtype)
    suffix = "" if dtype is torch.float64 else "f"
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return f"__builtin_inf{suffix}()" if number > 0 else f"(-__builtin_inf{suffix}())"
    if number == int(number) and abs(number) < 1e6:
        text = f"{number:.1f}{suffix}"
    else:
        text = f"{number.hex()}{suffix}"
    return f"({text})" if text.startswith("-") else text
