"""Running somebody's program with magneto in the place of torch.compile."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from magneto.api.optimize import compile as magneto_compile
from magneto.base.errors import UserError
from magneto.base.text import did_you_mean


def _compile_in_place(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """`Module.compile()`: the module's own call goes through magneto from now on."""
    self._compiled_call_impl = magneto_compile(self._call_impl, *args, **kwargs)


@contextmanager
def as_torch_compile() -> Iterator[None]:
    """Inside, `torch.compile` and `Module.compile` mean magneto's."""
    saved, saved_method = torch.compile, torch.nn.Module.compile
    torch.compile = magneto_compile  # type: ignore[assignment]
    torch.nn.Module.compile = _compile_in_place  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.compile, torch.nn.Module.compile = saved, saved_method  # type: ignore[method-assign]


def run_script(script: str, arguments: Sequence[str]) -> int:
    """Run a Python file as `python script arguments` would, with magneto as torch.compile; returns its exit status."""
    if not os.path.exists(script):
        raise UserError("U006", function="run", reason=f"there is no file {script!r}")
    saved_argv, saved_path = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        with as_torch_compile():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            return 1
        return stop.code or 0
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
    return 0


def load(target: str) -> Callable[..., Any]:
    """The function that ``file.py:name`` names."""
    file, _, name = target.rpartition(":")
    if not file or not os.path.exists(file):
        raise UserError("U006", function="bench", reason=f"{target!r} is not file.py:function")
    spec = importlib.util.spec_from_file_location("magneto_bench_target", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise UserError("U003", what="function", name=name, suggestion=did_you_mean(name, vars(module)))
    return getattr(module, name)
