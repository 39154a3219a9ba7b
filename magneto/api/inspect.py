"""`stats()` and `inspect(fn)`: what was compiled, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magneto import _C
from magneto.base import events
from magneto.base.errors import UserError
from magneto.dynamo.guards.text import show_guards


def stats() -> dict[str, Any]:
    """Counts since the last `reset()`: graphs, breaks, break_reasons, recompiles, cache_hits, compile_seconds, kernels, fallbacks, and the hook's counters."""
    counters = events.counters()
    timings = events.timings()
    hook = _C.counters()
    return {
        "graphs": events.count("graph"),
        "breaks": events.count("break"),
        "break_reasons": [event.fields["reason"] for event in events.events("break")],
        "recompiles": events.count("recompile"),
        "cache_hits": int(counters.get("kernel_cache_hits", 0)),
        "compile_seconds": timings["compile"].total if "compile" in timings else 0.0,
        "kernels": int(counters.get("kernels", events.count("kernel"))),
        "fallbacks": events.count("fallback"),
        "hook": hook,
    }


@dataclass(frozen=True)
class Entry:
    """One compiled region. `guards` and `source` are text; `graph` the captured GraphModule (None when the region has no tensor operation)."""

    name: str
    code: Any
    offset: int
    guards: str
    source: str
    graph: Any
    compiled: Any
    hits: int
    break_reason: str | None

    def __str__(self) -> str:
        return f"{self.name} ({self.hits} hits)\n{self.guards}\n{self.source}"


@dataclass(frozen=True)
class Inspection:
    """All regions compiled for one optimised callable, in order of code and offset."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Any:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __str__(self) -> str:
        return "\n\n".join(str(entry) for entry in self.entries)

    @property
    def kernels(self) -> list[str]:
        """Texts of the kernels of all graphs, where the backend generates any."""
        found: list[str] = []
        for entry in self.entries:
            found.extend(getattr(entry.compiled, "kernels", ()) or ())
        return found


def inspect(fn: Any) -> Inspection:
    """The regions of an optimised callable: generated source, guards as text, graphs, kernels. UserError when `fn` is not optimised."""
    optimized = getattr(fn, "_magneto_call", fn)
    if not isinstance(optimized, _C.Optimized):
        raise UserError("U001", function="inspect", expected="an optimised callable", got=type(fn).__name__)
    entries = [_entry(region) for region in _C.regions(None, optimized.policy)]
    return Inspection(tuple(sorted(entries, key=lambda entry: (entry.code.co_filename, entry.code.co_firstlineno, entry.offset))))


def _entry(region: Any) -> Entry:
    info = region.info
    reason = info["reason"]
    return Entry(
        info["name"], region.code, region.offset, show_guards(info["guards"]), info["text"], info["gm"], info["graph"], region.hits, reason.reason if reason else None
    )
