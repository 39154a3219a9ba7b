"""A small tracer for tests: runs a function once and records its torch-level calls as a captured graph, parameters lifted to inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

_METHODS = {name for name in dir(torch.Tensor)}


class Recorder(TorchFunctionMode):
    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.keep: list[Any] = []
        self.lifted: list[torch.Tensor] = []
        self.holder = torch.nn.Module()
        self.last: fx.Node | None = None
        for index, value in enumerate(inputs):
            self._placeholder(f"a{index}", value)

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        if self.last is None:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None) or self.graph._root):
                node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self.last):
                node = self.graph.placeholder(name)
        self.last = node
        self.keep.append(value)
        self.nodes[id(value)] = node
        return node

    def lift(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.nodes:
                self.lifted.append(value)
                self._placeholder(f"p{len(self.lifted)}", value)
            return self.nodes[id(value)]
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return type(value)(*map(self.lift, value)) if hasattr(value, "_fields") else type(value)(self.lift(v) for v in value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, slice):
            return slice(self.lift(value.start), self.lift(value.stop), self.lift(value.step))
        if isinstance(value, dict):
            return {key: self.lift(v) for key, v in value.items()}
        return value

    def _remember(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.nodes:
                self.keep.append(value)
                self.nodes[id(value)] = node
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                if isinstance(item, (torch.Tensor, tuple, list)):
                    self._remember(item, self.graph.call_function(operator.getitem, (node, index)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__":
            raise NotImplementedError(func)
        if func in (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast):
            result = func(*args, **kwargs)
            node = self.graph.call_function(func, tuple(self.nodes.get(id(a), a) for a in args), kwargs)
            if result is not None:
                self.nodes[id(result)] = node
                self.keep.append(result)
            return result
        node_args, node_kwargs = self.lift(tuple(args)), self.lift(dict(kwargs))
        result = func(*args, **kwargs)
        if name == "__get__":
            if isinstance(result, torch.Tensor):
                self._remember(result, self.graph.call_function(getattr, (node_args[0], func.__self__.__name__)))
        elif name == "__setitem__":
            self.graph.call_function(operator.setitem, node_args)
        elif _has_tensor(result) or (name.endswith("_") and not name.endswith("__")):
            if getattr(torch.Tensor, name, None) is func:
                node = self.graph.call_method(name, node_args, node_kwargs)
            else:
                node = self.graph.call_function(func, node_args, node_kwargs)
            self._remember(result, node)
        return result


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(_has_tensor(v) for v in value))


def capture(fn: Callable[..., Any], *inputs: Any, grad: bool | None = None) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The captured graph of `fn(*inputs)`, and its parameters in the order of the further placeholders. `inputs` may be changed."""
    recorder = Recorder(inputs)
    with recorder:
        result = fn(*inputs)
    single = not isinstance(result, (tuple, list))
    recorder.graph.output(recorder.lift((result,) if single else tuple(result)))
    gm = fx.GraphModule(recorder.holder, recorder.graph)
    n = len(inputs)
    gm.meta["magneto"] = {
        "name": getattr(fn, "__name__", "graph"),
        "parameter_inputs": tuple(range(n, n + len(recorder.lifted))),
        "grad_enabled": torch.is_grad_enabled() if grad is None else grad,
    }
    return gm, recorder.lifted
