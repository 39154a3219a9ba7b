"""types.MappingProxyType: what is read through a view is what its mapping holds at that moment."""

from __future__ import annotations

import types

import pytest
import torch

import magneto
from tests.python.programs import Program, Programs, X, check

programs = Programs()
TABLE = {"a": 1, "b": 2}
VIEW = types.MappingProxyType(TABLE)


class Settings:
    table = VIEW


@programs.add()
def a_view_follows_its_dictionary(x):
    d = {"a": x}
    view = types.MappingProxyType(d)
    d["b"] = x + 1
    del d["a"]
    return list(view), len(view), "a" in view, view["b"], view.get("a", 3), view


@programs.add()
def a_view_from_outside_follows_too(x):
    TABLE["c"] = 3
    found = VIEW["c"], list(Settings.table.items()), VIEW is Settings.table
    del TABLE["c"]
    return x * found[0], found, list(reversed(VIEW)), dict(VIEW), {**VIEW, "z": x}, VIEW == TABLE, TABLE == VIEW, VIEW != {}


@programs.add()
def operators_of_views(x):
    view = types.MappingProxyType({"a": 1})
    target = {"q": 1}
    target |= view
    target.update(view)
    said = []
    for action in (lambda: view["no"], lambda: view | 3, lambda: view["no":1]):
        try:
            action()
        except (KeyError, TypeError) as error:
            said.append(str(error))
    try:
        view |= {"b": 1}
    except TypeError as error:
        said.append(str(error))
    return (
        x + 1,
        view | {"z": 1},
        {"z": 2} | view,
        view.copy(),
        list(view.keys()),
        list(view.values()),
        target,
        isinstance(view, dict),
        said,
    )


@programs.add(graphs=None)
def writes_through_views(x):
    try:
        VIEW["a"] = 3
    except TypeError as error:
        return x + 1, str(error), str(VIEW), repr(VIEW)


class Counted:
    count = 1


@programs.add(graphs=None)
def a_class_changes_under_its_view(x):
    view = vars(Counted)
    Counted.count = 5
    found = view["count"]
    Counted.count = 1
    return x * found


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def test_the_mapping_of_a_view_changes_between_calls() -> None:
    table = {"a": 1}

    class Holder:
        view = types.MappingProxyType(table)

    def read(x):
        return x * Holder.view["a"] + len(Holder.view)

    compiled = magneto.optimize("eager", nopython=True)(read)
    for step in range(3):
        table["a"] = step
        table[str(step)] = step
        assert torch.equal(compiled(X), read(X))
