"""What the language tests gave, as a page of the documents.

    python -m benchmarks.language_table KEPT_3.11 KEPT_3.12 ...     reads the directories of `benchmarks.language_tests --keep`

writes benchmarks/results/language_tests.json and docs/language_tests.md. Only modules that have run in every mode count.
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
    found = []
    for module in sorted({file.name.split(".")[0] for file in kept.glob("*.jsonl")}):
        runs = [_records(kept / f"{module}.{run}.jsonl") for run in _RUNS]
        if all(run for run in runs):
            found.append(Comparison(module, *runs))  # type: ignore[arg-type]
    return report_of(found)


def page(reports: dict[str, dict[str, Any]]) -> str:
    lines = [
        "<!-- Generated from benchmarks/results/language_tests.json by `python -m benchmarks.language_table`. -->",
        "",
        "# CPython's own tests, traced",
        "",
        'Each test method of the installed Python under `optimize("eager")`: *same* is the number of tests with the verdict that they have in plain Python. *nopython*: of',
        "the tests that pass in plain Python, those that pass with `nopython=True` too, that is as one capture without a break. Tests whose two plain runs differ",
        "are not compared. The modules are those of the list in `benchmarks/language_tests.py` that have been run to their end on this Python, not the whole list.",
        "",
    ]
    for version, report in reports.items():
        total = report["total"]
        lines += [
            f"## Python {version}",
            "",
            f"{total['same']} of {total['compared']} with the same verdict ({report['same_verdict']:.2%}); "
            f"nopython {total['nopython']} of {total['passing']} ({report['nopython_rate']:.1%}).",
            "",
            "| module | tests | same | passing | nopython |",
            "|---|---|---|---|---|",
        ]
        for name, module in report["modules"].items():
            lines.append(f"| {name} | {module['compared']} | {module['same']} | {module['passing']} | {module['nopython']} |")
        differing = [test for module in report["modules"].values() for test in module["differences"]]
        lines += ["", "Another verdict: " + (", ".join(f"`{test}`" for test in differing) or "none") + ".", ""]
    return "\n".join(lines)


def main(directories: list[str]) -> int:
    reports = {}
    for directory in directories:
        version = (Path(directory) / "python").read_text().strip()
        reports[version] = {**read(Path(directory)), "python": version}
    (ROOT / "benchmarks/results/language_tests.json").write_text(json.dumps(reports, indent=1) + "\n")
    (ROOT / "docs/language_tests.md").write_text(page(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
