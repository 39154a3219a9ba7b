"""Text as people read it: suggestions for misspelt names, indentation, plain tables, and generated source that tracebacks can show."""

from __future__ import annotations

import difflib
import linecache
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

_SOURCES_KEPT = 4096
_sources: OrderedDict[str, str] = OrderedDict()
_sources_lock = threading.RLock()


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'inductor'?"``, or an empty string when nothing resembles `name`."""
    close = difflib.get_close_matches(str(name), sorted(str(choice) for choice in choices), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def indent(text: str, by: int | str = 4) -> str:
    """Every non-empty line of `text` moved right by `by` spaces, or prefixed by the string `by`."""
    prefix = by if isinstance(by, str) else " " * by
    return "\n".join(prefix + line if line else line for line in text.split("\n"))


def plural(n: int, noun: str, nouns: str | None = None) -> str:
    """``"1 graph"``, ``"3 graphs"``."""
    return f"{n} {noun if n == 1 else nouns or noun + 's'}"


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str] = ()) -> str:
    """A plain-text table: columns padded to their widest cell, numbers to the right, two blanks between columns."""
    rows = [list(row) for row in rows]
    numeric = [all(isinstance(value, (int, float)) or value is None for value in column) for column in zip(*rows, strict=False)]
    body = [[_cell(value) for value in row] for row in rows]
    lines = [list(map(str, headers))] if headers else []
    lines += body
    if not lines:
        return ""
    n_columns = max(map(len, lines))
    for line in lines:
        line.extend([""] * (n_columns - len(line)))
    widths = [max(len(line[i]) for line in lines) for i in range(n_columns)]
    right = [i < len(numeric) and numeric[i] for i in range(n_columns)]

    def render(line: Sequence[str]) -> str:
        cells = (cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in zip(line, widths, right, strict=True))
        return "  ".join(cells).rstrip()

    out = [render(line) for line in lines]
    if headers:
        out.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(out)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def markdown_table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> str:
    """A Markdown table; vertical bars inside cells are escaped."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "|".join("---" for _ in headers) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(value).replace("|", "\\|").replace("\n", " ") for value in row) + " |")
    return "\n".join(lines)


def register_source(name: str, text: str) -> str:
    """Make `text` visible to tracebacks, `inspect.getsource` and debuggers; returns the file name to compile it under.

    The same (name, text) gives the same file name; another text under a name that is taken gets a numbered one.
    """
    with _sources_lock:
        filename, n = f"<magneto {name}>", 1
        while _sources.get(filename, text) != text:
            n += 1
            filename = f"<magneto {name} #{n}>"
        _sources[filename] = text
        _sources.move_to_end(filename)
        # No modification time (None): linecache.checkcache leaves such entries alone.
        linecache.cache[filename] = (len(text), None, [line + "\n" for line in text.split("\n")], filename)
        while len(_sources) > _SOURCES_KEPT:
            oldest, _ = _sources.popitem(last=False)
            linecache.cache.pop(oldest, None)
    return filename


def compile_source(name: str, text: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute generated Python `text` in `namespace` (changed in place, and returned); its lines appear in tracebacks."""
    exec(compile(text, register_source(name, text), "exec", dont_inherit=True), namespace)
    return namespace
