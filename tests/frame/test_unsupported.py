"""On a Python that we do not know, the extension builds, imports and runs programs without capture. (torchfree)"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.frame.harness import ROOT

PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("magneto._C", sys.argv[1])
C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(C)
assert C.SUPPORTED is False
C.set_compiler(lambda *args: 1 / 0)
policy = C.Policy("p")
f = C.Optimized(lambda x, y=2: (x, y, C.active_policy()), policy)
assert f(1) == (1, 2, policy) and f(x=3) == (3, 2, policy)
assert C.Disabled(f.fn)(1) == (1, 2, None)
assert C.call_active(len, "ab") == 2 and C.call_inactive(len, "ab") == 2
assert not C.eval_frame_installed() and C.active_policy() is None and C.regions() == []
C.clear()
region = C.Region(len, (0,))
assert not region.valid and region.code is None
try:
    C.materialise(lambda: 1, C.Resume(2, ()))
except NotImplementedError as error:
    print(error)
"""


def test_degrades(tmp_path: Path) -> None:
    out = str(tmp_path / "_C.so")
    sources = glob.glob(os.path.join(ROOT, "csrc", "*.c"))
    command = ["cc", "-shared", "-fPIC", "-O0", "-DMG_FORCE_UNSUPPORTED", "-I", sysconfig.get_paths()["include"], *sources, "-o", out]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except OSError:
        pytest.skip("no C compiler")
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, out], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "not known to magneto" in done.stdout
