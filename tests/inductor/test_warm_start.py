"""A second process, which finds on disk what an equal graph has become, imports nothing that lowers graphs or writes kernels: seen in a process, and read from the sources for CUDA."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKING = ("lower", "loops", "schedule", "codegen", "compile", "cuda", "devices", "draws", "layout", "convolve", "convolve_cudnn")
TEXT = "magneto.inductor.codegen.cpp_preamble"  # what stands before kernels belongs to their names

PROGRAM = """
import json, sys, torch, magneto
from magneto.base import events
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 8))
x = torch.randn(2, 3, 6, 6)
if sys.argv[1] == "training":
    out = magneto.optimize("inductor", nopython=True)(net)(x)
    out.square().sum().backward()
    out = net[0].weight.grad
else:
    net.eval()
    with torch.no_grad():
        out = magneto.optimize("inductor", nopython=True)(net)(x)
print(json.dumps([events.counters().get("graphs_from_store", 0), out.double().sum().item(), sorted(sys.modules)]))
"""


def makes(name: str) -> bool:
    """Is that a module that makes kernels, or decides what they compute?"""
    parts = name.split(".")
    return parts[:2] == ["magneto", "inductor"] and len(parts) > 2 and parts[2] in MAKING and name not in (TEXT, "magneto.inductor.codegen")


@pytest.mark.parametrize("what", ["inference", "training"])
def test_nothing_that_makes_kernels_is_imported(what: str, tmp_path: Path) -> None:
    import json
    import os

    environment = {**os.environ, "MAGNETO_CACHE_DIR": str(tmp_path), "MAGNETO_VERIFY": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PROGRAM, what]
    found = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (cold, one, first), (warm, two, second) = found
    assert cold == 0 and warm == (2 if what == "training" else 1) and one == two
    assert any(map(makes, first))
    assert not list(filter(makes, second))
    if what == "inference":
        assert "magneto.prims.decompositions" not in second


def imported(module: str) -> set[str]:
    """Our modules that importing this one loads, read from the sources."""
    seen: set[str] = set()
    work = [module]
    while work:
        name = work.pop()
        path = ROOT / Path(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        work.append(name.rpartition(".")[0])
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("magneto"):
                work += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return seen


@pytest.mark.parametrize("module", ["recall", "made"])
def test_nor_by_what_loads_plans(module: str) -> None:
    assert "magneto.inductor.runtime.kept" in imported(f"magneto.inductor.{module}")
    assert not list(filter(makes, imported(f"magneto.inductor.{module}")))


def test_compiling_imports_them() -> None:
    for module in ("compile", "cuda"):
        assert any(map(makes, imported(f"magneto.inductor.{module}") - {f"magneto.inductor.{module}"}))


LAZY = """
import sys, torch, magneto
def exporting(x):
    return x - 1 if torch.onnx.is_in_onnx_export() else torch.sin(x)
x = torch.ones(2)
assert torch.equal(magneto.optimize("eager", nopython=True)(torch.sin)(x), x.sin())
print([name for name in ("torch.onnx", "numpy.random") if name in sys.modules])
assert torch.equal(magneto.optimize("eager", nopython=True)(exporting)(x), x.sin())
from torch.onnx import is_in_onnx_export
assert torch.equal(magneto.optimize("eager", nopython=True)(lambda x: x if is_in_onnx_export() else x + 1)(x), x + 1)
import numpy as np
def drawn(x):
    return x * float(np.random.RandomState(3).rand())
assert torch.equal(magneto.optimize("eager")(drawn)(x), drawn(x))
"""


def test_modules_that_torch_and_numpy_import_late_are_not_needed() -> None:
    before = "import torch, sys; print([name for name in ('torch.onnx', 'numpy.random') if name in sys.modules])"
    found = [subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False) for text in (before, LAZY)]
    assert found[1].returncode == 0, found[1].stderr
    assert found[0].stdout == found[1].stdout
