"""How a reduction is folded: accumulators, what one element does to them, how partial results join.

Sums and products of floats run in their own type within a block of a row (the lanes of a vector, the elements of a lane) and in double between
blocks. Maxima and minima let NaN through, as eager's do. In argmax and argmin the first NaN, else the first extremum, wins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from magneto.base.dataclass import dataclass
from magneto.inductor.codegen.cpp_types import compute_type, convert, is_float
from magneto.inductor.schedule.kernel import Dim, Member, member_loads


@dataclass(frozen=True, slots=True)
class FoldRow:
    """`initial`, `step` and the OpenMP operator; {T} is the type, {s} f32 or f64, {a} the accumulator, {v} the value."""

    initial: str
    step: str
    operator: str
    float_initial: str = ""
    float_step: str = ""
    float_operator: str = ""


FOLDS: dict[str, FoldRow] = {
    "sum": FoldRow("0", "{a} = {a} + {v};", "+"),
    "prod": FoldRow("1", "{a} = {a} * {v};", "*"),
    "max": FoldRow("{low}", "{a} = {a} > {v} ? {a} : {v};", "max", "-__builtin_inf()", "{a} = mg_maximum_{s}({a}, {v});", "mg_max"),
    "min": FoldRow("{high}", "{a} = {a} < {v} ? {a} : {v};", "min", "__builtin_inf()", "{a} = mg_minimum_{s}({a}, {v});", "mg_min"),
    "any": FoldRow("0", "{a} = {a} | ({v} != 0);", "|"),
    "all": FoldRow("1", "{a} = {a} & ({v} != 0);", "&"),
}

_LIMITS = {"u8": ("0", "255"), "i8": ("-128", "127"), "i16": ("-32768", "32767"), "i32": ("(-2147483647 - 1)", "2147483647"),
           "i64": ("(-9223372036854775807LL - 1)", "9223372036854775807LL"), "_Bool": ("0", "1")}  # fmt: skip


class Fold:
    """One reduction in one kernel. `name`: the accumulator of the whole row; `lane`: that of the vectorised loop."""

    vectorised = True

    def __init__(self, member: Member, name: str) -> None:
        self.member, self.name, self.lane = member, name, f"{name}v"
        self.type = compute_type(member.acc_dtype)
        if member.kind in ("any", "all"):  # as wide as what is read, so that a vector holds as many
            self.type = "u8" if all(load.dtype.itemsize == 1 for load in member_loads(member.body)) else "int"
        self.row = FOLDS[member.kind]
        self.is_float = is_float(member.acc_dtype) and member.kind not in ("any", "all")
        self.accumulator = "f64" if self.is_float and member.kind in ("sum", "prod") else self.type

    @property
    def result_dtype(self) -> torch.dtype:
        return self.member.buffer.dtype

    @property
    def initial(self) -> str:
        if self.is_float and self.row.float_initial:
            return self.row.float_initial
        low, high = _LIMITS.get(self.type, ("", ""))
        return self.row.initial.format(low=low, high=high)

    def declare(self) -> str:
        """The row's accumulator."""
        return f"{self.accumulator} {self.name} = {self.initial};"

    def declare_across(self, block: str, most: int) -> list[str]:
        """Accumulators of `block` rows side by side."""
        return [f"{self.accumulator} {self.name}[{most}];", f"for (i64 l = 0; l < {block}; l++) {self.name}[l] = {self.initial};"]

    def arrays(self) -> list[tuple[str, str, str]]:
        """(type, name, initial value) of accumulators for all columns."""
        return [(self.accumulator, self.name, self.initial)]

    def declare_lane(self) -> str:
        return f"{self.type} {self.lane} = {self.initial};"

    def _combined(self, into: str, value: str) -> str:
        form = self.row.float_step if self.is_float and self.row.float_step else self.row.step
        return form.format(a=into, v=value, s="f64" if self.type == "f64" else "f32")

    def step(self, value: str, into: str, flat: str) -> str:
        """One element into an accumulator."""
        return self._combined(into, value)

    def join(self) -> str:
        """The lane's result into the row's."""
        return self._combined(self.name, self.lane)

    def join_from(self, into: str, value: str) -> str:
        return self._combined(into, value)

    def join_beside(self, block: str, lanes: int) -> list[str]:
        """Accumulators of one row that lie side by side: each has the row's result behind it."""
        a = self.name
        text = f"{self.accumulator} t = {a}[l]; for (i64 k = 1; k < {lanes}; k++) {self.join_from('t', f'{a}[l + k]')}"
        return [f"for (i64 l = 0; l < {block}; l += {lanes}) {{ {text} for (i64 k = 0; k < {lanes}; k++) {a}[l + k] = t; }}"]

    @property
    def lanes_function(self) -> str:
        """The preamble's function that joins an array of lanes; empty: the compiler's own reduction does."""
        name = {"sum": "sum", "prod": "prod", "max": "maximum", "min": "minimum"}.get(self.member.kind, "")
        return f"mg_lanes_{name}_{self.type}" if name and self.type in ("f32", "f64", "i32", "i64") else ""

    def clause(self) -> str:
        operator = self.row.float_operator if self.is_float and self.row.float_operator else self.row.operator
        return f" reduction({operator}:{self.lane})"

    def result(self, name: str = "") -> str:
        """The result in the buffer's dtype, rounded once."""
        text = name or self.name
        if self.accumulator != self.type:
            text = f"({self.type}){text}"
        if self.member.kind in ("any", "all"):
            return f"({compute_type(self.result_dtype)})({text})"
        return convert(text, self.member.acc_dtype, self.result_dtype)


class ArgFold(Fold):
    """argmax, argmin: best value so far and its index. Indices come in any order, the smallest wins among equals."""

    vectorised = False

    def __init__(self, member: Member, name: str, ordered: bool) -> None:
        self.member, self.name, self.lane = member, name, name
        self.is_float = is_float(member.acc_dtype)
        narrow = not self.is_float and member.acc_dtype.itemsize < 4  # places have 32 bits: vectors of one width
        self.accumulator = self.type = "i32" if narrow else compute_type(member.acc_dtype)
        self.better = ">" if member.kind == "argmax" else "<"
        self.ordered = ordered  # elements come with rising indices below 2^31: the step needs no branch, and lanes may share the work
        self.across = False  # accumulators of several rows side by side: the step has no branch

    @property
    def initial(self) -> str:
        return "0"

    def declare(self) -> str:
        return f"{self.type} {self.name} = 0; i64 {self.name}x = -1;"

    def declare_across(self, block: str, most: int) -> list[str]:
        first = (self.worst, "0") if self.ordered else ("0", "-1")
        start = f"for (i64 l = 0; l < {block}; l++) {{ {self.name}[l] = {first[0]}; {self.name}x[l] = {first[1]}; }}"
        return [f"{self.type} {self.name}[{most}]; i32 {self.name}x[{most}];", start]

    def arrays(self) -> list[tuple[str, str, str]]:
        return [(self.type, self.name, self.worst), ("i32", f"{self.name}x", "0")]

    def declare_lane(self) -> str:
        return ""

    def join_from(self, into: str, value: str) -> str:
        """What a later portion of the rows has found."""
        return self.step(value, into, value.replace(self.name, f"{self.name}x", 1))

    def step(self, value: str, into: str, flat: str) -> str:
        if not self.ordered and not self.across:
            return self._any_order(value, flat)
        lane = into.removeprefix(self.name)
        a, x, k = into, f"{self.name}x{lane}", f"k{self.name}"
        worse = f"!({value} {'<=' if self.better == '>' else '>='} {a})"  # or NaN
        take = f"({x} < 0) | ({a} == {a} & {worse})" if self.is_float else f"({x} < 0) | ({value} {self.better} {a})"
        if self.across and self.ordered:
            take = self.in_lanes(take)
        if not self.ordered:  # equal ones, and NaN after NaN
            equal = f"({value} == {a} | ({a} != {a} & {value} != {value}))" if self.is_float else f"({value} == {a})"
            take = f"{take} | ({equal} & (i32)({flat}) < {x})"
        return f"{{ const _Bool {k} = {take}; {a} = {k} ? {value} : {a}; {x} = {k} ? (i32)({flat}) : {x}; }}"

    def _any_order(self, value: str, flat: str) -> str:
        a, x = self.name, f"{self.name}x"
        better = f"{value} {self.better} {a} || ({value} == {a} && ({flat}) < {x})"
        if self.is_float:
            better = f"({a} == {a} && ({better} || {value} != {value})) || ({a} != {a} && {value} != {value} && ({flat}) < {x})"
        return f"if ({x} < 0 || {better}) {{ {a} = {value}; {x} = {flat}; }}"

    def declare_lanes(self, width: int, first: str, last: str) -> list[str]:
        """Each lane begins with the worst value and the place of its first element, so that its steps need not ask whether there was one before; -1: there is none."""
        a = self.name
        start = f"{a}s[l] = {self.worst}; {a}xs[l] = {first} + {width} <= {last} ? (i32)({first}) + (i32)l : -1;"
        return [f"{self.type} {a}s[{width}]; i32 {a}xs[{width}];", f"for (i64 l = 0; l < {width}; l++) {{ {start} }}"]

    @property
    def worst(self) -> str:
        """A value that no other is worse than."""
        return (
            ("__builtin_inf()" if self.better == "<" else "-__builtin_inf()") if self.is_float else _LIMITS[self.type][self.better == "<"]
        )

    def in_lanes(self, line: str) -> str:
        """A step of a lane, or of a row that began with its first element."""
        return re.sub(rf"\({self.name}x[sp]?\[[^]]*\] < 0\) \| ", "", line)

    def join_lanes(self, width: int) -> list[str]:
        """The best of the lanes, NaN before all others, and the smallest index that has it."""
        a, kind = self.name, "f64" if self.type == "f64" else "f32"
        if self.is_float:
            name = "maximum" if self.better == ">" else "minimum"
            best = [
                f"for (i64 l = 0; l < {width}; l++) {a}m[l] = {a}s[l];",
                f"const {self.type} {a}t = mg_lanes_{name}_{kind}({a}m, {width});",
            ]
            best = [f"{self.type} {a}m[{width}];", *best]
        else:
            best = [
                f"{self.type} {a}t = {a}s[0];",
                f"for (i64 l = 1; l < {width}; l++) {a}t = {a}s[l] {self.better} {a}t ? {a}s[l] : {a}t;",
            ]
        equal = f"({a}s[l] == {a}t) | (({a}t != {a}t) & ({a}s[l] != {a}s[l]))" if self.is_float else f"{a}s[l] == {a}t"
        best += [
            f"i32 {a}b = 2147483647;",
            f"#pragma omp simd reduction(min:{a}b)",
            f"for (i64 l = 0; l < {width}; l++) {{ const i32 k = ({equal}) ? {a}xs[l] : 2147483647; {a}b = {a}b < k ? {a}b : k; }}",
            self._any_order(f"{a}t", f"{a}b"),
        ]
        return [f"if ({a}xs[0] >= 0) {{", *best, "}"]

    def join(self) -> str:
        return ""

    def clause(self) -> str:
        return ""

    def result(self, name: str = "") -> str:
        return f"(i64){self.name}x{name.removeprefix(self.name)}"


def fold_of(member: Member, name: str, cols: Sequence[Dim] = ()) -> Fold:
    """`cols`: what is reduced, where one walk over it meets the elements in order."""
    ordered = len(cols) == 1 and cols[0].size < 1 << 31
    return ArgFold(member, name, ordered) if member.kind in ("argmax", "argmin") else Fold(member, name)
