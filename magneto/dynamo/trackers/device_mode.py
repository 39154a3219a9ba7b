"""`with torch.device(...)`: what the region's factories are given as device. Nothing of it reaches the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import _device_constructors

from magneto.dynamo.trackers.base import Tracker
from magneto.dynamo.trackers.constant import ConstTracker
from magneto.dynamo.trackers.context import ModeTracker
from magneto.dynamo.trackers.dispatch import rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from magneto.dynamo.machine.protocol import Emitter, Machine


class DeviceModeTracker(ModeTracker):
    """A device that is entered."""

    __slots__ = ("device",)

    def __init__(self, device: ConstTracker) -> None:
        super().__init__(torch.device)
        self.device = device

    def enter(self, m: Machine) -> None:
        m.contexts.append(self)  # type: ignore[attr-defined]

    def emit(self, em: Emitter) -> str:
        return em.value(self.device)


def _innermost(m: Machine) -> torch.device | None:
    for context in reversed(m.contexts):  # type: ignore[attr-defined]
        if isinstance(context, DeviceModeTracker):
            device: torch.device = context.device.read()
            return device
    return None


def placed(m: Machine, target: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`kwargs` of a call, with the device of the block that it stands in, as torch's own mode adds it."""
    device = _innermost(m)
    if device is None or kwargs.get("device") is not None or not _is_factory(target):
        return kwargs
    return {**kwargs, "device": device}


def _is_factory(target: Any) -> bool:
    return not isinstance(target, str) and target in _device_constructors()


def default_device(m: Machine) -> torch.device:
    """Where factories put tensors at this place of the program."""
    m.recorder.guard_modes()  # type: ignore[attr-defined]
    device = _innermost(m)
    if device is None:
        return torch.get_default_device()
    if device.index is None and device.type not in ("cpu", "meta"):
        m.graph_break("B101", callee="torch.get_default_device", reason="which device of several is the present one is not followed")
    return device


@rule(torch.get_default_device)
def get_default_device(m: Machine) -> Tracker:
    return m.const(default_device(m))


@rule(torch.device.__enter__, ConstTracker)
def enter(m: Machine, device: ConstTracker) -> Tracker:
    DeviceModeTracker(device).enter(m)
    return device


@rule(torch.device.__exit__, Tracker)
def leave(m: Machine, device: Tracker, *error: Tracker) -> None:
    """Leaves the innermost mode, whichever device it is called on."""
    contexts: list[Any] = m.contexts  # type: ignore[attr-defined]
    if not contexts or not isinstance(contexts[-1], DeviceModeTracker):
        m.graph_break("B111", value="a block of torch.device that was entered before this region")
    contexts.pop()
