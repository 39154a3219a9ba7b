"""Named tuples made inside the function, and paths: nothing breaks, no class is compiled for twice. Programs run plain and traced (see programs.py)."""

# ruff: noqa

from __future__ import annotations

import collections
import os
import pathlib
from typing import Any

import pytest
import torch

import magneto
from tests.python.programs import X, Programs, check

programs = Programs()


@programs.add()
def named_tuple_inside(x):
    P = collections.namedtuple("P", "a b")
    p = P(x, x + 1)
    q = p._replace(a=x * 2)
    r = P._make([1, x])
    asked = list(p._asdict()), P._fields, isinstance(p, tuple), P.__name__, P.__module__ == __name__, len(p), repr(P(1, 2)), p[0] is x
    return p.a * p.b + q.a, r.a, asked


@programs.add()
def named_tuple_with_defaults(x):
    Out = collections.namedtuple("Out", ["loss", "n"], defaults=[3])
    first, second = Out(x.sum()), Out(loss=x.mean(), n=4)
    loss, n = first
    return loss + second.loss, n, second.n, type(first) is Out, first._field_defaults


@programs.add()
def named_tuple_refused(x):
    try:
        collections.namedtuple("P", "a class")
    except ValueError as error:
        return x + 1, str(error)


@programs.add(X, "/tmp/x")
def paths(x, p):
    q = pathlib.Path(p) / "a.txt"
    names = (
        str(q),
        q.suffix,
        q.stem,
        q.parent.name,
        os.path.join(p, "b"),
        os.path.basename(str(q)),
        os.fspath(q),
        q.with_suffix(".bin").name,
    )
    return x + len(q.parts), names


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Any) -> None:
    check(program)


def test_each_call_has_a_class_of_its_own() -> None:
    def program(x: torch.Tensor) -> Any:
        Out = collections.namedtuple("Out", "loss n")  # noqa: PYI024
        return Out(x.sum(), 1)

    compiled = magneto.optimize("eager", nopython=True)(program)
    first, second = compiled(X), compiled(X)
    assert type(first) is not type(second)
    assert type(first).__name__ == "Out" and first._fields == ("loss", "n") and type(first).__module__ == __name__
    assert magneto.stats()["graphs"] == 1
