"""Domains made equal: which dimensions of two loop nests walk the same memory together.

A *strided form* of an index is its terms (stride, size, symbol), smallest stride first. Two forms over one buffer describe the same walk if
they can be cut into the same pieces: a dimension of size 12 and stride 1 equals dimensions of sizes 4 (stride 1) and 3 (stride 4), which is how
(batch, sequence, hidden) meets (batch * sequence, hidden).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from magneto.base.dataclass import dataclass
from magneto.inductor.loops.ir import Indirect
from magneto.inductor.schedule.kernel import Dim
from magneto.symbolic import Add, Const, Expr, FloorDiv, Mod, Sym, add, mul, walk

Form = tuple[tuple[int, int, Sym], ...]


def strided_terms(index: Expr, sizes: Mapping[Sym, int]) -> tuple[Form, int] | None:
    """(terms, constant) of an index that is linear in symbols of the domain, None otherwise. Terms are sorted by stride."""
    if isinstance(index, Const):
        return (), index.value
    terms = index.terms if isinstance(index, Add) else ((index, 1),)
    form = []
    for term, stride in terms:
        if not isinstance(term, Sym) or isinstance(term, Indirect) or term not in sizes or stride <= 0:
            return None
        form.append((stride, sizes[term], term))
    form.sort(key=lambda t: (t[0], t[1]))
    return tuple(form), index.const if isinstance(index, Add) else 0


def row_major(dims: Sequence[Dim]) -> Form:
    """The form of a dense walk over the dimensions, the last one fastest."""
    form, stride = [], 1
    for dim in reversed(dims):
        form.append((stride, dim.size, dim.sym))
        stride *= dim.size
    return tuple(form)


_fresh = itertools.count()


def fresh_symbol(size: int) -> Sym:
    """A symbol that no domain has yet."""
    return Sym(f"d{next(_fresh)}", 0, size - 1)


@dataclass(slots=True)
class Alignment:
    """`pieces`: per common dimension its symbol, size, and the host's and guest's dimension it is part of. The maps take each side's symbols
    to expressions over the pieces (symbols that stay as they are do not occur in `host`)."""

    pieces: list[tuple[Dim, Sym, Sym]]
    host: dict[Expr, Expr]
    guest: dict[Expr, Expr]


def align(host: Form, guest: Form) -> Alignment | None:
    """The common refinement of two forms of one walk, None if they are different walks."""
    if len(host) == len(guest) and all(h[:2] == g[:2] for h, g in zip(host, guest, strict=True)):
        same = [(Dim(h[2], h[1]), h[2], g[2]) for h, g in zip(host, guest, strict=True)]
        return Alignment(same, {}, {g[2]: h[2] for h, g in zip(host, guest, strict=True) if h[2] is not g[2]})
    pieces: list[tuple[Dim, Sym, Sym]] = []
    h_left: list[list[Any]] = [list(t) for t in reversed(host)]
    g_left: list[list[Any]] = [list(t) for t in reversed(guest)]
    h_sizes = {t[2]: t[1] for t in host}
    while h_left and g_left:
        h, g = h_left[-1], g_left[-1]
        size = min(h[1], g[1])
        if h[0] != g[0] or h[1] % size or g[1] % size:
            return None
        sym = h[2] if h_sizes[h[2]] == size else fresh_symbol(size)
        pieces.append((Dim(sym, size), h[2], g[2]))
        for side, left in ((h, h_left), (g, g_left)):
            side[0], side[1] = side[0] * size, side[1] // size
            if side[1] == 1:
                left.pop()
    if h_left or g_left:
        return None
    return Alignment(pieces, _composed(pieces, 1), _composed(pieces, 2))


def _composed(pieces: Sequence[tuple[Dim, Sym, Sym]], side: int) -> dict[Expr, Expr]:
    """Each original symbol as the sum of its pieces, the first piece being the fastest."""
    parts: dict[Sym, list[Expr]] = {}
    steps: dict[Sym, int] = {}
    for dim, host, guest in pieces:
        origin = host if side == 1 else guest
        step = steps.get(origin, 1)
        parts.setdefault(origin, []).append(mul(dim.sym, step))
        steps[origin] = step * dim.size
    return {origin: add(0, 0, *terms) for origin, terms in parts.items() if not (len(terms) == 1 and terms[0] is origin)}


def replaced(dims: Sequence[Dim], alignment: Alignment, side: int) -> tuple[Dim, ...]:
    """The dimensions of one side (1 host, 2 guest) with those that were cut replaced by their pieces, slowest first."""
    by_origin: dict[Sym, list[Dim]] = {}
    for dim, host, guest in alignment.pieces:
        by_origin.setdefault(host if side == 1 else guest, []).append(dim)
    result: list[Dim] = []
    for dim in dims:
        result.extend(reversed(by_origin[dim.sym]) if dim.sym in by_origin else (dim,))
    return tuple(result)


def chain(size: int, divisors: set[int]) -> list[int]:
    """Steps of the pieces of a dimension, the largest first and 1 last: divisors of which each divides the next and the last the size; [1] where they are none."""
    steps = [1]
    for divisor in sorted(divisors):
        if divisor < size and size % divisor == 0 and divisor % steps[-1] == 0 and divisor != steps[-1]:
            steps.append(divisor)
    return steps[::-1]


def divided(indices: Sequence[Expr]) -> dict[Sym, set[int]]:
    """By which numbers each symbol is divided in the indices."""
    found: dict[Sym, set[int]] = {}
    for index in indices:
        for part in walk(index):
            if isinstance(part, FloorDiv | Mod) and isinstance(part.b, Const) and part.b.value > 1:
                for term, step in part.a.terms if isinstance(part.a, Add) else ((part.a, 1),):
                    if isinstance(term, Sym) and part.b.value % step == 0:
                        found.setdefault(term, set()).add(part.b.value // step)
    return found
