"""New nodes without `create_node`'s walk over all their arguments, which is half of its time, and with names that are made from a target once."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

_SET = getattr(fx.Node, "_update_args_kwargs", None)
"""What `node.args = ...` and `node.kwargs = ...` end in; older torch has it in Python, under another name."""
_GRAPH = fx.Graph()


@lru_cache(4096)
def name_of(target: Any) -> str:
    """What `create_node` begins the name of a call of `target` with."""
    return re.sub("[^0-9a-zA-Z_]+", "_", _GRAPH._target_to_str(target))


_LASTING = (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket, BuiltinFunctionType)
"""Targets that a program does not make: others are not held here."""


def append_call(graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """`graph.create_node(op, target, args, kwargs)`. A power of a number is written as a call: `-2 ** x` would be read as `-(2 ** x)`."""
    if target is operator.pow or target is operator.ipow:
        target = pow if isinstance(args[0], (int, float, complex)) else target
    lasting = isinstance(target, _LASTING) or target.__module__ == "torch.nn.functional"
    return _filled(graph.create_node(op, target, name=name_of(target) if lasting else None), args, kwargs)


def append_copy(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any] = lambda node: node) -> fx.Node:
    """`graph.node_copy(node, of)`."""
    args, kwargs = fx.node.map_arg(node.args, of), fx.node.map_arg(node.kwargs, of)  # (`of` may make nodes)
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    made.meta.update(node.meta)
    return _filled(made, args, kwargs)  # type: ignore[arg-type]


def _filled(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> fx.Node:
    if _SET is not None:
        _SET(node, args, kwargs or node.kwargs)
        return node
    node.args = args
    if kwargs:
        node.kwargs = kwargs  # type: ignore[assignment]
    return node
