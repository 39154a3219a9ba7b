"""python -m magneto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magneto.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch

@torch.compile
def f(x):
    y = x * 2
    if y.sum() > 0:
        return y.sin()
    return y

class M(torch.nn.Module):
    def forward(self, x):
        return x + 1

m = M()
m.compile()
print(sys.argv[1:], __name__, tuple(f(torch.ones(3)).shape), m(torch.ones(2)).sum().item())
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_run_is_the_program_with_its_arguments_and_status(script, capsys):
    saved = sys.argv, sys.path[:], torch.compile, torch.nn.Module.compile
    assert main(["run", "--stats", script, "7", "--x"]) == 7
    captured = capsys.readouterr()
    assert captured.out.strip() == "['7', '--x'] __main__ (3,) 4.0"
    assert "graphs" in captured.err
    assert (sys.argv, sys.path, torch.compile, torch.nn.Module.compile) == saved


def test_explain_names_the_line(script, capsys):
    assert main(["explain", script]) == 0
    out = capsys.readouterr().out
    assert "B012" in out and "if y.sum() > 0:" in out


def test_report(script, tmp_path, capsys):
    target = tmp_path / "page.html"
    assert main(["report", "-o", str(target), script]) == 0
    assert "B012" in target.read_text()


def test_bench(tmp_path, capsys):
    (tmp_path / "case.py").write_text("import torch\ndef make():\n    return (lambda x: x.sin() + 1), (torch.ones(8),)\n")
    assert main(["bench", f"{tmp_path}/case.py:make", "--seconds", "0.05"]) == 0
    assert "times eager's speed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["run", "nowhere.py"], ["bench", "nowhere"], ["bench", "{file}:mke"]])
def test_mistakes_are_one_message(arguments, tmp_path, capsys):
    (tmp_path / "case.py").write_text("def make(): pass\n")
    assert main([argument.replace("{file}", f"{tmp_path}/case.py") for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("[U0") and "Traceback" not in err


def test_env_and_cache(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and torch.__version__ in out and "compiler" in out
    assert main(["cache", "--clear"]) == 0
    assert "entries" in capsys.readouterr().out


def test_as_a_module():
    run = subprocess.run([sys.executable, "-m", "magneto", "env"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "python" in run.stdout, run.stderr
