"""What programs do with numbers of a run, or that change from call to call, before they show them: divide by a count, round, format, put together. Each is a further expression of an `ItemTracker`, which
Python evaluates behind the graph; texts are such values too. What might raise is not delayed: it is tried with examples of each class first, or assumed of the number."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.item import CHANGING_TEXT, TEXTS_READ, ItemTracker
from magneto.dynamo.trackers.iterator import GeneratorTracker, iterate
from magneto.dynamo.trackers.lazy_number import changing, guard_types
from magneto.dynamo.trackers.lifted import decides
from magneto.dynamo.trackers.object import payload_of

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_EXAMPLES: dict[type, tuple[Any, ...]] = {
    float: (0.5, -3.0, 1e300, math.nan, math.inf, -math.inf),
    int: (1, -3, 0, 2**63),
    bool: (True, False),
    str: ("text", ""),
}
_PLAIN = (int, float, bool, str, type(None))


def late(m: Machine, fn: Callable[..., Any], template: str, operands: Sequence[Tracker], text: bool = True) -> Any:
    """`fn` of items, constants and (in a `text`) numbers that change from call to call, by `template`; NotImplemented where there are only constants, or where it
    raises for an example or gives something else than numbers and text."""
    items = [v for v in operands if isinstance(v, ItemTracker)]
    numbers = [v for v in operands if isinstance(v, ConstTracker) and text and stays_unread(m, v)]
    if not (items or numbers) or not all(
        isinstance(v, ItemTracker) or (isinstance(v, ConstTracker) and (v in numbers or type(v.read()) in _PLAIN)) for v in operands
    ):
        return NotImplemented
    examples = [_EXAMPLES[v.python_type()] if v in items or v in numbers else (v.try_const().value,) for v in operands]  # type: ignore[union-attr]
    kinds = set()
    for turn in range(max(map(len, examples))):
        try:
            kinds.add(type(fn(*[values[turn % len(values)] for values in examples])))
        except Exception:
            return NotImplemented
    if len(kinds) != 1 or not kinds <= _EXAMPLES.keys() or (not items and str not in kinds):
        return NotImplemented
    guard_types(m, *numbers)
    if not items:
        return ItemTracker(str, template, tuple(operands), m.count, CHANGING_TEXT)  # type: ignore[attr-defined]
    return ItemTracker(kinds.pop(), template, tuple(operands), min(item.born for item in items), items[0].operation)


def stays_unread(m: Machine, number: ConstTracker) -> bool:
    """Whether a number that is to be shown changes from call to call."""
    return type(number.value) in (int, float) and TEXTS_READ not in m.forced and changing(m, number)  # type: ignore[attr-defined]


def _row(fn: Callable[..., Any], template: str, text: bool = False) -> None:
    count = template.count("{}")

    def body(m: Machine, *args: Tracker) -> Any:
        return late(m, fn, template, args, text) if len(args) == count else NotImplemented

    prefer(fn, ConstTracker if text else ItemTracker)(body)
    if text:
        prefer(fn, ItemTracker)(body)
    elif count > 1:
        prefer(fn, ConstTracker, ItemTracker)(body)


for _name, _symbol in {"truediv": "/", "floordiv": "//", "mod": "%"}.items():
    _row(getattr(operator, _name), f"({{}} {_symbol} {{}})")
    _row(getattr(operator, f"i{_name}"), f"({{}} {_symbol} {{}})")
for _name in ("round", "len"):
    _row(getattr(builtins, _name), f"{_name}({{}})")
_row(round, "round({}, {})")
for _name in ("str", "repr", "ascii", "format"):
    _row(getattr(builtins, _name), f"{_name}({{}})", True)
_row(format, "format({}, {})", True)


def _of_math(fn: Any, text: str) -> None:
    """A function of `math`. `text`: what has to hold for the number, or it would raise: assumed, and checked behind the graph."""
    held = BuiltinTracker(fn)

    @prefer(fn, ItemTracker)
    def body(m: Machine, v: ItemTracker) -> Any:
        if v.cls is not float or (text and not m.assume(ItemTracker(bool, text, (v,), v.born, v.operation))):
            return NotImplemented
        return ItemTracker(type(fn(0.5)), "{}({})", (held, v), v.born, v.operation)


for _name in ("isnan", "isinf", "isfinite", "atan", "tanh"):
    _of_math(getattr(math, _name), "")
_of_math(math.exp, "({} < 700.0)")
_of_math(math.sqrt, "({} >= 0.0)")
for _name in ("log", "log2", "log10"):
    _of_math(getattr(math, _name), "({} > 0.0)")


def _divides(fn: Any, symbol: str) -> None:
    def body(m: Machine, left: Tracker, right: ItemTracker) -> Any:
        """A number of the run as divisor is assumed not to be zero."""
        if right.cls not in (float, int) or left.python_type() not in (float, int):
            return NotImplemented
        if not isinstance(left, (ItemTracker, ConstTracker)) or not m.assume(
            ItemTracker(bool, "({} != 0)", (right,), right.born, right.operation)
        ):
            return NotImplemented
        cls = int if symbol == "//" and left.python_type() is right.cls is int else float
        return ItemTracker(cls, f"({{}} {symbol} {{}})", (left, right), right.born, right.operation)

    prefer(fn, ConstTracker, ItemTracker)(body)
    prefer(fn, ItemTracker, ItemTracker)(body)


def _divided(fn: Any, symbol: str) -> None:
    @prefer(fn, ItemTracker, ConstTracker)
    def body(m: Machine, left: ItemTracker, right: ConstTracker) -> Any:
        """A number that changes from call to call (`self.total / self.count`) stays unread: only that it is not zero is guarded."""
        if left.cls not in (float, int) or not decides(m, right):
            return NotImplemented
        cls = int if symbol != "/" and left.cls is right.python_type() is int else float
        return ItemTracker(cls, f"({{}} {symbol} {{}})", (left, right), left.born, left.operation)


for _name, _symbol in {"truediv": "/", "floordiv": "//", "mod": "%"}.items():
    for _fn in (getattr(operator, _name), getattr(operator, f"i{_name}")):
        if _symbol != "%":
            _divides(_fn, _symbol)
        _divided(_fn, _symbol)


def _extreme(fn: Callable[..., Any]) -> None:
    def body(m: Machine, *args: Tracker) -> Any:
        """Of one class: otherwise the class of the result depends on the numbers."""
        if len(args) < 2 or len({v.python_type() for v in args}) > 1:
            return NotImplemented
        return late(m, fn, f"{fn.__name__}({', '.join(['{}'] * len(args))})", args, False)

    prefer(fn, ItemTracker, Tracker)(body)
    prefer(fn, ConstTracker, ItemTracker)(body)


_extreme(max)
_extreme(min)


@prefer(str.format, ConstTracker)
def formatted(m: Machine, v: ConstTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    names = tuple(kwargs)
    places = ", ".join(["{}"] * len(args) + [f"{name}={{}}" for name in names])

    def fill(text: str, *values: Any) -> str:
        return text.format(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

    return late(m, fill, f"{{}}.format({places})", [v, *args, *kwargs.values()])


@prefer(str.__mod__, ConstTracker, Tracker)
def percent(m: Machine, v: ConstTracker, arg: Tracker) -> Any:
    if isinstance(arg, (ItemTracker, ConstTracker)):
        return late(m, operator.mod, "({} % {})", [v, arg])
    if not isinstance(arg, TupleTracker) or arg.cls is not tuple:
        return NotImplemented
    items = arg.items(m)
    return late(m, lambda text, *values: text % values, f"({{}} % ({'{}, ' * len(items)}))", [v, *items])


@prefer(operator.mod, ConstTracker, ConstTracker)
def percent_of_one(m: Machine, v: ConstTracker, arg: ConstTracker) -> Any:
    return percent(m, v, arg) if type(v.value) is str else NotImplemented


@prefer(str.join, ConstTracker, Tracker)
def joined(m: Machine, v: ConstTracker, items: Tracker) -> Any:
    if isinstance(items, GeneratorTracker):
        return m.apply(str.join, v, TupleTracker(iterate(m, items)))
    if not isinstance(payload_of(items), TupleTracker) and not hasattr(payload_of(items), "items"):
        return NotImplemented
    parts = iterate(m, items)
    return late(m, lambda text, *values: text.join(values), f"{{}}.join(({'{}, ' * len(parts)}))", [v, *parts])
