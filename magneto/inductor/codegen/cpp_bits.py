"""Numbers of 16 bits that are only moved, chosen by conditions on places, or given another sign stay the bits that they are: nothing is converted."""

from __future__ import annotations

import torch

from magneto.base.dataclass import replace
from magneto.inductor.codegen.cpp_types import HALVES
from magneto.inductor.loops.ir import Const, Load, Masked, Op, Value, walk_values
from magneto.inductor.schedule.kernel import POINT, FusedKernel

SIGNS = {"neg": ("bitwise_xor", -0x8000), "abs": ("bitwise_and", 0x7FFF)}


def in_bits(kernel: FusedKernel) -> FusedKernel:
    """The kernel over int16, where none of its members does more to float16 and bfloat16 than that."""
    if not any(m.buffer.dtype in HALVES for m in kernel.members) or any(m.kind != POINT for m in kernel.members):
        return kernel
    members, memo = [], {}  # type: ignore[var-annotated]
    for member in kernel.members:
        body: Value | None = member.body if member.buffer.dtype not in HALVES and _untouched(member.body) else None
        if member.buffer.dtype is member.body.dtype in HALVES:
            body = _bits(member.body, memo)
        if body is None:
            return kernel
        buffer = replace(member.buffer, dtype=body.dtype)
        members.append(replace(member, body=body, buffer=buffer, acc_dtype=body.dtype))
    return replace(kernel, members=tuple(members))


def _untouched(value: Value) -> bool:
    return not any(v.dtype in HALVES for v in walk_values(value))


def _bits(value: Value, memo: dict[Value, Value | None]) -> Value | None:
    if value not in memo:
        memo[value] = _moved(value, memo)
    return memo[value]


def _moved(value: Value, memo: dict[Value, Value | None]) -> Value | None:
    if isinstance(value, Load):
        return Load(value.buffer, value.index, torch.int16)
    if isinstance(value, Const):
        return Const(int(torch.tensor(value.value, dtype=value.dtype).view(torch.int16)), torch.int16)
    if isinstance(value, Masked) or (isinstance(value, Op) and value.name == "where"):
        condition, *rest = value.children()
        one, other = (_bits(v, memo) if v.dtype is value.dtype else None for v in rest)
        if one is None or other is None or not _untouched(condition):
            return None
        return Masked(condition, one, other) if isinstance(value, Masked) else Op("where", (condition, one, other), torch.int16)
    if isinstance(value, Op) and value.name == "convert_element_type":  # back from float32
        (wide,) = value.args
        sign = SIGNS.get(wide.name) if isinstance(wide, Op) else None
        inner = wide.args[0] if sign and isinstance(wide, Op) else wide
        if (
            wide.dtype is torch.float32
            and isinstance(inner, Op)
            and inner.name == "convert_element_type"
            and inner.args[0].dtype is value.dtype
        ):
            x = _bits(inner.args[0], memo)
            return Op(sign[0], (x, Const(sign[1], torch.int16)), torch.int16) if sign and x is not None else x
    return None
