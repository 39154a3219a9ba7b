"""Callables that a user or a library marked: not captured, taken as one node, constant."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.source import Held, Source
from magneto.dynamo.marks import ALLOW, BREAK, CONSTANT, DISABLE, SKIP
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.function import BuiltinTracker, FunctionTracker
from magneto.dynamo.trackers.klass import held
from magneto.dynamo.trackers.tensor import TensorTracker
from magneto.dynamo.trackers.torch_calls import lower, record

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


SCAN = "torch._higher_order_ops.associative_scan"
"""A function of this module is Python round tensor operations: followed as a whole, or called between two graphs."""
_COMPILERS = tuple(os.path.join(os.path.dirname(torch.__file__), name) for name in ("_higher_order_ops", "_dynamo", "_inductor"))


class MarkedTracker(BuiltinTracker):
    """A callable with a mark (see dynamo/marks.py)."""

    __slots__ = ("mark",)

    def __init__(self, obj: Callable[..., Any], mark: str, source: Source | None = None) -> None:
        super().__init__(obj, source)
        self.mark = mark

    def of_a_compiler(self) -> bool:
        """Whether it compiles what it is given."""
        code = getattr(self.obj, "__code__", None)
        return self.mark != SKIP and code is not None and code.co_filename.startswith(_COMPILERS)

    def call(self, m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Tracker | None:
        if self.mark == ALLOW:
            return record(m, self.obj, args, kwargs)
        if self.mark == CONSTANT:
            try:
                value = self.obj(*(real_argument(m, arg) for arg in args), **{name: real_argument(m, arg) for name, arg in kwargs.items()})
            except Exception as error:
                m.raise_exception(error)
            return held(m, value, self.show())
        if self.mark == BREAK:
            const = args[0].try_const() if args else None
            m.graph_break("B113", reason=f": {const.value}" if const is not None else "")
        if self.mark == DISABLE and getattr(self.obj, "__module__", None) == SCAN:
            kwargs = _followed(m, args, kwargs)
            return m.inline(FunctionTracker.existing(m, self.obj, Held("associative_scan", self.obj)), args, kwargs)  # type: ignore[arg-type]
        m.graph_break("B106", callee=self.show())


SCANS_ON = "cuda"  # where a scan by one kernel exists, which is compiled


def _followed(m: Machine, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> Mapping[str, Tracker]:
    """The form of a scan that is Python computes what the other one does."""
    mode, xs = kwargs.get("combine_mode", m.const("pointwise")).try_const(), [lower(m, v) for v in args[1:2]]
    known = all(isinstance(x, TensorTracker) and x.meta.device.type == SCANS_ON for x in torch.utils._pytree.tree_leaves(xs))
    return {**kwargs, "combine_mode": m.const("generic")} if known and mode is not None and mode.value == "pointwise" else kwargs


def real_argument(m: Machine, v: Tracker) -> Any:
    """The value of an argument of a function marked constant: a constant, or an existing object."""
    const = v.try_const()
    if const is not None:
        return const.value
    return v.obj if v.obj else lower(m, v)
