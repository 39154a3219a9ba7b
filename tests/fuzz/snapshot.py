"""The state of a program's namespace as comparable data: every object reached, with identity, aliasing of memory, versions and gradients."""

from __future__ import annotations

import collections
import enum
import functools
import types
from typing import Any

import numpy as np
import torch

ATOMS = (
    int,
    float,
    str,
    bool,
    bytes,
    complex,
    type(None),
    type(Ellipsis),
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
)
HIDDEN = {"entry", "magneto", "backward", "__builtins__", "__warningregistry__"}


class Walker:
    """Numbers objects and storages in the order of the walk, so that two copies of one graph of objects give equal data."""

    def __init__(self, tolerance: float = 0.0, known: dict[int, Any] | None = None) -> None:
        self.tolerance = tolerance
        self.known = known or {}  # functions of the prelude, by id: what makes them what they were
        self.seen: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.keep: list[Any] = []

    def of(self, obj: Any) -> Any:
        if isinstance(obj, ATOMS) and type(obj) in ATOMS:
            return ("float", repr(obj)) if isinstance(obj, float) else (type(obj).__name__, obj)
        if id(obj) in self.seen:
            return ("seen", self.seen[id(obj)])
        self.seen[id(obj)] = len(self.seen)
        self.keep.append(obj)
        return self.contents(obj)

    def contents(self, obj: Any) -> Any:
        kind = type(obj).__qualname__
        if isinstance(obj, torch.Tensor):
            return (kind, self.tensor(obj))
        if isinstance(obj, (types.FunctionType, types.MethodType, functools.partial, type, staticmethod, classmethod, property)):
            return (kind, self.callable(obj))
        if isinstance(obj, enum.Enum):
            return (kind, obj.name)
        parts: list[Any] = []
        if isinstance(obj, dict):
            parts = [(self.of(k), self.of(v)) for k, v in obj.items()]
        elif isinstance(obj, (list, tuple, collections.deque)):
            parts = [self.of(item) for item in obj]
        elif isinstance(obj, (set, frozenset)):
            parts = sorted(map(repr, obj))
        elif isinstance(obj, (str, int, float, np.ndarray, np.generic)):
            parts = [repr(obj)]
        elif isinstance(obj, BaseException):
            parts = [self.of(obj.args)]
        fields = [(name, self.of(value)) for name, value in getattr(obj, "__dict__", {}).items() if not name.startswith("_magneto")]
        slots = [name for cls in type(obj).__mro__ for name in getattr(cls, "__slots__", ()) if cls.__module__ == "fuzzed"]
        fields += [(name, self.of(getattr(obj, name, "unset"))) for name in slots]
        return (kind, parts, fields)

    def callable(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            if obj.__module__ != "fuzzed" or self.known.get(id(obj)) == behaviour(obj):
                return obj.__qualname__
            cells = [self.cell(cell) for cell in obj.__closure__ or ()]
            return (
                obj.__qualname__,
                obj.__code__.co_firstlineno,
                cells,
                self.of(obj.__defaults__),
                self.of(obj.__kwdefaults__),
                self.of(obj.__dict__),
            )
        if isinstance(obj, types.MethodType):
            return (self.of(obj.__func__), self.of(obj.__self__))
        if isinstance(obj, functools.partial):
            return (self.of(obj.func), self.of(obj.args), self.of(obj.keywords))
        if isinstance(obj, type):
            if obj.__module__ != "fuzzed":
                return obj.__qualname__
            hidden = {"__dict__", "__weakref__", "__doc__", "__module__", "__slotnames__", "_value2member_map_"}  # (enum's cache of flags)
            return (
                obj.__qualname__,
                [(k, self.of(v)) for k, v in vars(obj).items() if k not in hidden and not isinstance(v, types.MemberDescriptorType)],
            )
        return "descriptor"

    def cell(self, cell: types.CellType) -> Any:
        try:
            return self.of(cell.cell_contents)
        except ValueError:
            return "empty"

    def tensor(self, t: torch.Tensor) -> Any:
        try:
            pointer = t.untyped_storage().data_ptr() if t.numel() else 0
        except RuntimeError:
            pointer = -1
        storage = self.storages.setdefault(pointer, len(self.storages))
        version = None if t.is_inference() else t._version
        try:
            leaf, node = t.is_leaf, type(t.grad_fn).__name__
        except RuntimeError as error:  # a view whose base was written in a way that autograd forbids
            leaf, node = False, str(error)
        facts: list[Any] = [tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype), t.requires_grad, leaf, t.is_inference(), storage]
        if self.tolerance == 0.0:
            facts += [version, node]
        fields = [(name, self.of(value)) for name, value in t.__dict__.items()]
        grad = self.of(t.grad) if leaf else None
        if self.tolerance == 0.0 and grad is not None and isinstance(grad[1], tuple):
            grad[1][0][8] = None  # its version: autograd's accumulation writes some gradients in place
        return facts, Values(t.detach().clone().as_subclass(torch.Tensor), self.tolerance), fields, grad


class Values:
    """A tensor's values, printed shortly; equal within a tolerance."""

    def __init__(self, t: torch.Tensor, tolerance: float) -> None:
        self.t, self.tolerance = t, tolerance

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values) or self.t.shape != other.t.shape or self.t.dtype != other.t.dtype:
            return False
        if self.tolerance == 0.0 and torch.equal(self.t, other.t):
            return True
        return torch.allclose(self.t, other.t, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)

    def __repr__(self) -> str:
        return str(self.t.flatten()[:6].tolist())


def difference(a: Any, b: Any, where: str = "") -> str | None:
    """Where the data of the plain program and of the optimised one differ first, or None."""
    if a == b:
        return None
    if type(a) is not type(b):
        return f"{where}: {a!r} against {b!r}"
    if isinstance(a, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b)):
            found = difference(x, y, f"{where}.{i}" if not (isinstance(x, tuple) and x and isinstance(x[0], str)) else f"{where}.{x[0]}")
            if found is not None:
                return found
        return None if len(a) == len(b) else f"{where}: {len(a)} parts against {len(b)}: {str((a[len(b) :], b[len(a) :]))[:300]}"
    return f"{where}: {a!r} against {b!r}"


def behaviour(fn: types.FunctionType) -> tuple[Any, ...]:
    return (fn.__code__, fn.__defaults__, tuple((fn.__kwdefaults__ or {}).items()), len(fn.__dict__))


def functions_of(namespace: dict[str, Any]) -> dict[int, Any]:
    """The functions of the prelude and of its classes."""
    values = list(namespace.values())
    for value in namespace.values():
        if isinstance(value, type):
            values += vars(value).values()
    return {id(value): behaviour(value) for value in values if isinstance(value, types.FunctionType)}


def snapshot(namespace: dict[str, Any], fixed: set[str], tolerance: float, known: dict[int, Any]) -> Any:
    """All names of the namespace, but those of the prelude that are still what they were (`fixed`: names whose objects are not the program's)."""
    walker = Walker(tolerance, known)
    return [(name, walker.of(value)) for name, value in sorted(namespace.items()) if name not in HIDDEN and name not in fixed]
