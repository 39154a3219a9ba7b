"""`optimize` and `compile`: the one line that makes a program faster, as function and decorator, on functions, bound methods and modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from magneto import _C
from magneto.api.module import optimized_module
from magneto.api.steps import stepping, suspends
from magneto.backends.registry import is_slow, lookup_backend, takes_unknown_sizes, takes_varying_sizes
from magneto.base.errors import UserError, warn_once
from magneto.base.flags import config
from magneto.dynamo.region import policy
from magneto.dynamo.region.policy import Context
from magneto.dynamo.region.skip import TORCH_CODE, skip_reason

MODES: Mapping[str, Mapping[str, bool]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {"max_autotune": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True, "cuda_graphs": False},
    "no-cudagraphs": {"cuda_graphs": False},
}
"""Flags that a mode sets."""


def optimize(
    backend: str | Callable[..., Any] | None = None, *, nopython: bool = False, dynamic: bool | None = None, mode: str | None = None,
    options: Mapping[str, Any] | None = None, disable: bool = False,
) -> Callable[[Any], Any]:  # fmt: skip
    """Make a decorator that optimises a function, a bound method or an `nn.Module`.

    `backend`: a name of `list_backends()` or a callable `(GraphModule, example_inputs) -> callable`. `nopython=True` raises `Unsupported` at the first graph break
    instead of splitting the graph. `options`: values of flags for this callable's compilation (see `magneto.config`). `disable=True` returns the object unchanged.
    Raises UserError for an unknown backend, mode or option.
    """
    if mode is not None and mode not in MODES:
        raise UserError("U003", what="mode", name=mode, suggestion=f"; one of {', '.join(MODES)}")
    if isinstance(backend, torch.nn.Module):
        raise UserError(
            "U001", function="optimize", expected="a backend (optimize(backend)(module), or compile(module))", got=type(backend).__name__
        )
    for option, value, kinds in (
        ("nopython", nopython, bool),
        ("dynamic", dynamic, (bool, type(None))),
        ("options", options, (Mapping, type(None))),
    ):
        if not isinstance(value, kinds):  # type: ignore[arg-type]
            raise UserError(
                "U001", function="optimize", expected=f"{option}=True or False" if option != "options" else "options={...}", got=repr(value)
            )
    chosen = config.backend if backend is None else backend
    fn = lookup_backend(chosen)
    values = {**MODES.get(mode or "default", {}), **(options or {})}
    if values:
        config.patch(**values)
        fn = _with_options(fn, values)
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", type(chosen).__name__)

    def decorate(target: Any) -> Any:
        if disable or config.disable:
            return target
        return make_optimized(
            target, Context(fn, name, nopython, takes_unknown_sizes(fn), takes_varying_sizes(fn), dynamic, slow_backend=is_slow(fn))
        )

    return decorate


def compile(
    model: Any = None, *, fullgraph: bool = False, dynamic: bool | None = None, backend: str | Callable[..., Any] | None = None,
    mode: str | None = None, options: Mapping[str, Any] | None = None, disable: bool = False,
) -> Any:  # fmt: skip
    """`optimize` with the keywords of `torch.compile`: `compile(model)` or `@compile(fullgraph=True)`."""
    decorate = optimize(backend, nopython=fullgraph, dynamic=dynamic, mode=mode, options=options, disable=disable)
    return decorate if model is None else decorate(model)


def _with_options(backend: Callable[..., Any], values: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(backend)
    def configured(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        with config.patch(**values):
            return backend(gm, example_inputs)

    return configured


def make_optimized(target: Any, context: Context, compile: bool = True) -> Any:
    """The optimised form of a function, bound method, class instance or module, under a policy of its own."""
    if not callable(target):
        raise UserError("U001", function="optimize", expected="a callable", got=type(target).__name__)
    if not _C.SUPPORTED:
        import platform

        warn_once("W001", version=platform.python_version())
        return target
    policy.install()
    handle = _C.Policy(context, compile)
    if isinstance(target, torch.nn.Module):
        return optimized_module(target, handle)
    if isinstance(target, type):
        raise UserError("U001", function="optimize", expected="a function, method or module instance", got=f"the class {target.__name__}")
    if suspends(target):
        return stepping(target, _C.Optimized(_call, handle))
    made = _C.Optimized(_as_python(target), handle)
    if inspect.isfunction(target):  # as functools.wraps does
        vars(made).update({"__annotations__": target.__annotations__, **vars(target), **vars(made)})
    return made


def _call(fn: Any, *args: Any) -> Any:
    return fn(*args)


def _as_python(target: Any) -> Any:
    """A callable without Python code of its own, or with torch's, whose frames are left to CPython, is called from a frame that can be captured."""
    inner = target
    while isinstance(inner, (_C.Optimized, functools.partial)):
        inner = inner.__wrapped__ if isinstance(inner, _C.Optimized) else inner.func
    if inspect.isfunction(target):
        return _trampoline(target) if skip_reason(target.__code__, {}) == TORCH_CODE else target
    if inspect.ismethod(target):
        return target
    if isinstance(target, _C.Optimized):
        return inner
    return _trampoline(target)


def _trampoline(target: Any) -> Any:
    namespace: dict[str, Any] = {"target": target}
    exec(builtins_compile("def call(*args, **kwargs):\n    return target(*args, **kwargs)\n"), namespace)
    call = namespace["call"]
    functools.update_wrapper(call, target, assigned=("__name__", "__doc__"), updated=())
    return call


def builtins_compile(text: str) -> Any:
    """Code of a trampoline; the file name marks it as the user's (see dynamo.region.skip)."""
    import builtins

    return builtins.compile(text, "<string>", "exec")
