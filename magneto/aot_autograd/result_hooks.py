"""Hooks on results of compiled graphs are not called where no gradient arrives, as in eager: the node behind a result runs for other results too."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch


class ResultHooks(OrderedDict[int, Callable[..., Any]]):
    """A tensor's hooks by their numbers."""

    def __setitem__(self, number: int, hook: Callable[..., Any]) -> None:
        if getattr(hook, "__module__", None) != "torch.autograd.graph":  # its own ones count the nodes that run
            called = functools.partial(_called, hook)
            if name := getattr(hook, "__name__", None):  # errors about what it returns name it
                called.__name__ = name  # type: ignore[attr-defined]
            hook = called
        super().__setitem__(number, hook)


def _called(hook: Callable[..., Any], gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


def with_result_hooks(function: Any) -> Any:
    """A class decorator for autograd functions."""
    node = function._backward_cls

    def register(self: Any, tensor: torch.Tensor) -> None:
        if not tensor._backward_hooks:
            tensor._backward_hooks = ResultHooks()
        super(node, self)._register_hook_dict(tensor)

    node._register_hook_dict = register
    return function
