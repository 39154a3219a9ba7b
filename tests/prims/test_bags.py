"""Embedding bags by offsets as they are taken apart on a GPU, run on the CPU against the library's own (float64, of which that keeps each index's bag)."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch

from magneto.prims.decompose import decompose
from magneto.prims.decompositions import bags
from tests.prims.test_decompose import Recorder, targets

aten = torch.ops.aten
WAYS = [(0, False, -1), (0, True, -1), (0, True, 2), (0, False, 5), (1, False, -1), (1, False, 2)]  # mode, weighted?, padding
OFFSETS = [[0, 3, 3, 9, 20], [0, 0, 20], [0]]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bags, "on_gpu", lambda x: True)


def given(offsets: list[int], kind: torch.dtype = torch.int64, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Weight, indices, offsets, weights of indices; the last row is looked up by nobody."""
    torch.manual_seed(0)
    indices = torch.randint(0, 7, (20,), dtype=kind)
    indices[:3] = 2  # a bag of nothing but padding
    return torch.randn(8, 6, dtype=dtype), indices, torch.tensor(offsets, dtype=kind), torch.randn(20, dtype=dtype)


def bag(r: Recorder, mode: int, weighted: bool, padding: int, last: bool = False, op: Any = aten._embedding_bag.default) -> Any:
    w, i, o, s = r.nodes
    return r(op, w, i, o, False, mode, False, s if weighted else None, last, padding)


def items(r: Recorder, made: Any, *wanted: int) -> list[Any]:
    return [r(operator.getitem, made, n) for n in wanted]


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("way", "offsets"), itertools.product(WAYS, OFFSETS), ids=str)
def test_results(way: tuple[int, bool, int], offsets: list[int], kind: torch.dtype) -> None:
    r = Recorder(*given(offsets, kind))
    graph = decompose(r.output(*items(r, bag(r, *way), 0, 1)))
    r.check(graph)
    assert targets(graph).count("aten._embedding_bag_forward_only.default") == 1 and "aten._embedding_bag.default" not in targets(graph)
    if way[0] == 1:  # sums leave the sizes as they are, padding or not
        r = Recorder(*given(offsets, kind))
        r.check(decompose(r.output(*items(r, bag(r, *way), 0, 2))))
    r = Recorder(*given(offsets, kind))
    made = items(r, bag(r, *way, op=aten._embedding_bag_forward_only.default), 0)
    if len(offsets) > 1:  # the last one is the end
        made += items(r, bag(r, *way, last=True), 0, 1)
    r.check(decompose(r.output(*made)))


def test_sums_alone_need_no_sizes() -> None:
    r = Recorder(*given(OFFSETS[0]))
    assert len(targets(decompose(r.output(*items(r, bag(r, 0, True, -1), 0))))) == 2


@pytest.mark.parametrize(("way", "offsets"), itertools.product(WAYS, OFFSETS), ids=str)
def test_gradients(way: tuple[int, bool, int], offsets: list[int]) -> None:
    mode, weighted, padding = way
    w, i, o, s = given(offsets)
    out, places, sizes, largest = aten._embedding_bag(w, i, o, False, mode, False, s if weighted else None, False, padding)
    r = Recorder(torch.randn_like(out), i, places, sizes, largest, s, w, o)
    grad, index, place, size, most, sample, weight, offset = r.nodes
    scaled = sample if weighted else None
    found = [r(aten._embedding_bag_dense_backward.default, grad, index, place, size, most, 8, False, mode, scaled, padding)]
    if mode == 0:
        found.append(r(aten._embedding_bag_per_sample_weights_backward.default, grad, weight, index, offset, place, mode, padding))
    graph = decompose(r.output(*found))
    r.check(graph)
    assert not [name for name in targets(graph) if "_embedding_bag" in name] and "aten.embedding_dense_backward.default" in targets(graph)


def test_what_the_library_does() -> None:
    """Maxima, half types, gradients by frequency, and gradients that must have the same digits in every run."""
    w, i, o, s = given(OFFSETS[0])
    for mode, dtype in ((2, torch.float64), (1, torch.bfloat16)):
        r = Recorder(w.to(dtype), i, o, s)
        assert "aten._embedding_bag.default" in targets(decompose(r.output(*items(r, bag(r, mode, False, -1), 0))))
    _, places, sizes, largest = aten._embedding_bag(w, i, o, False, 1)
    before = torch.are_deterministic_algorithms_enabled()
    for scale, same in ((True, False), (False, True)):
        r = Recorder(torch.randn(5, 6, dtype=torch.float64), i, places, sizes, largest)
        call = r(aten._embedding_bag_dense_backward.default, *r.nodes, 8, scale, 1, None, -1)
        try:
            torch.use_deterministic_algorithms(same)
            assert "aten._embedding_bag_dense_backward.default" in targets(decompose(r.output(call)))
        finally:
            torch.use_deterministic_algorithms(before)
