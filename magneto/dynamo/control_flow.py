"""`torch.cond`, `torch.while_loop`, `map` and `scan` as the Python that they stand for: it is followed where a program calls these.

Frames of these functions are regions (`region/skip.py`), so that a branch or a loop that data decides is a break like the program's own `if` or `while`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from magneto.dynamo.marks import DISALLOW, mark

MAX_TURNS = 128
"""Longer loops over slices are left to torch: a graph of them all would be compiled for long."""

STACKS_WHERE_IT_SLICES = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""Whether results of `scan` lie along the dimension that is scanned; along the first one before."""


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    if not isinstance(pred, (bool, int, float)):
        if not isinstance(pred, torch.Tensor):
            raise RuntimeError(f"Expected pred to be bool or tensor, but got {pred}.")
        if pred.numel() != 1:
            raise RuntimeError(f"Expected pred to be bool or single-element tensor, but got {pred}.")
        if not callable(true_fn) or not callable(false_fn):
            raise RuntimeError("Expect both branches to be callable.")
        if not isinstance(operands, (tuple, list)) or not all(isinstance(one, torch.Tensor) for one in tree_flatten(operands)[0]):
            text = "Expect operands to be a tuple of possibly nested dict/list/tuple that only consists of tensor leaves"
            raise RuntimeError(f"{text}, but got {operands}.")
    found = true_fn(*operands) if pred else false_fn(*operands)
    if isinstance(pred, torch.Tensor) and _linked_otherwise(found, operands):
        return by_torch("cond", pred, true_fn, false_fn, operands)
    return found


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any) -> Any:
    """Without a turn the inputs are copied."""
    if not callable(cond_fn) or not callable(body_fn):
        raise RuntimeError("Expect cond_fn and body_fn to be callable.")
    turned, found, carried = False, None, carried_inputs
    while cond_fn(*carried):
        found = body_fn(*carried)
        turned, carried = True, found if isinstance(found, (tuple, list)) else (found,)
    if turned and _linked_otherwise(found, carried_inputs):
        return by_torch("while_loop", cond_fn, body_fn, carried_inputs)
    if turned:
        return found
    leaves, spec = tree_flatten(tuple(carried_inputs))
    return tree_unflatten([one.clone() if isinstance(one, torch.Tensor) else one for one in leaves], spec)


def map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    leaves, spec = tree_flatten(xs)
    if not all(isinstance(one, torch.Tensor) for one in leaves):
        raise RuntimeError(f"Mapped xs can only consist of tensors. Got xs {leaves}.")
    shapes = [one.shape for one in leaves]
    turns = shapes[0][0]
    if turns == 0:
        raise RuntimeError("Leading dimensions of mapped xs cannot be 0.")
    if not all(shape[0] == turns for shape in shapes):
        raise RuntimeError(f"Leading dimensions of mapped xs must be consistent. Got shapes {shapes}.")
    if turns > MAX_TURNS:
        return by_torch("map", f, xs, *args)
    found = _stacked([f(tree_unflatten([one[i] for one in leaves], spec), *args) for i in range(turns)], 0)
    return by_torch("map", f, xs, *args) if _linked_otherwise(found, (xs, args)) else found


def scan(combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    leaves, spec = tree_flatten(xs)
    usual = callable(combine_fn) and type(dim) is int and type(reverse) is bool and (dim == 0 or STACKS_WHERE_IT_SLICES)
    usual = usual and all(isinstance(one, torch.Tensor) and -one.ndim <= dim < one.ndim for one in leaves)
    first = tree_flatten(init)[0]
    if not usual or not leaves or not first or not all(isinstance(one, torch.Tensor) for one in first):
        return by_torch("scan", combine_fn, init, xs, dim=dim, reverse=reverse)
    turns, place = leaves[0].shape[dim], dim % leaves[0].ndim
    if not 0 < turns <= MAX_TURNS or any(one.shape[dim] != turns or dim % one.ndim != place for one in leaves):
        return by_torch("scan", combine_fn, init, xs, dim=dim, reverse=reverse)
    carry, found = init, []
    for i in reversed(range(turns)) if reverse else range(turns):
        carry, result = combine_fn(carry, tree_unflatten([one.select(place, i) for one in leaves], spec))
        found.append(result)
    both = carry, _stacked(found[::-1] if reverse else found, place)
    return by_torch("scan", combine_fn, init, xs, dim=dim, reverse=reverse) if _linked_otherwise(both, (init, xs)) else both


def _linked_otherwise(results: Any, inputs: Any) -> bool:
    """torch's functions are one operation: if something that goes in requires gradients, so does all that comes out."""
    floats = [one for one in tree_flatten(results)[0] if isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex())]
    learn = [one.requires_grad for one in floats]
    given = [one.requires_grad for one in tree_flatten(inputs)[0] if isinstance(one, torch.Tensor)]
    return torch.is_grad_enabled() and any(learn + given) and not all(learn)


def by_torch(name: str, *args: Any, **kwargs: Any) -> Any:
    """Called between two graphs."""
    return getattr(sys.modules[f"torch._higher_order_ops.{name}"], name)(*args, **kwargs)


mark(by_torch, DISALLOW)


def _stacked(results: list[Any], dim: int) -> Any:
    spec = tree_flatten(results[0])[1]
    columns = zip(*[tree_flatten(result)[0] for result in results], strict=True)
    return tree_unflatten([None if column[0] is None else torch.stack(column).movedim(0, dim) for column in columns], spec)
