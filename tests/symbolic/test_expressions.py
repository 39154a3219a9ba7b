"""Identity, order, printing, parsing, pickling, substitution and strides of integer expressions; index maps collapse."""

from __future__ import annotations

import copy
import ctypes
import pickle
import random
import shutil
import subprocess

import pytest

from magneto.symbolic import (
    Const,
    Sym,
    coefficient,
    compare,
    conj,
    evaluate,
    maximum,
    minimum,
    strided_form,
    substitute,
    to_c,
    to_python,
)
from tests.symbolic.parse import parse_expr
from tests.symbolic.random_exprs import SYMBOLS, random_expr

pytestmark = pytest.mark.torchfree

i0, i1, i2 = Sym("i0", 0, 511), Sym("i1", 0, 767), Sym("i2", 0, 11)
n = Sym("n", 0, 512 * 768 - 1)


def test_equal_expressions_are_one_object() -> None:
    assert i0 * 768 + i1 is i1 + 768 * i0
    assert (i0 + 1) * (i1 + 2) is i0 * i1 + 2 * i0 + i1 + 2
    assert i0 - i0 is Const(0)
    assert Sym("i0", 0, 511) is i0 and Sym("i0", 0, 510) is not i0


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((i0 * 768 + i1) // 768, i0),
        ((i0 * 768 + i1) % 768, i1),
        ((i0 * 768 + i1) // 64, 12 * i0 + i1 // 64),
        (((i0 * 768 + i1) // 64) % 12, i1 // 64),
        ((i0 * 12 + i2) * 64 // 768, i0),
        ((n // 768) * 768 + n % 768, n),
        ((n // 768) * 768 + ((n // 64) % 12) * 64 + n % 64, n),
        ((n // 768) * 768 + n % 768 + 5, n + 5),
        (((n + 12) // 12) * 12 + (n + 12) % 12, n + 12),
        ((n % 768) // 64, (n // 64) % 12),
        ((i2 * 64) % 768, i2 * 64),
        ((8 * i0 + 4) // 4, 2 * i0 + 1),
        (minimum(i2, 40), i2),
        (maximum(i2, 40), Const(40)),
        (compare("lt", i2, 12), Const(1)),
        (compare("ge", i2 - 12, 0), Const(0)),
        (compare("eq", 2 * i0, 5), Const(0)),
        (conj(compare("lt", i2, 12), compare("lt", i0, 5)), compare("lt", i0, 5)),
    ],
)
def test_simplifies(found, expected) -> None:
    assert found is expected


def test_symbolic_sizes() -> None:
    s, t = Sym("s", 2), Sym("t", 1)
    i, j = Sym("i0", 0, None, s), Sym("i1", 0, None, t)
    assert (i * t + j) // t is i
    assert (i * t + j) % t is j
    assert (i * t * 4 + j * 4) // (4 * t) is i
    assert (s * t) // s is t
    assert compare("lt", i, s) is Const(1)
    assert strided_form(i * t + j + 3, (i, j)) == ((t, Const(1)), Const(3))


def test_strides() -> None:
    assert coefficient(i0 * 768 + i1, i0) is Const(768)
    assert coefficient(i0 * 768 + i1, i2) is Const(0)
    assert coefficient(n // 7, n) is None
    assert strided_form(i0 * 768 + i1 * 2 + 5, (i0, i1, Const(0))) == ((Const(768), Const(2), Const(0)), Const(5))
    assert strided_form(i0 * i1, (i0, i1)) is None


def test_substitute() -> None:
    assert substitute(i0 * 768 + i1, {i0: n // 768, i1: n % 768}) is n
    assert substitute(n % 768, {n: Const(1000)}) is Const(232)


@pytest.mark.parametrize("seed", range(100))
def test_round_trips(seed: int) -> None:
    e = random_expr(random.Random(1000 + seed), 3)
    assert parse_expr(to_python(e), SYMBOLS) is e, to_python(e)
    assert pickle.loads(pickle.dumps(e)) is e
    assert copy.deepcopy(e) is e
    point = {"a": 2, "b": 3, "n": -3, "e": 8}
    assert eval(to_python(e), {"min": min, "max": max}, point) == evaluate(e, point)  # what was printed is Python


def test_order_does_not_depend_on_history() -> None:
    assert to_python(Sym("z") + Sym("y") * 2 + Sym("x", 0, 4)) == "x + 2 * y + z"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_c_text(tmp_path) -> None:
    exprs = [random_expr(random.Random(5000 + seed), 3) for seed in range(60)]
    cases = "\n".join(f"        case {k}: return {to_c(e)};" for k, e in enumerate(exprs))
    (tmp_path / "e.c").write_text(
        "typedef long long L;\n"
        "static L mg_floordiv(L a, L b) { L q = a / b; return q - ((a % b != 0) && ((a < 0) != (b < 0))); }\n"
        "static L mg_floormod(L a, L b) { return a - mg_floordiv(a, b) * b; }\n"
        "static L mg_min(L a, L b) { return a < b ? a : b; }\nstatic L mg_max(L a, L b) { return a > b ? a : b; }\n"
        f"L run(int k, L a, L b, L n, L e) {{\n    switch (k) {{\n{cases}\n    }}\n    return 0;\n}}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", tmp_path / "e.so", tmp_path / "e.c"], check=True)
    run = ctypes.CDLL(str(tmp_path / "e.so")).run
    run.restype = ctypes.c_longlong
    rng = random.Random(0)
    for k, e in enumerate(exprs):
        for _ in range(20):
            point = {"a": rng.randint(0, 3), "b": rng.randint(0, 5), "n": rng.randint(-4, 3), "e": 4 * rng.randint(0, 3)}
            assert run(k, *(ctypes.c_longlong(v) for v in point.values())) == evaluate(e, point), (to_c(e), point)
