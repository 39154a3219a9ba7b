"""Operations on lists of tensors decompose to what eager does for each tensor."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from magneto.prims import Prim
from magneto.prims.decompose import decompose
from magneto.prims.decompositions.foreach import ROWS
from tests.ops.checking import as_meta, run_graph

SHAPES = ((3, 4), (5,), ())


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator) * 0.8 + 0.1 for shape in SHAPES]


def arguments(op: Any) -> list[Any]:
    """Lists of three tensors or numbers; a number, or a tensor of no dimensions, where one serves all."""
    made: list[Any] = []
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if kind == "List[Tensor]":
            made.append(tensors(position))
        elif argument.default_value is not None or argument.name == "dtype" or argument.kwarg_only:
            break
        else:
            made.append({"List[number]": [0.3, 0.7, 1.5], "Tensor": torch.tensor(0.3), "number": 0.3}[kind])
    return made


def nested_meta(value: Any) -> Any:
    return tuple(nested_meta(item) for item in value) if isinstance(value, (list, tuple)) else as_meta(value)


def decomposed(op: Any, args: list[Any]) -> tuple[list[Any], bool]:
    """What the decomposed graph of one call computes, and whether it is all prims."""
    graph = torch.fx.Graph()
    inputs: list[torch.Tensor] = []

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = as_meta(value)
        inputs.append(value)
        return node

    def items(node: torch.fx.Node, metas: Any) -> list[torch.fx.Node]:
        found = []
        for position, meta in enumerate(metas):
            item = graph.call_function(operator.getitem, (node, position))
            item.meta["val"] = meta
            found += items(item, meta) if isinstance(meta, (list, tuple)) else [item]
        return found

    placed = [place(arg) for arg in args]
    call = graph.call_function(op, tuple(placed))
    call.meta["val"] = nested_meta(op(*args))
    graph.output(tuple(items(call, call.meta["val"])))
    result = decompose(graph)
    prims = all(isinstance(n.target, Prim) or "clone" in str(n.target) for n in result.nodes if n.op == "call_function")
    return run_graph(result, inputs), prims


@pytest.mark.parametrize("name", [name for name in ROWS if "_foreach_" in name and "amp" not in name])
def test_as_eager(name: str) -> None:
    _, packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    args = arguments(op)
    results, prims = decomposed(op, args)
    assert prims
    for result, expected in zip(results, op(*args), strict=True):
        assert result.dtype is expected.dtype and result.shape == expected.shape
        torch.testing.assert_close(result, expected, rtol=3e-7, atol=1e-7)


def test_numbers_in_a_tensor_are_left_to_the_library() -> None:
    op = torch.ops.aten._foreach_addcmul.Tensor
    _, prims = decomposed(op, [tensors(0), tensors(1), tensors(2), torch.tensor([0.3, 0.7, 1.5])])
    assert not prims


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unscaling(bad: float | None, dtype: torch.dtype) -> None:
    gradients = [t.to(dtype) for t in tensors(0)]
    if bad is not None:
        gradients[1][2] = bad
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale.default
    results, prims = decomposed(op, [gradients, torch.zeros(1), torch.tensor([0.3])])
    assert prims
    scaled, found = op(gradients, torch.zeros(1), torch.tensor([0.3]))
    for result, expected in zip(results, [*scaled, found], strict=True):
        assert torch.equal(result.nan_to_num(), expected.nan_to_num()) and result.dtype is expected.dtype
