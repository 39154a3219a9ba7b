"""The house can be read: lengths of files and functions, names that say nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchfree

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES = 650
FUNCTION_LINES = 60
NOTHING_NAMES = {"utils", "util", "misc", "common", "helpers", "helper"}

# A function may be longer when cutting it would hide its one idea: "path:name" -> why.
LONG_FUNCTIONS: dict[str, str] = {}


def python_files() -> list[Path]:
    return sorted((ROOT / "magneto").rglob("*.py"))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_short():
    long = {str(path.relative_to(ROOT)): n for path in python_files() if (n := lines_of(path)) > FILE_LINES}
    assert not long, long


def test_functions_are_short():
    long = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                n = (node.end_lineno or node.lineno) - node.lineno + 1
                key = f"{path.relative_to(ROOT)}:{node.name}"
                if n > FUNCTION_LINES and key not in LONG_FUNCTIONS:
                    long.append(f"{key} {n}")
    assert not long, "\n" + "\n".join(long)


def test_names_say_something():
    assert not [str(path) for path in python_files() if path.stem in NOTHING_NAMES]


def test_the_whole_stays_readable():
    """The plan says 30,000 lines in all and 3,000 of C; these bounds are what we have (docs/design/decisions.md), and should go down."""
    native = [path for suffix in ("*.c", "*.h") for path in (ROOT / "csrc").glob(suffix)]
    assert sum(map(lines_of, native)) < 8_460, "csrc"
    assert sum(map(lines_of, python_files())) + sum(map(lines_of, native)) < 85_500


def test_annotations_are_lazy():
    """`from __future__ import annotations` in every file that has code."""
    missing = []
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        code = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
        if code and "from __future__ import annotations" not in text:
            missing.append(str(path.relative_to(ROOT)))
    assert not missing, missing


def test_every_file_says_what_it_is():
    silent = [
        str(p.relative_to(ROOT))
        for p in python_files()
        if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not silent, silent
