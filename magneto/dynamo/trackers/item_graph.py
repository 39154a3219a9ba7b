"""Numbers of a run (`item.py`) as operands in the graph: `x * loss.item()`, the step size of an optimiser.

There such a number is a tensor of no dimensions in the precision of Python's floats, computed in the graph by the expression that the item stands for.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.item import ItemTracker, is_operand
from magneto.dynamo.trackers.lazy_number import CHECKED, changing, guard_types
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.graph.scaled import larger, smaller

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_EXPRESSIONS: dict[str, Any] = {
    "({} + {})": operator.add,
    "({} - {})": operator.sub,
    "({} * {})": operator.mul,
    **{CHECKED[fn]: fn for fn in (operator.truediv, operator.pow)},
    "(-{})": operator.neg,
}
_READ = ("{}.item()", "float({}.item())")


def graph_number(m: Machine, value: Tracker, kinds: tuple[type, ...] = (float,)) -> TensorTracker | None:
    """The tensor of a float that the graph computes, or that changes from call to call; None for other numbers."""
    if isinstance(value, ItemTracker):
        return _computed(m, value) if value.cls in kinds else None
    if isinstance(value, ConstTracker) and type(value.value) is float and changing(m, value):
        guard_types(m, value)
        return m.number_input(value)
    return None


def _computed(m: Machine, item: ItemTracker) -> TensorTracker | None:
    if item.held is None:
        if item.template in _READ:
            made = m.node("reshape", [item.operands[0], ()], {}, method=True)
            made = m.node("to", [made, torch.device("cpu"), torch.float64], {}, method=True)
        else:
            fn = _EXPRESSIONS.get(item.template)
            operands = [_operand(m, operand) for operand in item.operands]
            if fn is None or None in operands:
                return None
            made = m.node(fn, operands, {})
        assert isinstance(made, TensorTracker)
        item.held = made
    return item.held


_COMPARISONS = {
    f"({{}} {symbol} {{}})": getattr(operator, name)
    for symbol, name in zip("< <= > >= == !=".split(), "lt le gt ge eq ne".split(), strict=True)
}


def graph_condition(m: Machine, value: Tracker) -> TensorTracker | None:
    """The tensor whose truth is that of a number which the graph computes on the CPU; None for others."""
    if not isinstance(value, ItemTracker) or not _on_cpu(value):
        return None
    if value.template in (*_READ, "bool({}.item())"):
        return value.operands[0]  # type: ignore[return-value]
    compare = _COMPARISONS.get(value.template)
    if compare is None or any(operand.python_type() is not float for operand in value.operands):
        return None
    operands = [_operand(m, operand) for operand in value.operands]
    return None if None in operands else m.node(compare, operands, {})  # type: ignore[return-value]


def _on_cpu(value: Tracker) -> bool:
    if isinstance(value, TensorTracker):
        return value.meta.device.type == "cpu"  # type: ignore[no-any-return]
    return not isinstance(value, ItemTracker) or all(map(_on_cpu, value.operands))


def _operand(m: Machine, value: Tracker) -> Any:
    """A float as an operand of arithmetic in the graph; None where Python's arithmetic may be another."""
    held = graph_number(m, value, (float, int))
    if held is not None or isinstance(value, ItemTracker):
        return held
    const = value.try_const()
    number = const.value if const is not None else None
    return float(number) if type(number) is float or (type(number) is int and abs(number) <= 2**53) else None


_KNOWN = ("torch.optim", "torch.nn.modules.batchnorm")


def quotient(fn: Any) -> None:
    """Division and powers raise in Python for some numbers. Of torch.optim's bias corrections and step sizes, and of a batch norm's count of batches, we know that they do not."""

    def body(m: Machine, left: Tracker, right: Tracker) -> Any:
        names = m.frames[-1].globals  # type: ignore[attr-defined]
        kinds = [v.python_type() for v in (left, right) if isinstance(v, (ItemTracker, ConstTracker))]
        if not str(names.get("__name__", "")).startswith(_KNOWN) or len(kinds) < 2 or float not in kinds:
            return NotImplemented
        item = left if isinstance(left, ItemTracker) else right
        assert isinstance(item, ItemTracker)
        return ItemTracker(float, CHECKED[fn], (left, right), item.born, item.operation)

    prefer(fn, ItemTracker, Tracker)(body)
    prefer(fn, ConstTracker, ItemTracker)(body)


for _raising in (operator.truediv, operator.itruediv, operator.pow, operator.ipow):
    quotient(_raising)


def _extreme(fn: Any, formula: Any) -> None:
    """Of two floats the one that Python chooses. In torch.optim nothing depends on whether a whole number stays one."""
    template = f"{fn.__name__}({{}}, {{}})"
    _EXPRESSIONS[template] = formula

    def body(m: Machine, left: Tracker, right: Tracker, /, *more: Tracker, **options: Tracker) -> Any:
        names = m.frames[-1].globals  # type: ignore[attr-defined]
        kinds = {v.python_type() for v in (left, right) if is_operand(v)}
        whole = {int} if str(names.get("__name__", "")).startswith("torch.optim") else set()
        cls = int if kinds == {int} else float
        if more or options or (cls is float and kinds - whole != {float}) or not (is_operand(left) and is_operand(right)):
            return NotImplemented
        item = left if isinstance(left, ItemTracker) else right
        assert isinstance(item, ItemTracker)
        return ItemTracker(cls, template, (left, right), item.born, item.operation)

    prefer(fn, ItemTracker, Tracker)(body)
    prefer(fn, ConstTracker, ItemTracker)(body)


_extreme(max, larger)
_extreme(min, smaller)


def _tensor_of(m: Machine, item: ItemTracker, /, *args: Tracker, **kwargs: Tracker) -> Any:
    """`torch.as_tensor(number)`."""
    held = graph_number(m, item) if not args and set(kwargs) <= {"dtype", "device"} else None
    if held is None:
        return NotImplemented
    made = m.node("to", [held, torch.get_default_dtype()], {"copy": True}, method=True)
    return m.apply(torch.Tensor.to, made, **kwargs) if kwargs else made


prefer(torch.tensor, ItemTracker)(_tensor_of)
prefer(torch.as_tensor, ItemTracker)(_tensor_of)


def _interpolated(fn: Any) -> None:
    def body(m: Machine, v: TensorTracker, end: TensorTracker, weight: Tracker, /, **options: Tracker) -> Any:
        """The kernels for a number and for a tensor compute the same, in these types."""
        held = graph_number(m, weight) if not options and v.meta.dtype in (torch.float32, torch.float64) else None
        return NotImplemented if held is None else m.apply(fn, v, end, m.node("to", [held, v.meta.dtype], {}, method=True))

    prefer(fn, TensorTracker, TensorTracker, ItemTracker)(body)
    prefer(fn, TensorTracker, TensorTracker, ConstTracker)(body)


for _fn in (torch.lerp, torch.Tensor.lerp, torch.Tensor.lerp_):
    _interpolated(_fn)


def _beside(m: Machine, tensor: TensorTracker, item: ItemTracker) -> TensorTracker | None:
    """The number as an operand of an elementwise operation with `tensor`, where it means what Python's number means."""
    dtype = tensor.meta.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    if (not tensor.meta.ndim or item.cls is int) and dtype not in (torch.float32, torch.float64):
        return None
    held = graph_number(m, item, (float, int))
    if held is None or tensor.meta.ndim:
        return held
    return m.node("to", [held, dtype], {}, method=True)  # type: ignore[return-value]


def _elementwise(fn: Any) -> None:
    @prefer(fn, TensorTracker, ItemTracker)
    def tensor_number(m: Machine, tensor: TensorTracker, item: ItemTracker, /, **kwargs: Any) -> Any:
        number = None if kwargs else _beside(m, tensor, item)
        return NotImplemented if number is None else m.apply(fn, tensor, number)


def _reflected(fn: Any) -> None:
    @prefer(fn, ItemTracker, TensorTracker)
    def number_tensor(m: Machine, item: ItemTracker, tensor: TensorTracker) -> Any:
        number = _beside(m, tensor, item)
        return NotImplemented if number is None else m.apply(fn, number, tensor)


for _name in ("add", "sub", "mul", "truediv"):
    _elementwise(getattr(operator, _name))
    _elementwise(getattr(operator, f"i{_name}"))
    _reflected(getattr(operator, _name))
for _name in ("add", "sub", "mul", "div"):
    _elementwise(getattr(torch, _name))
    _elementwise(getattr(torch.Tensor, _name))
    _elementwise(getattr(torch.Tensor, f"{_name}_"))
