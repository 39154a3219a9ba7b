"""The numpy interpreter: every prim, the programs of aot_autograd's tests, gradients, and what numpy has not (bfloat16)."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

import magneto
from magneto.graph.meta import TensorMeta
from magneto.prims import PRIMS, Prim
from magneto.prims.interpret import interpret
from magneto.prims.meanings.numpy import round_bfloat16
from tests.aot_autograd.differential import check
from tests.aot_autograd.test_functional import PROGRAMS
from tests.ops.checking import as_meta
from tests.prims.test_table import cases


def one_prim(prim: Prim, args: tuple[Any, ...]) -> tuple[fx.Graph, list[torch.Tensor], Any]:
    """(graph, inputs, torch's answer) of one call."""
    graph, inputs = fx.Graph(), []

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(inputs)}")
            node.meta["val"] = TensorMeta.of(value)
            inputs.append(value)
            return node
        return [place(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(prim, tuple(place(arg) for arg in args))
    answer = prim(*args)
    metas = as_meta(list(answer) if isinstance(answer, tuple) else answer)
    node.meta["val"] = metas
    results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(metas))] if isinstance(metas, list) else [node]
    for result, meta in zip(results, metas if isinstance(metas, list) else [metas], strict=True):
        result.meta["val"] = meta
    graph.output(tuple(results))
    return graph, inputs, answer


@pytest.mark.parametrize("name", list(PRIMS))
def test_every_prim(name: str) -> None:
    for args in cases(PRIMS[name]):
        for dtype in (None, torch.bfloat16):
            changed = tuple(a.to(dtype) if dtype and isinstance(a, torch.Tensor) and a.dtype is torch.float32 else a for a in args)
            if dtype and not any(isinstance(a, torch.Tensor) and a.dtype is dtype for a in changed):
                continue
            graph, inputs, answer = one_prim(PRIMS[name], changed)
            results = interpret(graph)(*inputs)
            for got, expected in zip(results, answer if isinstance(answer, tuple) else (answer,), strict=True):
                assert got.dtype is expected.dtype and got.stride() == expected.stride()
                tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(expected.dtype, 1e-6)
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_bfloat16_is_rounded_as_in_torch() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45])])
    with np.errstate(all="ignore"):
        rounded = torch.from_numpy(round_bfloat16(x))
    expected = torch.from_numpy(x).bfloat16().float()
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded.nan_to_num(0.0), expected.nan_to_num(0.0)) and torch.equal(rounded.isinf(), expected.isinf())


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    fn, make = PROGRAMS[name]
    torch.manual_seed(0)
    check(fn, *make(), backend="numpy", tolerance=1e-5, falls_back=None)


def test_a_model_and_its_gradients() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.GELU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 5),
        torch.nn.LayerNorm(5),
    )
    x, y = torch.randn(2, 3, 6, 6), torch.tensor([1, 3])

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y)

    traced = magneto.optimize("numpy", nopython=True)(loss)
    plain = torch.autograd.grad(loss(x, y), list(model.parameters()))
    ours = torch.autograd.grad(traced(x, y), list(model.parameters()))
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_indices_out_of_range_raise_eagers_error() -> None:
    def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(index, table)

    traced = magneto.optimize("numpy")(lookup)
    table = torch.randn(3, 2)
    assert torch.equal(traced(table, torch.tensor([0, 2])), lookup(table, torch.tensor([0, 2])))
    with pytest.raises(IndexError, match="index out of range in self"):
        traced(table, torch.tensor([0, 3]))
