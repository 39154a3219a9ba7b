"""Eager against a backend on copies of the same inputs: values, strides, aliasing, mutation, versions."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from magneto.aot_autograd.trace import trace
from magneto.backends import lookup_backend
from magneto.base import events
from magneto.base.errors import MagnetoWarning
from tests.aot_autograd.capture import capture


def aliasing(tensors: list[Any]) -> list[Any]:
    """Which tensors share memory, and where: comparable between two runs."""
    firsts: dict[int, int] = {}
    pattern: list[Any] = []
    for index, value in enumerate(tensors):
        if isinstance(value, torch.Tensor):
            address = value.untyped_storage().data_ptr()
            owner = firsts.setdefault(address, index) if value.untyped_storage().nbytes() else index
            shared = owner != index or any(
                isinstance(t, torch.Tensor) and t is not value and t.untyped_storage().data_ptr() == address for t in tensors
            )
            pattern.append((owner, value.storage_offset() if shared else None))
        else:
            pattern.append(None)
    return pattern


def check(
    fn: Callable[..., Any],
    *inputs: Any,
    backend: str = os.environ.get("TEST_BACKEND", "aot_eager"),
    tolerance: float = float(os.environ.get("TEST_TOL", 0.0)),
    falls_back: bool | None = False,
) -> None:
    """`fn` through `backend` behaves as in eager, in two calls, and was (not) compiled as a whole."""
    for_capture, for_backend = copy.deepcopy(list(inputs)), copy.deepcopy(list(inputs))
    state = torch.get_rng_state()
    gm, lifted = capture(fn, *for_capture)
    torch.set_rng_state(state)
    if falls_back is False:
        traced = trace(gm, [*for_backend, *lifted])
        with torch.autocast("cpu", enabled=False):
            check_metas(traced.graph, [*for_backend, *lifted, *traced.constants[len(traced.constants) - traced.signature.n_constants :]])
        torch.set_rng_state(state)
    before = events.count("fallback")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if falls_back or falls_back is None else "error", MagnetoWarning)
        compiled = lookup_backend(backend)(gm, [*for_backend, *lifted])
    assert torch.equal(torch.get_rng_state(), state), "compiling moved the random stream"
    assert falls_back is None or (events.count("fallback") > before) == falls_back, events.events("fallback")[-1:]
    for a, b in zip(for_backend, inputs, strict=True):
        same(a, b, 0.0, "input after compiling")
    for _ in range(2):
        ours_in, eager_in = copy.deepcopy(list(inputs)), copy.deepcopy(list(inputs))
        held = copy.deepcopy(lifted)
        torch.set_rng_state(state)
        expected = fn(*eager_in)
        after_eager, held_eager = torch.get_rng_state(), copy.deepcopy(lifted)
        for p, value in zip(lifted, held, strict=True):
            p.data.copy_(value.data)
        torch.set_rng_state(state)
        actual = compiled(*ours_in, *lifted)
        assert torch.equal(torch.get_rng_state(), after_eager), "random stream"
        expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
        actual = list(actual)
        compare(actual, ours_in, expected, eager_in, tolerance)
        for p, value in zip(lifted, held_eager, strict=True):
            same(p, value, tolerance, "parameter or buffer")


def check_metas(graph: fx.Graph, inputs: list[Any]) -> None:
    """Run `graph` node by node: every value is what its meta says."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder":
            values[node] = next(given)
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*[list(a) if isinstance(a, list) else a for a in args], **kwargs)
        check_meta(values[node], node.meta["val"], str(node.format_node()))


def check_meta(value: Any, meta: Any, what: str) -> None:
    if isinstance(meta, (list, tuple)):
        for v, m in zip(value, meta, strict=True):
            check_meta(v, m, what)
    elif isinstance(value, torch.Tensor):
        assert meta is not None and value.dtype == meta.dtype and tuple(value.shape) == meta.shape, f"{what}: {meta}"
        wrong = [d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d) != meta.strides[d]]
        assert not wrong or not value.numel(), f"{what}: {meta.strides} for {value.stride()}"


def compare(actual: list[Any], ours_in: list[Any], expected: list[Any], eager_in: list[Any], tolerance: float) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        same(a, b, tolerance, f"output {i}")
    for i, (a, b) in enumerate(zip(ours_in, eager_in, strict=True)):
        same(a, b, tolerance, f"input {i}")
        if isinstance(a, torch.Tensor) and not a.is_inference():
            assert (a._version > 0) == (b._version > 0), f"version of input {i}: {a._version}, eager {b._version}"
    assert aliasing([*ours_in, *actual]) == aliasing([*eager_in, *expected])
    objects, eager_objects = [*ours_in, *actual], [*eager_in, *expected]
    same_object = [[a is b for b in objects] for a in objects if isinstance(a, torch.Tensor)]
    assert same_object == [[a is b for b in eager_objects] for a in eager_objects if isinstance(a, torch.Tensor)]


def same(a: Any, b: Any, tolerance: float, what: str) -> None:
    if not isinstance(b, torch.Tensor):
        assert type(a) is type(b) and a == b, f"{what}: {a!r} for {b!r}"
        return
    assert isinstance(a, torch.Tensor), what
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} for {b.shape} {b.dtype}"
    if b.numel() > 1:
        assert a.stride() == b.stride(), f"{what}: strides {a.stride()} for {b.stride()}"
    assert a.requires_grad == b.requires_grad, f"{what}: requires_grad {a.requires_grad} for {b.requires_grad}"
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}")
