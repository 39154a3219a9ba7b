"""Every rewrite row agrees with the integers, over small ranges, wherever it fires; and every row fires."""

from __future__ import annotations

import itertools
import random

import pytest

from magneto.symbolic import RULES, Expr, Sym, add, evaluate, floordiv, mod, mul, to_expr
from magneto.symbolic.nodes import FloorDiv, Mod
from tests.symbolic.random_exprs import SYMBOLS, random_expr

pytestmark = pytest.mark.torchfree

A, B, N, E = SYMBOLS.values()
S = Sym("s", 1, 4)
I = Sym("i", 0, 3, S)  # i < s  # noqa: E741
SYMS = (A, B, N, E, S, I)

MEANING = {
    "floordiv": lambda x, y: x // y, "mod": lambda x, y: x % y, "lt": lambda x, y: int(x < y), "eq": lambda x, y: int(x == y),
    "min": min, "max": max,
}  # fmt: skip


def points(*exprs: Expr) -> list[dict[Sym, int]]:
    """Every assignment of the symbols that occur, respecting i < s."""
    syms = sorted(frozenset().union(*(e.free for e in exprs)), key=lambda s: s.name)
    if I in syms and S not in syms:
        syms.append(S)
    ranges = [range(s.lo, s.hi + 1, 4 if s is E else 1) for s in syms]
    rows = [dict(zip(syms, values, strict=True)) for values in itertools.product(*ranges)]
    return [r for r in rows if I not in r or r[I] < r[S]]


def raw_div(a: Expr, b: Expr) -> Expr:
    return FloorDiv.make(a, b, (0 if a.lo >= 0 else None, None if a.hi is None else max(a.hi, 0)))


def raw_mod(a: Expr, b: Expr) -> Expr:
    return Mod.make(a, b, (0, b.hi - 1))


def operands() -> list[tuple[Expr, Expr]]:
    rng = random.Random(0)
    atoms = [A, B, N, E, S, I, mul(I, S), mul(A, S), raw_div(add(mul(A, 7), B), to_expr(3)), raw_mod(add(mul(A, 7), B), to_expr(6)), raw_mod(N, to_expr(4)),
             raw_mod(add(A, mul(B, 4)), mul(S, 2)), raw_div(add(N, B), S)]  # fmt: skip
    divisors = [to_expr(k) for k in (1, 2, 3, 4, 6, 8, 12)] + [S, mul(S, 2)]
    out = [(to_expr(k), d) for k in (-7, -1, 0, 1, 5, 12) for d in divisors]
    for _ in range(700):
        terms = rng.sample(atoms, rng.choice((1, 1, 2, 2, 3)))
        if len(frozenset().union(*(t.free for t in terms))) > 4:
            continue
        a = add(rng.choice((0, 0, 1, -3, 4, 6)), 0, *(mul(t, rng.choice((1, 1, 2, 3, 4, 6, 8, 12, -1, -4))) for t in terms))
        out.append((a, rng.choice(divisors)))
        out.append((a, add(mul(rng.choice(atoms), rng.choice((1, 2, 4))), rng.choice((0, 1, 5)))))
    return out


OPERANDS = operands()


@pytest.mark.parametrize(("op", "rule"), [(op, r) for op, rows in RULES.items() for r in rows], ids=lambda x: getattr(x, "name", x))
def test_row(op: str, rule) -> None:
    fired = 0
    for a, b in OPERANDS:
        if op in ("floordiv", "mod") and not (b.lo is not None and b.lo > 0):
            continue
        result = rule.fn(a, b)
        if result is None:
            continue
        fired += 1
        if fired > 150:
            break
        for p in points(a, b, result):
            assert evaluate(result, p) == MEANING[op](evaluate(a, p), evaluate(b, p)), (rule.name, a, b, result, p)
    assert fired > 0, f"{rule.name} never fires: {rule.doc}"


def test_recombine_div_mod() -> None:
    n = Sym("n", 0, 35)
    for k, m in itertools.product((2, 3, 5, 6), (2, 3)):
        whole = mul(floordiv(n, k), k) + mod(n, k)
        assert whole is n
        nested = floordiv(n, k * m) * (k * m) + mod(floordiv(n, k), m) * k + mod(n, k)
        assert nested is n


def plain(rng: random.Random, depth: int):
    """The same construction as `random_expr`, as a Python function of a point."""
    if depth == 0:
        leaf = rng.choice([A, B, N, E, to_expr(rng.randint(-5, 9))])
        return lambda p: p[leaf] if isinstance(leaf, Sym) else leaf.value
    x, y = plain(rng, depth - 1), plain(rng, depth - 1)
    k = rng.choice((1, 2, 3, 4, 6))
    cmp = {"lt": int.__lt__, "le": int.__le__, "gt": int.__gt__, "ge": int.__ge__, "eq": int.__eq__, "ne": int.__ne__}
    ops = [
        lambda p: x(p) + y(p), lambda p: x(p) - y(p), lambda p: x(p) * k, lambda p: x(p) // k, lambda p: x(p) % k,
        lambda p: min(x(p), y(p)), lambda p: max(x(p), y(p)), None, lambda p: x(p) * k + y(p), lambda p: (x(p) * 4 + y(p)) // 4,
    ]  # fmt: skip
    chosen = rng.choice(range(10))
    if chosen == 7:
        op = cmp[rng.choice(("lt", "le", "gt", "ge", "eq", "ne"))]
        return lambda p: int(op(x(p), y(p)))
    return ops[chosen]


@pytest.mark.parametrize("seed", range(150))
def test_whole_simplifier(seed: int) -> None:
    """Random expressions, built through the simplifier and as plain Python: equal, and within the interval."""
    e, f = random_expr(random.Random(seed), 3), plain(random.Random(seed), 3)
    everywhere = [dict(zip((A, B, N, E), v, strict=True)) for v in itertools.product(range(4), range(6), range(-4, 4), range(0, 13, 4))]
    for p in random.Random(seed).sample(everywhere, 60):
        value = evaluate(e, p)
        assert value == f(p), (e, p)
        assert (e.lo is None or e.lo <= value) and (e.hi is None or value <= e.hi), (e, e.lo, e.hi, p)
