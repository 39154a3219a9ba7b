"""Totals, tables and the page of the coverage sweep, from its rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from magneto.base.text import markdown_table

Row = dict[str, Any]
NOTES = """## Notes

- `rounding`: results differ by less than 1e-5. These programs ask `is_compiling()` and take another way then (a scan in place of a loop, a mask in place of
  a flag); both compilers show it.
- `wrong`, torch: programs that draw from numpy's generator inside the step (the random attention of BigBird, the time masks of Wav2Vec2).
- `second call graphs`: classification models of transformers set `config.problem_type` in their first call, so that the second is another program.
- `breaks` are as each compiler counts them: torch.compile counts a break again for each caller it passes, and none in the rest of a frame that it has skipped;
  magneto counts one per compiled variant, and the loop head at which it goes on. `graphs` and `graph calls` are counted by the backend, alike for both.
- torchvision's operators `nms` and `roi_align` are Python stand-ins where its compiled part does not load (`benchmarks/zoo_torchvision.py`)."""
LIBRARIES = ("timm", "torchvision", "transformers")


def totals(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Per side; `programs` counts a program once per mode, without those that eager itself does not run here."""
    found: dict[str, dict[str, int]] = {}
    for side in sorted({row["side"] for row in rows}):
        ours = [row for row in rows if row["side"] == side and row["status"] != "eager"]
        done = [row for row in ours if "graphs" in row]
        found[side] = {
            "models": len({row["program"] for row in ours}),
            "programs": len(ours),
            "single_graph": sum(single(row) for row in ours),
            "graphs": sum(row["graphs"] for row in done),
            "graph_calls": sum(row.get("graph_calls", 0) for row in done),
            "breaks": sum(row["breaks"] for row in done),
            "second_call_graphs": sum(row.get("second_call_graphs", 0) for row in done),
            "rounding": sum(row["status"] == "rounding" for row in ours),
            "wrong": sum(row["status"] == "wrong" for row in ours),
            "crash": sum(row["status"] == "crash" for row in ours),
        }
    return found


def single(row: Row) -> bool:
    """The whole step is one graph, and gives eager's results."""
    return row["status"] in ("ok", "rounding") and row["graphs"] == 1 and row["breaks"] == 0


def show(data: dict[str, Any]) -> None:
    """Print what is not a single graph with right results, and the totals."""
    console = Console()
    odd = [name for name, row in _pairs(data["rows"]).items() if not all(single(side) for side in row.values())]
    table = Table(
        "program", "mode", *(f"{side} {what}" for side in _sides(data) for what in ("status", "graphs", "breaks")), title="not one graph"
    )
    pairs = _pairs(data["rows"])
    for name in odd:
        cells = [str(pairs[name].get(side, {}).get(what, "")) for side in _sides(data) for what in ("status", "graphs", "breaks")]
        table.add_row(*name, *cells)
    if odd:
        console.print(table)
    for side in _sides(data):
        reasons: Counter[str] = Counter()
        for row in data["rows"]:
            if row["side"] == side:
                reasons.update(row.get("reasons", {}))
        listing = Table("times", "reason", title=f"{side}: most frequent breaks")
        for reason, count in reasons.most_common(25):
            listing.add_row(str(count), reason[:220])
        if reasons:
            console.print(listing)
    summary = Table("", *_sides(data), title=f"totals, backend {data['backend']}")
    sums = totals(data["rows"])
    for key in next(iter(sums.values()), {}):
        summary.add_row(key, *(str(sums[side][key]) for side in _sides(data)))
    console.print(summary)


def document(data: dict[str, Any]) -> str:
    """docs/coverage.md."""
    sides = _sides(data)
    text = "<!-- Generated from benchmarks/results/coverage.json by `python -m benchmarks.coverage --report benchmarks/results/coverage.json`. -->\n\n"
    text += "# Coverage\n\n" + (
        "Real models in tiny sizes, with random weights: `outputs, loss = step(model, inputs)` captured as a whole with the backend `eager`, called twice,\n"
        "`loss.backward()` outside. Outputs, loss, gradients, buffers, inputs and random generators are compared bit by bit with eager.\n"
        "A program is a model in one mode: eval, train, or decode (a prompt, then tokens with a KV cache). `benchmarks/coverage.py` says how it is measured.\n\n"
    )
    text += ", ".join(f"{name} {version}" for name, version in data["versions"].items()) + ".\n\n## Totals\n\n"
    text += _totals(data["rows"], sides)
    both = _of_both_sides(data["rows"])
    if len(sides) > 1 and len(both) < len(data["rows"]):
        text += "\n\n## Totals of the programs measured on both sides\n\n" + _totals(both, sides)
    text += "\n\n## Per library\n\n" + _per_library(data, sides)
    text += "\n\n## Programs that are not one graph\n\nBreaks as each compiler counts them; `-` is one graph.\n\n" + _not_single(
        data, sides
    )
    text += "\n\n" + NOTES
    absent = sorted({f"`{row['program']}` ({row['mode']}): {row.get('error', '')}" for row in data["rows"] if row["status"] == "eager"})
    if absent:
        text += "\n\n## Left out: eager itself does not run them here\n\n" + "\n".join(f"- {line}" for line in absent)
    return text.rstrip() + "\n"


def _totals(rows: list[Row], sides: list[str]) -> str:
    sums = totals(rows)
    keys = next(iter(sums.values()), {})
    return markdown_table([[key.replace("_", " "), *(str(sums[side][key]) for side in sides)] for key in keys], ["", *sides])


def _of_both_sides(rows: list[Row]) -> list[Row]:
    pairs = {name for name, found in _pairs(rows).items() if len(found) > 1}
    return [row for row in rows if (row["program"], row["mode"]) in pairs]


def _per_library(data: dict[str, Any], sides: list[str]) -> str:
    lines = []
    for library in LIBRARIES:
        sums = totals([row for row in data["rows"] if row["program"].startswith(library + "/")])
        if sums:
            cells = [
                f"{sums[side]['single_graph']} of {sums[side]['programs']}, {sums[side]['breaks']} breaks" for side in sides if side in sums
            ]
            lines.append([library, str(sums[sides[0]]["models"]), *cells])
    return markdown_table(lines, ["library", "models", *(f"{side}: single graphs" for side in sides)])


def _not_single(data: dict[str, Any], sides: list[str]) -> str:
    lines = []
    for (program, mode), rows in _pairs(data["rows"]).items():
        if any(not single(row) for row in rows.values()) and all(row["status"] != "eager" for row in rows.values()):
            lines.append([program, mode, *(_cell(rows.get(side)) for side in sides)])
    return markdown_table(lines, ["program", "mode", *sides])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["status"] in ("wrong", "crash"):
        return row["status"]
    return "-" if single(row) else f"{row['graphs']} graphs, {row['breaks']} breaks"


def _sides(data: dict[str, Any]) -> list[str]:
    return sorted({row["side"] for row in data["rows"]})


def _pairs(rows: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    pairs: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        pairs.setdefault((row["program"], row["mode"]), {})[row["side"]] = row
    return dict(sorted(pairs.items()))
