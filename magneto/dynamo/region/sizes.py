"""Sizes that differ from call to call: one that comes again is worth compiling, one that grows in each call is not."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any

import torch

from magneto import _C
from magneto.base import events
from magneto.base.flags import config
from magneto.dynamo.guards import reading
from magneto.dynamo.guards.explain import tensor_row
from magneto.dynamo.guards.rows import Kind, TensorRow
from magneto.dynamo.guards.source import Source, of_module
from magneto.dynamo.machine.varying import LEAST

AGAIN = 3  # calls with the same sizes, until they have a variant
MOVING = 3  # different sizes of a dimension: the next capture takes it as unknown
FLEETING = 3  # variants: one more size runs as captured and is compiled when it comes again
SHARE = 0.25  # of the time that has gone by: what compiling for further sizes may take, behind config.size_seconds
PAUSE = 0.2  # seconds until it is asked again whether they may cost more
PATIENCE = 256  # different sizes that are counted; then the entry is left to CPython

REST = tuple(f.name for f in fields(TensorRow) if f.name not in ("shape", "strides"))
Sizes = frozenset[tuple[Source, tuple[int, ...]]]
Dimension = tuple[Source, int]
"""One of an input; ~dim: its stride."""


class Verdict(enum.Enum):
    """On a call with sizes that no variant takes."""

    NOW = "it gets a variant"
    LATER = "it may get one when it comes again"
    NEVER = "no such call gets one any more"


class Budget:
    """What may be compiled for sizes behind the first ones: where sizes change much, a program is slowed down by a quarter at most."""

    def __init__(self) -> None:
        self.began: tuple[float, float] | None = None
        self.until = 0.0
        self.told = False

    def closed(self) -> bool:
        """It was a moment ago."""
        return time.perf_counter() < self.until

    def allows(self) -> bool:
        """May one more size be compiled? The first question begins the account."""
        now = time.perf_counter(), events.seconds()
        self.began = self.began or now
        gone, spent = (b - a for a, b in zip(self.began, now, strict=True))
        allowed = spent <= config.size_seconds + SHARE * (gone - spent)
        self.until = 0.0 if allowed else now[0] + PAUSE
        return allowed


class SizesThatCome:
    """Of one entry point that has as many variants as it may have: how often calls came with which sizes."""

    def __init__(self) -> None:
        self.seen: Counter[Sizes] = Counter()

    def verdict(self, sizes: Sizes | None, variants: int, budget: Budget) -> Verdict:
        allowed = budget.allows()
        if not sizes or variants >= config.size_variants or (sizes not in self.seen and len(self.seen) >= PATIENCE):
            return Verdict.NEVER
        self.seen[sizes] += 1
        return Verdict.NOW if allowed and self.seen[sizes] >= AGAIN else Verdict.LATER


def moved_sizes(missed: Sequence[Any], state: Any) -> set[Dimension]:
    """Dimensions that have had so many sizes or strides (`MOVING`) in these regions and now."""
    frame = reading.Frame.of_state(state, _C.UNBOUND)
    found: dict[Source, Any] = {}
    seen: dict[Dimension, set[int]] = {}
    for row in (row for region in missed if region.info for row in region.info["guards"].rows):
        if row.kind is not Kind.TENSOR or row.source is None:
            continue
        if row.source not in found:
            try:
                found[row.source] = tensor_row(reading.read(row.source, frame))
            except (reading.Absent, reading.Unreadable):
                found[row.source] = None
        there = found[row.source]
        if there is not None and len(there.shape) == len(row.payload.shape):
            for dim, (was, now) in enumerate(zip(row.payload.shape, there.shape, strict=True)):
                seen.setdefault((row.source, dim), {now}).update(() if was is None else (was,))
            for dim, (was, now) in enumerate(zip(row.payload.strides or (), there.strides, strict=False)):
                seen.setdefault((row.source, ~dim), {now}).update(() if was is None else (was,))
    return {place for place, sizes in seen.items() if len(sizes) >= MOVING}


def wanted(
    moving: AbstractSet[Dimension], fixed: AbstractSet[Dimension], dynamic: bool | None, tensor: torch.Tensor, source: Source
) -> dict[int, tuple[int, int | None]]:
    """The dimensions of an input that are to be unknown, with their bounds: those that the program has marked, that have differed, or all where it has asked for it (but a module's parameters
    keep their sizes). And, as ~dim, those whose strides are."""
    marked: dict[int, Any] = tensor.__dict__.get("_magneto_dynamic", {})
    everything = bool(dynamic) and not of_module(source) and not isinstance(tensor, torch.nn.Parameter)
    found = {}
    for dim in range(tensor.dim()):
        bounds = marked.get(dim, (None, None))
        if bounds is not None and (source, dim) not in fixed and (dim in marked or everything or (source, dim) in moving):
            found[dim] = (max(bounds[0] or 0, LEAST), bounds[1])
    sizes = {
        dim: bounds
        for dim, bounds in found.items()
        if bounds[0] <= tensor.shape[dim] and (bounds[1] is None or tensor.shape[dim] <= bounds[1])
    }
    return {**sizes, **{~dim: (LEAST, None) for dim in range(tensor.dim()) if (source, ~dim) in moving and (source, ~dim) not in fixed}}


def missed_sizes(missed: Sequence[Any], state: Any) -> Sizes | None:
    """The sizes of the tensors that the guards of all these regions refuse, where they refuse nothing but sizes (and strides with them)."""
    frame = reading.Frame.of_state(state, _C.UNBOUND)
    found: dict[Source, Any] = {}
    for region in missed:
        index = getattr(region.guards, "failed_row", -1)
        rows = region.info["guards"].rows if region.info else ()
        if not 0 <= index < len(rows) or (row := rows[index]).kind not in (Kind.TENSOR, Kind.SIZES) or row.source is None:
            return None
        for source in (row.source, *row.payload.others) if row.kind is Kind.SIZES else (row.source,):
            if source not in found:
                try:
                    found[source] = tensor_row(reading.read(source, frame))
                except (reading.Absent, reading.Unreadable):
                    return None
        if row.kind is Kind.TENSOR and not _other_sizes(row.payload, found[row.source]):
            return None
    return None if None in found.values() else frozenset((source, there.shape) for source, there in found.items())


def _differ(wanted: tuple[int | None, ...], there: tuple[int | None, ...]) -> bool:
    return any(size not in (None, now) for size, now in zip(wanted, there, strict=True))


def _other_sizes(wanted: TensorRow, there: Any) -> bool:
    """Of the same dtype, device and so on, and of as many dimensions."""
    if not isinstance(there, TensorRow) or len(there.shape) != len(wanted.shape) or not _differ(wanted.shape, there.shape):
        return False
    return all(getattr(there, name) == value for name in REST if (value := getattr(wanted, name)) is not None or name != "requires_grad")
