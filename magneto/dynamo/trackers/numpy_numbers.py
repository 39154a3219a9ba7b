"""Numbers of numpy that change from call to call (`schedule[step]`, `np.interp(...)`): torch takes them for the numbers that they hold, and so does the graph.

Python's arithmetic with them is computed by the region like that of floats (`lazy_number.py`), as numpy does it.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker, is_numpy_scalar
from magneto.dynamo.trackers.dispatch import FALLBACKS, prefer
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.lazy_number import ComputedNumber, changing, guard_types, is_unread
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import is_graph_callable

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_BY_TYPE = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.full, torch.scalar_tensor, torch.result_type, torch.where})
"""What makes tensors of the number's own type."""


def _moves(m: Machine, v: Tracker) -> bool:
    return isinstance(v, ConstTracker) and is_unread(v) and is_numpy_scalar(v.value) and hasattr(v.value, "item") and changing(m, v)


def _held(m: Machine, v: Tracker) -> Tracker:
    """The number of Python in a number of numpy that changes; anything else as it is."""
    if not m.changing or not isinstance(v, ConstTracker) or not _moves(m, v) or type(v.value.item()) not in (int, float):
        return v
    guard_types(m, v)
    return ComputedNumber(v.value.item(), "{}.item()", (v,), False)


def _operation(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
    if not m.changing or not any(_moves(m, arg) for arg in (*args, *kwargs.values())):
        return NotImplemented
    if isinstance(fn, types.MethodDescriptorType) and fn.__name__ == "item" and len(args) == 1 and not kwargs:
        return _held(m, args[0])
    if not is_graph_callable(fn) or fn in _BY_TYPE:
        return NotImplemented
    return m.apply(fn, *[_held(m, arg) for arg in args], **{name: _held(m, arg) for name, arg in kwargs.items()})


FALLBACKS.insert(0, _operation)


def _beside(fn: Any) -> None:
    @prefer(fn, TensorTracker, ConstTracker)
    def tensor_number(m: Machine, tensor: TensorTracker, number: ConstTracker) -> Any:
        return m.apply(fn, tensor, held) if (held := _held(m, number)) is not number else NotImplemented

    @prefer(fn, ConstTracker, TensorTracker)
    def number_tensor(m: Machine, number: ConstTracker, tensor: TensorTracker) -> Any:
        return m.apply(fn, held, tensor) if (held := _held(m, number)) is not number else NotImplemented


def _beside_items(fn: Any) -> None:
    """In torch.optim nothing depends on whether a step size is a number of numpy."""

    def plain(m: Machine, v: ConstTracker) -> Tracker | None:
        if not is_numpy_scalar(v.value) or not str(m.frames[-1].globals.get("__name__", "")).startswith("torch.optim"):  # type: ignore[attr-defined]
            return None
        held = _held(m, v)
        return held if held is not v else m.const(v.read().item())

    @prefer(fn, ConstTracker, ItemTracker)
    def number_item(m: Machine, number: ConstTracker, item: ItemTracker) -> Any:
        return NotImplemented if (held := plain(m, number)) is None else m.apply(fn, held, item)

    @prefer(fn, ItemTracker, ConstTracker)
    def item_number(m: Machine, item: ItemTracker, number: ConstTracker) -> Any:
        return NotImplemented if (held := plain(m, number)) is None else m.apply(fn, item, held)


for _name in "add sub mul truediv floordiv mod pow".split():
    _beside(getattr(operator, _name))
    _beside_items(getattr(operator, _name))
    _beside(getattr(operator, f"i{_name}"))
for _name in "lt le gt ge eq ne".split():
    _beside(getattr(operator, _name))
