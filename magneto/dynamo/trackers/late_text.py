"""What programs do with numbers of a run before they show them: divide by a count, round, format, put together. Each is a further expression of an `ItemTracker`, which
Python evaluates behind the graph; texts are such values too. What might raise is not delayed: it is tried with examples of each class first, or assumed of the number."""

from __future__ import annotations

import builtins
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.container import TupleTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.function import BuiltinTracker
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.iterator import iterate
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


def late(fn: Callable[..., Any], template: str, operands: Sequence[Tracker]) -> Any:
    """`fn` of items and constants, by `template`; NotImplemented where there is no item, or where it raises for an example or gives something else than numbers and text."""
    items = [v for v in operands if isinstance(v, ItemTracker)]
    if not items or not all(isinstance(v, ItemTracker) or (isinstance(v, ConstTracker) and type(v.read()) in _PLAIN) for v in operands):
        return NotImplemented
    kinds = set()
    for turn in range(max(len(_EXAMPLES[item.cls]) for item in items)):
        values = [_example(v, turn) for v in operands]
        try:
            kinds.add(type(fn(*values)))
        except Exception:
            return NotImplemented
    if len(kinds) != 1 or not kinds <= _EXAMPLES.keys():
        return NotImplemented
    return ItemTracker(kinds.pop(), template, tuple(operands), min(item.born for item in items), items[0].operation)


def _example(v: Tracker, turn: int) -> Any:
    if isinstance(v, ItemTracker):
        return next(itertools.islice(itertools.cycle(_EXAMPLES[v.cls]), turn, None))
    assert isinstance(v, ConstTracker)
    return v.read()


def _row(fn: Callable[..., Any], template: str) -> None:
    count = template.count("{}")

    def body(m: Machine, *args: Tracker) -> Any:
        return late(fn, template, args) if len(args) == count else NotImplemented

    prefer(fn, ItemTracker)(body)
    if count > 1:
        prefer(fn, ConstTracker, ItemTracker)(body)


for _name, _symbol in {"truediv": "/", "floordiv": "//", "mod": "%"}.items():
    _row(getattr(operator, _name), f"({{}} {_symbol} {{}})")
    _row(getattr(operator, f"i{_name}"), f"({{}} {_symbol} {{}})")
for _name in ("format", "round"):
    _row(getattr(builtins, _name), f"{_name}({{}}, {{}})")
for _name in ("str", "repr", "ascii", "format", "round", "len"):
    _row(getattr(builtins, _name), f"{_name}({{}})")


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


for _name, _symbol in {"truediv": "/", "floordiv": "//"}.items():
    _divides(getattr(operator, _name), _symbol)
    _divides(getattr(operator, f"i{_name}"), _symbol)


def _extreme(fn: Callable[..., Any]) -> None:
    def body(m: Machine, *args: Tracker) -> Any:
        """Of one class: otherwise the class of the result depends on the numbers."""
        if len(args) < 2 or len({v.python_type() for v in args}) > 1:
            return NotImplemented
        return late(fn, f"{fn.__name__}({', '.join(['{}'] * len(args))})", args)

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

    return late(fill, f"{{}}.format({places})", [v, *args, *kwargs.values()])


@prefer(str.__mod__, ConstTracker, Tracker)
def percent(m: Machine, v: ConstTracker, arg: Tracker) -> Any:
    if isinstance(arg, ItemTracker):
        return late(operator.mod, "({} % {})", [v, arg])
    if not isinstance(arg, TupleTracker) or arg.cls is not tuple:
        return NotImplemented
    items = arg.items(m)
    return late(lambda text, *values: text % values, f"({{}} % ({'{}, ' * len(items)}))", [v, *items])


@prefer(str.join, ConstTracker, Tracker)
def joined(m: Machine, v: ConstTracker, items: Tracker) -> Any:
    if not isinstance(payload_of(items), TupleTracker) and not hasattr(payload_of(items), "items"):
        return NotImplemented
    parts = iterate(m, items)
    return late(lambda text, *values: text.join(values), f"{{}}.join(({'{}, ' * len(parts)}))", [v, *parts])
