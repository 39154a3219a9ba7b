"""The interpreter: a graph of prims executed by numpy, one node after another. The oracle of decompositions and kernels: no kernel of torch or ours runs.

A value is an array or, behind a library call, a tensor; what asks for it says which. bfloat16, which numpy has not, is kept as float32 and rounded
after each prim; functions and sums of smaller floats are computed in float64 and rounded once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from magneto.graph.layout import laid_out
from magneto.graph.meta import TensorMeta
from magneto.prims.meanings.numpy import Array, numpy_dtype, round_bfloat16
from magneto.prims.prim import Prim


def interpret(graph: fx.Graph) -> Callable[..., tuple[Any, ...]]:
    """The graph as a function of tensors that gives tensors with the strides the graph promises. Library calls run in torch."""
    nodes = tuple(graph.nodes)

    def run(*inputs: Any) -> tuple[Any, ...]:
        values: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        for node in nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "output":
                return tuple([as_tensor(values[result], result.meta["val"]) for result in node.args[0]])  # type: ignore[union-attr]
            else:
                values[node] = execute(node, values)
        raise AssertionError("a graph without outputs")

    return run


def execute(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """One node's value."""
    target: Any = node.target
    if target is operator.getitem:
        source, position = node.args
        return values[source][position]  # type: ignore[index]
    if isinstance(target, Prim):
        args = fx.node.map_arg(node.args, lambda used: as_array(values[used]))
        with np.errstate(all="ignore"):
            return stored(target.numpy_meaning(*args), node.meta["val"])
    call_args, call_kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: as_tensor(values[used], used.meta["val"]))
    return target(*call_args, **call_kwargs)


def stored(result: Any, meta: Any) -> Any:
    """A prim's result as memory of its dtype holds it."""
    if isinstance(result, tuple):
        return tuple(stored(item, one) for item, one in zip(result, meta, strict=True))
    array = np.asarray(result)
    if array.shape != meta.shape:
        raise AssertionError(f"the interpreter gives {array.shape}, the graph says {meta}")
    array = array.astype(numpy_dtype(meta.dtype), copy=False)
    return round_bfloat16(array) if meta.dtype is torch.bfloat16 else array


def as_array(value: Any) -> Array:
    """The numbers of a tensor (or of an array, which they are already)."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()


def as_tensor(value: Any, meta: Any) -> Any:
    """A tensor laid out as `meta` says, in memory of its own where the value is an array."""
    if isinstance(value, np.ndarray) and isinstance(meta, TensorMeta):
        tensor = torch.from_numpy(np.array(value, order="C")).to(device=meta.device, dtype=meta.dtype)
        return tensor if tensor.stride() == meta.strides else laid_out(tensor, meta.strides)
    if isinstance(value, (tuple, list)):
        return type(value)(as_tensor(item, one) for item, one in zip(value, meta, strict=True))
    return value
