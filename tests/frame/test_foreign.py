"""Other evaluation functions below, above and between ours: kept, used for frames that are not ours, restored. (torchfree)"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frame.harness import C


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = str(tmp_path_factory.mktemp("foreign") / "foreign.so")
    source = os.path.join(os.path.dirname(__file__), "foreign.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-I", sysconfig.get_paths()["include"], source, "-o", out]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    return ctypes.PyDLL(out)


@pytest.fixture(params=[False, True], ids=["to the default", "to the one found"])
def foreign(library: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    ctypes.c_int.in_dll(library, "go_on").value = request.param
    gc.collect()  # frames of finalisers of what other tests have left would be counted
    gc.disable()
    yield library
    gc.enable()
    assert not library.installed()


def default_installed() -> bool:
    """Not so where torch._dynamo has run in this process: its function stays, and what it found goes on to be called."""
    get, state = ctypes.pythonapi._PyInterpreterState_GetEvalFrameFunc, ctypes.pythonapi.PyInterpreterState_Get
    get.restype, get.argtypes, state.restype = ctypes.c_void_p, [ctypes.c_void_p], ctypes.c_void_p
    return bool(get(state()) == ctypes.cast(ctypes.pythonapi._PyEval_EvalFrameDefault, ctypes.c_void_p).value)


def entered(library: Any) -> int:
    return ctypes.c_long.in_dll(library, "entered").value


def f(x: int) -> Any:
    return "interpreted", helper(x)


def helper(x: int) -> int:
    return x


def compile_f() -> Any:
    C.set_compiler(lambda policy, state, missed: C.Region(lambda x: "compiled", (0,)) if state.code is f.__code__ else None)
    return C.Optimized(f, C.Policy())


def test_below(foreign: Any) -> None:
    g = compile_f()
    plain = C.Optimized(lambda: helper(3), C.Policy())
    more = 0 if default_installed() else 1
    foreign.install()
    try:
        before = entered(foreign)
        assert g(1) == "compiled"
        assert 3 <= entered(foreign) - before <= 3 + more  # the compiler, its region and the frame of this statement's callee go on to it
        assert plain() == 3
        assert foreign.installed() and not C.eval_frame_installed()
    finally:
        foreign.uninstall()
    assert not C.eval_frame_installed()


def test_above(foreign: Any) -> None:
    g = compile_f()

    def replaces() -> Any:
        foreign.install()
        try:
            return helper(5), g(1), f(2), foreign.installed(), C.eval_frame_installed()
        finally:
            foreign.uninstall()

    value, compiled, under_foreign, installed, ours = C.Optimized(replaces, C.Policy())()
    assert (value, compiled, installed, ours) == (5, "compiled", 1, False)
    assert under_foreign in (("interpreted", 2), "compiled")
    assert not C.eval_frame_installed()


def test_left_behind(foreign: Any) -> None:
    """It goes on top of us and stays when we end: both then point to each other."""
    g = compile_f()
    C.Optimized(foreign.install, C.Policy())()
    try:
        assert foreign.installed()
        assert f(1) == ("interpreted", 1)
        assert g(1) == "compiled"
        assert C.Optimized(lambda: f(4), C.Policy())() == "compiled"
        assert foreign.installed()
    finally:
        foreign.uninstall()
    # it restored ours, as it found it: harmless, and the next call puts things right
    assert f(1) == ("interpreted", 1)
    assert g(1) == "compiled"
    assert not C.eval_frame_installed()


def test_restored_after_a_reset(foreign: Any) -> None:
    g = compile_f()
    interp = ctypes.pythonapi.PyInterpreterState_Get
    interp.restype = ctypes.c_void_p
    put = ctypes.pythonapi._PyInterpreterState_SetEvalFrameFunc
    put.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    put.restype = None

    def replaces() -> Any:
        put(interp(), ctypes.cast(ctypes.pythonapi._PyEval_EvalFrameDefault, ctypes.c_void_p))
        inside = C.eval_frame_installed()
        return inside, g(1), C.eval_frame_installed()

    assert C.Optimized(replaces, C.Policy())() == (False, "compiled", False)
    assert not C.eval_frame_installed()
