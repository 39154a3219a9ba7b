"""A process gives memory that it does not use back to the system before a large graph takes its own."""

from __future__ import annotations

import pytest
import torch

import magneto
from magneto.inductor import recall


@pytest.mark.parametrize(("rows", "times"), [(16, 0), (6000, 1)])
@torch.no_grad()
def test_large_graphs_only(rows: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[None] = []
    monkeypatch.setattr(recall, "give_back", lambda: called.append(None))
    x, w = torch.ones(rows, 1024), torch.ones(1024, 2048)
    compiled = magneto.compile(lambda x, w: ((x @ w).sin() @ w.t()).cos())
    for _ in range(2):
        compiled(x, w)
    assert len(called) == times


def test_where_the_allocator_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    recall.give_back()
