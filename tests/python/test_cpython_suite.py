"""A selection of CPython's own tests: each method, traced, has the verdict that it has in plain Python (see benchmarks/language_tests.py for all)."""

from __future__ import annotations

import sys

import pytest

from benchmarks.language_tests import compare_modules
from magneto import _C

SELECTION = {
    "test_scope": "",
    "test_augassign": "",
    "test_binop": "",
    "test_property": "",
    "test_raise": "",
    "test_with": "",
    "test_class": "",
    "test_super": "",
    "test_compare": "",
    "test_userlist": "",
    "test_defaultdict": "",
    "test_global": "",
    "test_operator": "COperator",
    "test_named_expressions": "NamedExpressionScopeTest",
}


KNOWN: set[str] = set()
"""Differences that are known, and named in ROADMAP.md."""


@pytest.mark.skipif(not _C.SUPPORTED, reason="frames of this Python are not captured")
@pytest.mark.parametrize("module", SELECTION)
def test_same_verdicts(module: str) -> None:
    (comparison,) = compare_modules([module], ("plain", "traced"), SELECTION[module], processes=1, repeat=False)
    summary = comparison.summary()
    assert summary["compared"] and summary["entered"], f"nothing of {module} ran on {sys.version}"
    assert summary["differences"].keys() <= KNOWN
