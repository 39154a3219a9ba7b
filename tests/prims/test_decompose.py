"""decompose: whole graphs keep their meaning, their outputs' memory and their random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import magneto
from magneto.base.flags import config
from magneto.graph import GraphFault, show, verify
from magneto.prims import Prim, prims
from magneto.prims.decompose import decompose
from tests.ops.checking import as_meta, run_graph

aten = torch.ops.aten


class Recorder:
    """Builds a functional graph by running it: `r(op, ...)` adds a call, tensors stand for their nodes."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        self.graph = fx.Graph()
        self.inputs = list(inputs)
        self.values: dict[fx.Node, Any] = {}
        self.nodes = [self._place(t) for t in inputs]

    def _place(self, tensor: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.values)}")
        return self._keep(node, tensor)

    def _keep(self, node: fx.Node, value: Any) -> fx.Node:
        metas = as_meta(value)
        node.meta["val"] = tuple(metas) if isinstance(metas, list) else metas
        self.values[node] = value
        return node

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        return self._keep(node, op(*fx.node.map_arg(args, self.values.get), **kwargs))

    def output(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        return self.graph

    def check(self, graph: fx.Graph) -> list[torch.Tensor]:
        verify(graph)
        results = run_graph(graph, self.inputs)
        expected = [self.values[n] for n in self.graph.output_node().args[0]]
        for node, result, value in zip(graph.output_node().args[0], results, expected, strict=True):
            torch.testing.assert_close(result, value)
            assert node.meta["val"].strides == value.stride()
        return results


def targets(graph: fx.Graph) -> list[str]:
    return [n.target.name if isinstance(n.target, Prim) else str(n.target) for n in graph.nodes if n.op == "call_function"]


X = torch.randn(4, 6)


def test_a_chain() -> None:
    r = Recorder(X, torch.randn(6, 5), torch.randn(5))
    y = r(aten.addmm.default, r.nodes[2], r.nodes[0], r.nodes[1])
    z = r(aten.gelu.default, y)
    graph = decompose(r.output(r(aten.sum.dim_IntList, z, [-1]), z))
    r.check(graph)
    assert targets(graph)[0] == "aten.addmm.default"
    assert all(not isinstance(n.target, torch._ops.OpOverload) for n in list(graph.nodes)[4:-1])


def test_equal_calls_become_one() -> None:
    r = Recorder(X, torch.randn(6))
    a = r(aten.add.Tensor, r.nodes[0], r.nodes[1])
    b = r(aten.mul.Tensor, r.nodes[0], r.nodes[1])
    graph = decompose(r.output(a, b))
    r.check(graph)
    assert targets(graph).count("broadcast_in_dim") == 1


def test_pieces_of_what_was_joined_are_its_parts() -> None:
    r = Recorder(X, torch.randn(2, 6), torch.randn(4, 2))
    whole = r(aten.cat.default, [r.nodes[0], r.nodes[1]], 0)
    inside, across = r(aten.slice.Tensor, whole, 0, 1, 4, 2), r(aten.slice.Tensor, whole, 0, 3, 5)
    other, none = r(aten.slice.Tensor, whole, 1, 1, 3), r(aten.slice.Tensor, whole, 0, 6, 6)
    part, first = r(aten.slice.Tensor, whole, 0, 4, 6), r(aten.select.int, whole, 0, -1)
    r.check(graph := decompose(r.output(inside, across, other, none, part, first)))
    assert sum(n.target == prims.slice and n.args[0].op == "placeholder" for n in graph.nodes) == 3 and "cat" in targets(graph)


def test_a_piece_written_in_place_is_what_was_written() -> None:
    """The gates of a recurrent cell: chunks of one product, each changed in place."""
    r = Recorder(X, *(torch.randn(4, 2) for _ in range(3)))
    whole, written = r.nodes[0], [r(aten.exp.default, node) for node in r.nodes[1:]]
    for k in (0, 2, 0, 1):
        was = r(aten.slice.Tensor, whole, 1, 2 * k, 2 * k + 2)
        whole = r(aten.slice_scatter.default, whole, r(aten.add.Tensor, was, written[k]), 1, 2 * k, 2 * k + 2)
    pieces = [r(aten.slice.Tensor, whole, 1, start, end) for start, end in ((0, 2), (2, 4), (4, 6), (5, 6))]
    r.check(graph := decompose(r.output(*(r(aten.mul.Tensor, piece, 2.0) for piece in pieces))))
    assert "cat" not in targets(graph)
    r = Recorder(X, torch.randn(4, 2), torch.randn(4, 0), torch.randn(4, 1))
    whole = r(aten.slice_scatter.default, r.nodes[0], r.nodes[1], 1, -4, -2)
    whole = r(aten.slice_scatter.default, whole, r.nodes[2], 1, 3, 3)
    whole = r(aten.slice_scatter.default, whole, r.nodes[3], 1, 3, 4)
    r.check(graph := decompose(r.output(whole, r(aten.slice.Tensor, whole, 1, 1, 5))))
    assert targets(graph).count("cat") == 1


def test_constants_of_different_type_or_sign_stay_apart() -> None:
    r = Recorder(X)
    graph = decompose(r.output(r(aten.div.Tensor, r.nodes[0], 0.0), r(aten.div.Tensor, r.nodes[0], -0.0)))
    r.check(graph)
    assert targets(graph) == ["div", "div"]


def test_equal_outputs_have_memory_of_their_own() -> None:
    r = Recorder(X)
    graph = decompose(r.output(r(aten.exp.default, r.nodes[0]), r(aten.exp.default, r.nodes[0])))
    first, second = r.check(graph)
    assert first.data_ptr() != second.data_ptr()


def test_an_output_that_becomes_an_input_is_copied() -> None:
    r = Recorder(X)
    graph = decompose(r.output(r(aten.clone.default, r.nodes[0]), r(aten.alias.default, r.nodes[0]), r.nodes[0]))
    results = r.check(graph)
    assert len({t.data_ptr() for t in results}) == 3
    assert graph.output_node().args[0][2].op == "placeholder"


def test_layouts_of_outputs_are_kept() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    r = Recorder(image)
    same = r(aten.clone.default, r.nodes[0], memory_format=torch.contiguous_format)
    half = r(aten._to_copy.default, r.nodes[0], dtype=torch.float64, memory_format=torch.contiguous_format)
    again = r(aten._to_copy.default, r.nodes[0], dtype=torch.float64)
    graph = decompose(r.output(same, half, again))
    verify(graph)
    for node, value in zip(graph.output_node().args[0], (same, half, again), strict=True):
        assert node.meta["val"].strides == r.values[value].stride()


def test_a_clone_between_operations_disappears() -> None:
    r = Recorder(X)
    graph = decompose(r.output(r(aten.neg.default, r(aten.clone.default, r.nodes[0]))))
    r.check(graph)
    assert targets(graph) == ["neg"]


def test_several_results() -> None:
    r = Recorder(X)
    pair = r(aten.max.dim, r.nodes[0], 1)
    graph = decompose(r.output(r(operator.getitem, pair, 1), r(operator.getitem, pair, 0)))
    r.check(graph)
    assert targets(graph) == ["argmax", "amax"]
    r = Recorder(X)
    pair = r(aten.topk.default, r.nodes[0], 2)
    graph = decompose(r.output(r(aten.neg.default, r(operator.getitem, pair, 0))))
    r.check(graph)
    assert "aten.topk.default" in targets(graph)


def test_random_operations_keep_their_order_and_are_never_dropped() -> None:
    r = Recorder(X)
    r(aten.rand.default, [3])
    second = r(aten.bernoulli.p, r.nodes[0], 0.5)
    third = r(aten.bernoulli.p, r.nodes[0], 0.5)
    graph = decompose(r.output(third, second))
    assert targets(graph) == ["aten.rand.default", "aten.bernoulli.p", "aten.bernoulli.p"]


def test_dead_calls_go() -> None:
    r = Recorder(X)
    r(aten.exp.default, r.nodes[0])
    graph = decompose(r.output(r(aten.neg.default, r.nodes[0])))
    assert targets(graph) == ["neg"]


def test_unknown_operations_stay_library_calls() -> None:
    r = Recorder(X)
    graph = decompose(r.output(r(aten.cumsum.default, r(aten.relu.default, r.nodes[0]), 1)))
    r.check(graph)
    assert targets(graph) == ["maximum", "aten.cumsum.default"]


def test_fallback_ops_are_never_decomposed() -> None:
    def build() -> Recorder:
        r = Recorder(X)
        r.output(r(aten.gelu.default, r(aten.relu.default, r.nodes[0])))
        return r

    with config.patch(fallback_ops="aten.gelu.default, aten.relu.default"):
        assert targets(decompose(build().graph)) == ["aten.relu.default", "aten.gelu.default"]
    assert "aten.gelu.default" not in targets(decompose(build().graph))


def test_complex_numbers_are_left_to_the_library() -> None:
    r = Recorder(torch.randn(3, dtype=torch.complex64))
    graph = decompose(r.output(r(aten.mul.Tensor, r.nodes[0], 2.0)))
    r.check(graph)
    assert targets(graph) == ["aten.mul.Tensor"]


def test_stacks_travel() -> None:
    r = Recorder(X)
    node = r(aten.gelu.default, r.nodes[0])
    node.meta["stack"] = (("model.py", 7, "forward"),)
    graph = decompose(r.output(node))
    assert all(n.meta.get("stack") == (("model.py", 7, "forward"),) for n in graph.nodes if n.op == "call_function")
    assert "model.py:7 forward" in show(graph)


def test_shown_graphs_run() -> None:
    r = Recorder(X, torch.randn(6))
    y = r(aten.native_layer_norm.default, r.nodes[0], [6], r.nodes[1], None, 1e-5)
    graph = decompose(
        r.output(r(operator.getitem, y, 0), r(aten.masked_fill.Scalar, r.nodes[0], r(aten.gt.Scalar, r.nodes[0], 0), float("-inf")))
    )
    namespace: dict[str, Any] = {}
    exec(show(graph, "layer", "after decompose"), namespace)  # noqa: S102
    for shown, expected in zip(namespace["layer"](*r.inputs), r.check(graph), strict=True):
        torch.testing.assert_close(shown, expected)


def broken(change: Callable[[fx.Graph], None]) -> fx.Graph:
    r = Recorder(X)
    graph = decompose(r.output(r(aten.gelu.default, r.nodes[0])))
    change(graph)
    return graph


def _call(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "call_function")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda g: _call(g).meta.pop("val"), "has no metadata"),
        (lambda g: _call(g).meta.update(val=as_meta(torch.zeros(2))), "claims"),
        (lambda g: setattr(_call(g), "target", torch.relu), "neither an ATen overload nor a prim"),
        (lambda g: setattr(_call(g), "target", aten.relu_.default), "writes its arguments"),
        (lambda g: _call(g).append(next(iter(g.nodes))), "before it is defined"),
        (lambda g: g.erase_node(g.output_node()), "0 outputs"),
        (
            lambda g: setattr(_call(g), "args", (_call(g).args[0], next(n for n in g.nodes if n.target is prims.erf))),
            "before it is defined",
        ),
    ],
)
def test_broken_graphs_are_noticed(change: Callable[[fx.Graph], None], reason: str) -> None:
    with pytest.raises(GraphFault, match=reason):
        verify(broken(change))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("bound", [300, -1, 2**40])
def test_bounds_that_a_type_does_not_hold(dtype: torch.dtype, bound: int) -> None:
    """Eager refuses them, or wraps them round."""

    def outcome(fn: Any) -> str:
        try:
            return repr(fn(torch.tensor([1, 100], dtype=dtype)))
        except RuntimeError as error:
            return repr(error)

    for fn in (lambda x: x.clamp(max=bound), lambda x: x.clamp(0, bound), lambda x: torch.clamp_min(x, bound)):
        magneto.reset()
        assert outcome(magneto.optimize("inductor")(fn)) == outcome(fn)


@pytest.mark.parametrize("rounding", [None, "floor", "trunc"])
def test_an_operation_of_numbers_alone(rounding):
    fn = lambda x: (x * torch.div(x.size(1), 2, rounding_mode=rounding), x.half() + torch.floor_divide(x.size(0), 2))
    x = torch.randn(7, 9)
    assert all(torch.equal(*pair) for pair in zip(magneto.optimize("inductor")(fn)(x), fn(x), strict=True))
    assert magneto.stats()["fallbacks"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_a_gpus_division_by_a_number_multiplies_by_its_reciprocal(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As eager's kernels there: buckets of distances are the logarithm's quotient rounded down, which is one less where the last bit is."""
    from magneto.prims.decompositions import pointwise

    monkeypatch.setattr(pointwise, "by_reciprocal", lambda x: True)
    x = (torch.arange(1, 2000).float() / 7).to(dtype)
    differ = False
    for number in (2.772588722239781, 3, 0.1, 49.0, 0.0, 1e300):
        r = Recorder(x)
        graph = decompose(
            r.output(r(aten.div.Tensor, r.nodes[0], number), r(aten.div.Tensor_mode, r.nodes[0], number, rounding_mode="trunc"))
        )
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        product = x.to(wide) * (1 / torch.tensor(number, dtype=wide))
        kept = dtype if dtype.is_floating_point else torch.float32
        quotient, whole = run_graph(graph, r.inputs)
        torch.testing.assert_close(quotient, product.to(kept), rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            torch.testing.assert_close(whole, product.trunc().to(kept), rtol=0, atol=0, equal_nan=True)
        differ |= not torch.equal(quotient, x / number)
    assert differ or dtype is torch.bfloat16  # rounding hides it there
