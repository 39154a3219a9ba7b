"""`stats()` and `inspect(fn)`: what was compiled, as data."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import fx

from magneto import _C
from magneto.base import events
from magneto.base.dataclass import dataclass
from magneto.base.errors import UserError
from magneto.dynamo.guards.rows import GuardSet, Row
from magneto.dynamo.guards.text import show_guards


def stats() -> dict[str, Any]:
    """Counts since the last `reset()`: graphs, breaks, break_reasons, recompiles, cache_hits, compile_seconds, kernels, fallbacks, and the hook's counters."""
    counters = events.counters()
    timings = events.timings()
    hook = _C.counters()
    return {
        "graphs": events.count("graph"), "breaks": events.count("break"),
        "break_reasons": [event.fields["reason"] for event in events.events("break")], "recompiles": events.count("recompile"),
        "cache_hits": int(counters.get("kernel_cache_hits", 0)),
        "compile_seconds": timings["compile"].total if "compile" in timings else 0.0,
        "kernels": int(counters.get("kernels", events.count("kernel"))), "cuda_graphs": int(counters.get("cuda_graphs", 0)),
        "fallbacks": events.count("fallback"), "hook": hook,
    }  # fmt: skip


class Guards:
    """The guards of a region: `str()` is readable text, iteration gives the rows."""

    def __init__(self, rows: GuardSet) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return show_guards(self.rows)


@dataclass(frozen=True)
class Entry:
    """One compiled region: an entry point (code, offset), the generated Python `source`, its guards, the captured `graph` (None without tensor operations)
    and what the backend made of it (`compiled`), how often it ran, why it ends early (`breaks`, empty for a return), and the texts of
    the kernels built for it."""

    name: str
    code: CodeType
    offset: int
    source: str
    guards: Guards
    graph: fx.GraphModule | None
    compiled: Any
    hits: int
    breaks: tuple[str, ...]
    kernels: tuple[str, ...]

    @property
    def function(self) -> str:
        return self.code.co_qualname

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def line(self) -> int:
        return self.code.co_firstlineno

    def __str__(self) -> str:
        return f"{self.name} ({self.hits} hits)\n{self.guards}\n{self.source}"


@dataclass(frozen=True)
class Inspection:
    """All regions compiled for one optimised callable, in order of code and offset."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __str__(self) -> str:
        return "\n\n".join(str(entry) for entry in self.entries)

    @property
    def kernels(self) -> list[str]:
        return [kernel for entry in self.entries for kernel in entry.kernels]


def inspect(fn: Any) -> Inspection:
    """The regions of an optimised callable, or, for a plain function, all regions of its code. UserError for anything else."""
    optimized = getattr(fn, "_magneto_call", fn)
    if isinstance(optimized, _C.Optimized):
        regions = _C.regions(None, optimized.policy.of or optimized.policy)
    elif isinstance(getattr(fn, "__code__", None), CodeType):
        regions = _C.regions(fn.__code__)
    else:
        raise UserError("U001", function="inspect", expected="an optimised callable", got=type(fn).__name__)
    entries = [_entry(region) for region in regions if region.info]
    return Inspection(tuple(sorted(entries, key=lambda entry: (entry.file, entry.line, entry.offset))))


def _entry(region: Any) -> Entry:
    info = region.info
    reason = info["reason"]
    breaks = (reason.reason,) if reason is not None else ()
    return Entry(
        info["name"], region.code, region.offset, info["text"], Guards(info["guards"]), info["gm"], info["graph"], region.hits, breaks,
        tuple(info.get("kernels", ())),
    )  # fmt: skip
