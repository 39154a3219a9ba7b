"""The machinery of the coverage sweep, on a few of its programs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.coverage_report import document, totals
from benchmarks.coverage_worker import measure
from benchmarks.sameness import differences
from benchmarks.zoo import Program, all_programs


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_differences_are_found():
    x = torch.ones(3)
    assert differences({"a": [x, 1]}, {"a": [x.clone(), 1]}, "r") == []
    assert differences({"a": [x, 1]}, {"a": [x + 1, 2]}, "r") == ["r['a'][0]: values differ by 0.5", "r['a'][1]: 1 against 2"]
    assert differences([x], (x,), "r") == ["r: list against tuple"]
    assert differences(x, x + 1e-7, "r") == ["r: rounding differ by 1.2e-07"]
    assert differences(x.requires_grad_(), torch.ones(3), "r") == ["r.requires_grad: True against False"]
    assert "stride" in differences(torch.ones(2, 3), torch.ones(3, 2).t(), "r")[0]
    assert differences(x * float("nan"), x * float("nan"), "r")[1:] == []


class Wrong(torch.nn.Module):
    """Gives another answer when it is compiled: the sweep must notice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) + (1.0 if torch.compiler.is_compiling() else 0.0)


def step(model, inputs):
    y = model(inputs["x"])
    return y, y.sum()


def fails(model, inputs):
    raise ValueError("no")


@pytest.mark.parametrize(("program", "status"), [(step, "wrong"), (fails, "eager")])
def test_statuses(program, status):
    row = measure(Program("made/up", lambda: (Wrong(), {"x": torch.ones(2, 3)}), {"train": program}), "train", "magneto")
    assert row["status"] == status


def _need_libraries():
    if any(importlib.util.find_spec(name) is None for name in ("timm", "torchvision", "transformers")):
        pytest.skip("needs timm, torchvision and transformers")


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("timm/lcnet_035", "train"),
        ("timm/vit_tiny_patch16_224", "eval"),
        ("torchvision/squeezenet1_1", "train"),
        ("transformers/BertForMaskedLM", "train"),
        ("transformers/LlamaForCausalLM", "decode"),
        ("transformers/T5ForConditionalGeneration", "decode"),
    ],
)
def test_single_graph(name, mode):
    _need_libraries()
    row = measure(all_programs()[name], mode, "magneto")
    assert (row["status"], row["graphs"], row["breaks"], row["second_call_graphs"]) == ("ok", 1, 0, 0), row


@pytest.mark.models
def test_sweep_in_processes(tmp_path):
    _need_libraries()
    command = [
        sys.executable,
        "-m",
        "benchmarks.coverage",
        "--only",
        "timm/lcnet_035",
        "--mode",
        "eval",
        "--side",
        "magneto",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "coverage.json").read_text("utf-8"))
    assert data["totals"]["magneto"]["single_graph"] == 1 == totals(data["rows"])["magneto"]["programs"]
    assert "timm/lcnet_035" in done.stderr
    assert "| single graph | 1 |" in " ".join(document(data).split())
