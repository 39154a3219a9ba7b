"""The instruments of the benchmarks: errors, processor time, tables."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from benchmarks import gpu, measure, overhead, run
from benchmarks.models import CASES, build, largest_error, tensors_of, to_float64

NAN, INF = math.nan, math.inf


def test_errors():
    reference = torch.tensor([1.0, 2.0, NAN, INF])
    assert largest_error(reference.clone(), reference) == 0.0
    assert largest_error(torch.tensor([1.0, 2.5, NAN, INF]), reference) == 0.25
    assert largest_error(torch.tensor([NAN, 2.0, NAN, INF]), reference) == INF
    assert largest_error(torch.tensor([1.0, 2.0, 0.0, INF]), reference) == INF
    assert largest_error(torch.tensor([1.0, 2.0, NAN, -INF]), reference) == INF
    assert largest_error([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == INF
    assert largest_error([reference], [reference, reference]) == INF
    assert largest_error((), ()) == 0.0


def test_tensors_of_nested_results():
    a, b = torch.ones(1), torch.zeros(2)
    assert [t.shape[0] for t in tensors_of({"x": (a, [b]), "y": None})] == [1, 2]


def test_float64_of_nested_arguments():
    args = to_float64({"x": [torch.ones(2)], "ids": torch.tensor([1]), "n": 3})
    assert args["x"][0].dtype == torch.float64 and args["ids"].dtype == torch.int64 and args["n"] == 3


def test_processor_seconds_count_living_children():
    before = measure.processor_seconds()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.perf_counter() + 10
        while measure.processor_seconds() - before < 0.2 and time.perf_counter() < deadline:
            time.sleep(0.05)
        assert measure.processor_seconds() - before >= 0.2
    finally:
        child.kill()
        child.wait()


def test_cost_of_a_call():
    result, cost = measure.cost_of(lambda: sum(range(200_000)))
    assert result == 19999900000 and cost.wall > 0 and cost.cpu >= 0


def test_memory_peak_sees_what_is_freed_again():
    small = measure.memory_peak_mb(lambda: None)
    big = measure.memory_peak_mb(lambda: torch.ones(64, 1024, 1024).sum())
    assert math.isnan(big) or big - small > 200


def test_interleaving_gives_every_variant_its_turns():
    order = []
    times = measure.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0.0, least=4)
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4}
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]


def _results():
    base = {"model": "m", "mode": "inference"}
    return {
        "environment": {"cpu": "x"},
        "rows": [
            {**base, "compiler": "eager", "steady_seconds": 0.02, "error": 1e-6, "peak_mb": 100.0},
            {
                **base,
                "compiler": "magneto",
                "steady_seconds": 0.01,
                "error": 2e-6,
                "cold_cpu": 2.0,
                "second_cpu": 1.0,
                "graphs": 1,
                "breaks": 0,
            },
            {**base, "compiler": "torch.compile", "steady_seconds": 0.016, "error": 1e-6, "cold_cpu": 20.0, "second_cpu": 2.0},
        ],
    }


def test_ratios():
    assert run.ratios(_results()) == pytest.approx(
        {
            "inference: cold processor seconds, magneto / torch.compile": 0.1,
            "inference: second process, magneto / torch.compile": 0.5,
            "inference: speed, magneto over eager": 2.0,
            "inference: speed, magneto over torch.compile": 1.6,
            "inference: error, magneto / eager": 2.0,
        }
    )


def test_bars_of_single_models():
    results = _results()
    assert run.shortfalls(results) == []
    results["rows"][1] |= {"steady_seconds": 0.025, "cold_cpu": 6.0}
    assert run.shortfalls(results) == [
        ["m", "inference", "speed over eager", "0.80", 1.0],
        ["m", "inference", "speed over torch.compile", "0.64", 0.95],
        ["m", "inference", "cold_cpu of torch.compile's", "0.30", 0.25],
        ["m", "inference", "cold processor seconds", "6.0", 3.0],
    ]


def test_tables_show_failures_in_words(tmp_path):
    results = _results()
    results["rows"][2] = {"model": "m", "mode": "inference", "compiler": "torch.compile", "failed": "no luck"}
    text = run.markdown(results)
    assert "| m | inference | magneto | 2.00 |" in text and "no luck" in text
    run.write(results, tmp_path)
    assert {"results.json", "results.md"} <= {path.name for path in tmp_path.iterdir()}


def test_overhead_table():
    row = {"case": "f", "eager_us": 1.0}
    for name, extra in (("magneto", 1.0), ("torch.compile", 10.0)):
        row[name] = {"call_us": 2.0 + extra, "graphs_us": 2.0, "overhead_us": extra, "graphs": 1}
    assert "| f | 0.100 |" in overhead.markdown({"environment": {}, "rows": [row]})


def test_tiny_functions_run():
    for case in overhead.CASES:
        fn, args = case.make()
        assert fn(*args).shape == (4,)


def test_the_suite_has_at_least_twenty_models():
    assert len(CASES) >= 20 and list(CASES)[:2] == ["resnet18", "resnet50"]


@pytest.mark.parametrize("name", ["diffusion", "deepfm.bfloat16", "cell_loop"])
def test_models_of_our_own_run_in_their_type(name: str) -> None:
    model, args, kwargs = build(name)
    with torch.no_grad():
        (out,) = tensors_of(model(*args, **kwargs))
    assert out.isfinite().all() and out.dtype is (torch.bfloat16 if "bfloat16" in name else torch.float32)


class Allocator:
    """A stand-in for the device's: `log` is what is asked of it; a call of the contender takes memory for good, and some while it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.held, self.most = 10 << 20, 99 << 20
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name, lambda: None))
        for name, value in {"memory_allocated": 1, "max_memory_allocated": 1, "max_memory_reserved": 2}.items():
            monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: value * (self.most if "max" in name else self.held))

    def empty_cache(self) -> None:
        self.log.append("empty")

    def reset_peak_memory_stats(self) -> None:
        self.log.append("reset")
        self.most = self.held

    def call(self, kept: int, meanwhile: int) -> None:
        self.log.append("call")
        self.most = max(self.most, self.held + ((kept + meanwhile) << 20))
        self.held += kept << 20


def test_memory_of_a_process_is_the_whole_and_a_later_call(monkeypatch):
    allocator, growth = Allocator(monkeypatch), iter([(7, 30), (0, 5), (0, 5), (0, 5), (0, 5), (0, 4)])
    monkeypatch.setattr(gpu, "maker", lambda name: ((lambda wrap: lambda: allocator.call(*next(growth))), False, 0))
    assert gpu.memory_of("a row", "eager") == {
        "given": 10.0,
        "whole_allocated": 47.0,
        "whole_reserved": 94.0,
        "steady_allocated": 21.0,
        "steady_reserved": 42.0,
    }
    assert allocator.log == ["empty", "reset", *["call"] * 5, "empty", "reset", "call"]


def test_memory_goes_into_the_rows_and_stays(monkeypatch, capsys):
    sizes = {"magneto": 30.0, "torch.compile": 20.0, "torch.compile reduce-overhead": 60.0}

    def run(command, **options):
        name, who = command[-2:]
        if name == "gpt2":
            return subprocess.CompletedProcess(command, 1, "", "no luck")
        found = {f"{when}_{what}": sizes[who] for when in ("whole", "steady") for what in ("allocated", "reserved")}
        return subprocess.CompletedProcess(command, 0, f"said before\n{json.dumps(found)}\n", "")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    rows: dict[str, Any] = {"bert_base": {"ms": {"magneto": 1.0}}, "gpt2": {"memory_mib": {"magneto": {"steady_reserved": 1.0}}}}
    kept: list[int] = []
    gpu.memory(["bert_base", "dlrm", "gpt2"], list(sizes), 3, rows, lambda: kept.append(1), math.inf)
    assert len(kept) == 9 and "no luck" in capsys.readouterr().out
    assert rows["bert_base"]["ms"] == {"magneto": 1.0} and rows["gpt2"]["memory_mib"] == {}  # nothing old stands for what failed
    assert rows["dlrm"]["memory_mib"]["magneto"]["whole_reserved"] == 30.0
    found = gpu.summary(rows)
    assert found["inference: process memory, steady_reserved of torch.compile's"] == {"geometric_mean": 1.5, "most": 1.5, "rows": 2}
    assert found["all: process memory, whole_reserved of torch.compile reduce-overhead's"]["geometric_mean"] == 0.5
    assert not any(name.startswith("training: process memory") for name in found)
    monkeypatch.setattr(gpu, "measure", lambda name, contenders: {"ms": {}, "first_call_s": {}, "held_mib": {}, "errors": {}})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    gpu._row("dlrm", {}, rows)
    assert rows["dlrm"]["memory_mib"]["magneto"]["whole_reserved"] == 30.0 and rows["dlrm"]["ms"] == {}


def test_no_process_is_begun_behind_the_end(monkeypatch):
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **options: pytest.fail("begun"))
    rows: dict[str, Any] = {}
    gpu.memory(["dlrm"], ["eager"], 1, rows, lambda: None, -math.inf)
    assert rows == {"dlrm": {"memory_mib": {}}}
