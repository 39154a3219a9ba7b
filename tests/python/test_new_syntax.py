"""What is new in CPython 3.12 and 3.13: comprehensions inlined into their function, checked reads of variables, type parameters, batches."""

# ruff: noqa

from __future__ import annotations

import itertools
import sys
import textwrap

import pytest
import torch

import magneto
from tests.python.programs import Program, Programs, X, check

programs = Programs()


@programs.add()
def a_comprehension_has_its_own_variable(x):
    a = 1

    def read():
        return a

    values = [a for a in range(3)]
    readers = [(lambda: a) for a in range(3)]
    return values, a, read(), [reader() for reader in readers], [k + a for k in range(2)], x + 1


@programs.add()
def a_comprehension_that_raises_gives_the_variable_back(x):
    i = 10
    try:
        [i for i in (1, 2, missing)]
    except NameError as error:
        text = str(error)
    try:
        [1 // i for i in (1, 0)]
    except ZeroDivisionError:
        pass
    return i, text, x * i


@programs.add()
def comprehensions_in_a_class_body(x):
    class C:
        y = [z for z in range(3)]
        z = 5
        try:
            q = [nowhere for _ in range(1)]
        except NameError as error:
            q = str(error)

    return C.y, C.z, C.q, x + C.z


@programs.add()
def nested_comprehensions_reuse_a_name(x):
    out = []
    for k in range(3):
        out += [[k * j for j in range(k)] for k in range(k + 1)]
        out.append(k)
    named = [last := k for k in range(3)]
    return out, named, last, [(lambda: (k, last))() for k in range(2)], [x * k for k in range(2)]


@programs.add()
def variables_that_may_be_unbound(x):
    said = []
    if x.dim() > 5:
        v = 1
    try:
        said.append(v)
    except UnboundLocalError as error:
        said.append(str(error))
    v = 2
    del v
    try:
        said.append(v)
    except UnboundLocalError as error:
        said.append(str(error))
    [w for w in range(2)]
    try:
        said.append(w)
    except NameError as error:
        said.append(str(error))
    return said, x + 1


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


TYPE_PARAMETERS = """
def f(x):
    def same[T](value: T) -> T:
        return value

    class Box[T: int]:
        def __init__(self, value: T):
            self.value = value

        def get(self) -> T:
            return self.value

    type Alias[K] = dict[K, int]
    box = Box[int](3)
    names = [p.__name__ for p in (*same.__type_params__, *Box.__type_params__, *Alias.__type_params__)]
    return (same(x) + box.get()).tolist(), names, Box.__type_params__[0].__bound__, str(Alias.__value__), str(Alias[str]), Box.__orig_bases__[0].__origin__
"""

BATCHES = """
def f(x):
    it = itertools.batched(iter((x, x * 2, x * 3)), 2)
    first = next(it)
    try:
        itertools.batched([1], 0)
    except ValueError as error:
        text = str(error)
    sums = [sum(batch) for batch in itertools.batched([1, 2, 3, 4, 5], 2)]
    return torch.stack(first).tolist(), [len(batch) for batch in it], list(itertools.batched("abc", n=2)), text, sums
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="new in Python 3.12")
@pytest.mark.parametrize("text", [TYPE_PARAMETERS, BATCHES])
def test_text(text: str) -> None:
    namespace: dict = {"itertools": itertools, "torch": torch}
    exec(textwrap.dedent(text), namespace)
    fn = namespace["f"]
    compiled = magneto.optimize("eager")(fn)
    with magneto.config.patch(suppress_errors=False):
        for _ in range(2):
            assert str(compiled(X[0])) == str(fn(X[0]))
