"""Documentation pages that are generated from tables: errors, flags, opcodes, operators. `python -m docs.pages docs` writes them.

A test compares the files with what this module says, so that the pages cannot lag behind the code.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from magneto.base.catalogue import ROWS, ErrorEntry
from magneto.base.flags import FLAGS
from magneto.base.text import markdown_table

_MADE = "<!-- Generated from {table} by `make docs`; edit the table, not this page. -->\n\n"
_KINDS = {
    "B": (
        "Graph breaks",
        "The construct is executed by CPython between two graphs; results are eager's. Under `fullgraph=True` it is an error.",
    ),
    "U": ("User errors", "A mistake in how magneto is called; raised as `UserError`."),
    "W": ("Warnings", "Said once each; the program goes on, in eager where need be."),
    "I": ("Internal errors", "Defects of magneto. With the flag `suppress_errors` (the default) the program goes on in eager."),
}


def errors_page() -> str:
    """docs/errors.md: every row of the catalogue."""
    parts = [_MADE.format(table="`magneto/base/catalogue.py`") + "# Messages\n"]
    for letter, (title, text) in _KINDS.items():
        parts.append(f"## {title}\n\n{text}\n")
        parts += [_error(row) for row in ROWS if row.id.startswith(letter)]
    return "\n".join(parts)


def _error(row: ErrorEntry) -> str:
    lines = [f"### {row.id}", "", f"`{row.template}`", ""]
    if row.explanation:
        lines += [row.explanation, ""]
    if row.hint:
        lines += [f"*Mend:* {row.hint}", ""]
    return "\n".join(lines)


def flags_page() -> str:
    """docs/flags.md: every row of the flag registry."""
    rows = [
        (f"`{flag.name}`", f"`{flag.env}`", flag.expected, f"`{flag.default!r}`", "yes" if flag.in_cache_key else "", flag.help)
        for flag in FLAGS
    ]
    return "\n".join(
        [
            _MADE.format(table="`magneto/base/flags.py`") + "# Flags\n",
            "`magneto.config.name = value`, `with magneto.config.patch(name=value):`, or the environment variable. An unknown name raises.",
            '"Key" says that compiled results depend on the flag, so that changing it makes other entries of the caches be used.\n',
            markdown_table(rows, ["flag", "environment", "type", "default", "key", "meaning"]),
            "",
        ]
    )


def opcodes_page() -> str | None:
    """docs/opcodes.md: what becomes of each bytecode instruction; None where the extension or torch is missing."""
    try:
        importlib.import_module("magneto.dynamo.machine.handlers")
        rows_of = importlib.import_module("magneto.dynamo.machine.opcode_table")
    except ImportError:
        return None
    rows = {name: (f"`{name}`", rows_of.EFFECTS.get(name, ""), "captured") for name in rows_of.HANDLERS}
    rows |= {name: (f"`{name}`", "", f"graph break: {reason}") for name, reason in rows_of.BREAKING.items()}
    rows |= {name: (f"`{name}`", "", reason) for name, reason in rows_of.UNSUPPORTED.items()}
    return "\n".join(
        [
            _MADE.format(table="`magneto/dynamo/machine/opcode_table.py`") + "# Bytecode instructions\n",
            "Of CPython 3.11, 3.12 and 3.13. The effect is `inputs -- outputs` on the value stack.\n",
            markdown_table([rows[name] for name in sorted(rows)], ["instruction", "effect", "what becomes of it"]),
            "",
        ]
    )


_BECOMES = {
    "decomposed": ("Decomposed", "The operation becomes primitives, which are fused and differentiated like any others."),
    "view": (
        "Views",
        "In a graph without aliases a view is arithmetic on indices; results that the caller sees are real views of their bases.",
    ),
    "library": ("Library calls", "The operation stays one call of PyTorch's own kernel."),
    "composite": ("Composite", "PyTorch writes the operation as others, and magneto sees these."),
    "outside": (
        "Not in the table",
        "What is no operation on strided tensors is left to PyTorch: the region breaks, or the operation stays a library call.",
    ),
}


def prims_page() -> str | None:
    """docs/prims.md: what becomes of each public operator; None where torch is missing or another version than the page is about."""
    try:
        operators = importlib.import_module("docs.operators")
        version = importlib.import_module("torch").__version__
    except ImportError:
        return None
    if not version.startswith("2.13"):
        return None
    rows = operators.public_operators()
    parts = [
        _MADE.format(table="`docs/operators.py` and `magneto/prims/decompositions/`") + "# Operators\n",
        f"The {len(rows)} functional overloads of PyTorch {version.partition('+')[0]}'s public operators, and what becomes of each. Complex numbers are always library calls. "
        '"Bits" says whether a decomposition gives the same bits as eager on the CPU, or how far the last digit may be off: tested over dtypes and layouts by `tests/prims/test_operators.py`.\n',
    ]
    if (text := _complete_run()) is not None:
        parts.append(text)
    for kind, (title, text) in _BECOMES.items():
        chosen = [row for row in rows if row.kind == kind]
        parts += [f"## {title} ({len(chosen)})\n", text + "\n", _operators_table(kind, chosen, operators.rounding_of), ""]
    return "\n".join(parts)


def _complete_run() -> str | None:
    """What `python -m tests.prims.exactness --record` has counted; None outside of the repository."""
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "prims.json"
    if not path.exists():
        return None
    slices: dict[str, dict[str, Any]] = json.loads(path.read_text())["slices"]
    rows = [(name, row["date"], row["commit"], *(str(row[key]) for key in _COUNTED), row.get("since", "")) for name, row in slices.items()]
    table = markdown_table(rows, ["dtype", "date", "commit", *_COUNTED, "since then"])
    return f"Runs over every operator and layout (`python -m tests.prims.exactness`; `--few`, sizes only: contiguous tensors of four sizes); dtypes that are not here have been sampled only:\n\n{table}"


_COUNTED = ("operators", "calls", "refused", "fallback", "problems")


def _operators_table(kind: str, rows: list[Any], rounding_of: Callable[[str], tuple[float, bool, str]]) -> str:
    """One line for each packet; those of one reason together where the reason is all there is to say."""
    packets: dict[str, list[Any]] = {}
    for row in rows:
        packets.setdefault(row.packet, []).append(row)
    if kind in ("decomposed", "view"):
        lines = []
        for packet, found in packets.items():
            units, _, why = rounding_of(packet)
            overloads = " ".join(row.name.partition(".")[2] for row in found)
            lines.append((f"`{packet}`", overloads, f"{units:g} units: {why}" if units else "the same", found[0].why))
        return markdown_table(lines, ["operator", "overloads", "bits", "notes"])
    reasons: dict[str, list[str]] = {}
    for packet, found in packets.items():
        reasons.setdefault(found[0].why, []).append(f"`{packet}`")
    return markdown_table([(why, " ".join(names)) for why, names in reasons.items()], ["why", "operators"])


PAGES: dict[str, Callable[[], str | None]] = {
    "errors.md": errors_page,
    "flags.md": flags_page,
    "opcodes.md": opcodes_page,
    "prims.md": prims_page,
}


def write(folder: Path) -> list[Path]:
    """Write the pages whose tables exist."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in PAGES.items():
        text = make()
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for path in write(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
