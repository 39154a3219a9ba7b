"""Documentation pages that are generated from tables: errors, flags, opcodes. `python -m magneto.debug.pages docs` writes them.

A test compares the files with what this module says, so that the pages cannot lag behind the code.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

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


PAGES: dict[str, Callable[[], str | None]] = {"errors.md": errors_page, "flags.md": flags_page, "opcodes.md": opcodes_page}


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
