"""Sizes that differ from call to call: one that comes again is worth compiling, one that grows in each call is not."""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from magneto import _C
from magneto.base.flags import config
from magneto.dynamo.guards import reading
from magneto.dynamo.guards.explain import tensor_row
from magneto.dynamo.guards.rows import Kind, TensorRow
from magneto.dynamo.guards.source import Source

AGAIN = 3  # calls with the same sizes, until they have a variant
FLEETING = 3  # variants: one more size runs as captured and is compiled when it comes again
PATIENCE = 256  # different sizes that are counted; then the entry is left to CPython

Sizes = frozenset[tuple[Source, tuple[int, ...]]]


class Verdict(enum.Enum):
    """On a call with sizes that no variant takes."""

    NOW = "it gets a variant"
    LATER = "it may get one when it comes again"
    NEVER = "no such call gets one any more"


class SizesThatCome:
    """Of one entry point that has as many variants as it may have: how often calls came with which sizes."""

    def __init__(self) -> None:
        self.seen: Counter[Sizes] = Counter()

    def verdict(self, sizes: Sizes | None, variants: int) -> Verdict:
        if not sizes or variants >= config.size_variants or (sizes not in self.seen and len(self.seen) >= PATIENCE):
            return Verdict.NEVER
        self.seen[sizes] += 1
        return Verdict.NOW if self.seen[sizes] >= AGAIN else Verdict.LATER


def missed_sizes(missed: Sequence[Any], state: Any) -> Sizes | None:
    """The sizes of the tensors that the guards of all these regions refuse, where they refuse nothing but sizes (and strides with them)."""
    frame, found = reading.Frame.of_state(state, _C.UNBOUND), {}
    for region in missed:
        index = getattr(region.guards, "failed_row", -1)
        rows = region.info["guards"].rows if region.info else ()
        if not 0 <= index < len(rows) or (row := rows[index]).kind is not Kind.TENSOR or row.source is None:
            return None
        with contextlib.suppress(reading.Absent, reading.Unreadable):
            there, wanted = tensor_row(reading.read(row.source, frame)), row.payload
            if (
                isinstance(there, TensorRow)
                and len(there.shape) == len(wanted.shape)
                and there.shape != wanted.shape
                and replace(wanted, shape=there.shape, strides=there.strides) == replace(there, **_ignored(wanted))
            ):
                found[row.source] = there.shape
                continue
        return None
    return frozenset(found.items())  # type: ignore[arg-type]


def _ignored(wanted: TensorRow) -> dict[str, Any]:
    return {"requires_grad": None} if wanted.requires_grad is None else {}
