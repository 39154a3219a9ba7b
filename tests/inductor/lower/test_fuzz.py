"""Random chains of views, pointwise operations, reductions and library calls: lowered and interpreted against eager."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.inductor.lower.prim_graphs import Graph, check

aten = torch.ops.aten


def factorisations(draw: Any, n: int) -> tuple[int, ...]:
    """A random shape of n elements."""
    shape: list[int] = []
    while n > 1:
        f = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
        shape.append(f)
        n //= f
        if len(shape) == 4:
            shape[-1] *= n
            break
    return tuple(shape) or (1,)


def view(draw: Any, g: Graph, x: Any) -> Any:
    t = g.values[x]
    shape, rank = tuple(t.shape), t.dim()
    choice = draw(st.sampled_from(["reshape", "reshape", "transpose", "slice", "flip", "broadcast", "pad", "cat", "expand", "clone"]))
    if choice == "reshape":
        return g.reshape(x, factorisations(draw, max(t.numel(), 1)) if t.numel() else (0,))
    if choice == "transpose":
        return g.transpose(x, tuple(draw(st.permutations(range(rank)))))
    if choice == "slice":
        starts = [draw(st.integers(0, max(s - 1, 0))) for s in shape]
        limits = [draw(st.integers(min(a + 1, s), s)) for a, s in zip(starts, shape, strict=True)]
        return g.slice(x, tuple(starts), tuple(limits), tuple(draw(st.integers(1, 2)) for _ in shape))
    if choice == "flip":
        return g.flip(x, tuple(d for d in range(rank) if draw(st.booleans())))
    if choice == "broadcast" and rank < 4 and t.numel() < 300:
        at = draw(st.integers(0, rank))
        wide = (*shape[:at], draw(st.integers(1, 3)), *shape[at:])
        return g.broadcast_in_dim(x, wide, tuple(d for d in range(rank + 1) if d != at))
    if choice == "expand":
        wide = tuple(3 if s == 1 and t.numel() < 300 else s for s in shape)
        return g.broadcast_in_dim(x, wide, tuple(range(rank)))
    if choice == "pad" and t.numel() < 300:
        return g.pad(x, tuple(draw(st.integers(0, 1)) for _ in shape), tuple(draw(st.integers(0, 2)) for _ in shape), -1.5)
    if choice == "cat" and rank and t.numel() < 300:
        return g.cat([x] * draw(st.integers(1, 5)), draw(st.integers(0, rank - 1)))
    if choice == "clone":
        return g.call(aten.clone.default, x, memory_format=draw(st.sampled_from([torch.contiguous_format, torch.preserve_format])))
    return x


def pointwise(draw: Any, g: Graph, x: Any, pool: list[Any]) -> Any:
    name = draw(st.sampled_from(["neg", "abs", "sin", "tanh", "erf", "add", "mul", "sub", "maximum", "where", "scale", "square"]))
    if name in ("neg", "abs", "sin", "tanh", "erf"):
        return getattr(g, name)(x)
    same = [p for p in pool if g.values[p].shape == g.values[x].shape] or [x]
    if name == "scale":
        return g.mul(x, 0.5)
    if name == "square":
        return g.pow(x, 2.0) if draw(st.booleans()) else g.mul(x, x)
    other = draw(st.sampled_from(same))
    if name == "where":
        return g.where(g.lt(x, other), x, 0.25)
    return getattr(g, name)(x, other)


def reduce(draw: Any, g: Graph, x: Any) -> Any:
    t = g.values[x]
    dims = tuple(d for d in range(t.dim()) if draw(st.booleans())) or (0,)
    if t.dim() == 0 or any(t.shape[d] == 0 for d in dims):
        return x
    name = draw(st.sampled_from(["sum", "amax", "amin", "var", "argmax"]))
    if name == "var":
        v = g.var(x, dims, 0)
        return g.add(g.item(v, 0), g.item(v, 1))
    if name == "argmax":
        return g.convert_element_type(g.argmax(x, dims[0]), torch.float32)
    y = getattr(g, name)(x, dims)
    if draw(st.booleans()):  # back to the full shape, as softmax and layer norm do
        wide = g.broadcast_in_dim(y, tuple(t.shape), tuple(d for d in range(t.dim()) if d not in dims))
        return g.sub(x, wide)
    return y


def matrix(draw: Any, g: Graph, x: Any) -> Any:
    t = g.values[x]
    if t.dim() == 2 and t.numel():
        return (
            g.call(aten.mm.default, x, g.transpose(x, (1, 0)))
            if draw(st.booleans())
            else g.call(aten.mm.default, g.transpose(x, (1, 0)), x)
        )
    if t.dim() == 3 and t.numel():
        return g.call(aten.bmm.default, x, g.transpose(x, (0, 2, 1)))
    return g.call(aten.softmax.int, x, 0) if t.dim() else x


def random_graph(draw: Any) -> Graph:
    torch.manual_seed(0)
    g = Graph()
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    t = torch.randn(shape) / math.sqrt(max(1, math.prod(shape)))
    x = g.input(t.permute(*draw(st.permutations(range(len(shape))))))
    pool = [x]
    for _ in range(draw(st.integers(2, 12))):
        x = draw(st.sampled_from([pool[-1], pool[-1], draw(st.sampled_from(pool))]))
        kind = draw(st.sampled_from("vvvpppprm"))
        made = {
            "v": lambda: view(draw, g, x),
            "p": lambda: pointwise(draw, g, x, pool),
            "r": lambda: reduce(draw, g, x),
            "m": lambda: matrix(draw, g, x),
        }[kind]()  # noqa: B023
        if (
            g.values[made].dim() <= 5 and g.values[made].numel() <= 2000 and g.values[made].abs().max().nan_to_num() < 1e4
            if g.values[made].numel()
            else True
        ):
            pool.append(made)
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    g.output(pool[-1], *outputs)
    return g


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_random_graphs(data: Any) -> None:
    check(random_graph(data.draw), 1e-3)
