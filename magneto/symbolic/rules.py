"""Simplification of //, %, min, max and comparisons: named rewrite rows, tried in order until one fires.

A row is `Rule(name, doc, fn)`; `fn(a, b)` returns the rewritten expression or None where the row does not apply. The tests
evaluate every row over small integers. Division and modulus round towards minus infinity, so the rows hold for negative
dividends too. In the documentation k, m, g stand for positive integers, s for any expression that is known to be positive.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from magneto.base.dataclass import dataclass
from magneto.symbolic.nodes import (
    CONSTRUCTORS,
    ONE,
    ZERO,
    Add,
    And,
    Cmp,
    Const,
    Expr,
    FloorDiv,
    IntLike,
    Max,
    Min,
    Mod,
    Mul,
    Nary,
    Or,
    Sym,
    add,
    linear,
    mul,
    terms_of,
    to_expr,
)


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    doc: str
    fn: Callable[[Expr, Expr], Expr | None]


# ---- facts -------------------------------------------------------------------------------------------------------------


def divisor_of(x: Expr) -> int:
    """A positive integer that divides x in every evaluation (0: x is 0)."""
    if isinstance(x, Const):
        return abs(x.value)
    if isinstance(x, Sym):
        return x.divisor
    if isinstance(x, Add):
        g = abs(x.const)
        for t, c in x.terms:
            g = gcd(g, divisor_of(t) * abs(c))
        return g
    if isinstance(x, Mul):
        product = 1
        for f in x.factors:
            product *= divisor_of(f)
        return product
    if isinstance(x, Min | Max):
        return gcd(*(divisor_of(a) for a in x.args))
    if isinstance(x, Mod):
        return gcd(divisor_of(x.a), divisor_of(x.b))
    return 1


def upper_bound(x: Expr) -> int | None:
    """An upper bound that also uses the symbolic sizes of symbols: i <= size - 1. Tighter than `x.hi` for i - size."""
    for _ in range(8):
        const, terms = terms_of(x)
        replaced = False
        items: list[tuple[Expr, int]] = []
        for t, c in terms:
            r = _at_most(t) if c > 0 else None
            replaced = replaced or r is not None
            items.append((t if r is None else r, c))
        if not replaced:
            break
        x = linear(const, items)
    return x.hi


def _at_most(t: Expr) -> Expr | None:
    if isinstance(t, Sym):
        return None if t.size is None else add(t.size, -1)
    if isinstance(t, Mul):  # i * s with s >= 0 is at most (size - 1) * s
        for n, f in enumerate(t.factors):
            rest = t.factors[:n] + t.factors[n + 1 :]
            if isinstance(f, Sym) and f.size is not None and all(r.lo is not None and r.lo >= 0 for r in rest):
                bound: Expr = add(f.size, -1)
                for r in rest:
                    bound = mul(bound, r)
                return bound
    return None


def known_lt(a: IntLike, b: IntLike) -> bool:
    """Is a < b in every evaluation? False when it is not known."""
    a, b = to_expr(a), to_expr(b)
    if a.hi is not None and b.lo is not None and a.hi < b.lo:
        return True
    top = upper_bound(linear(0, ((a, 1), (b, -1))))
    return top is not None and top < 0


def known_nonneg(x: IntLike) -> bool:
    x = to_expr(x)
    return x.lo is not None and x.lo >= 0


def within(x: Expr, size: Expr) -> bool:
    """Is 0 <= x < size known?"""
    return known_nonneg(x) and known_lt(x, size)


def quotient(x: Expr, y: Expr) -> Expr | None:
    """x / y where y divides x as a polynomial (y a constant or a monomial), else None."""
    if y is ONE:
        return x
    k, factors = _as_monomial(y)
    if k == 0 or factors is None:
        return None
    const, terms = terms_of(x)
    if const and (factors or const % k):
        return None
    items: list[tuple[Expr, int]] = []
    for t, c in terms:
        q = _divide_term(t, c, k, factors)
        if q is None:
            return None
        items.append(q)
    return linear(const // k, items)


def _as_monomial(y: Expr) -> tuple[int, tuple[Expr, ...] | None]:
    const, terms = terms_of(y)
    if not terms:
        return const, ()
    if const or len(terms) > 1:
        return 0, None
    t, c = terms[0]
    return c, t.factors if isinstance(t, Mul) else (t,)


def _divide_term(t: Expr, c: int, k: int, factors: tuple[Expr, ...]) -> tuple[Expr, int] | None:
    if factors:
        left = list(t.factors) if isinstance(t, Mul) else [t]
        for f in factors:
            if f not in left:
                return None
            left.remove(f)
        if c % k:
            return None
        rest: Expr = ONE
        for f in left:
            rest = mul(rest, f)
        return rest, c // k
    if c % k == 0:
        return t, c // k
    return None


def _split(a: Expr, y: Expr) -> tuple[Expr, Expr] | None:
    """a = q * y + r with as much as possible in q; None where q would be 0."""
    k, factors = _as_monomial(y)
    if k <= 0 or factors is None:
        return None
    const, terms = terms_of(a)
    q: list[tuple[Expr, int]] = []
    r: list[tuple[Expr, int]] = []
    for t, c in terms:
        d = _divide_term(t, c, k, factors)
        if d is not None:
            q.append(d)
        elif not factors and (abs(c) > k):
            q.append((t, c // k))
            r.append((t, c % k))
        else:
            r.append((t, c))
    q0, r0 = (0, const) if factors else divmod(const, k)
    if not q and not q0:
        return None
    return linear(q0, q), linear(r0, r)


def _grain(a: Expr, k: int) -> tuple[int, Expr, Expr] | None:
    """a = g * h + r with g > 1, g | k and 0 <= r < g: what lets (a // k) and (a % k) be taken of the smaller h."""
    const, terms = terms_of(a)
    candidates = {gcd(c * max(divisor_of(t), 1) if isinstance(t, Sym) else c, k) for t, c in terms}
    for g in sorted(candidates, reverse=True):
        if g <= 1:
            break
        h: list[tuple[Expr, int]] = []
        r: list[tuple[Expr, int]] = []
        for t, c in terms:
            if c % g == 0:
                h.append((t, c // g))
            else:
                r.append((t, c))
        if not h:
            continue
        rest = linear(const % g, r)
        if known_nonneg(rest) and rest.hi is not None and rest.hi < g:
            return g, linear(const // g, h), rest
    return None


# ---- rows: a // b ------------------------------------------------------------------------------------------------------


def _div_one(a: Expr, b: Expr) -> Expr | None:
    return a if b is ONE else None


def _div_const(a: Expr, b: Expr) -> Expr | None:
    if isinstance(a, Const) and isinstance(b, Const) and b.value:
        return Const(a.value // b.value)
    return ZERO if a is ZERO else None


def _div_range(a: Expr, b: Expr) -> Expr | None:
    if isinstance(b, Const) and b.value > 0 and a.lo is not None and a.hi is not None:
        q = a.lo // b.value
        return Const(q) if a.hi // b.value == q else None
    return ZERO if within(a, b) else None


def _div_exact(a: Expr, b: Expr) -> Expr | None:
    return quotient(a, b) if _nonzero(b) else None


def _div_split(a: Expr, b: Expr) -> Expr | None:
    if not _positive(b):
        return None
    parts = _split(a, b)
    return None if parts is None else add(parts[0], floordiv(parts[1], b))


def _div_grain(a: Expr, b: Expr) -> Expr | None:
    if isinstance(b, Const) and b.value > 1:
        found = _grain(a, b.value)
        if found is not None:
            return floordiv(found[1], Const(b.value // found[0]))
    return None


def _div_div(a: Expr, b: Expr) -> Expr | None:
    if isinstance(a, FloorDiv) and _positive(a.b) and _positive(b):
        return floordiv(a.a, mul(a.b, b))
    return None


def _div_mod(a: Expr, b: Expr) -> Expr | None:
    if isinstance(a, Mod) and _positive(a.b) and _positive(b):
        m = quotient(a.b, b)
        if m is not None:
            return mod(floordiv(a.a, b), m)
    return None


FLOORDIV_RULES: tuple[Rule, ...] = (
    Rule("div_one", "x // 1 -> x", _div_one),
    Rule("div_const", "constants are folded; 0 // s -> 0", _div_const),
    Rule("div_range", "x // s -> q if the interval of x lies within [q*s, q*s + s)", _div_range),
    Rule("div_exact", "(s*x) // s -> x", _div_exact),
    Rule("div_split", "(s*x + y) // s -> x + y // s", _div_split),
    Rule("div_grain", "(g*x + r) // (g*k) -> x // k if 0 <= r < g", _div_grain),
    Rule("div_div", "(x // s) // k -> x // (s*k)", _div_div),
    Rule("div_mod", "(x % (s*k)) // s -> (x // s) % k", _div_mod),
)


# ---- rows: a % b -------------------------------------------------------------------------------------------------------


def _mod_const(a: Expr, b: Expr) -> Expr | None:
    if b is ONE or a is ZERO:
        return ZERO
    if isinstance(a, Const) and isinstance(b, Const) and b.value:
        return Const(a.value % b.value)
    return None


def _mod_range(a: Expr, b: Expr) -> Expr | None:
    if isinstance(b, Const) and b.value > 0 and a.lo is not None and a.hi is not None:
        q = a.lo // b.value
        return add(a, -q * b.value) if a.hi // b.value == q else None
    return a if within(a, b) else None


def _mod_divides(a: Expr, b: Expr) -> Expr | None:
    if isinstance(b, Const) and b.value:
        return ZERO if divisor_of(a) % b.value == 0 else None
    return ZERO if _nonzero(b) and quotient(a, b) is not None else None


def _mod_split(a: Expr, b: Expr) -> Expr | None:
    if not _positive(b):
        return None
    parts = _split(a, b)
    return None if parts is None else mod(parts[1], b)


def _mod_mod(a: Expr, b: Expr) -> Expr | None:
    """Of a sum: every Mod term whose modulus b divides may be replaced by its dividend."""
    if not _positive(b):
        return None
    const, terms = terms_of(a)
    found = False
    items: list[tuple[Expr, int]] = []
    for t, c in terms:
        if isinstance(t, Mod) and _positive(t.b) and (t.b is b or quotient(mul(t.b, c), b) is not None):
            items.append((t.a, c))
            found = True
        else:
            items.append((t, c))
    return mod(linear(const, items), b) if found else None


def _mod_grain(a: Expr, b: Expr) -> Expr | None:
    if isinstance(b, Const) and b.value > 1:
        found = _grain(a, b.value)
        if found is not None:
            g, h, r = found
            return add(mul(mod(h, Const(b.value // g)), g), r)
    return None


MOD_RULES: tuple[Rule, ...] = (
    Rule("mod_const", "constants are folded; x % 1 -> 0; 0 % s -> 0", _mod_const),
    Rule("mod_range", "x % s -> x - q*s if the interval of x lies within [q*s, q*s + s)", _mod_range),
    Rule("mod_divides", "(s*x) % s -> 0, also by divisibility facts", _mod_divides),
    Rule("mod_split", "(s*x + y) % s -> y % s", _mod_split),
    Rule("mod_mod", "(c*(x % m) + y) % k -> (c*x + y) % k if k divides c*m", _mod_mod),
    Rule("mod_grain", "(g*x + r) % (g*k) -> g*(x % k) + r if 0 <= r < g", _mod_grain),
)


def _positive(b: Expr) -> bool:
    return b.lo is not None and b.lo > 0


def _nonzero(b: Expr) -> bool:
    return (b.lo is not None and b.lo > 0) or (b.hi is not None and b.hi < 0)


# ---- rows: comparisons, min, max ---------------------------------------------------------------------------------------


def _lt_known(a: Expr, b: Expr) -> Expr | None:
    if a is b:
        return ZERO
    if known_lt(a, b):
        return ONE
    top = upper_bound(linear(0, ((b, 1), (a, -1))))
    return ZERO if top is not None and top <= 0 else None


def _eq_known(a: Expr, b: Expr) -> Expr | None:
    if a is b:
        return ONE
    d = linear(0, ((a, 1), (b, -1)))
    if isinstance(d, Const):
        return ONE if d.value == 0 else ZERO
    if known_lt(a, b) or known_lt(b, a):
        return ZERO
    const, terms = terms_of(d)
    g = gcd(*(c * divisor_of(t) for t, c in terms))
    return ZERO if g and const % g else None


def _cmp_gcd(a: Expr, b: Expr) -> Expr | None:
    """g*x < k -> x < ceil(k / g): both sides over the common factor of the terms."""
    const, terms = terms_of(linear(0, ((a, 1), (b, -1))))
    g = gcd(*(c for _, c in terms))
    if g <= 1:
        return None
    left = linear(0, [(t, c // g) for t, c in terms])
    return compare("lt", left, Const(-(const // g)))


LT_RULES: tuple[Rule, ...] = (
    Rule("lt_known", "a < b -> 0 or 1 if the bounds decide it", _lt_known),
    Rule("lt_gcd", "g*x < k -> x < ceil(k/g)", _cmp_gcd),
)
EQ_RULES: tuple[Rule, ...] = (Rule("eq_known", "a == b -> 0 or 1 if bounds or divisibility decide it", _eq_known),)


def _min_known(a: Expr, b: Expr) -> Expr | None:
    if a is b or known_lt(a, add(b, 1)):
        return a
    return b if known_lt(b, add(a, 1)) else None


def _max_known(a: Expr, b: Expr) -> Expr | None:
    if a is b or known_lt(a, add(b, 1)):
        return b
    return a if known_lt(b, add(a, 1)) else None


MIN_RULES: tuple[Rule, ...] = (Rule("min_known", "min(a, b) -> a if a <= b is known", _min_known),)
MAX_RULES: tuple[Rule, ...] = (Rule("max_known", "max(a, b) -> b if a <= b is known", _max_known),)

RULES: dict[str, tuple[Rule, ...]] = {
    "floordiv": FLOORDIV_RULES, "mod": MOD_RULES, "lt": LT_RULES, "eq": EQ_RULES, "min": MIN_RULES, "max": MAX_RULES,
}  # fmt: skip


# ---- constructors ------------------------------------------------------------------------------------------------------

_MEMO: dict[tuple[str, Expr, Expr], Expr] = {}
_MEMO_LIMIT = 100_000


def _simplify(op: str, a: Expr, b: Expr) -> Expr | None:
    for rule in RULES[op]:
        result = rule.fn(a, b)
        if result is not None:
            return result
    return None


def _memoised(op: str, a: Expr, b: Expr, make: Callable[[Expr, Expr], Expr]) -> Expr:
    key = (op, a, b)
    found = _MEMO.get(key)
    if found is None:
        result = _simplify(op, a, b)
        found = make(a, b) if result is None else result
        if len(_MEMO) >= _MEMO_LIMIT:  # bounds memory in long-lived processes; only speed is lost
            _MEMO.clear()
        _MEMO[key] = found
    return found


def floordiv(a: IntLike, b: IntLike) -> Expr:
    """a // b, rounding towards minus infinity."""
    a, b = to_expr(a), to_expr(b)
    if b is ZERO:
        raise ZeroDivisionError(f"{a} // 0")
    return _memoised("floordiv", a, b, _make_floordiv)


def _make_floordiv(a: Expr, b: Expr) -> Expr:
    lo = hi = None
    if _positive(b):
        if isinstance(b, Const):
            lo = None if a.lo is None else a.lo // b.value
            hi = None if a.hi is None else a.hi // b.value
        else:
            lo = 0 if known_nonneg(a) else a.lo
            hi = a.hi if a.hi is not None and a.hi >= 0 else None
    return FloorDiv.make(a, b, (lo, hi))


def mod(a: IntLike, b: IntLike) -> Expr:
    """a % b with the sign of b, as in Python."""
    a, b = to_expr(a), to_expr(b)
    if b is ZERO:
        raise ZeroDivisionError(f"{a} % 0")
    return _memoised("mod", a, b, _make_mod)


def _make_mod(a: Expr, b: Expr) -> Expr:
    lo = hi = None
    if _positive(b):
        lo = 0
        hi = None if b.hi is None else b.hi - 1
        if known_nonneg(a) and a.hi is not None:
            hi = a.hi if hi is None else min(hi, a.hi)
    return Mod.make(a, b, (lo, hi))


def _extreme(op: str, cls: type[Nary], xs: tuple[IntLike, ...]) -> Expr:
    flat: list[Expr] = []
    for x in map(to_expr, xs):
        flat.extend(x.args if isinstance(x, cls) else (x,))
    kept: list[Expr] = []
    for x in flat:
        n = 0
        while n < len(kept):
            winner = _simplify(op, kept[n], x)
            if winner is kept[n]:
                break
            if winner is not None:
                del kept[n]
            else:
                n += 1
        else:
            kept.append(x)
    if len(kept) == 1:
        return kept[0]
    pick = min if op == "min" else max
    los = [k.lo for k in kept]
    his = [k.hi for k in kept]
    if op == "min":
        lo = None if None in los else pick(x for x in los if x is not None)
        hi = min((x for x in his if x is not None), default=None)
    else:
        lo = max((x for x in los if x is not None), default=None)
        hi = None if None in his else pick(x for x in his if x is not None)
    if len(kept) == 2 and isinstance(total := add(*kept), Const):  # half of it lies between them
        half = total.value // 2
        if op == "min":
            hi = half if hi is None else min(hi, half)
        else:
            lo = total.value - half if lo is None else max(lo, total.value - half)
    return cls.make(tuple(sorted(kept, key=lambda k: k.key)), (lo, hi))


def minimum(*xs: IntLike) -> Expr:
    return _extreme("min", Min, xs)


def maximum(*xs: IntLike) -> Expr:
    return _extreme("max", Max, xs)


def compare(op: str, a: IntLike, b: IntLike) -> Expr:
    """A 0/1 expression; op is one of lt le gt ge eq ne. Kept forms are lt and eq and ne, with the constant on the right."""
    a, b = to_expr(a), to_expr(b)
    if op == "gt":
        return compare("lt", b, a)
    if op == "le":
        return compare("lt", a, add(b, 1))
    if op == "ge":
        return compare("lt", b, add(a, 1))
    if op == "ne":
        known = _memoised("eq", a, b, _make_eq)
        if isinstance(known, Const):
            return Const(1 - known.value)
        return Cmp.make("ne", known.a, known.b) if isinstance(known, Cmp) else Cmp.make("ne", a, b)
    if op == "eq":
        return _memoised("eq", a, b, _make_eq)
    return _memoised("lt", a, b, _make_lt)


def _sides(a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """a ? b with negative terms and the constant moved to the right: both sides have positive coefficients only."""
    const, terms = terms_of(linear(0, ((a, 1), (b, -1))))
    left = linear(max(const, 0), [(t, c) for t, c in terms if c > 0])
    right = linear(max(-const, 0), [(t, -c) for t, c in terms if c < 0])
    return left, right


def _make_lt(a: Expr, b: Expr) -> Expr:
    return Cmp.make("lt", *_sides(a, b))


def _make_eq(a: Expr, b: Expr) -> Expr:
    left, right = _sides(a, b)
    return Cmp.make("eq", *((right, left) if right.key < left.key else (left, right)))


def _logic(cls: type[Nary], unit: Expr, zero: Expr, xs: tuple[IntLike, ...]) -> Expr:
    flat: dict[Expr, None] = {}
    for x in map(to_expr, xs):
        for y in x.args if isinstance(x, cls) else (x,):
            if y is zero:
                return zero
            if y is not unit:
                flat[y] = None
    if not flat:
        return unit
    if len(flat) == 1:
        return next(iter(flat))
    return cls.make(tuple(sorted(flat, key=lambda k: k.key)), (0, 1))


def conj(*xs: IntLike) -> Expr:
    """Logical and of 0/1 expressions."""
    return _logic(And, ONE, ZERO, xs)


def disj(*xs: IntLike) -> Expr:
    """Logical or of 0/1 expressions."""
    return _logic(Or, ZERO, ONE, xs)


def _comparison(op: str) -> Callable[..., Expr]:
    return lambda a, b: compare(op, a, b)


CONSTRUCTORS.update(floordiv=floordiv, mod=mod, min=minimum, max=maximum)
CONSTRUCTORS.update({"and": conj, "or": disj})
CONSTRUCTORS.update({op: _comparison(op) for op in ("lt", "le", "gt", "ge", "eq", "ne")})
