"""Integer expressions: the node classes, interning, and the linear arithmetic (+, -, *) in canonical form.

Grammar (all values are mathematical integers; comparisons are 0 or 1; `//` and `%` round towards minus infinity, as Python's do):

    Expr := Const(value)
          | Sym(name, lo, hi, size, divisor)   lo <= sym <= hi (hi None: unbounded), sym < size, divisor | sym
          | Add(const, ((term, coefficient), ...))   terms are no Const and no Add, sorted, coefficients non-zero ints
          | Mul((factor, ...))       two or more factors, none a Const, an Add or a Mul, sorted: a monomial
          | FloorDiv(a, b) | Mod(a, b)         b is never 0 where the expression is evaluated
          | Min(args) | Max(args)
          | Cmp(op, a, b)  op in lt le eq ne   | And(args) | Or(args)  over 0/1 expressions

Nodes are hash-consed: two expressions that were built alike are the same object, so `is`, `==` and `hash` are identity and
cost nothing. Products are distributed over sums: equal polynomials are equal objects. Every node knows an interval
(`lo`, `hi`) of the values it can take. The interning table holds its nodes weakly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary

Key: TypeAlias = tuple[Any, ...]

CONSTRUCTORS: dict[str, Callable[..., Expr]] = {}
"""`floordiv`, `mod`, `min`, `max`, `lt` ...: filled by `rules.py`, which simplifies on top of this file."""


class Expr:
    """An integer expression. Immutable; compare with `is`. Build with operators, never by calling a node class directly."""

    __slots__ = ("__weakref__", "_free", "hi", "key", "lo")
    rank: ClassVar[int] = 0
    lo: int | None
    hi: int | None
    key: Key  # a total, reproducible order: terms print in the same order in every process
    _free: frozenset[Sym] | None

    def children(self) -> tuple[Expr, ...]:
        return ()

    @property
    def free(self) -> frozenset[Sym]:
        """The symbols that occur."""
        found = self._free
        if found is None:
            found = self._free = frozenset().union(*(c.free for c in self.children()))
        return found

    def __add__(self, other: IntLike) -> Expr:
        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: IntLike) -> Expr:
        return add(self, mul(other, -1))

    def __rsub__(self, other: IntLike) -> Expr:
        return add(other, mul(self, -1))

    def __neg__(self) -> Expr:
        return mul(self, -1)

    def __mul__(self, other: IntLike) -> Expr:
        return mul(self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: IntLike) -> Expr:
        return CONSTRUCTORS["floordiv"](self, other)

    def __rfloordiv__(self, other: IntLike) -> Expr:
        return CONSTRUCTORS["floordiv"](other, self)

    def __mod__(self, other: IntLike) -> Expr:
        return CONSTRUCTORS["mod"](self, other)

    def __rmod__(self, other: IntLike) -> Expr:
        return CONSTRUCTORS["mod"](other, self)

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self} is not a Python bool; use symbolic.known(...)")

    def __repr__(self) -> str:
        return str(CONSTRUCTORS["show"](self))

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: object) -> Expr:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotImplementedError


IntLike: TypeAlias = "int | Expr"

_TABLE: WeakValueDictionary[Key, Expr] = WeakValueDictionary()
_CONSTS: dict[int, Const] = {}


def _intern(cls: type[Expr], key: Key) -> tuple[Expr, bool]:
    """The node of this key and whether it is new (its fields are still to be filled)."""
    table_key = (cls, *key)
    node = _TABLE.get(table_key)
    if node is not None:
        return node, False
    node = object.__new__(cls)
    node._free = None
    _TABLE[table_key] = node
    return node, True


class Const(Expr):
    __slots__ = ("value",)
    rank = 9
    value: int

    def __new__(cls, value: int) -> Const:
        node = _CONSTS.get(value)
        if node is None:
            node = object.__new__(cls)
            node.value = node.lo = node.hi = int(value)
            node.key = (cls.rank, node.value)
            node._free = frozenset()
            _CONSTS[node.value] = node
        return node

    def __int__(self) -> int:
        return self.value

    def __reduce__(self) -> tuple[Any, ...]:
        return Const, (self.value,)


class Sym(Expr):
    """A variable. `size`, where given, is a symbolic exclusive upper bound; `divisor` a fact: the symbol is a multiple of it."""

    __slots__ = ("divisor", "name", "size")
    rank = 0
    name: str
    size: Expr | None
    divisor: int

    def __new__(cls, name: str, lo: int | None = 0, hi: int | None = None, size: Expr | None = None, divisor: int = 1) -> Sym:
        node, new = _intern(cls, (name, lo, hi, size, divisor))
        assert isinstance(node, Sym)
        if new:
            node.name, node.lo, node.hi, node.size, node.divisor = name, lo, hi, size, divisor
            node.key = (cls.rank, name, -1 if lo is None else lo, -1 if hi is None else hi, () if size is None else size.key, divisor)
            node._free = frozenset((node,))
        return node

    def __reduce__(self) -> tuple[Any, ...]:
        return Sym, (self.name, self.lo, self.hi, self.size, self.divisor)


class Add(Expr):
    __slots__ = ("const", "terms")
    rank = 8
    const: int
    terms: tuple[tuple[Expr, int], ...]

    def __new__(cls, const: int, terms: tuple[tuple[Expr, int], ...]) -> Add:
        node, new = _intern(cls, (const, terms))
        assert isinstance(node, Add)
        if new:
            node.const, node.terms = const, terms
            lo: int | None = const
            hi: int | None = const
            for term, c in terms:
                a, b = (term.lo, term.hi) if c > 0 else (term.hi, term.lo)
                lo = None if lo is None or a is None else lo + a * c
                hi = None if hi is None or b is None else hi + b * c
            node.lo, node.hi = lo, hi
            node.key = (cls.rank, tuple((t.key, c) for t, c in terms), const)
        return node

    def children(self) -> tuple[Expr, ...]:
        return tuple(t for t, _ in self.terms)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_add, (self.const, self.terms)


class Mul(Expr):
    __slots__ = ("factors",)
    rank = 1
    factors: tuple[Expr, ...]

    def __new__(cls, factors: tuple[Expr, ...]) -> Mul:
        node, new = _intern(cls, (factors,))
        assert isinstance(node, Mul)
        if new:
            node.factors = factors
            node.lo, node.hi = factors[0].lo, factors[0].hi
            for f in factors[1:]:
                node.lo, node.hi = product_interval((node.lo, node.hi), (f.lo, f.hi))
            node.key = (cls.rank, tuple(f.key for f in factors))
        return node

    def children(self) -> tuple[Expr, ...]:
        return self.factors

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_mul, (self.factors,)


class Binary(Expr):
    """FloorDiv and Mod. `rules.py` decides when one is made and what interval it gets."""

    __slots__ = ("a", "b")
    a: Expr
    b: Expr
    constructor: ClassVar[str]

    @classmethod
    def make(cls, a: Expr, b: Expr, interval: tuple[int | None, int | None]) -> Expr:
        node, new = _intern(cls, (a, b))
        assert isinstance(node, Binary)
        if new:
            node.a, node.b = a, b
            node.lo, node.hi = interval
            node.key = (cls.rank, a.key, b.key)
        return node

    def children(self) -> tuple[Expr, ...]:
        return (self.a, self.b)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (self.constructor, self.a, self.b)


class FloorDiv(Binary):
    __slots__ = ()
    rank = 2
    constructor = "floordiv"


class Mod(Binary):
    __slots__ = ()
    rank = 3
    constructor = "mod"


class Nary(Expr):
    """Min, Max, And, Or: commutative, flat, arguments sorted and distinct."""

    __slots__ = ("args",)
    args: tuple[Expr, ...]
    constructor: ClassVar[str]

    @classmethod
    def make(cls, args: tuple[Expr, ...], interval: tuple[int | None, int | None]) -> Expr:
        node, new = _intern(cls, (args,))
        assert isinstance(node, Nary)
        if new:
            node.args = args
            node.lo, node.hi = interval
            node.key = (cls.rank, tuple(a.key for a in args))
        return node

    def children(self) -> tuple[Expr, ...]:
        return self.args

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (self.constructor, *self.args)


class Min(Nary):
    __slots__ = ()
    rank = 4
    constructor = "min"


class Max(Nary):
    __slots__ = ()
    rank = 5
    constructor = "max"


class And(Nary):
    __slots__ = ()
    rank = 10
    constructor = "and"


class Or(Nary):
    __slots__ = ()
    rank = 11
    constructor = "or"


class Cmp(Expr):
    __slots__ = ("a", "b", "op")
    rank = 6
    op: str
    a: Expr
    b: Expr

    @classmethod
    def make(cls, op: str, a: Expr, b: Expr) -> Expr:
        node, new = _intern(cls, (op, a, b))
        assert isinstance(node, Cmp)
        if new:
            node.op, node.a, node.b = op, a, b
            node.lo, node.hi = 0, 1
            node.key = (cls.rank, op, a.key, b.key)
        return node

    def children(self) -> tuple[Expr, ...]:
        return (self.a, self.b)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (self.op, self.a, self.b)


ZERO = Const(0)
ONE = Const(1)


def rebuild(constructor: str, *args: Expr) -> Expr:
    """Unpickling and parsing: the node anew, through the simplifier."""
    return CONSTRUCTORS[constructor](*args)


def _rebuild_add(const: int, terms: tuple[tuple[Expr, int], ...]) -> Expr:
    return linear(const, terms)


def _rebuild_mul(factors: tuple[Expr, ...]) -> Expr:
    result: Expr = ONE
    for f in factors:
        result = mul(result, f)
    return result


def to_expr(x: IntLike) -> Expr:
    return x if isinstance(x, Expr) else Const(x)


def product_interval(a: tuple[int | None, int | None], b: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The interval of x * y. Unbounded ends are kept exact only for non-negative factors, which sizes and indices are."""
    (a0, a1), (b0, b1) = a, b
    if a0 is not None and a1 is not None and b0 is not None and b1 is not None:
        ends = (a0 * b0, a0 * b1, a1 * b0, a1 * b1)
        return min(ends), max(ends)
    if a0 is not None and b0 is not None and a0 >= 0 and b0 >= 0:
        return a0 * b0, 0 if a1 == 0 or b1 == 0 else None
    return None, None


def terms_of(x: Expr) -> tuple[int, tuple[tuple[Expr, int], ...]]:
    """Any expression as constant + sum of coefficient * term."""
    if isinstance(x, Add):
        return x.const, x.terms
    if isinstance(x, Const):
        return x.value, ()
    return 0, ((x, 1),)


def _build(const: int, terms: dict[Expr, int]) -> Expr:
    live = [(t, c) for t, c in terms.items() if c]
    if not live:
        return Const(const)
    if len(live) == 1:
        if const == 0 and live[0][1] == 1:
            return live[0][0]
    else:
        live.sort(key=_term_order)
    return Add(const, tuple(live))


def _term_order(item: tuple[Expr, int]) -> Key:
    return item[0].key


def linear(const: int, items: Iterable[tuple[Expr, int]]) -> Expr:
    """constant + sum of coefficient * item, flattened, collected, div/mod pairs recombined."""
    terms: dict[Expr, int] = {}
    has_mod = False
    for x, c in items:
        if isinstance(x, Add):
            const += x.const * c
            for t, k in x.terms:
                terms[t] = terms.get(t, 0) + k * c
                has_mod = has_mod or type(t) is Mod
        elif isinstance(x, Const):
            const += x.value * c
        else:
            terms[x] = terms.get(x, 0) + c
            has_mod = has_mod or type(x) is Mod
    if has_mod and len(terms) > 1:
        const = _recombine(const, terms)
    return _build(const, terms)


def _recombine(const: int, terms: dict[Expr, int]) -> int:
    """`recombine_div_mod`: c*k*(x // k) + c*(x % k) -> c*x. Edits `terms` in place, returns the new constant."""
    floordiv = CONSTRUCTORS["floordiv"]
    work = [t for t in terms if type(t) is Mod]
    while work:
        m = work.pop()
        c = terms.get(m, 0)
        if c == 0 or not isinstance(m, Mod):
            continue
        step = mul(floordiv(m.a, m.b), mul(m.b, c))  # what must be present to go with c * (x % k)
        k0, needed = terms_of(step)
        if not needed or any(terms.get(t, 0) != k for t, k in needed):
            continue
        del terms[m]
        const -= k0
        for t, _ in needed:
            del terms[t]
        x0, xs = terms_of(m.a)
        const += x0 * c
        for t, k in xs:
            terms[t] = terms.get(t, 0) + k * c
        work = [t for t in terms if type(t) is Mod]  # what was put together may be the partner of another
    return const


def add(*xs: IntLike) -> Expr:
    if len(xs) == 2:
        a, b = to_expr(xs[0]), to_expr(xs[1])
        if a is ZERO:
            return b
        if b is ZERO:
            return a
        return linear(0, ((a, 1), (b, 1)))
    return linear(0, [(to_expr(x), 1) for x in xs])


def mul(x: IntLike, y: IntLike) -> Expr:
    a, b = to_expr(x), to_expr(y)
    if isinstance(a, Const):
        a, b = b, a
    if isinstance(b, Const):
        if b.value == 1:
            return a
        if b.value == 0:
            return ZERO
        if isinstance(a, Const):
            return Const(a.value * b.value)
        const, terms = terms_of(a)
        return Add(const * b.value, tuple((t, c * b.value) for t, c in terms))
    (a0, at), (b0, bt) = terms_of(a), terms_of(b)
    items = [(t, c * b0) for t, c in at] + [(t, c * a0) for t, c in bt]
    items += [(_monomial(t, u), c * d) for t, c in at for u, d in bt]
    return linear(a0 * b0, items)


def _monomial(a: Expr, b: Expr) -> Expr:
    factors = [*(a.factors if isinstance(a, Mul) else (a,)), *(b.factors if isinstance(b, Mul) else (b,))]
    factors.sort(key=lambda f: f.key)
    return Mul(tuple(factors))


def walk(x: Expr) -> Iterator[Expr]:
    """Every node of the expression, each once, children first."""
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(x, False)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((c, False) for c in node.children())
