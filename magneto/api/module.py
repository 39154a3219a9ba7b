"""Optimised modules: an object that *is* the original module (same class hierarchy, same `__dict__`), whose call runs under a policy.

Attributes, parameters, hooks, `train()`, `to()`, `state_dict()` are those of the original, because both objects share one instance dictionary.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch

from magneto import _C

_CLASSES: dict[type, type] = {}


def optimized_class(cls: type) -> type:
    """The subclass of a module class whose instances call through their policy (one per class)."""
    found = _CLASSES.get(cls)
    if found is None:
        namespace: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__slots__": ("_magneto_call", "_magneto_original"),
        }
        namespace.update(__call__=_call, __reduce_ex__=_reduce, __deepcopy__=_deepcopy, __dir__=_dir)
        meta: Any = type(cls)
        new = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__  # not the program's own, which may keep a registry
        found = _CLASSES[cls] = new(meta, cls.__name__, (_Unheard, cls) if _hears(cls) else (cls,), namespace)
    return found


def _hears(cls: type) -> bool:
    """Whether a class of the program is told of classes derived from it."""
    return any("__init_subclass__" in vars(base) for base in cls.__mro__[:-1])


class _Unheard:
    """In front of a class whose `__init_subclass__` shall not hear of the twin's class: a registry keeps the program's own."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_magneto_call" not in vars(cls):
            super().__init_subclass__(**kwargs)


def switched_module(module: torch.nn.Module, switch: Callable[[Any], Any]) -> Any:
    """The twin of a module (of a twin: another one of its original) whose call is `switch(the original's __call__)`."""
    original = getattr(module, "_magneto_original", module) if type(module) in _CLASSES.values() else module
    cls = optimized_class(type(original))
    twin: Any = object.__new__(cls)
    object.__setattr__(twin, "__dict__", original.__dict__)
    cls._magneto_original.__set__(twin, original)  # type: ignore[attr-defined]
    cls._magneto_call.__set__(twin, switch(original.__call__))  # type: ignore[attr-defined]
    return twin


def optimized_module(module: torch.nn.Module, policy: Any) -> Any:
    """The optimised twin of a module."""
    return switched_module(module, lambda call: _C.Optimized(_captured_from(call), policy))


def _captured_from(call: Any) -> Any:
    """Where capture begins: at the module's `forward`, or, where that is one of torch's that capture reads as another function, in front of it."""
    if getattr(type(call.__self__), "forward", None) is not torch.nn.TransformerEncoder.forward:
        return call

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._magneto_call(*args, **kwargs)


def _dir(self: Any) -> Any:
    return dir(self._magneto_original)


def _original(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _reduce(self: Any, protocol: int) -> Any:
    """Pickling gives the original module: a policy does not travel."""
    return _original, (self._magneto_original,)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    import copy

    original = copy.deepcopy(self._magneto_original, memo)
    policy = getattr(self._magneto_call, "policy", None)
    return switched_module(original, _C.Disabled) if policy is None else optimized_module(original, policy)
