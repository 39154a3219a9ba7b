"""What is made of a graph for a CUDA device goes to disk and comes back the same. No device is needed: nothing is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magneto.base.flags import config
from magneto.inductor.compile import _host_half
from magneto.inductor.cuda import _planned
from magneto.inductor.halves import Back, Halves, Sent
from magneto.inductor.made import PARTS, Made, of_plain, plain_of
from magneto.inductor.runtime.kept import keep_data, recall_data
from tests.inductor.codegen.triton_cases import CASES
from tests.inductor.lower.prim_graphs import Graph

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["products beside loops", "a table of torch.bfloat16", "softmax and layer norm"])
@pytest.mark.parametrize("hosted", ["", "host", "behind"])
def test_comes_back_the_same(name: str, hosted: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    g = Graph()
    CASES[name][0](g)
    host = behind = None
    if hosted:
        beside = Graph()
        beside.output(beside.add(beside.input(torch.tensor(1.0)), 1.0))
        _, made_there = _host_half(beside.fx, "host")
        host, behind = (made_there, None) if hosted == "host" else (None, made_there)
    sent = Sent((2, 3), (3, 1), torch.float64, True)
    halves = Halves((sent,), ((0, 0), None, (1, 1)), (None, 2.5, None), (Back(2, 1, 1, 4),), (28, 4), (1,), ((0, 3), (1, 2)))
    made = Made(torch.device("cuda", 0), _planned(g.fx, "graph", {}, CPU), halves, {0: 1}, True, host, behind)
    with config.patch(cache_dir=str(tmp_path)):
        keep_data("a key", plain_of(made))
        data = recall_data("a key", PARTS)
        assert data is not None and of_plain(data) == made
        assert recall_data("another key", PARTS) is None
