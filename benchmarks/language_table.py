"""What the language tests gave, as a page of the documents.

    python -m benchmarks.language_table KEPT_3.11 KEPT_3.12 ...     reads the directories of `benchmarks.language_tests --keep`

puts the modules that have run plain and traced to their end in the place of what benchmarks/results/language_tests.json says of them, and writes
docs/language_tests.md. Other modules and other Pythons stay as they are there. A module that has not run under nopython keeps the number of an earlier run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.language_tests import Comparison, report_of

ROOT = Path(__file__).resolve().parent.parent
_RUNS = ("plain", "again", "traced", "nopython")


def _records(file: Path) -> dict[str, dict[str, Any]] | None:
    """The verdicts of one run by test; None when it has not ended."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not any("finished" in row for row in rows):
        return None
    return {row.pop("test"): row for row in rows if "test" in row}


def read(kept: Path) -> dict[str, Any]:
    """The report of one Python."""
    found, without = [], []
    for module in sorted({file.name.split(".")[0] for file in kept.glob("*.jsonl")}):
        plain, again, traced, nopython = [_records(kept / f"{module}.{run}.jsonl") for run in _RUNS]
        if plain and again and traced:
            found.append(Comparison(module, plain, again, traced, nopython or {}))
            without += [] if nopython else [module]
    report = report_of(found)
    for module in without:
        report["modules"][module]["nopython"] = None
    return report


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new`, with the modules that only `old` has."""
    modules = {**old.get("modules", {}), **new["modules"]}
    for name, module in modules.items():
        before = old.get("modules", {}).get(name)
        if module["nopython"] is None and before is not None and before["passing"] == module["passing"]:
            module["nopython"] = before["nopython"]
    keys = ("tests", "compared", "same", "entered", "passing")
    total = {key: sum(module[key] for module in modules.values()) for key in keys}
    alone = [module for module in modules.values() if module["nopython"] is not None]
    total["nopython"], total["tried"] = sum(module["nopython"] for module in alone), sum(module["passing"] for module in alone)
    return {
        **new,
        "total": total,
        "same_verdict": round(total["same"] / max(total["compared"], 1), 5),
        "nopython_rate": round(total["nopython"] / max(total["tried"], 1), 4),
        "break_reasons": new["break_reasons"] or old.get("break_reasons", {}),
        "modules": dict(sorted(modules.items())),
    }


def page(reports: dict[str, dict[str, Any]]) -> str:
    lines = [
        "<!-- Generated from benchmarks/results/language_tests.json by `python -m benchmarks.language_table`. -->",
        "",
        "# CPython's own tests, traced",
        "",
        'Each test method of the installed Python under `optimize("eager")`: *same* is the number of tests with the verdict that they have in plain Python. *nopython*: of',
        "the tests that pass in plain Python, those that pass with `nopython=True` too, that is as one capture without a break. Tests whose two plain runs differ",
        "are not compared. The modules are those of the list in `benchmarks/language_tests.py` that have been run to their end on this Python, not the whole list;",
        "a `-` says that a module has not been run under nopython.",
        "",
    ]
    for version, report in reports.items():
        total = report["total"]
        lines += [
            f"## Python {version}",
            "",
            f"{total['same']} of {total['compared']} with the same verdict ({report['same_verdict']:.2%}); "
            f"nopython {total['nopython']} of {total.get('tried', total['passing'])} ({report['nopython_rate']:.1%}).",
            "",
            "| module | tests | same | passing | nopython |",
            "|---|---|---|---|---|",
        ]
        for name, module in report["modules"].items():
            alone = "-" if module["nopython"] is None else module["nopython"]
            lines.append(f"| {name} | {module['compared']} | {module['same']} | {module['passing']} | {alone} |")
        differing = [test for module in report["modules"].values() for test in module["differences"]]
        lines += ["", "Another verdict: " + (", ".join(f"`{test}`" for test in differing) or "none") + ".", ""]
    return "\n".join(lines)


def main(directories: list[str]) -> int:
    file = ROOT / "benchmarks/results/language_tests.json"
    reports = json.loads(file.read_text())
    for directory in directories:
        version = (Path(directory) / "python").read_text().strip()
        reports[version] = merge(reports.get(version, {}), {**read(Path(directory)), "python": version})
    file.write_text(json.dumps(reports, indent=1) + "\n")
    (ROOT / "docs/language_tests.md").write_text(page(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
