"""A tiny builder of prim graphs for tests: records an FX graph and computes its meta values by running torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from magneto.graph.meta import TensorMeta
from magneto.inductor.loops.ir import Program
from magneto.inductor.loops.show import show_program
from magneto.inductor.lower import PRIM_ROWS, lower_graph
from magneto.prims import PRIMS
from tests.inductor.loops.interp import run_program
from tests.inductor.loops.parse import parse_program
from tests.inductor.loops.verify import verify_program


def _var(x: torch.Tensor, dims: Sequence[int], correction: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.var(x, list(dims), correction=correction), torch.mean(x, list(dims))


def _slice(x: torch.Tensor, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    return x[tuple(slice(a, b, c) for a, b, c in zip(starts, limits, steps, strict=True))]


def _pad(x: torch.Tensor, lo: Sequence[int], hi: Sequence[int], value: float) -> torch.Tensor:
    out = torch.full([s + a + b for s, a, b in zip(x.shape, lo, hi, strict=True)], value, dtype=x.dtype, device=x.device)
    out[tuple(slice(a, a + s) for s, a in zip(x.shape, lo, strict=True))] = x
    return out


def _broadcast(x: torch.Tensor, shape: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    full = [1] * len(shape)
    for s, d in zip(x.shape, dims, strict=True):
        full[d] = s
    return x.reshape(full).expand(tuple(shape))


def _reduce(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dims: fn(x, dim=tuple(dims))


def _each_dim(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        for d in sorted(dims, reverse=True):
            x = fn(x, d)
        return x

    return run


TORCH: dict[str, Callable[..., Any]] = {
    "convert_element_type": lambda x, dtype: x.to(dtype), "where": torch.where, "neg": torch.neg, "bitwise_not": torch.bitwise_not,
    "sum": _reduce(torch.sum), "amax": _reduce(torch.amax), "amin": _reduce(torch.amin), "prod": _each_dim(torch.prod),
    "any": _each_dim(torch.any), "all": _each_dim(torch.all), "argmax": torch.argmax, "argmin": torch.argmin, "var": _var,
    "broadcast_in_dim": _broadcast, "reshape": torch.reshape, "transpose": torch.permute, "slice": _slice, "flip": torch.flip,
    "cat": torch.cat, "pad": _pad, "iota": lambda n, dtype, device: torch.arange(n, dtype=dtype, device=device),
    "full": lambda shape, value, dtype, device: torch.full(shape, value, dtype=dtype, device=device),
    "index_select": torch.index_select, "gather": torch.gather, "div": torch.true_divide, "floordiv": torch.floor_divide,
    "window_max": PRIMS["window_max"], "window_argmax": PRIMS["window_argmax"], "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
}  # fmt: skip


@dataclass(frozen=True)
class Prim:
    """Stands for a row of the prim table: a name and a torch meaning."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return TORCH.get(self.name, getattr(torch, self.name, None))(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.name)


def _map(x: Any, fn: Callable[[Any], Any]) -> Any:
    return tuple(_map(y, fn) for y in x) if isinstance(x, list | tuple) else fn(x)


class Graph:
    """`g = Graph(); x = g.input(t); y = g.exp(x); g.output(y)`. Every call also runs, so that metas and expected outputs are eager's."""

    def __init__(self) -> None:
        self.fx = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[torch.Tensor] = []
        self.expected: tuple[Any, ...] = ()

    def input(self, t: torch.Tensor) -> fx.Node:
        node = self.fx.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(t)
        return self._record(node, t)

    def _record(self, node: fx.Node, value: Any) -> fx.Node:
        self.values[node] = value
        node.meta["val"] = _map(value, lambda t: TensorMeta.of(t) if isinstance(t, torch.Tensor) else t)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        def real(x: Any) -> Any:
            return self.values[x] if isinstance(x, fx.Node) else x

        value = target(*_map(args, real), **{k: _map(v, real) for k, v in kwargs.items()})
        return self._record(self.fx.call_function(target, args, kwargs), value)

    def item(self, node: fx.Node, n: int) -> fx.Node:
        import operator

        return self.call(operator.getitem, node, n)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.call(Prim(name), *args, **kwargs)

    def output(self, *nodes: Any) -> None:
        self.expected = tuple(self.values[n] if isinstance(n, fx.Node) else n for n in nodes)
        self.fx.output(tuple(nodes))


def check(g: Graph, tolerance: float = 1e-5, **options: Any) -> Program:
    """Lowers, verifies, round-trips and interprets the graph; compares values, dtypes, shapes and strides with eager's."""
    program = lower_graph(g.fx, **options)
    verify_program(program)
    text = show_program(program)
    parsed = parse_program(text, {c.buffer.name: c.value for c in program.constants}, {name: Prim(name) for name in PRIM_ROWS})
    assert parsed == program, text
    found = run_program(program, *g.inputs)
    assert len(found) == len(g.expected)
    for a, b in zip(found, g.expected, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.dtype is b.dtype and a.shape == b.shape, text
        assert all(s < 2 or x == y for s, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)), (a.stride(), b.stride(), text)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{m}\n{text}")  # noqa: B023
    return program


def check_compiled(g: Graph, tolerance: float = 1e-5) -> None:
    """The same for the compiled graph: kernels and plan in place of the interpreter."""
    from magneto.inductor.compile import compile_graph

    inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if isinstance(t, torch.Tensor) else t for t in g.inputs]
    found = compile_graph(g.fx)(*inputs)
    assert len(found) == len(g.expected)
    for a, b in zip(found, g.expected, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert a.dtype is b.dtype and a.shape == b.shape
        assert all(s < 2 or x == y for s, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)), (a.stride(), b.stride())
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
