"""Body values -> statements of Triton. Every value is emitted once per scope: the kernel, or the loop over `r` inside it.

A value has *axes*: those of the block that it varies along. Its shape has the block's size there and 1 elsewhere; without axes it is a scalar.
A load is masked by the axes of its index that blocks do not divide, and by the conditions (`Masked`) under which alone it may be executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import frexp, ldexp

import torch

from magneto.base.dataclass import dataclass, field
from magneto.base.flags import config
from magneto.inductor.codegen.cpp_types import HALVES, CannotEmit
from magneto.inductor.codegen.triton_nest import spread_out
from magneto.inductor.codegen.triton_ops import BARE, COMPARISONS, ROUGH, op_text
from magneto.inductor.codegen.triton_types import BYTES, compute_type, convert, literal, number
from magneto.inductor.loops.ir import Const, IndexValue, Indirect, Load, Masked, Op, Value, bounds_of, walk_values
from magneto.inductor.loops.philox import limit_of
from magneto.inductor.loops.scans import SCANS, neutral_of
from magneto.symbolic import Add, And, Cmp, Expr, FloorDiv, Max, Min, Mod, Mul, Or, Sym, floordiv, mod
from magneto.symbolic import Const as IntConst

NARROW = 1 << 31
SHARED = 256  # elements of a block along an axis, some of which a thread holds, that make a divisor which they share worth inverting
SHARED_TWICE = 32  # the same where there are several quotients by it
SQRT_HALF = 0.7071067811865476
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Scanned:
    """How Triton joins elements in order. `name`: of the library's function of two elements (of pairs: `_before`)."""

    name: str
    infix: str = ""
    order: str = ""
    total: str = ""

    def join(self, a: str, b: str) -> str:
        return f"{a} {self.infix} {b}" if self.infix else f"lib.{self.name}({a}, {b})"

    def scan(self, of: str, option: str = "") -> str:
        return f"{self.order}({of}, 1{option})" if self.order else f"tl.associative_scan({of}, 1, lib.{self.name}{option})"

    def whole(self, of: str) -> str:
        return f"{self.total}({of}, 1)" if self.total else f"tl.reduce({of}, 1, lib.{self.name})"


SCANNED = {
    "scan_sum": Scanned("sum", "+", "tl.cumsum", "tl.sum"),
    "scan_prod": Scanned("product", "*", "tl.cumprod"),
    "scan_max": Scanned("maximum"),
    "scan_min": Scanned("minimum"),
    "scan_logaddexp": Scanned("logaddexp"),
}


@dataclass(frozen=True, slots=True)
class Name:
    """An emitted value: its text, and the axes it varies along."""

    text: str
    axes: frozenset[str] = NOTHING


@dataclass(slots=True)
class Scope:
    lines: list[str] = field(default_factory=list)
    memo: dict[object, Name] = field(default_factory=dict)


Answer = Callable[[Load], "Name | Value | None"]


class Emitter:
    """`axes`: names of the block's dimensions in order; `masks`: axis -> the name of its mask, where it needs one; `symbols`: symbol -> what it is called;
    `wide`: indices need 64 bits; `resolve`: what a load of something that the kernel computes itself is; `halves`: all elements in memory have 16 bits; `rough`: and
    quotients may be a unit of float32 beside the nearest one."""

    def __init__(
        self, pointers: Mapping[str, str], axes: Sequence[str], masks: Mapping[str, str], wide: bool, resolve: Answer, halves: bool = False,
        rough: bool = False,
    ) -> None:  # fmt: skip
        self.pointers, self.axes, self.masks, self.wide, self.resolve = pointers, tuple(axes), masks, wide, resolve
        self.halves, self.rough = halves, rough
        self.checks: list[tuple[str, frozenset[str]]] | None = None  # in a loop: what must hold of computed indices, and along which axes
        self.places: list[str] = []  # in such a loop: what computed indices are
        self.passing = False  # looked up rows go by: the cache keeps the indices
        self.summing = False  # rows are looked up and summed: those of large tables need not stay in the cache either
        self.inner = "r"  # the axis that a loop walks: what does not vary along it stands before the loop
        self.symbols: dict[Sym, Name] = {}
        self.dense: dict[Expr, Name] = {}  # an axis counts several dimensions: the index that walks them as they lie
        self.scopes: list[Scope] = [Scope()]
        self.along: Expr | None = None  # what walks the last axis, where a block holds whole groups of four of it
        self.block = self.walked = 0  # elements of a block there; of what such blocks begin at a multiple of
        self.carrying = False  # rows are walked in a loop: sums in order go on in its next turn
        self.reverse = False  # sums in order begin at the end of a row
        self.run = 1  # elements of the last axis that a thread adds up in order
        self.grouped: set[int] = set()  # groups of so many elements are counted there
        self.used: set[Sym] = set()
        self.readable: dict[tuple[Value, frozenset[str]], bool] = {}
        self.sizes: dict[str, int] = {}  # elements of buffers
        self.positional: set[str] = set()  # conditions on places alone
        self.blocks: dict[str, int] = {}  # elements of a block along each axis
        self.divisors: Counter[Value] = Counter()  # how many quotients by it there are
        self.count = 0

    # ---- names and scopes ------------------------------------------------------------------------------------------------

    def fresh(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def line(self, text: str, axes: frozenset[str]) -> None:
        """A statement, where what it needs is known."""
        self.scopes[-1 if self.inner in axes else 0].lines.append(text)

    def name(self, text: str, axes: frozenset[str], key: object = None, prefix: str = "t") -> Name:
        """A new variable for an expression."""
        made = Name(self.fresh(prefix), axes)
        self.line(f"{made.text} = {text}", axes)
        if key is not None:
            self.scopes[-1 if self.inner in axes else 0].memo[key] = made
        return made

    def found(self, key: object) -> Name | None:
        return next((scope.memo[key] for scope in self.scopes if key in scope.memo), None)

    def shape(self, axes: frozenset[str]) -> str:
        return f"[{', '.join(f'{a.upper()}BLOCK' if a in axes else '1' for a in self.axes)}]"

    def spread(self, value: Name, axes: frozenset[str], dtype: str) -> str:
        """The value over all these axes."""
        if value.axes == axes or not axes:
            return value.text
        if not value.axes:
            return f"tl.full({self.shape(axes)}, {value.text}, {dtype})"
        return f"tl.broadcast_to({value.text}, {self.shape(axes)})"

    # ---- values ----------------------------------------------------------------------------------------------------------

    def emit(self, value: Value, under: Name | None = None) -> Name:
        """The variable of a value. `under`: the condition under which alone memory may be read."""
        if isinstance(value, Const):
            return Name(literal(value.value, value.dtype))
        if isinstance(value, Load):
            answer = self.resolve(value)
            if isinstance(answer, Name):
                return answer
            if answer is not None:
                return self.emit(answer, under)
        if under is not None and ((isinstance(value, Op) and value.name in SCANS) or self._readable(value, under.axes)):
            under = None  # of what follows as well
        key = (value, under)
        known = self.found(key) or (self.found((value, None)) if under is not None else None)  # what is known everywhere is known here
        if known is not None:
            return known
        if isinstance(value, Load):
            text, axes = self._load(value, under)
        elif isinstance(value, IndexValue):
            text, axes = self._index_value(value, under)
        elif isinstance(value, Masked):
            text, axes = self._masked(value, under)
        else:
            assert isinstance(value, Op)
            text, axes = self._op(value, under)
        return self.name(text, axes, key)

    def _op(self, value: Op, under: Name | None, rough: bool = False) -> tuple[str, frozenset[str]]:
        if value.name == "uniform":
            return self._uniform(value, under)
        if value.name in SCANS:
            return self._scan(value)
        if value.name == "lt" and (drawn := self._drawn(value.args[0])) is not None:
            limit = value.args[1]
            if isinstance(limit, Const) and isinstance(limit.value, float) and 0 < (words := limit_of(limit.value)) < 1 << 32:
                return self._uniform(drawn, under, words)
        if self.halves and (short := self._short(value)) is not None:
            name = self.emit(short[1], under)
            return f"lib.{short[0]}_of_half({name.text})", name.axes
        if self.halves and value.name == "convert_element_type" and value.dtype is torch.bfloat16:
            wide = self._seen(value.args[0])
            if isinstance(wide, Op) and not self.found((wide, under)) and (short := self._short(wide)) is not None and short[0] == "gelu":
                name = self.emit(short[1], under)
                return convert(f"lib.gelu_of_bfloat16({name.text})", wide.dtype, value.dtype), name.axes
        if value.name == "convert_element_type" and value.dtype in HALVES:
            wide = self._seen(value.args[0])
            if isinstance(wide, Op) and wide.name in ROUGH and not self.found((wide, under)):
                text, axes = self._op(wide, under, True)
                return convert(f"({text})", wide.dtype, value.dtype), axes
        consts = [isinstance(a, Const) for a in value.args]
        if value.name in ("floordiv", "remainder", "fmod") and not value.dtype.is_floating_point and _is(value.args[1], 0):
            raise CannotEmit("integer division by 0")  # the compiler may make anything of it
        kind = value.args[0].dtype if value.args else value.dtype
        bare = (
            value.name in BARE and not all(consts) and kind is not torch.bool and not (kind is torch.float64 and value.name in COMPARISONS)
        )
        names = [self.emit(a, under) if not (bare and c) else None for a, c in zip(value.args, consts, strict=True)]
        texts = [n.text if n is not None else f"({number(a.value, a.dtype)})" for n, a in zip(names, value.args, strict=True)]  # type: ignore[attr-defined]
        axes = frozenset(a for n in names if n is not None for a in n.axes)
        if value.name == "div" and (inverse := _inverse(value.args[1])) is not None:
            return f"{texts[0]} * {inverse!r}", axes
        if (
            value.name == "div"
            and kind is torch.float32
            and not (rough or self.rough or consts[1])
            and config.numerics == "fast"  # quotients below 2**-103
            and self._shared(value.args[1], names[1], axes)
        ):
            return f"lib.divide({texts[0]}, {texts[1]})", axes
        return op_text(value.name, texts, value.args[-1].dtype, value.dtype, self.halves, rough or self.rough), axes

    def _shared(self, divisor: Value, name: Name | None, axes: frozenset[str]) -> bool:
        """Do many elements of a thread share it, or several quotients of fewer?"""
        return name is not None and any(
            self.blocks[a] >= (SHARED_TWICE if self.divisors[divisor] > 1 else SHARED) for a in axes - name.axes
        )

    def _scan(self, value: Op) -> tuple[str, frozenset[str]]:
        """What lies behind a row's end is added up last, so that it needs no mask, but where sums begin there. In a loop the last element goes on to the next turn."""
        every, kind = frozenset(self.axes), compute_type(value.dtype)
        how = SCANNED[value.name.removesuffix("_back")]
        neutral = number(neutral_of(value.name, value.dtype), value.dtype)
        text, carry = self.spread(self.emit(value.args[0]), every, kind), self.fresh("a") if self.carrying else ""
        if carry:
            self.line(f"{carry} = tl.full({self.shape(every - {'r'})}, {neutral}, {kind})", every - {"r"})
        if self.reverse and "r" in self.masks:
            text = f"tl.where({self.masks['r']}, {text}, {neutral})"
        if self.run == 1:
            found = how.scan(text, ", reverse=True" if self.reverse else "")
            found = last = self.name(how.join(found, carry) if carry else found, every).text
        else:
            runs = self.name(f"tl.reshape({text}, [XBLOCK, {self.run}, RBLOCK // {self.run}])", every).text
            first, last = f"tl.full([XBLOCK, RBLOCK // {self.run}], {neutral}, {kind})", self.fresh()
            self.line(f"{last}, {last}b = tl.associative_scan(({how.whole(runs)}, {first}), 1, lib.{how.name}_before)", every)
            start = f"({how.join(f'{last}b', carry)})" if carry else f"{last}b"
            found = f"tl.reshape({how.join(how.scan(runs), f'{start}[:, None, :]')}, [XBLOCK, RBLOCK])"
            found = self.name(found, every).text
            if carry:
                self.line(f"{last} = {how.join(last, carry)}", every)
        if carry:
            size = "RBLOCK" if self.run == 1 else f"RBLOCK // {self.run}"
            self.line(
                f"{carry} = tl.sum(tl.where(tl.arange(0, {size})[None, :] == {'0' if self.reverse else f'{size} - 1'}, {last}, 0), 1)[:, None]",
                every,
            )
        return found, every

    def _short(self, value: Op) -> tuple[str, Value] | None:
        """Gelu, or its heart 1 + erf(x), which needs no accuracy far below 1."""
        if value.name not in ("mul", "add") or value.dtype is torch.float64:
            return None
        for first, other in (value.args, value.args[::-1]):
            second = self._seen(other)
            if value.name == "add" and _is(first, 1.0) and isinstance(second, Op) and second.name == "erf":
                return "one_plus_erf", second.args[0]
            if value.name == "mul" and isinstance(second, Op) and second.name == "add" and (half := self._times(first, 0.5)) is not None:
                inner = self._short(second)
                if inner is not None and self._times(inner[1], SQRT_HALF) is half:
                    return "gelu", half
        return None

    def _times(self, value: Value, number: float) -> Value | None:
        """x of x * number."""
        seen = self._seen(value)
        if isinstance(seen, Op) and seen.name == "mul":
            return next((self._seen(a) for a, b in (seen.args, seen.args[::-1]) if _is(b, number)), None)
        return None

    def _seen(self, value: Value) -> Value:
        """What the kernel computes itself, as it computes it."""
        while isinstance(value, Load) and (inner := self.resolve(value)) is not None and not isinstance(inner, Name):
            value = inner
        return value

    def _drawn(self, value: Value) -> Op | None:
        """The random number that a value is, as it is drawn or as a wider float."""
        value = self._seen(value)
        while isinstance(value, Op) and value.name == "convert_element_type" and value.dtype.is_floating_point and value.dtype.itemsize > 2:
            value = self._seen(value.args[0])
        return value if isinstance(value, Op) and value.name == "uniform" else None

    def _uniform(self, value: Op, under: Name | None, limit: int = 0) -> tuple[str, frozenset[str]]:
        """A random number, or whether it is one that the `limit` least words give. Neighbours whose numbers one call of Philox gives are computed together, where they lie along the last axis."""
        seed, offset, place, *grid = value.args
        threads, vector = (int(n.value) for n in grid if isinstance(n, Const))  # type: ignore[arg-type]
        state = f"{self.emit(seed, under).text}, {self.emit(offset, under).text}"
        if not isinstance(place, IndexValue):
            return f"lib.uniform({state}, tl.full([], 0, tl.int32), {threads}, {vector}, {limit})", NOTHING
        rest, each, row = place.expr - self.along if self.along is not None else None, min(vector, self.block), self.walked
        if rest is not None and vector >= 4 and not rest.free & self.along.free and mod(rest, 4) == IntConst(0):  # type: ignore[union-attr]
            each = each if mod(rest, each) == IntConst(0) else 4
            self.grouped.add(each)
            first, last = self.index(floordiv(rest, each), under), self.axes[-1]
            turns = place.expr.hi is None or place.expr.hi >= threads * vector
            whole = turns and each == vector and threads * vector % row == 0 and mod(rest, row) == IntConst(0)
            texts = f"{first.text} + {last}from{each}, {last}of{each}, {threads if turns else 0}, {vector // 4}, {each // 4}"
            return f"lib.uniforms({state}, {texts}, {whole}, {limit})", first.axes | {last}
        index = self.index(place.expr, under)
        return f"lib.uniform({state}, {index.text}, {threads}, {vector}, {limit})", index.axes

    def _masked(self, value: Masked, under: Name | None) -> tuple[str, frozenset[str]]:
        condition = self.emit(value.cond, under)
        if isinstance(value.cond, IndexValue) and not any(isinstance(s, Indirect) for s in value.cond.expr.free):
            self.positional.add(condition.text)
        inner = self._both(condition, under)
        read = value.value if value.other is Const(0, value.dtype) else None
        if isinstance(read, Load) and not self.resolve(read) and not self.found((read, None)) and not self._readable(read, inner.axes):
            a = self.emit(read, inner)  # elsewhere 0 is read
            return a.text, a.axes
        a, b = self.emit(value.value, inner), self.emit(value.other, under)
        return f"tl.where({condition.text}, {a.text}, {b.text})", condition.axes | a.axes | b.axes

    def _both(self, condition: Name, under: Name | None) -> Name:
        if under is None:
            return condition
        axes, key = condition.axes | under.axes, ("and", condition, under)
        both = self.found(key) or self.name(f"{condition.text} & {under.text}", axes, key, "c")
        if {condition.text, under.text} <= self.positional:
            self.positional.add(both.text)
        return both

    def _load(self, load: Load, under: Name | None) -> tuple[str, frozenset[str]]:
        pointer = self.pointers.get(load.buffer)
        if pointer is None:
            raise CannotEmit(f"buffer {load.buffer} is not a parameter of the kernel")
        place = self.index(load.index, under)
        axes = place.axes | (under.axes if under is not None else NOTHING)
        mask = self.mask(axes, under)
        text = f"{pointer} + {self.spread(place, axes, 'tl.int64' if self.wide else 'tl.int32')}"
        how = "" if mask is None else f", mask={mask}, other=0"
        if (self.passing and any(isinstance(s, Indirect) for s in load.index.free)) or (
            self.summing and spread_out(load.index, load.dtype.itemsize)
        ):
            how += ', eviction_policy="evict_first"'
        text = f"tl.load({text}{how})"
        compute_type(load.dtype)
        if load.dtype in BYTES:
            return f"lib.from_{BYTES[load.dtype]}({text})", axes
        return f"{text}.to(tl.float32)" if load.dtype in HALVES else text, axes

    def _readable(self, value: Value, axes: frozenset[str]) -> bool:
        """May all memory behind the value be read everywhere, and is it less than there are elements along the axes of a condition? It is read once for all conditions then."""
        known = self.readable.get((value, axes))
        if known is None:
            parts = walk_values(value)
            found = {part: self.resolve(part) for part in parts if isinstance(part, Load)}
            inner = [other for other in found.values() if other is not None and not isinstance(other, Name)]
            apart = [load for load, other in found.items() if other is None and not self._safe(load, axes)]
            simple = all(isinstance(part, Load | Op | Const | IndexValue) for part in parts) and bool(found)
            simple = simple and all(self._readable(other, axes) for other in inner)
            if simple and (apart or any((other, axes) not in self.readable for other in inner)):
                return all(self.found((load, None)) for load in apart)  # read already, in this scope
            known = self.readable[value, axes] = simple
        return known

    def _safe(self, load: Load, axes: frozenset[str]) -> bool:
        size, index = self.sizes.get(load.buffer), load.index
        if any(isinstance(s, Indirect) for s in index.free) or size is None or index.lo is None or index.hi is None:
            return False
        along = frozenset(a for s in index.free if s in self.symbols for a in self.symbols[s].axes)
        return index.lo >= 0 and index.hi < size and not axes <= along

    def mask(self, axes: frozenset[str], under: Name | None = None) -> str | None:
        """The condition for memory along these axes; None: it always holds."""
        parts = [self.masks[a] for a in self.axes if a in axes and a in self.masks]
        if under is not None:
            parts.append(under.text)
        return " & ".join(parts) or None

    # ---- indices ---------------------------------------------------------------------------------------------------------

    def _index_value(self, value: IndexValue, under: Name | None) -> tuple[str, frozenset[str]]:
        if isinstance(value.expr, IntConst):
            return literal(value.expr.value, value.dtype), NOTHING
        place = self.index(value.expr, under, not _narrow(value.expr))
        if value.dtype is torch.bool:
            return (f"{place.text} != 0" if not isinstance(value.expr, Cmp | And | Or) else place.text), place.axes
        return f"({place.text}).to({compute_type(value.dtype)})", place.axes

    def index(self, index: Expr, under: Name | None, wide: bool = False) -> Name:
        """An index expression; computed indices are checked."""
        if (dense := self.dense.get(index)) is not None and not wide:
            return dense
        axes: set[str] = set()
        names: dict[Sym, str] = {}
        for symbol in sorted(index.free, key=lambda s: s.key):
            if isinstance(symbol, Indirect):
                name = self._computed(symbol, under)
            else:
                name = self.symbols[symbol]
                self.used.add(symbol)
            names[symbol] = f"{name.text}.to(tl.int64)" if wide and not self.wide else name.text
            axes.update(name.axes)
        return Name(index_text(index, names), frozenset(axes))

    def _computed(self, symbol: Indirect, under: Name | None) -> Name:
        if under is not None and under.text in self.positional and not self.emit(symbol.value, under).axes & under.axes:
            under = None  # each of these numbers is used where the condition holds
        key = ("index", symbol, under)
        known = self.found(key)
        if known is not None:
            return known
        raw = self.emit(symbol.value, under)
        extent, kind = symbol.extent, "tl.int64" if self.wide else "tl.int32"
        if not isinstance(extent, int):
            raise CannotEmit(f"a symbolic extent {extent}")
        axes = raw.axes | (under.axes if under is not None else NOTHING)
        if bounds_of(symbol.value)[0] >= 0 and bounds_of(symbol.value)[1] < extent:
            if self.passing and self.inner in raw.axes:
                self.places.append(raw.text)
            return self.name(f"({raw.text}).to({kind})", raw.axes, key, "i")
        inside = self.name(f"({raw.text} >= 0) & ({raw.text} < {extent})", raw.axes, prefix="c")
        mask = self.mask(axes, under)
        asserted = inside.text if mask is None else f"{inside.text} | ~({mask})"
        if self.passing and self.inner in raw.axes:
            self.places.append(raw.text)
        if self.checks is None or self.inner not in axes:
            self.line(f'tl.device_assert({asserted}, "index out of range in self")', axes)
        else:
            self.checks.append((asserted, axes))
        return self.name(f"tl.where({inside.text}, {raw.text}, 0).to({kind})", raw.axes, key, "i")


def _is(value: Value, number: float) -> bool:
    return isinstance(value, Const) and isinstance(value.value, float | int) and abs(value.value - number) <= 1e-7 * number


def _inverse(value: Value) -> float | None:
    """What a product with is the quotient by a power of two, rounded alike."""
    known = isinstance(value, Const) and isinstance(value.value, float) and value.dtype.is_floating_point
    parts = frexp(value.value) if known else (0.0, 0)  # type: ignore[attr-defined]
    return ldexp(2 * parts[0], 1 - parts[1]) if abs(parts[0]) == 0.5 and abs(parts[1]) < 100 else None


def _narrow(index: Expr) -> bool:
    """Does everything in the expression fit 32 bits?"""
    work: list[Expr] = [index]
    while work:
        part = work.pop()
        if part.lo is None or part.hi is None or part.lo <= -NARROW or part.hi >= NARROW:
            return False
        work.extend(part.children())
    return True


def index_text(index: Expr, names: Mapping[Sym, str]) -> str:
    """Triton text of an integer expression (of a comparison: of int1)."""

    def go(e: Expr) -> str:
        match e:
            case IntConst():
                return str(e.value) if e.value >= 0 else f"({e.value})"
            case Sym():
                return names[e]
            case Add():
                parts = [f"{go(t)} * {c}" if c != 1 else go(t) for t, c in e.terms]
                return f"({' + '.join([*parts, *([str(e.const)] if e.const else [])])})"
            case Mul():
                return f"({' * '.join(map(go, e.factors))})"
            case FloorDiv() | Mod():
                if e.a.lo is not None and e.a.lo >= 0 and e.b.lo is not None and e.b.lo > 0:
                    return f"({go(e.a)} {'//' if isinstance(e, FloorDiv) else '%'} {go(e.b)})"
                return f"lib.int_{'floordiv' if isinstance(e, FloorDiv) else 'remainder'}({go(e.a)}, {go(e.b)})"
            case Cmp():
                return f"({go(e.a)} {_COMPARE[e.op]} {go(e.b)})"
            case Min() | Max():
                text = go(e.args[0])
                for arg in e.args[1:]:
                    text = f"tl.{'minimum' if isinstance(e, Min) else 'maximum'}({text}, {go(arg)})"
                return text
            case And() | Or():
                return f"({(' & ' if isinstance(e, And) else ' | ').join(map(go, e.args))})"
        raise CannotEmit(f"index {e!r}")

    return go(index)


_COMPARE = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}
