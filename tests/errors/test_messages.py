"""User errors and warnings: each is raised or said by a small program, with eager's result where there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import magneto
from magneto import _C
from magneto.base.catalogue import CATALOGUE
from magneto.base.errors import MagnetoWarning, UserError
from tests.compare import Capturing, same

X = torch.arange(4.0) + 1
PACKAGE = Path(magneto.__file__).parent


def fn(x):
    return x.sin() + x.cos() * 2


def raises(id):
    return pytest.raises(UserError, match=rf"^\[{id}\]")


def warns(id):
    return pytest.warns(MagnetoWarning, match=rf"^\[{id}\]")


def test_something_that_cannot_be_called():
    with raises("U001"):
        magneto.optimize("eager")(3)
    with raises("U001"):
        magneto.compile(torch.nn.Linear)
    with raises("U001"):
        magneto.disable(3)


def test_unknown_backend():
    with pytest.raises(UserError, match="did you mean 'inductor'"):
        magneto.optimize("inducter")
    with raises("U002"):
        magneto.lookup_backend("zzz")


def test_unknown_mode_and_option():
    with raises("U003"):
        magneto.compile(fn, mode="fastest")
    with raises("U101"):
        magneto.compile(fn, options={"fuson": True})
    with raises("U102"):
        magneto.compile(fn, options={"fusion": "yes"})


def test_backend_that_returns_nothing():
    with raises("U005"):
        magneto.compile(fn, backend=lambda gm, inputs: None)(X)


def test_wrong_dimension():
    with raises("U006"):
        magneto.mark_dynamic(X, 3)


def test_recompiles_as_errors():
    compiled = magneto.optimize("eager")(lambda x, n: x + n)
    with magneto.config.patch(error_on_recompile=True):
        compiled(X, 1)
        with raises("U006"):
            compiled(X, 2)


def test_unsupported_python(monkeypatch):
    monkeypatch.setattr(_C, "SUPPORTED", False)
    with warns("W001"):
        compiled = magneto.optimize("eager")(fn)
    same(fn, compiled, X)


def test_no_compiler(tmp_path):
    with magneto.config.patch(compiler="/no/such/compiler", cache_dir=str(tmp_path)), warns("W002"):
        same(fn, magneto.optimize("inductor")(fn), X, tolerance=1e-6)


def test_compiler_that_fails(tmp_path):
    with magneto.config.patch(compiler_flags="-this-flag-does-not-exist", cache_dir=str(tmp_path)), warns("W003"):
        same(fn, magneto.optimize("inductor")(fn), X, tolerance=1e-6)


def test_internal_error(monkeypatch):
    from magneto.dynamo.machine.machine import SymbolicMachine

    def broken(self):
        raise AssertionError("a defect")

    monkeypatch.setattr(SymbolicMachine, "capture", broken)
    with warns("W010"):
        same(fn, magneto.optimize("eager")(fn), X)
    with magneto.config.patch(suppress_errors=False), pytest.raises(AssertionError, match="a defect"):
        magneto.optimize("eager")(lambda x: fn(x))(X)


def test_internal_error_at_one_instruction(monkeypatch):
    from magneto.dynamo.trackers import dispatch

    def broken(m, *args):
        m.effect("raise AssertionError('must not be replayed')")
        raise KeyError("a defect")

    monkeypatch.setitem(dispatch.TABLE, torch.special.entr, [((), broken)])

    def around(x):
        y = x + 1
        z = torch.special.entr(y)
        return z * 2

    backend = Capturing()
    with warns("W015"):
        same(around, magneto.optimize(backend)(around), X)
    assert backend.operations() == [["add"], ["mul"]]
    with pytest.raises(magneto.GraphBreak, match="B024"):
        magneto.optimize("eager", nopython=True)(around)(X)
    with magneto.config.patch(suppress_errors=False), pytest.raises(KeyError, match="a defect"):
        magneto.optimize("eager")(around)(X)


def test_too_many_variants():
    def add(x, name):
        return x + len(name)

    with magneto.config.patch(recompile_limit=2):
        compiled = magneto.optimize("eager")(add)
        same(add, compiled, X, "a")
        same(add, compiled, X, "bb")
        with warns("W011"):
            same(add, compiled, X, "ccc")
        for name in ("a", "bb", "ccc", "dddd"):
            same(add, compiled, X, name)


def test_backend_that_raises():
    def broken(gm, example_inputs):
        raise RuntimeError("no such hardware")

    with warns("W012"):
        same(fn, magneto.optimize(broken)(fn), X)


PROGRAM = """
import torch, warnings, magneto
warnings.simplefilter("always")
fn = lambda x: x.sin() + x.cos() * 2
x = torch.arange(4.0) + 1
assert torch.allclose(magneto.optimize("inductor")(fn)(x), fn(x))
print("right")
"""


def test_damaged_cache_entry(tmp_path):
    """In three processes: a loaded library must not be written to."""

    def run():
        env = {**os.environ, "MAGNETO_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.strip() == "right", done.stderr
        return done.stderr

    assert "W201" not in run()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-7] + b"garbage")
    assert "W201" in run()
    assert "W201" not in run(), "the entry was made again"


def test_cache_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with magneto.config.patch(cache_dir=str(tmp_path / "file")), warns("W202"):
        same(fn, magneto.optimize("inductor")(fn), X, tolerance=1e-6)


def test_every_row_is_used_somewhere():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "catalogue.py")
    used = set(re.findall(r"""["']([BUWI]\d{3})["']""", text))
    assert not set(CATALOGUE) - used, "rows that nothing raises"
