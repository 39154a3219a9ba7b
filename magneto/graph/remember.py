"""Calls that are alike have results alike: a model of equal layers asks for each of them once.

What `fake_call` answers follows from the function, the kinds and numbers among its arguments, the metadata of its tensors, and torch's modes. Whoever keeps a `Remembered` clears it where
a mode changes. Only torch's own functions are remembered: a program's may follow anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch

from magneto.graph.fake import FakeResult, fake_call
from magneto.graph.meta import TensorMeta

_PLAIN = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, TensorMeta))
_MODULES = frozenset(("torch.nn.functional", "torch.functional", "torch._tensor", "torch._C._nn", "_operator"))


class Remembered:
    """Results of calls, for one state of torch's modes."""

    __slots__ = ("_results",)

    def __init__(self) -> None:
        self._results: dict[Any, FakeResult] = {}

    def clear(self) -> None:
        self._results.clear()

    def call(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], grad_enabled: bool) -> FakeResult:
        """`fake_call`, whose answer to an equal call is given again."""
        try:
            key = (fn, grad_enabled, key_of(args), *((name, key_of(value)) for name, value in kwargs.items())) if is_torchs(fn) else None
        except TypeError:
            key = None
        found = self._results.get(key) if key is not None else None
        if found is None:
            found = fake_call(fn, args, dict(kwargs), grad_enabled=grad_enabled)
            if key is not None and (type(found.value) is TensorMeta or _is_fixed(found.value)):
                self._results[key] = found
        return found


def key_of(value: Any) -> Any:
    """What an argument is remembered by: numbers of different types or signs are different. TypeError for what is neither plain nor a structure of plain values."""
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)
    if kind is float:
        return (kind, value.hex())
    if kind is tuple or kind is list or kind is torch.Size:
        return (kind, *map(key_of, value))
    if kind is slice:
        return (kind, key_of(value.start), key_of(value.stop), key_of(value.step))
    raise TypeError(kind)


def is_torchs(fn: Any) -> bool:
    """Whether the callable is one of torch's (or an operator) that looks at nothing but its arguments and torch's modes."""
    if isinstance(fn, (MethodDescriptorType, WrapperDescriptorType)):
        return fn.__objclass__ is torch._C.TensorBase
    if isinstance(fn, FunctionType):
        return fn.__module__ in _MODULES and "warn" not in fn.__code__.co_names
    if not isinstance(fn, BuiltinFunctionType):
        return False
    return fn is getattr or fn.__module__ in _MODULES or getattr(torch._C._VariableFunctions, fn.__name__, None) is fn


def _is_fixed(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(item) is TensorMeta for item in value)
