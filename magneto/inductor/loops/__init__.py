"""The loops IR: grammar (`ir`), text (`show`, `parse`), checks (`verify`), meaning (`interp`)."""

from __future__ import annotations

from magneto.inductor.loops import show

__all__ = ["show"]
