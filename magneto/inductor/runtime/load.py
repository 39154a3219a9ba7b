"""Shared libraries of kernels: loaded once per process, functions as addresses."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

_libraries: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


def load_library(path: Path) -> ctypes.CDLL:
    """dlopen, once per path. Libraries stay loaded: plans hold addresses into them. OSError if the file is no library for this machine."""
    name = str(path)
    with _lock:
        library = _libraries.get(name)
        if library is None:
            library = _libraries[name] = ctypes.CDLL(name)
        return library


def address_of(library: ctypes.CDLL, symbol: str) -> int:
    """The address of a function. AttributeError if there is none of that name."""
    address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    assert address is not None
    return address
