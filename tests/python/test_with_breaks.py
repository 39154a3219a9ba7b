"""Every program again, with a graph break after each of its statements: what a region holds must be rebuilt outside it, and read again from there."""

# ruff: noqa

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from typing import Any

import pytest
import torch

import magneto
from tests.compare import same
from tests.python.programs import Program

FILES = (
    "asked",
    "attention_switches",
    "class_checks",
    "class_hooks",
    "classes",
    "containers",
    "control",
    "corners",
    "functions",
    "iteration",
    "new_syntax",
    "tensors",
    "unknown_sizes",
    "tensor_objects",
    "numpy",
    "values",
    "inference_mode",
    "lazy_views",
    "made_records",
    "read_only",
    "texts",
)
PROGRAMS = [(name, program) for name in FILES for program in importlib.import_module(f"tests.python.test_{name}").programs]
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Breaking(ast.NodeTransformer):
    """Puts `graph_break()` after each statement (of nested functions too); `every` n-th only, counted from `first`."""

    def __init__(self, every: int, first: int) -> None:
        self.every = every
        self.count = first

    def _body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            found.append(statement)
            if isinstance(statement, _LEAVING + (ast.Global, ast.Nonlocal)):
                continue
            self.count += 1
            if self.count % self.every == 0:
                found.append(ast.parse("graph_break()").body[0])
        return found

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.ClassDef):
            return node
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                setattr(node, field, self._body(body))
        return node


def with_breaks(fn: Any, every: int, first: int) -> Any:
    """The function compiled again with breaks in it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    changed = ast.fix_missing_locations(Breaking(every, first).visit(tree))
    space = {**fn.__globals__, "graph_break": magneto.graph_break}
    exec(compile(changed, fn.__code__.co_filename, "exec"), space)
    return space[fn.__name__]


@pytest.mark.filterwarnings("ignore:.*recompile limit")
@pytest.mark.parametrize(("every", "first"), [(1, 0), (3, 0), (3, 1)], ids=["each", "third", "third+1"])
@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[f"{name}-{program.fn.__name__}" for name, program in PROGRAMS])
def test_program(name: str, program: Program, every: int, first: int) -> None:
    fn = with_breaks(program.fn, every, first)
    compiled = magneto.optimize("eager")(fn)
    same(fn, compiled, *program.args)
    same(fn, compiled, *program.args)


def test_the_breaks_are_there() -> None:
    (program,) = [program for _, program in PROGRAMS if program.fn.__name__ == "list_methods"]
    compiled = magneto.optimize("eager")(with_breaks(program.fn, 1, 0))
    compiled(*program.args)
    assert magneto.stats()["breaks"] >= 10
