"""Numbers that are computed from unread numbers stay unread: `self.steps += 1` guards the type of `steps`, not its value.

A counter that changes with each call then costs no recompile. As soon as the number decides something (a branch, a shape, an operand of a tensor
operation) it is read, and with it what it was computed from: the usual EQUALS rows. Numbers that are known to change (`Machine.changing`) are computed by the
region in more ways, also such that may raise: before anything else happens, so that CPython can run the frame again and raise the program's own exception.
"""

from __future__ import annotations

import builtins
import math
import operator
from typing import TYPE_CHECKING, Any

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_scalar
from magneto.dynamo.trackers.dispatch import rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Emitter, Machine

SAFE: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd), "({} + {})"),
    **dict.fromkeys((operator.sub, operator.isub), "({} - {})"),
    **dict.fromkeys((operator.mul, operator.imul), "({} * {})"),
    operator.neg: "(-{})",
    operator.pos: "(+{})",
}
"""Operations that never raise on numbers (a float overflow gives inf), and whose result's type follows from the operands' types."""

_BITS = {"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}
CHECKED: dict[Any, str] = {
    **dict.fromkeys((operator.truediv, operator.itruediv), "({} / {})"),
    **dict.fromkeys((operator.floordiv, operator.ifloordiv), "({} // {})"),
    **dict.fromkeys((operator.mod, operator.imod), "({} % {})"),
    **dict.fromkeys((operator.pow, operator.ipow), "(({}) ** {})"),  # -2 ** x is -(2 ** x)
    **{getattr(operator, f"__{i}{name}__"): f"({{}} {symbol} {{}})" for i in ("", "i") for name, symbol in _BITS.items()},
    operator.invert: "(~{})",
    **{fn: f"{fn.__name__}({{}})" for fn in (abs, float, int, round)},
    **{fn: f"{fn.__name__}({{}}, {{}})" for fn in (min, max)},
    **{getattr(math, name): f"math.{name}({{}})" for name in "sqrt exp log log2 log10 log1p expm1 sin cos tan tanh floor ceil".split()},
    math.pow: "math.pow({}, {})",
}
"""Operations that may raise, or give another type for other values: the region computes them first of all, and checks the type."""

MAX_DEPTH = 32  # operations in one expression; a longer one is read
MAX_SIZE = 128  # operations in all, those of what is used twice counted twice: such an expression is written out, and walked often


class ComputedNumber(ConstTracker):
    """`template` over `operands`, at least one of which is unread; `checked`: see CHECKED; `settled`: its own value is guarded, not what it comes from."""

    __slots__ = ("checked", "depth", "operands", "settled", "size", "template")

    def __init__(self, value: Any, template: str, operands: tuple[ConstTracker, ...], checked: bool) -> None:
        super().__init__(value)
        self.template, self.operands, self.checked = template, operands, checked
        made = [operand for operand in operands if isinstance(operand, ComputedNumber)]
        self.depth: int = 1 + max((one.depth for one in made), default=0)
        self.size: int = 1 + sum(one.size for one in made)
        self.settled = False

    def read(self) -> Any:
        """The value, guarded: a whole number by itself where it comes from one changing number, so that other values of that one may give it too."""
        if self.settled:
            return self.value
        found = leaves(self)
        if type(self.value) is int and found and len({leaf.source for leaf in found}) == 1:
            machine = found[0]._machine
            if machine is not None and found[0].source in machine.changing:
                guard_types(machine, self)
                machine.guard(Kind.RELATION, found[0].source, f"{text_of(self, '{}')} == {self.value}")
                self.settled = True
                return self.value
        for operand in self.operands:
            operand.read()
        return self.value

    def python_type(self) -> type:
        return type(self.value)

    def emit(self, em: Emitter) -> str:
        if not is_unread(self):
            return em.const(self.value)
        text = self.template.format(*[em.value(operand) for operand in self.operands])
        cls = type(self.value)
        return em.early(f"typed({text}, {em.const(cls, cls.__name__)})") if self.checked else text

    def text_of(self, name: str | Mapping[Any, str]) -> str:
        """The expression, with `name` (that of its source) for what is unread in it."""
        return self.template.format(*[text_of(operand, name) for operand in self.operands])


def typed(value: Any, cls: type) -> Any:
    """A number that the region has computed, if it has the type it had at capture; otherwise the region gives up."""
    if type(value) is not cls:
        raise TypeError(f"a number of type {cls.__name__} is a {type(value).__name__} now")
    return value


def text_of(number: ConstTracker, name: str | Mapping[Any, str]) -> str:
    if isinstance(number, ComputedNumber) and not number.settled:
        return number.text_of(name)
    if not is_unread(number):
        return f"({number.value!r})"
    return name if isinstance(name, str) else name[number.source]


def is_unread(tracker: ConstTracker) -> bool:
    """Whether nobody has looked at the value yet."""
    if isinstance(tracker, ComputedNumber):
        return not tracker.settled and any(is_unread(operand) for operand in tracker.operands)
    return tracker._machine is not None


def leaves(number: ConstTracker) -> list[ConstTracker]:
    """The unread numbers that a number was computed from (itself when it is one)."""
    if isinstance(number, ComputedNumber) and number.settled:
        return []
    if isinstance(number, ComputedNumber):
        return [leaf for operand in number.operands for leaf in leaves(operand)]
    return [number] if is_unread(number) else []


def changing(m: Machine, *numbers: ConstTracker) -> bool:
    """Whether something unread is in these numbers that is known to differ between calls. What is not known to differ beside it is read."""
    found = [leaf for number in numbers for leaf in leaves(number)]
    steady = [leaf for leaf in found if leaf.source not in m.changing]
    if len(steady) == len(found):
        return False
    for leaf in steady:
        leaf.read()
    return True


def guard_types(m: Machine, *numbers: ConstTracker) -> None:
    """The unread numbers keep their types."""
    for number in numbers:
        for leaf in leaves(number):
            m.guard(Kind.TYPE_IS, leaf.source, type(leaf.value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or (is_numpy_scalar(value) and hasattr(value, "item") and value.dtype.kind in "if")


def compute(m: Machine, fn: Any, template: str, numbers: Sequence[ConstTracker], checked: bool) -> Any:
    """`fn` of numbers as an unread number; NotImplemented where it has to be read."""
    if not any(is_unread(number) for number in numbers) or (checked and not changing(m, *numbers)):
        return NotImplemented
    if not all(_is_number(number.value) and math.isfinite(number.value) for number in numbers):
        return NotImplemented
    try:
        value = fn(*[number.value for number in numbers])
    except Exception:  # the usual way reads the operands and raises in the program
        return NotImplemented
    if not _is_number(value) or (type(value) is int and value.bit_length() > 1024):
        return NotImplemented
    made = ComputedNumber(value, template, tuple(numbers), checked)
    if made.depth > MAX_DEPTH or made.size > MAX_SIZE:
        return NotImplemented
    guard_types(m, *numbers)
    return made


def _arithmetic(fn: Any, template: str, checked: bool) -> None:
    if template.count("{}") == 1:

        @rule(fn, ConstTracker)
        def unary(m: Machine, number: ConstTracker, *more: Any, **named: Any) -> Any:
            return NotImplemented if more or named else compute(m, fn, template, (number,), checked)

    else:

        @rule(fn, ConstTracker, ConstTracker)
        def binary(m: Machine, left: ConstTracker, right: ConstTracker, *more: Any, **named: Any) -> Any:
            return NotImplemented if more or named else compute(m, fn, template, (left, right), checked)


for _fn, _template in SAFE.items():
    _arithmetic(_fn, _template, checked=False)
for _fn, _template in (*CHECKED.items(), (round, "round({}, {})")):
    _arithmetic(_fn, _template, checked=True)

NAMES: dict[str, Any] = {"math": math, **{name: getattr(builtins, name) for name in "abs float int round min max".split()}}
"""What the templates use."""
