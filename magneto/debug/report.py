"""The HTML report: one self-contained page about what was compiled in this process, what it cost, and why it broke."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from magneto.base import events
from magneto.base.dataclass import dataclass
from magneto.base.errors import CATALOGUE
from magneto.base.flags import FLAGS, config
from magneto.debug.explain import BreakReason

_TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True)
class Section:
    """A table of the report."""

    title: str
    headers: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    empty: str = "none"


def sections() -> list[Section]:
    """The report as data, from the events of this process."""
    timings = events.timings()
    total = sum(timing.own for timing in timings.values()) or 1.0
    return [
        Section(
            "Compiled regions",
            ("function", "where", "offset", "graphs", "ms"),
            [_region(event.fields) for event in events.events("compile")],
            "nothing was compiled",
        ),
        Section(
            "Where the time went",
            ("stage", "calls", "own ms", "share", "with nested ms"),
            [
                (stage, t.calls, f"{t.own * 1e3:.1f}", f"{100 * t.own / total:.0f} %", f"{t.total * 1e3:.1f}")
                for stage, t in sorted(timings.items(), key=lambda item: -item[1].own)
            ],
        ),
        Section(
            "Recompiles",
            ("function", "where", "first guard that failed", "variants"),
            [
                (f.get("function"), f"{f.get('file', '')}:{f.get('line', '')}", f.get("reason"), f.get("variants"))
                for f in (event.fields for event in events.events("recompile"))
            ],
        ),
        Section(
            "Runs in eager",
            ("what", "reason"),
            [(event.fields.get("what") or event.fields.get("graph"), event.fields.get("reason")) for event in events.events("fallback")],
            "nothing: every graph was compiled",
        ),
        Section(
            "Warnings",
            ("id", "message"),
            list(dict.fromkeys((event.fields.get("id"), event.fields.get("message")) for event in events.events("warning"))),
        ),
        Section("Counters", ("name", "value"), list(events.counters().items())),
        Section(
            "Flags that were changed",
            ("flag", "value"),
            [(f.name, getattr(config, f.name)) for f in FLAGS if getattr(config, f.name) != f.default],
        ),
    ]


def _region(fields: dict[str, Any]) -> tuple[Any, ...]:
    where = f"{os.path.basename(str(fields.get('file', '')))}:{fields.get('line', '')}"
    return (fields.get("function"), where, fields.get("offset"), fields.get("graphs"), f"{fields.get('seconds', 0.0) * 1e3:.1f}")


def breaks() -> list[BreakReason]:
    """The breaks of this process, each once."""
    return list(dict.fromkeys(BreakReason.of(event) for event in events.events("break")))


def html(title: str = "magneto report") -> str:
    """The page. Needs jinja2 (`pip install torch-magneto[report]`)."""
    import jinja2

    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    summary = {
        "graphs": events.count("graph"),
        "graph breaks": events.count("break"),
        "recompiles": events.count("recompile"),
        "compile seconds": f"{sum(event.fields.get('seconds', 0.0) for event in events.events('compile')):.2f}",
        "kernels built": events.counters().get("kernels_compiled", 0),
    }
    return template.render(
        title=title,
        machine=f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}",
        summary=summary,
        breaks=breaks(),
        sections=sections(),
        explanations={id: row.explanation for id, row in CATALOGUE.items()},
    )


def write_report(path: str | os.PathLike[str], title: str = "magneto report") -> Path:
    """Write the page to `path`; returns it."""
    target = Path(path)
    target.write_text(html(title), encoding="utf-8")
    return target
