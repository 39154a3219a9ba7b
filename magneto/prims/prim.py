"""Prim: one primitive operation as a row of data that can also be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magneto.base.dataclass import dataclass

Meaning = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Prim:
    """A primitive operation.

    category: unary, binary, ternary, convert, reduction, shape, index or window.
    signature: parameter names, for reading.
    dtype_rule: same (the operands'), bool, int8, int64 or argument.
    meta: result metadata from operand metadata (the shape rule; operands are TensorMeta, constants stay).
    torch_meaning, numpy_meaning: what it computes, on tensors and on arrays (numpy knows no bfloat16).
    """

    name: str
    category: str
    signature: str
    dtype_rule: str
    meta: Callable[..., Any]
    torch_meaning: Meaning
    numpy_meaning: Meaning

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.torch_meaning(*args, **kwargs)

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"prims.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _prim_named, (self.name,)


def _prim_named(name: str) -> Prim:
    return ALL[name]


ALL: dict[str, Prim] = {}
"""Every prim by name; filled by table.py."""
