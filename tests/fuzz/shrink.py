"""Makes a failing case small: statements, steps, setup lines and expressions are taken away as long as it still fails."""

from __future__ import annotations

import ast
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator

from tests.fuzz.grammar import Case, compiles

Fails = Callable[[Case], bool]
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def shrink(case: Case, fails: Fails, seconds: float = 90.0) -> Case:
    """The smallest case found within `seconds`."""
    end = time.monotonic() + seconds

    def still(candidate: Case) -> bool:
        return time.monotonic() < end and fails(candidate)

    before = None
    while before != case and time.monotonic() < end:
        before = case
        case = _steps(case, still)
        case = _program(case, still)
        case = _setup(case, still)
    return case


def _steps(case: Case, still: Fails) -> Case:
    i = len(case.steps) - 1
    while i >= 0:
        candidate = dataclasses.replace(case, steps=case.steps[:i] + case.steps[i + 1 :])
        if candidate.steps and still(candidate):
            case = candidate
        i -= 1
    return case


def _setup(case: Case, still: Fails) -> Case:
    lines = case.setup.splitlines()
    for i in reversed(range(len(lines))):
        candidate = dataclasses.replace(case, setup="\n".join(lines[:i] + lines[i + 1 :]))
        if still(candidate):
            case, lines = candidate, lines[:i] + lines[i + 1 :]
    return case


def _program(case: Case, still: Fails) -> Case:
    """One pass over the edits; after a success the list of edits is made anew, from the same place."""
    i = 0
    while True:
        edits = list(_edits(ast.parse(case.program)))
        if i >= len(edits):
            return case
        candidate = dataclasses.replace(case, program=edits[i]())
        if (
            candidate.program != case.program
            and len(candidate.program) <= len(case.program)
            and compiles(candidate.program)
            and still(candidate)
        ):
            case = candidate
        else:
            i += 1


def _edits(tree: ast.Module) -> Iterator[Callable[[], str]]:
    """Functions that give the text of a changed program."""
    nodes = list(ast.walk(tree))
    for n, node in enumerate(nodes):
        for field in BLOCKS:
            block = getattr(node, field, None)
            if isinstance(block, list):
                for length in (8, 4, 2, 1):
                    for i in range(0, len(block), length):
                        if len(block) >= length:
                            yield lambda n=n, field=field, i=i, length=length: _without(tree, n, field, i, length)
                for i, child in enumerate(block):
                    if isinstance(child, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
                        yield lambda n=n, field=field, i=i: _unwrapped(tree, n, field, i)
    for n, node in enumerate(nodes):
        if isinstance(node, ast.expr) and not isinstance(node, (ast.Constant, ast.Name)):
            for m, child in enumerate(ast.iter_child_nodes(node)):
                if isinstance(child, ast.expr):
                    yield lambda n=n, m=m: _replaced(tree, n, m)


def _unparsed(tree: ast.Module) -> str:
    try:
        return ast.unparse(ast.fix_missing_locations(tree))
    except Exception:
        return "("  # does not compile: dropped


def _without(tree: ast.Module, n: int, field: str, i: int, length: int) -> str:
    changed = copy.deepcopy(tree)
    node = list(ast.walk(changed))[n]
    block = getattr(node, field)
    del block[i : i + length]
    if not block and field == "body":
        block.append(ast.Pass())
    return _unparsed(changed)


def _unwrapped(tree: ast.Module, n: int, field: str, i: int) -> str:
    changed = copy.deepcopy(tree)
    block = getattr(list(ast.walk(changed))[n], field)
    block[i : i + 1] = block[i].body
    return _unparsed(changed)


def _replaced(tree: ast.Module, n: int, m: int) -> str:
    """The n-th node, an expression, becomes its m-th child."""
    changed = copy.deepcopy(tree)
    nodes = list(ast.walk(changed))
    target, child = nodes[n], list(ast.iter_child_nodes(nodes[n]))[m]
    for node in nodes:
        for field, value in ast.iter_fields(node):
            if value is target:
                setattr(node, field, child)
            elif isinstance(value, list):
                setattr(node, field, [child if item is target else item for item in value])
    return _unparsed(changed)
