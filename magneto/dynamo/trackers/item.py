"""Numbers, and texts of them (`late_text.py`), that only a run knows: `loss.item()`, `float(x)`. The region computes them after the graph; nothing breaks where nobody asks what they are.

A number carries the Python expression of tensors that gives it. Comparisons and sums of it are further expressions, evaluated by Python itself. Whatever needs the
number at capture (a branch, an index, an operand of a tensor operation) makes capture start again with a break where the tensor was asked.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from magneto.dynamo.machine.signals import Restart
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.tensor import TensorTracker, overrides_operations

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Emitter, Machine


CHANGING_TEXT = "text of a number that changes"
TEXTS_READ = -(1 << 29)  # among the forced breaks: such texts are wanted, so that the numbers in them are read and guarded


class ItemTracker(Tracker):
    """`template` of `operands` (tensors of one number, other items, constants) is a `cls`. `born`: the instruction that asked the tensor; `operation`: by which name."""

    __slots__ = ("born", "cls", "held", "operands", "operation", "template")
    unknown = True

    def __init__(self, cls: type, template: str, operands: tuple[Tracker, ...], born: int, operation: str) -> None:
        super().__init__()
        self.cls = cls
        self.template = template
        self.operands = operands
        self.born = born
        self.operation = operation
        self.held: TensorTracker | None = None  # the number in the graph (item_graph.py)

    def python_type(self) -> type:
        return self.cls

    def needed(self, m: Machine) -> NoReturn:
        """Somebody asks for the value."""
        texts_wanted(self.operation)
        m.restart_at(self.born, "B102", operation=self.operation)

    def emit(self, em: Emitter) -> str:
        return em.assign("number", self.template.format(*[em.value(operand) for operand in self.operands]), self)

    def show(self) -> str:
        return self.operation if self.operation == CHANGING_TEXT else f"a number that {self.operation} gives"


def texts_wanted(reason: str) -> None:
    """Capture starts again if the text of a changing number is what is needed: then it is read, which is no break."""
    if CHANGING_TEXT in reason:
        raise Restart(TEXTS_READ, None, False)


def number_of(m: Machine, v: TensorTracker, operation: str, cls: type = object) -> ItemTracker | None:
    """The tensor's only number as it is now; None where the tensor has none such, or none that the region can give."""
    dtype = v.meta.dtype
    if v.meta.numel != 1 or dtype.is_complex or v.meta.device.type == "meta" or hasattr(m.recorder, "around") or overrides_operations(m, v):  # type: ignore[attr-defined]
        return None
    own = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    now = m.node("clone", [m.node("detach", [v], {}, method=True)], {}, method=True)  # it may be written later
    cls = own if cls is object else cls
    return ItemTracker(cls, "{}.item()" if cls is own else f"{cls.__name__}({{}}.item())", (now,), m.count, operation)  # type: ignore[attr-defined]


def is_operand(v: Tracker) -> bool:
    """Whether arithmetic with the number can be left to the run."""
    return (isinstance(v, ItemTracker) and v.cls is not str) or (isinstance(v, ConstTracker) and type(v.value) in (int, float, bool))


def _binary(fn: Any, symbol: str, compares: bool) -> None:
    texts = symbol in ("+", "==", "!=")

    def body(m: Machine, left: Tracker, right: Tracker) -> Any:
        if texts and left.python_type() is right.python_type() is str:
            item = next(v for v in (left, right) if isinstance(v, ItemTracker))
            return ItemTracker(bool if compares else str, f"({{}} {symbol} {{}})", (left, right), item.born, item.operation)
        if not (is_operand(left) and is_operand(right)):
            return NotImplemented
        kinds = {left.python_type(), right.python_type()}
        cls = bool if compares else float if float in kinds else int
        item = next(v for v in (left, right) if isinstance(v, ItemTracker))
        return ItemTracker(cls, f"({{}} {symbol} {{}})", (left, right), item.born, item.operation)

    prefer(fn, ItemTracker, Tracker)(body)
    prefer(fn, Tracker, ItemTracker)(body)


for _name, _symbol in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    _binary(getattr(operator, _name), _symbol, True)
for _name, _symbol in {"add": "+", "sub": "-", "mul": "*"}.items():
    _binary(getattr(operator, _name), _symbol, False)
    _binary(getattr(operator, f"i{_name}"), _symbol, False)


def _unary(fn: Any, template: str, result: type | None) -> None:
    @prefer(fn, ItemTracker)
    def body(m: Machine, v: ItemTracker) -> Any:
        if v.cls is str and result is None:
            return NotImplemented
        return ItemTracker(result or (int if v.cls is bool else v.cls), template, (v,), v.born, v.operation)


_unary(operator.neg, "(-{})", None)
_unary(abs, "abs({})", None)
_unary(operator.not_, "(not {})", bool)
_unary(bool, "bool({})", bool)
_unary(operator.truth, "bool({})", bool)


@prefer(float, ItemTracker)
def to_float(m: Machine, v: ItemTracker) -> Any:
    """A float of an int may overflow."""
    return (
        v if v.cls is float else ItemTracker(float, "float({})", (v,), v.born, v.operation) if v.template == "{}.item()" else NotImplemented
    )


@prefer(int, ItemTracker)
def to_int(m: Machine, v: ItemTracker) -> Any:
    """Of a float it is assumed that it is finite."""
    if v.cls is str or (v.cls is float and not m.assume(ItemTracker(bool, "(abs({}) < 1e300)", (v,), v.born, v.operation))):
        return NotImplemented
    return v if v.cls is int else ItemTracker(int, "int({})", (v,), v.born, v.operation)


def _identity(fn: Any) -> None:
    def body(m: Machine, a: Tracker, b: Tracker) -> Any:
        """Small ints, True and False are one object each."""
        if a is b or a.python_type() is not b.python_type():
            return NotImplemented
        (a if isinstance(a, ItemTracker) else b).needed(m)  # type: ignore[attr-defined]

    prefer(fn, ItemTracker, Tracker)(body)
    prefer(fn, Tracker, ItemTracker)(body)


_identity(operator.is_)
_identity(operator.is_not)
