"""Control flow that torch has functions for (`dynamo/control_flow.py` holds what is followed in their place)."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo import control_flow
from magneto.dynamo.guards.source import Source
from magneto.dynamo.trackers.base import MISSING, Tracker
from magneto.dynamo.trackers.build import FUNCTION_BUILDERS
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.function import STAND_INS, FunctionTracker
from magneto.dynamo.trackers.klass import held
from magneto.dynamo.trackers.tensor import TensorTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_MODULES = {"torch", *(f"torch._higher_order_ops.{name}" for name in ("while_loop", "map", "scan"))}


def _followed(m: Machine, obj: types.FunctionType, source: Source) -> Tracker | None:
    name = obj.__name__
    if name not in ("cond", "while_loop", "map", "scan") or obj.__module__ not in _MODULES:
        return None
    if obj is not (torch.cond if name == "cond" else getattr(sys.modules[obj.__module__], name, None)):
        return None
    STAND_INS[obj.__code__] = _stand_in
    return FunctionTracker.existing(m, obj, source)


def _stand_in(m: Machine, fn: FunctionTracker, args: Sequence[Tracker], kwargs: Mapping[str, Tracker]) -> FunctionTracker:
    if fn.name == "cond" and m.grad_enabled() and _learn_apart(m, [*args, *kwargs.values()]):
        return held(m, _branched_by_torch, "cond")  # type: ignore[return-value]
    return held(m, getattr(control_flow, fn.name), fn.name)  # type: ignore[return-value]


def _branched_by_torch(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    if isinstance(pred, (bool, int, float)):
        return control_flow.cond(pred, true_fn, false_fn, operands)
    return control_flow.by_torch("cond", pred, true_fn, false_fn, operands)


def _learn_apart(m: Machine, given: Sequence[Tracker]) -> bool:
    """Whether one branch alone may use what requires gradients: torch's has zeros for it where the other one is taken."""
    branches = [v for v in given if isinstance(v, FunctionTracker)][:2]
    held_by = [_learning(m, branch, set()) for branch in branches]
    if len(branches) < 2 or None in held_by:
        return True
    reads = [
        {i for i, name in enumerate(code.co_varnames[: code.co_argcount]) if name in _loaded(code)}
        for code in (one.code for one in branches)
    ]
    return held_by[0] != held_by[1] or reads[0] != reads[1]


def _loaded(code: types.CodeType) -> set[str]:
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname.startswith("LOAD")}
    pairs = [one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD") and isinstance(one.argval, tuple)]
    return found.union(*pairs)


def _learning(m: Machine, fn: FunctionTracker, met: set[Any]) -> set[Any] | None:
    """The tensors that require gradients and that a function finds in its cells or globals; None: there are modules or the like."""
    found: set[Any] = set()
    cells = [cell.load(m) for cell in fn.closure]
    names = [name for name in fn.code.co_names if name in fn.globals]
    met.add(fn.code)
    for v in [*cells, *(fn.globals[name] for name in names)]:
        obj = v if isinstance(v, Tracker) and v.obj is MISSING else v.obj if isinstance(v, Tracker) else v
        if isinstance(v, TensorTracker):
            found |= {v} if v.meta.requires_grad else set()
        elif isinstance(v, FunctionTracker):
            inner = set() if v.code in met else _learning(m, v, met)
            if inner is None:
                return None
            found |= inner
        elif isinstance(obj, torch.Tensor):
            found |= {id(obj)} if obj.requires_grad else set()
        elif isinstance(obj, torch.nn.Module) and not any(p.requires_grad for p in obj.parameters()):
            pass
        elif not (
            v is None
            or isinstance(v, ConstTracker)
            or isinstance(obj, (types.ModuleType, types.BuiltinFunctionType, type, int, float, str))
        ):
            return None
    return found


FUNCTION_BUILDERS.append(_followed)
