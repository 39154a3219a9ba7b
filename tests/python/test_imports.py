"""Imports inside regions: the module's body, and what its decorators call, runs as CPython runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import magneto
from magneto import _C

BODY = """
def decorate(k):
    def inner(fn):
        return fn
    return inner

def row(i):
    return [i * j for j in range(3)]

TABLE = [row(i) for i in range(20)]
for i in range(20):
    @decorate(i)
    def last(x):
        return x * 2
"""


@pytest.mark.parametrize("nested", [False, True])
def test_an_import_is_not_captured(nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"magneto_test_imported_{nested}"
    (tmp_path / f"{name}.py").write_text(BODY, encoding="utf-8")
    (tmp_path / f"{name}_outer.py").write_text(
        f"from {name} import *\nfrom {name} import row\nROWS = [row(i) for i in range(20)]\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"{name}_outer" if nested else name
    namespace: dict[str, object] = {}
    exec(f"def fn(x):\n    import {module} as made\n    return made.last(x) + len(made.TABLE)", namespace)
    magneto.reset()
    optimised = magneto.optimize("eager")(namespace["fn"])
    try:
        for _ in range(2):
            torch.testing.assert_close(optimised(torch.ones(2)), torch.full((2,), 22.0))
        body = sys.modules[name]
        assert not _C.regions(body.row.__code__) and not _C.regions(body.decorate.__code__)
    finally:
        sys.modules.pop(name, None)
        sys.modules.pop(f"{name}_outer", None)
    assert magneto.stats()["graphs"] == 1


def test_a_name_that_a_module_does_not_have() -> None:
    def fn(x: torch.Tensor) -> object:
        found = []
        try:
            from math import no_such_function  # type: ignore[attr-defined]
        except ImportError as error:
            found.append((type(error).__name__, str(error), error.name, error.path, error.msg))
        try:
            from torch.nn.functional import no_such_loss  # type: ignore[attr-defined] # noqa: F401
        except ImportError as error:
            return x + 1, [*found, str(error)]
        return no_such_function(x)

    magneto.reset()
    optimised = magneto.optimize("eager", nopython=True)(fn)
    for _ in range(2):
        (ours, *errors), (plain, *expected) = optimised(torch.ones(2)), fn(torch.ones(2))
        assert torch.equal(ours, plain) and errors == expected
