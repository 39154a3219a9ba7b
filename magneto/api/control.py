"""Session control and marks: reset, run, disable, allow_in_graph, disallow_in_graph, assume_constant_result, graph_break, is_compiling, mark_dynamic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from magneto import _C
from magneto.base import events
from magneto.base.errors import UserError, forget_warnings
from magneto.dynamo import marks
from magneto.dynamo.region.policy import Context

F = TypeVar("F", bound=Callable[..., Any])


def reset() -> None:
    """Forget all compiled regions, counters and warnings said; optimised callables compile again at their next call."""
    _C.clear()
    events.reset()
    forget_warnings()


def run(fn: Any) -> Any:
    """A callable that runs what is compiled for `fn` (an optimised callable) and compiles nothing more."""
    from magneto.api.optimize import make_optimized

    if isinstance(fn, _C.Optimized):
        fn.policy.compile = False
        return fn
    call = getattr(fn, "_magneto_call", None)
    if call is not None:
        call.policy.compile = False
        return fn
    return make_optimized(fn, Context(lambda gm, inputs: gm.forward, "run"), compile=False)


def disable(fn: Any = None) -> Any:
    """As decorator: `fn` and what it calls are never captured. As context manager (`with disable():`): the same for the block."""
    if fn is None:
        return _disabled_block()
    if not callable(fn):
        raise UserError("U001", function="disable", expected="a callable", got=type(fn).__name__)
    wrapped = _C.Disabled(fn)
    marks.mark(wrapped, marks.DISABLE)
    return wrapped


@contextlib.contextmanager
def _disabled_block() -> Iterator[None]:
    previous = _C.set_active_policy(None)
    try:
        yield
    finally:
        _C.set_active_policy(previous)


def allow_in_graph(fn: F) -> F:
    """Calls of `fn` become one node of the graph: its body is not looked at. It must be a pure function of its tensor arguments."""
    marks.mark(fn, marks.ALLOW)
    return fn


def disallow_in_graph(fn: F) -> F:
    """Calls of `fn` break the graph."""
    marks.mark(fn, marks.DISALLOW)
    return fn


def assume_constant_result(fn: F) -> F:
    """`fn` is called once, at capture; its result is a constant of the region."""
    marks.mark(fn, marks.CONSTANT)
    return fn


def graph_break() -> None:
    """Break the graph here (does nothing outside of capture)."""


marks.mark(graph_break, marks.DISALLOW)


def is_compiling() -> bool:
    """True inside captured code, False when the interpreter runs it."""
    return marks.capturing.active


marks.mark(is_compiling, marks.CONSTANT)


def mark_dynamic(tensor: torch.Tensor, dim: int | tuple[int, ...], min: int | None = None, max: int | None = None) -> None:
    """Say that a size of `tensor` changes between calls: the mark is checked and kept. Sizes are compiled as constants until symbolic sizes are there."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for one in dims:
        if not -tensor.dim() <= one < tensor.dim():
            raise UserError("U006", function="mark_dynamic", reason=f"dimension {one} of a tensor with {tensor.dim()} dimensions")
    known = dict(getattr(tensor, "_magneto_dynamic", {}))
    known.update({one % tensor.dim(): (min, max) for one in dims})
    tensor._magneto_dynamic = known  # type: ignore[attr-defined]


def mark_static(tensor: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> None:
    """Say that sizes of `tensor` (all when `dim` is None) are constants, each value compiled on its own (so far all are)."""
    dims = range(tensor.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    known = dict(getattr(tensor, "_magneto_dynamic", {}))
    for one in dims:
        known.pop(one % max(tensor.dim(), 1), None)
    tensor._magneto_dynamic = known  # type: ignore[attr-defined]
