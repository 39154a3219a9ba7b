"""Rows of the switches that choose the kernel of attention (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`): nodes of the graph, as other modes are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.container import ListTracker
from magneto.dynamo.trackers.dispatch import rule
from magneto.graph.modes import ATTENTION, Switch

if TYPE_CHECKING:
    from magneto.dynamo.machine.protocol import Machine


def _switch(switch: Switch) -> None:
    @rule(switch.getter)
    def read(m: Machine) -> Tracker:
        recorder: Any = m.recorder  # type: ignore[attr-defined]
        recorder.guard_attention()
        value = recorder.attention[switch]
        return ListTracker([m.const(number) for number in value]) if switch.many else m.const(value)

    @rule(switch.setter, Tracker)
    def write(m: Machine, to: Tracker) -> Any:
        recorder: Any = m.recorder  # type: ignore[attr-defined]
        recorder.guard_attention()
        now = recorder.attention[switch]
        items = to.items(m) if isinstance(to, ListTracker) else [to]
        values = [const.value for item in items if (const := item.try_const()) is not None]
        if switch.many and isinstance(to, ListTracker) and all(type(value) is int for value in values) and sorted(values) == sorted(now):
            recorder.set_attention(switch, tuple(values))
            return m.const(None)
        if not switch.many and len(values) == 1 and not isinstance(to, ListTracker) and type(values[0]) is bool:
            recorder.set_attention(switch, values[0])
            return m.const(None)
        return NotImplemented


for _one in ATTENTION:
    _switch(_one)
