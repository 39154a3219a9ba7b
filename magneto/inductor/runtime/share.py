"""Kernels that differ in numbers only become one C function with these numbers as arguments: `functions(kernels)`.

    int k_1(p) { ... i < 96 ... }, int k_2(p) { ... i < 192 ... }      becomes      s(p, n) { ... i < n ... }, k_1 calls s(p, 96), k_2 calls s(p, 192)

The layers of a network differ in sizes; the C compiler's time goes with the text. A kernel's text is split into its *form* and the numbers that may be
arguments: those that the compiler need not know in order to make a fast loop. These are bounds and strides of loops, offsets, constants of the computation,
and the lengths of local arrays (the longest serves all). In the form stay divisors inside a row, strides of the vectorised loop, short loops that are no
whole number of vectors, and all integers that are values rather than places. Kernels that are compiled cheaply only keep divisors and values. Kernels keep the names, the hashes and the entries in the store of their own texts.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

from magneto.base.dataclass import dataclass

NUMBER = re.compile(r"(?<![\w.])(?:0x[0-9a-f.]+p[+-]?\d+f?|\d+\.\d*f?|\d+(?:LL)?)(?![\w.])")
HEAD = re.compile(r"^(.*?)int SYMBOL\(([^)]*)\) \{", re.S)
ARRAYS = re.compile(r"\s*(?:[ifu]\d+|int|_Bool) \w+\[\d+\]")
LANES = re.compile(r"[vx]s\[$")
LOOP = re.compile(r"\s*for \(i64 (\w+) = ")
PLACES = re.compile(r"for \(|const i64 |i64 g = |i64 ix|mg_stream\(|mg_ahead\(|mg_tile_|mg_(?:widen|narrow)_\w+\(|_Bool t\d+ = \(_Bool\)\(")
"""How a line begins whose integers are bounds, offsets and the like. Elsewhere only those in brackets are."""
ROW = re.compile(r"(?:i\d+|\d+|[-+*/% ()])+")
"""What is divided outside of the vectorised loop: once per row."""
CHEAP = re.compile(r"__attribute__\(\(optimize")
"""Kernels that take no time: all their loops may have any length."""
VECTOR = 16  # lanes: whole numbers of these are told to the compiler
SHORT = 64  # elements: it wants to know the length of a vectorised loop below
INT, FLOAT, BOUND, DIVISOR, NARROW, LENGTH, OTHER = MARKS = "\1\2\3\4\5\6\7"
"""In a form: an integer, a constant of the computation, the length of an array, a divisor in the numbering of rows, an integer of 32 bits, the length of a vectorised loop; where
every number is taken out, one that the compiler should rather know."""

CALLS = '__attribute__((optimize("O0"))) '
"""Before a function that calls another: there is nothing to optimise, and gcc takes 0.8 ms for it instead of 1.7. (clang ignores it.)"""
POINTERS = "void *const *p"
FROM_MEMORY = {
    "i64": "n[{0}]",
    "f64": "((union {{ i64 i; f64 f; }}){{ n[{0}] }}).f",
    "f32": "(f32)((union {{ i64 i; f64 f; }}){{ n[{0}] }}).f",
}

Form = tuple[str, tuple[str, ...]]


def functions(kernels: Sequence[tuple[str, str]], seen: Seen | None = None) -> list[tuple[tuple[int, ...], str]]:
    """Kernels are (symbol, body with the name SYMBOL). Per function that is compiled once: the positions of the kernels that it serves, and its C text.
    `seen`: numbers of forms that were compiled before; a form that comes once more becomes a function for all of them."""
    groups: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
    for position, (_, body) in enumerate(kernels):
        form, numbers = form_of(body)
        groups.setdefault(form, []).append((position, numbers))
    made = []
    for form, members in groups.items():
        positions = tuple(position for position, _ in members)
        symbols = [kernels[p][0] for p in positions]
        before = () if seen is None else seen.get(form, ())
        if len(members) == 1 and not before:
            made.append((positions, kernels[positions[0]][1].replace("SYMBOL", symbols[0])))
        else:
            made.append((positions, _shared(form, [*(numbers for _, numbers in members), *before], symbols)))
    return made


Seen = Mapping[str, Sequence[tuple[str, ...]]]


def form_of(body: str, every: bool = False) -> Form:
    """A text with marks in the place of what may be an argument, and what stood there. `every`: of all numbers, whatever it costs."""
    if (head := HEAD.match(body)) is not None and head[2].endswith("const i64 *n"):  # it takes its numbers from memory already
        return body, ()
    lines: list[str] = []
    numbers: list[str] = []
    vector, simd = "", False
    cheap = CHEAP.match(body) is not None
    for line in body.split("\n"):
        if cheap:
            pass
        elif simd and (loop := LOOP.match(line)) is not None:
            vector = loop[1]
        elif line.endswith(" = g + l;"):
            vector = line.split()[2]
        text, found = _line_form(line, vector, simd, every)
        simd = line.startswith("#pragma omp simd") and not cheap
        lines.append(text)
        numbers.extend(found)
    return "\n".join(lines), tuple(numbers)


@lru_cache(maxsize=4096)
def _line_form(line: str, vector: str, simd: bool, every: bool) -> Form:
    """`vector`: the variable of the innermost loop; `simd`: the line is the head of that loop."""
    if line.startswith("#"):
        return line, ()
    pieces: list[str] = []
    found: list[str] = []
    end = 0
    for match in NUMBER.finditer(line):
        kind = _kind(line, match, vector, simd)
        if every and not kind and not ARRAYS.match(line):  # lanes are what a text is written for
            kind = FLOAT if "." in match[0] else LENGTH if simd and LOOP.match(line) else OTHER
        if kind:
            pieces += line[end : match.start()], kind
            found.append(match[0])
            end = match.end()
    return "".join((*pieces, line[end:])), tuple(found)


def _kind(line: str, match: re.Match[str], vector: str, simd: bool) -> str:
    """What a number may become; empty where it stays."""
    text, before, after = match[0], line[: match.start()], line[match.end() :]
    divides = before.endswith(("/ ", "% "))
    if not text.isdigit():
        return "" if divides or text.endswith("L") else FLOAT
    if ARRAYS.match(line):
        return BOUND if before.endswith("[") and not LANES.search(before) else ""
    stripped = line.lstrip()
    if divides and "(u32)row" in before and stripped.startswith("const i64 "):
        return DIVISOR
    if simd and stripped.startswith("for ("):
        return LENGTH if int(text) >= SHORT or int(text) % VECTOR == 0 else ""
    if "(i32)" in line and not ("(i64)(" in after and "[" in before and "(i32)" not in before):  # a comparison of indices
        compared = (
            stripped.startswith("_Bool t")
            and PLACES.match(stripped)
            and not (before.endswith(("* ", "/ ", "% ")) or after.startswith(" * "))
        )
        return NARROW if compared and "mg_floor" not in line else ""
    place = PLACES.match(stripped) or before.count("[") > before.count("]")
    if not place or "mg_floor" in line or (divides and not ROW.fullmatch(_dividend(before[:-3]))):
        return ""
    return "" if vector and after.startswith(" * ") and re.search(rf"\b{vector}\b", _factor(after[3:])) else INT


def _factor(text: str) -> str:
    """The factor that a text begins with: up to the end of its brackets, or of its name."""
    depth = 0
    for k, c in enumerate(text):
        if c == "(":
            depth += 1
        elif c == ")":
            depth -= 1
            if depth <= 0:
                return text[: k + 1]
        elif depth == 0 and not (c.isalnum() or c == "_"):
            return text[:k]
    return text


def _dividend(text: str) -> str:
    """What a text ends with: all of its last brackets, or its last name."""
    depth = 0
    for k in range(len(text) - 1, -1, -1):
        c = text[k]
        depth += (c == ")") - (c == "(")
        if depth <= 0 and not (c.isalnum() or c in "_)"):
            return text[k:] if c == "(" and text.endswith(")") else text[k + 1 :]
    return text


def _shared(form: str, numbers: Sequence[tuple[str, ...]], symbols: Sequence[str]) -> str:
    """The function for all kernels of a form, and for each kernel a function that calls it with its numbers. (`numbers` may go on behind those of the symbols.)"""
    arguments, places = _arguments(form, numbers)
    text = placed(form, places)
    head = HEAD.match(text)
    assert head is not None, "a kernel is a function named SYMBOL"
    before, formal, name = head[1], head[2], f"s_{symbols[0]}"
    own = "".join(f", const {_type(column[0])} n{k}" for k, column in enumerate(arguments))
    passed = ", ".join(part.rpartition("*")[2] for part in formal.split(", "))
    lines = [f"static __attribute__((noinline, noclone)) {before}int {name}({formal}{own}) {{{text[head.end() :]}"]
    for k, symbol in enumerate(symbols):
        values = "".join(f", {column[k]}" for column in arguments)
        lines.append(f"{CALLS}int {symbol}({formal}) {{ return {name}({passed}{values}); }}\n")
    if formal == POINTERS and len(numbers) > len(symbols):
        values = "".join(f", {FROM_MEMORY[_type(column[0])].format(k)}" for k, column in enumerate(arguments))
        lines.append(f"int {general_name(symbols[0])}({formal}, const i64 *n) {{ return {name}({passed}{values}); }}\n")
    return "".join(lines)


def _arguments(form: str, numbers: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[Place]]:
    """What the kernels pass, per argument, and the place of each number of the form."""
    arguments: dict[tuple[str, ...], int] = {}
    places: list[Place] = []
    for kind, column in zip((c for c in form if c in MARKS), zip(*numbers, strict=True), strict=True):
        if len(set(column)) == 1:
            places.append(Place(kind, text=column[0]))
        elif kind == BOUND:
            places.append(Place(kind, text=str(max(map(int, column)))))
        else:
            vectors = kind in (INT, LENGTH) and all(int(n) % VECTOR == 0 for n in column)
            places.append(Place(kind, argument=arguments.setdefault(column, len(arguments)), vectors=vectors))
    return list(arguments), places


@dataclass(frozen=True, slots=True)
class Place:
    """What stands in the place of a number: a text, or an argument; `vectors`: which is a whole number of vectors."""

    kind: str
    text: str = ""
    argument: int = -1
    vectors: bool = False


@dataclass(frozen=True, slots=True)
class General:
    """A function of a form that reads its numbers from memory, as integers of 64 bits (floats as the bits of float64)."""

    symbol: str
    places: tuple[Place, ...]
    types: tuple[str, ...]

    def numbers(self, found: Sequence[str]) -> tuple[int, ...] | None:
        """What to pass for a kernel with these numbers; None: the function does not serve it."""
        passed: dict[int, str] = {}
        for place, text in zip(self.places, found, strict=True):
            if place.argument < 0:
                if text != place.text and not (place.kind == BOUND and int(text) <= int(place.text)):
                    return None
            elif passed.setdefault(place.argument, text) != text or (place.vectors and int(text) % VECTOR):
                return None
        values = [_bits(passed[k], type) for k, type in enumerate(self.types)]
        return None if None in values else tuple(values)  # type: ignore[arg-type]


def general_of(form: str, numbers: Sequence[tuple[str, ...]], symbol: str) -> General | None:
    """Beside the functions that `functions` makes of kernels and of such that were there before, the first of these `symbol`. None where vectorised loops differ in length: such kernels are up to half as
    fast again when the compiler knows it."""
    head = HEAD.match(form)
    if head is None or head[2] != POINTERS:
        return None
    arguments, places = _arguments(form, numbers)
    if any(place.kind == LENGTH and place.argument >= 0 for place in places):
        return None
    return General(general_name(symbol), tuple(places), tuple(_type(column[0]) for column in arguments))


def lengths_of(form: str, numbers: Sequence[str]) -> tuple[str, ...]:
    """Of the vectorised loops."""
    return tuple(number for mark, number in zip((c for c in form if c in MARKS), numbers, strict=True) if mark == LENGTH)


def general_name(symbol: str) -> str:
    return f"g_{symbol}"


def _bits(text: str, type: str) -> int | None:
    if _type(text) != type:
        return None
    if type == "i64":
        return int(text)
    digits = text.removesuffix("f")
    value = float.fromhex(digits) if digits.startswith("0x") else float(digits)
    if type == "f32" and struct.unpack("<f", struct.pack("<f", value))[0] != value:
        return None
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def placed(form: str, places: Sequence[Place]) -> str:
    """The text with what stands in the places of the form's marks."""
    rest = iter([_use(place) for place in places])
    return re.sub(f"[{MARKS}]", lambda _: next(rest), form)


def _use(place: Place) -> str:
    """The text in the place of a number. Multiples of the vector's length are told as such: a loop of so many steps has no rest."""
    name = f"n{place.argument}"
    if place.argument < 0 or place.kind == FLOAT:
        return place.text or name
    if place.kind in (DIVISOR, NARROW):
        return f"({'u32' if place.kind == DIVISOR else 'i32'}){name}"
    return f"({name} & -{VECTOR})" if place.vectors else name


def _type(text: str) -> str:
    return "i64" if text.removesuffix("LL").isdigit() else "f32" if text.endswith("f") else "f64"
