"""Session control and marks: reset, run, disable, allow_in_graph, disallow_in_graph, assume_constant_result, graph_break, is_compiling, mark_dynamic."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from magneto import _C
from magneto.api.module import switched_module
from magneto.api.steps import stepping, suspends
from magneto.base import events
from magneto.base.errors import UserError, forget_warnings
from magneto.dynamo import marks
from magneto.dynamo.region.policy import Context

F = TypeVar("F", bound=Callable[..., Any])


def reset() -> None:
    """Forget all compiled regions, counters and warnings said, and give back memory kept for results; optimised callables compile again at their next call."""
    _C.clear()
    _C.release_blocks()
    events.reset()
    forget_warnings()


def run(fn: Any) -> Any:
    """A callable that runs what is compiled for `fn` (an optimised callable) and compiles nothing more; everything else runs in eager. `fn` itself is left as it is."""
    from magneto.api.optimize import make_optimized

    _expect_callable("run", fn)
    call = fn if isinstance(fn, _C.Optimized) else getattr(fn, "_magneto_call", None)
    if not isinstance(call, _C.Optimized):
        return make_optimized(fn, Context(lambda gm, inputs: gm.forward, "run"), compile=False)
    frozen = _C.Policy(call.policy.payload, False, call.policy.of or call.policy)
    return (
        switched_module(fn, lambda target: _C.Optimized(target, frozen))
        if isinstance(fn, torch.nn.Module)
        else _C.Optimized(call.fn, frozen)
    )


class Disabling:
    """What `disable()` gives: a decorator, and a context manager in whose block nothing is captured (by this thread)."""

    def __init__(self, recursive: bool = True) -> None:
        self.recursive = recursive
        self._outside: list[Any] = []

    def __call__(self, fn: Any) -> Any:
        return disable(fn, recursive=self.recursive)

    def __enter__(self) -> None:
        self._outside.append(_C.set_active_policy(None))

    def __exit__(self, *error: object) -> None:
        _C.set_active_policy(self._outside.pop())


def disable(fn: Any = None, *, recursive: bool = True, reason: str | None = None) -> Any:
    """Leave code out of capture: `@disable` or `@disable()` on a function, method, generator or module, `with disable():` for a block.

    What the function calls is not captured either, unless `recursive=False`. A class is returned with its own methods disabled. `reason` is for readers of the code.
    """
    if fn is None:
        return Disabling(recursive)
    _expect_callable("disable", fn)
    if isinstance(fn, type):
        return _disabled_class(fn, recursive)
    if isinstance(fn, torch.nn.Module):
        return switched_module(fn, _C.Disabled) if recursive else _unhooked_module(fn)
    if not recursive:
        return _unhooked(fn)
    if suspends(fn):
        fn = stepping(fn, _C.call_inactive)
    wrapped = _C.Disabled(fn)
    marks.mark(wrapped, marks.DISABLE)
    return wrapped


marks.mark(disable, marks.FRAME)  # of `with disable():` the program's own frame runs the block


def _unhooked(fn: Any) -> Any:
    """A function of the same code that is not captured itself."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    target = fn.__func__ if inspect.ismethod(fn) else fn
    if isinstance(target, types.FunctionType):
        marks.mark(target, marks.SKIP)
        return fn
    marks.mark(call, marks.SKIP)
    return call


def _unhooked_module(module: torch.nn.Module) -> torch.nn.Module:
    module.forward = _unhooked(module.forward)
    return module


def _disabled_class(cls: type, recursive: bool) -> type:
    for name, value in list(vars(cls).items()):
        if isinstance(value, (staticmethod, classmethod)):
            setattr(cls, name, type(value)(disable(value.__func__, recursive=recursive)))
        elif isinstance(value, types.FunctionType):
            setattr(cls, name, disable(value, recursive=recursive))
    return cls


def _expect_callable(function: str, fn: Any, expected: str = "a callable") -> None:
    if not callable(fn):
        raise UserError("U001", function=function, expected=expected, got=type(fn).__name__)


def _marked(function: str, fn: F, kind: str) -> F:
    """`fn` with a mark; a list or tuple of callables is marked one by one."""
    if isinstance(fn, (list, tuple)):
        for one in fn:
            _marked(function, one, kind)
        return fn
    if isinstance(fn, (staticmethod, classmethod)):
        _marked(function, fn.__func__, kind)
        return fn
    if isinstance(fn, type):
        raise UserError("U001", function=function, expected="a function (mark the methods of a class)", got=f"the class {fn.__name__}")
    _expect_callable(function, fn, "a function")
    marks.mark(fn.__func__ if inspect.ismethod(fn) else fn, kind)
    return fn


def allow_in_graph(fn: F) -> F:
    """Calls of `fn` (or of each in a list) become one node of the graph: its body is not looked at. It must be a pure function of its tensor arguments."""
    return _marked("allow_in_graph", fn, marks.ALLOW)


def disallow_in_graph(fn: F) -> F:
    """Calls of `fn` (or of each in a list) break the graph."""
    return _marked("disallow_in_graph", fn, marks.DISALLOW)


def assume_constant_result(fn: F) -> F:
    """`fn` is called once, at capture; its result is a constant of the region."""
    return _marked("assume_constant_result", fn, marks.CONSTANT)


def graph_break(reason: str = "") -> None:
    """Break the graph here (does nothing outside of capture). `reason` is shown where breaks are explained."""
    if not isinstance(reason, str):
        raise UserError("U001", function="graph_break", expected="a text", got=type(reason).__name__)


marks.mark(graph_break, marks.BREAK)


def is_compiling() -> bool:
    """True inside captured code, False when the interpreter runs it."""
    return marks.capturing.active


marks.mark(is_compiling, marks.CONSTANT)


def _dims(function: str, tensor: Any, dim: int | Iterable[int] | None) -> tuple[int, ...]:
    if not isinstance(tensor, torch.Tensor):
        raise UserError("U001", function=function, expected="a tensor", got=type(tensor).__name__)
    rank = tensor.dim()
    dims = tuple(range(rank)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    for one in dims:
        if not isinstance(one, int):
            raise UserError("U001", function=function, expected="a dimension or several", got=repr(dim))
        if not -rank <= one < rank:
            raise UserError("U006", function=function, reason=f"dimension {one} of a tensor with {rank} dimensions")
    return dims


def mark_dynamic(tensor: torch.Tensor, dim: int | tuple[int, ...], min: int | None = None, max: int | None = None) -> None:
    """Say that a size of `tensor` changes between calls: it is not a constant of what is compiled, where the backend can do so. `min`, `max`: bounds of the sizes that are compiled together."""
    dims = _dims("mark_dynamic", tensor, dim)
    known = dict(getattr(tensor, "_magneto_dynamic", {}))
    known.update({one % tensor.dim(): (min, max) for one in dims})
    tensor._magneto_dynamic = known  # type: ignore[attr-defined]


def mark_static(tensor: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> None:
    """Say that sizes of `tensor` (all when `dim` is None) are constants, each value compiled on its own."""
    dims = _dims("mark_static", tensor, dim)
    known = dict(getattr(tensor, "_magneto_dynamic", {}))
    for one in dims:
        known[one % max(tensor.dim(), 1)] = None
    tensor._magneto_dynamic = known  # type: ignore[attr-defined]
