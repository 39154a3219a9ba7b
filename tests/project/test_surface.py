"""The public names are exactly those that are documented (docs/design/architecture.md, section 10)."""

from __future__ import annotations

import inspect

import torch  # noqa: F401

import magneto

PUBLIC = {
    # running
    "optimize", "compile", "run", "disable", "reset",
    # looking
    "explain", "export", "inspect", "stats",
    # marking
    "allow_in_graph", "disallow_in_graph", "assume_constant_result", "graph_break", "is_compiling", "mark_dynamic", "mark_static",
    # backends
    "list_backends", "lookup_backend", "register_backend",
    # switches and errors
    "config", "MagnetoError", "GraphBreak", "Unsupported", "UserError", "InternalError", "MagnetoWarning", "__version__",
}  # fmt: skip


def test_all_is_the_documented_list():
    assert set(magneto.__all__) == PUBLIC


def test_every_name_is_there_and_says_what_it_does():
    for name in sorted(PUBLIC - {"__version__", "config"}):
        assert inspect.getdoc(getattr(magneto, name)), name


def test_version_is_the_projects():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert magneto.__version__ == project["version"]


def test_keywords_of_torch_compile():
    theirs = set(inspect.signature(torch.compile).parameters)
    ours = set(inspect.signature(magneto.compile).parameters)
    assert {"fullgraph", "dynamic", "backend", "mode", "options", "disable"} <= theirs & ours


def test_dir_lists_the_public_names():
    assert set(dir(magneto)) >= PUBLIC
