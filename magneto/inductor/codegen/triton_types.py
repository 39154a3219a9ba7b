"""Triton's types of tensor elements: what a kernel computes them in, how one becomes another, and constants.

float16, bfloat16 and floats of 8 bits are computed in float32 and rounded when stored or converted. Conversions are those of eager's CUDA kernels: float to integer truncates
by the machine's conversion, to uint8 through int64, to int8 and int16 through int32.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from magneto.inductor.codegen.cpp_types import HALVES, CannotEmit

POINTERS: dict[torch.dtype, str] = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip
"""How a kernel's signature names a pointer to elements of a dtype."""

MEMORY: dict[torch.dtype, str] = {
    torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.int16: "tl.int16", torch.int32: "tl.int32",
    torch.int64: "tl.int64", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}  # fmt: skip


BYTES: dict[torch.dtype, str] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Floats of a byte: what the functions that convert them are called. They lie in memory as uint8."""

POINTERS.update(dict.fromkeys(BYTES, "*u8"))
MEMORY.update(dict.fromkeys(BYTES, "tl.uint8"))


@cache
def beyond(dtype: torch.dtype) -> int:
    """What a float of a byte is where the number is too large: the largest, NaN or infinity, as torch's version has it."""
    return int(torch.tensor(1e9).to(dtype).view(torch.uint8))


def as_byte(text: str, dtype: torch.dtype) -> str:
    """The byte of a float32."""
    return f"lib.to_{BYTES[dtype]}({text}, {beyond(dtype)})"


def compute_type(dtype: torch.dtype) -> str:
    """The type in which values of a dtype are computed. CannotEmit where Triton has none."""
    if dtype not in MEMORY:
        raise CannotEmit(f"dtype {dtype}")
    return "tl.float32" if dtype in HALVES or dtype in BYTES else MEMORY[dtype]


def convert(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """A compute value of another dtype."""
    if target in HALVES:
        wide = text if compute_type(source) == "tl.float32" else f"{text}.to(tl.float32)"
        return wide if source is target else f"{wide}.to({MEMORY[target]}).to(tl.float32)"
    goal = compute_type(target)
    if target in BYTES and target is not source:
        return f"lib.from_{BYTES[target]}({as_byte(convert(text, source, torch.float32), target)})"
    if goal == compute_type(source):
        return text
    if target is torch.bool:
        return f"({text} != 0)"
    if source.is_floating_point and target is torch.uint8:
        return f"{text}.to(tl.int64).to(tl.uint8)"
    if source.is_floating_point and target in (torch.int8, torch.int16):
        return f"{text}.to(tl.int32).to({goal})"
    return f"{text}.to({goal})"


def number(value: bool | complex, dtype: torch.dtype) -> str:
    """A Python literal, exact in dtype."""
    if dtype.is_complex or dtype not in MEMORY:
        raise CannotEmit(f"dtype {dtype}")
    if dtype is torch.bool:
        return "True" if value else "False"
    if not dtype.is_floating_point:
        return repr(int(value))  # type: ignore[arg-type]
    x = float(value)  # type: ignore[arg-type]
    if dtype is not torch.float64:
        x = float(torch.tensor(x, dtype=torch.float64).to(dtype))
    if math.isnan(x):
        return 'float("nan")'
    if math.isinf(x):
        return 'float("inf")' if x > 0 else 'float("-inf")'
    return repr(x)


def literal(value: bool | complex, dtype: torch.dtype) -> str:
    """A typed scalar: Triton would choose a type of its own for a bare number."""
    return f"tl.full([], {number(value, dtype)}, {compute_type(dtype)})"
