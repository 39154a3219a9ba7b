"""Nodes of the captured graph whose target calls captured code: custom autograd functions, and transforms over a captured body.

A transform (`torch.func.grad`, `vmap`, activation checkpointing ...) of a function stays one call of PyTorch's own transform. What it transforms is a `Body`: the function's
captured graph with templates of what it takes and gives. Tensors that the function reads from outside are further inputs of the node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from magneto.base.dataclass import dataclass

Invoke = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of the `index`-th tensor in a template."""

    index: int


def fill(template: Any, leaves: Sequence[Any]) -> Any:
    """The template's structure with `leaves` in its slots."""
    kind = type(template)
    if kind is Slot:
        return leaves[template.index]
    if kind is tuple or kind is list:
        return kind(fill(item, leaves) for item in template)
    if isinstance(template, dict):
        return kind((key, fill(item, leaves)) for key, item in template.items())
    if isinstance(template, tuple) and hasattr(template, "_fields"):
        return kind(*(fill(item, leaves) for item in template))
    return template


def leaves_at(template: Any, value: Any, found: dict[int, Any]) -> dict[int, Any]:
    """The values that stand where the template has slots, by index."""
    if type(template) is Slot:
        found[template.index] = value
    elif isinstance(template, dict):
        for key, item in template.items():
            leaves_at(item, value[key], found)
    elif isinstance(template, (tuple, list)):
        for item, part in zip(template, value, strict=True):
            leaves_at(item, part, found)
    return found


def plain(value: Any) -> Any:
    """Lists and dicts in place of fx's immutable ones, which functions of nested values do not take for lists and dicts."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        items = [plain(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


@dataclass(frozen=True, slots=True)
class Body:
    """`gm(*leaves, *lifted) -> tuple of tensors`; `takes`: template of (args, kwargs); `gives`: template of the result."""

    gm: fx.GraphModule
    takes: Any
    gives: Any

    def bind(self, lifted: Sequence[Any]) -> Callable[..., Any]:
        """The function itself, given the tensors that it reads from outside."""

        def body(*args: Any, **kwargs: Any) -> Any:
            found = leaves_at(self.takes, (args, kwargs), {})
            return fill(self.gives, self.gm.forward(*[found[index] for index in range(len(found))], *lifted))

        return body


class Checkpoint(threading.local):
    """`region`: number of the checkpointed body that a compiler is tracing, 0 outside of all: what is computed there is computed again in backward."""

    region = 0
    count = 0


checkpoint = Checkpoint()


class Checkpointed:
    """Target of a call node: a body under activation checkpointing. Arguments: those that PyTorch's checkpoint gets, and the tensors that it closes over.

    Under a dispatch mode (propagation, tracing by a compiler) the body runs once, and its operations are marked instead: a recomputation that is traced would draw
    other random numbers, and PyTorch's saves nothing in a graph where equal operations are one.
    """

    def __init__(self, run: Callable[..., Any], settings: Mapping[str, Any], body: Body) -> None:
        self.__name__ = self.__qualname__ = "checkpoint_of_body"
        self.__module__ = __name__
        self.run = run
        self.settings = dict(settings)
        self.body = body

    def __call__(self, args: Sequence[Any], lifted: Sequence[Any]) -> Any:
        n = len(lifted)
        if not torch._C._len_torch_dispatch_stack():
            body = self.body
            if self.settings["use_reentrant"]:
                return self.run(body.bind(lifted), *args, **self.settings)
            return self.run(lambda *tensors: body.bind(tensors[:n])(*tensors[n:]), *lifted, *args, **self.settings)
        around = checkpoint.region
        if not around:
            checkpoint.count += 1
            checkpoint.region = checkpoint.count
        try:
            return self.body.bind(lifted)(*args)
        finally:
            checkpoint.region = around


class Transformed:
    """Target of a call node: `invoke(function, args, kwargs)` with the body as function. The node's arguments: args, kwargs, lifted tensors."""

    def __init__(self, name: str, invoke: Invoke, body: Body) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self.invoke = invoke
        self.body = body

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], lifted: Sequence[Any]) -> Any:
        return self.invoke(self.body.bind(lifted), plain(args), plain(kwargs))


class Applied:
    """Target of a call node: a custom autograd function, called as the program calls it, so that autograd finds its backward."""

    def __init__(self, function: Any) -> None:
        self.__name__ = self.__qualname__ = f"apply_{function.__name__}"
        self.__module__ = __name__
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*plain(args), **kwargs)
