"""Differential testing: the compiled function against the plain one, on copies of the same arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import torch


class Capturing:
    """A backend that keeps every graph it is given and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    def operations(self) -> list[list[str]]:
        """Per graph, the names of the operations called, in order."""
        called = ("call_function", "call_method", "call_module")
        return [[getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op in called] for gm in self.graphs]


def same(fn: Callable[..., Any], compiled: Callable[..., Any], *args: Any, tolerance: float | None = None, **kwargs: Any) -> Any:
    """Call both on deep copies of the arguments; assert equal results, equal arguments afterwards, or the same exception.

    `tolerance` None asks for bitwise equality of tensors, otherwise it is absolute and relative. Returns the compiled result.
    """
    plain_args, our_args = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
    plain, plain_error = outcome(fn, plain_args)
    ours, our_error = outcome(compiled, our_args)
    if plain_error is not None or our_error is not None:
        assert type(our_error) is type(plain_error), f"eager: {plain_error!r}, compiled: {our_error!r}"
        assert str(our_error) == str(plain_error)
    assert_equal(ours, plain, tolerance, "result")
    assert_equal(our_args, plain_args, tolerance, "arguments after the call")
    return ours


def outcome(fn: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, Exception | None]:
    """(result, None) or (None, exception)."""
    args, kwargs = call
    try:
        return fn(*args, **kwargs), None
    except Exception as error:
        return None, error


def assert_equal(ours: Any, plain: Any, tolerance: float | None = None, where: str = "value") -> None:
    """Same types, same structure, same tensors (dtype, shape, strides of non-trivial dimensions, values)."""
    assert type(ours) is type(plain), f"{where}: {type(ours)} against {type(plain)}"
    if isinstance(plain, torch.Tensor):
        assert ours.requires_grad == plain.requires_grad, f"{where}: requires_grad {ours.requires_grad} against {plain.requires_grad}"
        options = {"rtol": 0.0, "atol": 0.0} if tolerance is None else {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(ours, plain, equal_nan=True, msg=lambda text: f"{where}: {text}", **options)
    elif isinstance(plain, numpy.ndarray):
        assert (ours.dtype, ours.shape, ours.strides) == (plain.dtype, plain.shape, plain.strides), f"{where}: {ours!r} against {plain!r}"
        numpy.testing.assert_allclose(ours, plain, rtol=tolerance or 0.0, atol=tolerance or 0.0, err_msg=where)
    elif isinstance(plain, numpy.generic):
        assert ours == plain or (ours != ours and plain != plain), f"{where}: {ours!r} against {plain!r}"
    elif isinstance(plain, dict):
        assert list(ours) == list(plain), f"{where}: keys {list(ours)} against {list(plain)}"
        for key in plain:
            assert_equal(ours[key], plain[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(plain, (tuple, list)):
        assert len(ours) == len(plain), f"{where}: {len(ours)} elements against {len(plain)}"
        for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert_equal(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(plain, (int, float, str, bool, bytes, type(None), complex)):
        assert ours == plain or (ours != ours and plain != plain), f"{where}: {ours!r} against {plain!r}"
    elif hasattr(plain, "__dict__") and not callable(plain):
        assert_equal(vars(ours), vars(plain), tolerance, where)
