"""Rows of cuDNN's switches (`torch.backends.cudnn.flags`), on machines without an accelerator, where no operation looks at them: they are read under a guard and
set behind the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from magneto.dynamo.guards.rows import Kind
from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.dynamo.trackers.function import BuiltinTracker

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine

_SWITCHES = {
    f"_get_cudnn_{name}": f"_set_cudnn_{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32", "depthwise_kernel")
}
_SWITCHES["_get_fp32_precision_getter"] = "_set_fp32_precision_setter"
_SWITCHES["_cuda_get_cudnn_benchmark_limit"] = "_cuda_set_cudnn_benchmark_limit"


def _switch(getter: Any, setter: Any) -> None:
    @rule(getter)
    def read(m: Machine, *which: Tracker) -> Any:
        consts = [const.value for arg in which if (const := arg.try_const()) is not None]
        if len(consts) < len(which) or torch.accelerator.is_available():
            return NotImplemented
        key = (getter, *consts)
        if key not in m.switches:  # type: ignore[attr-defined]
            value = getter(*consts)
            m.guard(Kind.STATE, None, (getter.__name__, getter, tuple(consts), value))
            return m.const(value)
        return m.const(m.switches[key])  # type: ignore[attr-defined]

    @rule(setter)
    def write(m: Machine, *args: Tracker) -> Any:
        consts = [const.value for arg in args if (const := arg.try_const()) is not None]
        if len(consts) < len(args) or not args or torch.accelerator.is_available():
            return NotImplemented
        if type(consts[-1]) is not type(getter(*consts[:-1])):
            return NotImplemented
        m.switches[(getter, *consts[:-1])] = consts[-1]  # type: ignore[attr-defined]
        places = ", ".join(f"{{{k}}}" for k in range(1, len(args) + 1))
        m.effect(f"{{0}}({places})", BuiltinTracker(setter), *args)


for _getter, _setter in _SWITCHES.items():
    if hasattr(torch._C, _getter) and hasattr(torch._C, _setter):
        _switch(getattr(torch._C, _getter), getattr(torch._C, _setter))
