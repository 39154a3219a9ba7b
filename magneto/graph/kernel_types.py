"""Whether the kernel behind an operation takes operands of these types: asked once, of PyTorch itself on tensors of one element.

The metadata rules say which type a result has, not which types a kernel was written for: `gelu` of whole numbers has a meaning, and no kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from magneto.graph.meta import TensorMeta

_USUAL = frozenset({torch.float32, torch.float64})
_OF_WHOLE_NUMBERS = re.compile(r"aten\.(bitwise_|__[a-z]*(and|or|shift)__|gcd|lcm)")
_TRUSTS_ITS_NUMBERS = re.compile(r"aten\.mkldnn_rnn_layer")  # writes what its size arguments say, whatever the tensors hold
_SPREADS = re.compile(r"aten\.(var|std)")  # warn where there is one element
_refused: dict[Any, BaseException | None] = {}


def check_types(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what PyTorch raises for operands of these types on the CPU, whatever their sizes."""
    if not _unusual(args) and not (kwargs and _unusual(kwargs.values())) and not _OF_WHOLE_NUMBERS.match(name):
        return
    if _TRUSTS_ITS_NUMBERS.match(name):
        return
    key = (op, tuple(map(_kind, args)), tuple((name, _kind(value)) for name, value in kwargs.items()))
    try:
        error = _refused[key]
    except KeyError:
        error = _refused[key] = _ask(op, 8 if _SPREADS.match(name) else 1, args, kwargs)
    if error is not None:
        raise type(error)(*error.args)


def _unusual(values: Any) -> bool:
    for value in values:
        if type(value) is TensorMeta:
            if value.dtype not in _USUAL and value.device.type == "cpu":
                return True
        elif isinstance(value, (tuple, list)) and _unusual(value):
            return True
    return False


def _kind(value: Any) -> Any:
    if isinstance(value, TensorMeta):
        return value.dtype, value.ndim
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if isinstance(value, int | float):
        return type(value), value == 0  # by which integers are not divided
    return value if isinstance(value, torch.dtype) else type(value)


def _ask(op: Any, size: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BaseException | None:
    """The error, if it is the types': with others PyTorch takes the operands."""

    def tiny(value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, TensorMeta):
            return torch.ones((size,) * value.ndim, dtype=dtype or value.dtype)
        if isinstance(value, (tuple, list)):
            return [tiny(item, dtype) for item in value]
        return value

    def run(dtype: torch.dtype | None) -> BaseException | None:
        try:
            op(*(tiny(value, dtype) for value in args), **{name: tiny(value, dtype) for name, value in kwargs.items()})
        except Exception as error:
            return error.with_traceback(None)
        return None

    error = run(None)
    return error if error is not None and None in (run(torch.float32), run(torch.int64)) else None
