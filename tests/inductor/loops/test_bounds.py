"""Between which numbers values lie: never narrower than what they are, and narrow enough for what users write."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from magneto.inductor.loops.bounds import ANY, Bounds
from magneto.inductor.loops.ir import Const, IndexValue, Load, Op, Value, index_symbol
from magneto.symbolic import ZERO

I64, I32, U8, F32, BOOL = torch.int64, torch.int32, torch.uint8, torch.float32, torch.bool
X, BYTE, PLACE = Load("x", ZERO, I64), Load("b", ZERO, U8), Load("p", ZERO, F32)


def op(name: str, *args: Value | float, dtype: torch.dtype | None = None) -> Op:
    kind = next(a.dtype for a in args if isinstance(a, Value))
    values = tuple(a if isinstance(a, Value) else Const(a, kind) for a in args)
    comparison = name in ("lt", "le", "gt", "ge", "eq")
    return Op(name, values, dtype or (BOOL if comparison else values[-1].dtype))


def to(value: Value, dtype: torch.dtype) -> Op:
    return Op("convert_element_type", (value,), dtype)


def where(condition: Value, a: Value, b: Value) -> Op:
    return Op("where", (condition, a, b), a.dtype)


def of(value: Value) -> tuple[float, float]:
    return Bounds(lambda v: v).of(value)


FLOOR = op("floor", PLACE)
INSIDE = Op("bitwise_and", (op("ge", FLOOR, 0.0), op("le", FLOOR, 9.0)), BOOL)
SEEN: list[tuple[Value, tuple[float, float]]] = [
    (op("remainder", X, 50), (0, 49)),
    (op("minimum", op("maximum", X, 0), 49), (0, 49)),
    (op("bitwise_and", X, 31), (0, 31)),
    (to(BYTE, I64), (0, 255)),
    (op("floordiv", to(BYTE, I64), 16), (0, 15)),
    (op("mul", op("add", to(BYTE, I64), 1), -2), (-512, -2)),
    (IndexValue(index_symbol(0, 12), I64), (0, 11)),
    (where(op("lt", X, 0), op("add", op("maximum", X, -9), 9), op("minimum", X, 8)), (0, 8)),
    (where(op("lt", op("remainder", X, 50), 0), op("add", op("remainder", X, 50), 50), op("remainder", X, 50)), (0, 49)),
    (to(where(INSIDE, FLOOR, Const(0.0, F32)), I32), (0, 9)),
    (to(where(INSIDE, op("add", FLOOR, 1.0), Const(0.0, F32)), I32), (0, 10)),
    (to(op("minimum", where(op("gt", PLACE, 0.0), PLACE, Const(0.0, F32)), 9.0), I32), (0, 9)),
]


@pytest.mark.parametrize("k", range(len(SEEN)))
def test_what_users_write(k: int) -> None:
    value, found = SEEN[k]
    assert of(value) == found


WIDE: dict[str, Value] = {
    "a number read": X,
    "a float that may be NaN": to(op("minimum", op("maximum", PLACE, 0.0), 9.0), I32),
    "a sum that may wrap": op("add", op("maximum", X, 0), 1),
    "a product that wraps": op("mul", to(op("remainder", X, 1 << 20), I32), to(op("remainder", X, 1 << 20), I32)),
    "a remainder by what may be negative": op("remainder", X, X),
    "a float's comparison that does not hold": where(op("ge", PLACE, 0.0), Const(0.0, F32), PLACE),
    "a wrapped conversion": to(op("maximum", X, 0), torch.int8),
}


@pytest.mark.parametrize("name", WIDE)
def test_what_may_be_anything(name: str) -> None:
    low, high = of(WIDE[name])
    assert (low, high) == ANY or WIDE[name].dtype is torch.int8 and (low, high) == (-128, 127)


def _random(generator: random.Random, depth: int) -> Value:
    if depth == 0:
        return generator.choice([X, to(BYTE, I64), Const(generator.randint(-20, 20), I64)])
    a, b = (_random(generator, depth - 1) for _ in range(2))
    name = generator.choice(["add", "sub", "mul", "minimum", "maximum", "remainder", "floordiv", "bitwise_and", "where"])
    number = generator.choice([-7, -1, 1, 3, 16])
    if name == "where":
        return where(op(generator.choice(["lt", "le", "gt", "ge", "eq"]), generator.choice([a, b, X]), number), a, b)
    return op(name, a, number if name in ("remainder", "floordiv") else b)


def _value(value: Value, read: dict[str, int]) -> Any:
    """In 64 bits, by torch."""
    if isinstance(value, Const):
        return torch.tensor(value.value)
    if isinstance(value, Load):
        return torch.tensor(read[value.buffer])
    assert isinstance(value, Op)
    args = [_value(a, read) for a in value.args]
    if value.name == "convert_element_type":
        return args[0].to(value.dtype)
    return {"sub": torch.sub, "floordiv": torch.floor_divide}.get(value.name, getattr(torch, value.name, None))(*args)  # type: ignore[misc]


def test_no_value_lies_outside() -> None:
    generator = random.Random(5)
    narrow = 0
    for _ in range(600):
        value = _random(generator, generator.randint(1, 4))
        low, high = of(value)
        narrow += not math.isinf(low) or not math.isinf(high)
        for x in (0, 3, -5, 17, 255, -(1 << 40), (1 << 62) + 5, -(1 << 63), (1 << 63) - 1):
            for byte in (0, 1, 200, 255):
                assert low <= _value(value, {"x": x, "b": byte}).item() <= high, (value, x, byte)
    assert narrow > 100
