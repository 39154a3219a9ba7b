"""Numbers of lists of tensors, `torch._foreach_add_(parameters, gradients, alpha=-lr)`, that change from call to call or that the graph computes: one tensor after the other, as torch's own slow path does.

The rules of single tensors know how such a number is given to the graph. A fused optimiser's step takes its learning rate in a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import SequenceTracker, TupleTracker
from magneto.dynamo.trackers.dispatch import prefer
from magneto.dynamo.trackers.item import ItemTracker
from magneto.dynamo.trackers.item_graph import graph_number
from magneto.dynamo.trackers.number_options import moves
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magneto.dynamo.machine.protocol import Machine

_NAMES = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""What the operation on one tensor and a number is called."""
_BY_NAME = {"addcmul": "value", "addcdiv": "value"}


def _numbers_move(m: Machine, args: Sequence[Tracker]) -> bool:
    """Are there numbers among them that change, or that the graph computes?"""
    return any(
        _numbers_move(m, arg.items(m)) if isinstance(arg, SequenceTracker) else isinstance(arg, ItemTracker) or moves(m, arg)
        for arg in args
    )


def _rows(m: Machine, args: Sequence[Tracker], count: int) -> list[Sequence[Tracker]] | None:
    """Per argument one value for each tensor; None where torch has something to say about them."""
    rows: list[Sequence[Tracker]] = [arg.items(m) if isinstance(arg, SequenceTracker) else [arg] * count for arg in args]
    if not count or any(len(row) != count for row in rows):
        return None
    return rows if not any(isinstance(arg, TensorTracker) for arg in args) else None


def _one_by_one(name: str) -> None:
    single = _NAMES.get(name, name)

    def each(m: Machine, fn: Any, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Any:
        if name == "lerp" and isinstance(args[-1], TensorTracker) and not args[-1].meta.ndim and not args[-1].meta.requires_grad:
            args = [*args[:-1], m.apply(torch.Tensor.item, args[-1])]  # as torch does: a weight in a tensor is a number
        lists = [arg for arg in args if isinstance(arg, SequenceTracker)]
        if not lists or not (kwargs.keys() <= {"alpha", "value"}) or not _numbers_move(m, [*args, *kwargs.values()]):
            return NotImplemented
        rows = _rows(m, args, lists[0].length())
        if rows is None:
            return NotImplemented
        keyword = _BY_NAME.get(name)
        if keyword is None or keyword in kwargs or len(rows) < 4:
            return [m.apply(fn, *row, **kwargs) for row in zip(*rows, strict=True)]
        return [m.apply(fn, *row[:-1], **{keyword: row[-1]}) for row in zip(*rows, strict=True)]

    def rules(owner: Any, ending: str) -> None:
        fn, target = getattr(torch, f"_foreach_{name}{ending}", None), getattr(owner, single + ending, None)
        if fn is None or target is None:
            return

        @prefer(fn, Tracker)
        def body(m: Machine, *args: Tracker, **kwargs: Tracker) -> Any:
            found = each(m, target, args, kwargs)
            return found if found is NotImplemented else args[0] if ending else TupleTracker(found)

    rules(torch, "")
    rules(torch.Tensor, "_")


for _name in "add sub mul div addcmul addcdiv lerp pow maximum minimum clamp_min clamp_max".split():
    _one_by_one(_name)


# -- fused steps


def _fused(fn: Any) -> None:
    @prefer(fn, SequenceTracker)
    def step(m: Machine, /, *args: Tracker, lr: Tracker | None = None, **options: Tracker) -> Any:
        held = graph_number(m, lr) if lr is not None and moves(m, lr) else None
        return NotImplemented if held is None else m.apply(fn, *args, lr=held, **options)


for _name in ("adam", "adamw", "sgd", "adagrad"):
    _fused(getattr(torch, f"_fused_{_name}_"))
