"""An FX graph as a complete Python program: imports, inputs of the recorded metadata, the function, a run of it.

This is what MAGNETO_DUMP writes for graphs: every file runs alone (`python 0007_f_graph.py`), can be timed, edited and sent in a report.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import fx

from magneto.graph.meta import TensorMeta

_HEAD = '''"""{title}"""

from math import inf, nan  # noqa: F401
from types import SimpleNamespace

import torch
from torch import device  # noqa: F401

torch.manual_seed(0)


def tensor(shape, strides, dtype, where="cpu", requires_grad=False):
    """A tensor of this layout: normal numbers, or small non-negative integers."""
    room = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if all(shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        memory = torch.randn(room, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    else:
        memory = torch.arange(room) % 2
    return memory.to(where, dtype).as_strided(shape, strides).requires_grad_(requires_grad)
'''
_CONSTANTS_SHOWN = 64  # elements; larger constants are replaced by random ones of the same layout


def standalone(graph: fx.Graph | fx.GraphModule, title: str = "A captured graph.") -> str:
    """The program. Placeholders need `meta["val"]` (TensorMeta, tensor or Python number); attributes are read from the module that owns the graph."""
    owner = graph if isinstance(graph, fx.GraphModule) else graph.owning_module
    fx_graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    code = fx_graph.python_code("self")
    parts = [_HEAD.format(title=title.replace('"""', "'''"))]
    parts.append("\n".join(line for name, value in code.globals.items() if (line := _bind(name, value))))
    parts.append(code.src.strip())
    parts.append(_constants(fx_graph, owner))
    inputs = ",\n    ".join(_example(node) for node in fx_graph.nodes if node.op == "placeholder")
    parts.append(f"inputs = (\n    {inputs},\n)" if inputs else "inputs = ()")
    parts.append('if __name__ == "__main__":\n    print(forward(constants, *inputs))\n')
    return "\n\n".join(part for part in parts if part)


def _bind(name: str, value: Any) -> str:
    """A line that makes `name` mean `value`; empty where the head has done so."""
    if name in ("torch", "device", "inf", "nan", "NoneType"):
        return "NoneType = type(None)" if name == "NoneType" else ""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return f"{name} = {value}"
    if module and qualname and "<" not in qualname:
        head, *rest = qualname.split(".")
        return f"from {module} import {head} as {name}" + (f"\n{name} = {name}.{'.'.join(rest)}" if rest else "")
    return f"{name} = None  # {value!r} cannot be imported"


def _layout(meta: TensorMeta | torch.Tensor) -> str:
    strides = meta.strides if isinstance(meta, TensorMeta) else meta.stride()
    text = f"{tuple(meta.shape)}, {tuple(strides)}, {meta.dtype}"
    if meta.device.type != "cpu":
        text += f", {str(meta.device)!r}"
    return text + (", requires_grad=True" if meta.requires_grad else "")


def _example(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, (TensorMeta, torch.Tensor)):
        return f"tensor({_layout(value)})"
    return repr(value)


def _constants(graph: fx.Graph, owner: Any) -> str:
    """The namespace that stands for `self`: the tensors that get_attr nodes read."""
    lines = ["constants = SimpleNamespace()"]
    for target in dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr"):
        value: Any = owner
        path = target.split(".")
        for i, step in enumerate(path):
            value = getattr(value, step, None)
            if i < len(path) - 1:
                lines.append(f"constants.{'.'.join(path[: i + 1])} = SimpleNamespace()")
        lines.append(f"constants.{target} = {_constant(value)}")
    return "\n".join(dict.fromkeys(lines))


def _constant(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() <= _CONSTANTS_SHOWN and value.device.type == "cpu":
        return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    return f"tensor({_layout(value)})" if isinstance(value, torch.Tensor) else repr(value)
