"""Expressions as text: Python (which gives the same object back) and C; evaluation and substitution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod

from magneto.symbolic.nodes import (
    CONSTRUCTORS,
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
    Or,
    Sym,
    linear,
    mul,
    rebuild,
    to_expr,
)

_CMP_TEXT = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}

Namer = Callable[[Sym], str]


def _plain_name(s: Sym) -> str:
    return s.name


def to_python(x: IntLike, name: Namer = _plain_name) -> str:
    """Python source of the expression. `eval` of it over ints gives its value; `parse_expr` gives the node back."""
    return _text(to_expr(x), name, "python", 0)


def to_c(x: IntLike, name: Namer = _plain_name) -> str:
    """C source over signed 64-bit operands. Quotients of operands that may be negative call `mg_floordiv` and `mg_floormod`;
    minima and maxima call `mg_min` and `mg_max`: the including file defines these four."""
    return _text(to_expr(x), name, "c", 0)


def _sum_text(x: Add, name: Namer, lang: str) -> str:
    out = ""
    terms = sorted(x.terms, key=lambda tc: tc[1] < 0)  # positive terms first: no leading minus where avoidable
    for t, c in terms:
        body = _text(t, name, lang, 2)
        piece = body if abs(c) == 1 else f"{abs(c)} * {body}"
        out += (f" - {piece}" if c < 0 else f" + {piece}") if out else (f"-{piece}" if c < 0 else piece)
    if x.const:
        out += f" - {-x.const}" if x.const < 0 else f" + {x.const}"
    return out


def _text(x: Expr, name: Namer, lang: str, level: int) -> str:
    """level: 0 anywhere, 1 operand of a sum or comparison, 2 operand of a product."""
    if isinstance(x, Const):
        text, own = str(x.value), 3 if x.value >= 0 else 0
    elif isinstance(x, Sym):
        text, own = name(x), 3
    elif isinstance(x, Add):
        text = _sum_text(x, name, lang)
        own = 1
    elif isinstance(x, Mul):
        text, own = " * ".join(_text(f, name, lang, 3) for f in x.factors), 2
    elif isinstance(x, FloorDiv | Mod):
        return _quotient_text(x, name, lang)
    elif isinstance(x, Min | Max):
        return _extreme_text(x, name, lang)
    elif isinstance(x, Cmp):
        text, own = f"{_text(x.a, name, lang, 1)} {_CMP_TEXT[x.op]} {_text(x.b, name, lang, 1)}", -1
    elif isinstance(x, And | Or):
        word = {("python", And): " and ", ("python", Or): " or ", ("c", And): " && ", ("c", Or): " || "}[lang, type(x)]
        text, own = word.join(_text(a, name, lang, 1) for a in x.args), -1
    else:
        raise AssertionError(type(x))
    return text if own >= level else f"({text})"


def _quotient_text(x: FloorDiv | Mod, name: Namer, lang: str) -> str:
    is_div = isinstance(x, FloorDiv)
    if lang == "python":
        return f"({_text(x.a, name, lang, 3)} {'//' if is_div else '%'} {_text(x.b, name, lang, 3)})"
    if x.a.lo is not None and x.a.lo >= 0 and x.b.lo is not None and x.b.lo > 0:
        return f"({_text(x.a, name, lang, 3)} {'/' if is_div else '%'} {_text(x.b, name, lang, 3)})"
    return f"{'mg_floordiv' if is_div else 'mg_floormod'}({_text(x.a, name, lang, 0)}, {_text(x.b, name, lang, 0)})"


def _extreme_text(x: Min | Max, name: Namer, lang: str) -> str:
    word = "min" if isinstance(x, Min) else "max"
    args = [_text(a, name, lang, 0) for a in x.args]
    if lang == "python":
        return f"{word}({', '.join(args)})"
    text = args[-1]
    for a in reversed(args[:-1]):
        text = f"mg_{word}({a}, {text})"
    return text


CONSTRUCTORS["show"] = to_python  # type: ignore[assignment]  # what repr() of a node prints


def evaluate(x: IntLike, values: Mapping[Sym, int] | Mapping[str, int]) -> int:
    """The value for given symbols (keys: Sym nodes or their names). KeyError for a missing one."""
    x = to_expr(x)
    memo: dict[Expr, int] = {}

    def go(e: Expr) -> int:
        found = memo.get(e)
        if found is None:
            found = memo[e] = _evaluate(e, go, values)
        return found

    return go(x)


def _evaluate(e: Expr, go: Callable[[Expr], int], values: Mapping[Sym, int] | Mapping[str, int]) -> int:
    if isinstance(e, Const):
        return e.value
    if isinstance(e, Sym):
        return values[e] if e in values else values[e.name]  # type: ignore[index]
    if isinstance(e, Add):
        return e.const + sum(c * go(t) for t, c in e.terms)
    if isinstance(e, Mul):
        return prod(go(f) for f in e.factors)
    if isinstance(e, FloorDiv):
        return go(e.a) // go(e.b)
    if isinstance(e, Mod):
        return go(e.a) % go(e.b)
    if isinstance(e, Min):
        return min(go(a) for a in e.args)
    if isinstance(e, Max):
        return max(go(a) for a in e.args)
    if isinstance(e, And):
        return int(all(go(a) for a in e.args))
    if isinstance(e, Or):
        return int(any(go(a) for a in e.args))
    assert isinstance(e, Cmp)
    a, b = go(e.a), go(e.b)
    return int({"lt": a < b, "le": a <= b, "eq": a == b, "ne": a != b}[e.op])


def substitute(x: IntLike, mapping: Mapping[Expr, IntLike]) -> Expr:
    """x with symbols (or any nodes) replaced, simplified anew."""
    x = to_expr(x)
    memo: dict[Expr, Expr] = {k: to_expr(v) for k, v in mapping.items()}
    keys = frozenset(k for k in mapping if isinstance(k, Sym))
    only_symbols = len(keys) == len(mapping)

    def go(e: Expr) -> Expr:
        found = memo.get(e)
        if found is not None:
            return found
        if only_symbols and keys.isdisjoint(e.free):
            found = e
        elif isinstance(e, Add):
            found = linear(e.const, [(go(t), c) for t, c in e.terms])
        elif isinstance(e, Mul):
            found = go(e.factors[0])
            for f in e.factors[1:]:
                found = mul(found, go(f))
        elif isinstance(e, FloorDiv):
            found = rebuild("floordiv", go(e.a), go(e.b))
        elif isinstance(e, Mod):
            found = rebuild("mod", go(e.a), go(e.b))
        elif isinstance(e, Cmp):
            found = rebuild(e.op, go(e.a), go(e.b))
        elif isinstance(e, Min | Max | And | Or):
            found = rebuild(e.constructor, *(go(a) for a in e.args))
        else:
            found = e
        memo[e] = found
        return found

    return go(x)


def coefficient(x: IntLike, sym: Expr) -> Expr | None:
    """The stride of x in `sym`: c with x = c * sym + (what does not depend on sym), c free of sym; None where x is not so."""
    x = to_expr(x)
    if not isinstance(sym, Sym) or sym not in x.free:
        return Const(0)
    items: list[tuple[Expr, int]] = []
    for t, c in x.terms if isinstance(x, Add) else ((x, 1),):
        if t is sym:
            items.append((Const(1), c))
        elif isinstance(t, Mul) and t.factors.count(sym) == 1:
            rest = list(t.factors)
            rest.remove(sym)
            factor: Expr = Const(1)
            for f in rest:
                factor = mul(factor, f)
            if sym in factor.free:
                return None
            items.append((factor, c))
        elif sym in t.free:
            return None
    return linear(0, items)


@lru_cache(4096)
def strided_form(x: IntLike, symbols: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], Expr] | None:
    """(strides, offset) with x = sum stride_d * symbols_d + offset, strides and offset free of the symbols; None where x is no such form.
    A symbol that is a constant (a dimension of size 1) has stride 0."""
    x = to_expr(x)
    strides: list[Expr] = []
    rest = x
    for s in symbols:
        c = coefficient(x, s)
        if c is None:
            return None
        strides.append(c)
        if isinstance(s, Sym):
            rest = linear(0, ((rest, 1), (mul(c, s), -1)))
    bound = {s for s in symbols if isinstance(s, Sym)}
    if not bound.isdisjoint(rest.free) or any(not bound.isdisjoint(c.free) for c in strides):
        return None
    return tuple(strides), rest
