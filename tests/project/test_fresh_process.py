"""What a new process loads: `import magneto` is fast, and compiling a plain module loads nothing of the incumbent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (without torch there is nothing to test here)

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._subclasses",
    "torch._decomp",
    "torch._refs",
    "torch._prims",
    "sympy",
)

COMPILE = """
import gc, json, sys, time
import torch
by_torch_itself = set(sys.modules)  # `import torch` alone loads some of them
start = time.perf_counter()
import magneto
seconds = time.perf_counter() - start
collections = []
count = lambda phase, info: collections.append(phase)
gc.callbacks.append(count)
magneto.optimize
gc.callbacks.remove(count)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.norm, self.conv = torch.nn.LayerNorm(16), torch.nn.Conv1d(4, 4, 3, padding=1)
        self.batch_norm, self.table = torch.nn.BatchNorm1d(4), torch.nn.Embedding(10, 16)

    def forward(self, ids):
        x = self.table(ids) + self.table.weight[ids]
        y = self.second(torch.nn.functional.gelu(self.first(x))) + x
        y = self.norm(y).softmax(-1)
        y = self.batch_norm(self.conv(y))
        if y.sum() > 1e9:
            return y
        return (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True) + 1e-5).sqrt()

model = Block().eval()
ids = torch.arange(8).reshape(2, 4)
with torch.no_grad():
    expected = model(ids)
    got = magneto.optimize("inductor")(model)(ids)
error = (got - expected).abs().max().item()
stats = magneto.stats()
print(json.dumps({"seconds": seconds, "collections": collections.count("stop"), "enabled": gc.isenabled(), "error": error, "graphs": stats["graphs"], "fallbacks": magneto.base.events.count("fallback"),
                  "loaded": sorted(m for m in set(sys.modules) - by_torch_itself if m.startswith(FORBIDDEN))}))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    import os

    env = {**os.environ, "MAGNETO_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "MAGNETO_VERIFY": "0", "PYTHONWARNINGS": "ignore"}
    program = f"FORBIDDEN = {FORBIDDEN!r}\n{COMPILE}"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_imports_are_not_walked_by_the_collector(report):
    assert report["enabled"] and report["collections"] <= 1  # one behind them, perhaps


def test_nothing_of_the_incumbent_is_loaded(report):
    assert report["loaded"] == []


def test_it_was_compiled_and_right(report):
    assert report["graphs"] == 2 and report["fallbacks"] == 0 and report["error"] < 1e-5


def test_import_is_fast(report):
    assert report["seconds"] < 0.5, "0.1 s on a quiet machine"
