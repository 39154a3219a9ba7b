"""What is shown while it happens: the ladder MAGNETO_LOG=1..6, the kernels under MAGNETO_TRACE=1, the files under MAGNETO_DUMP=dir.

Levels: 1 breaks and recompiles, 2 graphs, 3 guards, 4 loops and fusion decisions, 5 kernels, 6 every pass. Text that is costly to make is
given as a function without arguments; it is called only when somebody looks.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from typing import IO

from magneto.base.errors import warn_once
from magneto.base.flags import config

Text = str | Callable[[], str]

BREAKS, GRAPHS, GUARDS, LOOPS, KERNELS, PASSES = 1, 2, 3, 4, 5, 6

_lock = threading.RLock()
_numbers: dict[str, int] = {}
stream: IO[str] | None = None
"""Where the ladder writes; None is the sys.stderr of the moment."""


def logging(level: int) -> bool:
    """Whether the ladder shows `level`."""
    return bool(config.log >= level)


def log(level: int, text: Text) -> None:
    """Show `text` at `level` of the ladder, each line marked."""
    if config.log >= level:
        _write(_made(text), f"[magneto {level}] ")


def trace_kernel(text: Text, name: str = "") -> None:
    """Show a generated kernel, unmarked so that it can be copied, under MAGNETO_TRACE=1 and from level 5 of the ladder."""
    if config.trace or config.log >= KERNELS:
        body = _made(text)
        _write(f"# ---- kernel {name} ----\n{body}" if name else body, "")


def dumping() -> bool:
    """Whether a dump directory is set."""
    return bool(config.dump)


def dump(name: str, suffix: str, text: Text) -> str | None:
    """Write the next numbered file (``0007_name.py``) of the dump directory; returns its path, or None when there is none.

    Python files are written so that each runs alone: the caller gives a complete program, imports included.
    """
    directory = config.dump
    if not directory:
        return None
    body = _made(text)
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_") or "unnamed"
    try:
        os.makedirs(directory, exist_ok=True)
        with _lock:
            number = _numbers.get(directory) or _first_number(directory)
            _numbers[directory] = number + 1
        path = os.path.join(directory, f"{number:04d}_{safe}{suffix}")
        with open(path, "w", encoding="utf-8") as file:
            file.write(body if body.endswith("\n") else body + "\n")
    except OSError as error:
        warn_once("W202", path=directory, error=error)
        return None
    return path


def _first_number(directory: str) -> int:
    """One more than what earlier processes left there."""
    taken = [int(match.group(1)) for entry in os.listdir(directory) if (match := re.match(r"(\d{4,})_", entry))]
    return max(taken, default=0) + 1


def _made(text: Text) -> str:
    return text if isinstance(text, str) else text()


def _write(text: str, mark: str) -> None:
    lines = "".join(f"{mark}{line}\n" for line in text.rstrip("\n").split("\n"))
    with _lock:
        out = stream or sys.stderr
        out.write(lines)
        out.flush()
