"""All opcode handlers (importing the families registers them)."""

from __future__ import annotations

from magneto.dynamo.machine import handlers_control, handlers_names, handlers_values
from magneto.dynamo.machine.opcode_table import BREAKING, EFFECTS, HANDLERS, UNSUPPORTED

__all__ = ["BREAKING", "EFFECTS", "HANDLERS", "UNSUPPORTED", "handlers_control", "handlers_names", "handlers_values"]
