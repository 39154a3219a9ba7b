"""show: an FX graph as a runnable Python function.

The text needs nothing but what it imports itself; constants that the graph holds (get_attr nodes) are attributes of the parameter `self`.
Each line carries the result's metadata and the user's line it came from.
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from magneto.graph.meta import TensorMeta

_HOMES: tuple[tuple[str, Any], ...] = (("torch", torch), ("torch.nn.functional", F), ("operator", operator), ("math", math))


def show(graph: fx.Graph, name: str = "graph", note: str = "") -> str:
    """The graph as Python text; `note` becomes the first comment."""
    writer = _Writer()
    body: list[str] = []
    parameters: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            parameters.append(node.name)
            body.append(f"    # {node.name}: {describe(node.meta.get('val'))}")
        elif node.op == "get_attr":
            parameters[:0] = [] if "self" in parameters else ["self"]
            body.append(writer.line(node, f"self.{node.target}"))
        elif node.op == "output":
            body.append(f"    return {writer.argument(node.args[0])}")
        else:
            body.append(writer.line(node, writer.call(node)))
    head = [f"# {note}"] if note else []
    head += [f"import {module}" for module in sorted(writer.modules)]
    head += ["from magneto.prims import prims"] if writer.has_prims else []
    return "\n".join([*head, "", "", f"def {name}({', '.join(parameters)}):", *body]) + "\n"


def describe(value: Any) -> str:
    """Metadata in a few words."""
    if isinstance(value, TensorMeta):
        return str(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(item) for item in value) + ")"
    return "?" if value is None else repr(value)


def origin(stack: Any) -> str:
    """`file:line function` of the innermost user frame."""
    if not stack:
        return ""
    file, line, function = stack[-1][:3]
    return f"{os.path.basename(file)}:{line} {function}"


class _Writer:
    def __init__(self) -> None:
        self.modules: set[str] = {"torch"}
        self.has_prims = False

    def line(self, node: fx.Node, text: str) -> str:
        comment = describe(node.meta.get("val"))
        source = origin(node.meta.get("stack"))
        return f"    {node.name} = {text}  # {comment}{'; ' + source if source else ''}"

    def call(self, node: fx.Node) -> str:
        arguments = [self.argument(arg) for arg in node.args]
        named = [f"{key}={self.argument(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join(arguments[1:] + named)})"
        if node.op == "call_module":
            return f"self.{node.target}({', '.join(arguments + named)})"
        if node.target is operator.getitem and len(arguments) == 2:
            return f"{arguments[0]}[{arguments[1]}]"
        return f"{self.target(node.target)}({', '.join(arguments + named)})"

    def target(self, fn: Any) -> str:
        if isinstance(fn, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return f"torch.ops.{fn}"
        name = getattr(fn, "__name__", None) or str(fn)
        if type(fn).__module__ == "magneto.prims.prim":
            self.has_prims = True
            return f"prims.{name}"
        return self.path_of(fn, name)

    def path_of(self, fn: Callable[..., Any], name: str) -> str:
        """A dotted path under which `fn` can be found again, if there is one."""
        if getattr(builtins, name, None) is fn:
            return name
        module = getattr(fn, "__module__", None)
        homes = list(_HOMES)
        if isinstance(module, str):
            try:
                homes.append((module, importlib.import_module(module)))
            except ImportError:
                pass
        homes.append(("torch._C._nn", torch._C._nn))
        for path, home in homes:
            if getattr(home, name, None) is fn:
                self.modules.add(path.split("._C")[0])
                return f"{path}.{name}"
        method = getattr(fn, "__objclass__", None)
        if method is not None:
            return f"torch.Tensor.{name}"
        return f"{module}.{getattr(fn, '__qualname__', name)}"

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, torch.Size) or type(value) is tuple:
            return f"({', '.join(map(self.argument, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return "[" + ", ".join(self.argument(item) for item in value) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.argument(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.argument(value.start)}, {self.argument(value.stop)}, {self.argument(value.step)})"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if value is Ellipsis:
            return "..."
        return repr(value)
