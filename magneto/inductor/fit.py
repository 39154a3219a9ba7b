"""Numbers that differ between samples of sizes, as expressions of the sizes: exact, with as few terms as can be, and true of samples that were not needed to find them.

sizes (5,) (7,) (12,) ...    3840 5376 9216 ...    becomes    768 * n0

Of sizes that are divided (`n // 2`, what strides leave of an image) the quotients are sizes of their own: polynomials of theirs are looked for too.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from magneto.base.dataclass import dataclass, replace

DEGREE = 3  # of a term: the scores of attention are as many as batch times length squared
TERMS = 3
SPARE = 2  # samples that an expression must be true of beyond those that determine it
DENOMINATORS = 64
DIVISORS = (2, 4, 8)  # of sizes


@dataclass(frozen=True, slots=True)
class Polynomial:
    """sum of coefficient * product of sizes ** power, over `denominator`; its values at whole numbers are whole."""

    terms: tuple[tuple[tuple[int, ...], int], ...]
    denominator: int
    names: tuple[str, ...] = ("n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7")

    @property
    def text(self) -> str:
        """Python source over n0, n1, ..."""
        parts = []
        for powers, coefficient in self.terms:
            factors = [self.names[k] for k, power in enumerate(powers) for _ in range(power)]
            parts.append(" * ".join([str(coefficient), *factors] if coefficient != 1 or not factors else factors))
        text = " + ".join(parts)
        return text if self.denominator == 1 else f"({text}) // {self.denominator}"

    def divisible(self, by: int) -> bool:
        """Are all its values multiples of a number?"""
        return self.denominator == 1 and all(coefficient % by == 0 for _, coefficient in self.terms)


class Fit:
    """Expressions true of all `samples` (sizes, each as many as there are symbols)."""

    def __init__(self, samples: Sequence[tuple[int, ...]], by: Sequence[int] = (), quotients: Sequence[str] = ()) -> None:
        """`by`: divided by these, the sizes that are meant leave what the samples do. `quotients`: Python source of what stands in the place of sizes, if anything does."""
        self.samples, self.by, self.quotients = samples, by or [1] * len(samples[0]), quotients
        self.others: list[Fit] | None = None  # over quotients
        n = len(samples[0])
        powers = sorted(itertools.product(range(DEGREE + 1), repeat=n), key=lambda p: (sum(p), tuple(-x for x in p)))
        self.monomials = [p for p in powers if sum(p) <= DEGREE]
        self.values = {p: tuple(math.prod(s**k for s, k in zip(sample, p, strict=True)) for sample in samples) for p in self.monomials}
        self.found: dict[tuple[int, ...], Polynomial | None] = {}

    def integer(self, column: tuple[int, ...]) -> Polynomial | None:
        """The polynomial with these values."""
        if column not in self.found:
            self.found[column] = self._search(column) or (None if self.quotients else self._divided(column))
        return self.found[column]

    def _divided(self, column: tuple[int, ...]) -> Polynomial | None:
        """A polynomial of sizes of which one, or each, is divided."""
        if self.others is None:
            self.others = [Fit(samples, (), names) for samples, names in self._quotients()]
        return next((found for other in self.others if (found := other.integer(column)) is not None), None)

    def _quotients(self) -> Iterator[tuple[list[tuple[int, ...]], list[str]]]:
        """Samples, and the sources, of sizes of which one or each is divided. Not where no sample leaves some rest that a size may leave: it could be another quotient."""
        columns = list(zip(*self.samples, strict=True))
        names = [f"n{k}" for k in range(len(columns))]
        groups = [(k,) for k in range(len(columns))] + [tuple(range(len(columns)))] * (len(columns) > 1)
        for by, group in itertools.product(DIVISORS, groups):
            if any(len({n % by for n in columns[k]}) < by // math.gcd(by, self.by[k]) for k in group):
                continue
            for more in range(by):
                divided = [[(n + more) // by for n in column] if k in group else column for k, column in enumerate(columns)]
                yield list(zip(*divided, strict=True)), [f"(({n} + {more}) // {by})" if k in group else n for k, n in enumerate(names)]

    def _search(self, column: tuple[int, ...]) -> Polynomial | None:
        for many in range(1, min(TERMS - bool(self.quotients), len(column) - SPARE) + 1):
            for chosen in itertools.combinations(self.monomials, many):
                coefficients = _solved([self.values[p] for p in chosen], column)
                if coefficients is not None and (made := _whole(chosen, coefficients)) is not None:
                    return replace(made, names=tuple(self.quotients)) if self.quotients else made
        return None

    def real(self, column: tuple[float, ...], single: bool) -> str | None:
        """Python source of the expression with these values, computed in double; `single`: they have been rounded to float32 after that. None also where two expressions could be meant."""
        texts = []
        for inverse, compute, form in REALS:
            try:
                argument = tuple(round(inverse(value)) for value in column)
                if any(_rounded(compute(n), single) != value for n, value in zip(argument, column, strict=True)):
                    continue
            except (ArithmeticError, ValueError):
                continue
            if (found := self.integer(argument)) is not None:
                texts.append(form.format(found.text))
                if single or form in CERTAIN:
                    break
        return texts[0] if len(texts) == 1 else None


REALS: tuple[tuple[Callable[[float], float], Callable[[int], float], str], ...] = (
    (lambda v: v, float, "float({})"),
    (lambda v: 1 / v, lambda n: 1.0 / n, "1.0 / ({})"),
    (lambda v: 2 / v, lambda n: 2.0 / n, "2.0 / ({})"),  # of a mean of squares
    (lambda v: v * v, lambda n: math.sqrt(n), "sqrt({})"),
    (lambda v: 1 / (v * v), lambda n: 1.0 / math.sqrt(n), "1.0 / sqrt({})"),
    (lambda v: 1 / (v * v), lambda n: n**-0.5, "({}) ** -0.5"),
)
"""How floats come from integers: the integer, the float, and its Python source."""
CERTAIN = tuple(form for _, _, form in REALS[:4])  # rounded once: however it was computed, it is the same


def _rounded(value: float, single: bool) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0]) if single else value


def bits(value: float) -> int:
    """Of a float64, as kernels take it."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _solved(columns: Sequence[tuple[int, ...]], wanted: tuple[int, ...]) -> list[Fraction] | None:
    """The one combination of columns that is the wanted one; None where there is none, or more."""
    if _contradicts(columns, wanted):
        return None
    rows = [[Fraction(c[i]) for c in columns] + [Fraction(w)] for i, w in enumerate(wanted)]
    for k in range(len(columns)):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i, row in enumerate(rows):
            if i != k and row[k]:
                factor = row[k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(row, rows[k], strict=True)]
    if any(row[-1] for row in rows[len(columns) :]):
        return None
    return [rows[k][-1] / rows[k][k] for k in range(len(columns))]


PRIME = (1 << 61) - 1


def _contradicts(columns: Sequence[tuple[int, ...]], wanted: tuple[int, ...]) -> bool:
    """Is there no such combination modulo a large prime? Then there is none with small denominators; most are told so by one row more than there are columns."""
    basis: list[tuple[int, list[int]]] = []
    for i, w in enumerate(wanted):
        row = [*(c[i] % PRIME for c in columns), w % PRIME]
        for k, own in basis:
            if factor := row[k]:
                row = [(a - factor * b) % PRIME for a, b in zip(row, own, strict=True)]
        pivot = next((k for k in range(len(columns)) if row[k]), None)
        if pivot is not None:
            inverse = pow(row[pivot], -1, PRIME)
            basis.append((pivot, [a * inverse % PRIME for a in row]))
        elif row[-1]:
            return True
    return False


def _whole(powers: Sequence[tuple[int, ...]], coefficients: Sequence[Fraction]) -> Polynomial | None:
    """The polynomial; None where it has values that are no whole numbers, or terms that are nothing."""
    denominator = math.lcm(*(c.denominator for c in coefficients))
    if denominator > DENOMINATORS or not all(coefficients):
        return None
    terms = tuple((p, int(c * denominator)) for p, c in zip(powers, coefficients, strict=True))
    residues: Any = itertools.product(range(denominator), repeat=len(powers[0])) if denominator > 1 else ()
    for sizes in residues:
        if sum(c * math.prod(s**k for s, k in zip(sizes, p, strict=True)) for p, c in terms) % denominator:
            return None
    return Polynomial(terms, denominator)
