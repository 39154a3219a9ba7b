"""Attributes of Python modules, each guarded: programs replace functions of torch too (another attention, say)."""

from __future__ import annotations

import importlib
import types
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.guards.source import Held, InstanceDict, Item, Source
from magneto.dynamo.trackers.base import MISSING, Tracker, namespace_of
from magneto.dynamo.trackers.constant import is_constant
from magneto.dynamo.trackers.klass import held

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine

_LEFT_ALONE = frozenset(
    {"torch", "math", "operator", "functools", "itertools", "builtins", "collections", "typing", "types", "contextlib", "copy", "inspect"}
)


ATTRIBUTES: dict[str, tuple[types.CodeType, Any]] = {}
"""What stands for a module's attribute in a function of a certain code."""


def module_attr(m: Machine, module: PyModuleTracker, name: str) -> Tracker | None:
    """The module's global; missing names ask the module's __getattr__ (one of the module's class is executed: it imports)."""
    obj = module.obj
    namespace = obj.__dict__
    overlay: dict[tuple[int, str], Tracker | None] = m.overlay  # type: ignore[attr-defined]
    if (id(namespace), name) in overlay:  # a `global` statement of the region
        return overlay[(id(namespace), name)]
    if name in ATTRIBUTES and m.frames[-1].code is ATTRIBUTES[name][0]:  # type: ignore[attr-defined]
        return held(m, ATTRIBUTES[name][1], name)
    if name == "onnx" and obj is torch:
        importlib.import_module("torch.onnx")  # torch does it when it is first asked for
    if name in namespace:
        value = namespace[name]
        return m.wrap(value, Item(InstanceDict(Held(obj.__name__, obj)), name))
    computed = getattr(type(type(obj).__dict__.get(name)), "__get__", None)
    if m.switches and isinstance(computed, types.FunctionType):  # type: ignore[attr-defined]
        label = f"{obj.__name__}.{name}"  # a setting that the region may have changed
        return m.call(held(m, computed, label), [held(m, type(obj).__dict__[name], label), module, held(m, type(obj), label)], {})
    hook = namespace.get("__getattr__")
    if (
        isinstance(hook, types.FunctionType)
        and obj.__name__ != "magneto"
        and not any(name in namespace_of(base) for base in type(obj).__mro__)
    ):
        m.guard(Kind.KEY_ABSENT, Held(obj.__name__, namespace), name)
        asked = m.wrap(hook, Item(InstanceDict(Held(obj.__name__, obj)), "__getattr__"))
        return m.call(asked, [m.const(name)], {})
    value = getattr(obj, name, MISSING)
    if is_constant(value):  # a computed setting, as in torch.backends
        m.guard(Kind.STATE, None, (f"{obj.__name__}.{name}", getattr, (obj, name), value))
    return None if value is MISSING else held(m, value, f"{obj.__name__}.{name}")


class Named(Tracker):
    """A module's globals as operand of an effect."""

    __slots__ = ("obj",)

    def __init__(self, obj: dict[str, Any]) -> None:
        super().__init__()
        self.obj = obj

    def emit(self, em: Emitter) -> str:
        return em.const(self.obj, "globals")


class PyModuleTracker(Tracker):
    """A Python module."""

    __slots__ = ("obj",)

    def __init__(self, obj: types.ModuleType, source: Source) -> None:
        super().__init__(source)
        self.obj = obj

    def python_type(self) -> type:
        return type(self.obj)

    def special_attr(self, m: Machine, name: str) -> Tracker | None:
        return module_attr(m, self, name)

    def special_set(self, m: Machine, name: str, value: Tracker | None) -> bool:
        """As a `global` statement of a function of the module does. torch's modules and the standard library's are left to the program."""
        if type(self.obj) is not types.ModuleType or self.obj.__name__.partition(".")[0] in _LEFT_ALONE or name.startswith("__"):
            return False
        namespace = vars(self.obj)
        if value is None and module_attr(m, self, name) is None:
            return False
        m.overlay[(id(namespace), name)] = value  # type: ignore[attr-defined]
        text = f"[{name!r}]"
        m.effect(f"del {{0}}{text}" if value is None else f"{{0}}{text} = {{1}}", Named(namespace), *([] if value is None else [value]))
        return True

    def emit(self, em: Emitter) -> str:
        return em.const(self.obj, self.obj.__name__.rpartition(".")[2])

    def show(self) -> str:
        return f"module {self.obj.__name__}"
