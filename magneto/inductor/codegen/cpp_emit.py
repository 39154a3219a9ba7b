"""Values as C statements, each computed once, in the outermost loop that knows its symbols.

The emitter holds a stack of scopes, one per loop. `emit(value)` returns a C expression (a name or a literal) that is valid in the innermost
scope; its statement stands in the scope of the last symbol it depends on. What a `Masked` guards is read conditionally. Computed indices are
checked: a bad one sets a bit of `status` and is replaced by 0, so that nothing out of bounds is read.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from magneto.base.dataclass import dataclass, field
from magneto.base.varying import any_size
from magneto.inductor.codegen.cpp_ops import DIVIDING, op_text
from magneto.inductor.codegen.cpp_types import CannotEmit, compute_type, from_memory, is_float, literal
from magneto.inductor.loops.ir import Const, IndexValue, Indirect, Load, Masked, Op, Value, bounds_of
from magneto.inductor.loops.span import decided
from magneto.symbolic import Add, Expr, Sym, add, evaluate, mul, to_c, walk
from magneto.symbolic import Const as IntConst

NARROW = 1 << 31
SQRT_HALF = math.sqrt(0.5)
BAD_INDEX, ZERO_DIVISION = 1, 2
"""Bits of a kernel's result."""


@dataclass(slots=True)
class Scope:
    """The inside of one loop: statements so far, and the names of what they computed."""

    lines: list[str] = field(default_factory=list)
    memo: dict[tuple[Value, str], str] = field(default_factory=dict)
    checks: bool = False  # statements here set `status`


ONE_PLUS = ("erf", "exp", "tanh")
"""Functions with a cheaper form of 1 + f(x) in float (cpp_preamble)."""

CHOOSING = frozenset(("maximum", "minimum", "abs", "neg", "where"))
"""Operations whose result has no more digits than what they are given."""

_OF_MANY = frozenset(("convert_element_type", "add", "sub", "mul", "where", "minimum", "maximum"))
"""Operations whose result is none of two numbers unless their operands are."""

Resolver = Callable[[Load], "tuple[str, int] | Value | None"]
"""How a load of a buffer computed in this kernel is answered: (expression, scope depth), the value to compute in its place, or None: memory."""


class Emitter:
    """`pointers`: buffer -> name of its C pointer. `names` of loop variables are set by `open_loop`."""

    def __init__(self, pointers: Mapping[str, str], resolve: Resolver) -> None:
        self.pointers = pointers
        self.resolve = resolve
        self.scopes: list[Scope] = [Scope()]
        self.shared: frozenset[Value] = frozenset()  # functions of which more than one value is computed
        self._exact: dict[Value, bool] = {}
        self.rounded: frozenset[Value] = frozenset()  # quotients by numbers of which only 16 bits are seen
        self.form = "f32"  # of functions: "half" where all results have 16 bits (cpp_preamble)
        self.maxima: Mapping[str, Value] = {}  # largest values of rows: what of
        self.sums: Mapping[str, Value] = {}  # of rows: what of
        self.bodies: Mapping[str, Value] = {}  # of the kernel's pointwise members
        self.depths: dict[Sym, int] = {}
        self.variables: dict[Sym, str] = {}
        self.fixed: dict[Sym, int] = {}  # variables that are numbers: of a dimension that is written out
        self.local: dict[Load, str] = {}  # loads answered by a local copy of the memory (turned, or converted): the element there
        self._depth_memo: dict[Value, int] = {}
        self._reading: dict[Value, bool] = {}
        self._mask_depths: dict[str, int] = {}  # condition -> scope in which it is known
        self._taken: dict[
            str, int
        ] = {}  # condition that holds at some point of a loop -> that loop's scope: what is known outside of it needs no condition
        self._counter = 0

    # ---- scopes --------------------------------------------------------------------------------------------------------

    def push(self, symbols: Mapping[Sym, str]) -> Scope:
        """Enter a loop that defines symbols (symbol -> C variable)."""
        self.scopes.append(Scope())
        for symbol, name in symbols.items():
            self.depths[symbol] = len(self.scopes) - 1
            self.variables[symbol] = name
        self._depth_memo.clear()
        return self.scopes[-1]

    def pop(self) -> Scope:
        """Leave the innermost loop."""
        gone = len(self.scopes) - 1
        for symbol in [s for s, d in self.depths.items() if d == gone]:
            del self.depths[symbol]
        self._depth_memo.clear()
        return self.scopes.pop()

    def fresh(self, prefix: str = "t") -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    # ---- where a value belongs -----------------------------------------------------------------------------------------

    def depth(self, value: Value) -> int:
        """The scope in which a value can first be computed."""
        found = self._depth_memo.get(value)
        if found is None:
            found = self._depth_memo[value] = self._depth(value)
        return found

    def _depth(self, value: Value) -> int:
        if isinstance(value, Load):
            answer = self.resolve(value)
            if isinstance(answer, tuple):
                return answer[1]
            if isinstance(answer, Value):
                return self.depth(answer)
            return self.index_depth(value.index)
        if isinstance(value, IndexValue):
            return self.index_depth(value.expr)
        return max((self.depth(child) for child in value.children()), default=0)

    def index_depth(self, index: Expr) -> int:
        return max((self.depth(s.value) if isinstance(s, Indirect) else self.depths[s] for s in index.free), default=0)

    # ---- statements ----------------------------------------------------------------------------------------------------

    def emit(self, value: Value, mask: str = "") -> str:
        """The C expression of a value. `mask`: a C condition under which alone memory may be read."""
        if isinstance(value, Const):
            return literal(value.value, value.dtype)
        if mask and (not self._reads_memory(value) or self.depth(value) < self._taken.get(mask, 0)):
            mask = ""
        key = (value, mask)
        for scope in self.scopes:
            if (found := scope.memo.get(key)) is not None or (mask and (found := scope.memo.get((value, ""))) is not None):
                return found  # what is computed at every point needs no condition
        if isinstance(value, Load):
            answer = self.resolve(value)
            if isinstance(answer, tuple):
                return answer[0]
            if isinstance(answer, Value):
                return self.emit(answer, mask)
        if (taken := decided(value, self.fixed)) is not None:
            return self.emit(taken, mask)
        depth = self.depth(value)
        if mask:  # the condition is known in its own scope and further in
            depth = max(depth, self._mask_depths[mask])
        text = self._text(value, mask, depth)
        name = self.fresh()
        scope = self.scopes[depth]
        scope.lines.append(f"{compute_type(value.dtype)} {name} = {text};")
        scope.memo[key] = name
        return name

    def _text(self, value: Value, mask: str, depth: int) -> str:
        if isinstance(value, Load):
            return self._load(value, mask, depth)
        if isinstance(value, IndexValue):
            narrow = self._narrow(value.expr) if value.dtype is not torch.int64 and depth == len(self.scopes) - 1 else ""
            return f"({compute_type(value.dtype)})({narrow or self.index(value.expr, mask, depth)})"
        if isinstance(value, Masked):
            condition = self.emit(value.cond, mask)
            if not mask and self._needed_anyway(value):
                return f"{condition} ? {self.emit(value.value)} : {self.emit(value.other)}"
            inner = f"({mask} & {condition})" if mask else condition
            self._mask_depths[inner] = max(self.depth(value.cond), self._mask_depths.get(mask, 0))
            if not mask and (symbol := self._somewhere(value.cond)) is not None:
                self._taken[inner] = self.depths[symbol]
            return f"{condition} ? {self.emit(value.value, inner)} : {self.emit(value.other, mask)}"
        assert isinstance(value, Op)
        if value.name == "add" and value.dtype is torch.float32 and (found := self._one_plus(value)) is not None:
            return f"mg_{found.name}1_{'f32' if found.name == 'erf' else self.form}({self.emit(found.args[0], mask)})"
        if value.name == "mul" and value.dtype is torch.float32 and (factors := self._normal(value)) is not None:
            *before, x = [self.emit(f, mask) for f in factors]  # the short form loses NaN, which x keeps
            return " * ".join([*before, f"mg_cdf_{self.form if before == [x] else 'f32'}({x})"])
        if value.name == "div" and self.form == "half" and self._is_silu(value):
            return f"mg_silu_half({self.emit(value.args[0], mask)})"
        args = [self.emit(a, mask) for a in value.args]
        operand = value.args[-1].dtype
        if value.name == "exp" and value.dtype is torch.float32 and self._below_maximum(value.args[0]):
            return f"mg_exp_down_f32({args[0]})"
        if (
            value.name == "convert_element_type"
            and value.dtype is torch.bfloat16
            and operand is torch.float32
            and self.exact(value.args[0])
        ):
            return args[0]
        if value in self.rounded and isinstance(divisor := value.args[1], Const):
            return f"{args[0]} * {literal(1 / divisor.value.real, torch.float32)}"
        if value.name == "div" and compute_type(operand) == "f32" and self._worth_inverting(value, depth, mask):
            by, reciprocal, scale = self._inverse(value.args[1], args[1], mask)
            short = self._is_softmax(value)
            return f"mg_div_sum({args[0]}, {by}, {reciprocal})" if short else f"mg_div_by({args[0]}, {by}, {reciprocal}, {scale})"
        if value.name in DIVIDING and not is_float(operand) and not (isinstance(value.args[1], Const) and value.args[1].value):
            self._check(depth, f"{args[1]} == 0", ZERO_DIVISION, mask)
            args[1] = f"({args[1]} == 0 ? 1 : {args[1]})"
        return op_text(value.name, args, operand, value.dtype)

    def _needed_anyway(self, value: Masked) -> bool:
        """Is what a condition on one loop variable guards known outside of that loop? Some point of it takes that: it is computed ahead, without a condition (under one gcc makes no vectors of a load that stays)."""
        symbol = self._somewhere(value.cond) if self._reads_memory(value.value) else None
        return symbol is not None and self.depth(value.value) < self.depths[symbol]

    def _somewhere(self, cond: Value) -> Sym | None:
        """The loop variable that alone decides a condition, where that holds at some point of the loop."""
        if not isinstance(cond, IndexValue) or len(cond.expr.free) != 1:
            return None
        (symbol,) = cond.expr.free
        least, most = symbol.lo, symbol.hi
        if isinstance(symbol, Indirect) or least is None or most is None:
            return None
        numbers = (part.const if isinstance(part, Add) else part.value for part in walk(cond.expr) if isinstance(part, Add | IntConst))
        edges = (at + step for n in numbers for at in (n, -n) for step in (-1, 0, 1))
        return symbol if any(evaluate(cond.expr, {symbol: at}) for at in (least, most, *edges) if least <= at <= most) else None

    def _one_plus(self, value: Op) -> Op | None:
        """The function in 1 + erf(x), 1 + exp(x) and 1 + tanh(x): it needs no accuracy far below 1 and is much cheaper so. The hearts of gelu and the sigmoid function."""
        for one, other in (value.args, value.args[::-1]):
            if isinstance(one, Const) and one.value == 1.0:
                other = self._inlined(other)
                if isinstance(other, Op) and other.name in ONE_PLUS and other not in self.shared:
                    return other
        return None

    def _is_silu(self, value: Op) -> bool:
        """x / (1 + exp(-x))?"""
        x, below = (self._inlined(a) for a in value.args)
        function = self._one_plus(below) if isinstance(below, Op) and below.name == "add" and below.dtype is torch.float32 else None
        inner = self._inlined(function.args[0]) if function is not None and function.name == "exp" else None
        return isinstance(inner, Op) and inner.name == "neg" and self._inlined(inner.args[0]) == x

    def _below_maximum(self, value: Value) -> bool:
        """Is it x minus the largest x of the row, as under the exponential function of a softmax?"""
        value = self._inlined(value)
        if not isinstance(value, Op) or value.name != "sub":
            return False
        largest = self._inlined(value.args[1])
        of = self.maxima.get(largest.buffer) if isinstance(largest, Load) else None
        return of is not None and self._inlined(of) == self._inlined(value.args[0])

    def _is_softmax(self, value: Op) -> bool:
        """Is it exp(x - the largest x of the row), divided by the row's sum of those, which is 1 at least?"""
        below = self._inlined(value.args[1])
        added = self.sums.get(below.buffer) if isinstance(below, Load) else None
        top = self._body(value.args[0])
        return (
            added is not None
            and self._body(added) == top
            and isinstance(top, Op)
            and top.name == "exp"
            and self._below_maximum(self._body(top.args[0]))
        )

    def _body(self, value: Value) -> Value:
        """How the kernel computes a value, at hand or not."""
        while isinstance(value, Load) and (found := self.bodies.get(value.buffer)) is not None:
            value = found
        return value

    def exact(self, value: Value) -> bool:
        """Does bfloat16 hold the value as it is? It need not be rounded."""
        found = self._exact.get(value)
        if found is None:
            found = self._exact[value] = self._is_exact(value)
        return found

    def _is_exact(self, value: Value) -> bool:
        value = self._inlined(value)
        if isinstance(value, Const):
            return value.value == 0 or not int.from_bytes(struct.pack("<f", value.value), "little") & 0xFFFF
        if isinstance(value, Masked):
            return self.exact(value.value) and self.exact(value.other)
        if isinstance(value, Op) and value.name == "convert_element_type":
            (source,) = value.args
            return value.dtype is torch.bfloat16 or source.dtype is torch.bool or (source.dtype is torch.bfloat16 and self.exact(source))
        if isinstance(value, Op):
            return value.name in CHOOSING and all(map(self.exact, value.args[value.name == "where" :]))
        return isinstance(value, Load) and value.dtype is torch.bfloat16

    def _normal(self, value: Op) -> tuple[Value, ...] | None:
        """(x,) for 0.5 * (1 + erf(x / sqrt 2)), the normal distribution; (y, x) for y * 0.5 * (1 + erf(x / sqrt 2))."""
        for half, other in (value.args, value.args[::-1]):
            other = self._inlined(other)
            if not (isinstance(other, Op) and other.name == "add") or (function := self._one_plus(other)) is None or function.name != "erf":
                continue
            scaled = self._inlined(function.args[0])
            x = _times(scaled, SQRT_HALF)
            if x is not None and isinstance(half, Const) and half.value == 0.5:
                return (x,)
            if x is not None and (y := _times(self._inlined(half), 0.5)) is not None:
                return (y, x)
        return None

    def _inlined(self, value: Value) -> Value:
        """What is computed in place of a load."""
        while isinstance(value, Load) and isinstance(found := self.resolve(value), Value):
            value = found
        return value

    def _depth_under(self, value: Value, mask: str) -> int:
        """The scope in which `emit` computes a value."""
        depth = self.depth(value)
        return max(depth, self._mask_depths[mask]) if mask and self._reads_memory(value) else depth

    def _reads_memory(self, value: Value) -> bool:
        """Does the value read memory, divide or check an index, so that it must not be computed where its mask is false?"""
        found = self._reading.get(value)
        if found is None:
            reads = isinstance(value, Load) or (isinstance(value, Op) and value.name in DIVIDING)
            reads = reads or (isinstance(value, IndexValue) and any(isinstance(s, Indirect) for s in value.expr.free))
            found = self._reading[value] = reads or any(map(self._reads_memory, value.children()))
        return found

    def _worth_inverting(self, value: Op, depth: int, mask: str) -> bool:
        """Is the divisor known outside of the vector loop that divides by it?"""
        divisor = value.args[1]
        if isinstance(divisor, Const):
            size = abs(float(divisor.value.real))
            exact = size == 0 or math.frexp(size)[0] == 0.5  # a power of two: gcc multiplies
            return (not exact or (size > 1 and any_size())) and depth > 0
        return self._depth_under(divisor, mask) < depth == len(self.scopes) - 1

    def _inverse(self, divisor: Value, text: str, mask: str) -> tuple[str, str, str]:
        """(scaled divisor, its reciprocal, the scale), computed in the divisor's scope."""
        key = (divisor, f"inverse {text}")
        for scope in self.scopes:
            if (found := scope.memo.get(key)) is not None:
                return f"{found}s", f"{found}r", f"{found}k"
        name = self.fresh("d")
        scope = self.scopes[self._depth_under(divisor, mask)]
        scope.lines.append(f"f32 {name}k = mg_div_scale({text}), {name}s = {text} * {name}k, {name}r = 1.0f / {name}s;")
        scope.memo[key] = name
        return f"{name}s", f"{name}r", f"{name}k"

    def _load(self, load: Load, mask: str, depth: int) -> str:
        try:
            pointer = self.pointers[load.buffer]
        except KeyError:
            raise CannotEmit(f"buffer {load.buffer} is not a parameter of the kernel") from None
        if not mask and (local := self.local.get(load)) is not None:
            return local
        text = from_memory(f"{pointer}[{self._address(load.index, mask, depth)}]", load.dtype)
        return f"{mask} ? {text} : 0" if mask else text

    def index(self, index: Expr, mask: str, depth: int) -> str:
        """C text of an index expression; computed indices are checked."""
        computed = {
            s: self._computed_index(s, mask) for s in sorted((s for s in index.free if isinstance(s, Indirect)), key=lambda s: s.key)
        }
        return to_c(index, lambda s: computed[s] if isinstance(s, Indirect) else self.variables[s])

    def _address(self, index: Expr, mask: str, depth: int) -> str:
        """As `index`; what moves irregularly along the innermost loop is computed in 32 bits, which is what makes it a gather of the vector unit."""
        terms = index.terms if isinstance(index, Add) else ((index, 1),)
        innermost = {s for s, d in self.depths.items() if d == len(self.scopes) - 1}
        moving = [(t, c) for t, c in terms if not innermost.isdisjoint(t.free)]
        if depth == len(self.scopes) - 1 and any(not isinstance(t, Sym) for t, _ in moving):
            part = add(0, 0, *(mul(t, c) for t, c in moving))
            if text := self._narrow(part):
                return f"{self.index(index - part, mask, depth)} + (i64)({text})"
        return self.index(index, mask, depth)

    def _narrow(self, index: Expr) -> str:
        """C text of an index expression in 32 bits; empty where something in it might not fit, or is read from memory."""
        work: list[Expr] = [index]
        while work:
            part = work.pop()
            if part.lo is None or part.hi is None or part.lo <= -NARROW or part.hi >= NARROW or isinstance(part, Indirect):
                return ""
            work.extend(part.children())
        text = to_c(index, lambda s: f"(i32){self.variables[s]}")
        return re.sub(r"\bmg_(min|max|floordiv|floormod)\(", r"mg_\1_i32(", text)

    def _computed_index(self, symbol: Indirect, mask: str) -> str:
        depth = max(self.depth(symbol.value), self._mask_depths.get(mask, 0))
        key = (symbol.value, f"index {symbol.extent} {mask}")
        for scope in self.scopes:
            if (found := scope.memo.get(key)) is not None:
                return found
        raw = self.emit(symbol.value, mask)
        if self._may_be_truth(symbol.value):
            raw = f"MG_INTEGER({raw})"  # gcc 12 gathers by the truth value itself, which is -1 or a bit in its vectors
        place, (least, most) = f"(i64){raw}", bounds_of(symbol.value)
        name = self.fresh("ix")
        if least >= 0 and isinstance(symbol.extent, int) and most < symbol.extent:
            if symbol.value.dtype is torch.int32:
                return place  # 32 bits wide, which is what the vector unit gathers by
        else:
            bad = f"(u64)(i64){raw} >= (u64){to_c(symbol.extent)}"
            self._check(depth, bad, BAD_INDEX, mask)
            place = f"{bad} ? 0 : {place}"
        self.scopes[depth].lines.append(f"i64 {name} = {place};")
        self.scopes[depth].memo[key] = name
        return name

    def _may_be_truth(self, value: Value) -> bool:
        """May the compiler find that a whole number is one of two, by a comparison?"""
        work: list[Any] = [value]
        met = set[Any]()
        while work:
            one = work.pop()
            if one in met or isinstance(one, Const):
                continue
            met.add(one)
            answer = self.resolve(one) if isinstance(one, Load) else None
            computed = isinstance(answer, tuple) or (isinstance(one, Op) and one.name not in _OF_MANY)
            if computed or one.dtype is torch.bool or one.dtype.is_floating_point:
                return True
            parts: tuple[Any, ...] = () if answer is None else (answer,)
            if isinstance(one, Op | Masked):
                parts = (one.value, one.other) if isinstance(one, Masked) else one.args[one.name == "where" :]
            (least, most), known = bounds_of(one), [isinstance(part, Const) for part in parts]
            if any(known) and (all(known) or isinstance(one, Masked) or (one.name in CHOOSING and most - least < 2)):
                return True
            work.extend(parts)
        return False

    def _check(self, depth: int, bad: str, bit: int, mask: str) -> None:
        scope = self.scopes[depth]
        scope.checks = True
        condition = f"({mask}) & ({bad})" if mask else bad
        scope.lines.append(f"status |= ({condition}) ? {bit} : 0;")


def _times(value: Value, factor: float) -> Value | None:
    """x where the value is x * factor."""
    if isinstance(value, Op) and value.name == "mul":
        for x, other in (value.args, value.args[::-1]):
            if isinstance(other, Const) and abs(float(other.value.real) - factor) < 1e-7:
                return x
    return None


def plain_loads(value: Value) -> list[Load]:
    """Loads that are executed at every point, not under a mask only."""
    found: dict[Value, None] = {}
    work = [value]
    while work:
        value = work.pop()
        if value not in found:
            found[value] = None
            work.extend((value.cond, value.other) if isinstance(value, Masked) else value.children())
    return [v for v in found if isinstance(v, Load)]


def indent(lines: Sequence[str]) -> list[str]:
    """One level deeper; pragmas stay at the margin."""
    return [line if line.startswith("#") else f"    {line}" for line in lines]
