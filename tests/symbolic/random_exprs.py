"""Random integer expressions over four symbols of small range."""

from __future__ import annotations

import random

from magneto.symbolic import Expr, Sym, compare, maximum, minimum, to_expr

A, B, N, E = Sym("a", 0, 3), Sym("b", 0, 5), Sym("n", -4, 3), Sym("e", 0, 12, divisor=4)
SYMBOLS = {s.name: s for s in (A, B, N, E)}


def random_expr(rng: random.Random, depth: int) -> Expr:
    if depth == 0:
        return rng.choice([A, B, N, E, to_expr(rng.randint(-5, 9))])
    x, y = random_expr(rng, depth - 1), random_expr(rng, depth - 1)
    k = rng.choice((1, 2, 3, 4, 6))
    return rng.choice([
        lambda: x + y, lambda: x - y, lambda: x * k, lambda: x // k, lambda: x % k, lambda: minimum(x, y), lambda: maximum(x, y),
        lambda: compare(rng.choice(("lt", "le", "gt", "ge", "eq", "ne")), x, y), lambda: x * k + y, lambda: (x * 4 + y) // 4,
    ])()  # fmt: skip
